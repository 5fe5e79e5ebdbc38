// Attention of the few nodes of a step over ragged rows of a cache, read once where they lie.
//
// A node's result does not depend on the nodes, rows, columns or threads beside it, nor on where in the cache the
// columns that it sees lie, as long as they keep their order: the largest score is exact, weights are added up as whole
// numbers, and values one column after another. So a node of a draft has the bits of the same token decoded plainly.

#include "vectors.h"

struct Attention {
  int64_t rows, heads, group;  // heads of keys, and heads of queries that share one
  int64_t size, value_size;    // multiples of the lanes
  int64_t kind;                // of everything in memory: 1 float32, 2 bfloat16, 3 float16
  int64_t query_node, query_head, key_row, key_head, value_row, value_head, mask_row, mask_node;  // strides
  const int64_t* counts;       // nodes of every row
  const int64_t* firsts;       // where they begin in the list
  const int64_t* columns;      // that every row attends to at most
  float scale;
};

enum { STEP = 2 * LANES, MOST_SCORED = 4, MOST_SUMMED = 6, TILE = 128, CHUNK = 512 };
enum { WIDTH = LANES == 8 ? 2 : 4 };  // vectors of values that are summed at once, as registers allow

// Columns up to a whole step; rows of scores that begin in the same set of a cache are kept apart.
static inline int64_t padded(int64_t columns) {
  const int64_t whole = (columns + STEP - 1) / STEP * STEP;
  return whole % 1024 ? whole : whole + STEP;
}

static const float UNIT = 1099511627776.0f;  // 2^40
static const float FACTORS[6] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};  // of a series for e^x

// ---- vectors --------------------------------------------------------------------------------------------------------

#if defined(FORETOKEN_AVX2)

static inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }

static inline float largest(Vector values) {
  float all_of[LANES], most;
  write(all_of, values);
  most = all_of[0];
  for (int lane = 1; lane < LANES; ++lane) most = all_of[lane] > most ? all_of[lane] : most;
  return most;
}

// e^x for x <= 0, and 0 below the smallest number.
static inline Vector exponential(Vector x) {
  const Vector tiny = _mm256_cmp_ps(x, all(-87.0f), _CMP_LT_OQ);
  const Vector n = _mm256_round_ps(_mm256_mul_ps(x, all(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vector r = add_product(n, all(-1.42860677e-6f), add_product(n, all(-0.693145752f), x));
  Vector y = all(1.0f / 720);
  for (int i = 0; i < 6; ++i) y = add_product(y, r, all(FACTORS[i]));
  const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_andnot_ps(tiny, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), power)));
}

static inline Vector where_zero(Vector test, Vector values, Vector others) {
  return _mm256_blendv_ps(others, values, _mm256_cmp_ps(test, zero(), _CMP_EQ_OQ));
}

static inline void transpose(Vector* r) {
  Vector t[8], s[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    s[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    s[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    s[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    s[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
  }
}

// The sum of weights between 0 and 1 in units of 2^-40, in which any order gives the same.
static inline int64_t whole_sum(const float* weights, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += (int64_t)(weights[i] * UNIT);
  return sum;
}

#else

static inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
static inline float largest(Vector values) { return _mm512_reduce_max_ps(values); }

static inline Vector exponential(Vector x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, all(-87.0f), _CMP_NLT_UQ);
  const Vector n = _mm512_roundscale_ps(_mm512_mul_ps(x, all(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const Vector r = add_product(n, all(-1.42860677e-6f), add_product(n, all(-0.693145752f), x));
  Vector y = all(1.0f / 720);
  for (int i = 0; i < 6; ++i) y = add_product(y, r, all(FACTORS[i]));
  const __m512i power = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
  return _mm512_maskz_mov_ps(normal, _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), power)));
}

static inline Vector where_zero(Vector test, Vector values, Vector others) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(test, zero(), _CMP_EQ_OQ), others, values);
}

static inline void transpose(Vector* r) {
  Vector t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 16; i += 8)
    for (int j = i; j < i + 4; ++j) {
      t[j] = _mm512_shuffle_f32x4(r[j], r[j + 4], 0x88);
      t[j + 4] = _mm512_shuffle_f32x4(r[j], r[j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
  }
}

static inline int64_t whole_sum(const float* weights, int64_t count) {
  __m512i sums = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 8)
    sums = _mm512_add_epi64(
        sums, _mm512_cvttps_epi64(_mm256_mul_ps(_mm256_loadu_ps(weights + i), _mm256_set1_ps(UNIT))));
  return _mm512_reduce_add_epi64(sums);
}

#endif

static inline void store(float* to, float value) { *to = value; }
static inline void store(Float16* to, float value) { to->bits = (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
static inline void store(Bfloat16* to, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  to->bits = value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Scores of the first `count` columns that are seen, which is where the mask is 0, and minus infinity for the others.
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

// ---- one head of one row --------------------------------------------------------------------------------------------

template <typename T>
struct Pair {
  const Attention* call;
  const T *query, *keys, *values;
  const T* mask;
  T* out;
  int64_t count, columns, stride;  // queries: group x nodes; columns, also up to a whole step

  Pair(const Attention* call, const void* query, const void* keys, const void* values, const void* mask, void* out,
       int64_t index)
      : call(call) {
    const int64_t row = index / call->heads, head = index % call->heads, first = call->firsts[row];
    this->query = (const T*)query + first * call->query_node + head * call->group * call->query_head;
    this->keys = (const T*)keys + row * call->key_row + head * call->key_head;
    this->values = (const T*)values + row * call->value_row + head * call->value_head;
    this->mask = mask ? (const T*)mask + row * call->mask_row : nullptr;
    this->out = (T*)out + (first * call->heads * call->group + head * call->group) * call->value_size;
    count = call->group * call->counts[row];
    columns = call->columns[row];
    stride = padded(columns);
  }

  // Query i is head i % group of node i / group.
  void read_queries(float* queries) const {
    for (int64_t i = 0; i < count; ++i) {
      const T* from = query + i / call->group * call->query_node + i % call->group * call->query_head;
      for (int64_t at = 0; at < call->size; at += LANES) write(queries + i * call->size + at, read(from + at));
    }
  }

  // Keys of `LANES` columns, laid out input by input; zeros behind the last column.
  void read_keys(int64_t column, float* keys_by_input) const {
    const int64_t size = call->size;
    for (int64_t at = 0; at < size; at += LANES) {
      Vector block[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) block[i] = column + i < columns ? read(keys + (column + i) * size + at) : zero();
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; ++i) write(keys_by_input + (at + i) * LANES, block[i]);
    }
  }

  template <int COUNT>
  void score_some(int64_t first, int64_t column, const float* queries, const float* left, const float* right,
                  float* scores) const {
    Vector low[COUNT], high[COUNT];
    for (int i = 0; i < COUNT; ++i) low[i] = high[i] = zero();
    const float* from = queries + first * call->size;
    for (int64_t at = 0; at < call->size; ++at) {
      const Vector one = read(left + at * LANES), two = read(right + at * LANES);
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; ++i) {
        const Vector value = all(from[i * call->size + at]);
        low[i] = add_product(value, one, low[i]);
        high[i] = add_product(value, two, high[i]);
      }
    }
    for (int i = 0; i < COUNT; ++i) {
      const T* seen = mask ? mask + (first + i) / call->group * call->mask_node + column : nullptr;
      const int64_t here = columns - column;
      float* to = scores + (first + i) * stride + column;
      const Vector zeros = zero(), scale = all(call->scale);
      write(to, seen_only(add_product(low[i], scale, zeros), seen, least(LANES, here)));
      const int64_t rest = here > LANES ? least(LANES, here - LANES) : 0;
      write(to + LANES, seen_only(add_product(high[i], scale, zeros), seen ? seen + (rest ? LANES : 0) : nullptr, rest));
    }
  }

  // Scores of columns [from, to), both whole steps or the end.
  void score(int64_t from, int64_t to, const float* queries, float* by_input, float* scores) const {
    float *left = by_input, *right = by_input + LANES * call->size;
    for (int64_t column = from; column < to; column += STEP) {
      if (column + STEP < columns)
        for (int64_t byte = 0; byte < (int64_t)(STEP * call->size * sizeof(T)); byte += 64)
          _mm_prefetch((const char*)(keys + (column + STEP) * call->size) + byte, _MM_HINT_T0);
      read_keys(column, left);
      read_keys(column + LANES, right);
      int64_t first = 0;
      for (; first + MOST_SCORED <= count; first += MOST_SCORED)
        score_some<MOST_SCORED>(first, column, queries, left, right, scores);
      switch (count - first) {
        case 3: score_some<3>(first, column, queries, left, right, scores); break;
        case 2: score_some<2>(first, column, queries, left, right, scores); break;
        case 1: score_some<1>(first, column, queries, left, right, scores);
      }
    }
  }

  // Scores of one query to weights between 0 and 1. Returns: their sum.
  float weigh(float* scores) const {
    const int64_t end = (columns + STEP - 1) / STEP * STEP;  // columns behind the last one were scored, as unseen
    Vector most = all(-__builtin_inff());
    for (int64_t column = 0; column < end; column += LANES) most = larger(most, read(scores + column));
    const Vector shift = all(-largest(most)), one = all(1.0f);
    for (int64_t column = 0; column < end; column += LANES)
      write(scores + column, exponential(add_product(read(scores + column), one, shift)));
    return (float)((double)whole_sum(scores, end) / UNIT);
  }

  template <int COUNT, int VECTORS>
  void sum_some(int64_t first, int64_t at, int64_t from, int64_t to, const float* weights, float* sums) const {
    Vector sum[COUNT][VECTORS];
    for (int i = 0; i < COUNT; ++i)
      for (int j = 0; j < VECTORS; ++j) sum[i][j] = read(sums + (first + i) * call->value_size + at + j * LANES);
    for (int64_t column = from; column < to; ++column) {
      Vector value[VECTORS];
      for (int j = 0; j < VECTORS; ++j) value[j] = read(values + column * call->value_size + at + j * LANES);
#pragma GCC unroll 6
      for (int i = 0; i < COUNT; ++i) {
        const Vector weight = all(weights[(first + i) * stride + column]);
        for (int j = 0; j < VECTORS; ++j) sum[i][j] = add_product(weight, value[j], sum[i][j]);
      }
    }
    for (int i = 0; i < COUNT; ++i)
      for (int j = 0; j < VECTORS; ++j) write(sums + (first + i) * call->value_size + at + j * LANES, sum[i][j]);
  }

  template <int VECTORS>
  void sum_values(int64_t at, const float* weights, float* sums) const {
    for (int64_t i = 0; i < count; ++i)
      for (int j = 0; j < VECTORS; ++j) write(sums + i * call->value_size + at + j * LANES, zero());
    for (int64_t from = 0; from < columns; from += TILE) {
      const int64_t to = least(columns, from + TILE);
      int64_t first = 0;
      for (; first + MOST_SUMMED <= count; first += MOST_SUMMED)
        sum_some<MOST_SUMMED, VECTORS>(first, at, from, to, weights, sums);
      switch (count - first) {
        case 5: sum_some<5, VECTORS>(first, at, from, to, weights, sums); break;
        case 4: sum_some<4, VECTORS>(first, at, from, to, weights, sums); break;
        case 3: sum_some<3, VECTORS>(first, at, from, to, weights, sums); break;
        case 2: sum_some<2, VECTORS>(first, at, from, to, weights, sums); break;
        case 1: sum_some<1, VECTORS>(first, at, from, to, weights, sums);
      }
    }
  }

  // Sums of values under the weights, from place `at` of a value on, `most` of them at most; written out.
  void finish(int64_t at, int64_t most, const float* weights, const float* totals, float* sums) const {
    const int64_t places = least(most, call->value_size - at);
    switch (places / LANES) {
      case 4: sum_values<4>(at, weights, sums); break;
      case 3: sum_values<3>(at, weights, sums); break;
      case 2: sum_values<2>(at, weights, sums); break;
      default: sum_values<1>(at, weights, sums);
    }
    for (int64_t i = 0; i < count; ++i) {
      T* to = out + i / call->group * call->heads * call->group * call->value_size + i % call->group * call->value_size + at;
      for (int64_t j = 0; j < places; ++j) store(to + j, sums[i * call->value_size + at + j] / totals[i]);
    }
  }
};

// ---- all of them ----------------------------------------------------------------------------------------------------

static inline int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

struct Room {  // floats of scratch that one head of one row needs, and one thread
  int64_t queries = 0, scores = 0, totals = 0, sums = 0, keys = 0;
  Room(const Attention* call) {
    for (int64_t row = 0; row < call->rows; ++row) {
      const int64_t count = call->group * call->counts[row];
      queries = queries > count * call->size ? queries : count * call->size;
      sums = sums > count * call->value_size ? sums : count * call->value_size;
      totals = totals > count ? totals : count;
      scores = scores > count * padded(call->columns[row]) ? scores : count * padded(call->columns[row]);
    }
    queries = whole_lines(queries), sums = whole_lines(sums), totals = whole_lines(totals), scores = whole_lines(scores);
    keys = STEP * call->size;
  }
  int64_t of_pair() const { return scores + totals + sums; }
  int64_t of_thread() const { return queries + keys; }
};

// Few heads and long rows are shared out within a head, else every head is a thread's.
static inline bool is_split(const Attention* call, int threads) {
  return threads > 1 && call->rows * call->heads < 4 * threads;
}

// Floats of scratch that a call needs.
extern "C" int64_t foretoken_attention_scratch(const Attention* call, int threads) {
  const Room room(call);
  const int64_t pairs = is_split(call, threads) ? call->rows * call->heads : threads;
  return pairs * room.of_pair() + threads * room.of_thread();
}

template <typename T>
static void attend(const Attention* call, const void* query, const void* keys, const void* values, const void* mask,
                   void* out, float* scratch, int threads) {
  const Room room(call);
  const int64_t pairs = call->rows * call->heads;
  if (!is_split(call, threads)) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t index = 0; index < pairs; ++index) {
      const Pair<T> pair(call, query, keys, values, mask, out, index);
      float* queries = scratch + omp_get_thread_num() * (room.of_pair() + room.of_thread());
      float *by_input = queries + room.queries, *scores = by_input + room.keys, *totals = scores + room.scores;
      pair.read_queries(queries);
      pair.score(0, pair.columns, queries, by_input, scores);
      for (int64_t i = 0; i < pair.count; ++i) totals[i] = pair.weigh(scores + i * pair.stride);
      for (int64_t at = 0; at < call->value_size; at += WIDTH * LANES)
        pair.finish(at, WIDTH * LANES, scores, totals, totals + room.totals);
    }
    return;
  }
  int64_t longest = 0, most = 0;
  for (int64_t row = 0; row < call->rows; ++row) {
    longest = longest > call->columns[row] ? longest : call->columns[row];
    most = most > call->counts[row] ? most : call->counts[row];
  }
  const int64_t chunks = (longest + CHUNK - 1) / CHUNK, parts = (call->value_size + STEP - 1) / STEP;
  most *= call->group;
#pragma omp parallel num_threads(threads)
  {
    float* queries = scratch + pairs * room.of_pair() + omp_get_thread_num() * room.of_thread();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < pairs * chunks; ++task) {
      const Pair<T> pair(call, query, keys, values, mask, out, task / chunks);
      const int64_t from = task % chunks * CHUNK;
      if (from >= pair.columns) continue;
      pair.read_queries(queries);
      pair.score(from, least(pair.columns, from + CHUNK), queries, queries + room.queries,
                 scratch + task / chunks * room.of_pair());
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < pairs * most; ++task) {
      const Pair<T> pair(call, query, keys, values, mask, out, task / most);
      float* scores = scratch + task / most * room.of_pair();
      if (task % most < pair.count) scores[room.scores + task % most] = pair.weigh(scores + task % most * pair.stride);
    }
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < pairs * parts; ++task) {
      const Pair<T> pair(call, query, keys, values, mask, out, task / parts);
      float* scores = scratch + task / parts * room.of_pair();
      pair.finish(task % parts * STEP, STEP, scores, scores + room.scores, scores + room.scores + room.totals);
    }
  }
}

// Query (S, H_q, D) by strides, keys and values (R, H_kv, T, D) by strides, mask (R or 1, N, T) of the same kind,
// 0 where a column is seen, or null; out (S, H_q, D_v), contiguous.
extern "C" void foretoken_attention(const Attention* call, const void* query, const void* keys, const void* values,
                                    const void* mask, void* out, float* scratch, int threads) {
  if (threads < 1) threads = 1;
  switch (call->kind) {
    case 1: return attend<float>(call, query, keys, values, mask, out, scratch, threads);
    case 2: return attend<Bfloat16>(call, query, keys, values, mask, out, scratch, threads);
    case 3: return attend<Float16>(call, query, keys, values, mask, out, scratch, threads);
  }
}

extern "C" int foretoken_lanes() { return LANES; }
