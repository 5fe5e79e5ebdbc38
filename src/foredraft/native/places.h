// Positions of a matrix's codes, scales and zeros in memory.
//
// A line has four bytes for each output of a block. Codes of 8 bits: a line has four inputs. Codes of 4 bits: a line has
// eight inputs, the first four in the lower halves. Codes of 5 and 6 bits: a unit of 32 or 16 inputs has lines with the
// lower four bits, like codes of 4 bits, and a last line with the upper bits, those of the first four inputs lowest.

#pragma once

#include "abi.h"
#include "threads.h"
#include "whole_numbers.h"

#include <string.h>

enum { AT_A_TIME = 256 };  // inputs of a block of outputs that are written together, since they share lines

struct Place {  // of an output
  int64_t inputs, groups, block, lane, bits;  // inputs: padded
  uint8_t* codes;

  Place(const Matrix& matrix, int64_t output)
      : block(output / CODES_BLOCK), lane(output % CODES_BLOCK), bits(bits_of(matrix.kind)) {
    inputs = rounded_up(matrix.inputs, matrix.group ? matrix.group : CODES_SPAN);
    groups = matrix.group ? inputs / matrix.group : 1;
    codes = (uint8_t*)matrix.weight + block * CODES_BLOCK * inputs * bits / 8;
  }
  int64_t of_group(int64_t group) const { return (block * groups + group) * CODES_BLOCK + lane; }

  uint8_t* line(int64_t number) const { return codes + (number * CODES_BLOCK + lane) * 4; }

  // Writes codes of BITS bits, beginning at an input whose index is a multiple of a unit. `count` is a multiple of 8.
  template <int BITS>
  void write_many(int64_t input, const uint8_t* from, int64_t count) const {
    if constexpr (BITS == 5 || BITS == 6) return write_units<BITS - 4>(input, from, count);
    for (int64_t i = 0; i < count; i += 8) {
      uint32_t first, second;
      memcpy(&first, from + i, 4), memcpy(&second, from + i + 4, 4);
      if constexpr (BITS == 8) {
        memcpy(line((input + i) / 4), &first, 4), memcpy(line((input + i) / 4 + 1), &second, 4);
      } else {
        const uint32_t both = first | second << 4;
        memcpy(line((input + i) / 8), &both, 4);
      }
    }
  }

  template <int SHARE>
  void write_units(int64_t input, const uint8_t* from, int64_t count) const {
    enum { SIZE = 32 / SHARE, LINES = SIZE / 8 };
    int64_t i = 0;
    for (; i + SIZE <= count; i += SIZE) {
      const int64_t unit = (input + i) / SIZE * (LINES + 1);
      uint32_t upper = 0;
      for (int at = 0; at < LINES; ++at) {
        uint32_t first, second;
        memcpy(&first, from + i + 8 * at, 4), memcpy(&second, from + i + 8 * at + 4, 4);
        const uint32_t lower = (first & 0x0f0f0f0f) | (second & 0x0f0f0f0f) << 4;
        memcpy(line(unit + at), &lower, 4);
        const uint32_t mask = SHARE == 1 ? 0x01010101 : 0x03030303;
        upper |= (first >> 4 & mask) << 2 * at * SHARE | (second >> 4 & mask) << (2 * at + 1) * SHARE;
      }
      memcpy(line(unit + LINES), &upper, 4);
    }
    for (; i < count; i += 8) write(input + i, from + i);
  }

  // Writes eight codes, beginning at an input whose index is a multiple of 8. The eight codes of a unit that come first
  // clear its upper bits, so units are written from their beginning.
  void write(int64_t input, const uint8_t* eight) const {
    uint32_t first, second;
    memcpy(&first, eight, 4), memcpy(&second, eight + 4, 4);
    if (bits == 8) {
      memcpy(line(input / 4), &first, 4), memcpy(line(input / 4 + 1), &second, 4);
      return;
    }
    const uint32_t lower = (first & 0x0f0f0f0f) | (second & 0x0f0f0f0f) << 4;
    if (bits == 4) {
      memcpy(line(input / 8), &lower, 4);
      return;
    }
    const int64_t share = bits - 4, size = 32 / share, unit = input / size * (size / 8 + 1), at = input % size / 8;
    memcpy(line(unit + at), &lower, 4);
    uint8_t* to = line(unit + size / 8);
    uint32_t upper = 0;
    if (at) memcpy(&upper, to, 4);
    const uint32_t mask = share == 1 ? 0x01010101 : 0x03030303;
    upper |= (first >> 4 & mask) << 2 * at * share | (second >> 4 & mask) << (2 * at + 1) * share;
    memcpy(to, &upper, 4);
  }
};

// Calls work(row, rows) for ranges of `count` rows, the outputs `first` and following of a matrix. A range is within one
// block of outputs, so that no two threads write to the same lines.
template <typename Work>
static inline void share_blocks(int64_t first, int64_t count, int threads, const Work& work) {
  const int64_t before = first / CODES_BLOCK, behind = (first + count + CODES_BLOCK - 1) / CODES_BLOCK;
  share_each(behind - before, threads, [&](int64_t number, int) {
    const int64_t begin = (before + number) * CODES_BLOCK - first, row = begin < 0 ? 0 : begin;
    work(row, least(begin + CODES_BLOCK, count) - row);
  });
}
