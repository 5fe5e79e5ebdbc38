// Root mean square norms with the bits of torch's own, which adds squares up in the order of its vectors.

#include "calls.h"
#include "vectors.h"

#include <math.h>
#include <vector>

namespace {

enum { LEVELS = 4, CHAINS = 4, SUMMED = 8 };  // SUMMED: numbers of a vector, with AVX-512, too

// Of `size` numbers as torch sums a contiguous row on a CPU: four vectors side by side, and partial sums in levels, so
// that no sum has many terms. It is a function by itself so that no product before it is added without rounding.
__attribute__((noinline)) float sum_of(const float* from, int64_t size) {
  float sums[LEVELS][CHAINS][SUMMED] = {};
  const int64_t vectors = size / SUMMED, rounds = vectors / CHAINS;
  int64_t power = 0;
  while ((int64_t)1 << power < rounds) ++power;
  power = power / LEVELS > 4 ? power / LEVELS : 4;
  const int64_t step = (int64_t)1 << power;
  int64_t round = 0;
  const auto add_round = [&]() {
    for (int64_t chain = 0; chain < CHAINS; ++chain)
      for (int64_t lane = 0; lane < SUMMED; ++lane) sums[0][chain][lane] += from[(round * CHAINS + chain) * SUMMED + lane];
    ++round;
  };
  while (round + step <= rounds) {
    for (int64_t i = 0; i < step; ++i) add_round();
    for (int64_t level = 1; level < LEVELS; ++level) {
      for (int64_t chain = 0; chain < CHAINS; ++chain)
        for (int64_t lane = 0; lane < SUMMED; ++lane) {
          sums[level][chain][lane] += sums[level - 1][chain][lane];
          sums[level - 1][chain][lane] = 0;
        }
      if (round & ((step - 1) << (level * power))) break;
    }
  }
  while (round < rounds) add_round();
  for (int64_t level = 1; level < LEVELS; ++level)
    for (int64_t chain = 0; chain < CHAINS; ++chain)
      for (int64_t lane = 0; lane < SUMMED; ++lane) sums[0][chain][lane] += sums[level][chain][lane];
  for (int64_t vector = rounds * CHAINS; vector < vectors; ++vector)
    for (int64_t lane = 0; lane < SUMMED; ++lane) sums[0][0][lane] += from[vector * SUMMED + lane];
  for (int64_t chain = 1; chain < CHAINS; ++chain)
    for (int64_t lane = 0; lane < SUMMED; ++lane) sums[0][0][lane] += sums[0][chain][lane];
  float sum = 0;
  for (int64_t i = vectors * SUMMED; i < size; ++i) sum += from[i];
  for (int64_t lane = 0; lane < SUMMED; ++lane) sum += sums[0][0][lane];
  return sum;
}

template <typename T>
void norm(const Norm& norm, const T* x, int64_t rows, T* out) {
  static thread_local std::vector<float> squares;
  squares.resize(norm.size);
  const T* weight = (const T*)norm.weight;
  for (; rows > 0; --rows, x += norm.size, out += norm.size) {
    for (int64_t i = 0; i < norm.size; ++i) squares[i] = value_of(x[i]) * value_of(x[i]);
    const float scale = 1.0f / sqrtf(sum_of(squares.data(), norm.size) / (float)norm.size + norm.eps);
    for (int64_t i = 0; i < norm.size; ++i) store(out + i, rounded<T>(value_of(x[i]) * scale) * value_of(weight[i]));
  }
}

}  // namespace

// Rows (n, size) -> the same, all contiguous and of one kind.
extern "C" void foretoken_norm(const Norm* call, const void* x, int64_t rows, void* out) {
  switch (call->kind) {
    case FLOAT32: return norm(*call, (const float*)x, rows, (float*)out);
    case BFLOAT16: return norm(*call, (const Bfloat16*)x, rows, (Bfloat16*)out);
    case FLOAT16: return norm(*call, (const Float16*)x, rows, (Float16*)out);
  }
}
