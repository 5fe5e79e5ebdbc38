// Attention of the few nodes of a step over ragged rows of a cache, which is read once and not copied.
//
// A node's result does not depend on the nodes, rows, columns or threads beside it. It does not depend on where in the
// cache its visible columns are either, as long as their order stays the same. The reasons: the largest score is exact,
// weights are added as integers, and values are added one column after another. A draft node therefore has the bits of
// the same token in plain decoding. decode_tiles.h relaxes the order of values for columns before any draft.

#include "decode_pairs.h"
#include "threads.h"
#include "decode_tiles.h"

// ---- all formats ----------------------------------------------------------------------------------------------------

struct Room {  // floats of scratch for one head of one row with so many nodes, and for one thread
  int64_t queries = 0, scores = 0, totals = 0, sums = 0, keys = 0;
  Room(const Attention* call, int64_t nodes) {
    const int64_t width = rounded_up(call->size, LANES), value_width = rounded_up(call->value_size, LANES);
    for (int64_t row = 0; row < call->rows; ++row) {
      const int64_t count = call->group * least(nodes, call->counts[row]);
      const int64_t laid_out = rounded_up(count, 16);  // the tile kernel arranges 16 queries together
      queries = queries > laid_out * width ? queries : laid_out * width;
      sums = sums > laid_out * value_width ? sums : laid_out * value_width;
      totals = totals > count ? totals : count;
      scores = scores > count * padded(call->columns[row]) ? scores : count * padded(call->columns[row]);
    }
    queries = rounded_up(queries, 16), sums = rounded_up(sums, 16);
    totals = rounded_up(totals, 16), scores = rounded_up(scores, 16);
    keys = STEP * width;
  }
  int64_t of_pair() const { return scores + totals + sums; }
  int64_t of_thread() const { return queries + keys; }
};

// If there are few heads and threads would get unequal numbers of them, heads are divided; else a thread takes whole
// heads.
static inline bool is_split(const Attention* call, int threads) {
  const int64_t heads = call->rows * call->heads;
  return threads > 1 && heads < 4 * threads && heads % threads;
}

// Plan of a call: the number of nodes per row that are processed at a time, so that scores and scratch stay within
// bounds.
struct Plan {
  enum { MOST_SCORES = 1 << 18, MOST_SCRATCH = 1 << 24 };
  int64_t most, nodes, pairs;  // most nodes of a row; nodes at a time; (row, head) pairs with scratch at the same time

  Plan(const Attention* call, int threads) : most(0) {
    for (int64_t row = 0; row < call->rows; ++row) most = most > call->counts[row] ? most : call->counts[row];
    pairs = is_split(call, threads) ? call->rows * call->heads : threads;
    for (nodes = most; nodes > 1; nodes = (nodes + 1) / 2)
      if (Room(call, nodes).scores <= MOST_SCORES && scratch(call, threads) <= MOST_SCRATCH) break;
  }
  int64_t scratch(const Attention* call, int threads) const {
    const Room room(call, nodes);
    return pairs * room.of_pair() + threads * room.of_thread();
  }
};

// Returns the floats of scratch that a call needs.
extern "C" int64_t foredraft_decode_attention_scratch(const Attention* call, int threads) {
  if (threads < 1) threads = 1;
  return Plan(call, threads).scratch(call, threads);
}

template <typename Work>
static void attend(const Attention* call, const void* query, const void* keys, const void* values, const void* mask,
                   void* out, float* scratch, int threads) {
  const Plan plan(call, threads);
  const Room room(call, plan.nodes);
  const int64_t pairs = call->rows * call->heads;
  if (!is_split(call, threads)) {
    const int64_t rounds = plan.nodes ? (plan.most + plan.nodes - 1) / plan.nodes : 0;
    share_each(pairs * rounds, threads, [&](int64_t task, int thread) {
      const Work pair(call, query, keys, values, mask, out, task / rounds, task % rounds * plan.nodes, plan.nodes);
      if (pair.count == 0) return;
      float* queries = scratch + thread * (room.of_pair() + room.of_thread());
      float *by_input = queries + room.queries, *scores = by_input + room.keys, *totals = scores + room.scores;
      pair.read_queries(queries);
      pair.score(0, pair.columns, queries, by_input, scores);
      for (int64_t i = 0; i < pair.count; ++i) totals[i] = pair.weigh(i, scores);
      for (int64_t at = 0; at < call->value_size; at += WIDTH * LANES)
        pair.finish(at, WIDTH * LANES, scores, totals, totals + room.totals);
    });
    return;
  }
  int64_t longest = 0;
  for (int64_t row = 0; row < call->rows; ++row) longest = longest > call->columns[row] ? longest : call->columns[row];
  const int64_t chunks = (longest + CHUNK - 1) / CHUNK, parts = (call->value_size + STEP - 1) / STEP;
  const int64_t most = plan.nodes * call->group;
  for (int64_t node = 0; node < plan.most; node += plan.nodes) {
    share_each(pairs * chunks, threads, [&](int64_t task, int thread) {
      float* queries = scratch + pairs * room.of_pair() + thread * room.of_thread();
      const Work pair(call, query, keys, values, mask, out, task / chunks, node, plan.nodes);
      const int64_t from = task % chunks * CHUNK;
      if (from >= pair.columns || pair.count == 0) return;
      pair.read_queries(queries);
      pair.score(from, least(pair.columns, from + CHUNK), queries, queries + room.queries,
                 scratch + task / chunks * room.of_pair());
    });
    share_each(pairs * most, threads, [&](int64_t task, int) {
      const Work pair(call, query, keys, values, mask, out, task / most, node, plan.nodes);
      float* scores = scratch + task / most * room.of_pair();
      if (task % most < pair.count) scores[room.scores + task % most] = pair.weigh(task % most, scores);
    });
    share_each(pairs * parts, threads, [&](int64_t task, int) {
      const Work pair(call, query, keys, values, mask, out, task / parts, node, plan.nodes);
      if (pair.count == 0) return;
      float* scores = scratch + task / parts * room.of_pair();
      pair.finish(task % parts * STEP, STEP, scores, scores + room.scores, scores + room.scores + room.totals);
    });
  }
}

enum { MOST_KINDS = 8 };

// query (S, H_q, D) by strides; keys and values (R, H_kv, T, D) by strides, in the format of their cache; mask (R or 1,
// N, T) in the format of the query, 0 for visible columns, or null; out (S, H_q, D_v), contiguous.
extern "C" void foredraft_decode_attention(const Attention* call, const void* query, const void* keys, const void* values,
                                    const void* mask, void* out, float* scratch, int threads) {
  if (threads < 1) threads = 1;
#if defined(FOREDRAFT_AMX)
  if (Tiled::fits(call)) return attend<Tiled>(call, query, keys, values, mask, out, scratch, threads);
#elif defined(FOREDRAFT_AVX512_BF16)
  if (Halves::fits(call)) return attend<Halves>(call, query, keys, values, mask, out, scratch, threads);
#endif
  switch (call->kind * MOST_KINDS + call->cache_kind) {
#define CASE(KIND, T, CACHE, C) \
  case KIND * MOST_KINDS + CACHE: return attend<Pair<T, C>>(call, query, keys, values, mask, out, scratch, threads)
    CASE(FLOAT32, float, FLOAT32, float);
    CASE(BFLOAT16, Bfloat16, BFLOAT16, Bfloat16);
    CASE(FLOAT16, Float16, FLOAT16, Float16);
    CASE(FLOAT32, float, BFLOAT16, Bfloat16);
    CASE(FLOAT32, float, SCALED, Scaled);
    CASE(BFLOAT16, Bfloat16, SCALED, Scaled);
    CASE(FLOAT16, Float16, SCALED, Scaled);
#undef CASE
  }
}
