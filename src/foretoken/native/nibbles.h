// Products of float32 with a matrix in 4 bits: codes of 0 to 15, a scale and a zero point for every group of inputs. A row
// is summed by itself, group after group.

#pragma once

#include "abi.h"
#include "vectors.h"

#include <vector>

enum { NIBBLE_ROWS = LANES == 8 ? 4 : 8, NIBBLE_BLOCK = 2 * LANES };

#if defined(FORETOKEN_AVX2)
// Codes of an input and of the next one, for as many outputs as a vector has, less 8.
static inline void read_codes(const uint8_t* from, Vector* first, Vector* second) {
  const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
  const __m256i low = _mm256_and_si256(both, _mm256_set1_epi32(15)), high = _mm256_srli_epi32(both, 4);
  *first = _mm256_cvtepi32_ps(_mm256_sub_epi32(low, _mm256_set1_epi32(8)));
  *second = _mm256_cvtepi32_ps(_mm256_sub_epi32(high, _mm256_set1_epi32(8)));
}
#else
static inline void read_codes(const uint8_t* from, Vector* first, Vector* second) {
  const __m512 values = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
  const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
  *first = _mm512_permutexvar_ps(both, values);  // by the last four bits
  *second = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), values);
}
#endif

// sums: of the inputs of every group, (rows, groups).
template <int ROWS>
static inline void nibble_rows(const Matrix* matrix, const float* x, const float* sums, float* out, int64_t block) {
  const int64_t inputs = matrix->inputs, group = matrix->group, groups = inputs / group, first = block * NIBBLE_BLOCK;
  const uint8_t* codes = (const uint8_t*)matrix->weight + first * inputs / 2;
  const float *scales = matrix->scales + first * groups, *zeros = matrix->zeros + first * groups;
  Vector total[ROWS][2];
  for (int row = 0; row < ROWS; ++row) total[row][0] = total[row][1] = zero();
  for (int64_t number = 0; number < groups; ++number, scales += NIBBLE_BLOCK, zeros += NIBBLE_BLOCK) {
    Vector part[ROWS][2];
    for (int row = 0; row < ROWS; ++row) part[row][0] = part[row][1] = zero();
    for (int64_t input = number * group; input < (number + 1) * group; input += 2, codes += NIBBLE_BLOCK) {
      _mm_prefetch((const char*)(codes + 2048), _MM_HINT_T0);
      for (int half = 0; half < 2; ++half) {
        Vector one, two;
        read_codes(codes + half * LANES, &one, &two);
        for (int row = 0; row < ROWS; ++row) {
          part[row][half] = add_product(one, all(x[row * inputs + input]), part[row][half]);
          part[row][half] = add_product(two, all(x[row * inputs + input + 1]), part[row][half]);
        }
      }
    }
    for (int row = 0; row < ROWS; ++row)
      for (int half = 0; half < 2; ++half) {
        total[row][half] = add_product(read(scales + half * LANES), part[row][half], total[row][half]);
        total[row][half] = add_product(read(zeros + half * LANES), all(sums[row * groups + number]), total[row][half]);
      }
  }
  const int64_t count = least(NIBBLE_BLOCK, matrix->outputs - first);
  for (int row = 0; row < ROWS; ++row)
    for (int half = 0; half < 2; ++half) {
      const int64_t left = count - half * LANES;
      if (left <= 0) break;
      if (matrix->bias) total[row][half] = total[row][half] + read_first(matrix->bias + first + half * LANES, left);
      write_first(out + row * matrix->outputs + first + half * LANES, total[row][half], left);
    }
}

static void nibbles(const Matrix* matrix, const float* x, const float* sums, int64_t num_rows, float* out,
                    int64_t first_block, int64_t last_block) {
  const int64_t groups = matrix->inputs / matrix->group;
  for (int64_t block = first_block; block < last_block; ++block)
    for (int64_t row = 0; row < num_rows;) {
      const float *from = x + row * matrix->inputs, *of_groups = sums + row * groups;
      float* to = out + row * matrix->outputs;
      const int64_t left = num_rows - row;
      if (left >= NIBBLE_ROWS) {
        nibble_rows<NIBBLE_ROWS>(matrix, from, of_groups, to, block), row += NIBBLE_ROWS;
      } else if (left >= 4) {
        nibble_rows<4>(matrix, from, of_groups, to, block), row += 4;
      } else if (left >= 2) {
        nibble_rows<2>(matrix, from, of_groups, to, block), row += 2;
      } else {
        nibble_rows<1>(matrix, from, of_groups, to, block), row += 1;
      }
    }
}

static std::vector<float> sums_of_groups(const Matrix* matrix, const float* x, int64_t num_rows) {
  std::vector<float> sums(num_rows * (matrix->inputs / matrix->group));
  for (size_t number = 0; number < sums.size(); ++number) {
    float sum = 0;
    for (int64_t i = 0; i < matrix->group; ++i) sum += x[number * matrix->group + i];
    sums[number] = sum;
  }
  return sums;
}
