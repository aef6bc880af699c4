// The parts of a transformer layer between its matrix products, on a CPU.
//
// A drafter's layer reads a few rows at a time, so that what counts is the number of calls.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "floats.h"
#include "vectors.h"

constexpr int64_t kManyRows = 32;  // fewer are not worth starting threads

template <typename T>
static void add_norm(const T* x, const T* added, const T* weight, float epsilon, T* sum, T* normed,
                     int64_t width) {
  float lanes[kLanes] = {};
  for (int64_t start = 0; start < width; start += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, width - start);
    for (int64_t i = 0; i < count; ++i) {
      float value = widen(x[start + i]);
      if (added) {
        narrow(value + widen(added[start + i]), sum[start + i]);
        value = widen(sum[start + i]);
      }
      lanes[i] += value * value;
    }
  }
  const float scale = 1.0f / std::sqrt(lane_sum(lanes) / width + epsilon);
  const T* from = added ? sum : x;
  for (int64_t i = 0; i < width; ++i) narrow(widen(from[i]) * scale * widen(weight[i]), normed[i]);
}

// `cosines` and `sines` are those of the row's position; the first half of the sines is negative.
template <typename T>
static void rotate(const T* from, const T* cosines, const T* sines, T* to, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = widen(from[i]), second = widen(from[half + i]);
    narrow(first * widen(cosines[i]) + second * widen(sines[i]), to[i]);
    narrow(second * widen(cosines[half + i]) + first * widen(sines[half + i]), to[half + i]);
  }
}

template <typename T>
static void gate(const T* gates, const T* up, T* to, int64_t width) {
  for (int64_t start = 0; start < width; start += kWidth) {
    const int64_t count = std::min<int64_t>(kWidth, width - start);
    float values[kWidth] = {};
    for (int64_t i = 0; i < count; ++i) values[i] = widen(gates[start + i]);
    const Vector x = load(values);
    store(values, x / (1.0f + exponential(x < -88.0f ? Vector{} + 88.0f : -x)));
    for (int64_t i = 0; i < count; ++i) narrow(values[i] * widen(up[start + i]), to[start + i]);
  }
}

template <typename T>
static void add_norm_rows(const void* x, const void* added, const void* weight, float epsilon,
                          void* sum, void* normed, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows >= kManyRows)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * width;
    add_norm(static_cast<const T*>(x) + at, added ? static_cast<const T*>(added) + at : nullptr,
             static_cast<const T*>(weight), epsilon, added ? static_cast<T*>(sum) + at : nullptr,
             static_cast<T*>(normed) + at, width);
  }
}

template <typename T>
static void rotate_rows(const void* states, const void* angles, int64_t num_positions,
                        const int64_t* positions, void* queries, void* keys, void* values,
                        int64_t rows, int64_t heads, int64_t kv_heads, int64_t size,
                        int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows >= kManyRows)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = std::clamp<int64_t>(positions[row], 0, num_positions - 1);
    const T* cosines = static_cast<const T*>(angles) + position * size;
    const T* sines = cosines + num_positions * size;
    const T* from = static_cast<const T*>(states) + row * (heads + 2 * kv_heads) * size;
    T* to = static_cast<T*>(queries) + row * heads * size;
    for (int64_t head = 0; head < heads; ++head, from += size, to += size)
      rotate(from, cosines, sines, to, size);
    to = static_cast<T*>(keys) + row * kv_heads * size;
    for (int64_t head = 0; head < kv_heads; ++head, from += size, to += size)
      rotate(from, cosines, sines, to, size);
    std::memcpy(static_cast<T*>(values) + row * kv_heads * size, from, kv_heads * size * sizeof(T));
  }
}

template <typename T>
static void gate_rows(const void* gate_up, void* result, int64_t rows, int64_t width,
                      int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows >= kManyRows)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = static_cast<const T*>(gate_up) + 2 * row * width;
    gate(from, from + width, static_cast<T*>(result) + row * width, width);
  }
}

#define EXPORT(NAME, TYPE)                                                                        \
  extern "C" void add_norm_##NAME(const void* x, const void* added, const void* weight,           \
                                  float epsilon, void* sum, void* normed, int64_t rows,           \
                                  int64_t width, int64_t threads) {                               \
    add_norm_rows<TYPE>(x, added, weight, epsilon, sum, normed, rows, width, threads);            \
  }                                                                                               \
  extern "C" void rotate_##NAME(const void* states, const void* angles, int64_t num_positions,    \
                                const int64_t* positions, void* queries, void* keys,              \
                                void* values, int64_t rows, int64_t heads, int64_t kv_heads,      \
                                int64_t size, int64_t threads) {                                  \
    rotate_rows<TYPE>(states, angles, num_positions, positions, queries, keys, values, rows,      \
                      heads, kv_heads, size, threads);                                            \
  }                                                                                               \
  extern "C" void gate_##NAME(const void* gate_up, void* result, int64_t rows, int64_t width,     \
                              int64_t threads) {                                                  \
    gate_rows<TYPE>(gate_up, result, rows, width, threads);                                       \
  }
EXPORT(float32, float)
EXPORT(bfloat16, BFloat16)
EXPORT(float16, Float16)
