// Products of float32 with a packed matrix of any kind, sums in float32 of one product after another in the order of the
// inputs: a row has the same bits among few rows, where weights are read once, and among many, where they are used often.

#pragma once

#include "calls.h"
#include "vectors.h"

// ---- few rows -------------------------------------------------------------------------------------------------------

enum { BLOCK = 2 * LANES, MOST_ROWS = LANES == 8 ? 6 : 12 };

template <typename Weight, int ROWS>
static inline void float_rows(const Matrix* matrix, const float* x, float* out, int64_t block, bool fetches) {
  const int64_t inputs = matrix->inputs, first = block * BLOCK, count = least(BLOCK, matrix->outputs - first);
  const Weight* weight = (const Weight*)matrix->weight + first * inputs;
  Vector low[ROWS], high[ROWS];
  for (int row = 0; row < ROWS; ++row) low[row] = high[row] = zero();
  for (int64_t input = 0; input < inputs; ++input, weight += BLOCK) {
    if (fetches)
      for (size_t byte = 0; byte < BLOCK * sizeof(Weight); byte += 64)
        _mm_prefetch((const char*)(weight + 16 * BLOCK) + byte, _MM_HINT_T0);
    const Vector one = read(weight), two = read(weight + LANES);
#pragma GCC unroll 12
    for (int row = 0; row < ROWS; ++row) {
      const Vector value = all(x[row * inputs + input]);
      low[row] = add_product(one, value, low[row]);
      high[row] = add_product(two, value, high[row]);
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    float sums[BLOCK];
    write(sums, low[row]);
    write(sums + LANES, high[row]);
    float* to = out + row * matrix->outputs + first;
    for (int64_t output = 0; output < count; ++output)
      to[output] = matrix->bias ? sums[output] + matrix->bias[first + output] : sums[output];
  }
}

template <typename Weight, int ROWS>
static inline void up_to(const Matrix* matrix, const float* x, int64_t num_rows, float* out, int64_t block,
                         bool fetches) {
  if (num_rows >= ROWS)
    float_rows<Weight, ROWS>(matrix, x, out, block, fetches);
  else if constexpr (ROWS > 1)
    up_to<Weight, ROWS - 1>(matrix, x, num_rows, out, block, fetches);
}

template <typename Weight>
static void floats(const Matrix* matrix, const float* x, int64_t num_rows, float* out, int64_t first_block,
                   int64_t last_block) {
  for (int64_t block = first_block; block < last_block; ++block)
    for (int64_t row = 0; row < num_rows; row += MOST_ROWS)
      up_to<Weight, MOST_ROWS>(matrix, x + row * matrix->inputs, num_rows - row, out + row * matrix->outputs, block,
                               row == 0);
}

// ---- many rows ------------------------------------------------------------------------------------------------------

// Weights of a block for `DEPTH` inputs stay in the first cache, `HEIGHT` rows or `PANELS` floats of them in the second.
enum { MANY = 4 * MOST_ROWS, DEPTH = 192, HEIGHT = 240, PANELS = 1 << 17, STRIDE = 8 };

// Panels of `MOST_ROWS` rows, input by input, with zeros behind the last row.
static void lay_out(const float* x, int64_t stride, int64_t num_rows, int64_t depth, float* panels) {
  for (int64_t first = 0; first < num_rows; first += MOST_ROWS, panels += depth * MOST_ROWS) {
    const float* from = x + first * stride;
    const int64_t count = least(MOST_ROWS, num_rows - first);
    int64_t input = 0;
    for (; input + LANES <= depth; input += LANES) {
      Vector block[LANES];
      for (int64_t row = 0; row < LANES; ++row) block[row] = row < count ? read(from + row * stride + input) : zero();
      transpose(block);
      // the lanes behind a panel's rows are written over by the next input
      for (int64_t i = 0; i < LANES; ++i) write(panels + (input + i) * MOST_ROWS, block[i]);
    }
    for (; input < depth; ++input)
      for (int64_t row = 0; row < MOST_ROWS; ++row)
        panels[input * MOST_ROWS + row] = row < count ? from[row * stride + input] : 0;
  }
}

// Adds to sums (rows x BLOCK) of a panel, or to zeros where there are none, and writes them to rows `stride` apart;
// `lines` of what comes next are fetched at every few inputs.
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

// Room of one thread, in floats.
struct Floats {
  enum { SUMS = HEIGHT * BLOCK, WEIGHTS = DEPTH * BLOCK };
  int64_t height;  // rows that are laid out at a time
  float *sums, *weights, *panels;

  Floats(int64_t inputs, float* scratch) : sums(scratch), weights(scratch + SUMS), panels(weights + WEIGHTS) {
    height = least(HEIGHT, PANELS / inputs / MOST_ROWS * MOST_ROWS);
    if (height < MOST_ROWS) height = MOST_ROWS;
  }
  static int64_t size(int64_t inputs) {
    const Floats room(inputs, nullptr);
    return (SUMS + WEIGHTS + room.height * inputs + LANES + 15) / 16 * 16;
  }
};

// Adds the products of some inputs of all rows to their sums over one block, which end up in `to`.
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
  const float* bias = matrix->bias ? matrix->bias + first : nullptr;
  for (int64_t row = 0; row < num_rows; ++row, sums += BLOCK, out += matrix->outputs)
    for (int64_t output = 0; output < count; ++output)
      out[first + output] = bias ? sums[output] + bias[output] : sums[output];
}

// Rows [from, to).
template <typename Weight>
static void many_rows_of(const Matrix* matrix, const float* x, int64_t from, int64_t to, float* out, const Floats& room) {
  const int64_t inputs = matrix->inputs, chunks = (inputs + DEPTH - 1) / DEPTH;
  for (int64_t row = from; row < to; row += room.height) {
    const int64_t num_rows = least(room.height, to - row), whole = (num_rows + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t input = inputs * chunk / chunks, depth = inputs * (chunk + 1) / chunks - input;
      lay_out(x + row * inputs + input, inputs, num_rows, depth, room.panels + whole * input);
    }
    for (int64_t first = 0; first < matrix->outputs; first += BLOCK) {
      const Weight* weight = (const Weight*)matrix->weight + first * inputs;
      const bool is_last = first + BLOCK >= matrix->outputs, is_direct = !matrix->bias && first + BLOCK <= matrix->outputs;
      float* to = out + row * matrix->outputs;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t input = inputs * chunk / chunks, depth = inputs * (chunk + 1) / chunks - input;
        const bool ends = chunk + 1 == chunks, leaves = ends && is_direct;
        add_inputs(weight + input * BLOCK, depth, num_rows, room.panels + whole * input, chunk == 0, !ends || !is_last,
                   leaves ? to + first : room.sums, leaves ? matrix->outputs : BLOCK, room);
      }
      if (!is_direct) write_sums(matrix, room.sums, num_rows, first, to);
    }
  }
}

// Rows are shared out among the threads. Returns: false where there is no memory to lay them out.
static bool many_floats(const Matrix* matrix, const float* x, int64_t num_rows, float* out, int threads) {
  const int64_t size = Floats::size(matrix->inputs), panels = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
  if (threads < 1) threads = 1;
  float* scratch = (float*)aligned_alloc(64, (size_t)(threads * size) * sizeof(float));
  if (!scratch) return false;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t index = omp_get_thread_num(), count = omp_get_num_threads();
    const int64_t from = panels * index / count * MOST_ROWS, to = least(num_rows, panels * (index + 1) / count * MOST_ROWS);
    const Floats room(matrix->inputs, scratch + index * size);
    switch (matrix->kind) {
      case FLOAT32: many_rows_of<float>(matrix, x, from, to, out, room); break;
      case BFLOAT16: many_rows_of<Bfloat16>(matrix, x, from, to, out, room); break;
      case FLOAT16: many_rows_of<Float16>(matrix, x, from, to, out, room);
    }
  }
  free(scratch);
  return true;
}
