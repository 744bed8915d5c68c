// Half-precision and bfloat16 numbers, one at a time: for packing, where speed is not asked of each.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace outrider {

static inline float from_half(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000) << 16;
  const std::uint32_t rest = h & 0x7fff;
  if (rest >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinity, NaN
  // Put the bits 112 exponents too low, which also holds for subnormals, and multiply by 2^112: exact.
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest << 13) * 0x1p112f));
}

// To nearest, ties to even. Too large: infinity.
static inline std::uint16_t to_half(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  const std::uint16_t sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  const std::uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);
  if (rest < 0x38800000) {  // subnormal: let the addition of 0.5 round to multiples of 2^-24
    const float rounded = std::bit_cast<float>(rest) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(rounded) - 0x3f000000));
  }
  const std::uint32_t odd = rest >> 13 & 1;
  return static_cast<std::uint16_t>(sign | (rest - 0x38000000 + 0xfff + odd) >> 13);
}

static inline float from_bf16(std::uint16_t b) { return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16); }

// To nearest, ties to even.
static inline std::uint16_t to_bf16(float f) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline std::uint16_t load_half(const std::uint8_t* p) {
  std::uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

}  // namespace outrider
