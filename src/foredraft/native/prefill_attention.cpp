// Attention of the many nodes of a prompt over a cache of any format, in float32. Every node sees its own column and
// all columns before it, or the last few of them.
//
// Lanes are nodes, as in prefill_tiles.cpp. Scores are computed as (columns x nodes) and results as (places x nodes),
// each a sum of one product after another. A node's result does not depend on the nodes, rows or threads beside it,
// because columns are processed in steps that begin at multiples of `COLUMNS`, and hidden columns have a weight of
// zero.

#include "abi.h"
#include "threads.h"
#include "functions.h"

#if defined(FOREDRAFT_AMX)  // see prefill_tiles.cpp
int64_t tile_chains_scratch(const Attention* call, int threads);
void tile_chains(const Attention* call, const void* query, const void* keys, const void* values, void* out, char* scratch,
                 int threads);
#endif

namespace {

enum { NODES = 2 * LANES, COLUMNS = 64, TOGETHER = LANES == 8 ? 6 : 12 };
const float HIDDEN = -1e30f, NONE = -1e20f;  // score of a hidden column, and initial maximum

inline Vector times(Vector a, Vector b) { return add_product(a, b, zero()); }
inline Vector plus(Vector a, Vector b) { return add_product(a, all(1.0f), b); }
inline Vector less(Vector a, Vector b) { return add_product(b, all(-1.0f), a); }

// Scratch memory of a thread for the nodes of one block; columns are processed step by step.
struct FloatBlock {
  float *queries, *scores, *sums, *most, *totals;  // per query head places x nodes, except scores: columns x nodes
  float *keys, *values;                            // columns x places of a step, if the cache has another format

  FloatBlock(const Attention* call, float* scratch) {
    queries = scratch;
    scores = queries + call->group * NODES * rounded_up(call->size, LANES);
    sums = scores + COLUMNS * NODES;
    most = sums + call->group * NODES * rounded_up(call->value_size, LANES);
    totals = most + call->group * NODES;
    keys = totals + call->group * NODES;
    values = keys + COLUMNS * call->size;
  }
  static int64_t size(const Attention* call) {
    const FloatBlock block(call, nullptr);
    return rounded_up(block.values - block.queries + COLUMNS * call->value_size, 16);
  }
};

// Adds the product of a (ROWS x count) and b (count x NODES), which is summed separately first, or overwrites the sums.
// With CAREFUL, terms with a factor of zero in b are skipped, since zero times infinity is NaN.
template <int ROWS, bool ADDS, bool CAREFUL>
inline void multiply_rows(const float* a, int64_t row, int64_t step, const float* b, int64_t count, float* sums) {
  Vector low[ROWS], high[ROWS];
  for (int i = 0; i < ROWS; ++i) low[i] = high[i] = zero();
  for (int64_t at = 0; at < count; ++at) {
    const Vector one = read(b + at * NODES), two = read(b + at * NODES + LANES);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
      const Vector value = all(a[i * row + at * step]);
      low[i] = add_product(CAREFUL ? where_zero(one, zero(), value) : value, one, low[i]);
      high[i] = add_product(CAREFUL ? where_zero(two, zero(), value) : value, two, high[i]);
    }
  }
  for (int i = 0; i < ROWS; ++i, sums += NODES) {
    write(sums, ADDS ? plus(read(sums), low[i]) : low[i]);
    write(sums + LANES, ADDS ? plus(read(sums + LANES), high[i]) : high[i]);
  }
}

template <bool ADDS, bool CAREFUL>
inline void multiply(int64_t rows, const float* a, int64_t row, int64_t step, const float* b, int64_t count,
                     float* sums) {
  for (; rows >= TOGETHER; rows -= TOGETHER, a += TOGETHER * row, sums += TOGETHER * NODES)
    multiply_rows<TOGETHER, ADDS, CAREFUL>(a, row, step, b, count, sums);
  for (; rows >= 4; rows -= 4, a += 4 * row, sums += 4 * NODES)
    multiply_rows<4, ADDS, CAREFUL>(a, row, step, b, count, sums);
  for (; rows > 0; --rows, a += row, sums += NODES) multiply_rows<1, ADDS, CAREFUL>(a, row, step, b, count, sums);
}

// Transposes queries of some nodes (nodes x places) to (places x nodes), with zeros after the last node.
template <typename T>
void turn_queries(const Attention* call, const T* query, int64_t count, float* turned) {
  for (int64_t half = 0; half < NODES; half += LANES)
    for (int64_t place = 0; place < call->size; place += LANES) {
      Vector block[LANES];
      for (int64_t i = 0; i < LANES; ++i)
        block[i] = half + i < count ? read_first(query + (half + i) * call->query_node + place, call->size - place)
                                    : zero();
      transpose(block);
      for (int64_t i = 0; i < LANES; ++i) write(turned + (place + i) * NODES + half, block[i]);
    }
}

// Converts a step of keys or values to float32; float32 is used in place.
inline const float* in_floats(const float* from, int64_t, float*) { return from; }

template <typename T>
inline const float* in_floats(const T* from, int64_t count, float* to) {
  int64_t at = 0;
  for (; at + LANES <= count; at += LANES) write(to + at, read(from + at));
  for (; at < count; ++at) to[at] = value_of(from[at]);
  return to;
}

// Hides the scores of columns that a node does not see. The first column is `offset` before the first node.
void hide(float* scores, int64_t columns, int64_t offset, int64_t window) {
  float numbers[NODES];
  for (int i = 0; i < NODES; ++i) numbers[i] = (float)i;
  for (int64_t column = 0; column < columns; ++column)
    for (int64_t half = 0; half < NODES; half += LANES) {
      // node i is i + offset - column columns after this one
      const Vector behind = less(read(numbers + half), all((float)(column - offset)));
      Vector unseen = larger(zero(), less(zero(), behind));
      if (window) unseen = larger(unseen, less(behind, all((float)(window - 1))));
      float* at = scores + column * NODES + half;
      write(at, where_zero(unseen, read(at), all(HIDDEN)));
    }
}

// Turns the scores of some columns into weights, and rescales earlier sums to the largest score so far.
void weigh(float* scores, int64_t columns, float scale, float* most, float* totals, float* sums, int64_t places) {
  const Vector factor = all(scale);
  for (int64_t half = 0; half < NODES; half += LANES) {
    float* from = scores + half;
    Vector here = read(from);
    for (int64_t column = 1; column < columns; ++column) here = larger(here, read(from + column * NODES));
    const Vector before = read(most + half), now = larger(before, times(here, factor));
    Vector total = read(totals + half);
    if (differ(before, now)) {
      const Vector shrink = exponential(less(before, now));
      total = times(total, shrink);
      for (int64_t place = 0; place < places; ++place)
        write(sums + place * NODES + half, times(read(sums + place * NODES + half), shrink));
      write(most + half, now);
    }
    const Vector shift = less(zero(), now);
    Vector added = zero();
    for (int64_t column = 0; column < columns; ++column) {
      const Vector weight = exponential(add_product(read(from + column * NODES), factor, shift));
      added = plus(weight, added);
      write(from + column * NODES, weight);
    }
    write(totals + half, plus(total, added));
  }
}

// Divides sums (places x nodes) by totals, and transposes them to (nodes x places).
template <typename T>
void write_nodes(const Attention* call, const float* sums, const float* totals, int64_t count, T* out) {
  const int64_t stride = call->heads * call->group * call->value_size;
  for (int64_t half = 0; half < NODES; half += LANES) {
    float parts[LANES];
    for (int i = 0; i < LANES; ++i) parts[i] = 1.0f / totals[half + i];
    for (int64_t place = 0; place < call->value_size; place += LANES) {
      Vector rows[LANES];
      for (int i = 0; i < LANES; ++i) rows[i] = times(read(sums + (place + i) * NODES + half), read(parts));
      transpose(rows);
      for (int64_t i = 0; i < LANES && half + i < count; ++i)
        write_first(out + (half + i) * stride + place, rows[i], call->value_size - place);
    }
  }
}

// Processes some nodes of a row, beginning with `first`, for all query heads of a key head. Returns whether all is
// finite.
template <typename T, bool CAREFUL>
bool attend(const Attention* call, int64_t row, int64_t head, int64_t first, const T* query, const T* keys,
            const T* values, T* out, const FloatBlock& block) {
  const int64_t count = least(NODES, call->counts[row] - first), size = call->size, places = call->value_size;
  const int64_t own = call->before[row] + first, end = own + count, at = call->firsts[row] + first;
  const int64_t begin = call->window && own >= call->window ? (own - call->window + 1) / COLUMNS * COLUMNS : 0;
  const int64_t of_queries = NODES * rounded_up(size, LANES), of_sums = NODES * rounded_up(places, LANES);
  for (int64_t i = 0; i < call->group; ++i) {
    const T* from = query + at * call->query_node + (head * call->group + i) * call->query_head;
    turn_queries(call, from, count, block.queries + i * of_queries);
  }
  memset(block.sums, 0, (size_t)(call->group * of_sums) * sizeof(float));
  for (int64_t i = 0; i < call->group * NODES; ++i) block.most[i] = NONE, block.totals[i] = 0;
  for (int64_t column = begin; column < end; column += COLUMNS) {
    const int64_t here = least(COLUMNS, end - column);
    const bool is_hiding = column + here > own + 1 || (call->window && end - column > call->window);
    const float* of_keys = in_floats(keys + column * size, here * size, block.keys);
    const float* of_values = in_floats(values + column * places, here * places, block.values);
    for (int64_t i = 0; i < call->group; ++i) {
      float* sums = block.sums + i * of_sums;
      multiply<false, false>(here, of_keys, size, 1, block.queries + i * of_queries, size, block.scores);
      if (is_hiding) hide(block.scores, here, own - column, call->window);
      weigh(block.scores, here, call->scale, block.most + i * NODES, block.totals + i * NODES, sums, places);
      multiply<true, CAREFUL>(places, of_values, 1, places, block.scores, here, sums);
    }
  }
  bool is_finite = true;
  for (int64_t i = 0; i < call->group; ++i) {
    is_finite = is_finite && are_finite(block.sums + i * of_sums, NODES * places);
    write_nodes(call, block.sums + i * of_sums, block.totals + i * NODES, count,
                out + (at * call->heads + head) * call->group * places + i * places);
  }
  return is_finite;
}

template <typename T>
void attend_all(const Attention* call, const T* query, const T* keys, const T* values, T* out, float* scratch,
                int threads) {
  int64_t tasks = 0;
  for (int64_t row = 0; row < call->rows; ++row) tasks += call->heads * ((call->counts[row] + NODES - 1) / NODES);
  share_each(tasks, threads, [&](int64_t task, int thread) {
    int64_t row = 0, blocks;
    for (; task >= (blocks = (call->counts[row] + NODES - 1) / NODES) * call->heads; ++row) task -= blocks * call->heads;
    const int64_t head = task % call->heads, first = (blocks - 1 - task / call->heads) * NODES;  // longest blocks first
    const T *of_keys = keys + row * call->key_row + head * call->key_head,
            *of_values = values + row * call->value_row + head * call->value_head;
    const FloatBlock block(call, scratch + thread * FloatBlock::size(call));
    // a node that is not finite must not affect the nodes before it, which do not see it
    if (!attend<T, false>(call, row, head, first, query, of_keys, of_values, out, block))
      attend<T, true>(call, row, head, first, query, of_keys, of_values, out, block);
  });
}

}  // namespace

#if defined(FOREDRAFT_AMX)
static inline bool goes_by_tiles(const Attention* call) {
  return call->kind == BFLOAT16 && call->size % 32 == 0 && call->value_size % 32 == 0;
}
#endif

// Returns the bytes of scratch that a call needs, aligned to 64.
extern "C" int64_t foredraft_prefill_attention_scratch(const Attention* call, int threads) {
#if defined(FOREDRAFT_AMX)
  if (goes_by_tiles(call)) return tile_chains_scratch(call, threads);
#endif
  return threads * FloatBlock::size(call) * (int64_t)sizeof(float);
}

// query (S, H_q, D) by strides; keys and values (R, H_kv, T, D) by strides; out (S, H_q, D_v), contiguous.
extern "C" void foredraft_prefill_attention(const Attention* call, const void* query, const void* keys, const void* values, void* out,
                                 char* scratch, int threads) {
  if (threads < 1) threads = 1;
#if defined(FOREDRAFT_AMX)
  if (goes_by_tiles(call)) return tile_chains(call, query, keys, values, out, scratch, threads);
#endif
  float* room = (float*)scratch;
  switch (call->kind) {
    case FLOAT32:
      return attend_all(call, (const float*)query, (const float*)keys, (const float*)values, (float*)out, room, threads);
    case BFLOAT16:
      return attend_all(call, (const Bfloat16*)query, (const Bfloat16*)keys, (const Bfloat16*)values, (Bfloat16*)out,
                        room, threads);
    case FLOAT16:
      return attend_all(call, (const Float16*)query, (const Float16*)keys, (const Float16*)values, (Float16*)out, room,
                        threads);
  }
}
