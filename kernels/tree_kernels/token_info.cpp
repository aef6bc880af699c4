// Token-info sampling of one level, on a CPU.
//
// A node's token only changes the logits of the hot tokens. The other logits are read once per
// request, for all its nodes, and the hot ones once per node.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "floats.h"

constexpr int kChunk = 64;  // logits that are compared together
constexpr int kLanes = 16;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// e^x for x <= 0, flushed to 0 below -87; relative error 4e-7. 2^f over [0, 1) is its Taylor series about
// 1/2.
static inline float exp_of(float x) {
  const float y = (x > -87.0f ? x : -87.0f) * 1.44269504f;
  const float whole = std::floor(y);
  const float f = (y - whole - 0.5f) * 0.69314718f;
  const float power =
      1.41421356f *
      (1.0f +
       f * (1.0f +
            f * (0.5f +
                 f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f * (1.0f / 720)))))));
  const float scale = of_bits((static_cast<int32_t>(whole) + 127) << 23);
  return x > -87.0f ? power * scale : 0.0f;
}

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
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = chunk[i];
    for (int start = kLanes; start < kChunk; start += kLanes)
      for (int i = 0; i < kLanes; ++i)
        lanes[i] = chunk[start + i] > lanes[i] ? chunk[start + i] : lanes[i];
    const float highest = *std::max_element(lanes, lanes + kLanes);
    if (highest == kNothing) return;
    if (highest > most) {
      mass *= exp_of(most - highest);
      most = highest;
    }
    float sums[kLanes] = {};
    for (int start = 0; start < kChunk; start += kLanes)
      for (int i = 0; i < kLanes; ++i) sums[i] += exp_of(chunk[start + i] - most);
    for (int i = 0; i < kLanes; ++i) mass += sums[i];
    // A later value may have a lower id than an equal one, so only smaller values are skipped.
    if (found == k && highest < values[k - 1]) return;
    for (int i = 0; i < kChunk; ++i)
      if (chunk[i] > kNothing && (found < k || chunk[i] >= values[k - 1])) put(chunk[i], id_of(i));
  }
};

template <typename L, typename T>
static void of_request(const L* logits, const int32_t* tokens, int64_t width, int64_t vocab,
                       const T* table, int64_t hot, const int32_t* row_of,
                       const int32_t* hot_tokens, int64_t k, int32_t* best, float* log_probs) {
  float chunk[kChunk];
  Seen cold(k);
  for (int64_t start = 0; start < vocab; start += kChunk) {
    const int64_t count = std::min<int64_t>(kChunk, vocab - start);
    std::fill(chunk + count, chunk + kChunk, kNothing);
    for (int64_t i = 0; i < count; ++i)
      chunk[i] = row_of[start + i] < 0 ? widen(logits[start + i]) : kNothing;
    cold.look(chunk, [&](int i) { return static_cast<int32_t>(start + i); });
  }
  std::vector<float> own(hot);
  for (int64_t i = 0; i < hot; ++i) own[i] = widen(logits[hot_tokens[i]]);
  for (int64_t node = 0; node < width; ++node) {
    if (tokens[node] < 0) continue;
    const int32_t row = row_of[tokens[node]];
    const T* added = table + std::max<int64_t>(row, 0) * hot;
    Seen seen(k);
    for (int64_t start = 0; start < hot; start += kChunk) {
      const int64_t count = std::min<int64_t>(kChunk, hot - start);
      std::fill(chunk + count, chunk + kChunk, kNothing);
      for (int64_t i = 0; i < count; ++i)
        chunk[i] = own[start + i] + (row >= 0 ? widen(added[start + i]) : 0.0f);
      seen.look(chunk, [&](int i) { return hot_tokens[start + i]; });
    }
    const float most = std::max(seen.most, cold.most);
    const float mass = seen.mass * exp_of(seen.most - most) + cold.mass * exp_of(cold.most - most);
    const float total = most + std::log(mass);
    for (int64_t i = 0; i < cold.found; ++i) seen.put(cold.values[i], cold.ids[i]);
    for (int64_t i = 0; i < seen.found; ++i) {
      best[node * k + i] = seen.ids[i];
      log_probs[node * k + i] = seen.values[i] - total;
    }
  }
}

template <typename L, typename T>
static void of_all(const void* logits, const int32_t* tokens, int64_t requests, int64_t width,
                   int64_t vocab, const void* table, int64_t hot, const int32_t* row_of,
                   const int32_t* hot_tokens, int64_t k, int32_t* best, float* log_probs,
                   int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (requests > 1)
  for (int64_t request = 0; request < requests; ++request)
    of_request(static_cast<const L*>(logits) + request * vocab, tokens + request * width, width,
               vocab, static_cast<const T*>(table), hot, row_of, hot_tokens, k,
               best + request * width * k, log_probs + request * width * k);
}

#define TOKEN_INFO(logits_name, L, table_name, T)                                               \
  extern "C" void token_info_##logits_name##_##table_name(                                      \
      const void* logits, const int32_t* tokens, int64_t requests, int64_t width,               \
      int64_t vocab, const void* table, int64_t hot, const int32_t* row_of,                     \
      const int32_t* hot_tokens, int64_t k, int32_t* best, float* log_probs, int64_t threads) { \
    of_all<L, T>(logits, tokens, requests, width, vocab, table, hot, row_of, hot_tokens, k,     \
                 best, log_probs, threads);                                                     \
  }

TOKEN_INFO(float32, float, float32, float)
TOKEN_INFO(bfloat16, BFloat16, bfloat16, BFloat16)
TOKEN_INFO(float16, Float16, float16, Float16)
TOKEN_INFO(float32, float, float8, Float8)
TOKEN_INFO(bfloat16, BFloat16, float8, Float8)
TOKEN_INFO(float16, Float16, float8, Float8)
