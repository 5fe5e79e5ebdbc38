// Cells of a cache: a head's key or value of one token, in any kind.

#pragma once

#include "abi.h"
#include "functions.h"

#include <math.h>

// How cells of so many numbers are read, in vectors of float32.
template <typename C>
struct Cell {
  enum { PARTS = sizeof(C) == 2 ? 2 : 1 };  // in the place of a float
  const C* from;
  int64_t size;
  Cell(const C* cells, int64_t place, int64_t size) : from(cells + place * size), size(size) {}
  static int64_t numbers(int64_t size) { return size; }  // from one to the next
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

// Numbers, as those of a cache of this kind count, from one cell to the next.
static inline int64_t cell_numbers(int64_t kind, int64_t size) {
  return kind == SCALED ? Cell<Scaled>::numbers(size) : size;
}

// Numbers of one kind to a cell of another.
template <typename T>
static void write_scaled(const T* from, int64_t size, Scaled* to) {
  float most = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float number = fabsf(value_of(from[i]));
    most = number > most || number != number ? number : most;
  }
  const float scale = most / 127;
  for (int64_t i = 0; i < size; ++i) {
    const float code = nearbyintf(value_of(from[i]) / scale);
    to[i].code = code > 127 ? 127 : code < -127 ? -127 : code == code ? (int8_t)code : 0;
  }
  memcpy(to + size, &scale, SCALE_BYTES);
}

template <typename T>
static void write_cell(const T* from, int64_t size, int64_t kind, char* to) {
  if (kind == SCALED) return write_scaled(from, size, (Scaled*)to);
  for (int64_t at = 0; at < size; at += LANES)
    write_first((Bfloat16*)to + at, read_first(from + at, size - at), size - at);
}
