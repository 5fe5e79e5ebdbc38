// The best tokens of rows of scores: the largest, the k largest, and the largest with keyed noise. Each function reads
// a row once and returns the same as the numpy functions in choice.py and noise.py. Threads share the rows.

#include "abi.h"
#include "threads.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

enum { BLOCK = 128 };  // scores that are examined together

// Floats of either width as integers in the same order. -0 and 0 are equal.

struct Half {
  typedef int16_t Key;
  static inline Key key(Key bits) { return (Key)((bits ^ ((bits >> 15) & 0x7fff)) + (bits == (Key)0x8000)); }
  static inline Key magnitude(Key bits) { return bits & 0x7fff; }
};

struct Single {
  typedef int32_t Key;
  static inline Key key(Key bits) {
    return (bits ^ ((bits >> 31) & 0x7fffffff)) + (bits == std::numeric_limits<Key>::min());
  }
  static inline Key magnitude(Key bits) { return bits & 0x7fffffff; }
};

static inline int32_t infinity_of(int64_t kind) { return kind == FLOAT32 ? 0x7f800000 : kind == BFLOAT16 ? 0x7f80 : 0x7c00; }

template <typename F>
static inline typename F::Key largest_key(const typename F::Key* bits, int64_t count) {
  typename F::Key most = std::numeric_limits<typename F::Key>::min();
  for (int64_t i = 0; i < count; ++i) most = std::max(most, F::key(bits[i]));
  return most;
}

template <typename F>
static int64_t argmax(const typename F::Key* bits, int64_t count, int32_t infinity) {
  typedef typename F::Key Key;
  Key most = std::numeric_limits<Key>::min(), magnitude = 0;
  int64_t block = 0;
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t size = std::min<int64_t>(BLOCK, count - start);
    Key peak = std::numeric_limits<Key>::min(), large = 0;
    for (int64_t i = 0; i < size; ++i) {
      peak = std::max(peak, F::key(bits[start + i]));
      large = std::max(large, F::magnitude(bits[start + i]));
    }
    magnitude = std::max(magnitude, large);
    if (peak > most) {
      most = peak;
      block = start;
    }
  }
  if (magnitude > infinity || most >= infinity || most <= F::key((Key)(infinity | std::numeric_limits<Key>::min()))) return -1;
  int64_t i = block;
  while (F::key(bits[i]) != most) ++i;
  return i;
}

template <typename F>
static void best(const typename F::Key* bits, int64_t count, int64_t k, int64_t* out) {
  typedef typename F::Key Key;
  Key keys[64];
  int64_t found = 0;
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t size = std::min<int64_t>(BLOCK, count - start);
    if (found == k && largest_key<F>(bits + start, size) <= keys[k - 1]) continue;
    for (int64_t i = 0; i < size; ++i) {
      const Key key = F::key(bits[start + i]);
      if (found == k && key <= keys[k - 1]) continue;
      int64_t place = found < k ? found++ : k - 1;
      for (; place > 0 && keys[place - 1] < key; --place) {
        keys[place] = keys[place - 1];
        out[place] = out[place - 1];
      }
      keys[place] = key;
      out[place] = start + i;
    }
  }
}

// ---- noise, as in noise.py ------------------------------------------------------------------------------------------

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u, FIRST = 0xBF58476D1CE4E5B9u, SECOND = 0x94D049BB133111EBu;

static inline uint64_t mixed(uint64_t state) {  // all but the last step of the hash
  state = (state ^ (state >> 30)) * FIRST;
  return (state ^ (state >> 27)) * SECOND;
}

static inline double gumbel(uint64_t key, int64_t token) {
  uint64_t state = mixed(key + (uint64_t)(token + 1) * GOLDEN);
  state = (state ^ (state >> 31)) >> 11;
  return -std::log(-std::log((double)std::max<uint64_t>(state, 1) * 0x1p-53));
}

// See `least_bits` in noise.py.
static inline uint64_t least_bits(double least) {
  const double rest = least > -4.0 ? -std::expm1(-std::exp(-least)) * (1.0 + 1e-6) : 1.0;
  const int64_t bits = (int64_t)std::floor((1.0 - rest) * 0x1p31) - 1;
  return bits <= 0 ? 0 : (uint64_t)bits << 33;
}

template <typename T>
static void widen(const T* values, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = value_of(values[i]);
}

static void widen(const void* values, int64_t kind, int64_t count, float* out) {
  switch (kind) {
    case FLOAT32: memcpy(out, values, count * sizeof *out); break;
    case BFLOAT16: widen((const Bfloat16*)values, count, out); break;
    case FLOAT16: widen((const Float16*)values, count, out); break;
  }
}

// The k best scores with noise, best first; of equal ones, the first column first.
struct Winners {
  int64_t k, *columns;
  double* values;
  int64_t found = 0;

  double last() const { return found < k ? -std::numeric_limits<double>::infinity() : values[k - 1]; }

  void offer(int64_t column, double value) {
    int64_t place = found;
    while (place > 0 && (value > values[place - 1] || (value == values[place - 1] && column < columns[place - 1]))) --place;
    if (place == k) return;
    found = std::min(found + 1, k);
    for (int64_t i = found - 1; i > place; --i) columns[i] = columns[i - 1], values[i] = values[i - 1];
    columns[place] = column, values[place] = value;
  }
};

// The row (count,) contains scores divided by the temperature, and `peaks` the largest of every block. Few tokens have
// enough noise to overtake the best so far. The hash alone shows which, and only their noise is computed.
static void gumbel_best(const float* row, const float* peaks, int64_t count, uint64_t key, const int64_t* names,
                        Winners& winners) {
  const int64_t num_blocks = (count + BLOCK - 1) / BLOCK;
  static thread_local std::vector<int64_t> order;  // blocks, those with the largest scores first
  order.resize(num_blocks);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + std::min(winners.k, num_blocks), order.end(),
                    [&](int64_t a, int64_t b) { return peaks[a] > peaks[b]; });
  const auto name = [&](int64_t column) { return names ? names[column] : column; };
  const auto offer = [&](int64_t column) {
    winners.offer(column, (double)row[column] + gumbel(key, name(column)));
  };
  int64_t first = order[0] * BLOCK;
  while (row[first] != peaks[order[0]]) ++first;
  offer(first);
  uint8_t may_win[BLOCK];
  for (const int64_t block : order) {
    if (peaks[block] == -std::numeric_limits<float>::infinity()) continue;
    const double least = winners.last() - (double)peaks[block];
    if (!(least < 37.0)) continue;  // no noise is that large
    const int64_t start = block * BLOCK, size = std::min<int64_t>(BLOCK, count - start);
    const uint64_t bound = least_bits(least);
    uint64_t any = 0;
    for (int64_t i = 0; i < size; ++i) {
      const uint64_t passes = mixed(key + (uint64_t)(name(start + i) + 1) * GOLDEN) >= bound;
      may_win[i] = (uint8_t)passes;
      any |= passes;
    }
    if (!any) continue;
    for (int64_t i = 0; i < size; ++i)
      if (may_win[i] && start + i != first && row[start + i] != -std::numeric_limits<float>::infinity()) offer(start + i);
  }
}

// ---- functions for Python -------------------------------------------------------------------------------------------

static thread_local std::vector<float> room;  // a row divided by the temperature, and the largest of every block

static inline const char* row_of(const void* values, int64_t kind, int64_t stride, int64_t row) {
  return (const char*)values + row * stride * (kind == FLOAT32 ? 4 : 2);
}

extern "C" {

// Index of the largest score of a row; rows are `stride` numbers apart. Returns -1 for a row with NaN or infinity, and
// for one with only minus infinity.
int64_t foredraft_argmax_at(const void* values, int64_t kind, int64_t row, int64_t stride, int64_t count) {
  const void* from = row_of(values, kind, stride, row);
  return kind == FLOAT32 ? argmax<Single>((const int32_t*)from, count, infinity_of(kind))
                         : argmax<Half>((const int16_t*)from, count, infinity_of(kind));
}

void foredraft_argmax(const void* values, int64_t kind, int64_t rows, int64_t stride, int64_t count, int64_t* out,
                      int threads) {
  share_each(rows, threads,
             [&](int64_t row, int) { out[row] = foredraft_argmax_at(values, kind, row, stride, count); });
}

// The k <= 64 largest of some rows, best first and ties by index: (rows, k).
void foredraft_best(const void* values, int64_t kind, int64_t rows, int64_t stride, int64_t count,
                    const int64_t* numbers, int64_t k, int64_t* out, int threads) {
  share_each(rows, threads, [&](int64_t row, int) {
    const void* from = row_of(values, kind, stride, numbers[row]);
    int64_t* ids = out + row * k;
    kind == FLOAT32 ? best<Single>((const int32_t*)from, count, k, ids) : best<Half>((const int16_t*)from, count, k, ids);
  });
}

// The k largest sums of score / temperature + noise in a row, best first, with their columns. Missing results, and all
// results of bad rows, are -1 and minus infinity. `names` are the token ids of columns; null if columns are token ids.
void foredraft_gumbel_best_at(const void* values, int64_t kind, int64_t row, int64_t stride, int64_t count,
                              float temperature, uint64_t key, const int64_t* names, int64_t k, int64_t* columns,
                              double* sums) {
  const int64_t num_blocks = (count + BLOCK - 1) / BLOCK;
  room.resize(count + num_blocks);
  float *scores = room.data(), *peaks = scores + count;
  widen(row_of(values, kind, stride, row), kind, count, scores);
  if (temperature != 1.0f)
    for (int64_t i = 0; i < count; ++i) scores[i] /= temperature;
  std::fill(columns, columns + k, -1);
  std::fill(sums, sums + k, -std::numeric_limits<double>::infinity());
  float peak = -std::numeric_limits<float>::infinity();
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t start = block * BLOCK, size = std::min<int64_t>(BLOCK, count - start);
    int32_t most = std::numeric_limits<int32_t>::min(), large = 0;
    for (int64_t i = 0; i < size; ++i) {
      int32_t bits;
      memcpy(&bits, scores + start + i, 4);
      most = std::max(most, Single::key(bits));
      large = std::max(large, Single::magnitude(bits));
    }
    if (large > 0x7f800000 || most >= 0x7f800000) return;
    const int32_t bits = most ^ ((most >> 31) & 0x7fffffff);
    memcpy(peaks + block, &bits, 4);
    peak = std::max(peak, peaks[block]);
  }
  if (!(peak > -std::numeric_limits<float>::infinity())) return;
  Winners winners = {k, columns, sums};
  gumbel_best(scores, peaks, count, key, names, winners);
}

void foredraft_gumbel_best(const void* values, int64_t kind, int64_t rows, int64_t stride, int64_t count,
                           float temperature, const uint64_t* keys, const int64_t* names, int64_t k, int64_t* columns,
                           double* sums, int threads) {
  share_each(rows, threads, [&](int64_t row, int) {
    foredraft_gumbel_best_at(values, kind, row, stride, count, temperature, keys[row], names, k, columns + row * k,
                             sums + row * k);
  });
}
}
