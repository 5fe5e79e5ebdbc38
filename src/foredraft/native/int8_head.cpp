// An EAGLE head with 8-bit weights. One call runs its layer over the few nodes of a level; another grows a whole draft.
//
// The time of a level of such a small layer is determined by reading its weights and by calls. Weights and activations
// are therefore rounded to 8 bits (see codes.cpp). Keys and values are in bfloat16, and everything else is in float32.
// This precision is enough, since drafts are verified. See heads/int8.py.

#include "abi.h"
#include "functions.h"
#include "nodes.h"

#include <algorithm>
#include <math.h>
#include <vector>

// ---- the layer ------------------------------------------------------------------------------------------------------

static void widen(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) write(to + i, read((const Bfloat16*)from + i));
}

// Reads numbers in the dtype of the target, beginning at `place`.
static void take_in(const Head& head, const void* from, int64_t place, float* to, int64_t count) {
  if (head.is_float)
    memcpy(to, (const float*)from + place, count * sizeof(float));
  else
    widen((const uint16_t*)from + place, to, count);
}

static void narrow(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store((Bfloat16*)to + i, from[i]);
}

// Root mean square norm of (size,) with a weight.
static void norm(const float* x, const float* weight, int64_t size, float eps, float* out) {
  Vector squares = zero();
  for (int64_t i = 0; i < size; i += LANES) squares = add_product(read(x + i), read(x + i), squares);
  const Vector scale = all(1.0f / sqrtf(sum_of(squares) / (float)size + eps));
  for (int64_t i = 0; i < size; i += LANES) write(out + i, read(x + i) * scale * read(weight + i));
}

// Computes silu(gate) * up from (gate, up) side by side.
static void gated(const float* both, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += LANES) {
    const Vector gate = read(both + i), above = larger(gate, zero()), below = above - gate;
    const Vector power = exponential(zero() - above - below);  // e^-|gate|, which cannot overflow
    write(out + i, (above - below * power) / (all(1.0f) + power) * read(both + size + i));
  }
}

// Rotates the halves of heads (heads, head_dim) against each other.
static void rotate(float* x, int64_t heads, int64_t head_dim, const float* cosines, const float* sines) {
  const int64_t half = head_dim / 2;
  for (int64_t head = 0; head < heads; ++head, x += head_dim)
    for (int64_t i = 0; i < half; i += LANES) {
      const Vector first = read(x + i), second = read(x + half + i), cosine = read(cosines + i), sine = read(sines + i);
      write(x + i, first * cosine - second * sine);
      write(x + half + i, first * sine + second * cosine);
    }
}

struct Room {
  Listed listed;
  std::vector<float> embedded, wide, features, inputs, x, states, heads, mixed, both, gated;
  std::vector<uint16_t> queries, seen, mask;
  std::vector<float> scratch;
};

// Scaled attention of all nodes over the cache, (n, heads * head_dim), after their own keys and values were written to
// it.
static void attend(const Head& head, const Level& level, Room& room, int threads) {
  const Nodes& nodes = *level.nodes;
  const Listed& listed = room.listed;
  const int64_t size = head.head_dim, width = head.heads * size;
  const bool has_mask = !all_see_all(nodes, listed, 0);
  room.mask.resize(has_mask ? nodes.rows * listed.most * listed.longest : 0);
  if (has_mask) write_mask(nodes, listed, 0, sizeof(uint16_t), (char*)room.mask.data());
  const Attention call = {nodes.rows, head.kv_heads, head.heads / head.kv_heads, size, size, BFLOAT16, BFLOAT16, width, size,
                          level.row, level.head, level.row, level.head, listed.most * listed.longest, listed.longest,
                          nodes.counts, listed.firsts.data(), listed.views.data(), 1.0f / sqrtf((float)size)};
  room.scratch.resize(foredraft_decode_attention_scratch(&call, threads) + 16);
  float* scratch = (float*)(((uintptr_t)room.scratch.data() + 63) / 64 * 64);
  room.seen.resize(nodes.count * width);
  foredraft_decode_attention(&call, room.queries.data(), level.keys, level.values,
                             has_mask ? room.mask.data() : nullptr, room.seen.data(), scratch, threads);
}

// Computes the input of the layer in room.inputs and the residual stream in room.x.
static void mix(const Head& head, const Level& level, Room& room, int threads) {
  const Nodes& nodes = *level.nodes;
  const int64_t size = head.size, n = nodes.count;
  room.embedded.resize(n * size), room.features.resize(n * size), room.x.resize(n * size);
  room.inputs.resize(2 * n * size);
  for (int64_t node = 0; node < n; ++node) {
    float* embedded = room.embedded.data() + node * size;
    take_in(head, head.table, token_of(nodes, room.listed, node) * size, embedded, size);
    if (head.embed_norm) norm(embedded, head.embed_norm, size, head.eps, embedded);
  }
  const float* features = level.features;
  if (level.streams) {
    room.wide.resize(n * head.width);
    take_in(head, level.streams, 0, room.wide.data(), n * head.width);
    for (float& value : room.wide) value = value - value == 0.0f ? value : 0.0f;  // the cache would keep NaN and inf
    if (head.generation == 3) {
      for (int64_t node = 0; head.streams_norm && node < n; ++node) {
        float* wide = room.wide.data() + node * head.width;
        norm(wide, head.streams_norm, head.width, head.eps, wide);
      }
      foredraft_product(&head.fuse, room.wide.data(), n, room.features.data(), threads);
    }
    features = head.generation == 3 ? room.features.data() : room.wide.data();
  }
  for (int64_t node = 0; node < n; ++node) {
    const float *embedded = room.embedded.data() + node * size, *feature = features + node * size;
    float *both = room.inputs.data() + 2 * node * size, *x = room.x.data() + node * size;
    if (head.generation == 3) {
      norm(embedded, head.input_norm, size, head.eps, both);
      norm(feature, head.hidden_norm, size, head.eps, both + size);
      memcpy(x, head.is_residual_normed ? both + size : feature, size * sizeof(float));
    } else {
      memcpy(both, embedded, size * sizeof(float));
      memcpy(both + size, feature, size * sizeof(float));
    }
  }
  if (head.generation == 3) return;
  foredraft_product(&head.fuse, room.inputs.data(), n, room.x.data(), threads);
  room.inputs = room.x;
  for (int64_t node = 0; head.input_norm && node < n; ++node)
    norm(room.x.data() + node * size, head.input_norm, size, head.eps, room.inputs.data() + node * size);
}

static void run_level(const Head& head, const Level& level, int threads) {
  static thread_local Room room;
  const Nodes& nodes = *level.nodes;
  const int64_t n = nodes.count, size = head.size, dim = head.head_dim, width = head.heads * dim;
  const int64_t kv = head.kv_heads * dim, all_heads = width + 2 * kv;
  room.listed.take(nodes);
  mix(head, level, room, threads);
  room.heads.resize(n * all_heads), room.queries.resize(n * width), room.mixed.resize(n * size);
  foredraft_product(&head.heads_in, room.inputs.data(), n, room.heads.data(), threads);
  float cosines[MOST_HALF], sines[MOST_HALF];
  for (int64_t node = 0; node < n; ++node) {
    const int64_t row = room.listed.rows[node], number = nodes.earlier + node - room.listed.firsts[row];
    const float position = (float)position_of(nodes, row, number);
    float* states = room.heads.data() + node * all_heads;
    for (int64_t i = 0; i < dim / 2; ++i) {
      const float angle = position * head.frequencies[i];
      cosines[i] = cosf(angle) * head.rope_factor, sines[i] = sinf(angle) * head.rope_factor;
    }
    rotate(states, head.heads + head.kv_heads, dim, cosines, sines);
    narrow(states, room.queries.data() + node * width, width);
    for (int64_t i = 0; i < head.kv_heads; ++i) {
      const int64_t place = row * level.row + i * level.head + room.listed.columns[node] * dim;
      narrow(states + width + i * dim, level.keys + place, dim);
      narrow(states + width + kv + i * dim, level.values + place, dim);
    }
  }
  attend(head, level, room, threads);
  room.states.resize(n * width);
  widen(room.seen.data(), room.states.data(), n * width);
  foredraft_product(&head.heads_out, room.states.data(), n, room.mixed.data(), threads);
  room.inputs.resize(n * size), room.both.resize(2 * n * head.inner), room.gated.resize(n * head.inner);
  for (int64_t node = 0; node < n; ++node) {
    float* x = room.x.data() + node * size;
    for (int64_t i = 0; i < size; ++i) x[i] += room.mixed[node * size + i];
    norm(x, head.post_norm, size, head.eps, room.inputs.data() + node * size);
  }
  foredraft_product(&head.gate_up, room.inputs.data(), n, room.both.data(), threads);
  for (int64_t node = 0; node < n; ++node)
    gated(room.both.data() + 2 * node * head.inner, head.inner, room.gated.data() + node * head.inner);
  foredraft_product(&head.down, room.gated.data(), n, room.mixed.data(), threads);
  for (int64_t node = 0; node < n; ++node) {
    float *x = room.x.data() + node * size, *to = level.outputs + node * size;
    for (int64_t i = 0; i < size; ++i) to[i] = x[i] + room.mixed[node * size + i];
    if (head.norms_output) norm(to, head.norm, size, head.eps, to);
  }
}

extern "C" void foredraft_head_level(const Head* head, const Level* level, int threads) {
  run_level(*head, *level, threads);
}

// Logits (n, V_d) of outputs (n, H).
extern "C" void foredraft_head_logits(const Head* head, const float* outputs, int64_t n, float* logits, int threads) {
  static thread_local std::vector<float> normed;
  const int64_t size = head->size;
  normed.assign(outputs, outputs + n * size);
  for (int64_t node = 0; head->norm && !head->norms_output && node < n; ++node)
    norm(outputs + node * size, head->norm, size, head->eps, normed.data() + node * size);
  foredraft_product(&head->output, normed.data(), n, logits, threads);
}
