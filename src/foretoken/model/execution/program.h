// A model as a program: what abi.py describes in the same order.

#pragma once

#include "calls.h"

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
  int64_t columns;
};

struct Fed {  // rows of nodes, padded to one width; those of a row lie behind its committed columns
  int64_t rows, width, nodes;         // nodes: without padding
  int64_t earlier;                    // committed columns, the last ones of every row, that are nodes of the same trees
  const int64_t *tokens, *depths;     // (rows, width), and (rows, earlier + width) from the root
  const int64_t *counts, *lengths;    // of every row: nodes, and committed columns
  const int64_t* offsets;             // how far its positions are ahead of its columns; null for nowhere
  const uint8_t* ancestors;           // (rows, width, earlier + width); null where rows are chains
  int64_t first_row;                  // of the cache
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
