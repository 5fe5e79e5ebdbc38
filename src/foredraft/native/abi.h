// What Python and the kernels tell one another: described by abi.py in the same order.

#pragma once

#include <stdint.h>

// ---- products and attention ----

struct Matrix {
  int64_t inputs;      // K
  int64_t outputs;     // N
  int64_t kind;        // one of the kinds below
  const void* weight;  // blocks of outputs, the last one filled up with zeros
  const float* bias;   // (N,), or null
  int64_t group;       // of codes: inputs that share a scale and a zero, 0 for all
  int64_t scale_kind, zero_kind;  // FLOAT32, or FLOAT16 or MULTIPLES where there are groups; of zeros also BYTES
  const void *scales, *zeros;  // by block of outputs, group, and output; zeros: what a code of 0 stands for, or in bytes
                               // which code stands for 0; null where that is the one in the middle
  int64_t activation_bytes;    // of codes: 2, or 1 for drafts, which need no more: activations are rounded to so many
  int64_t value_kind;          // of codes: BFLOAT16 or FLOAT32, of what is multiplied and of the result
  int64_t half_shift;          // of multiples: 2 to this power groups share a number in half precision
  const void *scale_halves, *zero_halves;  // these, by block of outputs, groups that share one, and output
};

// MULTIPLES: bytes with a sign, of a number in half precision that several of them share. SCALED: of a cache, bytes with a
// sign, and behind those of a head the number in float32 that they are multiples of.
enum { PAIRS = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3, NIBBLES = 4, BYTES = 5, MULTIPLES = 6, SCALED = 7 };
enum { CODES_BLOCK = 32, CODES_SPAN = 64 };  // of codes: outputs of a block, and inputs that are rounded together at most

enum { SCALE_BYTES = 4 };

struct Attention {  // of lists of nodes over rows of a cache
  int64_t rows, heads, group;  // heads of keys, and heads of queries that share one
  int64_t size, value_size;
  int64_t kind, cache_kind;    // of everything in memory; of keys and values
  int64_t query_node, query_head, key_row, key_head, value_row, value_head, mask_row, mask_node;  // strides
  const int64_t* counts;       // nodes of every row
  const int64_t* firsts;       // where they begin in the list
  const int64_t* columns;      // of decoding: that every row attends to at most
  float scale;
  int64_t window;              // of prompts: columns that a node sees, its own included; 0 for all
  const int64_t* before;       // of prompts: columns before the first node of every row
};

// ---- nodes ----

struct Nodes {  // rows of nodes, padded to one width; those of a row lie behind its committed columns
  int64_t rows, width, count;         // count: without padding
  int64_t earlier;                    // committed columns, the last ones of every row, that are nodes of the same trees
  const int64_t *tokens, *depths;     // (rows, width), and (rows, earlier + width) from the root
  const int64_t *counts, *lengths;    // of every row: nodes, and committed columns
  const int64_t* offsets;             // how far its positions are ahead of its columns; null for nowhere
  const uint8_t* ancestors;           // (rows, width, earlier + width); null where rows are chains
  int64_t first_row;                  // of the cache
};

// ---- programs ----

// What an operation does to numbers in float32, node by node.
enum Code {
  COPY, NEG, ABS, RELU, EXP, SQRT, RSQRT, RECIPROCAL, SIGMOID, SILU, TANH, GELU, GELU_TANH,  // of one operand
  ADD, SUB, MUL, DIV, LARGER, SMALLER,                                                    // of two
  SUM,                                                                                   // over the last dimension
};

struct Operand {  // numbers `strides` apart, from `offset` numbers into a base on
  int64_t base, offset, strides[3];
};

struct Operation {
  int64_t code, sizes[3];  // the last dimension is the innermost one
  Operand out, first, second;
};

struct Base {  // memory that operands lie in
  int64_t role, place;  // place: of memory, bytes into it times nodes; else which one
  int64_t kind, bytes;  // of numbers; bytes: from one node to the next, 0 where all nodes share it
};

enum Role { SCRATCH, MEMORY, INPUT, GIVEN, OUTPUT };  // numbers of a thread, of all nodes; of the layer; what it returns

struct Step {
  int64_t kind, first, count;                // of operations
  int64_t matrix, input, output;             // of a product: place among what is given, and bases
  int64_t query, key, value, attended;       // of attention: bases
};

enum { OPERATIONS = 0, PRODUCT = 1, ATTENTION = 2 };

struct Program {  // what layers built alike do
  const Base* bases;
  const Operation* operations;
  const Step* steps;
  int64_t num_bases, num_steps, scratch, memory;  // numbers of a thread, and bytes of a node
};

struct Layer {
  const Program* program;
  void* const* given;     // weights and matrices
  const int64_t* inputs;  // which inputs of the model it is given beside hidden states
  int64_t num_inputs, form, cache;  // form: of attention, -1 without; cache: its place there
};

struct Form {  // layers that run attention alike
  int64_t heads, group, size, value_size, kind, window;  // window: positions that a node looks back, 0 for all
  float scale;
};

struct Table {  // of an input: a row for every token, or for every position; of one that is computed its bytes alone
  const char* rows;
  int64_t bytes, count, by_position;
  const Matrix* matrix;  // that rows are unpacked from; null where they lie in a table
  int64_t kind;          // of numbers of those rows
};

struct Model {
  int64_t num_layers, num_forms, num_tables, num_computed;
  int64_t first;  // which input of the model the first layer's hidden states are
  int64_t state_bytes, read_bytes, logit_bytes, kind;  // of a node; kind: of logits
  int64_t least_shared;  // numbers that are read for a product or an attention from which on threads share it
  const Layer* layers;
  const Form* forms;
  const Layer *before, *behind, *head;  // before: computes the last inputs of the tables; null where all are tables
};

struct Store {  // of a cache
  void *const *keys, *const *values;  // of every layer of it: (rows, heads, columns, size)
  int64_t columns, kind;
};

struct Results {
  char* states;          // (layers + 1, nodes, state_bytes): what the first layer is given, and what each returns
  char* read;            // (nodes, read_bytes): what the output embedding reads
  const int64_t* kept;   // nodes whose logits are wanted; null for all
  int64_t num_kept;
  char* logits;          // (num_kept, logit_bytes)
};

struct Drafts {
  const int64_t* depths;  // of every row: tokens at most
  int64_t most;           // of depths
  int64_t columns;        // of logits that count
  int64_t known;          // tokens that the model knows; its last one stands for others
  const int64_t* names;   // the tokens that columns stand for; null for their own numbers
  int64_t* tokens;        // (rows, most), -1 behind the last
};

// ---- heads in eight bits ----

enum { MOST_HALF = 256 };

struct Head {
  int64_t generation, size, width, heads, kv_heads, head_dim, inner, is_residual_normed, norms_output;
  int64_t is_float;          // whether embeddings and streams are float32, else bfloat16
  const void* table;         // (V, size), of embeddings
  const float* frequencies;  // (head_dim / 2,)
  const float *embed_norm, *streams_norm, *input_norm, *hidden_norm, *post_norm, *norm;  // null where there is none
  Matrix fuse, heads_in, heads_out, gate_up, down, output;  // codes of 8 bits
  float eps, rope_factor;
};

struct Level {
  const Nodes* nodes;
  uint16_t *keys, *values;  // of the first row
  int64_t row, head;        // strides of both, in numbers
  const float* features;    // (nodes, size) that the head predicted, or null
  const void* streams;      // (nodes, width) of the target where there are no features
  float* outputs;           // (nodes, size)
};

struct Drawing {  // where the target draws: noise by depth, and what is left of its law
  const uint64_t* keys;  // (depth,), of the match stream
  int64_t top_k;         // 0 for all
  float temperature, top_p, min_p;
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
  const Drawing* drawing;  // null where the target takes its likeliest tokens
  int64_t *tokens, *parents;
  double* scores;  // (most,) each, of the draft
  double least_mass, least;  // of the nodes that are expanded next, together and each (a logarithm)
  float power;
};

void fetch_matrix(const Matrix& matrix);

extern "C" {
void foredraft_rows(const Matrix* matrix, const int64_t* outputs, int64_t count, int64_t kind, void* out);
void unpack_codes(const Matrix* matrix, int64_t output, int64_t kind, void* out);
void multiply_codes(const Matrix* matrix, const void* x, int64_t rows, void* out, int threads);
void foredraft_product(const Matrix* matrix, const void* x, int64_t num_rows, void* out, int threads);
void foredraft_decode_attention(const Attention* call, const void* query, const void* keys, const void* values,
                                const void* mask, void* out, float* scratch, int threads);
int64_t foredraft_decode_attention_scratch(const Attention* call, int threads);
int64_t foredraft_argmax_at(const void* values, int64_t kind, int64_t row, int64_t stride, int64_t count);
void foredraft_gumbel_best_at(const void* values, int64_t kind, int64_t row, int64_t stride, int64_t count,
                              float temperature, uint64_t key, const int64_t* names, int64_t k, int64_t* columns,
                              double* sums);
}
