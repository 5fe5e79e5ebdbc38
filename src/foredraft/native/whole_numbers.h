// Vectors of integers by instruction set, and sums of products of bytes.

#pragma once

#include "vectors.h"

#if defined(FOREDRAFT_AVX2)
typedef __m256i Whole;
static inline Whole all_whole(int32_t value) { return _mm256_set1_epi32(value); }
static inline Whole read_bytes(const void* from) { return _mm256_loadu_si256((const Whole*)from); }
static inline Vector as_floats(Whole values) { return _mm256_cvtepi32_ps(values); }
static inline Whole even(Whole bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi16(255)); }
static inline Whole odd(Whole bytes) { return _mm256_srli_epi16(bytes, 8); }
static inline Whole add_whole(Whole a, Whole b) { return _mm256_add_epi32(a, b); }
static inline Whole add_pairs(Whole sums, Whole a, Whole b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
static inline Whole multiply_whole(Whole a, Whole b) { return _mm256_mullo_epi32(a, b); }
static inline Whole all_words(int16_t value) { return _mm256_set1_epi16(value); }
static inline Whole twos(Whole a, Whole b) { return _mm256_maddubs_epi16(a, b); }
static inline Whole add_twos(Whole sums, Whole a, Whole b) { return _mm256_add_epi16(sums, twos(a, b)); }
static inline Whole lower_halves(Whole bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
static inline Whole times_256(Whole values) { return _mm256_slli_epi32(values, 8); }
static inline Whole bits_in_both(Whole a, Whole b) { return _mm256_and_si256(a, b); }
static inline Whole bits_in_either(Whole a, Whole b) { return _mm256_or_si256(a, b); }
static inline Whole shifted_up(Whole words, int bits) { return _mm256_slli_epi16(words, bits); }
static inline Whole shifted(Whole words, int bits) { return _mm256_srli_epi16(words, bits); }
static inline Whole nearest(Vector values) { return _mm256_cvtps_epi32(values); }
static inline void write_whole(int32_t* to, Whole values) { _mm256_storeu_si256((Whole*)to, values); }
static inline Whole widened(const uint8_t* bytes) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes)); }
static inline Whole widened(const int8_t* bytes) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)bytes)); }
static inline int32_t sum_of_whole(Whole values) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}
static inline void write_bytes(uint8_t* to, Whole values) {
  const __m256i lowest = _mm256_shuffle_epi8(values, _mm256_broadcastsi128_si256(_mm_cvtsi32_si128(0x0c080400)));
  const int32_t halves[2] = {_mm256_extract_epi32(lowest, 0), _mm256_extract_epi32(lowest, 4)};
  memcpy(to, halves, 8);
}
static inline void write_split(uint8_t*, Whole) {}  // not used without VNNI, which multiplies bytes
static inline void write_words(uint8_t* to, Whole values) {
  const __m128i words = _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packs_epi32(values, values), 0x08));
  _mm_storeu_si128((__m128i*)to, _mm_shufflehi_epi16(_mm_shufflelo_epi16(words, 0xd8), 0xd8));
}
// The same with sums that stay in their registers. Compilers move products ahead of additions and then run out of
// registers, or copy sums.
static inline Whole add_pairs_in_place(Whole sums, Whole a, Whole b) {
  asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(_mm256_madd_epi16(a, b)));
  return sums;
}
static inline Whole add_twos_in_place(Whole sums, Whole a, Whole b) {
  asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(twos(a, b)));
  return sums;
}
static const bool has_vnni = false;
#define WITH_VNNI inline
static inline Whole add_pairs_at_once(Whole sums, Whole, Whole) { return sums; }
static inline Whole add_fours_at_once(Whole sums, Whole, Whole) { return sums; }
#else
typedef __m512i Whole;
static inline Whole all_whole(int32_t value) { return _mm512_set1_epi32(value); }
static inline Whole read_bytes(const void* from) { return _mm512_loadu_si512(from); }
static inline Vector as_floats(Whole values) { return _mm512_cvtepi32_ps(values); }
static inline Whole even(Whole bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi16(255)); }
static inline Whole odd(Whole bytes) { return _mm512_srli_epi16(bytes, 8); }
static inline Whole add_whole(Whole a, Whole b) { return _mm512_add_epi32(a, b); }
static inline Whole add_pairs(Whole sums, Whole a, Whole b) { return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b)); }
static inline Whole multiply_whole(Whole a, Whole b) { return _mm512_mullo_epi32(a, b); }
static inline Whole all_words(int16_t value) { return _mm512_set1_epi16(value); }
static inline Whole twos(Whole a, Whole b) { return _mm512_maddubs_epi16(a, b); }
static inline Whole add_twos(Whole sums, Whole a, Whole b) { return _mm512_add_epi16(sums, twos(a, b)); }
static inline Whole lower_halves(Whole bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
static inline Whole times_256(Whole values) { return _mm512_slli_epi32(values, 8); }
static inline Whole bits_in_both(Whole a, Whole b) { return _mm512_and_si512(a, b); }
static inline Whole bits_in_either(Whole a, Whole b) { return _mm512_or_si512(a, b); }
static inline Whole shifted_up(Whole words, int bits) { return _mm512_slli_epi16(words, bits); }
static inline Whole shifted(Whole words, int bits) { return _mm512_srli_epi16(words, bits); }
static inline Whole nearest(Vector values) { return _mm512_cvtps_epi32(values); }
static inline void write_whole(int32_t* to, Whole values) { _mm512_storeu_si512(to, values); }
static inline Whole widened(const uint8_t* bytes) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes)); }
static inline Whole widened(const int8_t* bytes) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)bytes)); }
static inline int32_t sum_of_whole(Whole values) { return _mm512_reduce_add_epi32(values); }
static inline void write_bytes(uint8_t* to, Whole values) {
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(values));
}
static inline void write_split(uint8_t* to, Whole values) {  // values = 256 * upper + lower, both signed
  const __m128i lower = _mm512_cvtepi32_epi8(values);
  const __m128i upper = _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(values, _mm512_set1_epi32(128)), 8));
  _mm_storeu_si128((__m128i*)to, _mm_unpacklo_epi32(upper, lower));
  _mm_storeu_si128((__m128i*)to + 1, _mm_unpackhi_epi32(upper, lower));
}
static inline void write_words(uint8_t* to, Whole values) {
  const __m256i words = _mm512_cvtepi32_epi16(values);
  _mm256_storeu_si256((__m256i*)to, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
}
static inline Whole add_pairs_in_place(Whole sums, Whole a, Whole b) { return add_pairs(sums, a, b); }
static inline Whole add_twos_in_place(Whole sums, Whole a, Whole b) { return add_twos(sums, a, b); }
#if defined(__AVX512VNNI__)
static const bool has_vnni = true;
#define WITH_VNNI inline
#else
static const bool has_vnni = __builtin_cpu_supports("avx512vnni");
#define WITH_VNNI __attribute__((target("avx512vnni")))
#endif
static WITH_VNNI Whole add_pairs_at_once(Whole sums, Whole a, Whole b) { return _mm512_dpwssd_epi32(sums, a, b); }
static WITH_VNNI Whole add_fours_at_once(Whole sums, Whole a, Whole b) { return _mm512_dpbusd_epi32(sums, a, b); }
#endif

// Repeats four bytes in every lane.
static inline Whole four_of(const void* values) {
  int32_t four;
  memcpy(&four, values, 4);
  return all_whole(four);
}
