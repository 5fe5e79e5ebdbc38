// Vectors of whole numbers by instruction set, and sums of products of bytes.

#pragma once

#include "vectors.h"

#if defined(FORETOKEN_AVX2)
typedef __m256i Whole;
static inline Whole all_whole(int32_t value) { return _mm256_set1_epi32(value); }
static inline Whole read_bytes(const void* from) { return _mm256_loadu_si256((const Whole*)from); }
static inline Vector as_floats(Whole values) { return _mm256_cvtepi32_ps(values); }
static inline Whole even(Whole bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi16(255)); }
static inline Whole odd(Whole bytes) { return _mm256_srli_epi16(bytes, 8); }
static inline Whole add_pairs(Whole sums, Whole a, Whole b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
static const bool has_vnni = false;
#define WITH_VNNI inline
#else
typedef __m512i Whole;
static inline Whole all_whole(int32_t value) { return _mm512_set1_epi32(value); }
static inline Whole read_bytes(const void* from) { return _mm512_loadu_si512(from); }
static inline Vector as_floats(Whole values) { return _mm512_cvtepi32_ps(values); }
static inline Whole even(Whole bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi16(255)); }
static inline Whole odd(Whole bytes) { return _mm512_srli_epi16(bytes, 8); }
static inline Whole add_pairs(Whole sums, Whole a, Whole b) { return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b)); }
#if defined(__AVX512VNNI__)
static const bool has_vnni = true;
#define WITH_VNNI inline
#else
static const bool has_vnni = __builtin_cpu_supports("avx512vnni");
#define WITH_VNNI __attribute__((target("avx512vnni")))
#endif
#endif

// Four bytes in every place.
static inline Whole four_of(const void* values) {
  int32_t four;
  memcpy(&four, values, 4);
  return all_whole(four);
}
