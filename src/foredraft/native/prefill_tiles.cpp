// Attention of the many nodes of a prompt over a cache, in bfloat16 with tiles. Every node sees its own column and all
// columns before it, or the last few of them.
//
// Scores are computed as (columns x nodes), so that the maximum of a node, its weights and their sum are computed lane
// by lane. The result is computed as (places x nodes) from values that are transposed once per call. A node's result
// does not depend on the nodes, rows or threads beside it, because columns are processed in steps that begin at
// multiples of `STEP`, and hidden columns have a weight of zero.

#include "abi.h"
#include "threads.h"
#include "functions.h"

#if defined(FOREDRAFT_AMX)

enum { NODES = 32, STEP = 128, BLOCK = 32, TILE = 512 };  // a tile of bfloat16 has 512 numbers
static const float HIDDEN = -1e30f, NONE = -1e20f;        // score of a hidden column, and initial maximum


// Reads 16 rows of 16 numbers of 32 bits, `stride` bytes apart, and transposes them; rows from `count` on are zero.
static inline void read_turned(const char* from, int64_t stride, int64_t count, __m512* turned) {
  for (int64_t i = 0; i < 16; ++i)
    turned[i] = i < count ? _mm512_loadu_ps((const float*)(from + i * stride)) : _mm512_setzero_ps();
  transpose(turned);
}

// Transposes values (32 columns x places) to tiles of 16 places x 32 columns.
static void turn_values(const uint16_t* values, int64_t count, int64_t size, uint16_t* tiles) {
  const __m512i evens = _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26, 24,
                                         22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odds = _mm512_add_epi16(evens, _mm512_set1_epi16(1));
  for (int64_t place = 0; place < size; place += 32) {
    __m512 low[16], high[16];  // pairs of places: columns 0-15 and 16-31
    read_turned((const char*)(values + place), size * 2, least(16, count), low);
    read_turned((const char*)(values + place + 16 * size), size * 2, count - 16, high);
    for (int64_t pair = 0; pair < 16; ++pair) {
      uint16_t* to = tiles + (place + 2 * pair) * 32;
      _mm512_store_si512(to, _mm512_permutex2var_epi16((__m512i)low[pair], evens, (__m512i)high[pair]));
      _mm512_store_si512(to + 32, _mm512_permutex2var_epi16((__m512i)low[pair], odds, (__m512i)high[pair]));
    }
  }
}

// Scratch memory of a thread for 32 nodes of one head; columns are processed step by step.
struct Block {
  uint16_t *queries, *weights, *last_keys;  // tiles of each query; pairs of columns x nodes; padded last keys
  uint16_t* seen_values;                    // of a step
  float *scores, *sums, *most, *totals;     // columns x nodes; per query head: places x nodes, nodes, nodes

  Block(const Attention* call, char* scratch) {
    const int64_t group = call->group;
    queries = (uint16_t*)scratch;
    weights = queries + group * NODES * call->size;
    last_keys = weights + STEP * NODES;
    seen_values = last_keys + BLOCK * call->size;
    scores = (float*)(seen_values + STEP * call->value_size);
    sums = scores + STEP * NODES;
    most = sums + group * NODES * call->value_size;
    totals = most + group * NODES;
  }
  static int64_t bytes(const Attention* call) {
    const int64_t group = call->group, of_queries = group * NODES * call->size, of_keys = BLOCK * call->size;
    const int64_t of_values = STEP * call->value_size;
    const int64_t floats = STEP * NODES + group * NODES * (call->value_size + 2);
    return rounded_up(2 * (of_queries + STEP * NODES + of_keys + of_values) + 4 * floats, 64);
  }
};

// Arranges queries as tiles of 16 pairs of places x 16 nodes, for each half of the nodes.
static void read_queries(const Attention* call, const uint16_t* query, int64_t count, uint16_t* tiles) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t place = 0; place < call->size; place += 32) {
      __m512 pairs[16];
      const uint16_t* from = query + half * 16 * call->query_node + place;
      read_turned((const char*)from, call->query_node * 2, count - 16 * half, pairs);
      for (int i = 0; i < 16; ++i) _mm512_store_ps((float*)(tiles + (place / 32 * 2 + half) * TILE) + i * 16, pairs[i]);
    }
}

// Stores tiles 0 to 3 as the quarters of 32 x 32 numbers.
static inline void store_quarters(float* to) {
  _tile_stored(0, to, 128);
  _tile_stored(1, to + 16, 128);
  _tile_stored(2, to + 16 * 32, 128);
  _tile_stored(3, to + 16 * 32 + 16, 128);
}

// Computes the scores of 32 columns, two tiles for each half of them.
static inline void score(const uint16_t* keys, const uint16_t* queries, int64_t size, float* scores) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t place = 0; place < size; place += 32) {
    _tile_loadd(6, queries + place / 32 * 2 * TILE, 64);
    _tile_loadd(4, keys + place, size * 2);
    _tile_loadd(7, queries + (place / 32 * 2 + 1) * TILE, 64);
    _tile_loadd(5, keys + 16 * size + place, size * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_quarters(scores);
}

// Hides the scores of columns that a node does not see. The first column is `offset` before the first node.
static void hide(float* scores, int64_t columns, int64_t offset, int64_t window) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t column = 0; column < columns; ++column) {
      // node i is i + offset - column columns after this one
      const __m512i distance = _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)(16 * half + offset - column)));
      __mmask16 seen = _mm512_cmpge_epi32_mask(distance, _mm512_setzero_si512());
      if (window) seen &= _mm512_cmplt_epi32_mask(distance, _mm512_set1_epi32((int32_t)window));
      float* at = scores + column * 32 + 16 * half;
      _mm512_store_ps(at, _mm512_mask_blend_ps(seen, _mm512_set1_ps(HIDDEN), _mm512_load_ps(at)));
    }
}

// Turns the scores of some columns into weights, in pairs of columns, and rescales earlier sums to the largest score so
// far.
static void weigh(const float* scores, int64_t columns, float scale, float* most, float* totals, float* sums,
                  int64_t places, uint16_t* weights) {
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512 factor = _mm512_set1_ps(scale);
  for (int64_t half = 0; half < 2; ++half) {
    const float* from = scores + 16 * half;
    __m512 high[4];
    for (int i = 0; i < 4; ++i) high[i] = _mm512_load_ps(from + i * 32);
    for (int64_t column = 4; column < columns; column += 4)
      for (int i = 0; i < 4; ++i) high[i] = _mm512_max_ps(high[i], _mm512_load_ps(from + (column + i) * 32));
    const __m512 here = _mm512_max_ps(_mm512_max_ps(high[0], high[1]), _mm512_max_ps(high[2], high[3]));
    const __m512 before = _mm512_load_ps(most + 16 * half), now = _mm512_max_ps(before, _mm512_mul_ps(here, factor));
    __m512 total = _mm512_load_ps(totals + 16 * half);
    if (_mm512_cmpneq_ps_mask(before, now)) {
      const __m512 shrink = power_of_two(_mm512_sub_ps(before, now));
      total = _mm512_mul_ps(total, shrink);
      for (int64_t place = 0; place < places; ++place) {
        float* sum = sums + place * 32 + 16 * half;
        _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), shrink));
      }
      _mm512_store_ps(most + 16 * half, now);
    }
    uint16_t* to = weights + half * TILE;
    for (int64_t column = 0; column < columns; column += 32)
      for (int64_t pair = 0; pair < 32; pair += 2) {
        const float* at = from + (column + pair) * 32;
        const __m512 one = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(at), factor, now));
        const __m512 two = power_of_two(_mm512_fmsub_ps(_mm512_load_ps(at + 32), factor, now));
        total = _mm512_add_ps(total, _mm512_add_ps(one, two));
        _mm512_store_si512(to + column * 32 + pair * 16,
                           _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(two, one)));
      }
    _mm512_store_ps(totals + 16 * half, total);
  }
}

// Adds the weighted values of some columns to sums (places x nodes).
static inline void add_values(const uint16_t* values, int64_t size, int64_t columns, const uint16_t* weights,
                              float* sums) {
  for (int64_t place = 0; place < size; place += 32) {
    float* at = sums + place * 32;
    _tile_loadd(0, at, 128);
    _tile_loadd(1, at + 16, 128);
    _tile_loadd(2, at + 16 * 32, 128);
    _tile_loadd(3, at + 16 * 32 + 16, 128);
    for (int64_t column = 0; column < columns; column += 32) {
      const uint16_t* tiles = values + column * size + place * 32;
      _tile_loadd(6, weights + column * 32, 64);
      _tile_loadd(4, tiles, 64);
      _tile_loadd(7, weights + column * 32 + TILE, 64);
      _tile_loadd(5, tiles + TILE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    store_quarters(at);
  }
}

// Copies the values of the columns that a node sees, with zeros for the others. The node is `offset` after the first
// column.
static void copy_seen(const uint16_t* values, int64_t size, int64_t columns, int64_t offset, int64_t window,
                      uint16_t* seen_values) {
  for (int64_t column = 0; column < columns; column += BLOCK) {
    __mmask32 seen = 0;
    for (int64_t i = 0; i < BLOCK; ++i) {
      const int64_t behind = offset - column - i;
      if (behind >= 0 && (!window || behind < window)) seen |= (__mmask32)1 << i;
    }
    for (int64_t at = column * size; at < (column + BLOCK) * size; at += 32)
      _mm512_storeu_si512(seen_values + at, _mm512_maskz_loadu_epi16(seen, values + at));
  }
}

// Divides sums (places x nodes) by totals, and transposes them to (nodes x places).
static void write_out(const Attention* call, const float* sums, const float* totals, int64_t count, uint16_t* out) {
  const int64_t stride = call->heads * call->group * call->value_size;
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t place = 0; place < call->value_size; place += 16) {
      __m512 rows[16];
      const __m512 total = _mm512_load_ps(totals + 16 * half);
      for (int i = 0; i < 16; ++i)
        rows[i] = _mm512_div_ps(_mm512_load_ps(sums + (place + i) * 32 + 16 * half), total);
      transpose(rows);
      for (int64_t i = 0; i < 16 && 16 * half + i < count; ++i)
        _mm256_storeu_si256((__m256i*)(out + (16 * half + i) * stride + place), (__m256i)_mm512_cvtneps_pbh(rows[i]));
    }
}

// Processes up to 32 nodes of a row, beginning with `first`, for all query heads of a key head. If `is_careful`, there
// is one node, and hidden values are skipped, since zero times infinity is NaN. Returns whether all is finite.
static bool attend(const Attention* call, int64_t row, int64_t head, int64_t first, int64_t count, bool is_careful,
                   const uint16_t* query, const uint16_t* keys, const uint16_t* values, uint16_t* out,
                   const Block& block) {
  const int64_t size = call->size, places = call->value_size;
  const int64_t own = call->before[row] + first, end = own + count, at = call->firsts[row] + first;
  const int64_t begin = call->window && own >= call->window ? (own - call->window + 1) / STEP * STEP : 0;
  for (int64_t i = 0; i < call->group; ++i) {
    const uint16_t* from = query + at * call->query_node + (head * call->group + i) * call->query_head;
    read_queries(call, from, count, block.queries + i * NODES * size);
  }
  memset(block.sums, 0, (size_t)(call->group * NODES * places) * 4);
  for (int64_t i = 0; i < call->group * NODES; ++i) block.most[i] = NONE, block.totals[i] = 0;
  for (int64_t column = begin; column < end; column += STEP) {
    const int64_t here = least(STEP, rounded_up(end - column, BLOCK));
    const bool is_hiding = column + here > own + 1 || (call->window && end - column > call->window);
    const uint16_t* of_step = values + column * places;
    if (is_careful) {
      copy_seen(of_step, places, here, own - column, call->window, block.seen_values);
      of_step = block.seen_values;
    }
    for (int64_t i = 0; i < call->group; ++i) {
      float* sums = block.sums + i * NODES * places;
      for (int64_t part = 0; part < here; part += BLOCK) {
        const uint16_t* from = keys + (column + part) * size;
        const int64_t there = end - column - part;
        if (there < BLOCK) {
          memcpy(block.last_keys, from, (size_t)(there * size * 2));
          memset(block.last_keys + there * size, 0, (size_t)((BLOCK - there) * size * 2));
          from = block.last_keys;
        }
        score(from, block.queries + i * NODES * size, size, block.scores + part * NODES);
      }
      if (is_hiding) hide(block.scores, here, own - column, call->window);
      weigh(block.scores, here, call->scale * 1.44269504f, block.most + i * NODES, block.totals + i * NODES, sums,
            places, block.weights);
      add_values(of_step, places, here, block.weights, sums);
    }
  }
  for (int64_t i = 0; i < call->group; ++i)
    write_out(call, block.sums + i * NODES * places, block.totals + i * NODES, count,
              out + (at * call->heads + head) * call->group * places + i * places);
  return are_finite(block.sums, call->group * NODES * places);
}

// Memory for transposed values of some heads of one row, as many as fit.
struct Turned {
  enum { MOST_BYTES = 1 << 26 };
  int64_t bytes;  // of this memory

  Turned(const Attention* call) : bytes(0) {
    int64_t largest = 0;
    for (int64_t row = 0; row < call->rows; ++row) {
      const int64_t of_row = call->heads * of_head(call, row);
      bytes = bytes > of_row ? bytes : of_row;
      largest = largest > of_head(call, row) ? largest : of_head(call, row);
    }
    bytes = largest > MOST_BYTES ? largest : least(bytes, MOST_BYTES);
  }
  static int64_t of_head(const Attention* call, int64_t row) {
    return rounded_up(call->before[row] + call->counts[row], BLOCK) * call->value_size * 2;
  }
};

// Returns the bytes of scratch that a call needs, aligned to 64.
int64_t tile_chains_scratch(const Attention* call, int threads) {
  return Turned(call).bytes + threads * Block::bytes(call);
}

// Like foredraft_prefill_attention.
void tile_chains(const Attention* call, const void* query, const void* keys, const void* values, void* out, char* scratch,
                 int threads) {
  uint16_t* turned = (uint16_t*)(scratch + threads * Block::bytes(call));
  const int64_t room = Turned(call).bytes;
  for (int64_t row = 0; row < call->rows; ++row) {
    const int64_t columns = call->before[row] + call->counts[row], whole = rounded_up(columns, BLOCK);
    const int64_t blocks = (call->counts[row] + NODES - 1) / NODES, size = Turned::of_head(call, row);
    for (int64_t from = 0, heads; from < call->heads; from += heads) {
      heads = least(call->heads - from, size ? room / size : call->heads);
      share_each(heads * (whole / BLOCK), threads, [&](int64_t task, int) {
        const int64_t head = task / (whole / BLOCK), column = task % (whole / BLOCK) * BLOCK;
        const uint16_t* values_of = (const uint16_t*)values + row * call->value_row + (from + head) * call->value_head;
        turn_values(values_of + column * call->value_size, least(BLOCK, columns - column), call->value_size,
                    turned + (head * whole + column) * call->value_size);
      });
      share_out(heads * blocks, threads, [&](int64_t begin, int64_t end, int thread) {
        const Block block(call, scratch + thread * Block::bytes(call));
        configure_tiles({16, 16, 16, 16, 16, 16, 16, 16});
        for (int64_t task = begin; task < end; ++task) {
          const int64_t head = task % heads, first = (blocks - 1 - task / heads) * NODES;  // longest blocks first
          const int64_t count = least(NODES, call->counts[row] - first);
          const auto run = [&](int64_t node, int64_t some, bool is_careful) {
            return attend(call, row, from + head, node, some, is_careful, (const uint16_t*)query,
                          (const uint16_t*)keys + row * call->key_row + (from + head) * call->key_head,
                          turned + head * whole * call->value_size, (uint16_t*)out, block);
          };
          if (run(first, count, false)) continue;
          for (int64_t node = 0; node < count; ++node) run(first + node, 1, true);
        }
        _tile_release();
      });
    }
  }
}

#endif
