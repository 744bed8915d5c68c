// C++ with vectors of 16 bytes, which every compiler maps to SSE2, NEON or whatever the processor has: for processors
// without AVX2, other architectures, and as a second opinion in tests.
#include <bit>
#include <cstdint>
#include <cstring>

#include "linear/half.h"

namespace outrider {
namespace {

#define OUTRIDER_OP __attribute__((always_inline)) inline
#define OUTRIDER_CHUNK __attribute__((noinline))  // or this file takes a minute and a half to compile

constexpr int kRows = 2, kBlocks = 1;
constexpr bool kSigned = true, kBf16 = false;

typedef float Four __attribute__((vector_size(16)));
typedef std::int32_t FourInts __attribute__((vector_size(16)));
typedef std::uint32_t FourBits __attribute__((vector_size(16)));

struct Floats {
  Four v[4];
};
// Sums of products of bytes, as floats: exact below 2^24, and 128 products of at most 128 * 128 are. Products of floats
// exist everywhere, products of bytes do not.
struct Ints {
  Four v[4];
};
struct Bytes {
  FourBits v[4];  // four bytes of each column
};
struct Left {
  Four v[4][4];  // byte j of four columns
};
using Nibbles = Left;
struct Right {
  Four v[4];  // byte j of a row, four times
};

template <class F>
OUTRIDER_OP Floats each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

OUTRIDER_OP Floats load(const float* p) {
  Floats out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
OUTRIDER_OP void store(float* p, Floats a) { std::memcpy(p, &a, sizeof a); }
OUTRIDER_OP Four all(float x) { return Four{x, x, x, x}; }
OUTRIDER_OP Floats spread(float x) { return each([=](int) { return all(x); }); }
OUTRIDER_OP Floats spread(const float* p) { return spread(*p); }
OUTRIDER_OP Floats zero_floats() { return spread(0.0f); }
OUTRIDER_OP Floats add(Floats a, Floats b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
OUTRIDER_OP Floats mul(Floats a, Floats b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
OUTRIDER_OP Floats div(Floats a, Floats b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
// Rounded twice: a true one is a slow function call where the processor has none.
OUTRIDER_OP Floats fma(Floats a, Floats b, Floats c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
OUTRIDER_OP Floats negative(Floats a) { return each([&](int i) { return -a.v[i]; }); }
OUTRIDER_OP Floats magnitude(Floats a) {
  return each([&](int i) { return std::bit_cast<Four>(std::bit_cast<FourBits>(a.v[i]) & 0x7fffffffu); });
}
OUTRIDER_OP Floats at_least(Floats bound, Floats x) {  // NaN of x stays
  return each([&](int i) { return bound.v[i] > x.v[i] ? bound.v[i] : x.v[i]; });
}
OUTRIDER_OP Floats at_most(Floats bound, Floats x) {
  return each([&](int i) { return bound.v[i] < x.v[i] ? bound.v[i] : x.v[i]; });
}
constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer
OUTRIDER_OP Floats round_even(Floats a) { return each([&](int i) { return (a.v[i] + kInteger) - kInteger; }); }
OUTRIDER_OP Floats times_two_to(Floats a, Floats n) {
  return each([&](int i) { return a.v[i] * std::bit_cast<Four>((__builtin_convertvector(n.v[i], FourInts) + 127) << 23); });
}
OUTRIDER_OP float highest(Floats a) {
  float values[16], most = 0.0f;
  store(values, a);
  for (float value : values) most = value > most ? value : most;
  return most;
}
OUTRIDER_OP void add_product(Floats& sum, Floats a, Floats b) { sum = fma(a, b, sum); }

OUTRIDER_OP Floats load_halves(const std::uint8_t* p) {
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = from_half(load_half(p + 2 * i));
  return load(values);
}
OUTRIDER_OP Floats load_small(const std::uint8_t* p) {
  float values[16];
  for (int i = 0; i < 16; ++i) values[i] = p[i];
  return load(values);
}
OUTRIDER_OP Bytes load_bytes(const std::uint8_t* p) {
  Bytes out;
  std::memcpy(&out, p, sizeof out);
  return out;
}
OUTRIDER_OP void widen(const std::uint8_t* p, Floats& even, Floats& odd) {  // the lower bf16 of a word is the first
  const Bytes pairs = load_bytes(p);
  even = each([&](int i) { return std::bit_cast<Four>(pairs.v[i] << 16); });
  odd = each([&](int i) { return std::bit_cast<Four>(pairs.v[i] & 0xffff0000u); });
}

OUTRIDER_OP Ints zero_ints() { return {{all(0.0f), all(0.0f), all(0.0f), all(0.0f)}}; }
OUTRIDER_OP Ints spread(const std::int32_t* p) {
  const Four value = all(static_cast<float>(*p));
  return {{value, value, value, value}};
}
OUTRIDER_OP Floats to_floats(Ints a) { return {{a.v[0], a.v[1], a.v[2], a.v[3]}}; }
OUTRIDER_OP Ints to_ints(Floats a) {
  const Floats rounded = round_even(a);
  return {{rounded.v[0], rounded.v[1], rounded.v[2], rounded.v[3]}};
}
OUTRIDER_OP Ints add(Ints a, Ints b) { return {{a.v[0] + b.v[0], a.v[1] + b.v[1], a.v[2] + b.v[2], a.v[3] + b.v[3]}}; }
OUTRIDER_OP std::int32_t total(Ints a) {
  const FourInts sum = __builtin_convertvector((a.v[0] + a.v[1]) + (a.v[2] + a.v[3]), FourInts);
  return sum[0] + sum[1] + sum[2] + sum[3];
}
OUTRIDER_OP void store_small(std::int8_t* p, Ints a) {
  float values[16];
  std::memcpy(values, &a, sizeof a);
  for (int i = 0; i < 16; ++i) {
    const float bounded = values[i] < -127.0f ? -127.0f : values[i];
    p[i] = static_cast<std::int8_t>(bounded < 127.0f ? bounded : 127.0f);  // NaN too
  }
}

OUTRIDER_OP Left left(Bytes a) {  // bytes are weight + 128
  Left out;
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i) {
      const FourInts high = std::bit_cast<FourInts>((a.v[i] ^ 0x80808080u) << (24 - 8 * j));
      out.v[j][i] = __builtin_convertvector(high >> 24, Four);
    }
  return out;
}
OUTRIDER_OP void split_nibbles(Bytes a, Nibbles& low, Nibbles& high) {
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i) {
      low.v[j][i] = __builtin_convertvector(std::bit_cast<FourInts>(a.v[i] >> 8 * j & 15u), Four);
      high.v[j][i] = __builtin_convertvector(std::bit_cast<FourInts>(a.v[i] >> (8 * j + 4) & 15u), Four);
    }
}
OUTRIDER_OP Right right(const std::uint8_t* p) {
  Right out;
  for (int j = 0; j < 4; ++j) out.v[j] = all(static_cast<std::int8_t>(p[j]));
  return out;
}
OUTRIDER_OP int prepare_first(const float*, std::uint8_t*, std::int8_t*, int, bool) { return 0; }  // no shortcut
OUTRIDER_OP void dot(Ints& sum, const Left& weights, const Right& activations) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) sum.v[i] += weights.v[j][i] * activations.v[j];
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
