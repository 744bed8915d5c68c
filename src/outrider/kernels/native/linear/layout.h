// How packed weights and prepared activations lie in memory; the same for all instruction sets.
//
// Weights: units of 32 outputs ("columns" of the product), each one stream in the order in which it is read.
//   fp32   [K16][32] float                              K16, K32: K rounded up to 16, 32 with zeros
//   bf16   [K32/2][32][2] bf16
//   int8   [K/G] { scale [32] half ; [G/4][32][4] u8 = weight + 128 }
//   int4   [K/32] { scales ; [4][32][4] u8, step j: low nibble = column k = 8j + i, high nibble = k = 8j + 4 + i }
//          scales: half      scale [32] half; weight = scale * (nibble - 8)
//                  halves    scale [32], offset [32] half; weight = scale * nibble + offset
//                  floats    the same in float
//                  packed    before each 8 groups: d [32], m [32] half; per group: s [32], t [32] u8;
//                            scale = d * s, offset = -(m * t)                 (Q4_K as it is, with two bytes per scale)
// Activations: row after row, each at a line of its own so that threads which prepare neighbours do not get in each
// other's way.
//   fp32   [K16] float  (bf16 without bf16 multiplication: K32)
//   bf16   [K32] bf16
//   int8   [K/G] { scale float ; -128 * sum int32 }, padded to lines ; [K] int8
//   int4   [K/32] { scale float ; -8 * sum int32 ; scale * sum float ; unused }, padded to lines ; [K] int8
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/linear.h"

namespace outrider {

enum class Scales : std::uint8_t { half, halves, floats, packed };

inline constexpr std::size_t kInt8Head = 8, kInt4Head = 16;  // bytes of scale and sums of a group of activations
inline constexpr std::size_t kInt4Group = 512;         // nibbles of a group of a unit, in bytes
inline constexpr std::size_t kPackedHeader = 128;      // of 8 groups
inline constexpr int kTile = 8;                        // rows that share the weights in registers, at most
inline constexpr int kBlock = 2 * kTile;               // rows that share the weights in L1, at most

// What a kernel needs to know of a Linear.
struct LinearView {
  Format format;
  Scales scales;
  bool paired;
  int group;
  int groups;               // K / G; fp32 and bf16: blocks of 16 and 32 columns
  std::int64_t k, n;
  std::size_t unit_bytes;
  const std::uint8_t* data;
  const float* bias;        // by unit, or null

  explicit LinearView(const Linear& linear);
};

// Bytes of the heads in front of a row of int8 activations.
inline std::size_t heads_bytes(int groups, std::size_t head) { return (static_cast<std::size_t>(groups) * head + 63) / 64 * 64; }

// Bytes from one row of activations to the next.
std::size_t row_stride(const LinearView& view);

// One per instruction set.
struct Kernels {
  void (*prepare)(const LinearView& view, const float* x, std::uint8_t* row);
  void (*multiply)(const LinearView& view, const std::uint8_t* activations, int M, int unit_begin, int unit_end, float* y,
                   std::int64_t ldy, Epilogue epilogue);
  bool bf16_activations;    // bf16 weights meet bf16 activations, not fp32
};

const Kernels& kernels();   // of isa()
const Kernels& kernels_portable();
const Kernels& kernels_avx2();
const Kernels& kernels_avxvnni();
const Kernels& kernels_avx512();        // without AVX512_BF16
const Kernels& kernels_avx512_bf16();

}  // namespace outrider
