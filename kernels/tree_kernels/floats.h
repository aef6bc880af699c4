// The element types of tensors, and their conversion to and from float.

#pragma once

#include <cstdint>
#include <cstring>

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  _Float16 value;
};
struct Float8 {  // e4m3
  uint8_t bits;
};

static inline float of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float widen(float x) { return x; }
static inline float widen(Float16 x) { return static_cast<float>(x.value); }
static inline float widen(BFloat16 x) { return of_bits(static_cast<uint32_t>(x.bits) << 16); }
static inline float widen(Float8 x) {
  const uint32_t byte = x.bits;
  return of_bits((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}

static inline void narrow(float x, float& y) { y = x; }
static inline void narrow(float x, Float16& y) { y.value = static_cast<_Float16>(x); }
static inline void narrow(float x, BFloat16& y) {  // rounds to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  y.bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
