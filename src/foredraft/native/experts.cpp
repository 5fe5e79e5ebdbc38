// Products of rows with matrices that they choose: the experts of a mixture.
//
// The matrices of all experts are packed as one matrix, one expert after another. Rows are grouped by expert, so each
// expert's weights are read once, and those of an expert without rows are not read. A row is multiplied as in
// `foredraft_product`, whatever the size of its group, so its bits do not depend on the other rows.

#include "abi.h"
#include "cells.h"

#include <string.h>
#include <vector>

namespace {

struct Groups {  // rows that chose the same expert, in the order in which experts are first chosen
  std::vector<int64_t> group_of, experts, firsts, rows;
  std::vector<char> inputs, outputs;

  // Groups rows by their experts. Returns false for an expert that does not exist.
  bool take(const int64_t* chosen, int64_t count, int64_t num_experts) {
    group_of.assign(num_experts, -1), experts.clear(), firsts.assign(1, 0), rows.resize(count);
    for (int64_t row = 0; row < count; ++row) {
      const int64_t expert = chosen[row];
      if (expert < 0 || expert >= num_experts) return false;
      if (group_of[expert] < 0) group_of[expert] = (int64_t)experts.size(), experts.push_back(expert), firsts.push_back(0);
      ++firsts[group_of[expert] + 1];
    }
    for (size_t group = 0; group < experts.size(); ++group) firsts[group + 1] += firsts[group];
    ends.assign(firsts.begin(), firsts.end() - 1);
    for (int64_t row = 0; row < count; ++row) rows[ends[group_of[chosen[row]]]++] = row;
    return true;
  }

 private:
  std::vector<int64_t> ends;
};

int64_t bytes_of_scales(int64_t kind) { return kind == FLOAT32 ? 4 : kind == FLOAT16 ? 2 : 1; }

const void* after(const void* memory, int64_t bytes) { return memory ? (const char*)memory + bytes : nullptr; }

// Returns the matrix of one expert. Its outputs are whole blocks.
Matrix matrix_of(const Matrix& stack, int64_t outputs, int64_t expert) {
  const BlockShape block = block_of(stack);
  const int64_t blocks = expert * outputs / block.outputs;
  const int64_t groups = stack.group ? (stack.inputs + stack.group - 1) / stack.group : 1;
  const int64_t scales = blocks * groups * CODES_BLOCK, halves = blocks * (groups >> stack.half_shift) * CODES_BLOCK * 2;
  Matrix matrix = stack;
  matrix.outputs = outputs;
  matrix.weight = after(stack.weight, blocks * block.bytes);
  matrix.bias = (const float*)after(stack.bias, expert * outputs * sizeof(float));
  matrix.scales = after(stack.scales, scales * bytes_of_scales(stack.scale_kind));
  matrix.zeros = after(stack.zeros, scales * bytes_of_scales(stack.zero_kind));
  matrix.scale_halves = after(stack.scale_halves, halves), matrix.zero_halves = after(stack.zero_halves, halves);
  return matrix;
}

int64_t value_bytes(const Matrix& matrix) {
  return item_bytes(bits_of(matrix.kind) ? matrix.value_kind : matrix.kind == PAIRS ? BFLOAT16 : FLOAT32);
}

}  // namespace

// Multiplies row i of the result, (count, N), by expert chosen[i] of a packed matrix of (experts * N, K).
//
// x: (count / repeats, K); each of its rows is used for `repeats` rows of the result, one after another.
// Returns 0, or -1 for an expert that does not exist.
extern "C" int64_t foredraft_grouped_product(const Matrix* stack, int64_t num_experts, const void* x, int64_t repeats,
                                             const int64_t* chosen, int64_t count, void* out, int threads) {
  static thread_local Groups groups;
  if (!groups.take(chosen, count, num_experts)) return -1;
  const int64_t outputs = stack->outputs / num_experts, bytes = value_bytes(*stack);
  const int64_t wide = stack->inputs * bytes, high = outputs * bytes;
  const int64_t num_groups = (int64_t)groups.experts.size();
  for (int64_t group = 0; group < num_groups; ++group) {
    const Matrix matrix = matrix_of(*stack, outputs, groups.experts[group]);
    if (group + 1 < num_groups) fetch_matrix(matrix_of(*stack, outputs, groups.experts[group + 1]));
    const int64_t *rows = groups.rows.data() + groups.firsts[group], size = groups.firsts[group + 1] - groups.firsts[group];
    const auto input = [&](int64_t i) { return (const char*)x + rows[i] / repeats * wide; };
    const auto output = [&](int64_t i) { return (char*)out + rows[i] * high; };
    if (size == 1) {
      foredraft_product(&matrix, input(0), 1, output(0), threads);
      continue;
    }
    groups.inputs.resize(size * wide), groups.outputs.resize(size * high);
    for (int64_t i = 0; i < size; ++i) memcpy(groups.inputs.data() + i * wide, input(i), wide);
    foredraft_product(&matrix, groups.inputs.data(), size, groups.outputs.data(), threads);
    for (int64_t i = 0; i < size; ++i) memcpy(output(i), groups.outputs.data() + i * high, high);
  }
  return 0;
}
