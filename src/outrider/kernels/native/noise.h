// Noise as a pure function of (seed, position, token, stream): the operations of core/noise.py, one by one, so that both
// give the same bits. Nothing here may be fused or reordered (-ffp-contract=off); the vector forms are in
// sampling_lanes.h.
//
// All functions are static, and templates of the standard library stay out: files for different instruction sets must
// not share one copy of anything.
#pragma once

#include <cstdint>

namespace outrider {

namespace stream {
inline constexpr std::uint32_t target = 0, draft = 1, accept = 2, residual = 3;
}

// Where a draw takes place: everything but the token.
struct Place {
  std::uint64_t seed;
  std::uint64_t position;
  std::uint32_t stream;
};

namespace philox {
inline constexpr int rounds = 10;
inline constexpr std::uint32_t multiplier0 = 0xD2511F53, multiplier1 = 0xCD9E8D57;
inline constexpr std::uint32_t weyl0 = 0x9E3779B9, weyl1 = 0xBB67AE85;
}  // namespace philox

struct Words {
  std::uint32_t w[4];
};

// The words of tokens 4 * group ... 4 * group + 3. Philox4x32-10 (Salmon et al. 2011).
[[maybe_unused]] static Words words(const Place& place, std::uint32_t group) {
  std::uint32_t c0 = group, c1 = static_cast<std::uint32_t>(place.position),
                c2 = static_cast<std::uint32_t>(place.position >> 32), c3 = place.stream;
  std::uint32_t k0 = static_cast<std::uint32_t>(place.seed), k1 = static_cast<std::uint32_t>(place.seed >> 32);
  for (int round = 0; round < philox::rounds; ++round) {
    const std::uint64_t left = std::uint64_t{c0} * philox::multiplier0, right = std::uint64_t{c2} * philox::multiplier1;
    c0 = static_cast<std::uint32_t>(right >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(right);
    c2 = static_cast<std::uint32_t>(left >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(left);
    k0 += philox::weyl0;
    k1 += philox::weyl1;
  }
  return {{c0, c1, c2, c3}};
}

namespace fixed {

inline constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
inline constexpr double log2_e = 0x1.71547652b82fep+0;
inline constexpr double rounder = 0x1.8p52;  // adding and subtracting it rounds to the nearest whole number
inline constexpr double exp_lowest = -708.0, exp_zero = 0x1p-1010;  // exp stays in the normal range; below is 0
inline constexpr std::uint64_t sqrt_half = 0x3FE6A09E667F3BCD, one = std::uint64_t{1023} << 52;
inline constexpr std::uint64_t fraction = (std::uint64_t{1} << 52) - 1;
inline constexpr double mass = 0x1p44;  // top_p counts in units of 2**-44 of the likeliest token

// 2 / (2j + 1), j = 1 ... 10
inline constexpr double log_series[10] = {2.0 / 3,  2.0 / 5,  2.0 / 7,  2.0 / 9,  2.0 / 11,
                                          2.0 / 13, 2.0 / 15, 2.0 / 17, 2.0 / 19, 2.0 / 21};
// 1 / j!, j = 0 ... 13
inline constexpr double exp_series[14] = {
    1.0,          1.0,           1.0 / 2,        1.0 / 6,         1.0 / 24,         1.0 / 120,        1.0 / 720,
    1.0 / 5040.0, 1.0 / 40320.0, 1.0 / 362880.0, 1.0 / 3628800.0, 1.0 / 39916800.0, 1.0 / 479001600.0,
    1.0 / 6227020800.0};

// Natural logarithm of a positive normal number.
[[maybe_unused]] static double log(double x) {
  const std::uint64_t bits = __builtin_bit_cast(std::uint64_t, x);
  const std::uint64_t biased = (bits - sqrt_half + one) >> 52;
  const double k = static_cast<double>(static_cast<std::int64_t>(biased)) - 1023.0;
  const double f = __builtin_bit_cast(double, bits - ((biased << 52) - one)) - 1.0;
  const double s = f / (f + 2.0);
  const double z = s * s;
  double series = log_series[9];
  for (int j = 8; j >= 0; --j) series = series * z + log_series[j];
  return k * ln2_high + ((s + s) + ((s * z) * series + k * ln2_low));
}

}  // namespace fixed

// -log(-log(u)) of u = (word + 0.5) / 2**32.
[[maybe_unused]] static double gumbel(std::uint32_t word) {
  return -fixed::log(-fixed::log((static_cast<double>(word) + 0.5) * 0x1p-32));
}

}  // namespace outrider
