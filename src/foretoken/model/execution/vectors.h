// Vectors of float32 by instruction set, read from and written to memory of any kind.

#pragma once

#include <immintrin.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(FORETOKEN_AVX2)
typedef __m256 Vector;
enum { LANES = 8 };
static inline Vector zero() { return _mm256_setzero_ps(); }
static inline Vector all(float value) { return _mm256_set1_ps(value); }
static inline Vector add_product(Vector a, Vector b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
static inline void write(float* to, Vector value) { _mm256_storeu_ps(to, value); }
static inline Vector read(const float* from) { return _mm256_loadu_ps(from); }
static inline Vector read(const Bfloat16* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16));
}
static inline Vector read(const Float16* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
#else
typedef __m512 Vector;
enum { LANES = 16 };
static inline Vector zero() { return _mm512_setzero_ps(); }
static inline Vector all(float value) { return _mm512_set1_ps(value); }
static inline Vector add_product(Vector a, Vector b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
static inline void write(float* to, Vector value) { _mm512_storeu_ps(to, value); }
static inline Vector read(const float* from) { return _mm512_loadu_ps(from); }
static inline Vector read(const Bfloat16* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}
static inline Vector read(const Float16* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
#endif
