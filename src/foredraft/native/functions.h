// Functions of vectors: maxima and minima, exponentials, and the components of activation functions.
//
// The result for a number does not depend on its lane.

#pragma once

#include "vectors.h"

static const float FACTORS[6] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};  // of the series of e^x

#if defined(FOREDRAFT_AVX2)

static inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }

static inline float largest(Vector values) {
  float all_of[LANES], most;
  write(all_of, values);
  most = all_of[0];
  for (int lane = 1; lane < LANES; ++lane) most = all_of[lane] > most ? all_of[lane] : most;
  return most;
}

// e^x for x <= 0, and 0 where the result would be denormal.
static inline Vector exponential(Vector x) {
  const Vector tiny = _mm256_cmp_ps(x, all(-87.0f), _CMP_LT_OQ);
  const Vector n = _mm256_round_ps(_mm256_mul_ps(x, all(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vector r = add_product(n, all(-1.42860677e-6f), add_product(n, all(-0.693145752f), x));
  Vector y = all(1.0f / 720);
  for (int i = 0; i < 6; ++i) y = add_product(y, r, all(FACTORS[i]));
  const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_andnot_ps(tiny, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), power)));
}

static inline Vector where_zero(Vector test, Vector values, Vector others) {
  return _mm256_blendv_ps(others, values, _mm256_cmp_ps(test, zero(), _CMP_EQ_OQ));
}

static inline Vector smaller(Vector a, Vector b) { return _mm256_min_ps(a, b); }
static inline Vector root(Vector a) { return _mm256_sqrt_ps(a); }
static inline Vector where(Vector a, Vector b, Vector less, Vector otherwise) {  // a < b
  return _mm256_blendv_ps(otherwise, less, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

#else

static inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
static inline float largest(Vector values) { return _mm512_reduce_max_ps(values); }

static inline Vector exponential(Vector x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, all(-87.0f), _CMP_NLT_UQ);
  const Vector n = _mm512_roundscale_ps(_mm512_mul_ps(x, all(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const Vector r = add_product(n, all(-1.42860677e-6f), add_product(n, all(-0.693145752f), x));
  Vector y = all(1.0f / 720);
  for (int i = 0; i < 6; ++i) y = add_product(y, r, all(FACTORS[i]));
  const __m512i power = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
  return _mm512_maskz_mov_ps(normal, _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), power)));
}

static inline Vector where_zero(Vector test, Vector values, Vector others) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(test, zero(), _CMP_EQ_OQ), others, values);
}

static inline Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }
static inline Vector root(Vector a) { return _mm512_sqrt_ps(a); }
static inline Vector where(Vector a, Vector b, Vector less, Vector otherwise) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, less);
}

// 2^x for x <= 0, to six digits, and exactly 1 for 0.
static inline __m512 power_of_two(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
  __m512 y = _mm512_set1_ps(0.00958285f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.05590642f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.24024099f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.69312419f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, n);
}

#endif

static inline float sum_of(Vector values) {
  float parts[LANES], sum = 0;
  write(parts, values);
  for (int lane = 0; lane < LANES; ++lane) sum += parts[lane];
  return sum;
}

// Polynomial with the coefficient of the highest power first.
template <int N>
static inline Vector polynomial(Vector x, const float (&factors)[N]) {
  Vector y = all(factors[0]);
  for (int i = 1; i < N; ++i) y = add_product(y, x, all(factors[i]));
  return y;
}

static inline Vector size_of(Vector x) { return larger(x, zero() - x); }

// e^x for any x but NaN, as e^-|x| or its inverse.
static inline Vector power_of_e(Vector x) {
  const Vector below = exponential(zero() - size_of(x));
  return where(x, zero(), below, all(1.0f) / below);
}

// 1 / (1 + e^-x), computed without cancellation.
static inline Vector sigmoid(Vector x) {
  const Vector below = exponential(zero() - size_of(x));
  return where(x, zero(), below, all(1.0f)) / (all(1.0f) + below);
}

// Rational functions in x^2, as in numerical libraries, exact to a few units in the last place.
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
