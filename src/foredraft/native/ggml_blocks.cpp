// Quantised blocks of ggml, read from a file: packed as the codes of a matrix, or dequantised.
//
// Source: block layouts of ggml (ggml-org/ggml, ggml-common.h).

#include "abi.h"
#include "places.h"
#include "threads.h"
#include "vectors.h"

#include <string.h>
#include <type_traits>

namespace {  // keeps the names local to this file

enum Type {  // ggml's numbers
  Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
  IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39
};

// Weights that the codes of IQ4 and of MXFP4 stand for.
const int8_t IQ4_WEIGHTS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
const int8_t MXFP4_WEIGHTS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Contents of a block. A weight is (code - middle) * multiple * scale, or code * multiple * scale + zero_multiple * zero.
struct Block {
  uint8_t codes[256];
  int8_t multiples[16], zero_multiples[16];  // of its groups
  Float16 scale, zero;
  float wide_scale;  // of MXFP4
};

struct Shape {
  int64_t size, bytes, bits, group, middle;  // weights and bytes of a block; bits of a code; weights of a group
  bool has_zeros;
  int64_t scale_kind;  // FLOAT16; FLOAT32; or MULTIPLES, if several groups share a scale in half precision
};

constexpr Shape shape_of(int64_t type) {
  switch (type) {
    case Q4_0: return {32, 18, 4, 32, 8, false, FLOAT16};
    case Q4_1: return {32, 20, 4, 32, 0, true, FLOAT16};
    case Q5_0: return {32, 22, 5, 32, 16, false, FLOAT16};
    case Q5_1: return {32, 24, 5, 32, 0, true, FLOAT16};
    case Q8_0: return {32, 34, 8, 32, 128, false, FLOAT16};
    case Q2_K: return {256, 84, 4, 16, 0, true, MULTIPLES};
    case Q3_K: return {256, 110, 4, 16, 8, false, MULTIPLES};
    case Q4_K: return {256, 144, 4, 32, 0, true, MULTIPLES};
    case Q5_K: return {256, 176, 5, 32, 0, true, MULTIPLES};
    case Q6_K: return {256, 210, 6, 16, 32, false, MULTIPLES};
    case IQ4_NL: return {32, 18, 8, 32, 128, false, FLOAT16};
    case IQ4_XS: return {256, 136, 8, 32, 128, false, MULTIPLES};
    default: return {32, 17, 5, 32, 16, false, FLOAT32};  // MXFP4
  }
}

// Calls use(type) with the number of a type as a constant.
template <typename Use>
void with_type(int64_t type, const Use& use) {
  switch (type) {
#define OF_TYPE(name) \
  case name: return use(std::integral_constant<int64_t, name>())
    OF_TYPE(Q4_0);
    OF_TYPE(Q4_1);
    OF_TYPE(Q5_0);
    OF_TYPE(Q5_1);
    OF_TYPE(Q8_0);
    OF_TYPE(Q2_K);
    OF_TYPE(Q3_K);
    OF_TYPE(Q4_K);
    OF_TYPE(Q5_K);
    OF_TYPE(Q6_K);
    OF_TYPE(IQ4_NL);
    OF_TYPE(IQ4_XS);
    OF_TYPE(MXFP4);
#undef OF_TYPE
  }
}

Float16 half_at(const uint8_t* from) {
  Float16 half;
  memcpy(&half, from, 2);
  return half;
}

Float16 negative(Float16 half) { return {(uint16_t)(half.bits ^ 0x8000)}; }

// Writes the lower halves of `count` bytes as codes, followed by their upper halves.
ALWAYS_INLINE void take_halves(const uint8_t* __restrict from, int64_t count, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = from[i] & 15, codes[count + i] = from[i] >> 4;
}

// The same, with codes for the weights in a table.
ALWAYS_INLINE void take_listed(const uint8_t* from, const int8_t* weights, int middle, uint8_t* codes) {
  take_halves(from, 16, codes);
  for (int64_t i = 0; i < 32; ++i) codes[i] = (uint8_t)(weights[codes[i]] + middle);
}

// Adds fifth bits, which four bytes contain, to 32 codes.
ALWAYS_INLINE void add_fifths(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 4; ++i) {  // eight bits become one per byte, then 0x80 or less, then 16
    const uint64_t bits = from[i] * 0x0101010101010101 & 0x8040201008040201;
    uint64_t eight;
    memcpy(&eight, codes + 8 * i, 8);
    eight |= (bits + 0x7f7f7f7f7f7f7f7f & 0x8080808080808080) >> 3;
    memcpy(codes + 8 * i, &eight, 8);
  }
}

// Reads scale and zero of a superblock, and those of its eight groups, which have six bits each.
ALWAYS_INLINE void take_scales(const uint8_t* __restrict from, Block& __restrict to) {
  to.scale = half_at(from), to.zero = negative(half_at(from + 2));
  const uint8_t *lower = from + 4, *middle = from + 8, *upper = from + 12;
  for (int64_t i = 0; i < 4; ++i) {
    to.multiples[i] = lower[i] & 63, to.multiples[4 + i] = (upper[i] & 15) | (lower[i] >> 2 & 48);
    to.zero_multiples[i] = middle[i] & 63, to.zero_multiples[4 + i] = upper[i] >> 4 | (middle[i] >> 2 & 48);
  }
}

ALWAYS_INLINE void take_block(int64_t type, const uint8_t* __restrict from, Block& __restrict to) {
  switch (type) {
    case Q8_0:
      to.scale = half_at(from);
      for (int64_t i = 0; i < 32; ++i) to.codes[i] = from[2 + i] ^ 128;
      return;
    case Q4_0: to.scale = half_at(from), take_halves(from + 2, 16, to.codes); return;
    case Q4_1: to.scale = half_at(from), to.zero = half_at(from + 2), take_halves(from + 4, 16, to.codes); return;
    case Q5_0:
      to.scale = half_at(from), take_halves(from + 6, 16, to.codes), add_fifths(from + 2, to.codes);
      return;
    case Q5_1:
      to.scale = half_at(from), to.zero = half_at(from + 2);
      take_halves(from + 8, 16, to.codes), add_fifths(from + 4, to.codes);
      return;
    case Q2_K:
      to.scale = half_at(from + 80), to.zero = negative(half_at(from + 82));
      for (int64_t i = 0; i < 16; ++i) to.multiples[i] = from[i] & 15, to.zero_multiples[i] = from[i] >> 4;
      for (int64_t i = 0; i < 256; ++i) to.codes[i] = from[16 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
      return;
    case Q3_K:
      to.scale = half_at(from + 108);
      for (int64_t i = 0; i < 16; ++i) {
        const int lower = from[96 + i % 8] >> i / 8 * 4 & 15, upper = from[104 + i % 4] >> i / 4 * 2 & 3;
        to.multiples[i] = (int8_t)((lower | upper << 4) - 32);
      }
      for (int64_t i = 0; i < 256; ++i) {
        const int lower = from[32 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3, upper = from[i % 32] >> i / 32 & 1;
        to.codes[i] = (uint8_t)(8 + lower - (upper ? 0 : 4));
      }
      return;
    case IQ4_NL: to.scale = half_at(from), take_listed(from + 2, IQ4_WEIGHTS, 128, to.codes); return;
    case IQ4_XS: {
      to.scale = half_at(from);
      uint16_t upper;
      memcpy(&upper, from + 2, 2);
      for (int64_t i = 0; i < 8; ++i) {
        to.multiples[i] = (int8_t)(((from[4 + i / 2] >> i % 2 * 4 & 15) | (upper >> 2 * i & 3) << 4) - 32);
        take_listed(from + 8 + 16 * i, IQ4_WEIGHTS, 128, to.codes + 32 * i);
      }
      return;
    }
    case MXFP4: {  // the scale is a power of two with this exponent
      const uint32_t bits = from[0] < 2 ? 0x00200000u << from[0] : (uint32_t)(from[0] - 1) << 23;
      memcpy(&to.wide_scale, &bits, 4);
      take_listed(from + 1, MXFP4_WEIGHTS, 16, to.codes);
      return;
    }
    case Q4_K:
      take_scales(from, to);
      for (int64_t part = 0; part < 4; ++part) take_halves(from + 16 + 32 * part, 32, to.codes + 64 * part);
      return;
    case Q5_K:
      take_scales(from, to);
      for (int64_t part = 0; part < 4; ++part) take_halves(from + 48 + 32 * part, 32, to.codes + 64 * part);
      for (int64_t group = 0; group < 8; ++group)
        for (int64_t i = 0; i < 32; ++i) to.codes[32 * group + i] |= (from[16 + i] >> group & 1) << 4;
      return;
    case Q6_K:
      to.scale = half_at(from + 208);
      memcpy(to.multiples, from + 192, 16);
      for (int64_t half = 0; half < 2; ++half) {
        uint8_t* codes = to.codes + 128 * half;
        const uint8_t* upper = from + 128 + 32 * half;
        take_halves(from + 64 * half, 64, codes);
        for (int64_t part = 0; part < 4; ++part)
          for (int64_t i = 0; i < 32; ++i) codes[32 * part + i] |= (upper[i] >> 2 * part & 3) << 4;
      }
      return;
  }
}

// Packs block `number` of a row of a type.
template <int64_t TYPE>
ALWAYS_INLINE void pack_block(const Matrix& matrix, const Block& block, int64_t number, const Place& place) {
  constexpr Shape shape = shape_of(TYPE);
  constexpr int64_t groups = shape.size / shape.group;
  place.write_many<shape.bits>(number * shape.size, block.codes, shape.size);
  const int64_t first = place.of_group(number * groups);
  if constexpr (shape.scale_kind == FLOAT32) {
    ((float*)matrix.scales)[first] = block.wide_scale;
  } else if constexpr (shape.scale_kind == FLOAT16) {
    ((Float16*)matrix.scales)[first] = block.scale;
    if (shape.has_zeros) ((Float16*)matrix.zeros)[first] = block.zero;
  } else {
    const int64_t shared = (first / CODES_BLOCK >> matrix.half_shift) * CODES_BLOCK + place.lane;
    ((Float16*)matrix.scale_halves)[shared] = block.scale;
    if (shape.has_zeros) ((Float16*)matrix.zero_halves)[shared] = block.zero;
    for (int64_t group = 0; group < groups; ++group) {
      ((int8_t*)matrix.scales)[first + group * CODES_BLOCK] = block.multiples[group];
      if (shape.has_zeros) ((int8_t*)matrix.zeros)[first + group * CODES_BLOCK] = block.zero_multiples[group];
    }
  }
}

// Packs rows as outputs `first` and following, all in one block of outputs. `order`: as below.
template <int64_t TYPE>
void pack_rows(const Matrix& matrix, const uint8_t* rows, const int64_t* order, int64_t row, int64_t count, int64_t first) {
  constexpr Shape shape = shape_of(TYPE);
  const int64_t blocks = matrix.inputs / shape.size;
  Place place(matrix, first);
  const int64_t lane = place.lane;
  constexpr int64_t at_a_time = AT_A_TIME / shape.size;
  Block block = {};
  for (int64_t begin = 0; begin < blocks; begin += at_a_time)
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* from = rows + (order ? order[row + i] : row + i) * blocks * shape.bytes + begin * shape.bytes;
      for (int64_t byte = 0; byte < at_a_time * shape.bytes; byte += 64)  // the next blocks of 32 rows are too many streams
        _mm_prefetch((const char*)from + at_a_time * shape.bytes + byte, _MM_HINT_T0);
      place.lane = lane + i;
      for (int64_t number = 0; number < least(at_a_time, blocks - begin); ++number) {
        take_block(TYPE, from + number * shape.bytes, block);
        pack_block<TYPE>(matrix, block, begin + number, place);
      }
    }
}

template <bool HAS_ZEROS, typename T>
void read_row(int64_t type, const Shape& shape, const uint8_t* row, int64_t inputs, T* out) {
  Block block = {};
  for (int64_t number = 0; number < inputs / shape.size; ++number, out += shape.size) {
    take_block(type, row + number * shape.bytes, block);
    const float shared = shape.scale_kind == FLOAT32 ? block.wide_scale : value_of(block.scale);
    const float shared_zero = value_of(block.zero);
    const bool has_multiples = shape.scale_kind == MULTIPLES;
    const Vector middle = all((float)shape.middle);
    for (int64_t group = 0; group < shape.size / shape.group; ++group) {
      const float scale = has_multiples ? shared * block.multiples[group] : shared;
      const float zero = has_multiples ? shared_zero * block.zero_multiples[group] : shared_zero;
      for (int64_t i = group * shape.group, end = i + shape.group; i < end; i += LANES) {
        const Vector value = (read(block.codes + i) - middle) * all(scale);  // rounded before the addition
        write_first(out + i, HAS_ZEROS ? value + all(zero) : value, LANES);
      }
    }
  }
}

}

// Packs rows of blocks as outputs `first` and following of a matrix. `order`: the row of each output; null for the same.
extern "C" void foredraft_pack_blocks(const Matrix* matrix, int64_t type, const uint8_t* rows, const int64_t* order,
                                      int64_t first, int64_t count, int threads) {
  with_type(type, [=](auto constant) {
    share_blocks(first, count, threads, [=](int64_t row, int64_t num_rows) {
      pack_rows<decltype(constant)::value>(*matrix, rows, order, row, num_rows, first + row);
    });
  });
}

template <typename T>
void read_row(int64_t type, const Shape& shape, const uint8_t* row, int64_t inputs, T* out) {
  if (shape.has_zeros) return read_row<true>(type, shape, row, inputs, out);
  read_row<false>(type, shape, row, inputs, out);
}

// Dequantises rows of blocks, in float32 or half precision: (count, inputs). `order`: as above.
extern "C" void foredraft_read_blocks(int64_t type, int64_t inputs, const uint8_t* rows, const int64_t* order, int64_t count,
                                      int64_t kind, void* out, int threads) {
  const Shape shape = shape_of(type);
  const int64_t bytes = inputs / shape.size * shape.bytes;
  share_each(count, threads, [=](int64_t i, int) {
    const uint8_t* row = rows + (order ? order[i] : i) * bytes;
    switch (kind) {
      case BFLOAT16: return read_row(type, shape, row, inputs, (Bfloat16*)out + i * inputs);
      case FLOAT16: return read_row(type, shape, row, inputs, (Float16*)out + i * inputs);
      default: read_row(type, shape, row, inputs, (float*)out + i * inputs);
    }
  });
}
