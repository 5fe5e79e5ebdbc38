// Interface between Python and the kernels; abi.py describes it in the same order.

#pragma once

#include <stdint.h>

#define ALWAYS_INLINE inline __attribute__((always_inline))

// ---- products and attention ----

struct Matrix {
  int64_t inputs;      // K
  int64_t outputs;     // N
  int64_t kind;        // one of the kinds below
  const void* weight;  // blocks of outputs, the last one padded with zeros
  const float* bias;   // (N,), or null
  int64_t group;       // codes only: inputs that share a scale and a zero, 0 for all
  int64_t scale_kind, zero_kind;  // FLOAT32, or FLOAT16 or MULTIPLES with groups; zeros may also be BYTES
  const void *scales, *zeros;  // by block of outputs, group, and output. zeros: the weight of code 0 or, as BYTES, the
                               // code of weight 0; null if that is the code in the middle
  int64_t activation_bytes;    // codes only: bytes that activations are rounded to, 1 or 2
  int64_t value_kind;          // codes only: BFLOAT16 or FLOAT32, kind of the inputs and the result
  int64_t half_shift;          // MULTIPLES only: 2 to this power groups share a number in half precision
  const void *scale_halves, *zero_halves;  // these numbers, by block of outputs, groups that share one, and output
  int64_t ignores_infinite;    // codes only: 1 for drafts, where spans with infinite numbers become 0 instead of NaN
};

// MULTIPLES: int8 multiples of a number in half precision that several groups share. SCALED: int8 numbers of a cache,
// with one float32 scale after the numbers of each head.
enum {
  PAIRS = 0, FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3, NIBBLES = 4, BYTES = 5, MULTIPLES = 6, SCALED = 7, FIVES = 8, SIXES = 9
};
// Bits of a code by kind of matrix; 0 for matrices of floats.
static inline constexpr int64_t bits_of(int64_t kind) {
  return kind == NIBBLES ? 4 : kind == FIVES ? 5 : kind == SIXES ? 6 : kind == BYTES ? 8 : 0;
}
enum { CODES_BLOCK = 32, CODES_SPAN = 64 };  // outputs of a block of codes, and most inputs that are rounded together

enum { SCALE_BYTES = 4 };

struct Attention {  // of lists of nodes over rows of a cache
  int64_t rows, heads, group;  // heads: of keys; group: query heads per head of keys
  int64_t size, value_size;
  int64_t kind, cache_kind;    // of queries, masks and results; of keys and values
  int64_t query_node, query_head, key_row, key_head, value_row, value_head, mask_row, mask_node;  // strides
  const int64_t* counts;       // number of nodes of every row
  const int64_t* firsts;       // first node of every row in the list
  const int64_t* columns;      // decoding only: most columns that a node of every row sees
  float scale;
  int64_t window;              // prompts only: columns that a node sees, its own included; 0 for all
  const int64_t* before;       // prompts only: columns before the first node of every row
};

// ---- nodes ----

struct Nodes {  // rows of nodes, padded to one width; the nodes of a row follow its committed columns
  int64_t rows, width, count;         // count: nodes without padding
  int64_t earlier;                    // the last committed columns of every row, if they are nodes of the same trees
  const int64_t *tokens, *depths;     // (rows, width); (rows, earlier + width), distances from the root
  const int64_t *counts, *lengths;    // of every row: number of nodes, and of committed columns
  const int64_t* offsets;             // of every row: difference between positions and columns; null for 0
  const uint8_t* ancestors;           // (rows, width, earlier + width); null if all rows are chains
  int64_t first_row;                  // of the cache
};

// ---- programs ----

// Operations on float32 numbers, node by node.
enum Code {
  COPY, NEG, ABS, RELU, EXP, SQRT, RSQRT, RECIPROCAL, SIGMOID, SILU, TANH, GELU, GELU_TANH,  // one operand
  ADD, SUB, MUL, DIV, LARGER, SMALLER,                                                    // two operands
  SUM, PEAK,  // sum and largest of the last dimension
  ORDER,         // places of the numbers in the last dimension, the largest number first
  GATHER,        // numbers of the second operand at the places in the first
};

struct Operand {  // numbers at `strides`, `offset` numbers after the beginning of a base
  int64_t base, offset, strides[3];
};

struct Operation {
  int64_t code, sizes[3];  // the last dimension is the innermost
  Operand out, first, second;
};

struct Base {  // memory area that operands refer to
  int64_t role, place;  // place: for MEMORY the byte offset, times the number of nodes; else the index
  int64_t kind, bytes;  // kind: of the numbers; bytes: stride between nodes, 0 if all nodes share the memory
};

enum Role { SCRATCH, MEMORY, INPUT, GIVEN, OUTPUT };  // scratch of a thread or of all nodes; of the layer; its result

struct Step {
  int64_t kind, first, count;                // OPERATIONS: range of operations
  int64_t matrix, input, output;             // PRODUCT, GROUPED_PRODUCT: index of the matrix, and bases
  int64_t query, key, value, attended;       // ATTENTION: bases
  int64_t chosen, num_chosen, num_experts;   // GROUPED_PRODUCT: base of the experts that a node chooses, as float32
  int64_t has_own_inputs;                    // GROUPED_PRODUCT: whether every choice has an input, or every node
};

enum { OPERATIONS = 0, PRODUCT = 1, ATTENTION = 2, GROUPED_PRODUCT = 3 };

struct Program {  // computation of layers with the same structure
  const Base* bases;
  const Operation* operations;
  const Step* steps;
  int64_t num_bases, num_steps, scratch, memory;  // scratch: numbers per thread; memory: bytes per node
};

struct Layer {
  const Program* program;
  void* const* given;     // weights and matrices
  const int64_t* inputs;  // inputs of the model that the layer gets in addition to hidden states
  int64_t num_inputs, form, cache;  // form: index of its attention, -1 without; cache: index of its keys and values
};

struct Form {  // attention parameters that several layers share
  int64_t heads, group, size, value_size, kind, window;  // window: most positions that a node looks back, 0 for all
  float scale;
};

struct Table {  // an input with one row per token or per position; if the input is computed, only `bytes` is set
  const char* rows;
  int64_t bytes, count, by_position;
  const Matrix* matrix;  // matrix that rows are unpacked from; null for a plain table
  int64_t kind;          // of the numbers in these rows
};

struct Model {
  int64_t num_layers, num_forms, num_tables, num_computed;
  int64_t first;  // input of the model with the first layer's hidden states
  int64_t state_bytes, read_bytes, logit_bytes, kind;  // bytes per node; kind: of logits
  int64_t least_shared;  // least numbers read by a product or an attention for which threads share the work
  const Layer* layers;
  const Form* forms;
  const Layer *before, *behind, *head;  // before: computes the last inputs of the tables; null if all are tables
};

struct Store {  // of a cache
  void *const *keys, *const *values;  // of every cached layer: (rows, heads, columns, size)
  int64_t columns, kind;
};

struct Results {
  char* states;          // (layers + 1, nodes, state_bytes): input of the first layer, and output of every layer
  char* read;            // (nodes, read_bytes): input of the output embedding
  const int64_t* kept;   // nodes that need logits; null for all
  int64_t num_kept;
  char* logits;          // (num_kept, logit_bytes)
};

struct Drafts {
  const int64_t* depths;  // most tokens of every row
  int64_t most;           // largest of these depths
  int64_t columns;        // number of valid logits
  int64_t known;          // vocabulary size of the draft model; its last token replaces larger ids
  const int64_t* names;   // token ids of columns; null if columns are token ids
  int64_t* tokens;        // (rows, most), -1 after the last
};

// ---- heads in eight bits ----

enum { MOST_HALF = 256 };

struct Head {
  int64_t generation, size, width, heads, kv_heads, head_dim, inner, is_residual_normed, norms_output;
  int64_t is_float;          // whether embeddings and streams are float32, else bfloat16
  const void* table;         // (V, size), of embeddings
  const float* frequencies;  // (head_dim / 2,)
  const float *embed_norm, *streams_norm, *input_norm, *hidden_norm, *post_norm, *norm;  // null if absent
  Matrix fuse, heads_in, heads_out, gate_up, down, output;  // codes of 8 bits
  float eps, rope_factor;
};

struct Level {
  const Nodes* nodes;
  uint16_t *keys, *values;  // of the first row
  int64_t row, head;        // strides of both, in numbers
  const float* features;    // (nodes, size) that the head predicted, or null
  const void* streams;      // (nodes, width) of the target, if features are null
  float* outputs;           // (nodes, size)
};

struct Drawing {  // if the target samples: noise by depth, and the filters of its distribution
  const uint64_t* keys;  // (depth,), of the match stream
  int64_t top_k;         // 0 for all
  float temperature, top_p, min_p;
};

struct Growing {
  int64_t pending, trunk, depth, branches, beam, most;  // trunk: committed entries; most: nodes, root included
  uint16_t *keys, *values;
  int64_t row, head;
  int64_t owed;             // entries at the end of the trunk that still have to be computed
  const int64_t* tokens_of;  // (owed,), their tokens
  const void* streams;       // (owed, width), their streams of the target
  float* last;              // (size,), the output of the last entry; written if owed > 0
  const int64_t* names;  // (V_d,), token ids of the columns of logits; null if columns are token ids
  const Drawing* drawing;  // null if the target takes its most likely tokens
  int64_t *tokens, *parents;
  double* scores;  // (most,) each, of the draft
  double least_mass, least;  // bounds for the nodes that are expanded next: total probability; log-probability of each
  float power;
};

struct BlockShape {  // of a packed weight
  int64_t outputs, bytes;
};

BlockShape block_of(const Matrix& matrix);
void fetch_matrix(const Matrix& matrix);

extern "C" {
void foredraft_rows(const Matrix* matrix, const int64_t* outputs, int64_t count, int64_t kind, void* out);
void unpack_codes(const Matrix* matrix, int64_t output, int64_t kind, void* out);
void multiply_codes(const Matrix* matrix, const void* x, int64_t rows, void* out, int threads);
void foredraft_product(const Matrix* matrix, const void* x, int64_t num_rows, void* out, int threads);
int64_t foredraft_grouped_product(const Matrix* stack, int64_t num_experts, const void* x, int64_t repeats,
                                  const int64_t* chosen, int64_t count, void* out, int threads);
void foredraft_decode_attention(const Attention* call, const void* query, const void* keys, const void* values,
                                const void* mask, void* out, float* scratch, int threads);
int64_t foredraft_decode_attention_scratch(const Attention* call, int threads);
int64_t foredraft_argmax_at(const void* values, int64_t kind, int64_t row, int64_t stride, int64_t count);
void foredraft_gumbel_best_at(const void* values, int64_t kind, int64_t row, int64_t stride, int64_t count,
                              float temperature, uint64_t key, const int64_t* names, int64_t k, int64_t* columns,
                              double* sums);
}
