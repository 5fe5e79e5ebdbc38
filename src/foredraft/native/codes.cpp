// Products of float32 or bfloat16 with a matrix of integer codes of 8, 6, 5 or 4 bits. Scales are by output, or by output and
// group of inputs. Zeros are by group, if codes are not symmetric about 0.
//
// Each row is rounded by itself to 16 bits, or to 8 for drafts, with one scale per span of inputs. Sums over a span are
// then integers, which are exact in any order and with any instruction. They are added span after span. A row therefore
// has the same bits in a batch of any size and on every CPU.

#include "abi.h"
#include "functions.h"
#include "threads.h"
#include "vectors.h"
#include "whole_numbers.h"

#include <math.h>
#include <string.h>
#include <vector>

#define ALWAYS_INLINE inline __attribute__((always_inline))

enum { PARTS = CODES_BLOCK / LANES };      // vectors of a block
enum { MOST_ROWS = LANES == 8 ? 2 : 8 };   // rows that are multiplied at a time; limited by registers
enum { MOST_SPLIT_ROWS = 4 };              // most rows for which 16-bit activations are multiplied byte by byte
enum { FETCHED = 8192 };                   // distance of prefetched codes in bytes
enum { FETCHED_GROUPS = 16 };              // distance of prefetched scales in groups
enum { SHARED_NUMBERS = 1 << 14 };         // activations from which threads share the rounding of rows

// Largest rounded activation by bytes. With two bytes, 256 * upper + lower, each byte stays within -128 and 127.
static const float LARGEST[3] = {0.0f, 127.0f, 32639.0f};

// ---- rows -----------------------------------------------------------------------------------------------------------

// Activations in one byte; in words, with numbers 0 and 2 of every four inputs before 1 and 3, like pairs of codes; or
// split, with the upper bytes of every four before their lower bytes.
enum Layout { ONE_BYTE, WORDS, SPLIT };

template <int LAYOUT>
constexpr int64_t stored_bytes = LAYOUT == ONE_BYTE ? 1 : 2;

// Rounded rows (n, K).
namespace {  // keeps the name local to this file
struct Rounded {
  int64_t inputs, span, spans;  // inputs: padded with zeros
  int64_t bytes, stored;        // bytes of a rounded activation, and of its layout in memory
  Layout layout;
  std::vector<uint8_t> values;
  std::vector<float> scales, sums;  // by row and span; sums: of the rounded numbers
  std::vector<int32_t> starts;      // initial value of sums, which corrects for the excess of codes
  int32_t excess;                   // offset of codes; 1 if the zeros contain it

  template <typename T>
  void take(const Matrix& matrix, const T* x, int64_t rows, int threads) {
    const int64_t given = matrix.inputs, whole = matrix.group ? matrix.group : CODES_SPAN;
    span = least(whole, CODES_SPAN), inputs = rounded_up(given, whole), spans = inputs / span;
    bytes = matrix.activation_bytes;
    const bool is_split = matrix.kind == NIBBLES && rows <= MOST_SPLIT_ROWS, is_byte = matrix.kind == BYTES && bytes == 1;
    layout = !has_vnni ? WORDS : is_split ? SPLIT : is_byte ? ONE_BYTE : WORDS;
    stored = layout == ONE_BYTE ? 1 : 2;
    excess = matrix.zeros ? matrix.zero_kind == BYTES : 1 << (bits_of(matrix.kind) - 1);
    values.resize(rows * inputs * stored);
    scales.resize(rows * spans), sums.resize(rows * spans), starts.resize(rows * spans);
    share_out(rows, rows * inputs < SHARED_NUMBERS ? 1 : threads, [&](int64_t first, int64_t last, int) {
      for (int64_t row = first; row < last; ++row)
        for (int64_t number = 0; number < spans; ++number)
          take_span(x + row * given + number * span, least(span, given - number * span), row * spans + number);
    });
  }

  template <typename T>
  void take_span(const T* from, int64_t count, int64_t place) {
    Vector numbers[CODES_SPAN / LANES], most = zero(), check = zero();
    const int64_t vectors = span / LANES;
    for (int64_t i = 0; i < vectors; ++i) {
      numbers[i] = i * LANES < count ? read_first(from + i * LANES, count - i * LANES) : zero();
      most = larger(most, size_of(numbers[i])), check = add_product(numbers[i], zero(), check);
    }
    const bool is_finite = !differ(check, zero());
    const float peak = is_finite ? largest(most) : 0.0f;
    const bool is_usable = peak > 1e-30f && peak < 1e34f;
    const Vector factor = all(is_usable ? LARGEST[bytes] / peak : 0.0f);
    uint8_t* to = values.data() + place * span * stored;
    Whole total = all_whole(0);
    for (int64_t i = 0; i < vectors; ++i) {
      const Whole whole = is_usable ? nearest(numbers[i] * factor) : all_whole(0);
      total = add_whole(total, whole);
      switch (layout) {
        case ONE_BYTE: write_bytes(to + i * LANES, whole); break;
        case WORDS: write_words(to + i * LANES * 2, whole); break;
        case SPLIT: write_split(to + i * LANES * 2, whole); break;
      }
    }
    // in a draft, infinite numbers become 0, since its keys and values would keep them
    const float scale = is_usable ? peak / LARGEST[bytes] : bytes == 1 || (peak < 1e34f && is_finite) ? 0.0f : NAN;
    const int32_t sum = sum_of_whole(total);
    scales[place] = scale, sums[place] = (float)sum * scale, starts[place] = -excess * sum;
  }
};
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

// Scales of a span's sum: by output; by output and group; or also with zeros, which are codes or the weight of code 0.
enum Scaling { BY_OUTPUT, BY_GROUP, WITH_ZERO_CODES, WITH_ZEROS };

static ALWAYS_INLINE Vector read_as(int64_t kind, const void* from, const void* halves, int64_t place, int64_t shared) {
  if (kind == MULTIPLES) return as_floats(widened((const int8_t*)from + place)) * read((const Float16*)halves + shared);
  return kind == FLOAT16 ? read((const Float16*)from + place) : read((const float*)from + place);
}

// Position of the halves of a block and a group. `place` is that of its scales.
static inline int64_t shared_place(const Matrix& matrix, int64_t place) {
  return (place / CODES_BLOCK >> matrix.half_shift) * CODES_BLOCK;
}

static inline int64_t bytes_of(int64_t kind) { return kind == MULTIPLES ? 1 : kind == FLOAT16 ? 2 : 4; }

// Sets the initial sums of a span. `place` is the position of the zeros of a block and a group.
template <int SCALING, int ROWS>
static ALWAYS_INLINE void begin(const Matrix& matrix, const Rounded& x, int64_t at, int64_t place,
                                Whole (&sums)[ROWS][PARTS]) {
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < PARTS; ++j) {
      sums[i][j] = all_whole(SCALING == WITH_ZEROS ? 0 : x.starts[at + i * x.spans]);
      if (SCALING == WITH_ZERO_CODES)
        sums[i][j] = multiply_whole(sums[i][j], widened((const uint8_t*)matrix.zeros + place + j * LANES));
    }
}

// Prefetches the scales and zeros of a later group. `place` is the position of this group's scales.
template <int SCALING>
static ALWAYS_INLINE void fetch_scales(const Matrix& matrix, int64_t place) {
  if (SCALING == BY_OUTPUT) return;
  const int64_t later = place + FETCHED_GROUPS * CODES_BLOCK, bytes = bytes_of(matrix.scale_kind);
  for (int64_t line = 0; line < CODES_BLOCK * bytes; line += 64) {
    _mm_prefetch((const char*)matrix.scales + later * bytes + line, _MM_HINT_T0);
    if (SCALING == WITH_ZEROS) _mm_prefetch((const char*)matrix.zeros + later * bytes + line, _MM_HINT_T0);
  }
  if (SCALING == WITH_ZERO_CODES) _mm_prefetch((const char*)matrix.zeros + later, _MM_HINT_T0);
  if (matrix.scale_kind != MULTIPLES) return;
  _mm_prefetch((const char*)matrix.scale_halves + shared_place(matrix, later) * 2, _MM_HINT_T0);
  if (SCALING == WITH_ZEROS) _mm_prefetch((const char*)matrix.zero_halves + shared_place(matrix, later) * 2, _MM_HINT_T0);
}

// Adds the scaled sums of a span to those of a block. `place` is the position of its scales, `at` that of the first
// row's.
template <int SCALING, int ROWS>
static ALWAYS_INLINE void add_span(const Matrix& matrix, const Rounded& x, int64_t at, int64_t place,
                                   const Whole (&sums)[ROWS][PARTS], Vector (&totals)[ROWS][PARTS]) {
  const float *row_scales = x.scales.data() + at, *row_sums = x.sums.data() + at;
  Vector scales[PARTS], zeros[PARTS];
  for (int j = 0; j < PARTS && SCALING != BY_OUTPUT; ++j) {
    const int64_t lane = j * LANES, shared = shared_place(matrix, place) + lane;
    scales[j] = read_as(matrix.scale_kind, matrix.scales, matrix.scale_halves, place + lane, shared);
    if (SCALING == WITH_ZEROS) zeros[j] = read_as(matrix.zero_kind, matrix.zeros, matrix.zero_halves, place + lane, shared);
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i, row_scales += x.spans, row_sums += x.spans) {
    const Vector scale = all(*row_scales);
    for (int j = 0; j < PARTS; ++j) {
      const Vector sum = as_floats(sums[i][j]);
      totals[i][j] = SCALING == BY_OUTPUT ? add_product(sum, scale, totals[i][j])
                                          : add_product(sum * scale, scales[j], totals[i][j]);
      if (SCALING == WITH_ZEROS) totals[i][j] = add_product(zeros[j], all(*row_sums), totals[i][j]);
    }
  }
}

template <int ROWS, typename T>
static inline void finish(const Matrix& matrix, int64_t row, int64_t first, const float* scales,
                          const Vector (&totals)[ROWS][PARTS], T* out) {
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < PARTS; ++j) {
      const int64_t place = first + LANES * j, count = least(LANES, matrix.outputs - place);
      if (count <= 0) continue;
      const Vector bias = matrix.bias ? read_first(matrix.bias + place, count) : zero();
      const Vector result = scales ? add_product(totals[i][j], read(scales + LANES * j), bias) : totals[i][j] + bias;
      write_first(out + (row + i) * matrix.outputs + place, result, count);
    }
}

// Returns the upper bits of codes of 5 or 6 bits, in their position in a byte: those of a group of four inputs, from
// bytes with the upper bits of 8 or 4 such groups, the first in the lowest bits.
template <int BITS, int GROUP>
static ALWAYS_INLINE Whole upper_bits(Whole bytes) {
  constexpr int distance = 4 - GROUP * (BITS - 4);
  const Whole mask = all_whole(BITS == 5 ? 0x10101010 : 0x30303030);
  if constexpr (distance > 0) return bits_in_both(shifted_up<distance>(bytes), mask);
  return bits_in_both(shifted<distance < 0 ? -distance : 0>(bytes), mask);
}

// Returns two of the inputs whose codes share a word, as 16-bit integers: of four numbers 0 and 2, or 1 and 3.
template <int BITS>
static inline Whole pair_of(Whole codes, int pair) {
  if (BITS == 8) return pair ? odd(codes) : even(codes);
  return pair == 3 ? shifted<12>(codes) : nibbles(pair == 0   ? codes
                                                  : pair == 1 ? shifted<8>(codes)
                                                              : shifted<4>(codes));
}

// Adds the products of a span of every row and a block of outputs. Codes are widened to 16 bits once for all rows.
template <int BITS, int ROWS, bool VNNI>
static ALWAYS_INLINE void add_words(const uint8_t* weight, const uint8_t* values, int64_t stride, int64_t inputs,
                                    Whole (&sums)[ROWS][PARTS]) {
  enum { AT_ONCE = 32 / BITS };  // inputs whose codes share a word
  const uint8_t* end = weight + inputs / AT_ONCE * 4 * CODES_BLOCK;
  do {
    Whole codes[PARTS];
    for (int j = 0; j < PARTS; ++j) codes[j] = read_bytes(weight + 4 * LANES * j);
    for (int line = 0; line < 2; ++line) _mm_prefetch((const char*)(weight + FETCHED + 64 * line), _MM_HINT_T0);
#pragma GCC unroll 4
    for (int pair = 0; pair < AT_ONCE / 2; ++pair) {
      Whole here[PARTS];
      for (int j = 0; j < PARTS; ++j) here[j] = pair_of<BITS>(codes[j], pair);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const Whole both = four_of(values + i * stride + pair * 4);
        for (int j = 0; j < PARTS; ++j)
          sums[i][j] = VNNI ? add_pairs_at_once(sums[i][j], here[j], both) : add_pairs(sums[i][j], here[j], both);
      }
    }
    weight += 4 * CODES_BLOCK, values += AT_ONCE * 2;
  } while (weight < end);
}

// Adds the products of one group of four inputs of codes of 5 or 6 bits, and of the groups after it in a unit: the inputs
// whose upper bits share a byte.
template <int BITS, int GROUP, int ROWS, bool VNNI>
static ALWAYS_INLINE void add_groups(const uint8_t* weight, const uint8_t* values, int64_t stride,
                                     Whole (&sums)[ROWS][PARTS]) {
  enum { GROUPS = 8 / (BITS - 4), LINE = 4 * CODES_BLOCK };
  if constexpr (GROUP < GROUPS) {
    Whole even_codes[PARTS], odd_codes[PARTS];
    for (int j = 0; j < PARTS; ++j) {
      const Whole lower = read_bytes(weight + GROUP / 2 * LINE + 4 * LANES * j);
      const Whole upper = read_bytes(weight + GROUPS / 2 * LINE + 4 * LANES * j);
      const Whole codes =
          bits_in_either(lower_halves(GROUP % 2 ? shifted<4>(lower) : lower), upper_bits<BITS, GROUP>(upper));
      even_codes[j] = even(codes), odd_codes[j] = odd(codes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const uint8_t* four = values + i * stride + GROUP * 8;
      const Whole first = four_of(four), second = four_of(four + 4);
      for (int j = 0; j < PARTS; ++j) {
        sums[i][j] = VNNI ? add_pairs_at_once(sums[i][j], even_codes[j], first) : add_pairs(sums[i][j], even_codes[j], first);
        sums[i][j] = VNNI ? add_pairs_at_once(sums[i][j], odd_codes[j], second) : add_pairs(sums[i][j], odd_codes[j], second);
      }
    }
    add_groups<BITS, GROUP + 1, ROWS, VNNI>(weight, values, stride, sums);
  }
}

// The same for codes of 5 and 6 bits, unit after unit.
template <int BITS, int ROWS, bool VNNI>
static ALWAYS_INLINE void add_units(const uint8_t* weight, const uint8_t* values, int64_t stride, int64_t inputs,
                                    Whole (&sums)[ROWS][PARTS]) {
  enum { INPUTS = 32 / (BITS - 4), UNIT = INPUTS * CODES_BLOCK * BITS / 8 };
  const uint8_t* end = weight + inputs / INPUTS * UNIT;
  do {
    for (int line = 0; line < UNIT / 64; ++line) _mm_prefetch((const char*)(weight + FETCHED + 64 * line), _MM_HINT_T0);
    add_groups<BITS, 0, ROWS, VNNI>(weight, values, stride, sums);
    weight += UNIT, values += INPUTS * 2;
  } while (weight < end);
}

// The same for codes of 4 bits and split activations. It suits few rows, since codes are unpacked for each row.
template <int ROWS>
static ALWAYS_INLINE void add_split(const uint8_t* weight, const uint8_t* values, int64_t stride, int64_t inputs,
                                    Whole (&sums)[ROWS][PARTS]) {
  const uint8_t* end = weight + inputs * CODES_BLOCK / 2;
  Whole upper[ROWS][PARTS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < PARTS; ++j) upper[i][j] = all_whole(0);
  do {
    Whole codes[PARTS];
    for (int j = 0; j < PARTS; ++j) codes[j] = read_bytes(weight + 4 * LANES * j);
    for (int line = 0; line < 2; ++line) _mm_prefetch((const char*)(weight + FETCHED + 64 * line), _MM_HINT_T0);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Whole here[PARTS];
      for (int j = 0; j < PARTS; ++j) here[j] = lower_halves(half ? shifted<4>(codes[j]) : codes[j]);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; ++i) {
        const uint8_t* four = values + i * stride + half * 8;
        const Whole high = four_of(four), low = four_of(four + 4);
        for (int j = 0; j < PARTS; ++j) {
          upper[i][j] = add_fours_at_once(upper[i][j], here[j], high);
          sums[i][j] = add_fours_at_once(sums[i][j], here[j], low);
        }
      }
    }
    weight += 4 * CODES_BLOCK, values += 16;
  } while (weight < end);
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < PARTS; ++j) sums[i][j] = add_whole(sums[i][j], times_256(upper[i][j]));
}

// The same for codes and activations of one byte.
template <int ROWS>
static ALWAYS_INLINE void add_bytes(const uint8_t* weight, const uint8_t* values, int64_t stride, int64_t inputs,
                                    Whole (&sums)[ROWS][PARTS]) {
  const uint8_t* end = weight + inputs * CODES_BLOCK;
  do {
    Whole codes[PARTS];
    for (int j = 0; j < PARTS; ++j) codes[j] = read_bytes(weight + 4 * LANES * j);
    for (int line = 0; line < 2; ++line) _mm_prefetch((const char*)(weight + FETCHED + 64 * line), _MM_HINT_T0);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Whole four = four_of(values + i * stride);
      for (int j = 0; j < PARTS; ++j) sums[i][j] = add_fours_at_once(sums[i][j], codes[j], four);
    }
    weight += 4 * CODES_BLOCK, values += 4;
  } while (weight < end);
}

// BITS of a code; LAYOUT of activations; VNNI: use its instructions that multiply and add, required for bytes.
template <int BITS, int LAYOUT, int SCALING, int ROWS, bool VNNI>
static ALWAYS_INLINE void block_rows(const Matrix& matrix, const Rounded& x, int64_t row, int64_t block, void* out) {
  const int64_t first = block * CODES_BLOCK, stride = x.inputs * stored_bytes<LAYOUT>;
  const int64_t spans_of_group = SCALING == BY_OUTPUT ? x.spans : matrix.group / x.span;
  const uint8_t* weight = (const uint8_t*)matrix.weight + first * x.inputs * BITS / 8;
  const uint8_t* values = x.values.data() + row * stride;
  int64_t place = first * (x.spans / spans_of_group), left = spans_of_group;
  Vector totals[ROWS][PARTS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < PARTS; ++j) totals[i][j] = zero();
  for (int64_t at = row * x.spans, end = at + x.spans; at < end; ++at) {
    Whole sums[ROWS][PARTS];
    begin<SCALING, ROWS>(matrix, x, at, place, sums);
    if constexpr (LAYOUT == ONE_BYTE)
      add_bytes<ROWS>(weight, values, stride, x.span, sums);
    else if constexpr (LAYOUT == SPLIT)
      add_split<ROWS>(weight, values, stride, x.span, sums);
    else if constexpr (BITS == 5 || BITS == 6)
      add_units<BITS, ROWS, VNNI>(weight, values, stride, x.span, sums);
    else
      add_words<BITS, ROWS, VNNI>(weight, values, stride, x.span, sums);
    weight += x.span * CODES_BLOCK * BITS / 8, values += x.span * stored_bytes<LAYOUT>;
    add_span<SCALING, ROWS>(matrix, x, at, place, sums, totals);
    if (--left) continue;
    fetch_scales<SCALING>(matrix, place);
    place += CODES_BLOCK, left = spans_of_group;
  }
  const float* scales = SCALING == BY_OUTPUT ? (const float*)matrix.scales + first : nullptr;
  if (matrix.value_kind == BFLOAT16)
    finish<ROWS>(matrix, row, first, scales, totals, (Bfloat16*)out);
  else
    finish<ROWS>(matrix, row, first, scales, totals, (float*)out);
}

template <int BITS, int SCALING, int ROWS>
static void wide_rows(const Matrix& matrix, const Rounded& x, int64_t row, int64_t block, void* out) {
  block_rows<BITS, WORDS, SCALING, ROWS, false>(matrix, x, row, block, out);
}

template <int BITS, int LAYOUT, int SCALING, int ROWS>
static WITH_VNNI void vnni_rows(const Matrix& matrix, const Rounded& x, int64_t row, int64_t block, void* out) {
  block_rows<BITS, LAYOUT, SCALING, ROWS, true>(matrix, x, row, block, out);
}

template <int BITS, int LAYOUT, int SCALING, int ROWS>
static void some_rows(const Matrix& matrix, const Rounded& x, int64_t rows, int64_t row, int64_t block, void* out) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return some_rows<BITS, LAYOUT, SCALING, ROWS - 1>(matrix, x, rows, row, block, out);
  if (has_vnni)
    vnni_rows<BITS, LAYOUT, SCALING, ROWS>(matrix, x, row, block, out);
  else
    wide_rows<BITS, SCALING, ROWS>(matrix, x, row, block, out);
}

template <int BITS, int LAYOUT, int SCALING>
static void multiply(const Matrix& matrix, const Rounded& x, int64_t rows, void* out, int threads) {
  share_out((matrix.outputs + CODES_BLOCK - 1) / CODES_BLOCK, threads, [&](int64_t first, int64_t last, int) {
    for (int64_t block = first; block < last; ++block)
      for (int64_t row = 0, here; row < rows; row += here) {  // groups of about the same size
        constexpr int most = LAYOUT == SPLIT && MOST_ROWS > MOST_SPLIT_ROWS ? MOST_SPLIT_ROWS : MOST_ROWS;
        const int64_t left = rows - row, groups = (left + most - 1) / most;
        here = (left + groups - 1) / groups;
        some_rows<BITS, LAYOUT, SCALING, most>(matrix, x, here, row, block, out);
      }
  });
}

template <int BITS, int LAYOUT>
static void multiply(const Matrix& matrix, const Rounded& x, int64_t rows, void* out, int threads) {
  if (!matrix.group) return multiply<BITS, LAYOUT, BY_OUTPUT>(matrix, x, rows, out, threads);
  if (!matrix.zeros) return multiply<BITS, LAYOUT, BY_GROUP>(matrix, x, rows, out, threads);
  if (matrix.zero_kind == BYTES) return multiply<BITS, LAYOUT, WITH_ZERO_CODES>(matrix, x, rows, out, threads);
  multiply<BITS, LAYOUT, WITH_ZEROS>(matrix, x, rows, out, threads);
}

static inline float value_at(int64_t kind, const void* from, const void* halves, int64_t place, int64_t shared) {
  switch (kind) {
    case MULTIPLES: return ((const int8_t*)from)[place] * value_of(((const Float16*)halves)[shared]);
    case FLOAT16: return value_of(((const Float16*)from)[place]);
    default: return ((const float*)from)[place];
  }
}

// Returns the code of an input in the memory of a block's codes.
static inline int code_at(const uint8_t* codes, int64_t bits, int64_t lane, int64_t input) {
  const int64_t group = input / 4, at = lane * 4 + input % 4, line = 4 * CODES_BLOCK;
  if (bits == 8) return codes[group * line + at];
  const int64_t share = bits - 4, groups = share ? 8 / share : 2, lines = groups / 2 + (share > 0);
  const uint8_t* unit = codes + group / groups * lines * line;
  const int64_t here = group % groups;
  const int lower = unit[here / 2 * line + at] >> here % 2 * 4 & 15;
  return share ? lower | (unit[groups / 2 * line + at] >> here * share & ((1 << share) - 1)) << 4 : lower;
}

// Unpacks one row of the matrix to exactly the numbers that its codes represent.
template <typename T>
static void unpack_row(const Matrix& matrix, int64_t output, T* to) {
  const int64_t inputs = rounded_up(matrix.inputs, matrix.group ? matrix.group : CODES_SPAN), bits = bits_of(matrix.kind);
  const int64_t groups = matrix.group ? inputs / matrix.group : 1, block = output / CODES_BLOCK, lane = output % CODES_BLOCK;
  const uint8_t* codes = (const uint8_t*)matrix.weight + block * CODES_BLOCK * inputs * bits / 8;
  for (int64_t i = 0; i < matrix.inputs; ++i) {
    const int64_t place = (block * groups + (matrix.group ? i / matrix.group : 0)) * CODES_BLOCK + lane;
    const int code = code_at(codes, bits, lane, i);
    const int low = matrix.zeros ? matrix.zero_kind == BYTES ? ((const uint8_t*)matrix.zeros)[place] : 0 : 1 << (bits - 1);
    const int64_t shared = shared_place(matrix, place - lane) + lane;
    volatile float value = (float)(code - low) * value_at(matrix.scale_kind, matrix.scales, matrix.scale_halves, place, shared);
    if (matrix.zeros && matrix.zero_kind != BYTES)  // `volatile` rounds the product before the addition
      value = value + value_at(matrix.zero_kind, matrix.zeros, matrix.zero_halves, place, shared);
    store(to + i, value);
  }
}

// Unpacks one row of the matrix, in float32 or half precision.
extern "C" void unpack_codes(const Matrix* matrix, int64_t output, int64_t kind, void* out) {
  switch (kind) {
    case BFLOAT16: return unpack_row(*matrix, output, (Bfloat16*)out);
    case FLOAT16: return unpack_row(*matrix, output, (Float16*)out);
    default: unpack_row(*matrix, output, (float*)out);
  }
}

// (rows, K) -> (rows, N), in float32 or bfloat16.
extern "C" void multiply_codes(const Matrix* matrix, const void* x, int64_t rows, void* out, int threads) {
  static thread_local Rounded rounded;
  if (matrix->value_kind == BFLOAT16)
    rounded.take(*matrix, (const Bfloat16*)x, rows, threads);
  else
    rounded.take(*matrix, (const float*)x, rows, threads);
  if (rounded.layout == SPLIT)
    multiply<4, SPLIT>(*matrix, rounded, rows, out, threads);
  else if (matrix->kind == NIBBLES)
    multiply<4, WORDS>(*matrix, rounded, rows, out, threads);
  else if (matrix->kind == FIVES)
    multiply<5, WORDS>(*matrix, rounded, rows, out, threads);
  else if (matrix->kind == SIXES)
    multiply<6, WORDS>(*matrix, rounded, rows, out, threads);
  else if (rounded.layout == ONE_BYTE)
    multiply<8, ONE_BYTE, BY_OUTPUT>(*matrix, rounded, rows, out, threads);
  else
    multiply<8, WORDS>(*matrix, rounded, rows, out, threads);
}
