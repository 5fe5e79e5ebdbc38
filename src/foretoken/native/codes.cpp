// Products of float32 with a matrix of whole numbers: codes of 8 or 4 bits, with scales by output or by output and group of
// inputs, and zeros by group where codes are not even about 0.
//
// What a row holds is rounded to 16 bits, or to 8 for drafts, with a scale by span of inputs, by itself. Sums over a span are
// then whole numbers: exact in any order and by any instruction. They are added up span after span, so a row has the same bits
// among any number of rows, few or many, and on every CPU.

#include "abi.h"
#include "functions.h"
#include "threads.h"
#include "vectors.h"
#include "whole_numbers.h"

#include <math.h>
#include <string.h>
#include <vector>

enum { PARTS = CODES_BLOCK / LANES };      // vectors of a block
enum { MOST_ROWS = LANES == 8 ? 2 : 6 };   // rows that are multiplied at a time, as registers allow

// Of what a row is rounded to, by bytes: two, 256 of the first and one of the second, stay within -128 and 127.
static const float LARGEST[3] = {0.0f, 127.0f, 32639.0f};

// ---- whole numbers --------------------------------------------------------------------------------------------------

#if defined(FORETOKEN_AVX2)
static inline Whole low_half(Whole bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
static inline Whole high_half(Whole bytes) { return low_half(_mm256_srli_epi16(bytes, 4)); }
#else
static inline Whole low_half(Whole bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
static inline Whole high_half(Whole bytes) { return low_half(_mm512_srli_epi16(bytes, 4)); }
#endif

// ---- rows -----------------------------------------------------------------------------------------------------------

// Rows (n, K) in one or two bytes. For every four inputs with VNNI the upper bytes of all, if there are any, then the lower
// ones; without, in 16 bits, numbers 0 and 2, then 1 and 3.
namespace {  // others have rounded rows, too
struct Rounded {
  int64_t inputs, span, spans;  // inputs: with zeros behind the last one
  int64_t bytes, stored;        // of an activation, and of it as it is laid out
  std::vector<uint8_t> values;
  std::vector<float> scales, sums;  // by row and span; of the rounded numbers
  std::vector<int32_t> starts;      // what sums begin with, since codes are `offset` too large

  void take(const Matrix& matrix, const float* x, int64_t rows, int threads) {
    const int64_t given = matrix.inputs, whole = matrix.group ? matrix.group : CODES_SPAN;
    const int32_t offset = matrix.zeros ? 0 : matrix.kind == BYTES ? 128 : 8;
    span = least(whole, CODES_SPAN), inputs = rounded_up(given, whole), spans = inputs / span;
    bytes = matrix.activation_bytes, stored = has_vnni ? bytes : 2;
    values.resize(rows * inputs * stored);
    scales.resize(rows * spans), sums.resize(rows * spans), starts.resize(rows * spans);
    share_out(rows, rows < 32 ? 1 : threads, [&](int64_t first, int64_t last, int) {
      for (int64_t row = first; row < last; ++row)
        for (int64_t number = 0; number < spans; ++number)
          take_span(x + row * given + number * span, least(span, given - number * span), row * spans + number, offset);
    });
  }

  void take_span(const float* from, int64_t count, int64_t place, int32_t offset) {
    alignas(64) float numbers[CODES_SPAN];
    alignas(64) int32_t whole[CODES_SPAN];
    Vector most = zero(), check = zero();
    for (int64_t i = 0; i < span; i += LANES) {
      const Vector value = i < count ? read_first(from + i, count - i) : zero();
      write(numbers + i, value);
      most = larger(most, size_of(value)), check = add_product(value, zero(), check);
    }
    const bool is_finite = !differ(check, zero());
    const float peak = is_finite ? largest(most) : 0.0f;
    const bool is_usable = peak > 1e-30f && peak < 1e34f;
    const float factor = is_usable ? LARGEST[bytes] / peak : 0.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < span; ++i) {
      whole[i] = is_usable ? (int32_t)rintf(numbers[i] * factor) : 0;
      sum += whole[i];
    }
    uint8_t* to = values.data() + place * span * stored;
    for (int64_t i = 0; i < span; i += 4, to += 4 * stored)
      if (stored == 1) {
        for (int j = 0; j < 4; ++j) to[j] = (uint8_t)whole[i + j];
      } else if (has_vnni) {
        for (int j = 0; j < 4; ++j) to[j] = (uint8_t)((whole[i + j] + 128) >> 8), to[4 + j] = (uint8_t)whole[i + j];
      } else {
        const int16_t pairs[4] = {(int16_t)whole[i], (int16_t)whole[i + 2], (int16_t)whole[i + 1], (int16_t)whole[i + 3]};
        memcpy(to, pairs, 8);
      }
    // what is infinite counts as nothing in a draft, whose keys and values would keep it
    const float scale = is_usable ? peak / LARGEST[bytes] : bytes == 1 || (peak < 1e34f && is_finite) ? 0.0f : NAN;
    scales[place] = scale, sums[place] = (float)sum * scale, starts[place] = -offset * sum;
  }
};
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

// Adds the products of four inputs of every row and a block of outputs.
template <int ROWS>
static inline void add_wide(const Whole (&codes)[PARTS], const uint8_t* values, int64_t stride,
                            Whole (&sums)[ROWS][PARTS]) {
  for (int i = 0; i < ROWS; ++i) {
    const Whole first = four_of(values + i * stride), second = four_of(values + i * stride + 4);
    for (int j = 0; j < PARTS; ++j)
      sums[i][j] = add_pairs(add_pairs(sums[i][j], even(codes[j]), first), odd(codes[j]), second);
  }
}

#if !defined(FORETOKEN_AVX2)
// The same of one byte of each.
template <int ROWS>
static WITH_VNNI void add_bytes(const Whole (&codes)[PARTS], const uint8_t* values, int64_t stride,
                                Whole (&sums)[ROWS][PARTS]) {
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i) {
    const Whole four = four_of(values + i * stride);
    for (int j = 0; j < PARTS; ++j) sums[i][j] = _mm512_dpbusd_epi32(sums[i][j], codes[j], four);
  }
}
#endif

// Scales of a block and a group, and what a code of 0 stands for.
static inline void read_group(const Matrix& matrix, int64_t place, Vector (&scales)[PARTS], Vector (&zeros)[PARTS]) {
  for (int j = 0; j < PARTS; ++j, place += LANES) {
    scales[j] = matrix.scale_kind == FLOAT16 ? read((const Float16*)matrix.scales + place)
                                             : read((const float*)matrix.scales + place);
    if (!matrix.zeros) continue;
    zeros[j] = matrix.zero_kind == BYTES     ? zero() - read((const uint8_t*)matrix.zeros + place) * scales[j]
               : matrix.zero_kind == FLOAT16 ? read((const Float16*)matrix.zeros + place)
                                             : read((const float*)matrix.zeros + place);
  }
}

// Adds the sums of a span, times their scales, to those of a block; place: of its scales.
template <int ROWS>
static inline void add_span(const Matrix& matrix, const Rounded& x, int64_t at, int64_t number, int64_t place,
                            const Whole (&sums)[ROWS][PARTS], Vector (&totals)[ROWS][PARTS]) {
  Vector scales[PARTS], zeros[PARTS];
  if (matrix.group) read_group(matrix, place, scales, zeros);
  for (int i = 0; i < ROWS; ++i) {
    const Vector scale = all(x.scales[at + i * x.spans + number]);
    for (int j = 0; j < PARTS; ++j) {
      const Vector sum = as_floats(sums[i][j]);
      totals[i][j] = matrix.group ? add_product(sum * scale, scales[j], totals[i][j])
                                  : add_product(sum, scale, totals[i][j]);
      if (matrix.zeros) totals[i][j] = add_product(zeros[j], all(x.sums[at + i * x.spans + number]), totals[i][j]);
    }
  }
}

template <int ROWS>
static inline void finish(const Matrix& matrix, int64_t row, int64_t first, const float* scales,
                          const Vector (&totals)[ROWS][PARTS], float* out) {
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < PARTS; ++j) {
      const int64_t place = first + LANES * j, count = least(LANES, matrix.outputs - place);
      if (count <= 0) continue;
      const Vector bias = matrix.bias ? read_first(matrix.bias + place, count) : zero();
      const Vector result = scales ? add_product(totals[i][j], read(scales + LANES * j), bias) : totals[i][j] + bias;
      write_first(out + (row + i) * matrix.outputs + place, result, count);
    }
}

// BITS of a code; STORED: bytes of an activation; VNNI: by instructions that multiply bytes.
template <int BITS, int STORED, int ROWS, bool VNNI>
static inline __attribute__((always_inline)) void block_rows(const Matrix& matrix, const Rounded& x, int64_t row,
                                                             int64_t block, float* out) {
  enum { AT_ONCE = 32 / BITS };  // inputs whose codes lie together
  const int64_t first = block * CODES_BLOCK, at = row * x.spans, stride = x.inputs * STORED;
  const int64_t groups = matrix.group ? x.inputs / matrix.group : 1;
  const uint8_t* weight = (const uint8_t*)matrix.weight + first * x.inputs * BITS / 8;
  const uint8_t* values = x.values.data() + row * stride;
  Vector totals[ROWS][PARTS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < PARTS; ++j) totals[i][j] = zero();
  for (int64_t number = 0; number < x.spans; ++number) {
    Whole sums[ROWS][PARTS], upper[ROWS][PARTS];
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < PARTS; ++j) {
        sums[i][j] = all_whole(x.starts[at + i * x.spans + number]);
        if (VNNI && STORED == 2) upper[i][j] = all_whole(0);
      }
    for (int64_t input = 0; input < x.span; input += AT_ONCE, weight += 4 * CODES_BLOCK, values += AT_ONCE * STORED) {
      Whole codes[PARTS];
      for (int j = 0; j < PARTS; ++j) codes[j] = read_bytes(weight + 4 * LANES * j);
      if (row == 0)
        for (int line = 0; line < 2; ++line) _mm_prefetch((const char*)(weight + 4096 + 64 * line), _MM_HINT_T0);
      for (int part = 0; part < AT_ONCE / 4; ++part) {
        Whole here[PARTS];
        for (int j = 0; j < PARTS; ++j) here[j] = BITS == 8 ? codes[j] : part ? high_half(codes[j]) : low_half(codes[j]);
#if !defined(FORETOKEN_AVX2)
        if (VNNI) {
          if (STORED == 2) add_bytes<ROWS>(here, values + part * 8, stride, upper);
          add_bytes<ROWS>(here, values + part * 4 * STORED + 4 * (STORED - 1), stride, sums);
        } else
#endif
          add_wide<ROWS>(here, values + part * 8, stride, sums);
      }
    }
#if !defined(FORETOKEN_AVX2)
    if (VNNI && STORED == 2)
      for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < PARTS; ++j) sums[i][j] = _mm512_add_epi32(_mm512_slli_epi32(upper[i][j], 8), sums[i][j]);
#endif
    const int64_t group = matrix.group ? number * x.span / matrix.group : 0;
    add_span<ROWS>(matrix, x, at, number, first * groups + group * CODES_BLOCK, sums, totals);
  }
  finish<ROWS>(matrix, row, first, matrix.group ? nullptr : (const float*)matrix.scales + first, totals, out);
}

template <int BITS, int ROWS>
static void wide_rows(const Matrix& matrix, const Rounded& x, int64_t row, int64_t block, float* out) {
  block_rows<BITS, 2, ROWS, false>(matrix, x, row, block, out);
}

template <int BITS, int STORED, int ROWS>
static WITH_VNNI void byte_rows(const Matrix& matrix, const Rounded& x, int64_t row, int64_t block, float* out) {
  block_rows<BITS, STORED, ROWS, true>(matrix, x, row, block, out);
}

template <int BITS, int STORED, int ROWS>
static void some_rows(const Matrix& matrix, const Rounded& x, int64_t rows, int64_t row, int64_t block, float* out) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return some_rows<BITS, STORED, ROWS - 1>(matrix, x, rows, row, block, out);
  if (has_vnni)
    byte_rows<BITS, STORED, ROWS>(matrix, x, row, block, out);
  else
    wide_rows<BITS, ROWS>(matrix, x, row, block, out);
}

template <int BITS, int STORED>
static void multiply(const Matrix& matrix, const Rounded& x, int64_t rows, float* out, int threads) {
  share_out((matrix.outputs + CODES_BLOCK - 1) / CODES_BLOCK, threads, [&](int64_t first, int64_t last, int) {
    for (int64_t block = first; block < last; ++block)
      for (int64_t row = 0, here; row < rows; row += here) {  // in groups of about the same size
        const int64_t left = rows - row, groups = (left + MOST_ROWS - 1) / MOST_ROWS;
        here = (left + groups - 1) / groups;
        some_rows<BITS, STORED, MOST_ROWS>(matrix, x, here, row, block, out);
      }
  });
}

// One row of the matrix: the very numbers that its codes stand for.
template <typename T>
static void unpack_row(const Matrix& matrix, int64_t output, T* to) {
  const bool is_bytes = matrix.kind == BYTES;
  const int64_t inputs = rounded_up(matrix.inputs, matrix.group ? matrix.group : CODES_SPAN);
  const int64_t groups = matrix.group ? inputs / matrix.group : 1, block = output / CODES_BLOCK, lane = output % CODES_BLOCK;
  const uint8_t* codes = (const uint8_t*)matrix.weight + block * CODES_BLOCK * inputs / (is_bytes ? 1 : 2);
  for (int64_t i = 0; i < matrix.inputs; ++i) {
    const int64_t place = (block * groups + (matrix.group ? i / matrix.group : 0)) * CODES_BLOCK + lane;
    const uint8_t byte = codes[(i / (is_bytes ? 4 : 8) * CODES_BLOCK + lane) * 4 + i % 4];
    const int code = is_bytes ? byte : i / 4 % 2 ? byte >> 4 : byte & 15;
    const int low = matrix.zeros ? matrix.zero_kind == BYTES ? ((const uint8_t*)matrix.zeros)[place] : 0 : is_bytes ? 128 : 8;
    const float scale = matrix.scale_kind == FLOAT16 ? value_of(((const Float16*)matrix.scales)[place])
                                                     : ((const float*)matrix.scales)[place];
    volatile float value = (float)(code - low) * scale;  // is rounded before anything is added
    if (matrix.zeros && matrix.zero_kind != BYTES)
      value = value + (matrix.zero_kind == FLOAT16 ? value_of(((const Float16*)matrix.zeros)[place])
                                                   : ((const float*)matrix.zeros)[place]);
    store(to + i, value);
  }
}

// Rows of the matrix, in float32 or halves of it.
extern "C" void foretoken_rows(const Matrix* matrix, const int64_t* outputs, int64_t count, int64_t kind, void* out) {
  for (int64_t i = 0, at = 0; i < count; ++i, at += matrix->inputs) switch (kind) {
      case BFLOAT16: unpack_row(*matrix, outputs[i], (Bfloat16*)out + at); break;
      case FLOAT16: unpack_row(*matrix, outputs[i], (Float16*)out + at); break;
      default: unpack_row(*matrix, outputs[i], (float*)out + at);
    }
}

// (rows, K) in float32 -> (rows, N) in float32.
extern "C" void multiply_codes(const Matrix* matrix, const float* x, int64_t rows, float* out, int threads) {
  static thread_local Rounded rounded;
  rounded.take(*matrix, x, rows, threads);
  if (matrix->kind == NIBBLES)
    multiply<4, 2>(*matrix, rounded, rows, out, threads);
  else if (rounded.stored == 1)
    multiply<8, 1>(*matrix, rounded, rows, out, threads);
  else
    multiply<8, 2>(*matrix, rounded, rows, out, threads);
}
