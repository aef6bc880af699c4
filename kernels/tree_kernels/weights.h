// Distributions over the vocabulary whose mass is kept block by block, for rejection sampling.
//
// Most distributions are filtered (top-k, top-p): a block in which the target has no mass never gets
// any, so its values are not read or written again.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

constexpr int64_t kBlock = 256;
constexpr int kLanes = 16;  // partial sums, to use vector registers

static double sum_of(const float* values, int64_t count) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += values[i + lane];
  for (; i < count; ++i) lanes[i % kLanes] += values[i];
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  return total;
}

// A row of non-negative weights with the sum of each block.
struct Row {
  const float* values = nullptr;
  std::vector<double> sums;

  void read(const float* from, int64_t count) {
    values = from;
    sums.clear();
    for (int64_t start = 0; start < count; start += kBlock)
      sums.push_back(sum_of(from + start, std::min(kBlock, count - start)));
  }

  // A block without mass may never have been written.
  float at(int32_t token) const { return sums[token / kBlock] > 0 ? values[token] : 0.0f; }

  double mass() const {
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
  }
};

// The draft distribution without the rejected tokens.
struct Draft : Row {
  std::vector<int32_t> rejected;

  float at(int32_t token) const {
    const bool gone = std::find(rejected.begin(), rejected.end(), token) != rejected.end();
    return gone ? 0.0f : values[token];
  }

  void block(int64_t start, int64_t count, float* to) const {
    std::copy_n(values + start, count, to);
    for (const int32_t token : rejected)
      if (token >= start && token < start + count) to[token - start] = 0.0f;
  }

  void reject(int32_t token, int64_t vocab) {
    rejected.push_back(token);
    const int64_t start = token / kBlock * kBlock, count = std::min(kBlock, vocab - start);
    float left[kBlock];
    block(start, count, left);
    sums[token / kBlock] = sum_of(left, count);
  }
};

// The first token at which the running sum exceeds `wanted`; the last token with mass if, due to
// rounding, none does; -1 if there is no mass.
static int32_t draw(const Row& row, int64_t vocab, double wanted) {
  double before = 0;
  int64_t last = -1;
  for (int64_t start = 0; start < vocab; start += kBlock) {
    const double sum = row.sums[start / kBlock];
    if (sum <= 0) continue;
    const int64_t end = std::min(start + kBlock, vocab);
    const bool here = before + sum > wanted;
    double running = before;
    for (int64_t token = start; token < end; ++token) {
      if (!(row.values[token] > 0)) continue;
      last = token;
      running += row.values[token];
      if (here && running > wanted) return static_cast<int32_t>(token);
    }
    before += sum;
  }
  return static_cast<int32_t>(last);
}
