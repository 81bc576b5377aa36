// Numbers of fp32 and bf16, and an exponential that compilers vectorize: shared by the kernels for CPUs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

using i64 = int64_t;

inline float widened(uint16_t half) {
  uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Half {
  uint16_t bits;
};

// Rounds to the nearest, ties to even; NaN stays NaN.
inline uint16_t rounded(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return uint16_t(value != value ? 0x7fc0 : up);
}

inline float wide(float value) { return value; }
inline float wide(Half value) { return widened(value.bits); }
// A number as it is stored in a type.
inline float held(float value, float) { return value; }
inline float held(float value, Half) { return widened(rounded(value)); }
inline void put(float& place, float value) { place = value; }
inline void put(Half& place, float value) { place.bits = rounded(value); }

// e^x to about one unit in the last place, with x clamped to -87 to 88.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float shifter = 12582912.0f;  // 1.5 * 2^23: a sum with it is rounded to an integer
  float whole = (x * 1.44269504f + shifter) - shifter;
  float r = x - whole * 0.693145752f;
  r = r - whole * 1.42860677e-6f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &p, 4);
  bits += int32_t(whole) << 23;
  std::memcpy(&p, &bits, 4);
  return p;
}

}  // namespace
