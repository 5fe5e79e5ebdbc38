// Attention of one key head of one row, in vectors of float32.

#pragma once

#include "abi.h"
#include "cells.h"
#include "functions.h"

#include <type_traits>

enum { STEP = 2 * LANES, MOST_SCORED = 6, MOST_HALVES = 12, MOST_SUMMED = 6, TILE = 128, CHUNK = 512 };
enum { WIDTH = LANES == 8 ? 2 : 4 };  // vectors of values that are summed at once; limited by registers

// Columns rounded up to a whole step. Rows of scores must not begin in the same set of a cache.
static inline int64_t padded(int64_t columns) {
  const int64_t whole = (columns + STEP - 1) / STEP * STEP;
  return whole % 1024 ? whole : whole + STEP;
}

static const float UNIT = 1099511627776.0f;  // 2^40

#if defined(FOREDRAFT_AVX2)
// The sum of weights between 0 and 1 as an integer in units of 2^-40, so that the order of additions does not matter.
struct WholeSum {
  __m256i sums = _mm256_setzero_si256();
  void add(__m128 units) {
    const __m256d whole = _mm256_round_pd(_mm256_cvtps_pd(units), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const __m256d first = _mm256_set1_pd(4503599627370496.0);  // 2^52: the low bits of a sum with it are an integer
    const __m256i bits = _mm256_castpd_si256(_mm256_add_pd(whole, first));
    sums = _mm256_add_epi64(sums, _mm256_sub_epi64(bits, _mm256_castpd_si256(first)));
  }
  void add(Vector weights) {
    const Vector units = _mm256_mul_ps(weights, all(UNIT));
    add(_mm256_castps256_ps128(units));
    add(_mm256_extractf128_ps(units, 1));
  }
  int64_t total() const {
    int64_t parts[4];
    _mm256_storeu_si256((__m256i*)parts, sums);
    return parts[0] + parts[1] + parts[2] + parts[3];
  }
};
#else
struct WholeSum {
  __m512i sums = _mm512_setzero_si512();
  void add(Vector weights) {
    const Vector units = _mm512_mul_ps(weights, all(UNIT));
    sums = _mm512_add_epi64(sums, _mm512_cvttps_epi64(_mm512_castps512_ps256(units)));
    sums = _mm512_add_epi64(sums, _mm512_cvttps_epi64(_mm512_extractf32x8_ps(units, 1)));
  }
  int64_t total() const { return _mm512_reduce_add_epi64(sums); }
};
#endif

// Keeps the scores of the first `count` columns where the mask is 0 (visible), and makes the others minus infinity.
template <typename T>
static inline Vector seen_only(Vector scores, const T* mask, int64_t count) {
  const Vector unseen = all(-__builtin_inff());
  if (count >= LANES) return mask ? where_zero(read(mask), scores, unseen) : scores;
  float is_hidden[LANES];
  T last[LANES] = {};
  if (mask && count > 0) memcpy(last, mask, (size_t)count * sizeof(T));
  write(is_hidden, read(last));
  for (int64_t lane = count > 0 ? count : 0; lane < LANES; ++lane) is_hidden[lane] = 1;
  return where_zero(read(is_hidden), scores, unseen);
}

// T: type of queries, masks and results; C: type of keys and values.
template <typename T, typename C = T>
struct Pair {
  const Attention* call;
  const T* query;
  const C *keys, *values;
  const T* mask;
  T* out;
  int64_t count, columns, stride;  // queries: group x nodes; columns; columns rounded up by `padded`
  int64_t width, value_width;      // sizes rounded up to whole vectors

  // Up to `most` nodes of a row, beginning with `node`.
  Pair(const Attention* call, const void* query, const void* keys, const void* values, const void* mask, void* out,
       int64_t index, int64_t node, int64_t most)
      : call(call), width(rounded_up(call->size, LANES)), value_width(rounded_up(call->value_size, LANES)) {
    const int64_t row = index / call->heads, head = index % call->heads, first = call->firsts[row] + node;
    this->query = (const T*)query + first * call->query_node + head * call->group * call->query_head;
    this->keys = (const C*)keys + row * call->key_row + head * call->key_head;
    this->values = (const C*)values + row * call->value_row + head * call->value_head;
    this->mask = mask ? (const T*)mask + row * call->mask_row + node * call->mask_node : nullptr;
    this->out = (T*)out + (first * call->heads * call->group + head * call->group) * call->value_size;
    count = node < call->counts[row] ? call->group * least(most, call->counts[row] - node) : 0;
    columns = call->columns[row];
    stride = padded(columns);
  }

  // Query i is head i % group of node i / group.
  void read_queries(float* queries) const {
    for (int64_t i = 0; i < count; ++i) {
      const T* from = query + i / call->group * call->query_node + i % call->group * call->query_head;
      for (int64_t at = 0; at < width; at += LANES)
        write(queries + i * width + at, read_first(from + at, call->size - at));
    }
  }

  // Reads keys of `LANES` columns and transposes them to input by input, with zeros after the last column.
  void read_keys(int64_t column, float* keys_by_input) const {
    const int64_t size = call->size;
    if constexpr (std::is_same<C, Scaled>() || std::is_same<C, Bfloat16>())
      if (size % (LANES * Cell<C>::PARTS) == 0) return read_parts(column, keys_by_input);
    for (int64_t at = 0; at < size; at += LANES) {
      Vector block[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i)
        block[i] = column + i < columns ? Cell<C>(keys, column + i, size).first(at) : zero();
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) write(keys_by_input + (at + i) * LANES, block[i]);
    }
  }

  // The same for narrow numbers: those that share the memory of a float are transposed together.
  void read_parts(int64_t column, float* keys_by_input) const {
    enum { PARTS = Cell<C>::PARTS };
    float factors[LANES] = {};
    for (int64_t i = 0; i < LANES && column + i < columns; ++i) factors[i] = Cell<C>(keys, column + i, call->size).factor();
    const Vector factor = read(factors);
    for (int64_t at = 0; at < call->size; at += PARTS * LANES) {
      Vector block[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i)
        block[i] = column + i < columns ? read((const float*)(Cell<C>(keys, column + i, call->size).from + at)) : zero();
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i)
        for (int part = 0; part < PARTS; ++part)
          write(keys_by_input + (at + i * PARTS + part) * LANES, Cell<C>::times(part_of(keys, block[i], part), factor));
    }
  }

  // Writes the products of a step of columns with one query as scores.
  void write_scores(int64_t index, int64_t column, Vector low, Vector high, float* scores) const {
    const T* seen = mask ? mask + index / call->group * call->mask_node + column : nullptr;
    const int64_t here = columns - column, rest = here > LANES ? least(LANES, here - LANES) : 0;
    float* to = scores + index * stride + column;
    const Vector zeros = zero(), scale = all(call->scale);
    write(to, seen_only(add_product(low, scale, zeros), seen, least(LANES, here)));
    write(to + LANES, seen_only(add_product(high, scale, zeros), seen ? seen + (rest ? LANES : 0) : nullptr, rest));
  }

  template <int COUNT>
  void score_some(int64_t first, int64_t column, const float* queries, const float* left, const float* right,
                  float* scores) const {
    Vector low[COUNT], high[COUNT];
    for (int i = 0; i < COUNT; ++i) low[i] = high[i] = zero();
    const float* from = queries + first * width;
    for (int64_t at = 0; at < call->size; ++at) {
      const Vector one = read(left + at * LANES), two = read(right + at * LANES);
#pragma GCC unroll 6
      for (int i = 0; i < COUNT; ++i) {
        const Vector value = all(from[i * width + at]);
        low[i] = add_product(value, one, low[i]);
        high[i] = add_product(value, two, high[i]);
      }
    }
    for (int i = 0; i < COUNT; ++i) write_scores(first + i, column, low[i], high[i], scores);
  }

  template <int COUNT, typename Work>
  static void score_rest(const Work& work, int64_t first, int64_t column, const float* queries, const float* left,
                         const float* right, float* scores) {
    if (work.count - first >= COUNT)
      work.template score_some<COUNT>(first, column, queries, left, right, scores);
    else if constexpr (COUNT > 1)
      score_rest<COUNT - 1>(work, first, column, queries, left, right, scores);
  }

  // Computes the scores of columns [from, to), both multiples of a step or the end.
  template <int MOST, typename Work>
  static void score_by(const Work& work, int64_t from, int64_t to, const float* queries, float* by_input,
                       float* scores) {
    const int64_t row = Cell<C>::numbers(work.call->size), bytes = STEP * row * (int64_t)sizeof(C);
    float *left = by_input, *right = by_input + LANES * work.width;
    for (int64_t column = from; column < to; column += STEP) {
      if (column + STEP < work.columns)
        for (int64_t byte = 0; byte < bytes; byte += 64)
          _mm_prefetch((const char*)(work.keys + (column + STEP) * row) + byte, _MM_HINT_T0);
      work.read_keys(column, left);
      work.read_keys(column + LANES, right);
      for (int64_t first = 0; first < work.count; first += MOST)
        score_rest<MOST>(work, first, column, queries, left, right, scores);
    }
  }
  void score(int64_t from, int64_t to, const float* queries, float* by_input, float* scores) const {
    score_by<MOST_SCORED>(*this, from, to, queries, by_input, scores);
  }

  // Turns the scores of one query into weights between 0 and 1 and returns their sum.
  float weigh(int64_t index, float* all_scores, const char* fetched = nullptr) const {
    float* scores = all_scores + index * stride;
    const int64_t end = (columns + STEP - 1) / STEP * STEP;  // columns after the last one have the score of hidden ones
    Vector most = all(-__builtin_inff());
    for (int64_t column = 0; column < end; column += LANES) most = larger(most, read(scores + column));
    const Vector shift = all(-largest(most)), one = all(1.0f);
    WholeSum sum;
    for (int64_t column = 0; column < end; column += LANES) {
      const Vector weights = exponential(add_product(read(scores + column), one, shift));
      write(scores + column, weights);
      sum.add(weights);
      if (fetched) _mm_prefetch(fetched + column * (64 / LANES), _MM_HINT_T1);
    }
    return (float)((double)sum.total() / UNIT);
  }

  template <int COUNT, int VECTORS>
  void sum_some(int64_t first, int64_t at, int64_t from, int64_t to, const float* weights, float* sums) const {
    Vector sum[COUNT][VECTORS];
    for (int i = 0; i < COUNT; ++i)
      for (int j = 0; j < VECTORS; ++j) sum[i][j] = read(sums + (first + i) * value_width + at + j * LANES);
    for (int64_t column = from; column < to; ++column) {
      Vector value[VECTORS];
      const Cell<C> cell(values, column, call->value_size);
      for (int j = 0; j < VECTORS; ++j) value[j] = cell.whole(at + j * LANES);
#pragma GCC unroll 6
      for (int i = 0; i < COUNT; ++i) {
        const Vector weight = all(weights[(first + i) * stride + column]);
        for (int j = 0; j < VECTORS; ++j) sum[i][j] = add_product(weight, value[j], sum[i][j]);
      }
    }
    for (int i = 0; i < COUNT; ++i)
      for (int j = 0; j < VECTORS; ++j) write(sums + (first + i) * value_width + at + j * LANES, sum[i][j]);
  }

  // Adds the weighted values of columns [from, columns) to the sums of queries [begin, end).
  template <int VECTORS>
  void add_values(int64_t begin, int64_t end, int64_t at, int64_t from, const float* weights, float* sums) const {
    for (; from < columns; from += TILE) {
      const int64_t to = least(columns, from + TILE);
      int64_t first = begin;
      for (; first + MOST_SUMMED <= end; first += MOST_SUMMED)
        sum_some<MOST_SUMMED, VECTORS>(first, at, from, to, weights, sums);
      switch (end - first) {
        case 5: sum_some<5, VECTORS>(first, at, from, to, weights, sums); break;
        case 4: sum_some<4, VECTORS>(first, at, from, to, weights, sums); break;
        case 3: sum_some<3, VECTORS>(first, at, from, to, weights, sums); break;
        case 2: sum_some<2, VECTORS>(first, at, from, to, weights, sums); break;
        case 1: sum_some<1, VECTORS>(first, at, from, to, weights, sums);
      }
    }
  }

  template <int VECTORS>
  void sum_values(int64_t at, const float* weights, float* sums) const {
    for (int64_t i = 0; i < count; ++i)
      for (int j = 0; j < VECTORS; ++j) write(sums + i * value_width + at + j * LANES, zero());
    add_values<VECTORS>(0, count, at, 0, weights, sums);
  }

  // Adds one vector of values of columns [from, columns) to a query's sums, skipping columns of weight zero, since zero
  // times infinity is NaN. Values may end within the vector.
  void add_with_care(int64_t index, int64_t at, int64_t from, const float* weights, float* sums) const {
    Vector sum = read(sums + index * value_width + at);
    for (int64_t column = from; column < columns; ++column)
      if (const float weight = weights[index * stride + column]; weight != 0)
        sum = add_product(all(weight), Cell<C>(values, column, call->value_size).first(at), sum);
    write(sums + index * value_width + at, sum);
  }

  static bool is_finite(Vector sums) { return !differ(add_product(sums, zero(), zero()), zero()); }

  // Repeats sums that are not finite without hidden columns, whose values may be infinite or NaN.
  void mend(int64_t at, int64_t places, const float* weights, float* sums) const {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t j = at; j < at + places; j += LANES) {
        const bool ends = j + LANES > call->value_size;
        if (!ends && is_finite(read(sums + i * value_width + j))) continue;
        write(sums + i * value_width + j, zero());
        add_with_care(i, j, 0, weights, sums);
      }
  }

  void write_out(int64_t at, int64_t places, const float* totals, const float* sums) const {
    for (int64_t i = 0; i < count; ++i) {
      T* to = out + i / call->group * call->heads * call->group * call->value_size + i % call->group * call->value_size + at;
      for (int64_t j = 0; j < places; j += LANES)
        write_first(to + j, read(sums + i * value_width + at + j) / all(totals[i]), places - j);
    }
  }

  // Sums the weighted values from place `at` on, at most `most` places, and writes the results.
  void finish(int64_t at, int64_t most, const float* weights, const float* totals, float* sums) const {
    const int64_t places = least(most, call->value_size - at);
    switch (places / LANES) {
      case 4: sum_values<4>(at, weights, sums); break;
      case 3: sum_values<3>(at, weights, sums); break;
      case 2: sum_values<2>(at, weights, sums); break;
      case 1: sum_values<1>(at, weights, sums);
    }
    mend(at, places, weights, sums);
    write_out(at, places, totals, sums);
  }
};

#if defined(FOREDRAFT_AVX512_BF16)

// The same for bfloat16, with scores as sums of products of pairs, which are read without conversion.
struct Halves : Pair<Bfloat16> {
  using Pair::Pair;

  static bool fits(const Attention* call) {
    return call->kind == BFLOAT16 && call->cache_kind == BFLOAT16 && call->size % STEP == 0;
  }

  void read_queries(float* queries) const {
    const int64_t size = call->size;
    for (int64_t i = 0; i < count; ++i)
      memcpy(queries + i * size / 2, query + i / call->group * call->query_node + i % call->group * call->query_head,
             (size_t)size * sizeof(Bfloat16));
  }

  // Reads keys of `LANES` columns and transposes them to pair by pair, with zeros after the last column.
  void read_keys(int64_t column, float* keys_by_pair) const {
    for (int64_t at = 0; at < call->size / 2; at += LANES) {
      Vector block[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i)
        block[i] = column + i < columns ? read((const float*)(keys + (column + i) * call->size) + at) : zero();
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) write(keys_by_pair + (at + i) * LANES, block[i]);
    }
  }

  template <int COUNT>
  void score_some(int64_t first, int64_t column, const float* queries, const float* left, const float* right,
                  float* scores) const {
    const int64_t pairs = call->size / 2;
    Vector low[COUNT], high[COUNT];
    for (int i = 0; i < COUNT; ++i) low[i] = high[i] = zero();
    const float* from = queries + first * pairs;
    for (int64_t at = 0; at < pairs; ++at) {
      const __m512bh one = (__m512bh)read(left + at * LANES), two = (__m512bh)read(right + at * LANES);
#pragma GCC unroll 12
      for (int i = 0; i < COUNT; ++i) {
        const __m512bh value = (__m512bh)all(from[i * pairs + at]);
        low[i] = _mm512_dpbf16_ps(low[i], one, value);
        high[i] = _mm512_dpbf16_ps(high[i], two, value);
      }
    }
    for (int i = 0; i < COUNT; ++i) write_scores(first + i, column, low[i], high[i], scores);
  }

  void score(int64_t from, int64_t to, const float* queries, float* by_pair, float* scores) const {
    score_by<MOST_HALVES>(*this, from, to, queries, by_pair, scores);
  }
};

#endif
