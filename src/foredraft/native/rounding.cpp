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

template <typename T>
static void round_output(const Matrix& matrix, const T* row, int64_t output) {
  const Place place(matrix, output);
  const int64_t size = matrix.group ? matrix.group : matrix.inputs;
  const float middle = 1 << (bits_of(matrix.kind) - 1), most = 2 * middle - 1, least_code = matrix.zeros ? 0 : 1;
  for (int64_t group = 0; group < place.groups; ++group, row += size) {
    const int64_t count = least(size, matrix.inputs - group * size);
    // missing inputs of the last group count as zeros
    Vector low = count < size ? zero() : all(INFINITY), high = count < size ? zero() : all(-INFINITY), check = zero();
    for (int64_t i = 0; i < count; i += LANES) {
      const Vector numbers = read_first(row + i, count - i);
      low = smaller(low, numbers), high = larger(high, numbers), check = add_product(numbers, zero(), check);
    }
    const bool is_finite = !differ(check, zero());
    const Steps steps(matrix, -largest(zero() - low), largest(high), is_finite);
    write_number(matrix.scale_kind, matrix.scales, place.of_group(group), steps.step);
    if (matrix.zeros) write_number(matrix.zero_kind, matrix.zeros, place.of_group(group), steps.zero);
    const Vector begin = all(steps.begin), step = all(is_finite ? steps.step : INFINITY), bottom = all(least_code),
                 top = all(most), shift = all(matrix.zeros ? 0 : middle);
    for (int64_t i = 0; i < count; i += LANES) {
      const Vector scaled = (read_first(row + i, count - i) - begin) / step;
      const Vector bounded = smaller(larger(scaled, bottom - shift), top - shift);
      uint8_t codes[LANES];
      write_bytes(codes, add_whole(nearest(is_finite ? bounded : zero()), all_whole((int32_t)(matrix.zeros ? 0 : middle))));
      for (int64_t lane = count - i; lane < LANES; ++lane) codes[lane] = (uint8_t)middle;
      for (int64_t eight = 0; eight < LANES && i + eight < count; eight += 8)
        place.write(group * size + i + eight, codes + eight);
    }
  }
}

// Rounds rows of a weight (count, inputs), outputs `first` and following of a matrix, to codes, scales and zeros.
extern "C" void foredraft_round(const Matrix* matrix, const void* weight, int64_t kind, int64_t first, int64_t count,
                                int threads) {
  share_each(count, threads, [=](int64_t row, int) {
    const int64_t from = row * matrix->inputs, output = first + row;
    switch (kind) {
      case BFLOAT16: return round_output(*matrix, (const Bfloat16*)weight + from, output);
      case FLOAT16: return round_output(*matrix, (const Float16*)weight + from, output);
      default: return round_output(*matrix, (const float*)weight + from, output);
    }
  });
}

// Packs codes (count, inputs), one per byte, as outputs `first` and following of a matrix.
extern "C" void foredraft_pack_codes(const Matrix* matrix, const uint8_t* codes, int64_t first, int64_t count, int threads) {
  share_each(count, threads, [=](int64_t row, int) {
    const Place place(*matrix, first + row);
    const uint8_t* from = codes + row * matrix->inputs;
    const int64_t whole = matrix->inputs / 8 * 8;
    for (int64_t input = 0; input < whole; input += 8) place.write(input, from + input);
    if (whole == matrix->inputs) return;
    uint8_t eight[8];
    memset(eight, 1 << (bits_of(matrix->kind) - 1), 8);
    memcpy(eight, from + whole, matrix->inputs - whole);
    place.write(whole, eight);
  });
}
