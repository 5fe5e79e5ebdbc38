// A small Llama from tokens to logits in one call, and chains of its likeliest tokens: of a model of a few layers and a
// hundred numbers per state, all else takes several times as long as the arithmetic. See decoder.py.
//
// States are kept in the dtype of the model and rounded where its own code rounds them; sums are in float32.

#include "calls.h"
#include "softmax.h"

#include <math.h>
#include <vector>

extern "C" int64_t foretoken_attention_scratch(const Attention* call, int threads);

namespace {

struct DecoderLayer {
  const float *input_norm, *post_norm;  // (size,)
  const Matrix *heads_in, *heads_out, *gate_up, *down;
};

struct Decoder {
  int64_t kind;  // of states
  int64_t layers, size, heads, kv_heads, head_dim, inner, tokens;
  const void* table;            // (tokens, size), of embeddings
  const float *cosines, *sines;  // (positions, head_dim / 2)
  const DecoderLayer* of_layers;
  const float* norm;  // (size,)
  const Matrix* output;
  float eps, scale;
};

struct Fed {  // nodes of rows, row after row
  int64_t nodes, rows;
  const int64_t *tokens, *positions, *columns, *prefix;  // of every node; prefix: columns before this one are seen
  const int64_t* above;                                  // (nodes, most_above): further columns that are seen, then -1
  int64_t most_above;
  const int64_t *counts, *firsts, *view;  // of every row: nodes, the first, columns up to the last
  void *const *keys, *const *values;      // of every layer: of the first row
  int64_t row, head;                      // strides of both, in numbers
};

struct Drafts {
  const int64_t* depths;  // of every row: tokens at most
  int64_t most;           // of depths
  int64_t columns;        // of logits that count
  const int64_t* names;   // the tokens that columns stand for; null for their own numbers
  int64_t* tokens;        // (rows, most), -1 behind the last
};

// Weights from which on threads share a product: less than that takes no longer than calling them together.
enum { SHARED_WEIGHTS = 1 << 19 };

template <typename T>
struct Work {
  std::vector<T> x, normed, heads, seen, mixed, both, gated, logits, mask;
  std::vector<float> wide, sums, scratch;
};

template <typename T>
void product(const Matrix* matrix, const T* x, int64_t rows, T* out, Work<T>& work, int threads) {
  if (matrix->inputs * matrix->outputs < SHARED_WEIGHTS) threads = 1;
  if (matrix->kind == PAIRS || sizeof(T) == sizeof(float)) return foretoken_product(matrix, x, rows, out, threads);
  const int64_t inputs = rows * matrix->inputs, outputs = rows * matrix->outputs;
  work.wide.resize(inputs), work.sums.resize(outputs);
  for (int64_t i = 0; i < inputs; ++i) work.wide[i] = value_of(x[i]);
  foretoken_product(matrix, work.wide.data(), rows, work.sums.data(), threads);
  for (int64_t i = 0; i < outputs; ++i) store(out + i, work.sums[i]);
}

// Root mean square norm of rows (n, size).
template <typename T>
void norm(const T* x, int64_t n, const float* weight, int64_t size, float eps, T* out) {
  for (int64_t row = 0; row < n; ++row, x += size, out += size) {
    Vector squares = zero();
    for (int64_t i = 0; i < size; i += LANES) squares = add_product(read(x + i), read(x + i), squares);
    float parts[LANES], sum = 0;
    write(parts, squares);
    for (int lane = 0; lane < LANES; ++lane) sum += parts[lane];
    const float scale = 1.0f / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; ++i) store(out + i, weight[i] * rounded<T>(value_of(x[i]) * scale));
  }
}

template <typename T>
void add(T* x, const T* other, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(x + i, value_of(x[i]) + value_of(other[i]));
}

// Of (gate, up) side by side: silu(gate) * up.
template <typename T>
void gate(const T* both, int64_t size, T* out) {
  for (int64_t at = 0; at < size; at += LANES) {
    const Vector x = read(both + at), above = larger(x, zero()), size_of = larger(x, zero() - x);
    const Vector share = exponential(x - above) / (all(1.0f) + exponential(zero() - size_of));
    float values[LANES];
    write(values, x * share);
    for (int i = 0; i < LANES; ++i) store(out + at + i, rounded<T>(values[i]) * value_of(both[size + at + i]));
  }
}

// Turn the halves of heads (heads, head_dim) against one another.
template <typename T>
void rotate(T* x, int64_t heads, int64_t head_dim, const float* cosines, const float* sines) {
  const int64_t half = head_dim / 2;
  for (int64_t head = 0; head < heads; ++head, x += head_dim)
    for (int64_t i = 0; i < half; ++i) {
      const float first = value_of(x[i]), second = value_of(x[half + i]);
      store(x + i, rounded<T>(first * cosines[i]) + rounded<T>(-second * sines[i]));
      store(x + half + i, rounded<T>(second * cosines[i]) + rounded<T>(first * sines[i]));
    }
}

// Which columns of its row every node sees, (rows, most, longest), 0 for those; nothing where all see all.
template <typename T>
const T* mask_of(const Fed& fed, int64_t most, int64_t longest, Work<T>& work) {
  bool sees_all = most == 1;
  for (int64_t row = 0; row < fed.rows; ++row)
    sees_all = sees_all && (!fed.counts[row] || fed.prefix[fed.firsts[row]] == fed.view[row]);
  if (sees_all) return nullptr;
  T hidden, shown;
  store(&hidden, -__builtin_inff()), store(&shown, 0.0f);
  work.mask.assign(fed.rows * most * longest, hidden);
  for (int64_t row = 0; row < fed.rows; ++row)
    for (int64_t i = 0; i < fed.counts[row]; ++i) {
      const int64_t node = fed.firsts[row] + i;
      T* of_node = work.mask.data() + (row * most + i) * longest;
      for (int64_t column = 0; column < fed.prefix[node]; ++column) of_node[column] = shown;
      for (int64_t j = 0; j < fed.most_above && fed.above[node * fed.most_above + j] >= 0; ++j)
        of_node[fed.above[node * fed.most_above + j]] = shown;
    }
  return work.mask.data();
}

// The states (nodes, size) after all layers, in work.x.
template <typename T>
void run(const Decoder& decoder, const Fed& fed, Work<T>& work, int threads) {
  const int64_t n = fed.nodes, size = decoder.size, dim = decoder.head_dim, half = dim / 2;
  const int64_t width = decoder.heads * dim, kv = decoder.kv_heads * dim, all_heads = width + 2 * kv;
  int64_t longest = 0, most = 0, seen = 0;
  for (int64_t row = 0; row < fed.rows; ++row) {
    longest = longest > fed.view[row] ? longest : fed.view[row];
    most = most > fed.counts[row] ? most : fed.counts[row];
    seen += fed.view[row];
  }
  const T* mask = mask_of(fed, most, longest, work);
  const int helpers = seen * kv < SHARED_WEIGHTS ? 1 : threads;
  const Attention call = {fed.rows, decoder.kv_heads, decoder.heads / decoder.kv_heads, dim, dim, decoder.kind,
                          all_heads, dim, fed.row, fed.head, fed.row, fed.head, most * longest, longest,
                          fed.counts, fed.firsts, fed.view, decoder.scale};
  work.scratch.resize(foretoken_attention_scratch(&call, helpers) + 16);
  float* scratch = (float*)(((uintptr_t)work.scratch.data() + 63) / 64 * 64);
  work.x.resize(n * size), work.normed.resize(n * size), work.heads.resize(n * all_heads), work.seen.resize(n * width);
  work.mixed.resize(n * size), work.both.resize(2 * n * decoder.inner), work.gated.resize(n * decoder.inner);
  for (int64_t node = 0; node < n; ++node)
    memcpy(work.x.data() + node * size, (const T*)decoder.table + fed.tokens[node] * size, size * sizeof(T));
  for (int64_t index = 0; index < decoder.layers; ++index) {
    const DecoderLayer& layer = decoder.of_layers[index];
    T *keys = (T*)fed.keys[index], *values = (T*)fed.values[index];
    norm(work.x.data(), n, layer.input_norm, size, decoder.eps, work.normed.data());
    product(layer.heads_in, work.normed.data(), n, work.heads.data(), work, threads);
    for (int64_t node = 0, row = 0; node < n; ++node) {
      while (row + 1 < fed.rows && node >= fed.firsts[row + 1]) ++row;
      T* states = work.heads.data() + node * all_heads;
      const int64_t turn = fed.positions[node] * half;
      rotate(states, decoder.heads + decoder.kv_heads, dim, decoder.cosines + turn, decoder.sines + turn);
      for (int64_t i = 0; i < decoder.kv_heads; ++i) {
        const int64_t place = row * fed.row + i * fed.head + fed.columns[node] * dim;
        memcpy(keys + place, states + width + i * dim, dim * sizeof(T));
        memcpy(values + place, states + width + kv + i * dim, dim * sizeof(T));
      }
    }
    foretoken_attention(&call, work.heads.data(), keys, values, mask, work.seen.data(), scratch, helpers);
    product(layer.heads_out, work.seen.data(), n, work.mixed.data(), work, threads);
    add(work.x.data(), work.mixed.data(), n * size);
    norm(work.x.data(), n, layer.post_norm, size, decoder.eps, work.normed.data());
    product(layer.gate_up, work.normed.data(), n, work.both.data(), work, threads);
    for (int64_t node = 0; node < n; ++node)
      gate(work.both.data() + 2 * node * decoder.inner, decoder.inner, work.gated.data() + node * decoder.inner);
    product(layer.down, work.gated.data(), n, work.mixed.data(), work, threads);
    add(work.x.data(), work.mixed.data(), n * size);
  }
}

// Logits (count, V) after some nodes.
template <typename T>
void logits_of(const Decoder& decoder, const int64_t* kept, int64_t count, T* logits, Work<T>& work, int threads) {
  const int64_t size = decoder.size;
  for (int64_t i = 0; i < count; ++i)
    norm(work.x.data() + kept[i] * size, 1, decoder.norm, size, decoder.eps, work.normed.data() + i * size);
  product(decoder.output, work.normed.data(), count, logits, work, threads);
}

// The first of the largest; -1 where one is not a number, or the largest is infinite.
template <typename T>
int64_t argmax(const T* row, int64_t count) {
  const float infinity = __builtin_inff();
  float most = -infinity, test = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = value_of(row[i]);
    most = value > most ? value : most;
    test += value != value;
  }
  if (test != 0 || most == infinity || most == -infinity) return -1;
  int64_t place = 0;
  while (value_of(row[place]) != most) ++place;
  return place;
}

template <typename T>
int64_t grow(const Decoder& decoder, const Fed& first, const Drafts& drafts, Work<T>& work, int threads) {
  const int64_t rows = first.rows, vocab = decoder.output->outputs;
  std::vector<int64_t> ends(rows), positions(rows), active, kept, counts(rows), firsts(rows), view(rows), tokens,
      places, columns, prefix;
  for (int64_t i = 0; i < rows * drafts.most; ++i) drafts.tokens[i] = -1;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t last = first.firsts[row] + first.counts[row] - 1;
    ends[row] = first.view[row], positions[row] = first.positions[last] + 1;
    if (drafts.depths[row] > 0) active.push_back(row), kept.push_back(last);
  }
  run(decoder, first, work, threads);
  int64_t level = 0;
  for (; !active.empty(); ++level) {
    work.logits.resize(active.size() * vocab);
    logits_of(decoder, kept.data(), (int64_t)active.size(), work.logits.data(), work, threads);
    std::vector<int64_t> found, growing;
    for (size_t i = 0; i < active.size(); ++i) {
      const int64_t row = active[i], place = argmax(work.logits.data() + i * vocab, drafts.columns);
      if (place < 0) continue;
      const int64_t token = drafts.names ? drafts.names[place] : place;
      drafts.tokens[row * drafts.most + level] = token;
      if (level + 1 < drafts.depths[row]) growing.push_back(row), found.push_back(least(token, decoder.tokens - 1));
    }
    active = growing;
    if (active.empty()) return level + 1;
    tokens.clear(), places.clear(), columns.clear(), prefix.clear(), kept.clear();
    for (int64_t row = 0, i = 0; row < rows; ++row) {
      const bool grows = i < (int64_t)active.size() && active[i] == row;
      counts[row] = grows, firsts[row] = i, view[row] = ends[row];
      if (!grows) continue;
      kept.push_back(i);
      tokens.push_back(found[i++]), places.push_back(positions[row]++), columns.push_back(ends[row]);
      prefix.push_back(++ends[row]), view[row] = ends[row];
    }
    const Fed next = {(int64_t)active.size(), rows, tokens.data(), places.data(), columns.data(), prefix.data(), nullptr,
                      0, counts.data(), firsts.data(), view.data(), first.keys, first.values, first.row, first.head};
    run(decoder, next, work, threads);
  }
  return level;
}

template <typename T>
Work<T>& own_work() {
  static thread_local Work<T> work;
  return work;
}

}  // namespace

// Runs nodes and writes their keys and values; logits (count, V) after those that are kept.
extern "C" int64_t foretoken_decoder_logits(const Decoder* decoder, const Fed* fed, const int64_t* kept, int64_t count,
                                            void* logits, int threads) {
  const auto feed = [&](auto& work, auto* out) {
    run(*decoder, *fed, work, threads);
    if (count) logits_of(*decoder, kept, count, out, work, threads);
  };
  switch (decoder->kind) {
    case FLOAT32: feed(own_work<float>(), (float*)logits); break;
    case BFLOAT16: feed(own_work<Bfloat16>(), (Bfloat16*)logits); break;
    case FLOAT16: feed(own_work<Float16>(), (Float16*)logits);
  }
  return count;
}

// Runs nodes, and behind the last of every row its likeliest tokens, one after another. Returns: how many runs that took.
extern "C" int64_t foretoken_decoder_chains(const Decoder* decoder, const Fed* fed, const Drafts* drafts, int threads) {
  switch (decoder->kind) {
    case FLOAT32: return grow(*decoder, *fed, *drafts, own_work<float>(), threads);
    case BFLOAT16: return grow(*decoder, *fed, *drafts, own_work<Bfloat16>(), threads);
    default: return grow(*decoder, *fed, *drafts, own_work<Float16>(), threads);
  }
}
