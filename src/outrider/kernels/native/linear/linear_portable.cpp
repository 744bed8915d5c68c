// Plain C++: for processors without AVX2, other architectures, and as a second opinion in tests.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "linear/half.h"

namespace outrider {
namespace {

#define OUTRIDER_OP __attribute__((always_inline)) inline
#define OUTRIDER_PLAIN

constexpr int kRows = 2, kBlocks = 1;
constexpr bool kSigned = true, kBf16 = false;

struct Floats {
  float v[16];
};
struct Ints {
  std::int32_t v[16];
};
struct Bytes {
  std::uint8_t v[64];
};
struct Left {
  std::int8_t v[64];
};
struct Nibbles {
  std::int8_t v[64];
};
struct Right {
  std::int8_t v[4];
};

template <class F>
OUTRIDER_OP Floats each(F f) {
  Floats out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}

OUTRIDER_OP Floats load(const float* p) {
  Floats out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
OUTRIDER_OP void store(float* p, const Floats& a) { std::memcpy(p, a.v, sizeof a.v); }
OUTRIDER_OP Floats spread(float x) { return each([=](int) { return x; }); }
OUTRIDER_OP Floats spread(const float* p) { return spread(*p); }
OUTRIDER_OP Floats zero_floats() { return spread(0.0f); }
OUTRIDER_OP Floats add(const Floats& a, const Floats& b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
OUTRIDER_OP Floats mul(const Floats& a, const Floats& b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
OUTRIDER_OP Floats div(const Floats& a, const Floats& b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
// Rounded twice: std::fma is a slow function call where the processor has none.
OUTRIDER_OP Floats fma(const Floats& a, const Floats& b, const Floats& c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
OUTRIDER_OP Floats negative(const Floats& a) { return each([&](int i) { return -a.v[i]; }); }
OUTRIDER_OP Floats magnitude(const Floats& a) { return each([&](int i) { return std::fabs(a.v[i]); }); }
OUTRIDER_OP Floats at_least(const Floats& bound, const Floats& x) {
  return each([&](int i) { return bound.v[i] > x.v[i] ? bound.v[i] : x.v[i]; });
}
OUTRIDER_OP Floats at_most(const Floats& bound, const Floats& x) {
  return each([&](int i) { return bound.v[i] < x.v[i] ? bound.v[i] : x.v[i]; });
}
constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer
OUTRIDER_OP Floats round_even(const Floats& a) { return each([&](int i) { return (a.v[i] + kInteger) - kInteger; }); }
OUTRIDER_OP Floats times_two_to(const Floats& a, const Floats& n) {
  return each([&](int i) {
    return a.v[i] * std::bit_cast<float>(static_cast<std::uint32_t>(static_cast<std::int32_t>(n.v[i]) + 127) << 23);
  });
}
OUTRIDER_OP float highest(const Floats& a) {
  float most = a.v[0];
  for (int i = 1; i < 16; ++i) most = a.v[i] > most ? a.v[i] : most;
  return most;
}
OUTRIDER_OP void add_product(Floats& sum, const Floats& a, const Floats& b) { sum = fma(a, b, sum); }

OUTRIDER_OP Floats load_halves(const std::uint8_t* p) { return each([&](int i) { return from_half(load_half(p + 2 * i)); }); }
OUTRIDER_OP Floats load_small(const std::uint8_t* p) { return each([&](int i) { return static_cast<float>(p[i]); }); }
OUTRIDER_OP void widen(const std::uint8_t* p, Floats& even, Floats& odd) {
  even = each([&](int i) { return from_bf16(load_half(p + 4 * i)); });
  odd = each([&](int i) { return from_bf16(load_half(p + 4 * i + 2)); });
}

OUTRIDER_OP Ints zero_ints() { return {}; }
OUTRIDER_OP Ints spread(const std::int32_t* p) {
  Ints out;
  for (int i = 0; i < 16; ++i) out.v[i] = *p;
  return out;
}
OUTRIDER_OP Ints add(const Ints& a, const Ints& b) {
  Ints out;
  for (int i = 0; i < 16; ++i) out.v[i] = a.v[i] + b.v[i];
  return out;
}
OUTRIDER_OP Floats to_floats(const Ints& a) { return each([&](int i) { return static_cast<float>(a.v[i]); }); }
OUTRIDER_OP Ints to_ints(const Floats& a) {
  Ints out;
  for (int i = 0; i < 16; ++i) {
    const float shifted = a.v[i] + kInteger;
    out.v[i] = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kInteger);
  }
  return out;
}
OUTRIDER_OP std::int32_t total(const Ints& a) {
  std::int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += a.v[i];
  return sum;
}
OUTRIDER_OP void store_small(std::int8_t* p, const Ints& a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<std::int8_t>(a.v[i] > 127 ? 127 : a.v[i] < -127 ? -127 : a.v[i]);
}

OUTRIDER_OP Bytes load_bytes(const std::uint8_t* p) {
  Bytes out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
OUTRIDER_OP Left left(const Bytes& a) {
  Left out;
  for (int i = 0; i < 64; ++i) out.v[i] = static_cast<std::int8_t>(a.v[i] ^ 0x80);
  return out;
}
OUTRIDER_OP int prepare_first(const float*, std::uint8_t*, std::int8_t*, int, bool) { return 0; }  // no shortcut
OUTRIDER_OP Right right(const std::uint8_t* p) {
  Right out;
  std::memcpy(out.v, p, 4);
  return out;
}
OUTRIDER_OP void split_nibbles(const Bytes& a, Nibbles& low, Nibbles& high) {
  for (int i = 0; i < 64; ++i) {
    low.v[i] = static_cast<std::int8_t>(a.v[i] & 15);
    high.v[i] = static_cast<std::int8_t>(a.v[i] >> 4);
  }
}
template <class Weights>
OUTRIDER_OP void dot(Ints& sum, const Weights& weights, const Right& activations) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 4; ++j) sum.v[i] += weights.v[4 * i + j] * activations.v[j];
}

}  // namespace
}  // namespace outrider

#include "linear/body.h"

namespace outrider {

const Kernels& kernels_portable() {
  static constexpr Kernels here{prepare_here, multiply_here, kBf16};
  return here;
}

}  // namespace outrider
