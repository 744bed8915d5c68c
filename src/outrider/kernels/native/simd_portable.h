// Sixteen floats at a time, in plain C++: what any processor runs, and what the operations mean.
//
// Each simd_*.h defines the same names for its instruction set; rows_body.h is compiled once with each.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace outrider {
namespace {

struct F {
  float v[16];
};

inline F all(float x) {
  F r;
  for (float& e : r.v) e = x;
  return r;
}
inline F zero() { return all(0.0f); }
inline F load(const float* p) {
  F r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store(float* p, const F& x) { std::memcpy(p, x.v, sizeof x.v); }
inline F operator+(const F& a, const F& b) {
  F r;
  for (int i = 0; i < 16; ++i) r.v[i] = a.v[i] + b.v[i];
  return r;
}
inline F operator-(const F& a, const F& b) {
  F r;
  for (int i = 0; i < 16; ++i) r.v[i] = a.v[i] - b.v[i];
  return r;
}
inline F operator*(const F& a, const F& b) {
  F r;
  for (int i = 0; i < 16; ++i) r.v[i] = a.v[i] * b.v[i];
  return r;
}
// a * b + c, rounded twice here and once where the processor has a fused operation
inline F fma(const F& a, const F& b, const F& c) {
  F r;
  for (int i = 0; i < 16; ++i) r.v[i] = a.v[i] * b.v[i] + c.v[i];
  return r;
}
inline F larger(const F& a, const F& b) {
  F r;
  for (int i = 0; i < 16; ++i) r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return r;
}
// the largest element, in all places
inline F largest(const F& a) {
  float r = a.v[0];
  for (int i = 1; i < 16; ++i) r = a.v[i] > r ? a.v[i] : r;
  return all(r);
}
inline bool differ(const F& a, const F& b) {
  for (int i = 0; i < 16; ++i) {
    if (!(a.v[i] == b.v[i])) return true;
  }
  return false;
}
// the first `count` elements of a, `other` in place of the rest
inline F first(int count, const F& a, float other) {
  F r;
  for (int i = 0; i < 16; ++i) r.v[i] = i < count ? a.v[i] : other;
  return r;
}
// all elements, added in one fixed order: halves onto each other
inline float sum(const F& a) {
  float r[8];
  for (int i = 0; i < 8; ++i) r[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; ++i) r[i] = r[i] + r[i + 4];
  return (r[0] + r[2]) + (r[1] + r[3]);
}
// x = whole + rest, whole the nearest integer, even in a tie. |x| < 2^22.
inline void split(const F& x, F& whole, F& rest) {
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it drops the fraction
  for (int i = 0; i < 16; ++i) {
    whole.v[i] = (x.v[i] + magic) - magic;
    rest.v[i] = x.v[i] - whole.v[i];
  }
}
// The exponent at which `scale_by_power` gives 0, and which is its smallest.
constexpr float kLowest = -127.0f;

// x * 2^whole for x in [1/2, 2] and whole in [kLowest, 0]
inline F scale_by_power(const F& x, const F& whole) {
  F r;
  for (int i = 0; i < 16; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &x.v[i], 4);
    bits += static_cast<std::uint32_t>(static_cast<std::int32_t>(whole.v[i])) << 23;  // in uint32 it may wrap
    std::memcpy(&r.v[i], &bits, 4);
    r.v[i] = whole.v[i] > kLowest ? r.v[i] : 0.0f;
  }
  return r;
}
// 16 pairs of bf16: the first of each pair, and the second
inline void unpack_bf16(const std::uint16_t* p, F& even, F& odd) {
  for (int i = 0; i < 16; ++i) {
    const std::uint32_t a = static_cast<std::uint32_t>(p[2 * i]) << 16, b = static_cast<std::uint32_t>(p[2 * i + 1]) << 16;
    std::memcpy(&even.v[i], &a, 4);
    std::memcpy(&odd.v[i], &b, 4);
  }
}
inline void prefetch(const void*) {}

}  // namespace
}  // namespace outrider
