// Packing of weights into the order in which products read them, line after line, and unpacking of rows.

#include "abi.h"
#include "threads.h"
#include "vectors.h"

#include <string.h>

enum { TILE = 16 };  // outputs of a tile of pairs, and pairs of inputs

// Packs blocks of outputs, input by input; missing outputs are 0. Rows of the weight are read a part at a time, so that
// all rows of a block stay in the L1 cache.
template <typename Number>
static void pack_blocks(const Number* weight, int64_t outputs, int64_t inputs, int64_t block, Number* packed,
                        int threads) {
  share_each((outputs + block - 1) / block, threads, [=](int64_t index, int) {
    Number* of_block = packed + index * block * inputs;
    const Number* first = weight + index * block * inputs;
    const int64_t count = outputs - index * block < block ? outputs - index * block : block;
    if (count < block) memset(of_block, 0, sizeof(Number) * (size_t)(block * inputs));
    for (int64_t part = 0; part < inputs; part += TILE)
      for (int64_t input = part; input < inputs && input < part + TILE; ++input)
        for (int64_t output = 0; output < count; ++output)
          of_block[input * block + output] = first[output * inputs + input];
  });
}

// Packs two tiles of 16 outputs per block of 32 outputs and 32 inputs, with pairs of inputs side by side.
static void pack_pairs(const uint16_t* weight, int64_t outputs, int64_t inputs, uint32_t* packed, int threads) {
  const int64_t groups = (inputs + 2 * TILE - 1) / (2 * TILE), block = 2 * TILE;
  share_each((outputs + block - 1) / block, threads, [=](int64_t index, int) {
    uint32_t* out = packed + index * groups * block * TILE;
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t tile = 0; tile < 2; ++tile)
        for (int64_t pair = 0; pair < TILE; ++pair)
          for (int64_t row = 0; row < TILE; ++row) {
            const int64_t output = index * block + tile * TILE + row, input = 2 * (group * TILE + pair);
            uint16_t both[2] = {0, 0};
            if (output < outputs)
              for (int64_t i = 0; i < 2 && input + i < inputs; ++i) both[i] = weight[output * inputs + input + i];
            memcpy(out++, both, sizeof both);
          }
  });
}

// Packs a weight (outputs, inputs), stored row by row, into `packed`, in the format `kind`.
extern "C" void foredraft_pack(const void* weight, int64_t outputs, int64_t inputs, int64_t kind, int64_t block,
                               void* packed, int threads) {
  if (kind == PAIRS)
    pack_pairs((const uint16_t*)weight, outputs, inputs, (uint32_t*)packed, threads);
  else if (kind == FLOAT32)
    pack_blocks((const uint32_t*)weight, outputs, inputs, block, (uint32_t*)packed, threads);
  else
    pack_blocks((const uint16_t*)weight, outputs, inputs, block, (uint16_t*)packed, threads);
}

// Unpacks one row of a matrix that `pack_blocks` packed.
template <typename Number, typename Out>
static void unpack_block(const Matrix& matrix, int64_t output, Out* out) {
  const int64_t block = 2 * LANES;  // same as foredraft_num_outputs
  const Number* from = (const Number*)matrix.weight + output / block * block * matrix.inputs + output % block;
  for (int64_t input = 0; input < matrix.inputs; ++input)
    if constexpr (sizeof(Number) == sizeof(Out))
      memcpy(out + input, from + input * block, sizeof *out);
    else
      out[input] = value_of(from[input * block]);
}

// Unpacks a row in its own half precision, or as float32.
template <typename Number>
static void unpack_halves(const Matrix& matrix, int64_t output, int64_t kind, void* out) {
  if (kind == FLOAT32)
    unpack_block<Number>(matrix, output, (float*)out);
  else
    unpack_block<Number>(matrix, output, (Number*)out);
}

static void unpack_pairs(const Matrix& matrix, int64_t output, uint16_t* out) {
  const int64_t groups = (matrix.inputs + 2 * TILE - 1) / (2 * TILE), tile = output / TILE % 2;
  const uint16_t* from = (const uint16_t*)matrix.weight + output / (2 * TILE) * groups * 4 * TILE * TILE + output % TILE * 2;
  for (int64_t input = 0; input < matrix.inputs; ++input) {
    const int64_t group = input / (2 * TILE), pair = input / 2 % TILE;
    out[input] = from[((group * 2 + tile) * TILE + pair) * 2 * TILE + input % 2];
  }
}

// Unpacks rows of a matrix: floats in their own format or in float32, codes in any format.
extern "C" void foredraft_rows(const Matrix* matrix, const int64_t* outputs, int64_t count, int64_t kind, void* out) {
  const int64_t bytes = matrix->inputs * (kind == FLOAT32 ? 4 : 2);
  for (int64_t i = 0; i < count; ++i) {
    void* to = (char*)out + i * bytes;
    switch (matrix->kind) {
      case PAIRS: unpack_pairs(*matrix, outputs[i], (uint16_t*)to); break;
      case FLOAT32: unpack_block<float>(*matrix, outputs[i], (float*)to); break;
      case BFLOAT16: unpack_halves<Bfloat16>(*matrix, outputs[i], kind, to); break;
      case FLOAT16: unpack_halves<Float16>(*matrix, outputs[i], kind, to); break;
      default: unpack_codes(matrix, outputs[i], kind, to);
    }
  }
}
