// Attention of the few nodes of a step over ragged rows of a cache, read once where they lie.
//
// A node's result does not depend on the nodes, rows, columns or threads beside it, nor on where in the cache the
// columns that it sees lie, as long as they keep their order: the largest score is exact, weights are added up as whole
// numbers, and values one column after another. So a node of a draft has the bits of the same token decoded plainly.
// tiles.h does without the last of these for columns before any draft.

#include "pairs.h"
#include "tiles.h"

// ---- all of them ----------------------------------------------------------------------------------------------------

static inline int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

struct Room {  // floats of scratch that one head of one row needs, and one thread
  int64_t queries = 0, scores = 0, totals = 0, sums = 0, keys = 0;
  Room(const Attention* call) {
    for (int64_t row = 0; row < call->rows; ++row) {
      const int64_t count = call->group * call->counts[row];
      const int64_t whole = (count + 15) / 16 * 16;  // of the kernel that lays out 16 queries together
      queries = queries > whole * call->size ? queries : whole * call->size;
      sums = sums > whole * call->value_size ? sums : whole * call->value_size;
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

template <typename Work>
static void attend(const Attention* call, const void* query, const void* keys, const void* values, const void* mask,
                   void* out, float* scratch, int threads) {
  const Room room(call);
  const int64_t pairs = call->rows * call->heads;
  if (!is_split(call, threads)) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t index = 0; index < pairs; ++index) {
      const Work pair(call, query, keys, values, mask, out, index);
      float* queries = scratch + omp_get_thread_num() * (room.of_pair() + room.of_thread());
      float *by_input = queries + room.queries, *scores = by_input + room.keys, *totals = scores + room.scores;
      pair.read_queries(queries);
      pair.score(0, pair.columns, queries, by_input, scores);
      for (int64_t i = 0; i < pair.count; ++i) totals[i] = pair.weigh(i, scores);
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
      const Work pair(call, query, keys, values, mask, out, task / chunks);
      const int64_t from = task % chunks * CHUNK;
      if (from >= pair.columns) continue;
      pair.read_queries(queries);
      pair.score(from, least(pair.columns, from + CHUNK), queries, queries + room.queries,
                 scratch + task / chunks * room.of_pair());
    }
#pragma omp for schedule(static)
    for (int64_t task = 0; task < pairs * most; ++task) {
      const Work pair(call, query, keys, values, mask, out, task / most);
      float* scores = scratch + task / most * room.of_pair();
      if (task % most < pair.count) scores[room.scores + task % most] = pair.weigh(task % most, scores);
    }
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < pairs * parts; ++task) {
      const Work pair(call, query, keys, values, mask, out, task / parts);
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
#if defined(FORETOKEN_AMX)
  if (Tiled::fits(call)) return attend<Tiled>(call, query, keys, values, mask, out, scratch, threads);
#endif
  switch (call->kind) {
    case 1: return attend<Pair<float>>(call, query, keys, values, mask, out, scratch, threads);
    case 2: return attend<Pair<Bfloat16>>(call, query, keys, values, mask, out, scratch, threads);
    case 3: return attend<Pair<Float16>>(call, query, keys, values, mask, out, scratch, threads);
  }
}

extern "C" int foretoken_lanes() { return LANES; }
