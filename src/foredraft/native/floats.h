// Products of float32 inputs with a packed float matrix. Sums are in float32, one product after another in the order of
// the inputs. A row therefore has the same bits in a small batch, which reads weights once, and in a large one.

#pragma once

#include "abi.h"
#include "threads.h"
#include "vectors.h"

#include <vector>

// ---- few rows -------------------------------------------------------------------------------------------------------

enum { BLOCK = 2 * LANES, MOST_ROWS = LANES == 8 ? 6 : 12 };

// Writes the sums of a block of outputs, plus the bias if there is one, to the first `count` outputs.
static inline void write_block(Vector low, Vector high, const float* bias, float* to, int64_t count) {
  if (bias) {
    low = low + read_first(bias, count);
    if (count > LANES) high = high + read_first(bias + LANES, count - LANES);
  }
  if (count >= BLOCK) {
    write(to, low);
    write(to + LANES, high);
  } else {
    write_first(to, low, count);
    write_first(to + LANES, high, count - LANES);
  }
}

// Prefetches weights, a line or two for every `every` inputs, while `ROWS` rows are multiplied.
template <typename Weight, int ROWS>
struct Fetch {
  enum { BYTES = BLOCK * sizeof(Weight), LINES = BYTES > 64 ? BYTES / 64 : 1, WAITS = ROWS <= 2 };  // memory-bound only
  const char* next;
  int64_t every;

  // A single group of rows prefetches a short distance ahead. Of several groups, each prefetches a part of the next
  // block.
  Fetch(const Matrix* matrix, int64_t block, int64_t group, int64_t groups)
      : every(groups * (BYTES < 64 ? 64 / BYTES : 1)) {
    const int64_t bytes = matrix->inputs * BYTES, part = (matrix->inputs + every - 1) / every * LINES * 64;
    const int64_t ahead = groups > 1 ? bytes + group * part : WAITS ? 128 * BYTES : 8192;
    next = (const char*)matrix->weight + block * bytes + ahead;
  }
  void operator()() {
    for (int line = 0; line < LINES; ++line, next += 64) _mm_prefetch(next, WAITS ? _MM_HINT_T0 : _MM_HINT_T1);
  }
};

template <typename Weight, int ROWS>
static inline void float_rows(const Matrix* matrix, const float* x, float* out, int64_t block, int64_t group,
                              int64_t groups) {
  const int64_t inputs = matrix->inputs, first = block * BLOCK, count = least(BLOCK, matrix->outputs - first);
  const Weight* weight = (const Weight*)matrix->weight + first * inputs;
  Fetch<Weight, ROWS> fetch(matrix, block, group, groups);
  Vector low[ROWS], high[ROWS];
  for (int row = 0; row < ROWS; ++row) low[row] = high[row] = zero();
  for (int64_t input = 0; input < inputs;) {
    fetch();
    const int64_t end = least(inputs, input + fetch.every);
    for (; input < end; ++input, weight += BLOCK) {
      const Vector one = read(weight), two = read(weight + LANES);
#pragma GCC unroll 12
      for (int row = 0; row < ROWS; ++row) {
        const Vector value = all(x[row * inputs + input]);
        low[row] = add_product(one, value, low[row]);
        high[row] = add_product(two, value, high[row]);
      }
    }
  }
  for (int row = 0; row < ROWS; ++row)
    write_block(low[row], high[row], matrix->bias ? matrix->bias + first : nullptr,
                out + row * matrix->outputs + first, count);
}

template <typename Weight, int ROWS>
static inline void some_rows(const Matrix* matrix, const float* x, int64_t num_rows, float* out, int64_t block,
                             int64_t group, int64_t groups) {
  if (num_rows >= ROWS)
    float_rows<Weight, ROWS>(matrix, x, out, block, group, groups);
  else if constexpr (ROWS > 1)
    some_rows<Weight, ROWS - 1>(matrix, x, num_rows, out, block, group, groups);
}

// Rows are processed in groups of about the same size.
template <typename Weight>
static void few_rows_of(const Matrix* matrix, const float* x, int64_t num_rows, float* out, int64_t first_block,
                        int64_t last_block) {
  const int64_t groups = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t block = first_block; block < last_block; ++block)
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t row = num_rows * group / groups, here = num_rows * (group + 1) / groups - row;
      some_rows<Weight, MOST_ROWS>(matrix, x + row * matrix->inputs, here, out + row * matrix->outputs, block,
                                   group, groups);
    }
}

static void few_floats(const Matrix* matrix, const float* x, int64_t num_rows, float* out, int64_t first, int64_t last) {
  switch (matrix->kind) {
    case FLOAT32: return few_rows_of<float>(matrix, x, num_rows, out, first, last);
    case BFLOAT16: return few_rows_of<Bfloat16>(matrix, x, num_rows, out, first, last);
    case FLOAT16: return few_rows_of<Float16>(matrix, x, num_rows, out, first, last);
  }
}

// ---- many rows ------------------------------------------------------------------------------------------------------

// Weights of a block for `DEPTH` inputs stay in the L1 cache; `HEIGHT` rows or `PANELS` floats of them stay in L2.
enum { MANY = 4 * MOST_ROWS, WIDE = 8 * BLOCK, DEPTH = 256, HEIGHT = 240, PANELS = 1 << 17, STRIDE = 8 };

// Arranges rows as panels of `MOST_ROWS` rows, input by input, with zeros after the last row.
static void lay_out(const float* x, int64_t stride, int64_t num_rows, int64_t depth, float* panels) {
  for (int64_t first = 0; first < num_rows; first += MOST_ROWS, panels += depth * MOST_ROWS) {
    const float* from = x + first * stride;
    const int64_t count = least(MOST_ROWS, num_rows - first);
    int64_t input = 0;
    for (; input + LANES <= depth; input += LANES) {
      Vector block[LANES];
      for (int64_t row = 0; row < LANES; ++row) block[row] = row < count ? read(from + row * stride + input) : zero();
      transpose(block);
      // the lanes after a panel's rows are overwritten by the next input
      for (int64_t i = 0; i < LANES; ++i) write(panels + (input + i) * MOST_ROWS, block[i]);
    }
    for (; input < depth; ++input)
      for (int64_t row = 0; row < MOST_ROWS; ++row)
        panels[input * MOST_ROWS + row] = row < count ? from[row * stride + input] : 0;
  }
}

// Adds the products of a panel to sums (rows x BLOCK), or to zeros if `sums` is null, and writes them to rows `stride`
// apart. Prefetches `lines` lines of the next weights at every few inputs.
template <int ROWS>
static inline void add_panel(const float* panel, const float* weight, int64_t depth, const float* sums, float* to,
                             int64_t stride, const char* next, int64_t lines) {
  Vector low[ROWS], high[ROWS];
  for (int row = 0; row < ROWS; ++row) {
    low[row] = sums ? read(sums + row * BLOCK) : zero();
    high[row] = sums ? read(sums + row * BLOCK + LANES) : zero();
  }
  for (int64_t input = 0; input < depth;) {
    for (int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    const int64_t end = least(depth, input + STRIDE);
    for (; input < end; ++input) {
      const Vector one = read(weight + input * BLOCK), two = read(weight + input * BLOCK + LANES);
#pragma GCC unroll 12
      for (int row = 0; row < ROWS; ++row) {
        const Vector value = all(panel[input * MOST_ROWS + row]);
        low[row] = add_product(one, value, low[row]);
        high[row] = add_product(two, value, high[row]);
      }
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    write(to + row * stride, low[row]);
    write(to + row * stride + LANES, high[row]);
  }
}

template <int ROWS>
static inline void add_up_to(int64_t num_rows, const float* panel, const float* weight, int64_t depth,
                             const float* sums, float* to, int64_t stride, const char* next, int64_t lines) {
  if (num_rows >= ROWS)
    add_panel<ROWS>(panel, weight, depth, sums, to, stride, next, lines);
  else if constexpr (ROWS > 1)
    add_up_to<ROWS - 1>(num_rows, panel, weight, depth, sums, to, stride, next, lines);
}

// Scratch memory of one thread, in floats.
struct Floats {
  enum { SUMS = HEIGHT * BLOCK, WEIGHTS = DEPTH * BLOCK };
  int64_t groups, height;  // groups of rows, and rows of a group, that are arranged at a time
  float *sums, *weights, *panels;

  Floats(int64_t inputs, int64_t num_rows, float* scratch)
      : sums(scratch), weights(scratch + SUMS), panels(weights + WEIGHTS) {
    const int64_t most = least(HEIGHT, PANELS / inputs / MOST_ROWS * MOST_ROWS);
    groups = (num_rows + most - 1) / (most ? most : 1);
    height = MOST_ROWS;
    if (most) height = rounded_up((num_rows + groups - 1) / groups, MOST_ROWS);
    groups = (num_rows + height - 1) / height;
  }
  static int64_t size(int64_t inputs, int64_t num_rows) {
    const Floats room(inputs, num_rows, nullptr);
    return rounded_up(SUMS + WEIGHTS + room.height * inputs + LANES, 16);
  }
};

// Adds the products of some inputs of all rows to the sums of one block, and writes them to `to`.
template <typename Weight>
static void add_inputs(const Weight* packed, int64_t depth, int64_t num_rows, const float* panels, bool begins,
                       bool fetches, float* to, int64_t stride, const Floats& room) {
  const float* weight = (const float*)packed;
  if constexpr (sizeof(Weight) != sizeof(float)) {
    for (int64_t at = 0; at < depth * BLOCK; at += LANES) write(room.weights + at, read(packed + at));
    weight = room.weights;
  }
  const int64_t strides = (depth + STRIDE - 1) / STRIDE, steps = (num_rows + MOST_ROWS - 1) / MOST_ROWS * strides;
  const int64_t lines = !fetches ? 0 : (depth * BLOCK * (int64_t)sizeof(Weight) / 64 + steps - 1) / steps;
  const char* next = (const char*)(packed + depth * BLOCK);
  for (int64_t row = 0; row < num_rows; row += MOST_ROWS, next += strides * lines * 64)
    add_up_to<MOST_ROWS>(least(MOST_ROWS, num_rows - row), panels + row * depth, weight, depth,
                         begins ? nullptr : room.sums + row * BLOCK, to + row * stride, stride, next, lines);
}

static void write_sums(const Matrix* matrix, const float* sums, int64_t num_rows, int64_t first, float* out) {
  const int64_t count = least(BLOCK, matrix->outputs - first);
  for (int64_t row = 0; row < num_rows; ++row, sums += BLOCK, out += matrix->outputs)
    write_block(read(sums), read(sums + LANES), matrix->bias ? matrix->bias + first : nullptr, out + first, count);
}

// Inputs are processed in chunks of about the same size.
static inline int64_t begin_of(int64_t chunk, int64_t chunks, int64_t inputs) { return inputs * chunk / chunks; }

static void lay_out_rows(const float* x, int64_t inputs, int64_t num_rows, const Floats& room) {
  const int64_t chunks = (inputs + DEPTH - 1) / DEPTH, whole = rounded_up(num_rows, MOST_ROWS);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t input = begin_of(chunk, chunks, inputs), depth = begin_of(chunk + 1, chunks, inputs) - input;
    lay_out(x + input, inputs, num_rows, depth, room.panels + whole * input);
  }
}

// Computes one block of outputs for the arranged rows.
template <typename Weight>
static void block_of(const Matrix* matrix, int64_t num_rows, float* out, int64_t block, const Floats& room) {
  const int64_t inputs = matrix->inputs, chunks = (inputs + DEPTH - 1) / DEPTH, first = block * BLOCK;
  const int64_t whole = rounded_up(num_rows, MOST_ROWS);
  const Weight* weight = (const Weight*)matrix->weight + first * inputs;
  const bool is_last = first + BLOCK >= matrix->outputs, is_direct = !matrix->bias && first + BLOCK <= matrix->outputs;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t input = begin_of(chunk, chunks, inputs), depth = begin_of(chunk + 1, chunks, inputs) - input;
    const bool ends = chunk + 1 == chunks, leaves = ends && is_direct;
    add_inputs(weight + input * BLOCK, depth, num_rows, room.panels + whole * input, chunk == 0, !ends || !is_last,
               leaves ? out + first : room.sums, leaves ? matrix->outputs : BLOCK, room);
  }
  if (!is_direct) write_sums(matrix, room.sums, num_rows, first, out);
}

// Returns false if there is no memory for arranging rows.
static bool many_floats(const Matrix* matrix, const float* x, int64_t num_rows, float* out, int threads) {
  const int64_t size = Floats::size(matrix->inputs, num_rows), blocks = (matrix->outputs + BLOCK - 1) / BLOCK;
  float* scratch = (float*)aligned_alloc(64, (size_t)(threads * size) * sizeof(float));
  if (!scratch) return false;
  std::vector<int64_t> laid_out(threads * 8, -1);  // the current group of every thread, one cache line each
  share_out(Floats(matrix->inputs, num_rows, scratch).groups * blocks, threads, [&](int64_t first, int64_t last, int own) {
    const Floats room(matrix->inputs, num_rows, scratch + own * size);
    for (int64_t task = first; task < last; ++task) {
      const int64_t group = task / blocks, row = group * room.height, here = least(room.height, num_rows - row);
      if (laid_out[own * 8] != group) lay_out_rows(x + row * matrix->inputs, matrix->inputs, here, room);
      laid_out[own * 8] = group;
      float* to = out + row * matrix->outputs;
      switch (matrix->kind) {
        case FLOAT32: block_of<float>(matrix, here, to, task % blocks, room); break;
        case BFLOAT16: block_of<Bfloat16>(matrix, here, to, task % blocks, room); break;
        case FLOAT16: block_of<Float16>(matrix, here, to, task % blocks, room);
      }
    }
  });
  free(scratch);
  return true;
}
