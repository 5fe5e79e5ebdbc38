// Products of float32 or bfloat16 with a matrix of integer codes of 8, 6, 5 or 4 bits. Scales are by output, or by output and
// group of inputs. Zeros are by group, if codes are not symmetric about 0.
//
// Each row is rounded by itself to 16 or 8 bits, with one scale per span of inputs. Sums over a span are then integers,
// which are exact in any order and with any instruction. They are added span after span. A row therefore has the same bits
// in a batch of any size and on every CPU.
//
// A few rows are multiplied by packed codes, which are unpacked in registers. For more rows, a tile of codes is unpacked
// once into the L1 cache.

#include "abi.h"
#include "functions.h"
#include "threads.h"
#include "vectors.h"
#include "whole_numbers.h"

#include <math.h>
#include <string.h>
#include <vector>

#define NOT_INLINE __attribute__((noinline))

enum { PARTS = CODES_BLOCK / LANES };     // vectors of a block
enum { MOST_ROWS = LANES == 8 ? 2 : 4 };  // most rows for which a whole block is one function; more take too long to compile
enum { MOST_BYTE_ROWS = 2 };              // the same for activations in bytes
enum { MOST_SPLIT_ROWS = 4 };             // most rows for which 16-bit activations are multiplied byte by byte
enum { TILE_PARTS = 2 };                  // vectors of a tile that are multiplied at a time
enum { TILE_ROWS = LANES == 8 ? 6 : 8 };  // most rows that are multiplied by these vectors; limited by registers
enum { MOST_TILED = 64 };                 // most rows of a tile; their totals stay in the L1 cache with it
enum { LEAST_SPAN = 16 };                 // fewest inputs that are rounded together
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

// Rounded rows (n, K), span after span. The numbers of all rows in a span are contiguous.
namespace {  // keeps the name local to this file
struct Rounded {
  int64_t rows, inputs, span, spans;  // inputs: padded with zeros
  int64_t bytes, stored;              // bytes of a rounded activation, and of its layout in memory
  Layout layout;
  bool ignores_infinite;
  std::vector<uint8_t> values;
  std::vector<float> scales, sums;  // by span and row; sums: of the rounded numbers
  std::vector<int32_t> starts;      // initial value of sums, which corrects for the excess of codes
  int32_t excess;                   // offset of codes; 1 if the zeros contain it

  template <typename T>
  void take(const Matrix& matrix, const T* x, int64_t count, int threads) {
    const int64_t given = matrix.inputs, whole = matrix.group ? matrix.group : CODES_SPAN;
    rows = count, span = whole <= CODES_SPAN ? whole : least(whole & -whole, CODES_SPAN);  // a span is within a group
    inputs = rounded_up(given, whole), spans = inputs / span;
    bytes = matrix.activation_bytes, ignores_infinite = matrix.ignores_infinite;
    if (bytes == 1)
      layout = has_vnni || matrix.kind != BYTES ? ONE_BYTE : WORDS;  // sums of two products of bytes exceed 16 bits
    else
      layout = has_vnni && matrix.kind == NIBBLES && rows <= MOST_SPLIT_ROWS ? SPLIT : WORDS;
    stored = layout == ONE_BYTE ? 1 : 2;
    excess = matrix.zeros ? matrix.zero_kind == BYTES : 1 << (bits_of(matrix.kind) - 1);
    values.resize(rows * inputs * stored);
    scales.resize(rows * spans), sums.resize(rows * spans), starts.resize(rows * spans);
    share_out(rows, rows * inputs < SHARED_NUMBERS ? 1 : threads, [&](int64_t first, int64_t last, int) {
      for (int64_t row = first; row < last; ++row)
        for (int64_t number = 0; number < spans; ++number)
          take_span(x + row * given + number * span, least(span, given - number * span), number * rows + row);
    });
  }

  const uint8_t* values_of(int64_t place) const { return values.data() + place * span * stored; }

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
    const float scale = is_usable ? peak / LARGEST[bytes] : ignores_infinite || (peak < 1e34f && is_finite) ? 0.0f : NAN;
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
template <int SCALING, int ROWS, int COUNT>
static ALWAYS_INLINE void begin(const Matrix& matrix, const Rounded& x, int64_t at, int64_t place,
                                Whole (&sums)[ROWS][COUNT]) {
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COUNT; ++j) {
      sums[i][j] = all_whole(SCALING == WITH_ZEROS ? 0 : x.starts[at + i]);
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

// Reads the scales of a vector of outputs, and their zeros if these are not codes. `place` is the position of the scales
// of a block and a group, and `lane` that of the first output in the block.
template <int SCALING>
static ALWAYS_INLINE void read_scales(const Matrix& matrix, int64_t place, int64_t lane, Vector& scales, Vector& zeros) {
  if (SCALING == BY_OUTPUT) return;
  const int64_t shared = shared_place(matrix, place) + lane;
  scales = read_as(matrix.scale_kind, matrix.scales, matrix.scale_halves, place + lane, shared);
  if (SCALING == WITH_ZEROS) zeros = read_as(matrix.zero_kind, matrix.zeros, matrix.zero_halves, place + lane, shared);
}

// Adds the scaled sum of a span to a total. `row_scale` and `row_sum` are those of the row's activations.
template <int SCALING>
static ALWAYS_INLINE Vector add_scaled(float row_scale, float row_sum, Whole sum, Vector scales, Vector zeros, Vector total) {
  const Vector scale = all(row_scale), value = as_floats(sum);
  if (SCALING == BY_OUTPUT) return add_product(value, scale, total);
  total = add_product(value * scale, scales, total);
  return SCALING == WITH_ZEROS ? add_product(zeros, all(row_sum), total) : total;
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

// Number of groups of four inputs in a unit of codes, and bytes of a unit for a block of outputs.
template <int BITS>
constexpr int groups_of_unit = BITS >= 8 ? 1 : BITS == 4 ? 2 : 8 / (BITS - 4);
template <int BITS>
constexpr int bytes_of_unit = groups_of_unit<BITS> * CODES_BLOCK * BITS / 2;

// Returns the codes of a group of four inputs of a unit, one per byte.
template <int BITS>
static ALWAYS_INLINE Whole four_codes(const uint8_t* unit, int group) {
  if (BITS == 8) return read_bytes(unit);
  const Whole lower = read_bytes(unit + group / 2 * 4 * CODES_BLOCK);
  const Whole codes = lower_halves(group % 2 ? shifted(lower, 4) : lower);
  if (BITS == 4) return codes;
  const Whole upper = read_bytes(unit + groups_of_unit<BITS> / 2 * 4 * CODES_BLOCK);
  const int distance = 4 - group * (BITS - 4);  // from the bits of this group to their position in a code
  const Whole moved = distance > 0 ? shifted_up(upper, distance) : shifted(upper, -distance);
  return bits_in_either(codes, bits_in_both(moved, all_whole(BITS == 5 ? 0x10101010 : 0x30303030)));
}

// Calls use(first, group, codes) for every group of four inputs of a span: group `group` of a unit whose first group is
// `first`. `codes` are vectors of bytes, one per part.
template <int BITS, typename Use>
static ALWAYS_INLINE void each_four(const uint8_t* weight, int64_t inputs, const Use& use) {
  enum { GROUPS = groups_of_unit<BITS>, UNIT = bytes_of_unit<BITS> };
  for (int64_t first = 0; first < inputs / 4; first += GROUPS, weight += UNIT) {
    for (int line = 0; line < UNIT / 64; ++line) _mm_prefetch((const char*)(weight + FETCHED + 64 * line), _MM_HINT_T0);
#pragma GCC unroll 8
    for (int group = 0; group < GROUPS; ++group) {
      Whole codes[PARTS];
      for (int j = 0; j < PARTS; ++j) codes[j] = four_codes<BITS>(weight + 4 * LANES * j, group);
      use(first, group, codes);
    }
  }
}

// Returns sums with the products of pairs of 16-bit integers added.
template <bool VNNI>
static ALWAYS_INLINE Whole with_pairs(Whole sums, Whole codes, Whole both) {
  return VNNI ? add_pairs_at_once(sums, codes, both) : add_pairs(sums, codes, both);
}

// Adds the products of a span of every row and a block of outputs. Codes are widened to 16 bits once for all rows.
template <int BITS, int ROWS, bool VNNI>
static ALWAYS_INLINE void add_words(const uint8_t* weight, const uint8_t* values, int64_t inputs,
                                    Whole (&sums)[ROWS][PARTS]) {
  each_four<BITS>(weight, inputs, [&](int64_t unit, int group, const Whole(&codes)[PARTS]) __attribute__((always_inline)) {
    Whole even_codes[PARTS], odd_codes[PARTS];
    for (int j = 0; j < PARTS; ++j) even_codes[j] = even(codes[j]), odd_codes[j] = odd(codes[j]);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const uint8_t* four = values + (i * inputs + (unit + group) * 4) * 2;
      const Whole first = four_of(four), second = four_of(four + 4);
      for (int j = 0; j < PARTS; ++j)
        sums[i][j] = with_pairs<VNNI>(with_pairs<VNNI>(sums[i][j], even_codes[j], first), odd_codes[j], second);
    }
  });
}

// The same for codes of 4 bits and split activations. It suits few rows, since codes are unpacked for each row.
template <int ROWS>
static ALWAYS_INLINE void add_split(const uint8_t* weight, const uint8_t* values, int64_t inputs,
                                    Whole (&sums)[ROWS][PARTS]) {
  Whole upper[ROWS][PARTS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < PARTS; ++j) upper[i][j] = all_whole(0);
  each_four<4>(weight, inputs, [&](int64_t unit, int group, const Whole(&codes)[PARTS]) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) {
      const uint8_t* four = values + (i * inputs + (unit + group) * 4) * 2;
      const Whole high = four_of(four), low = four_of(four + 4);
      for (int j = 0; j < PARTS; ++j) {
        upper[i][j] = add_fours_at_once(upper[i][j], codes[j], high);
        sums[i][j] = add_fours_at_once(sums[i][j], codes[j], low);
      }
    }
  });
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < PARTS; ++j) sums[i][j] = add_whole(sums[i][j], times_256(upper[i][j]));
}

// Most groups of four inputs whose products with bytes are added in 16 bits: two of each group.
template <int BITS>
constexpr int groups_in_words = 32767 / (2 * 127 * ((1 << BITS) - 1));

// The same for activations of one byte.
template <int BITS, int ROWS, bool VNNI>
static ALWAYS_INLINE void add_bytes(const uint8_t* weight, const uint8_t* values, int64_t inputs,
                                    Whole (&sums)[ROWS][PARTS]) {
  Whole words[ROWS][PARTS];
  each_four<BITS>(weight, inputs, [&](int64_t unit, int group, const Whole(&codes)[PARTS]) __attribute__((always_inline)) {
    constexpr int count = BITS == 8 ? 1 : least(groups_in_words<BITS>, groups_of_unit<BITS>);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Whole four = four_of(values + i * inputs + (unit + group) * 4);
      for (int j = 0; j < PARTS; ++j) {
        if (VNNI) {
          sums[i][j] = add_fours_at_once(sums[i][j], codes[j], four);
        } else {
          words[i][j] = group % count ? add_twos(words[i][j], codes[j], four) : twos(codes[j], four);
          if (group % count == count - 1) sums[i][j] = add_pairs(sums[i][j], words[i][j], all_words(1));
        }
      }
    }
  });
}

// Multiplies a few rows by the packed codes of a block. BITS of a code; LAYOUT of activations; VNNI: use its instructions
// that multiply and add.
template <int BITS, int LAYOUT, int SCALING, int ROWS, bool VNNI>
static ALWAYS_INLINE void block_rows(const Matrix& matrix, const Rounded& x, int64_t row, int64_t block, void* out) {
  const int64_t first = block * CODES_BLOCK;
  const int64_t spans_of_group = SCALING == BY_OUTPUT ? x.spans : matrix.group / x.span;
  const uint8_t* weight = (const uint8_t*)matrix.weight + first * x.inputs * BITS / 8;
  int64_t place = first * (x.spans / spans_of_group), left = spans_of_group;
  Vector totals[ROWS][PARTS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < PARTS; ++j) totals[i][j] = zero();
  for (int64_t at = row, end = row + x.spans * x.rows; at < end; at += x.rows) {
    Whole sums[ROWS][PARTS];
    begin<SCALING>(matrix, x, at, place, sums);
    if constexpr (LAYOUT == ONE_BYTE)
      add_bytes<BITS, ROWS, VNNI>(weight, x.values_of(at), x.span, sums);
    else if constexpr (LAYOUT == SPLIT)
      add_split<ROWS>(weight, x.values_of(at), x.span, sums);
    else
      add_words<BITS, ROWS, VNNI>(weight, x.values_of(at), x.span, sums);
    weight += x.span * CODES_BLOCK * BITS / 8;
    const float *row_scales = x.scales.data() + at, *row_sums = x.sums.data() + at;
    Vector scales[PARTS], zeros[PARTS];
    for (int j = 0; j < PARTS; ++j) read_scales<SCALING>(matrix, place, j * LANES, scales[j], zeros[j]);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < PARTS; ++j)
        totals[i][j] = add_scaled<SCALING>(row_scales[i], row_sums[i], sums[i][j], scales[j], zeros[j], totals[i][j]);
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

template <int BITS, int LAYOUT, int SCALING, int ROWS>
static void wide_rows(const Matrix& matrix, const Rounded& x, int64_t row, int64_t block, void* out) {
  block_rows<BITS, LAYOUT, SCALING, ROWS, false>(matrix, x, row, block, out);
}

template <int BITS, int LAYOUT, int SCALING, int ROWS>
static WITH_VNNI void vnni_rows(const Matrix& matrix, const Rounded& x, int64_t row, int64_t block, void* out) {
  block_rows<BITS, LAYOUT, SCALING, ROWS, true>(matrix, x, row, block, out);
}

template <int BITS, int LAYOUT, int SCALING, int ROWS>
static void some_rows(const Matrix& matrix, const Rounded& x, int64_t rows, int64_t row, int64_t block, void* out) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return some_rows<BITS, LAYOUT, SCALING, ROWS - 1>(matrix, x, rows, row, block, out);
  if constexpr (LAYOUT == SPLIT || (LAYOUT == ONE_BYTE && BITS == 8))  // only with VNNI
    vnni_rows<BITS, LAYOUT, SCALING, ROWS>(matrix, x, row, block, out);
  else if (has_vnni)
    vnni_rows<BITS, LAYOUT, SCALING, ROWS>(matrix, x, row, block, out);
  else
    wide_rows<BITS, LAYOUT, SCALING, ROWS>(matrix, x, row, block, out);
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

enum { UNPACKED = 16 };  // bits of a code of a tile that is multiplied by words

// A tile: codes of a block of outputs and a few spans, in words in the order of activations or in bytes, and their scales.
// They are unpacked once for all rows.
namespace {
struct Tile {
  alignas(64) uint8_t codes[CODES_SPAN * CODES_BLOCK * 2];
  alignas(64) float scales[CODES_SPAN / LEAST_SPAN][CODES_BLOCK], zeros[CODES_SPAN / LEAST_SPAN][CODES_BLOCK];
  alignas(64) float totals[MOST_TILED][CODES_BLOCK];  // of rows, so far
  int64_t places[CODES_SPAN / LEAST_SPAN];            // positions of the scales of the spans in the matrix
  int64_t first, count;                               // spans
};

template <int ROWS>
using Sums = int32_t[ROWS][CODES_BLOCK];  // of a span

template <int ROWS>
using Multiply = void(const uint8_t* codes, const uint8_t* values, int64_t inputs, Sums<ROWS>& sums);
}

// Unpacks the codes of a tile, for activations in bytes or words.
template <int BITS, int LAYOUT>
static ALWAYS_INLINE void unpack(const uint8_t* weight, int64_t inputs, Tile& tile) {
  each_four<BITS>(weight, inputs, [&](int64_t unit, int group, const Whole(&codes)[PARTS]) __attribute__((always_inline)) {
    int32_t* to = (int32_t*)tile.codes + (unit + group) * CODES_BLOCK * stored_bytes<LAYOUT>;
    for (int j = 0; j < PARTS; ++j) {
      write_whole(to + j * LANES, LAYOUT == ONE_BYTE ? codes[j] : even(codes[j]));
      if (LAYOUT != ONE_BYTE) write_whole(to + CODES_BLOCK + j * LANES, odd(codes[j]));
    }
  });
}

// Reads the scales of a tile whose spans are set.
template <int SCALING>
static ALWAYS_INLINE void read_scales(const Matrix& matrix, int64_t block, int64_t groups, int64_t spans_of_group, Tile& tile) {
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t place = tile.places[i] = (block * groups + (tile.first + i) / spans_of_group) * CODES_BLOCK;
    for (int j = 0; j < PARTS && SCALING != BY_OUTPUT; ++j) {
      Vector scales, zeros;
      read_scales<SCALING>(matrix, place, j * LANES, scales, zeros);
      write(tile.scales[i] + j * LANES, scales);
      if (SCALING == WITH_ZEROS) write(tile.zeros[i] + j * LANES, zeros);
    }
    fetch_scales<SCALING>(matrix, place);
  }
}

// Multiplies a few rows by the codes of a span, packed or not, for TILE_PARTS vectors of outputs from `output` on.
template <int BITS, int ROWS, bool VNNI>
static ALWAYS_INLINE void multiply_words(const uint8_t* codes, const uint8_t* values, int64_t inputs, int64_t output,
                                         Sums<ROWS>& out) {
  enum { GROUPS = groups_of_unit<BITS>, UNIT = bytes_of_unit<BITS> };
  Whole sums[ROWS][TILE_PARTS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < TILE_PARTS; ++j) sums[i][j] = all_whole(0);
  const uint8_t* end = values + inputs * 2;
  do {
    if (BITS != UNPACKED)
      for (int line = 0; line < UNIT / 128; ++line) _mm_prefetch((const char*)(codes + FETCHED + 128 * line), _MM_HINT_T0);
#pragma GCC unroll 8
    for (int group = 0; group < GROUPS; ++group)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Whole here[TILE_PARTS];
        for (int j = 0; j < TILE_PARTS; ++j) {
          if (BITS == UNPACKED) {
            here[j] = read_bytes(codes + half * CODES_BLOCK * 4 + j * LANES * 4);
          } else {
            const Whole four = four_codes<BITS>(codes + j * LANES * 4, group);
            here[j] = half ? odd(four) : even(four);
          }
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
          const Whole both = four_of(values + i * inputs * 2 + group * 8 + half * 4);
          for (int j = 0; j < TILE_PARTS; ++j)
            sums[i][j] = VNNI ? add_pairs_at_once(sums[i][j], here[j], both) : add_pairs_in_place(sums[i][j], here[j], both);
        }
      }
    codes += UNIT, values += GROUPS * 8;
  } while (values < end);
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < TILE_PARTS; ++j) write_whole(out[i] + output + j * LANES, sums[i][j]);
}

// The same for the codes of a tile in bytes. BITS of a code.
template <int BITS, int ROWS, bool VNNI>
static ALWAYS_INLINE void multiply_bytes(const uint8_t* codes, const uint8_t* values, int64_t inputs, int64_t output,
                                         Sums<ROWS>& out) {
  constexpr int most = VNNI || BITS == 8 ? CODES_SPAN / 4 : groups_in_words<BITS>;
  for (int64_t first = 0; first < inputs / 4; first += most) {
    Whole sums[ROWS][TILE_PARTS];
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < TILE_PARTS; ++j) sums[i][j] = all_whole(0);
    const uint8_t* end = values + least(most * 4, inputs - first * 4);
    do {
      Whole here[TILE_PARTS];
      for (int j = 0; j < TILE_PARTS; ++j) here[j] = read_bytes(codes + j * LANES * 4);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) {
        const Whole four = four_of(values + i * inputs);
        for (int j = 0; j < TILE_PARTS; ++j)
          sums[i][j] = VNNI ? add_fours_at_once(sums[i][j], here[j], four) : add_twos_in_place(sums[i][j], here[j], four);
      }
      codes += CODES_BLOCK * 4, values += 4;
    } while (values < end);
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < TILE_PARTS; ++j) {
        int32_t* to = out[i] + output + j * LANES;
        write_whole(to, VNNI ? sums[i][j] : add_pairs(first ? read_bytes(to) : all_whole(0), sums[i][j], all_words(1)));
      }
  }
}

// The functions below are not inlined, so that sums stay in registers.
template <int BITS, int LAYOUT, int ROWS, bool VNNI>
static ALWAYS_INLINE void multiply_span(const uint8_t* codes, const uint8_t* values, int64_t inputs, Sums<ROWS>& sums) {
  for (int64_t output = 0; output < CODES_BLOCK; output += TILE_PARTS * LANES)
    if constexpr (LAYOUT == ONE_BYTE)
      multiply_bytes<BITS, ROWS, VNNI>(codes + output * 4, values, inputs, output, sums);
    else
      multiply_words<BITS, ROWS, VNNI>(codes + output * 4, values, inputs, output, sums);
}

template <int BITS, int LAYOUT, int ROWS>
static NOT_INLINE void wide_span(const uint8_t* codes, const uint8_t* values, int64_t inputs, Sums<ROWS>& sums) {
  multiply_span<BITS, LAYOUT, ROWS, false>(codes, values, inputs, sums);
}

template <int BITS, int LAYOUT, int ROWS>
static NOT_INLINE WITH_VNNI void vnni_span(const uint8_t* codes, const uint8_t* values, int64_t inputs, Sums<ROWS>& sums) {
  multiply_span<BITS, LAYOUT, ROWS, true>(codes, values, inputs, sums);
}

template <int BITS, int LAYOUT, int ROWS>
static Multiply<ROWS>* of_span() {
  return has_vnni ? vnni_span<BITS, LAYOUT, ROWS> : wide_span<BITS, LAYOUT, ROWS>;
}

// Returns the function that multiplies a few rows by codes of a span: packed ones of these bits, or those of a tile.
template <int ROWS>
static Multiply<ROWS>* function_of(int bits, bool is_packed, Layout layout) {
  if (layout == ONE_BYTE) {
    switch (bits) {
      case 4: return of_span<4, ONE_BYTE, ROWS>();
      case 5: return of_span<5, ONE_BYTE, ROWS>();
      case 6: return of_span<6, ONE_BYTE, ROWS>();
      default: return vnni_span<8, ONE_BYTE, ROWS>;
    }
  }
  if constexpr (TILE_ROWS > MOST_ROWS) {
    if (is_packed) switch (bits) {
      case 4: return of_span<4, WORDS, ROWS>();
      case 5: return of_span<5, WORDS, ROWS>();
      case 6: return of_span<6, WORDS, ROWS>();
      default: return of_span<8, WORDS, ROWS>();
    }
  }
  return of_span<UNPACKED, WORDS, ROWS>();
}

// Adds the products of a few rows and a tile to the totals. `row` is counted from the first row of the tile, `first`.
// `codes` are packed, or those of the tile.
template <int SCALING, int ROWS>
static void add_rows(const Matrix& matrix, const Rounded& x, const uint8_t* codes, int64_t rows, int64_t first,
                     int64_t row, Tile& tile) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return add_rows<SCALING, ROWS - 1>(matrix, x, codes, rows, first, row, tile);
  const bool is_packed = codes != tile.codes;
  Multiply<ROWS>* const multiply = function_of<ROWS>(bits_of(matrix.kind), is_packed, x.layout);
  for (int64_t span = 0; span < tile.count; ++span) {
    const int64_t at = (tile.first + span) * x.rows + first + row, place = tile.places[span];
    Sums<ROWS> sums;
    multiply(codes, x.values_of(at), x.span, sums);
    codes += x.span * CODES_BLOCK * (is_packed ? bits_of(matrix.kind) : x.stored * 8) / 8;
    const float *row_scales = x.scales.data() + at, *row_sums = x.sums.data() + at;
    Vector scales[PARTS], zeros[PARTS];
    for (int j = 0; j < PARTS; ++j)
      scales[j] = read(tile.scales[span] + j * LANES), zeros[j] = read(tile.zeros[span] + j * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      float* totals = tile.totals[row + i];
      Whole starts[1][PARTS];
      begin<SCALING>(matrix, x, at + i, place, starts);
      for (int j = 0; j < PARTS; ++j) {
        const Whole sum = add_whole(read_bytes(sums[i] + j * LANES), starts[0][j]);
        const Vector total = read(totals + j * LANES);
        write(totals + j * LANES, add_scaled<SCALING>(row_scales[i], row_sums[i], sum, scales[j], zeros[j], total));
      }
    }
  }
}

// Calls use(first, count) for groups of about the same size, of `most` or fewer.
template <typename Use>
static ALWAYS_INLINE void each_group(int64_t count, int64_t most, const Use& use) {
  for (int64_t first = 0, here; first < count; first += here) {
    const int64_t groups = (count - first + most - 1) / most;
    here = (count - first + groups - 1) / groups;
    use(first, here);
  }
}

// Multiplies rows `first` and later by a block, tile after tile.
template <int BITS, int LAYOUT, int SCALING>
static void block_tiles(const Matrix& matrix, const Rounded& x, int64_t first, int64_t rows, int64_t block, void* out) {
  const int64_t output = block * CODES_BLOCK, spans_of_group = SCALING == BY_OUTPUT ? x.spans : matrix.group / x.span;
  const uint8_t* weight = (const uint8_t*)matrix.weight + output * x.inputs * BITS / 8;
  Tile tile;
  memset(tile.totals, 0, rows * sizeof *tile.totals);
  for (tile.first = 0; tile.first < x.spans; tile.first += tile.count) {
    tile.count = least(CODES_SPAN / x.span, x.spans - tile.first);
    read_scales<SCALING>(matrix, block, x.spans / spans_of_group, spans_of_group, tile);
    if (LAYOUT == WORDS && TILE_ROWS > MOST_ROWS && rows <= TILE_ROWS) {
      add_rows<SCALING, TILE_ROWS>(matrix, x, weight, rows, first, 0, tile);
    } else {
      unpack<BITS, LAYOUT>(weight, tile.count * x.span, tile);
      each_group(rows, TILE_ROWS, [&](int64_t row, int64_t here) {
        add_rows<SCALING, TILE_ROWS>(matrix, x, tile.codes, here, first, row, tile);
      });
    }
    weight += tile.count * x.span * CODES_BLOCK * BITS / 8;
  }
  const float* scales = SCALING == BY_OUTPUT ? (const float*)matrix.scales + output : nullptr;
  for (int64_t row = 0; row < rows; ++row) {
    Vector totals[1][PARTS];
    for (int j = 0; j < PARTS; ++j) totals[0][j] = read(tile.totals[row] + j * LANES);
    if (matrix.value_kind == BFLOAT16)
      finish<1>(matrix, first + row, output, scales, totals, (Bfloat16*)out);
    else
      finish<1>(matrix, first + row, output, scales, totals, (float*)out);
  }
}

template <int BITS, int LAYOUT, int SCALING>
static void multiply(const Matrix& matrix, const Rounded& x, int64_t rows, void* out, int threads) {
  constexpr int most = LAYOUT == WORDS ? MOST_ROWS : least(MOST_ROWS, LAYOUT == SPLIT ? MOST_SPLIT_ROWS : MOST_BYTE_ROWS);
  share_out((matrix.outputs + CODES_BLOCK - 1) / CODES_BLOCK, threads, [&](int64_t first, int64_t last, int) {
    for (int64_t block = first; block < last; ++block)
      if (LAYOUT != SPLIT && rows > most)
        each_group(rows, MOST_TILED, [&](int64_t row, int64_t here) {
          block_tiles<BITS, LAYOUT, SCALING>(matrix, x, row, here, block, out);
        });
      else
        each_group(rows, most, [&](int64_t row, int64_t here) {
          some_rows<BITS, LAYOUT, SCALING, most>(matrix, x, here, row, block, out);
        });
  });
}

template <int BITS, int LAYOUT>
static void multiply(const Matrix& matrix, const Rounded& x, int64_t rows, void* out, int threads) {
  if (!matrix.group) return multiply<BITS, LAYOUT, BY_OUTPUT>(matrix, x, rows, out, threads);
  if (!matrix.zeros) return multiply<BITS, LAYOUT, BY_GROUP>(matrix, x, rows, out, threads);
  if (matrix.zero_kind == BYTES) return multiply<BITS, LAYOUT, WITH_ZERO_CODES>(matrix, x, rows, out, threads);
  multiply<BITS, LAYOUT, WITH_ZEROS>(matrix, x, rows, out, threads);
}

template <int BITS>
static void multiply(const Matrix& matrix, const Rounded& x, int64_t rows, void* out, int threads) {
  if (x.layout == ONE_BYTE) return multiply<BITS, ONE_BYTE>(matrix, x, rows, out, threads);
  multiply<BITS, WORDS>(matrix, x, rows, out, threads);
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
  switch (matrix->kind) {
    case NIBBLES: return rounded.layout == SPLIT ? multiply<4, SPLIT>(*matrix, rounded, rows, out, threads)
                                                 : multiply<4>(*matrix, rounded, rows, out, threads);
    case FIVES: return multiply<5>(*matrix, rounded, rows, out, threads);
    case SIXES: return multiply<6>(*matrix, rounded, rows, out, threads);
    default: multiply<8>(*matrix, rounded, rows, out, threads);
  }
}
