// What the kernels are given: described by native.py and few_nodes.py in the same order.

#pragma once

#include <stdint.h>

struct Matrix {
  int64_t inputs;      // K
  int64_t outputs;     // N
  int64_t kind;        // one of the kinds below
  const void* weight;  // blocks of outputs, the last one filled up with zeros
  const float* bias;   // (N,), or null
  int64_t group;       // of codes in 4 bits: inputs that share a scale and a zero point,
  const float *scales, *zeros;  // by block of outputs, group, and output
};

enum { PAIRS = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3, NIBBLES = 4 };

struct Attention {
  int64_t rows, heads, group;  // heads of keys, and heads of queries that share one
  int64_t size, value_size;
  int64_t kind;                // of everything in memory: 1 float32, 2 bfloat16, 3 float16
  int64_t query_node, query_head, key_row, key_head, value_row, value_head, mask_row, mask_node;  // strides
  const int64_t* counts;       // nodes of every row
  const int64_t* firsts;       // where they begin in the list
  const int64_t* columns;      // that every row attends to at most
  float scale;
};

extern "C" void foretoken_product(const Matrix* matrix, const void* x, int64_t num_rows, void* out, int threads);
extern "C" void foretoken_attention(const Attention* call, const void* query, const void* keys, const void* values,
                                    const void* mask, void* out, float* scratch, int threads);

struct Chains {
  int64_t rows, heads, group;  // heads of keys, and heads of queries that share one
  int64_t size, value_size;
  int64_t kind;                // of everything in memory, as above
  int64_t query_node, query_head, key_row, key_head, value_row, value_head;  // strides
  int64_t window;              // columns that a node sees, its own included; 0 for all
  const int64_t* counts;       // nodes of every row
  const int64_t* firsts;       // where they begin in the list
  const int64_t* before;       // columns before the first node of every row
  float scale;                 // above zero
};
