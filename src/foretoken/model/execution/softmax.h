// What attention computes of scores: largest ones, exponentials, sums that no order changes.

#pragma once

#include "vectors.h"

enum { STEP = 2 * LANES, MOST_SCORED = 6, MOST_SUMMED = 6, TILE = 128, CHUNK = 512 };
enum { WIDTH = LANES == 8 ? 2 : 4 };  // vectors of values that are summed at once, as registers allow

// Columns up to a whole step; rows of scores that begin in the same set of a cache are kept apart.
static inline int64_t padded(int64_t columns) {
  const int64_t whole = (columns + STEP - 1) / STEP * STEP;
  return whole % 1024 ? whole : whole + STEP;
}

static const float UNIT = 1099511627776.0f;  // 2^40
static const float FACTORS[6] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};  // of a series for e^x

// ---- vectors --------------------------------------------------------------------------------------------------------

#if defined(FORETOKEN_AVX2)

static inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }

static inline float largest(Vector values) {
  float all_of[LANES], most;
  write(all_of, values);
  most = all_of[0];
  for (int lane = 1; lane < LANES; ++lane) most = all_of[lane] > most ? all_of[lane] : most;
  return most;
}

// e^x for x <= 0, and 0 below the smallest number.
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

// The sum of weights between 0 and 1 in units of 2^-40, in which any order gives the same.
struct WholeSum {
  __m256i sums = _mm256_setzero_si256();
  void add(__m128 units) {
    const __m256d whole = _mm256_round_pd(_mm256_cvtps_pd(units), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const __m256d first = _mm256_set1_pd(4503599627370496.0);  // 2^52: the last bits of a sum with it are a whole number
    const __m256i bits = _mm256_castpd_si256(_mm256_add_pd(whole, first));
    sums = _mm256_add_epi64(sums, _mm256_sub_epi64(bits, _mm256_castpd_si256(first)));
  }
  void add(Vector weights) {
    const Vector units = _mm256_mul_ps(weights, all(UNIT));
    add(_mm256_castps256_ps128(units));
    add(_mm256_extractf128_ps(units, 1));
  }
  int64_t total() const {
    int64_t parts[4];
    _mm256_storeu_si256((__m256i*)parts, sums);
    return parts[0] + parts[1] + parts[2] + parts[3];
  }
};

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

struct WholeSum {
  __m512i sums = _mm512_setzero_si512();
  void add(Vector weights) {
    const Vector units = _mm512_mul_ps(weights, all(UNIT));
    sums = _mm512_add_epi64(sums, _mm512_cvttps_epi64(_mm512_castps512_ps256(units)));
    sums = _mm512_add_epi64(sums, _mm512_cvttps_epi64(_mm512_extractf32x8_ps(units, 1)));
  }
  int64_t total() const { return _mm512_reduce_add_epi64(sums); }
};

#endif

// Scores of the first `count` columns that are seen, which is where the mask is 0, and minus infinity for the others.
template <typename T>
static inline Vector seen_only(Vector scores, const T* mask, int64_t count) {
  const Vector unseen = all(-__builtin_inff());
  if (count >= LANES) return mask ? where_zero(read(mask), scores, unseen) : scores;
  float is_hidden[LANES];
  T last[LANES] = {};
  if (mask && count > 0) memcpy(last, mask, (size_t)count * sizeof(T));
  write(is_hidden, read(last));
  for (int64_t lane = count > 0 ? count : 0; lane < LANES; ++lane) is_hidden[lane] = 1;
  return where_zero(read(is_hidden), scores, unseen);
}
