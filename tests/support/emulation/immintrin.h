// AVX-512, AVX512_BF16 and AMX tiles in plain C++, for machines without: the same lanes, one by one.
#pragma once
#include_next <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define syscall(...) 0  // the system would refuse tiles, which are none

typedef float F16 __attribute__((vector_size(64), may_alias));
typedef int32_t I16 __attribute__((vector_size(64), may_alias));
typedef uint32_t U16 __attribute__((vector_size(64), may_alias));
typedef int64_t I8 __attribute__((vector_size(64), may_alias));
typedef uint16_t H32 __attribute__((vector_size(64), may_alias));
typedef uint16_t H16 __attribute__((vector_size(32), may_alias));
typedef float F8 __attribute__((vector_size(32), may_alias));
#define EMU static inline __attribute__((always_inline))
#define EACH(n) for (int i = 0; i < n; ++i)

EMU float emu_bf(uint16_t v) { uint32_t b = (uint32_t)v << 16; float f; memcpy(&f, &b, 4); return f; }
EMU uint16_t emu_to_bf(float f) { uint32_t b; memcpy(&b, &f, 4); return f != f ? (uint16_t)((b >> 16) | 64) : (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16); }

EMU F16 e_set1_ps(float x) { F16 r; EACH(16) r[i] = x; return r; }
EMU I16 e_set1_epi32(int32_t x) { I16 r; EACH(16) r[i] = x; return r; }
EMU H32 e_set1_epi16(int16_t x) { H32 r; EACH(32) r[i] = x; return r; }
EMU F16 e_loadu_ps(const void* p) { F16 r; memcpy(&r, p, 64); return r; }
EMU void e_storeu(void* p, F16 v) { memcpy(p, &v, 64); }
EMU F16 e_load_ps(const void* p) { if ((uintptr_t)p % 64) __builtin_trap(); return e_loadu_ps(p); }
EMU void e_store(void* p, F16 v) { if ((uintptr_t)p % 64) __builtin_trap(); memcpy(p, &v, 64); }
EMU F16 e_maskz_loadu_ps(uint16_t k, const void* p) { F16 r; EACH(16) r[i] = 0; EACH(16) if (k >> i & 1) r[i] = ((const float*)p)[i]; return r; }
EMU H32 e_maskz_loadu_epi16(uint32_t k, const void* p) { H32 r; EACH(32) r[i] = 0; EACH(32) if (k >> i & 1) r[i] = ((const uint16_t*)p)[i]; return r; }
EMU void e_mask_storeu_epi16(void* p, uint32_t k, H32 v) { EACH(32) if (k >> i & 1) ((uint16_t*)p)[i] = v[i]; }
EMU F16 e_fmadd(F16 a, F16 b, F16 c) { F16 r; EACH(16) r[i] = fmaf(a[i], b[i], c[i]); return r; }
EMU F16 e_fmsub(F16 a, F16 b, F16 c) { F16 r; EACH(16) r[i] = fmaf(a[i], b[i], -c[i]); return r; }
EMU F16 e_max(F16 a, F16 b) { F16 r; EACH(16) r[i] = a[i] > b[i] ? a[i] : b[i]; return r; }
EMU I16 e_cvtps_epi32(F16 a) { I16 r; EACH(16) r[i] = _mm_cvtss_si32(_mm_set_ss(a[i])); return r; }
EMU F16 e_round(F16 a) { F16 r; EACH(16) r[i] = rintf(a[i]); return r; }
EMU F16 e_scalef(F16 a, F16 b) { F16 r; EACH(16) r[i] = b[i] != b[i] || a[i] != a[i] ? NAN : (float)ldexp((double)a[i], b[i] < -2000 ? -2000 : b[i] > 2000 ? 2000 : (int)floorf(b[i])); return r; }
EMU I16 e_cvtepu16_epi32(__m256i a) { I16 r; H16 h = (H16)a; EACH(16) r[i] = h[i]; return r; }
EMU F16 e_cvtph_ps(__m256i a) { F16 r; H16 h = (H16)a; EACH(16) r[i] = _cvtsh_ss(h[i]); return r; }
EMU H32 e_cvtne2ps(F16 hi, F16 lo) { H32 r; EACH(16) { r[i] = emu_to_bf(lo[i]); r[16 + i] = emu_to_bf(hi[i]); } return r; }
EMU H16 e_cvtneps(F16 a) { H16 r; EACH(16) r[i] = emu_to_bf(a[i]); return r; }
EMU F16 e_dpbf16(F16 s, H32 a, H32 b) { EACH(16) { s[i] = fmaf(emu_bf(a[2 * i + 1]), emu_bf(b[2 * i + 1]), s[i]); s[i] = fmaf(emu_bf(a[2 * i]), emu_bf(b[2 * i]), s[i]); } return s; }
EMU I8 e_cvttps_epi64(__m256 a) { I8 r; F8 f = (F8)a; EACH(8) r[i] = _mm_cvttss_si64(_mm_set_ss(f[i])); return r; }
EMU F16 e_permutex2var_ps(F16 a, I16 x, F16 b) { F16 r; EACH(16) r[i] = x[i] & 16 ? b[x[i] & 15] : a[x[i] & 15]; return r; }
EMU H32 e_permutex2var_epi16(H32 a, H32 x, H32 b) { H32 r; EACH(32) r[i] = x[i] & 32 ? b[x[i] & 31] : a[x[i] & 31]; return r; }
EMU H32 e_permutexvar_epi16(H32 x, H32 a) { H32 r; EACH(32) r[i] = a[x[i] & 31]; return r; }
EMU F16 e_shuffle_ps(F16 a, F16 b, int m) { F16 r; for (int l = 0; l < 16; l += 4) { r[l] = a[l + (m & 3)]; r[l + 1] = a[l + (m >> 2 & 3)]; r[l + 2] = b[l + (m >> 4 & 3)]; r[l + 3] = b[l + (m >> 6 & 3)]; } return r; }
EMU F16 e_shuffle_f32x4(F16 a, F16 b, int m) { F16 r; for (int i = 0; i < 4; ++i) { r[i] = a[(m & 3) * 4 + i]; r[4 + i] = a[(m >> 2 & 3) * 4 + i]; r[8 + i] = b[(m >> 4 & 3) * 4 + i]; r[12 + i] = b[(m >> 6 & 3) * 4 + i]; } return r; }
EMU F16 e_unpack_ps(F16 a, F16 b, int h) { F16 r; for (int l = 0; l < 16; l += 4) { r[l] = a[l + 2 * h]; r[l + 1] = b[l + 2 * h]; r[l + 2] = a[l + 2 * h + 1]; r[l + 3] = b[l + 2 * h + 1]; } return r; }
EMU H32 e_unpack_epi16(H32 a, H32 b, int h) { H32 r; for (int l = 0; l < 32; l += 8) for (int i = 0; i < 4; ++i) { r[l + 2 * i] = a[l + 4 * h + i]; r[l + 2 * i + 1] = b[l + 4 * h + i]; } return r; }
EMU uint16_t e_cmp(F16 a, F16 b, int how) {
  uint16_t k = 0;
  EACH(16) {
    const bool un = a[i] != a[i] || b[i] != b[i];
    bool v = false;
    switch (how) {
      case _CMP_EQ_OQ: v = !un && a[i] == b[i]; break;
      case _CMP_NEQ_UQ: v = un || a[i] != b[i]; break;
      case _CMP_LT_OQ: v = !un && a[i] < b[i]; break;
      case _CMP_UNORD_Q: v = un; break;
      case _CMP_NLT_UQ: v = un || !(a[i] < b[i]); break;
      default: __builtin_trap();
    }
    k |= (uint16_t)(v << i);
  }
  return k;
}
EMU F16 e_blend(uint16_t k, F16 a, F16 b) { F16 r; EACH(16) r[i] = k >> i & 1 ? b[i] : a[i]; return r; }
EMU F16 e_min(F16 a, F16 b) { F16 r; EACH(16) r[i] = a[i] < b[i] ? a[i] : b[i]; return r; }
EMU F16 e_sqrt(F16 a) { F16 r; EACH(16) r[i] = sqrtf(a[i]); return r; }
EMU H16 e_cvtps_ph(F16 a) { H16 r; EACH(16) r[i] = (uint16_t)_cvtss_sh(a[i], 0); return r; }
EMU H16 e_cvtepi32_epi16(U16 a) { H16 r; EACH(16) r[i] = (uint16_t)a[i]; return r; }
EMU F16 e_permutexvar_ps(I16 x, F16 a) { F16 r; EACH(16) r[i] = a[x[i] & 15]; return r; }
EMU I16 e_cvtepu8_epi32(__m128i a) { uint8_t b[16]; memcpy(b, &a, 16); I16 r; EACH(16) r[i] = b[i]; return r; }
template <typename... T> EMU F16 e_set_ps(T... v) { const float all[] = {(float)v...}; F16 r; EACH(16) r[i] = all[15 - i]; return r; }
EMU uint16_t e_cmpi(I16 a, I16 b, int ge) { uint16_t k = 0; EACH(16) k |= (uint16_t)((ge ? a[i] >= b[i] : a[i] < b[i]) << i); return k; }
EMU uint32_t e_testn(uint32_t k, H32 a, H32 b) { uint32_t r = 0; EACH(32) r |= (uint32_t)((k >> i & 1) && !(a[i] & b[i])) << i; return r; }
EMU float e_reduce_max(F16 a) { float r = a[0]; EACH(16) r = a[i] > r ? a[i] : r; return r; }
EMU int64_t e_reduce_add_epi64(I8 a) { int64_t r = 0; EACH(8) r += a[i]; return r; }
EMU F16 e_gather(I16 x, const float* p) { F16 r; EACH(16) r[i] = p[x[i]]; return r; }
EMU __m256i e_half(I8 a, int h) { __m256i r; memcpy(&r, (char*)&a + 32 * h, 32); return r; }
EMU F16 e_cvtepi32_ps(I16 a) { F16 r; EACH(16) r[i] = (float)a[i]; return r; }
EMU I16 e_cvtepi8_epi32(__m128i a) { int8_t b[16]; memcpy(b, &a, 16); I16 r; EACH(16) r[i] = b[i]; return r; }
EMU __m128i e_cvtepi32_epi8(I16 a) { uint8_t b[16]; EACH(16) b[i] = (uint8_t)a[i]; __m128i r; memcpy(&r, b, 16); return r; }
EMU I16 e_dpwssd(I16 s, H32 a, H32 b) { EACH(32) s[i / 2] += (int16_t)a[i] * (int16_t)b[i]; return s; }
EMU I16 e_dpbusd(I16 s, I16 a, I16 b) { EACH(64) s[i / 4] += ((uint8_t*)&a)[i] * ((int8_t*)&b)[i]; return s; }
EMU H32 e_maddubs(I16 a, I16 b) { H32 r; EACH(32) { int s = 0; for (int j = 2 * i; j < 2 * i + 2; ++j) s += ((uint8_t*)&a)[j] * ((int8_t*)&b)[j]; r[i] = (uint16_t)(s > 32767 ? 32767 : s < -32768 ? -32768 : s); } return r; }
EMU int32_t e_reduce_add_epi32(I16 a) { int32_t r = 0; EACH(16) r += a[i]; return r; }
struct EmuInts { I16 v; };
EMU I16 e_setr(int a,int b,int c,int d,int e,int f,int g,int h,int i,int j,int k,int l,int m,int n,int o,int p) { return I16{a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p}; }
template <typename... T> EMU H32 e_set16(T... v) { const int16_t all[] = {(int16_t)v...}; H32 r; EACH(32) r[i] = (uint16_t)all[31 - i]; return r; }

#define _mm512_setzero_ps() ((__m512)e_set1_ps(0))
#define _mm512_setzero_si512() ((__m512i)e_set1_epi32(0))
#define _mm512_set1_ps(x) ((__m512)e_set1_ps(x))
#define _mm512_set1_epi32(x) ((__m512i)e_set1_epi32(x))
#define _mm512_set1_epi16(x) ((__m512i)e_set1_epi16(x))
#define _mm512_set_epi16(...) ((__m512i)e_set16(__VA_ARGS__))
#define _mm512_setr_epi32(...) ((__m512i)e_setr(__VA_ARGS__))
#define _mm512_set_epi32(a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p) ((__m512i)e_setr(p,o,n,m,l,k,j,i,h,g,f,e,d,c,b,a))
#define _mm512_fmadd_ps(a, b, c) ((__m512)e_fmadd((F16)(a), (F16)(b), (F16)(c)))
#define _mm512_fmsub_ps(a, b, c) ((__m512)e_fmsub((F16)(a), (F16)(b), (F16)(c)))
#define _mm512_add_ps(a, b) ((__m512)((F16)(a) + (F16)(b)))
#define _mm512_sub_ps(a, b) ((__m512)((F16)(a) - (F16)(b)))
#define _mm512_mul_ps(a, b) ((__m512)((F16)(a) * (F16)(b)))
#define _mm512_div_ps(a, b) ((__m512)((F16)(a) / (F16)(b)))
#define _mm512_max_ps(a, b) ((__m512)e_max((F16)(a), (F16)(b)))
#define _mm512_min_ps(a, b) ((__m512)e_min((F16)(a), (F16)(b)))
#define _mm512_sqrt_ps(a) ((__m512)e_sqrt((F16)(a)))
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(a, how) ((__m256i)e_cvtps_ph((F16)(a)))
#define _mm512_cvtepi32_epi16(a) ((__m256i)e_cvtepi32_epi16((U16)(a)))
#define _mm512_permutexvar_ps(x, a) ((__m512)e_permutexvar_ps((I16)(x), (F16)(a)))
#define _mm512_cvtepu8_epi32(a) ((__m512i)e_cvtepu8_epi32(a))
#define _mm512_cvtepi8_epi32(a) ((__m512i)e_cvtepi8_epi32(a))
#define _mm512_cvtepi32_ps(a) ((__m512)e_cvtepi32_ps((I16)(a)))
#define _mm512_cvtepi32_epi8(a) e_cvtepi32_epi8((I16)(a))
#define _mm512_set1_epi8(x) ((__m512i)e_set1_epi32(0x01010101 * (x)))
#define _mm512_madd_epi16(a, b) ((__m512i)e_dpwssd(I16{}, (H32)(a), (H32)(b)))
#define _mm512_maddubs_epi16(a, b) ((__m512i)e_maddubs((I16)(a), (I16)(b)))
#define _mm512_dpwssd_epi32(s, a, b) ((__m512i)e_dpwssd((I16)(s), (H32)(a), (H32)(b)))
#define _mm512_dpbusd_epi32(s, a, b) ((__m512i)e_dpbusd((I16)(s), (I16)(a), (I16)(b)))
#define _mm512_mullo_epi32(a, b) ((__m512i)((U16)(a) * (U16)(b)))
#define _mm512_reduce_add_epi32(a) e_reduce_add_epi32((I16)(a))
#define _mm512_srai_epi32(a, n) ((__m512i)((I16)(a) >> (n)))
#define _mm512_srli_epi16(a, n) ((__m512i)((H32)(a) >> (n)))
#define _mm512_set_ps(...) ((__m512)e_set_ps(__VA_ARGS__))
#define _mm512_srli_epi32(a, n) ((__m512i)((U16)(a) >> (n)))
#define _mm512_and_si512(a, b) ((__m512i)((U16)(a) & (U16)(b)))
#define _mm512_or_si512(a, b) ((__m512i)((U16)(a) | (U16)(b)))
#define _mm512_slli_epi16(a, n) ((__m512i)((H32)(a) << (n)))
#define _mm512_mask_mov_epi32(a, k, b) ((__m512i)e_blend(k, (F16)(a), (F16)(b)))
#define _mm512_add_epi32(a, b) ((__m512i)((I16)(a) + (I16)(b)))
#define _mm512_add_epi16(a, b) ((__m512i)((H32)(a) + (H32)(b)))
#define _mm512_add_epi64(a, b) ((__m512i)((I8)(a) + (I8)(b)))
#define _mm512_slli_epi32(a, n) ((__m512i)((U16)(a) << (n)))
#define _mm512_loadu_ps(p) ((__m512)e_loadu_ps(p))
#define _mm512_load_ps(p) ((__m512)e_load_ps(p))
#define _mm512_storeu_ps(p, v) e_storeu(p, (F16)(v))
#define _mm512_store_ps(p, v) e_store(p, (F16)(v))
#define _mm512_loadu_si512(p) ((__m512i)e_loadu_ps(p))
#define _mm512_storeu_si512(p, v) e_storeu(p, (F16)(v))
#define _mm512_store_si512(p, v) e_store(p, (F16)(v))
#define _mm512_maskz_loadu_ps(k, p) ((__m512)e_maskz_loadu_ps(k, p))
#define _mm512_maskz_loadu_epi16(k, p) ((__m512i)e_maskz_loadu_epi16(k, p))
#define _mm512_mask_storeu_epi16(p, k, v) e_mask_storeu_epi16(p, k, (H32)(v))
#define _mm512_castsi512_ps(a) ((__m512)(a))
#define _mm512_castps_si512(a) ((__m512i)(a))
#define _mm512_castps512_ps256(a) ((__m256)e_half((I8)(a), 0))
#define _mm512_extractf32x8_ps(a, h) ((__m256)e_half((I8)(a), h))
#define _mm512_castsi512_si256(a) e_half((I8)(a), 0)
#define _mm512_extracti64x4_epi64(a, h) e_half((I8)(a), h)
#define _mm512_cvtps_epi32(a) ((__m512i)e_cvtps_epi32((F16)(a)))
#define _mm512_roundscale_ps(a, m) ((__m512)e_round((F16)(a)))
#define _mm512_scalef_ps(a, b) ((__m512)e_scalef((F16)(a), (F16)(b)))
#define _mm512_cvtepu16_epi32(a) ((__m512i)e_cvtepu16_epi32(a))
#define _mm512_cvtph_ps(a) ((__m512)e_cvtph_ps(a))
#define _mm512_cvtne2ps_pbh(a, b) ((__m512bh)e_cvtne2ps((F16)(a), (F16)(b)))
#define _mm512_cvtneps_pbh(a) ((__m256i)e_cvtneps((F16)(a)))
#define _mm512_dpbf16_ps(s, a, b) ((__m512)e_dpbf16((F16)(s), (H32)(a), (H32)(b)))
#define _mm512_cvttps_epi64(a) ((__m512i)e_cvttps_epi64(a))
#define _mm512_permutex2var_ps(a, x, b) ((__m512)e_permutex2var_ps((F16)(a), (I16)(x), (F16)(b)))
#define _mm512_permutex2var_epi16(a, x, b) ((__m512i)e_permutex2var_epi16((H32)(a), (H32)(x), (H32)(b)))
#define _mm512_permutexvar_epi16(x, a) ((__m512i)e_permutexvar_epi16((H32)(x), (H32)(a)))
#undef _mm512_shuffle_ps
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_ps(a, b, m) ((__m512)e_shuffle_ps((F16)(a), (F16)(b), m))
#define _mm512_shuffle_f32x4(a, b, m) ((__m512)e_shuffle_f32x4((F16)(a), (F16)(b), m))
#define _mm512_unpacklo_ps(a, b) ((__m512)e_unpack_ps((F16)(a), (F16)(b), 0))
#define _mm512_unpackhi_ps(a, b) ((__m512)e_unpack_ps((F16)(a), (F16)(b), 1))
#define _mm512_unpacklo_epi16(a, b) ((__m512i)e_unpack_epi16((H32)(a), (H32)(b), 0))
#define _mm512_unpackhi_epi16(a, b) ((__m512i)e_unpack_epi16((H32)(a), (H32)(b), 1))
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, c) e_cmp((F16)(a), (F16)(b), c)
#define _mm512_cmpneq_ps_mask(a, b) e_cmp((F16)(a), (F16)(b), _CMP_NEQ_UQ)
#define _mm512_mask_blend_ps(k, a, b) ((__m512)e_blend(k, (F16)(a), (F16)(b)))
#define _mm512_maskz_mov_ps(k, a) ((__m512)e_blend(k, e_set1_ps(0), (F16)(a)))
#define _mm512_cmpge_epi32_mask(a, b) e_cmpi((I16)(a), (I16)(b), 1)
#define _mm512_cmplt_epi32_mask(a, b) e_cmpi((I16)(a), (I16)(b), 0)
#define _mm512_mask_testn_epi16_mask(k, a, b) e_testn(k, (H32)(a), (H32)(b))
#define _mm512_reduce_max_ps(a) e_reduce_max((F16)(a))
#define _mm512_reduce_add_epi64(a) e_reduce_add_epi64((I8)(a))
#undef _mm512_i32gather_ps
#define _mm512_i32gather_ps(x, p, s) ((__m512)e_gather((I16)(x), p))

// ---- tiles
struct EmuTiles { uint8_t rows[8]; uint16_t bytes[8]; alignas(64) uint8_t data[8][16][64]; bool on; };
static thread_local EmuTiles emu_tiles;
inline EmuTiles& emu() { static thread_local EmuTiles t; return t; }
struct __attribute__((packed)) EmuConfig { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; };
EMU void e_tile_config(const void* p) { const EmuConfig* c = (const EmuConfig*)p; auto& t = emu(); t.on = true; EACH(8) { t.rows[i] = c->rows[i]; t.bytes[i] = c->bytes[i]; if (!c->rows[i] || c->rows[i] > 16) __builtin_trap(); } memset(t.data, 0, sizeof t.data); }
EMU void e_tile_zero(int n) { auto& t = emu(); if (!t.on) __builtin_trap(); memset(t.data[n], 0, 1024); }
EMU void e_tile_load(int n, const void* p, int64_t s) { auto& t = emu(); if (!t.on) __builtin_trap(); memset(t.data[n], 0, 1024); EACH(t.rows[n]) memcpy(t.data[n][i], (const char*)p + i * s, t.bytes[n]); }
EMU void e_tile_store(int n, void* p, int64_t s) { auto& t = emu(); if (!t.on) __builtin_trap(); EACH(t.rows[n]) memcpy((char*)p + i * s, t.data[n][i], t.bytes[n]); }
EMU void e_tile_dp(int c, int a, int b) {
  auto& t = emu();
  if (!t.on || t.rows[c] != t.rows[a] || t.rows[b] != t.bytes[a] / 4) __builtin_trap();
  for (int m = 0; m < t.rows[c]; ++m)
    for (int k = 0; k < t.bytes[a] / 4; ++k) {
      const uint16_t* x = (const uint16_t*)t.data[a][m] + 2 * k;
      const float one = emu_bf(x[0]), two = emu_bf(x[1]);
      float* s = (float*)t.data[c][m];
      const uint16_t* y = (const uint16_t*)t.data[b][k];
      for (int n = 0; n < t.bytes[c] / 4; ++n) { s[n] = fmaf(one, emu_bf(y[2 * n]), s[n]); s[n] = fmaf(two, emu_bf(y[2 * n + 1]), s[n]); }
    }
}
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(p) e_tile_config(p)
#define _tile_zero(n) e_tile_zero(n)
#define _tile_loadd(n, p, s) e_tile_load(n, p, s)
#define _tile_stored(n, p, s) e_tile_store(n, p, s)
#define _tile_dpbf16ps(c, a, b) e_tile_dp(c, a, b)
#define _tile_release() (emu().on = false)
