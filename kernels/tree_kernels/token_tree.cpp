// Token-info sampling of trees, on a CPU.
//
// A node's token only changes the logits of the hot tokens. The other logits are read once per
// request, for all its nodes, and the hot ones once per node.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "floats.h"
#include "vectors.h"

constexpr int kChunk = 64;  // logits that are compared together
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kNegligible = -87.0f;  // of which and below the exponential counts as 0

// The k largest values so far, largest first, ties by lowest id; and the sum of all exponentials so
// far.
struct Seen {
  std::vector<float> values;
  std::vector<int32_t> ids;
  int64_t k, found = 0;
  float most = kNothing;
  float mass = 0;  // sum of e^(value - most)

  explicit Seen(int64_t count) : values(count), ids(count), k(count) {}

  void put(float value, int32_t id) {
    const auto before = [&](int64_t at) {
      return value > values[at] || (value == values[at] && id < ids[at]);
    };
    if (found == k && !before(k - 1)) return;
    int64_t place = found < k ? found++ : k - 1;
    for (; place > 0 && before(place - 1); --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = id;
  }

  // Add a chunk of values, padded with -infinity; `id_of(i)` is the token of value i.
  template <typename Id>
  void look(const float* chunk, Id id_of) {
    Vector highest_of = load(chunk);
    for (int start = kWidth; start < kChunk; start += kWidth) {
      const Vector values = load(chunk + start);
      highest_of = values > highest_of ? values : highest_of;
    }
    float lanes[kWidth];
    store(lanes, highest_of);
    const float highest = *std::max_element(lanes, lanes + kWidth);
    if (highest == kNothing) return;
    if (highest > most) {
      mass *= std::exp(most - highest);
      most = highest;
    }
    Vector sums{};
    for (int start = 0; start < kChunk; start += kWidth) {
      const Vector below = load(chunk + start) - most;
      sums += below > kNegligible ? exponential(below) : Vector{};  // NaN counts as nothing
    }
    store(lanes, sums);
    for (const float sum : lanes) mass += sum;
    // A later value may have a lower id than an equal one, so only smaller values are skipped.
    if (found == k && highest < values[k - 1]) return;
    for (int i = 0; i < kChunk; ++i)
      if (chunk[i] > kNothing && (found < k || chunk[i] >= values[k - 1])) put(chunk[i], id_of(i));
  }
};

// The token info; see `token_info_top`.
template <typename T>
struct Info {
  const T* table;
  int64_t hot;
  const int32_t* row_of;
  const int32_t* hot_tokens;
};

// The k most likely tokens after each of `count` nodes of a level, and their log-probabilities. What is
// not found is left as it is.
template <typename L, typename T>
static void children_of(const L* logits, int64_t vocab, const Info<T>& info, const int32_t* nodes,
                        int64_t count, int64_t k, int32_t* best, float* log_probs) {
  float chunk[kChunk];
  Seen cold(k);
  for (int64_t start = 0; start < vocab; start += kChunk) {
    const int64_t size = std::min<int64_t>(kChunk, vocab - start);
    std::fill(chunk + size, chunk + kChunk, kNothing);
    for (int64_t i = 0; i < size; ++i)
      chunk[i] = info.row_of[start + i] < 0 ? widen(logits[start + i]) : kNothing;
    cold.look(chunk, [&](int i) { return static_cast<int32_t>(start + i); });
  }
  std::vector<float> own(info.hot);
  for (int64_t i = 0; i < info.hot; ++i) own[i] = widen(logits[info.hot_tokens[i]]);
  for (int64_t node = 0; node < count; ++node) {
    if (nodes[node] < 0) continue;
    const int32_t row = info.row_of[nodes[node]];
    const T* added = info.table + std::max<int64_t>(row, 0) * info.hot;
    Seen seen(k);
    for (int64_t start = 0; start < info.hot; start += kChunk) {
      const int64_t size = std::min<int64_t>(kChunk, info.hot - start);
      std::fill(chunk + size, chunk + kChunk, kNothing);
      for (int64_t i = 0; i < size; ++i)
        chunk[i] = own[start + i] + (row >= 0 ? widen(added[start + i]) : 0.0f);
      seen.look(chunk, [&](int i) { return info.hot_tokens[start + i]; });
    }
    const float most = std::max(seen.most, cold.most);
    const float mass =
        seen.mass * std::exp(seen.most - most) + cold.mass * std::exp(cold.most - most);
    const float total = most + std::log(mass);
    for (int64_t i = 0; i < cold.found; ++i) seen.put(cold.values[i], cold.ids[i]);
    for (int64_t i = 0; i < seen.found; ++i) {
      best[node * k + i] = seen.ids[i];
      log_probs[node * k + i] = seen.values[i] - total;
    }
  }
}

// The tree of one request, which has the root in its first column. `scores` are logarithms of joint
// probabilities until all levels are expanded.
template <typename L, typename T>
static void expand(const L* logits, int64_t length, int64_t vocab, int64_t steps,
                   const Info<T>& info, int64_t width, int64_t columns, int32_t* tokens,
                   int32_t* parents, float* scores) {
  std::fill(tokens + 1, tokens + columns, -1);
  std::fill(scores, scores + columns, kNothing);
  std::fill(parents, parents + columns, -1);
  scores[0] = 0.0f;
  std::vector<int32_t> nodes{tokens[0]};
  std::vector<int64_t> places{0}, order;  // columns of the nodes, and of their children
  int64_t first = 1;
  for (int64_t step = 0; step < std::min(length, steps); ++step) {
    const int64_t count = nodes.size(), end = first + count * width;
    children_of(logits + step * vocab, vocab, info, nodes.data(), count, width, tokens + first,
                scores + first);
    order.clear();
    for (int64_t column = first; column < end; ++column) {
      if (tokens[column] < 0) continue;
      const int64_t above = places[(column - first) / width];
      // Rounding must not score a child above its parent.
      scores[column] = scores[above] + std::min(scores[column], 0.0f);
      parents[column] = static_cast<int32_t>(above);
      if (scores[column] > kNothing) order.push_back(column);  // NaN cannot be sorted
    }
    // As in `best_nodes`, on a tie the earlier node is the better one.
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
    order.resize(std::min<int64_t>(order.size(), width));
    places = order;
    nodes.clear();
    for (const int64_t column : order) nodes.push_back(tokens[column]);
    first += (step == 0 ? 1 : width) * width;
  }
  for (int64_t column = 0; column < columns; ++column) scores[column] = std::exp(scores[column]);
}

template <typename L, typename T>
static void expand_all(const void* logits, const int64_t* steps, int64_t requests, int64_t length,
                       int64_t vocab, const Info<T>& info, int64_t width, int64_t columns,
                       int32_t* tokens, int32_t* parents, float* scores, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (requests > 1)
  for (int64_t request = 0; request < requests; ++request)
    expand(static_cast<const L*>(logits) + request * length * vocab, length, vocab, steps[request],
           info, width, columns, tokens + request * columns, parents + request * columns,
           scores + request * columns);
}

#define EXPORT(logits_name, L, table_name, T)                                                     \
  extern "C" void expand_##logits_name##_##table_name(                                            \
      const void* logits, const int64_t* steps, int64_t requests, int64_t length, int64_t vocab,  \
      const void* table, int64_t hot, const int32_t* row_of, const int32_t* hot_tokens,           \
      int64_t width, int64_t columns, int32_t* tokens, int32_t* parents, float* scores,           \
      int64_t threads) {                                                                          \
    const Info<T> info{static_cast<const T*>(table), hot, row_of, hot_tokens};                    \
    expand_all<L, T>(logits, steps, requests, length, vocab, info, width, columns, tokens,        \
                     parents, scores, threads);                                                   \
  }
EXPORT(float32, float, float32, float)
EXPORT(bfloat16, BFloat16, bfloat16, BFloat16)
EXPORT(float16, Float16, float16, Float16)
EXPORT(float32, float, float8, Float8)
EXPORT(bfloat16, BFloat16, float8, Float8)
EXPORT(float16, Float16, float8, Float8)
