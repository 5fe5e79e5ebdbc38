// Computation between products: norms, angles, activations, sums and orders, one node after another, in float32.
//
// The instructions for a number do not depend on its lane, and the order of a sum depends only on the number of its
// terms. The bits of a node therefore do not depend on other nodes.

#pragma once

#include "abi.h"
#include "functions.h"

#include <algorithm>
#include <vector>

template <int64_t CODE>
static inline Vector applied(Vector a, Vector b) {
  switch (CODE) {
    case NEG: return zero() - a;
    case ABS: return size_of(a);
    case RELU: return larger(zero(), a);  // if one is NaN, the instruction returns the second argument
    case EXP: return power_of_e(a);
    case SQRT: return root(a);
    case RSQRT: return all(1.0f) / root(a);
    case RECIPROCAL: return all(1.0f) / a;
    case SIGMOID: return sigmoid(a);
    case SILU: return a * sigmoid(a);
    case TANH: return hyperbolic_tangent(a);
    case GELU: return all(0.5f) * a * (all(1.0f) + error_function(a * all(0.70710678118654752f)));
    case GELU_TANH: {
      const Vector inner = all(0.79788456080286536f) * add_product(a * a * a, all(0.044715f), a);
      return all(0.5f) * a * (all(1.0f) + hyperbolic_tangent(inner));
    }
    case ADD: return a + b;
    case SUB: return a - b;
    case MUL: return a * b;
    case DIV: return a / b;
    case LARGER: return larger(b, a);
    case SMALLER: return smaller(b, a);
    default: return a;
  }
}

static inline bool is_of_two(int64_t code) { return code >= ADD && code < SUM; }

// Reads numbers `stride` apart into a vector; fewer than a vector at the end.
template <typename T>
static inline Vector gathered(const T* from, int64_t stride, int64_t count) {
  if (stride == 1) return read_first(from, count);
  if (stride == 0) return all(value_of(*from));
  float numbers[LANES] = {};
  for (int64_t i = 0; i < count && i < LANES; ++i) numbers[i] = value_of(from[i * stride]);
  return read(numbers);
}

template <int64_t CODE, typename A, typename B, typename Out>
static inline void apply_row(int64_t count, const A* a, int64_t a_stride, const B* b, int64_t b_stride, Out* out,
                             int64_t out_stride) {
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t left = count - i;
    const Vector value = applied<CODE>(gathered(a + i * a_stride, a_stride, left),
                                       CODE >= ADD ? gathered(b + i * b_stride, b_stride, left) : zero());
    if (out_stride == 1) {
      write_first(out + i, value, left);
      continue;
    }
    float numbers[LANES];
    write(numbers, value);
    for (int64_t j = 0; j < left && j < LANES; ++j) store(out + (i + j) * out_stride, numbers[j]);
  }
}

// Sum of contiguous numbers. Its order depends only on the number of terms.
static inline float sum_of(const float* from, int64_t count) {
  Vector sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    for (int j = 0; j < 4; ++j) sums[j] = sums[j] + read(from + i + j * LANES);
  for (int j = 0; i < count; i += LANES, j = (j + 1) % 4) sums[j] = sums[j] + read_first(from + i, count - i);
  float parts[LANES];
  write(parts, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) parts[lane] += parts[lane + width];
  return parts[0];
}

static inline float largest_of(const float* from, int64_t count) {
  float most = from[0];
  for (int64_t i = 1; i < count; ++i) most = from[i] > most ? from[i] : most;
  return most;
}

// Writes the places of contiguous numbers, the largest number first; of equal ones the first, NaN before all others.
static inline void write_order(const float* from, int64_t count, float* out, int64_t stride, std::vector<int32_t>& order) {
  order.resize(count);
  for (int64_t i = 0; i < count; ++i) order[i] = (int32_t)i;
  const auto is_before = [&](int32_t a, int32_t b) {
    const bool is_nan = from[a] != from[a], is_other_nan = from[b] != from[b];
    if (is_nan || is_other_nan) return is_nan != is_other_nan ? is_nan : a < b;
    return from[a] != from[b] ? from[a] > from[b] : a < b;
  };
  std::sort(order.begin(), order.end(), is_before);
  for (int64_t i = 0; i < count; ++i) out[i * stride] = (float)order[i];
}
