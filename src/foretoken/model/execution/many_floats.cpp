// Attention of the many nodes of a prompt over a cache, in float32: every node sees its own column and those before it,
// or the last few of them.
//
// Lanes are nodes, here as in many_nodes.cpp: scores are computed as (columns x nodes) and results as (places x nodes),
// each a sum of one product after another. A node's result does not depend on the nodes, rows or threads beside it:
// columns are taken in steps that begin at multiples of `COLUMNS`, and what is not seen has a weight of zero.

#include "calls.h"
#include "softmax.h"

enum { NODES = 2 * LANES, COLUMNS = 64, TOGETHER = LANES == 8 ? 4 : 8 };
static const float HIDDEN = -1e30f, NONE = -1e20f;  // a score that is not seen, and the largest of no scores

static inline Vector times(Vector a, Vector b) { return add_product(a, b, zero()); }
static inline Vector plus(Vector a, Vector b) { return add_product(a, all(1.0f), b); }
static inline Vector less(Vector a, Vector b) { return add_product(b, all(-1.0f), a); }

// What a thread works on: the nodes of one block, columns step by step.
struct FloatBlock {
  float *queries, *scores, *sums, *most, *totals;  // per query head places x nodes, except scores: columns x nodes

  FloatBlock(const Chains* call, float* scratch) {
    queries = scratch;
    scores = queries + call->group * NODES * call->size;
    sums = scores + COLUMNS * NODES;
    most = sums + call->group * NODES * call->value_size;
    totals = most + call->group * NODES;
  }
  static int64_t size(const Chains* call) {
    return COLUMNS * NODES + call->group * NODES * (call->size + call->value_size + 2);
  }
};

// Adds a (ROWS x count) times b (count x NODES), summed by itself first, or puts it in place of what was there.
template <int ROWS, bool ADDS>
static inline void multiply(const float* a, int64_t row, int64_t step, const float* b, int64_t count, float* sums) {
  Vector low[ROWS], high[ROWS];
  for (int i = 0; i < ROWS; ++i) low[i] = high[i] = zero();
  for (int64_t at = 0; at < count; ++at) {
    const Vector one = read(b + at * NODES), two = read(b + at * NODES + LANES);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Vector value = all(a[i * row + at * step]);
      low[i] = add_product(value, one, low[i]);
      high[i] = add_product(value, two, high[i]);
    }
  }
  for (int i = 0; i < ROWS; ++i, sums += NODES) {
    write(sums, ADDS ? plus(read(sums), low[i]) : low[i]);
    write(sums + LANES, ADDS ? plus(read(sums + LANES), high[i]) : high[i]);
  }
}

// Queries of some nodes (nodes x places) to (places x nodes), zeros behind the last node.
static void turn_queries(const Chains* call, const float* query, int64_t count, float* turned) {
  for (int64_t half = 0; half < NODES; half += LANES)
    for (int64_t place = 0; place < call->size; place += LANES) {
      Vector block[LANES];
      for (int64_t i = 0; i < LANES; ++i)
        block[i] = half + i < count ? read(query + (half + i) * call->query_node + place) : zero();
      transpose(block);
      for (int64_t i = 0; i < LANES; ++i) write(turned + (place + i) * NODES + half, block[i]);
    }
}

// Hides scores of columns that a node does not see; the first column is `offset` before the first node.
static void hide(float* scores, int64_t columns, int64_t offset, int64_t window) {
  float numbers[NODES];
  for (int i = 0; i < NODES; ++i) numbers[i] = (float)i;
  for (int64_t column = 0; column < columns; ++column)
    for (int64_t half = 0; half < NODES; half += LANES) {
      // node i is i + offset - column columns behind this one
      const Vector behind = less(read(numbers + half), all((float)(column - offset)));
      Vector unseen = larger(zero(), less(zero(), behind));
      if (window) unseen = larger(unseen, less(behind, all((float)(window - 1))));
      float* at = scores + column * NODES + half;
      write(at, where_zero(unseen, read(at), all(HIDDEN)));
    }
}

// Scores of some columns to weights; what was summed before is scaled to the largest score so far.
static void weigh(float* scores, int64_t columns, float scale, float* most, float* totals, float* sums, int64_t places) {
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

// Sums (places x nodes) by totals, to (nodes x places).
static void write_nodes(const Chains* call, const float* sums, const float* totals, int64_t count, float* out) {
  const int64_t stride = call->heads * call->group * call->value_size;
  for (int64_t half = 0; half < NODES; half += LANES) {
    float parts[LANES];
    for (int i = 0; i < LANES; ++i) parts[i] = 1.0f / totals[half + i];
    for (int64_t place = 0; place < call->value_size; place += LANES) {
      Vector rows[LANES];
      for (int i = 0; i < LANES; ++i) rows[i] = times(read(sums + (place + i) * NODES + half), read(parts));
      transpose(rows);
      for (int64_t i = 0; i < LANES && half + i < count; ++i) write(out + (half + i) * stride + place, rows[i]);
    }
  }
}

// Some nodes of a row, `first` the first of them, for all query heads of a head of keys.
static void attend(const Chains* call, int64_t row, int64_t head, int64_t first, const float* query, const float* keys,
                   const float* values, float* out, const FloatBlock& block) {
  const int64_t count = least(NODES, call->counts[row] - first), size = call->size, places = call->value_size;
  const int64_t own = call->before[row] + first, end = own + count, at = call->firsts[row] + first;
  const int64_t begin = call->window && own >= call->window ? (own - call->window + 1) / COLUMNS * COLUMNS : 0;
  for (int64_t i = 0; i < call->group; ++i) {
    const float* from = query + at * call->query_node + (head * call->group + i) * call->query_head;
    turn_queries(call, from, count, block.queries + i * NODES * size);
  }
  memset(block.sums, 0, (size_t)(call->group * NODES * places) * sizeof(float));
  for (int64_t i = 0; i < call->group * NODES; ++i) block.most[i] = NONE, block.totals[i] = 0;
  for (int64_t column = begin; column < end; column += COLUMNS) {
    const int64_t here = least(COLUMNS, end - column);
    const bool is_hiding = column + here > own + 1 || (call->window && end - column > call->window);
    for (int64_t i = 0; i < call->group; ++i) {
      const float *queries = block.queries + i * NODES * size, *of_step = keys + column * size;
      float* sums = block.sums + i * NODES * places;
      int64_t part = 0;
      for (; part + TOGETHER <= here; part += TOGETHER)
        multiply<TOGETHER, false>(of_step + part * size, size, 1, queries, size, block.scores + part * NODES);
      for (; part < here; ++part)
        multiply<1, false>(of_step + part * size, size, 1, queries, size, block.scores + part * NODES);
      if (is_hiding) hide(block.scores, here, own - column, call->window);
      weigh(block.scores, here, call->scale, block.most + i * NODES, block.totals + i * NODES, sums, places);
      for (int64_t place = 0; place < places; place += TOGETHER)
        multiply<TOGETHER, true>(values + column * places + place, 1, places, block.scores, here, sums + place * NODES);
    }
  }
  for (int64_t i = 0; i < call->group; ++i)
    write_nodes(call, block.sums + i * NODES * places, block.totals + i * NODES, count,
                out + (at * call->heads + head) * call->group * places + i * places);
}

// Bytes of scratch that a call needs.
extern "C" int64_t foretoken_float_chains_scratch(const Chains* call, int threads) {
  return threads * FloatBlock::size(call) * (int64_t)sizeof(float);
}

// As foretoken_chains, in float32; sizes of heads are multiples of the lanes.
extern "C" void foretoken_float_chains(const Chains* call, const void* query, const void* keys, const void* values,
                                       void* out, char* scratch, int threads) {
  if (threads < 1) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const FloatBlock block(call, (float*)scratch + omp_get_thread_num() * FloatBlock::size(call));
    for (int64_t row = 0; row < call->rows; ++row) {
      const int64_t blocks = (call->counts[row] + NODES - 1) / NODES;
#pragma omp for schedule(dynamic) nowait
      for (int64_t task = 0; task < call->heads * blocks; ++task) {
        const int64_t head = task % call->heads, first = (blocks - 1 - task / call->heads) * NODES;  // the longest first
        attend(call, row, head, first, (const float*)query,
               (const float*)keys + row * call->key_row + head * call->key_head,
               (const float*)values + row * call->value_row + head * call->value_head, (float*)out, block);
      }
    }
  }
}
