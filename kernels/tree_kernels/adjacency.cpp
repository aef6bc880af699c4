// The top candidates of a step's logits, and the update of the adjacency matrix, on a CPU.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "floats.h"

constexpr int kChunk = 64;  // logits that are compared, and mostly skipped, together

// An integer that orders logits: both zeros are equal, and NaN is the largest.
static inline int32_t order_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const int32_t order = static_cast<int32_t>(bits >> 31 ? ~magnitude : magnitude);
  if (magnitude > 0x7f800000u) return std::numeric_limits<int32_t>::max();
  return magnitude == 0 ? 0 : order;
}

// Whether any of a chunk's logits is larger than the limit, or NaN.
template <typename T>
static bool any_above(const T* chunk, float limit) {
  int32_t above = 0;
  for (int i = 0; i < kChunk; ++i) above |= !(widen(chunk[i]) <= limit);
  return above != 0;
}

// The ids of the k largest logits of a row, largest first, ties by lowest id. `orders` is scratch
// space for k integers.
template <typename T>
static void top_of_row(const T* row, int64_t vocab, int64_t k, int32_t* ids, int32_t* orders) {
  int64_t found = 0;
  for (int64_t start = 0; start < vocab; start += kChunk) {
    const int64_t count = std::min<int64_t>(kChunk, vocab - start);
    // Ties go to the earlier id, so only a larger logit can enter.
    if (found == k && count == kChunk && !any_above(row + start, widen(row[ids[k - 1]]))) continue;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t order = order_of(widen(row[start + i]));
      if (found == k && order <= orders[k - 1]) continue;
      int64_t place = found < k ? found++ : k - 1;
      for (; place > 0 && orders[place - 1] < order; --place) {
        orders[place] = orders[place - 1];
        ids[place] = ids[place - 1];
      }
      orders[place] = order;
      ids[place] = static_cast<int32_t>(start + i);
    }
  }
}

template <typename T>
static void top(const void* logits, int64_t rows, int64_t stride, int64_t vocab, int64_t k,
                int32_t* ids, int32_t* orders, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (rows > 1)
  for (int64_t row = 0; row < rows; ++row)
    top_of_row(static_cast<const T*>(logits) + row * stride, vocab, k, ids + row * k,
               orders + row * k);
}

extern "C" void top_float32(const void* logits, int64_t rows, int64_t stride, int64_t vocab,
                            int64_t k, int32_t* ids, int32_t* orders, int64_t threads) {
  top<float>(logits, rows, stride, vocab, k, ids, orders, threads);
}

extern "C" void top_bfloat16(const void* logits, int64_t rows, int64_t stride, int64_t vocab,
                             int64_t k, int32_t* ids, int32_t* orders, int64_t threads) {
  top<BFloat16>(logits, rows, stride, vocab, k, ids, orders, threads);
}

extern "C" void top_float16(const void* logits, int64_t rows, int64_t stride, int64_t vocab,
                            int64_t k, int32_t* ids, int32_t* orders, int64_t threads) {
  top<Float16>(logits, rows, stride, vocab, k, ids, orders, threads);
}

// Rows are written in order, so the last row of a repeated token wins.
extern "C" void update(int32_t* matrix, int64_t matrix_rows, int64_t stride, const int32_t* tokens,
                       const int32_t* candidates, int64_t rows, int64_t k) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = tokens[row];
    if (token >= 0 && token < matrix_rows)
      std::memcpy(matrix + token * stride, candidates + row * k, k * sizeof(int32_t));
  }
}
