// Attention of one head of one row in bfloat16 with AMX tiles. Keys and values are read once for 16 queries.
//
// Scores are products of tiles with one sum per column, wherever the column is. Values of committed columns are summed
// by tiles, in blocks of 32 columns at fixed places; later values are added one column after another. The boundary
// depends only on the columns that a node sees. It is the last end of a whole block that is at least MOST_LOOSE columns
// before the last visible column, and no draft of up to MOST_LOOSE nodes reaches it. A node therefore has the bits of
// the same token in plain decoding, wherever its ancestors in the draft are. Each weight is split into two bfloat16
// numbers, which keeps 16 bits of it.

#pragma once

#include "decode_pairs.h"

#if defined(FOREDRAFT_AMX)

enum { BLOCK_COLUMNS = 32, BLOCKS = 4, SIDE = 16, MOST_LOOSE = 64, MOST_FETCHED = 1 << 20 };

struct Tiled : Pair<Bfloat16> {
  using Pair::Pair;

  static bool fits(const Attention* call) {
    const bool is_half = call->kind == BFLOAT16 && call->cache_kind == BFLOAT16;
    return is_half && call->size % BLOCK_COLUMNS == 0 && call->value_size % BLOCK_COLUMNS == 0;
  }

  static void configure(int64_t rows) {
    const uint8_t few = (uint8_t)rows;
    configure_tiles({few, few, few, few, few, few, SIDE, SIDE});
  }

  // Arranges queries as tiles of 16 queries and 32 inputs with pairs of inputs side by side; missing queries are zeros.
  void read_queries(float* queries) const {
    for (int64_t first = 0; first < count; first += SIDE)
      for (int64_t at = 0; at < call->size; at += 32, queries += SIDE * SIDE) {
        Vector block[SIDE];
        for (int64_t i = 0; i < SIDE; ++i) {
          const int64_t index = first + i;
          const Bfloat16* from = query + index / call->group * call->query_node + index % call->group * call->query_head;
          block[i] = index < count ? read((const float*)(from + at)) : zero();
        }
        transpose(block);
        for (int i = 0; i < SIDE; ++i) write(queries + i * SIDE, block[i]);
      }
  }

  // Writes the products of 16 columns, from `column` on, with up to 16 queries, as scores.
  void write_scores(int64_t first, int64_t column, const float* products, float* scores) const {
    const int64_t here = least(SIDE, count - first), left = columns - column;
    const Vector scale = all(call->scale), zeros = zero();
    Vector block[SIDE];
    if (here > 4) {
      for (int i = 0; i < SIDE; ++i) block[i] = read(products + i * SIDE);
      transpose(block);
    } else {
      const __m512i every = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
      for (int64_t i = 0; i < here; ++i) block[i] = _mm512_i32gather_ps(every, products + i, 4);
    }
    for (int64_t i = 0; i < here; ++i) {
      const Bfloat16* seen = mask ? mask + (first + i) / call->group * call->mask_node + column : nullptr;
      write(scores + (first + i) * stride + column,
            seen_only(add_product(block[i], scale, zeros), seen, left < SIDE ? left : (int64_t)SIDE));
    }
  }

  // Computes the scores of columns [from, to), both multiples of a block or the end.
  void score(int64_t from, int64_t to, const float* queries, float* room, float* scores) const {
    const int64_t size = call->size, bytes = size * 2;
    float* products = room + SIDE * size;
    configure(SIDE);
    for (int64_t column = from; column < to; column += BLOCK_COLUMNS) {
      const Bfloat16* here = keys + column * size;
      if (column + BLOCK_COLUMNS > columns) {
        memset(room, 0, (size_t)(BLOCK_COLUMNS * bytes));
        memcpy(room, here, (size_t)((columns - column) * bytes));
        here = (const Bfloat16*)room;
      } else {
        for (int64_t byte = 0; byte < BLOCK_COLUMNS * bytes; byte += 64)
          _mm_prefetch((const char*)(here + 2 * BLOCK_COLUMNS * size) + byte, _MM_HINT_T0);
      }
      const float* tile = queries;
      for (int64_t first = 0; first < count; first += SIDE) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t at = 0; at < size; at += 32, tile += SIDE * SIDE) {
          _tile_loadd(6, tile, 64);
          _tile_loadd(2, here + at, bytes);
          _tile_loadd(3, here + SIDE * size + at, bytes);
          _tile_dpbf16ps(0, 2, 6);
          _tile_dpbf16ps(1, 3, 6);
        }
        _tile_stored(0, products, 64);
        _tile_stored(1, products + SIDE * SIDE, 64);
        write_scores(first, column, products, scores);
        write_scores(first, column + SIDE, products + SIDE * SIDE, scores);
      }
    }
    _tile_release();
  }

  // Computes weights, which needs no memory bandwidth, and prefetches the first values, a share with every query.
  float weigh(int64_t index, float* scores) const {
    const int64_t lines = columns / LANES, all_lines = columns * call->value_size / 32;
    const bool is_there = (index + 1) * lines <= all_lines && (index + 1) * lines * 64 <= MOST_FETCHED;
    return Pair::weigh(index, scores, is_there ? (const char*)values + index * lines * 64 : nullptr);
  }

  // Finds the first column that a node sees, and the end of the columns that are summed by tiles.
  void reach(int64_t node, int64_t& begin, int64_t& end) const {
    int64_t seen = columns;
    begin = 0;
    if (mask) {
      const Bfloat16* from = mask + node * call->mask_node;
      const __m512i but_the_sign = _mm512_set1_epi16(0x7fff);
      seen = 0, begin = columns;
      for (int64_t column = 0; column < columns; column += 32) {
        const int64_t left = columns - column;
        const __mmask32 there = left < 32 ? (__mmask32)((1u << left) - 1) : 0xffffffff;
        const uint32_t found =
            _mm512_mask_testn_epi16_mask(there, _mm512_maskz_loadu_epi16(there, from + column), but_the_sign);
        if (found && !seen) begin = column + __builtin_ctz(found);
        seen += __builtin_popcount(found);
      }
    }
    const int64_t last = (begin + seen - MOST_LOOSE) / BLOCK_COLUMNS * BLOCK_COLUMNS;
    end = seen <= MOST_LOOSE || last < begin ? begin : last;
  }

  // Splits 32 weights into two tile rows, bfloat16 numbers and their remainders; zeros for weights that do not count.
  static void split_weights(const float* weights, bool counts, uint16_t* high, uint16_t* low) {
    const Vector one = counts ? read(weights) : zero(), two = counts ? read(weights + LANES) : zero();
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(two, one);
    const __m512i first = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16);
    const __m512i second = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16);
    _mm512_store_si512(high, both);
    _mm512_store_si512(low, (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(two, _mm512_castsi512_ps(second)),
                                                         _mm512_sub_ps(one, _mm512_castsi512_ps(first))));
  }

  // Arranges 32 columns of 32 places as two tiles of pairs of columns. Of every 8 places, the first tile has 0 to 3 and
  // the second 4 to 7. If weights are given, columns of weight zero become zeros.
  void pair_values(int64_t column, int64_t at, const float* weights, uint16_t* tiles) const {
    const int64_t size = call->value_size;
    const Bfloat16* from = values + column * size + at;
    for (int64_t row = 0; row < SIDE; ++row, from += 2 * size) {
      __m512i one = _mm512_loadu_si512(from), two = _mm512_loadu_si512(from + size);
      if (weights && weights[column + 2 * row] == 0) one = _mm512_setzero_si512();
      if (weights && weights[column + 2 * row + 1] == 0) two = _mm512_setzero_si512();
      _mm512_store_si512(tiles + row * 32, _mm512_unpacklo_epi16(one, two));
      _mm512_store_si512(tiles + 512 + row * 32, _mm512_unpackhi_epi16(one, two));
    }
  }

  void fetch_values(int64_t column, int64_t at, int64_t bytes) const {
    const Bfloat16* from = values + column * call->value_size + at;
    for (int i = 0; i < BLOCK_COLUMNS; ++i, from += call->value_size)
      for (int64_t byte = 0; byte < bytes; byte += 64) _mm_prefetch((const char*)from + byte, _MM_HINT_T0);
  }

  // Adds values of columns [from, to), whole blocks arranged in pairs, to the sums of `here` queries (at most 16),
  // which are in the order of these tiles. `ends` has the end of the tile columns of each query.
  template <bool HAS_MORE>
  void add_blocks(int64_t first, int64_t here, int64_t at, int64_t from, int64_t to, const int64_t* ends, const float* weights,
                  const uint16_t* pairs, float* sums) const {
    alignas(64) uint16_t high[512], low[512];
    const int64_t bytes = call->value_size * 4;
    _tile_loadd(0, sums, bytes);
    _tile_loadd(1, sums + SIDE, bytes);
    if (HAS_MORE) {
      _tile_loadd(2, sums + 2 * SIDE, bytes);
      _tile_loadd(3, sums + 3 * SIDE, bytes);
    }
    for (int64_t column = from; column < to; column += BLOCK_COLUMNS) {
      if (first == 0) fetch_values(column + BLOCKS * BLOCK_COLUMNS, at, 64 * (1 + HAS_MORE));
      for (int64_t i = 0; i < here; ++i)
        split_weights(weights + (first + i) * stride + column, column < ends[i], high + i * 32, low + i * 32);
      _tile_loadd(4, high, 64);
      _tile_loadd(5, low, 64);
      for (int half = 0; half < 1 + HAS_MORE; ++half, pairs += 1024) {
        _tile_loadd(6, pairs, 64);
        _tile_loadd(7, pairs + 512, 64);
        if (half) {
          _tile_dpbf16ps(2, 4, 6);
          _tile_dpbf16ps(3, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        } else {
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(0, 5, 6);
          _tile_dpbf16ps(1, 5, 7);
        }
      }
    }
    _tile_stored(0, sums, bytes);
    _tile_stored(1, sums + SIDE, bytes);
    if (HAS_MORE) {
      _tile_stored(2, sums + 2 * SIDE, bytes);
      _tile_stored(3, sums + 3 * SIDE, bytes);
    }
  }

  // Restores the order of sums in two tiles, which contain the first and the last places of every 8.
  static void put_in_order(float* sums) {
    const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const Vector one = read(sums), two = read(sums + LANES);
    write(sums, _mm512_permutex2var_ps(one, lower, two));
    write(sums + LANES, _mm512_permutex2var_ps(one, upper, two));
  }

  // Sums 32 or 64 places of queries [lowest, highest). If `is_careful`, there is one query, and columns of weight zero
  // are skipped.
  template <bool HAS_MORE>
  void sum_tiles(int64_t lowest, int64_t highest, bool is_careful, int64_t at, const float* weights, float* sums) const {
    enum { PLACES = HAS_MORE ? 64 : 32 };
    alignas(64) uint16_t pairs[BLOCKS * BLOCK_COLUMNS * PLACES];
    const int64_t size = call->value_size, whole = is_careful ? highest : rounded_up(count, SIDE);
    int64_t begin = columns, end = 0, *ends = (int64_t*)__builtin_alloca((size_t)count * sizeof(int64_t));
    for (int64_t i = lowest; i < highest; ++i) {
      int64_t from = begin;
      if (i % call->group && i > lowest)
        ends[i] = ends[i - 1];
      else
        reach(i / call->group, from, ends[i]);
      begin = least(begin, from);
      end = end > ends[i] ? end : ends[i];
    }
    for (int64_t i = lowest; i < whole; ++i)
      for (int64_t place = 0; place < PLACES; place += LANES) write(sums + i * size + at + place, zero());
    configure(least(SIDE, highest - lowest));
    begin = begin / BLOCK_COLUMNS * BLOCK_COLUMNS;
    for (int64_t to; begin < end; begin = to) {
      to = least(end / BLOCK_COLUMNS * BLOCK_COLUMNS, begin + BLOCKS * BLOCK_COLUMNS);
      if (to <= begin) break;
      uint16_t* pair = pairs;
      for (int64_t column = begin; column < to; column += BLOCK_COLUMNS)
        for (int64_t place = 0; place < PLACES; place += 32, pair += 1024)
          pair_values(column, at + place, is_careful ? weights + lowest * stride : nullptr, pair);
      for (int64_t first = lowest; first < highest; first += SIDE)
        add_blocks<HAS_MORE>(first, least(SIDE, highest - first), at, begin, to, ends + first, weights, pairs,
                             sums + first * size + at);
    }
    _tile_release();
    for (int64_t i = lowest; i < highest; ++i)
      for (int64_t place = 0; place < PLACES; place += 32) put_in_order(sums + i * size + at + place);
    if (is_careful) {
      for (int64_t place = at; place < at + PLACES; place += LANES)
        add_with_care(lowest, place, ends[lowest], weights, sums);
      return;
    }
    for (int64_t i = lowest, next; i < highest; i = next) {
      for (next = i + 1; next < highest && ends[next] == ends[i];) ++next;
      add_values<PLACES / LANES>(i, next, at, ends[i], weights, sums);
    }
    for (int64_t i = lowest; i < highest; ++i)
      if (!are_finite(sums + i * size + at, PLACES)) sum_tiles<HAS_MORE>(i, i + 1, true, at, weights, sums);
  }

  void finish(int64_t at, int64_t most, const float* weights, const float* totals, float* sums) const {
    const int64_t places = least(most, call->value_size - at);
    if (count == 0) return;  // tiles without rows would be an invalid configuration
    if (places > 32)
      sum_tiles<true>(0, count, false, at, weights, sums);
    else
      sum_tiles<false>(0, count, false, at, weights, sums);
    write_out(at, places, totals, sums);
  }
};

#endif
