// What lies between products: norms, angles, activations and sums, one node after another, in float32.
//
// A number is computed by the same instructions wherever in a vector it stands, and a sum in an order that depends on how
// many terms it has, so the bits of a node do not depend on what is computed beside it.

#pragma once

#include "program.h"
#include "softmax.h"

#include <math.h>

#if defined(FORETOKEN_AVX2)
static inline Vector smaller(Vector a, Vector b) { return _mm256_min_ps(a, b); }
static inline Vector root(Vector a) { return _mm256_sqrt_ps(a); }
static inline Vector where(Vector a, Vector b, Vector less, Vector otherwise) {  // a < b
  return _mm256_blendv_ps(otherwise, less, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
#else
static inline Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }
static inline Vector root(Vector a) { return _mm512_sqrt_ps(a); }
static inline Vector where(Vector a, Vector b, Vector less, Vector otherwise) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, less);
}
#endif

// Of a polynomial, the highest power first.
template <int N>
static inline Vector polynomial(Vector x, const float (&factors)[N]) {
  Vector y = all(factors[0]);
  for (int i = 1; i < N; ++i) y = add_product(y, x, all(factors[i]));
  return y;
}

static inline Vector size_of(Vector x) { return larger(x, zero() - x); }

// e^x for any x that is no NaN: of a negative one, or one by it.
static inline Vector power_of_e(Vector x) {
  const Vector below = exponential(zero() - size_of(x));
  return where(x, zero(), below, all(1.0f) / below);
}

// 1 / (1 + e^-x), without what is cancelled.
static inline Vector sigmoid(Vector x) {
  const Vector below = exponential(zero() - size_of(x));
  return where(x, zero(), below, all(1.0f)) / (all(1.0f) + below);
}

// Quotients of polynomials of x^2, as numerical libraries have them: within some units of the last place.
static inline Vector hyperbolic_tangent(Vector x) {
  static const float ABOVE[7] = {-2.76076847742355e-16f, 2.00018790482477e-13f, -8.60467152213735e-11f,
                                 5.12229709037114e-08f,  1.48572235717979e-05f, 6.37261928875436e-04f,
                                 4.89352455891786e-03f};
  static const float BELOW[4] = {1.19825839466702e-06f, 1.18534705686654e-04f, 2.26843463243900e-03f,
                                 4.89352518554385e-03f};
  const Vector limited = larger(all(-7.90531110763549805f), smaller(all(7.90531110763549805f), x));
  const Vector square = limited * limited;
  const Vector found = limited * polynomial(square, ABOVE) / polynomial(square, BELOW);
  return where(size_of(x), all(0.0004f), x, found);
}

static inline Vector error_function(Vector x) {
  static const float ABOVE[7] = {-2.72614225801306e-10f, 2.77068142495902e-08f,  -2.10102402082508e-06f,
                                 -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f,
                                 -1.60960333262415e-02f};
  static const float BELOW[5] = {-1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f,
                                 -7.37332916720468e-03f, -1.42647390514189e-02f};
  const Vector limited = larger(all(-4.0f), smaller(all(4.0f), x)), square = limited * limited;
  return limited * polynomial(square, ABOVE) / polynomial(square, BELOW);
}

template <int64_t CODE>
static inline Vector applied(Vector a, Vector b) {
  switch (CODE) {
    case NEG: return zero() - a;
    case ABS: return size_of(a);
    case RELU: return larger(zero(), a);  // of a NaN the second one is taken
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

// Numbers `stride` apart as a vector; of the last ones fewer than a vector.
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

// Of numbers side by side, in vectors and these in turn; an order that the number of terms decides.
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
