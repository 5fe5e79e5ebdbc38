// What replays are given: described by programs.py in the same order.

#pragma once

#include "calls.h"

struct Operand {  // the address that lies `offset` bytes into pointers[base]; the number `offset` where base is negative
  int64_t base, offset;
};

enum { MOST_OPERANDS = 24 };

struct Step {
  int64_t kind;
  void* kernel;  // of inductor
  Operand operands[MOST_OPERANDS];
};

enum { KERNEL = 0, PRODUCT = 1, ATTENTION = 2 };
enum { ARENA = 0, OUT = 1, KEYS = 2, VALUES = 3, SCRATCH = 4, INPUTS = 5 };  // places in pointers

struct Group {  // rows that run attention together
  const Attention* call;
  const void* mask;
  int64_t first_node, first_row;
};

struct Rows {  // where a forward writes keys and values, and what attends to them
  int64_t nodes;
  const int64_t *rows, *columns;  // of every node
  int64_t key_row, key_head, value_row, value_head;  // strides of the cache
  int64_t num_groups;
  const Group* groups;
};

struct Part {  // of a layer: steps that are made in a row
  const Step* steps;
  int64_t num_steps;
  char** pointers;
  const Rows* rows;
};

// Operands: matrix, x, number of rows, out, kind of x and out, and room for both in float32 where the matrix wants that.
void multiply(const int64_t* operands, int threads);

// Makes the steps of some parts, one after another.
extern "C" void foretoken_replay(const Part* parts, int64_t num_parts, int threads);
