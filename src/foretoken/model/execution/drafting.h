// A head of EAGLE and what it is given: described by heads/native.py in the same order.

#pragma once

#include "calls.h"
#include "softmax.h"

static inline float sum_of(Vector values) {
  float parts[LANES], sum = 0;
  write(parts, values);
  for (int lane = 0; lane < LANES; ++lane) sum += parts[lane];
  return sum;
}

enum { BYTES_BLOCK = 32, MOST_LEVELS = 64, MOST_HALF = 256 };

struct Bytes {  // a matrix (N, K): by 32 outputs and 4 inputs, vectors of as many outputs as lanes x 4 inputs, 128 too large
  int64_t inputs, outputs;  // inputs: a multiple of 64
  const uint8_t* weight;
  const float* scales;  // (N,)
  const float* bias;    // (N,), or null
};

struct Head {
  int64_t generation, size, width, heads, kv_heads, head_dim, inner, is_residual_normed, norms_output;
  int64_t is_float;          // whether embeddings and streams are float32, else bfloat16
  const void* table;         // (V, size), of embeddings
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
  const void* streams;                                   // (nodes, width) of the target where there are no features
  float* outputs;                                        // (nodes, size)
};

struct Growing {
  int64_t pending, trunk, depth, branches, beam, most;  // trunk: entries of the text; most: nodes, root included
  uint16_t *keys, *values;
  int64_t row, head;
  int64_t owed;             // entries at the end of the trunk that are still to be made, of
  const int64_t* tokens_of;  // their tokens, (owed,), and
  const void* streams;       // (owed, width) of the target
  float* last;              // (size,), the output of the last entry; written where it was owed
  const int64_t* names;  // (V_d,), the tokens that columns of logits stand for; null for their own numbers
  int64_t *tokens, *parents;
  double* scores;  // (most,) each, of the draft
  double least_mass, least;  // of the nodes that are expanded next, together and each (a logarithm)
  float power;
};
