// Positions of a matrix's codes, scales and zeros in memory.
//
// A line has four bytes for each output of a block. Codes of 8 bits: a line has four inputs. Codes of 4 bits: a line has
// eight inputs, the first four in the lower halves. Codes of 5 and 6 bits: a unit of 32 or 16 inputs has lines with the
// lower four bits, like codes of 4 bits, and a last line with the upper bits, those of the first four inputs lowest.

#pragma once

#include "abi.h"
#include "whole_numbers.h"

#include <string.h>

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
