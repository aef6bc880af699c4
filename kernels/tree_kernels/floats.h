// The element types of tensors, and their conversion to and from float.

#pragma once

#include <cstdint>
#include <cstring>

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {  // not the compiler's _Float16, which g++ has only from version 12 on
  uint16_t bits;
};
struct Float8 {  // e4m3
  uint8_t bits;
};

static inline float of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float widen(float x) { return x; }
static inline float widen(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, size = (x.bits & 0x7fffu) << 13;
  const uint32_t normal = size + (112u << 23);  // 2^112 times as large, as float
  // With the exponent of 2^-14 a subnormal's bits stand for 2^-14 more than its value.
  const uint32_t subnormal = bits_of(of_bits(size + (113u << 23)) - 0x1p-14f);
  const uint32_t infinite = normal + (112u << 23);  // or NaN
  return of_bits(sign | (size < 1u << 23 ? subnormal : size < 31u << 23 ? normal : infinite));
}
static inline float widen(BFloat16 x) { return of_bits(static_cast<uint32_t>(x.bits) << 16); }
static inline float widen(Float8 x) {
  const uint32_t byte = x.bits;
  return of_bits((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}

static inline void narrow(float x, float& y) { y = x; }
// The others round to nearest, ties to even.
static inline void narrow(float x, Float16& y) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  const uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  // Between 1/2 and 1 the last bit of a float is 2^-24, as that of a subnormal half.
  const uint32_t subnormal = bits_of(of_bits(size) + 0.5f) - bits_of(0.5f);
  const uint32_t infinite = size > 0x7f800000u ? 0x7e00u : 0x7c00u;  // or NaN
  y.bits = static_cast<uint16_t>(
      sign | (size < 113u << 23 ? subnormal : size < 143u << 23 ? normal : infinite));
}
static inline void narrow(float x, BFloat16& y) {
  const uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;  // which might round to infinity or 0
  y.bits = static_cast<uint16_t>(is_nan ? bits >> 16 | 0x40u : rounded);
}
