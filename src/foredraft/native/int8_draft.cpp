// The draft of one row, grown level by level by an EAGLE head. One call does the work of drafters/parts/growth.py with
// reranking.

#include "abi.h"
#include "functions.h"
#include "threads.h"

#include <algorithm>
#include <functional>
#include <math.h>
#include <vector>

extern "C" void foredraft_head_level(const Head* head, const Level* level, int threads);
extern "C" void foredraft_head_logits(const Head* head, const float* outputs, int64_t n, float* logits, int threads);

struct Child {
  int64_t parent, token;
  double score;  // log-probability of the path
};

enum { CHUNK_OF_LOGITS = 64 };

// Sum of e^(distance to the peak * power) over a row.
static double mass_of(const float* row, int64_t count, float peak, float power) {
  Vector sum = zero();
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sum = sum + exponential((read(row + i) - all(peak)) * all(power));
  double rest = 0;
  for (; i < count; ++i) rest += expf((row[i] - peak) * power);
  return sum_of(sum) + rest;
}

static bool is_finite(const float* row, int64_t count) {
  Vector test = zero();
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) test = add_product(read(row + i), zero(), test);  // infinity becomes NaN
  if (differ(test, zero())) return false;
  for (; i < count; ++i)
    if (row[i] - row[i] != 0.0f) return false;
  return true;
}

static float peak_of(const float* row, int64_t count) {
  int64_t i = 0;
  Vector most = all(-__builtin_inff());
  for (; i + LANES <= count; i += LANES) most = larger(most, read(row + i));
  float peak = largest(most);
  for (; i < count; ++i) peak = std::max(peak, row[i]);
  return peak;
}

// Adds the k largest of (count,) as children, of equal ones the first. Their scores are the logarithms of the softmax
// raised to a power and normalised.
static void likeliest_of(float* row, const Growing& growing, int64_t count, const Child& above, int64_t parent,
                         std::vector<Child>& found) {
  static thread_local std::vector<float> peaks;
  const int64_t chunks = (count + CHUNK_OF_LOGITS - 1) / CHUNK_OF_LOGITS;
  peaks.resize(chunks);
  const auto refresh = [&](int64_t chunk) {
    const int64_t start = chunk * CHUNK_OF_LOGITS;
    peaks[chunk] = peak_of(row + start, least(count - start, CHUNK_OF_LOGITS));
  };
  for (int64_t chunk = 0; chunk < chunks; ++chunk) refresh(chunk);
  const float peak = *std::max_element(peaks.begin(), peaks.end());
  const double mass = log(mass_of(row, count, peak, growing.power));
  for (int64_t rank = 0; rank < least(growing.branches, count); ++rank) {
    const int64_t chunk = std::max_element(peaks.begin(), peaks.end()) - peaks.begin();
    int64_t place = chunk * CHUNK_OF_LOGITS;
    while (row[place] != peaks[chunk]) ++place;
    const double share = ((double)row[place] - peak) * growing.power - mass;
    found.push_back({parent, growing.names ? growing.names[place] : place, above.score + share});
    row[place] = -__builtin_inff();
    refresh(chunk);
  }
}

// Returns the smallest score in the smallest set of largest scores that has this share of the total mass. Reorders the
// scores and drops some. Scores below (1 - share) of the mean together have less than the remaining mass, so they are
// dropped at once. The rest is bisected by mass until one score is left.
static float least_of_nucleus(std::vector<float>& scores, float peak, double share) {
  double mass = mass_of(scores.data(), (int64_t)scores.size(), peak, 1.0f);
  const double enough = share * mass;
  for (size_t before = 0; before != scores.size() && mass > enough;) {
    const float bound = peak + (float)log((mass - enough) / scores.size());
    before = scores.size();
    size_t kept = 0;
    for (const float score : scores) scores[kept] = score, kept += score >= bound;
    scores.resize(kept);
    mass = mass_of(scores.data(), (int64_t)kept, peak, 1.0f);
    if (kept > before - before / 8) break;
  }
  auto first = scores.begin(), last = scores.end();
  for (double needed = enough; last - first > 1;) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, std::greater<float>());
    const double upper = mass_of(&*first, middle - first, peak, 1.0f);
    if (upper >= needed) last = middle;
    else needed -= upper, first = middle;
  }
  return *first;
}

// Returns the smallest score that top-k, top-p and min-p keep; equal scores are all kept.
static float least_left(const float* row, int64_t count, float peak, const Drawing& drawing) {
  static thread_local std::vector<float> left;
  left.assign(row, row + count);
  float found = -__builtin_inff();
  if (0 < drawing.top_k && drawing.top_k < count) {
    std::nth_element(left.begin(), left.begin() + drawing.top_k - 1, left.end(), std::greater<float>());
    found = left[drawing.top_k - 1];
    left.resize(drawing.top_k);
  }
  if (drawing.top_p < 1.0f) found = least_of_nucleus(left, peak, drawing.top_p);
  return drawing.min_p > 0.0f ? std::max(found, peak + logf(drawing.min_p)) : found;
}

// Adds the k best of (count,) under the target's own noise as children, with the logarithms of their shares. The best
// one is also the target's choice, if its distribution is close enough.
static void drawn_of(float* row, const Growing& growing, int64_t count, int64_t depth, const Child& above,
                     int64_t parent, std::vector<Child>& found) {
  const Drawing& drawing = *growing.drawing;
  for (int64_t i = 0; i < count; ++i) row[i] /= drawing.temperature;
  if ((0 < drawing.top_k && drawing.top_k < count) || drawing.top_p < 1.0f || drawing.min_p > 0.0f) {
    const float bound = least_left(row, count, peak_of(row, count), drawing);
    for (int64_t i = 0; i < count; ++i) row[i] = row[i] < bound ? -__builtin_inff() : row[i];
  }
  const int64_t k = growing.branches;
  std::vector<int64_t> columns(k);
  std::vector<double> sums(k);
  foredraft_gumbel_best_at(row, FLOAT32, 0, count, count, 1.0f, drawing.keys[depth], growing.names, k, columns.data(),
                           sums.data());
  double mass = 0;
  for (int64_t rank = 0; rank < k && columns[rank] >= 0; ++rank) mass += exp(sums[rank] - sums[0]);
  for (int64_t rank = 0; rank < k && columns[rank] >= 0; ++rank) {
    const int64_t token = growing.names ? growing.names[columns[rank]] : columns[rank];
    found.push_back({parent, token, above.score + sums[rank] - sums[0] - log(mass)});
  }
}

// Keeps the best nodes of the pool in order of their indices, and returns their number.
static int64_t keep_best(const std::vector<Child>& pool, const Growing& growing) {
  std::vector<int64_t> order(pool.size() - 1), new_index(pool.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = (int64_t)i + 1;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return pool[a].score > pool[b].score; });
  order.resize(std::min(order.size(), (size_t)growing.most - 1));
  std::sort(order.begin(), order.end());
  int64_t count = 0;
  growing.tokens[count] = pool[0].token, growing.parents[count] = -1, growing.scores[count++] = 0;
  for (const int64_t node : order) {
    new_index[node] = count;
    growing.tokens[count] = pool[node].token;
    growing.parents[count] = new_index[pool[node].parent];
    growing.scores[count++] = pool[node].score;
  }
  return count;
}

// Computes the missing entries of the committed tokens, as a chain.
static void take_in(const Head* head, const Growing& growing, int threads) {
  const int64_t n = growing.owed, start = growing.trunk - n;
  std::vector<int64_t> depths(n);
  std::vector<float> outputs(n * head->size);
  for (int64_t i = 0; i < n; ++i) depths[i] = i;
  const Nodes nodes = {1, n, n, 0, growing.tokens_of, depths.data(), &n, &start, nullptr, nullptr, 0};
  const Level level = {&nodes, growing.keys, growing.values, growing.row, growing.head, nullptr, growing.streams,
                       outputs.data()};
  foredraft_head_level(head, &level, threads);
  memcpy(growing.last, outputs.data() + (n - 1) * head->size, head->size * sizeof(float));
}

// Whether children of the frontier could be among the best nodes, and the frontier's total probability is large enough.
static bool can_gain(const std::vector<Child>& pool, const std::vector<int64_t>& frontier, const Growing& growing) {
  double mass = 0, best = -__builtin_inf();
  for (const int64_t node : frontier) mass += exp(pool[node].score), best = std::max(best, pool[node].score);
  if (mass < growing.least_mass) return false;
  const int64_t kept = growing.most - 1;
  if (kept < 1 || (int64_t)pool.size() - 1 < kept) return true;
  std::vector<double> scores;
  for (size_t node = 1; node < pool.size(); ++node) scores.push_back(pool[node].score);
  std::nth_element(scores.begin(), scores.begin() + kept - 1, scores.end(), std::greater<double>());
  return best > scores[kept - 1];
}

static int64_t grow(const Head* head, const Growing* growing, int threads) {
  const int64_t size = head->size, vocab = head->output.outputs, beam = growing->beam;
  std::vector<Child> pool = {{-1, growing->pending, 0.0}}, children;
  std::vector<int64_t> place_of = {0}, frontier = {0}, tokens, depths;  // place_of: node's column after the trunk
  std::vector<uint8_t> ancestors;
  if (growing->owed) take_in(head, *growing, threads);
  std::vector<float> outputs(growing->last, growing->last + size), features, logits;
  int64_t fed = 0;
  for (int64_t depth = 0; depth < growing->depth && !frontier.empty(); ++depth) {
    const int64_t n = (int64_t)frontier.size();
    if (depth && !can_gain(pool, frontier, *growing)) break;
    if (depth) {
      tokens.resize(n), depths.resize(fed + n, depth - 1), ancestors.assign(n * (fed + n), 0);
      for (int64_t i = 0; i < n; ++i) {
        tokens[i] = pool[frontier[i]].token, place_of[frontier[i]] = fed + i;
        for (int64_t node = frontier[i]; node > 0; node = pool[node].parent)
          ancestors[i * (fed + n) + place_of[node]] = 1;
      }
      const int64_t length = growing->trunk + fed;
      outputs.resize(n * size);
      const Nodes nodes = {1, n, n, fed, tokens.data(), depths.data(), &n, &length, nullptr, ancestors.data(), 0};
      const Level level = {&nodes, growing->keys, growing->values, growing->row, growing->head, features.data(), nullptr,
                           outputs.data()};
      foredraft_head_level(head, &level, threads);
      fed += n;
    }
    logits.resize(n * vocab);
    foredraft_head_logits(head, outputs.data(), n, logits.data(), threads);
    children.clear();
    std::vector<std::vector<Child>> of_node(n);
    share_each(n, threads, [&](int64_t i, int) {
      float* row = logits.data() + i * vocab;
      if (!is_finite(row, vocab)) return;
      if (growing->drawing) drawn_of(row, *growing, vocab, depth, pool[frontier[i]], frontier[i], of_node[i]);
      else likeliest_of(row, *growing, vocab, pool[frontier[i]], frontier[i], of_node[i]);
    });
    for (const std::vector<Child>& some : of_node) children.insert(children.end(), some.begin(), some.end());
    std::vector<int64_t> fed_as(pool.size(), 0);
    for (int64_t i = 0; i < n; ++i) fed_as[frontier[i]] = i;
    std::stable_sort(children.begin(), children.end(), [](const Child& a, const Child& b) { return a.score > b.score; });
    frontier.clear();
    features.clear();
    for (const Child& child : children) {
      if ((int64_t)frontier.size() < beam && child.score >= growing->least) {
        const float* of_parent = outputs.data() + fed_as[child.parent] * size;
        features.insert(features.end(), of_parent, of_parent + size);
        frontier.push_back((int64_t)pool.size());
      }
      pool.push_back(child);
      place_of.push_back(0);
    }
  }
  return keep_best(pool, *growing);
}

// Returns the number of nodes of the draft, the pending token included.
extern "C" int64_t foredraft_head_grow(const Head* head, const Growing* growing, int threads) {
  int64_t count = 0;
  with_crew(threads, [&] { count = grow(head, growing, threads); });
  return count;
}
