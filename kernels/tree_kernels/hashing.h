// The hash of n-grams and bigrams, which gives their cells in the tables, and their lengths.

#pragma once

#include <cstdint>

constexpr int64_t kLongest = 6;  // longest n-gram that is looked up at every node, in tokens
constexpr int64_t kAtRoot = 16;  // n-grams of this length are looked up at the root alone

static inline uint32_t mixed(uint32_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B1u;
  return hash ^ (hash >> 15);
}

// `cells` is a power of two.
static inline int64_t cell_of(const int32_t* tokens, int64_t n, int64_t cells) {
  uint32_t hash = static_cast<uint32_t>(n);
  for (int64_t i = 0; i < n; ++i) hash = mixed(hash, tokens[i]);
  return static_cast<int64_t>(hash) & (cells - 1);
}
