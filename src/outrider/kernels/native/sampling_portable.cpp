// The loops over a row of logits in plain C++ (with the vector extension of GCC and Clang, two lanes).
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "sampling_kernels.h"

namespace outrider {
namespace {

constexpr int kWidth = 2, kTogether = 8;
using F64 = double __attribute__((vector_size(16)));
using U64 = std::uint64_t __attribute__((vector_size(16)));

inline F64 widen(const float* x) { return F64{x[0], x[1]}; }
inline F64 maximum(F64 a, F64 b) { return a > b ? a : b; }
inline F64 zero_below(F64 x, F64 least) { return x >= least ? x : F64{}; }
inline U64 multiply(U64 a, U64 b) {
#if defined(__SSE2__)  // every x86-64 has it, and GCC does not see that three of the four products are of zeros
  return __builtin_bit_cast(U64, _mm_mul_epu32(__builtin_bit_cast(__m128i, a), __builtin_bit_cast(__m128i, b)));
#else
  return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF);
#endif
}
inline unsigned mask_at_least(U64 x, std::uint32_t threshold) {
  return static_cast<unsigned>(x[0] >= threshold) | static_cast<unsigned>(x[1] >= threshold) << 1;
}

inline bool maximum64(const float* x, float& out) {
  bool good = true;
  float highest = x[0];
  for (int i = 0; i < kBlock; ++i) {
    good &= x[i] < __builtin_inff();
    highest = x[i] > highest ? x[i] : highest;
  }
  out = highest;
  return good;
}
std::uint64_t at_least64(const float* x, float floor) {
  std::uint64_t mask = 0;
  for (int i = 0; i < kBlock; ++i) mask |= std::uint64_t{x[i] >= floor} << i;
  return mask;
}

#include "sampling_lanes.h"

}  // namespace

const SamplingKernels sampling_portable = {maxima, exps, mass, at_least64, words_of_block, words_at_least, gumbels,
gumbels_of, add_logs};

}  // namespace outrider
