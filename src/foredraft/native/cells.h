// Cells of a cache: a head's key or value of one token, in any format.

#pragma once

#include "abi.h"
#include "functions.h"
#include "whole_numbers.h"

#include <math.h>

struct Scaled {  // an int8 number of a cache; the scale of its cell follows the last number
  int8_t code;
};

static inline Vector read(const Scaled* from) { return as_floats(widened((const int8_t*)from)); }

// Returns one of the narrower numbers that were read into the lane of each float.
typedef int32_t Places __attribute__((vector_size(sizeof(Vector))));
static inline Vector part_of(const Bfloat16*, Vector floats, int part) {
  const Places places = (Places)floats;
  return (Vector)(part ? places & (int32_t)0xffff0000 : places << 16);
}
static inline Vector part_of(const Scaled*, Vector floats, int part) {
  return as_floats((Whole)((Places)floats << (24 - 8 * part) >> 24));
}

// Reads a cell of `size` numbers in vectors of float32.
template <typename C>
struct Cell {
  enum { PARTS = sizeof(C) == 2 ? 2 : 1 };  // numbers in the memory of one float
  const C* from;
  int64_t size;
  Cell(const C* cells, int64_t place, int64_t size) : from(cells + place * size), size(size) {}
  static int64_t numbers(int64_t size) { return size; }  // distance between cells
  static Vector times(Vector numbers, Vector) { return numbers; }
  float factor() const { return 1; }
  Vector whole(int64_t at) const { return read(from + at); }
  Vector first(int64_t at) const { return read_first(from + at, size - at); }
};

template <>
struct Cell<Scaled> {
  enum { PARTS = 4 };
  const Scaled* from;
  int64_t size;
  Vector scale;
  Cell(const Scaled* cells, int64_t place, int64_t size) : from(cells + place * numbers(size)), size(size) {
    scale = all(factor());
  }
  float factor() const {
    float one;
    memcpy(&one, from + size, SCALE_BYTES);
    return one;
  }
  static int64_t numbers(int64_t size) { return size + SCALE_BYTES; }
  static Vector times(Vector codes, Vector factors) { return add_product(codes, factors, zero()); }
  Vector whole(int64_t at) const { return times(read(from + at), scale); }
  Vector first(int64_t at) const { return times(read_first(from + at, size - at), scale); }
};

static inline int64_t item_bytes(int64_t kind) { return kind == FLOAT32 ? 4 : kind == SCALED ? 1 : 2; }

// Distance between two cells, in numbers of the cache's format.
static inline int64_t cell_numbers(int64_t kind, int64_t size) {
  return kind == SCALED ? Cell<Scaled>::numbers(size) : size;
}

// Largest absolute value; NaN if there is a NaN.
template <typename T>
static float peak_of(const T* from, int64_t size) {
  float most = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float number = fabsf(value_of(from[i]));
    most = number > most || number != number ? number : most;
  }
  return most;
}

// Write numbers of one format to a cell of another.
template <typename T>
static void write_scaled(const T* from, int64_t size, Scaled* to) {
  Vector most = zero(), check = zero();
  for (int64_t at = 0; at < size; at += LANES) {
    const Vector numbers = read_first(from + at, size - at);
    most = larger(most, size_of(numbers)), check = add_product(numbers, zero(), check);
  }
  const bool is_finite = !differ(check, zero());
  const float scale = (is_finite ? largest(most) : peak_of(from, size)) / 127;
  for (int64_t at = 0; at < size; at += LANES) {
    int32_t codes[LANES] = {};
    if (is_finite && scale > 0) write_whole(codes, nearest(read_first(from + at, size - at) / all(scale)));
    for (int64_t i = 0; i < LANES && at + i < size; ++i) to[at + i].code = (int8_t)codes[i];
  }
  memcpy(to + size, &scale, SCALE_BYTES);
}

template <typename T>
static void write_cell(const T* from, int64_t size, int64_t kind, char* to) {
  if (kind == SCALED) return write_scaled(from, size, (Scaled*)to);
  for (int64_t at = 0; at < size; at += LANES)
    write_first((Bfloat16*)to + at, read_first(from + at, size - at), size - at);
}
