// A head of EAGLE and what it is given: described by heads/native.py in the same order.

#pragma once

#include "calls.h"
#include "vectors.h"

#if defined(FORETOKEN_AMX) || defined(FORETOKEN_AVX512_BF16)
// e^x within 2e-5 of it.
static inline Vector exponential(Vector x) {
  const Vector scaled = _mm512_mul_ps(_mm512_max_ps(x, all(-87.0f)), all(1.44269504f));
  const Vector whole = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vector rest = _mm512_sub_ps(scaled, whole);
  Vector power = all(0.00961812911f);
  power = add_product(power, rest, all(0.0555041087f));
  power = add_product(power, rest, all(0.240226507f));
  power = add_product(power, rest, all(0.693147181f));
  power = add_product(power, rest, all(1.0f));
  return _mm512_scalef_ps(power, whole);
}
#endif

enum { BYTES_BLOCK = 32, MOST_LEVELS = 64, MOST_HALF = 256 };

struct Bytes {  // a matrix (N, K): by 32 outputs and 4 inputs, two vectors of 16 outputs x 4 inputs, 128 too large
  int64_t inputs, outputs;  // inputs: a multiple of 64
  const uint8_t* weight;
  const float* scales;  // (N,)
  const float* bias;    // (N,), or null
};

struct Head {
  int64_t generation, size, width, heads, kv_heads, head_dim, inner, is_residual_normed, norms_output;
  const uint16_t* table;     // (V, size), of embeddings
  const float* frequencies;  // (head_dim / 2,)
  const float *embed_norm, *streams_norm, *input_norm, *hidden_norm, *post_norm, *norm;  // null where there is none
  Bytes fuse, heads_in, heads_out, gate_up, down, output;
  float eps, rope_factor;
};

struct Level {
  int64_t nodes, rows;
  const int64_t *tokens, *positions, *columns, *prefix;  // of every node; prefix: columns before this one are seen
  const int64_t* above;                                  // (nodes, MOST_LEVELS): further columns that are seen, then -1
  const int64_t *counts, *firsts, *view;                 // of every row: nodes, the first, columns up to the last
  uint16_t *keys, *values;                               // of the first row
  int64_t row, head;                                     // strides of both, in numbers
  const float* features;                                 // (nodes, size) that the head predicted, or null
  const uint16_t* streams;                               // (nodes, width) of the target where there are no features
  float* outputs;                                        // (nodes, size)
};

struct Growing {
  int64_t pending, trunk, depth, branches, beam, most;  // trunk: entries of the text; most: nodes, root included
  uint16_t *keys, *values;
  int64_t row, head;
  int64_t owed;             // entries at the end of the trunk that are still to be made, of
  const int64_t* tokens_of;  // their tokens, (owed,), and
  const uint16_t* streams;  // (owed, width) of the target
  float* last;              // (size,), the output of the last entry; written where it was owed
  const int64_t* names;  // (V_d,), the tokens that columns of logits stand for; null for their own numbers
  int64_t *tokens, *parents;
  double* scores;  // (most,) each, of the draft
  double least_mass, least;  // of the nodes that are expanded next, together and each (a logarithm)
  float power;
};
