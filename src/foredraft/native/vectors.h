// Vectors of float32 by instruction set, with reads from and writes to memory of any format.

#pragma once

#include <immintrin.h>
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

static constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(FOREDRAFT_AVX2)
typedef __m256 Vector;
enum { LANES = 8 };
static inline Vector zero() { return _mm256_setzero_ps(); }
static inline Vector all(float value) { return _mm256_set1_ps(value); }
static inline Vector add_product(Vector a, Vector b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
static inline bool differ(Vector a, Vector b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)) != 0; }
static inline void write(float* to, Vector value) { _mm256_storeu_ps(to, value); }
static inline Vector read(const float* from) { return _mm256_loadu_ps(from); }
static inline Vector read(const Bfloat16* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16));
}
static inline Vector read(const Float16* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
static inline Vector read(const uint8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
#else
typedef __m512 Vector;
enum { LANES = 16 };
static inline Vector zero() { return _mm512_setzero_ps(); }
static inline Vector all(float value) { return _mm512_set1_ps(value); }
static inline Vector add_product(Vector a, Vector b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
static inline bool differ(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0; }
static inline void write(float* to, Vector value) { _mm512_storeu_ps(to, value); }
static inline Vector read(const float* from) { return _mm512_loadu_ps(from); }
static inline Vector read(const Bfloat16* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
}
static inline Vector read(const Float16* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
static inline Vector read(const uint8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
#endif

// Reads the first `count` numbers of a vector, followed by zeros: 0 < count.
static inline Vector read_first(const float* from, int64_t count) {
  if (count >= LANES) return read(from);
#if defined(FOREDRAFT_AVX2)
  alignas(32) static const int32_t COUNTED[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return _mm256_maskload_ps(from, _mm256_loadu_si256((const __m256i*)(COUNTED + LANES - count)));
#else
  return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#endif
}

template <typename T>
static inline Vector read_first(const T* from, int64_t count) {
  if (count >= LANES) return read(from);
  T first[LANES] = {};
  memcpy(first, from, (size_t)count * sizeof(T));
  return read(first);
}

static inline void store(float* to, float value) { *to = value; }
static inline void store(Float16* to, float value) { to->bits = (uint16_t)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
static inline void store(Bfloat16* to, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  to->bits = value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float value_of(float from) { return from; }
static inline float value_of(Float16 from) { return _cvtsh_ss(from.bits); }
static inline float value_of(Bfloat16 from) {
  const uint32_t bits = (uint32_t)from.bits << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Write whole vectors in half precision, with the same rounding as single numbers.
#if defined(FOREDRAFT_AVX2)
static inline void write(Float16* to, Vector values) {
  _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
static inline void write(Bfloat16* to, Vector values) {
  const __m256i bits = _mm256_castps_si256(values), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nans = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const __m256i upper = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(0x7fc0), nans);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0x08);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(packed));
}
#else
static inline void write(Float16* to, Vector values) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}
static inline void write(Bfloat16* to, Vector values) {
  const __m512i bits = _mm512_castps_si512(values), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nans = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i upper = _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nans, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(upper));
}
#endif

// Writes the first `count` numbers of a vector in another format; none if count <= 0.
template <typename T>
static inline void write_first(T* to, Vector values, int64_t count) {
  if (count >= LANES) return write(to, values);
  float numbers[LANES];
  write(numbers, values);
  for (int64_t i = 0; i < count && i < LANES; ++i) store(to + i, numbers[i]);
}

// Whether all numbers are finite. `count` must be a multiple of two vectors.
static inline bool are_finite(const float* values, int64_t count) {
  Vector low = zero(), high = zero();
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    low = add_product(read(values + i), zero(), low);
    high = add_product(read(values + i + LANES), zero(), high);
  }
  return !differ(low, zero()) && !differ(high, zero());
}

static inline int64_t rounded_up(int64_t count, int64_t of) { return (count + of - 1) / of * of; }

template <typename T>
static inline float rounded(float value) {
  T kept;
  store(&kept, value);
  return value_of(kept);
}

// Transposes as many vectors as a vector has lanes.
#if defined(FOREDRAFT_AVX2)
static inline void transpose(Vector* r) {
  Vector t[8], s[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    s[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    s[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    s[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    s[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(s[i], s[i + 4], 0x31);
  }
}
#else
static inline void transpose(Vector* r) {
  Vector t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 16; i += 8)
    for (int j = i; j < i + 4; ++j) {
      t[j] = _mm512_shuffle_f32x4(r[j], r[j + 4], 0x88);
      t[j + 4] = _mm512_shuffle_f32x4(r[j], r[j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
  }
}
#endif

#if defined(FOREDRAFT_AMX)
struct __attribute__((packed)) TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// Configures eight tiles with the given numbers of rows of 64 bytes.
static inline void configure_tiles(const uint8_t (&rows)[8]) {
  TileConfig config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = rows[tile];
    config.bytes[tile] = 64;
  }
  _tile_loadconfig(&config);
}
#endif
