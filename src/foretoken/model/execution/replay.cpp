// A decoder layer as a list of steps, made one after another: inductor's kernels, products, and attention over a cache.

#include "replay.h"
#include "vectors.h"

#include <utility>

template <size_t... I>
static void call_kernel(void* kernel, const int64_t* values, std::index_sequence<I...>) {
  ((void (*)(decltype((void)I, int64_t())...))kernel)(values[I]...);
}

template <typename T>
static void widen(const T* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) write(to + i, read(from + i));
  if (i == count) return;
  T last[LANES] = {};
  float numbers[LANES];
  memcpy(last, from + i, (count - i) * sizeof(T));
  write(numbers, read(last));
  memcpy(to + i, numbers, (count - i) * sizeof(float));
}

template <typename T>
static void narrow(const float* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(to + i, from[i]);
}

void multiply(const int64_t* o, int threads) {
  const Matrix* matrix = (const Matrix*)o[0];
  const int64_t rows = o[2], inputs = rows * matrix->inputs, outputs = rows * matrix->outputs;
  float *x = (float*)o[5], *out = (float*)o[6];
  switch (o[4]) {
    case BFLOAT16:
      widen((const Bfloat16*)o[1], x, inputs);
      foretoken_product(matrix, x, rows, out, threads);
      return narrow(out, (Bfloat16*)o[3], outputs);
    case FLOAT16:
      widen((const Float16*)o[1], x, inputs);
      foretoken_product(matrix, x, rows, out, threads);
      return narrow(out, (Float16*)o[3], outputs);
    default:
      foretoken_product(matrix, (const void*)o[1], rows, (void*)o[3], threads);
  }
}

static void copy_states(const Rows* rows, const char* from, int64_t node_stride, int64_t head_stride, char* to,
                        int64_t to_row, int64_t to_head, int64_t heads, int64_t size, int64_t item) {
  for (int64_t node = 0; node < rows->nodes; ++node)
    for (int64_t head = 0; head < heads; ++head)
      memcpy(to + (rows->rows[node] * to_row + head * to_head + rows->columns[node] * size) * item,
             from + (node * node_stride + head * head_stride) * item, size * item);
}

// Operands: query, key, value, out, strides of nodes and heads of key and value, heads of keys, sizes of a key and of a
// value, bytes of a number.
static void attend(const Rows* rows, const int64_t* o, char* const* pointers, int threads) {
  char *keys = pointers[KEYS], *values = pointers[VALUES];
  copy_states(rows, (const char*)o[1], o[4], o[5], keys, rows->key_row, rows->key_head, o[8], o[9], o[11]);
  copy_states(rows, (const char*)o[2], o[6], o[7], values, rows->value_row, rows->value_head, o[8], o[10], o[11]);
  for (int64_t index = 0; index < rows->num_groups; ++index) {
    const Group& group = rows->groups[index];
    const int64_t width = group.call->heads * group.call->group * group.call->value_size;
    foretoken_attention(group.call, (const char*)o[0] + group.first_node * group.call->query_node * o[11],
                        keys + group.first_row * rows->key_row * o[11],
                        values + group.first_row * rows->value_row * o[11], group.mask,
                        (char*)o[3] + group.first_node * width * o[11], (float*)pointers[SCRATCH], threads);
  }
}

static void replay(const Part& part, int threads) {
  for (int64_t index = 0; index < part.num_steps; ++index) {
    const Step& step = part.steps[index];
    int64_t operands[MOST_OPERANDS];
    for (int64_t i = 0; i < MOST_OPERANDS; ++i) {
      const Operand& operand = step.operands[i];
      operands[i] = operand.base < 0 ? operand.offset : (int64_t)(part.pointers[operand.base] + operand.offset);
    }
    switch (step.kind) {
      case KERNEL: call_kernel(step.kernel, operands, std::make_index_sequence<MOST_OPERANDS>()); break;
      case PRODUCT: multiply(operands, threads); break;
      case ATTENTION: attend(part.rows, operands, part.pointers, threads); break;
    }
  }
}

extern "C" void foretoken_replay(const Part* parts, int64_t num_parts, int threads) {
  for (int64_t index = 0; index < num_parts; ++index) replay(parts[index], threads);
}
