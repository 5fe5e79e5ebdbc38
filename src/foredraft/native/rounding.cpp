// Packing of weights as codes of 4 to 8 bits in the order in which products read them. Floats are rounded on the way,
// codes are copied. No other memory than the matrix is needed.

#include "abi.h"
#include "functions.h"
#include "places.h"
#include "threads.h"
#include "vectors.h"
#include "whole_numbers.h"

#include <math.h>

static const float LEAST_STEP = 1e-30f, LEAST_HALF_STEP = 0x1p-16f, MOST_HALF_STEP = 65504.0f;

static void write_number(int64_t kind, const void* to, int64_t place, float value) {
  switch (kind) {
    case FLOAT32: ((float*)to)[place] = value; break;
    case FLOAT16: store((Float16*)to + place, value); break;
    default: ((uint8_t*)to)[place] = (uint8_t)value;
  }
}

static float as_stored(int64_t kind, float value) { return kind == FLOAT16 ? rounded<Float16>(value) : value; }

// Rounding of a group's numbers: the code is (number - begin) / step, rounded, plus an offset.
struct Steps {
  float step, begin, zero;  // zero: as stored

  Steps() {}
  Steps(const Matrix& matrix, float low, float high, bool is_finite) : begin(0), zero(0) {
    if (!matrix.zeros) {
      step = fmaxf(fmaxf(-low, high), LEAST_STEP) / ((1 << (bits_of(matrix.kind) - 1)) - 1);
    } else {
      const bool is_half = matrix.scale_kind == FLOAT16;
      const float most = (1 << bits_of(matrix.kind)) - 1;
      if (matrix.zero_kind == BYTES) low = fminf(low, 0), high = fmaxf(high, 0);
      const float wide = (high - low) / most;
      step = as_stored(matrix.scale_kind, is_half ? fminf(fmaxf(wide, LEAST_HALF_STEP), MOST_HALF_STEP) : fmaxf(wide, LEAST_STEP));
      if (matrix.zero_kind == BYTES)
        zero = fminf(fmaxf(nearbyintf(-low / step), 0), most), begin = -zero * step;
      else
        zero = begin = as_stored(matrix.zero_kind, low);
    }
    if (!is_finite) step = NAN;  // every product with it becomes NaN
  }
};

// Returns the rounding of a group's numbers, of which some may be missing: they count as zeros.
template <typename T>
static Steps steps_of(const Matrix& matrix, const T* from, int64_t count, int64_t size) {
  Vector low = count < size ? zero() : all(INFINITY), high = count < size ? zero() : all(-INFINITY), check = zero();
  for (int64_t i = 0; i < count; i += LANES) {
    const Vector numbers = read_first(from + i, count - i);
    low = smaller(low, numbers), high = larger(high, numbers), check = add_product(numbers, zero(), check);
  }
  return Steps(matrix, -largest(zero() - low), largest(high), !differ(check, zero()));
}

// Writes the codes of `count` numbers that begin at an input.
template <typename T>
static void write_codes(const Matrix& matrix, const T* from, int64_t count, int64_t input, const Steps& steps,
                        const Place& place) {
  const bool is_finite = steps.step == steps.step;
  const float middle = 1 << (bits_of(matrix.kind) - 1), most = 2 * middle - 1, offset = matrix.zeros ? 0 : middle;
  const Vector begin = all(steps.begin), step = all(is_finite ? steps.step : INFINITY),
               bottom = all((matrix.zeros ? 0 : 1) - offset), top = all(most - offset);
  for (int64_t i = 0; i < count; i += LANES) {
    const Vector scaled = (read_first(from + i, count - i) - begin) / step;
    const Vector bounded = smaller(larger(scaled, bottom), top);
    uint8_t codes[LANES];
    write_bytes(codes, add_whole(nearest(is_finite ? bounded : zero()), all_whole((int32_t)offset)));
    for (int64_t lane = count - i; lane < LANES; ++lane) codes[lane] = (uint8_t)middle;
    for (int64_t eight = 0; eight < LANES && i + eight < count; eight += 8) place.write(input + i + eight, codes + eight);
  }
}

// Rounds rows that are outputs of one block.
template <typename T>
static void round_outputs(const Matrix& matrix, const T* rows, int64_t first, int64_t count) {
  const int64_t size = matrix.group ? matrix.group : matrix.inputs, groups = (matrix.inputs + size - 1) / size;
  Steps steps[CODES_BLOCK];
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t begin = group * size, end = least(begin + size, matrix.inputs);
    for (int64_t row = 0; row < count; ++row) {
      const Place place(matrix, first + row);
      steps[row] = steps_of(matrix, rows + row * matrix.inputs + begin, end - begin, size);
      write_number(matrix.scale_kind, matrix.scales, place.of_group(group), steps[row].step);
      if (matrix.zeros) write_number(matrix.zero_kind, matrix.zeros, place.of_group(group), steps[row].zero);
    }
    for (int64_t input = begin; input < end; input += AT_A_TIME)
      for (int64_t row = 0; row < count; ++row)
        write_codes(matrix, rows + row * matrix.inputs + input, least(AT_A_TIME, end - input), input, steps[row],
                    Place(matrix, first + row));
  }
}

// Rounds rows of a weight (count, inputs), outputs `first` and following of a matrix, to codes, scales and zeros.
extern "C" void foredraft_round(const Matrix* matrix, const void* weight, int64_t kind, int64_t first, int64_t count,
                                int threads) {
  share_blocks(first, count, threads, [=](int64_t row, int64_t rows) {
    const int64_t from = row * matrix->inputs, output = first + row;
    switch (kind) {
      case BFLOAT16: return round_outputs(*matrix, (const Bfloat16*)weight + from, output, rows);
      case FLOAT16: return round_outputs(*matrix, (const Float16*)weight + from, output, rows);
      default: return round_outputs(*matrix, (const float*)weight + from, output, rows);
    }
  });
}

// Packs codes (count, inputs), one per byte, as outputs `first` and following of a matrix.
extern "C" void foredraft_pack_codes(const Matrix* matrix, const uint8_t* codes, int64_t first, int64_t count, int threads) {
  share_blocks(first, count, threads, [=](int64_t row, int64_t rows) {
    const int64_t inputs = matrix->inputs;
    uint8_t eight[8];
    for (int64_t input = 0; input < inputs; input += 8)
      for (int64_t i = row; i < row + rows; ++i) {
        const uint8_t* from = codes + i * inputs + input;
        if (inputs - input < 8) {
          memset(eight, 1 << (bits_of(matrix->kind) - 1), 8);
          memcpy(eight, from, inputs - input);
        }
        Place(*matrix, first + i).write(input, inputs - input < 8 ? eight : from);
      }
  });
}
