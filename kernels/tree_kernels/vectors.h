// Vectors of floats in registers, and matrix products of them.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats in a register
constexpr int kVectors = 4;
#else
constexpr int kWidth = 8;
constexpr int kVectors = 2;
#endif
constexpr int kTile = kWidth * kVectors;  // columns of a product in registers
constexpr int kRows = 4;                  // rows of a product in registers
constexpr int kLanes = 16;                // partial sums of the weights of a row

typedef float Vector __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));

static inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
static inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

// e^x for x <= 88, flushed to 0 below the normal floats; relative error 5e-7. The coefficients and the order of
// operations are those of vLLM's AVX-512 kernels, so that the results are the same floats.
static inline Vector exponential(Vector x) {
  constexpr float kLeast = -87.3365478515625f;  // about ln(2^-126)
  const Vector clamped = x < kLeast ? Vector{} + kLeast : x;
  const Vector halves = clamped * 1.44269502f + 0.5f;
  Integers whole = __builtin_convertvector(halves, Integers);
  whole += __builtin_convertvector(whole, Vector) > halves;  // rounds down; a true lane is -1
  const Vector r = clamped - __builtin_convertvector(whole, Vector) * 0.693147182f;
  Vector p = r * 0.00828929059f + 0.0418978221f;
  p = r * p + 0.166676521f;
  p = r * p + 0.499991506f;
  p = r * p + 0.999999701f;
  p = r * p + 1.0f;
  const Integers exponent = (whole + 126) << 23;  // of 2^(whole - 1): 2^128 is no float
  Vector power;
  std::memcpy(&power, &exponent, sizeof power);
  return x < kLeast ? Vector{} : p * power * 2.0f;
}

// The hyperbolic tangent as vLLM's kernels compute it; absolute error 3e-7.
static inline Vector tangent(Vector x) {
  constexpr float kMost = 40.0f;  // the tangent of which is 1, and the exponential not too large
  x = x > kMost ? Vector{} + kMost : x < -kMost ? Vector{} - kMost : x;
  const Vector e = exponential(x), inverse = 1.0f / e;
  return (e - inverse) / (e + inverse);
}

// The sum of kLanes floats, in the order of AVX-512's reduction.
static inline float lane_sum(const float* lanes) {
  float sums[kLanes];
  std::memcpy(sums, lanes, sizeof sums);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

// c [kRows, N * kWidth] = a [kRows, depth] times b [depth, N * kWidth], added to c if kAdd. Each element is
// summed in the order of `depth`, with one rounding for a product and its addition.
template <int N, bool kAdd>
static void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride, int64_t depth) {
  Vector sum[kRows][N];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < N; ++j)
      sum[i][j] = kAdd ? load(c + i * c_stride + j * kWidth) : Vector{};
  for (int64_t d = 0; d < depth; ++d) {
    Vector left[kRows];
    for (int i = 0; i < kRows; ++i) left[i] = Vector{} + a[i * a_stride + d];
    for (int j = 0; j < N; ++j) {
      Vector right = load(b + d * b_stride + j * kWidth);
#if defined(__x86_64__)
      asm("" : "+v"(right));  // or GCC would load it again for each row, and loads are the bottleneck
#endif
      for (int i = 0; i < kRows; ++i) sum[i][j] += left[i] * right;
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < N; ++j) store(c + i * c_stride + j * kWidth, sum[i][j]);
}

// The same for any number of columns that is a multiple of kWidth.
template <bool kAdd>
static void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride, int64_t depth, int64_t columns) {
  int64_t j = 0;
  for (; j + kTile <= columns; j += kTile)
    multiply<kVectors, kAdd>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
  for (; j < columns; j += kWidth)
    multiply<1, kAdd>(a, a_stride, b + j, b_stride, c + j, c_stride, depth);
}
