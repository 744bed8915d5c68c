// The loops over a row of logits that each instruction set has in a version of its own. Same bits from all of them.
#pragma once

#include <cstdint>

#include "linear/isa.h"
#include "noise.h"

namespace outrider {

inline constexpr int kBlock = 64;         // logits whose maximum is kept, so that most are never looked at again
inline constexpr int kLanes = 16;         // lanes of the fixed order of float sums, core/noise.py `total`
inline constexpr int kGroups = kBlock / 4;  // noise comes for four tokens at a time

struct SamplingKernels {
  // Maxima of `blocks` whole blocks. Returns whether any logit is NaN or +inf; the maxima then mean nothing.
  bool (*maxima)(const float* row, std::int64_t blocks, float* out);

  // Sum over i of exp((values[i] - highest) / temperature), lane i % 16 first, then the lanes in halves. If `out` is not
  // null, the terms too. [n], no alignment and no padding needed
  double (*exps)(const float* values, std::int64_t n, double highest, double temperature, double* out);

  // Sum over i with values[i] >= floor of round(2**44 exp((values[i] - highest) / temperature)). [n], n a multiple of 64
  std::uint64_t (*mass)(const float* values, std::int64_t n, float floor, double highest, double temperature);

  // Bit i: values[i] >= floor. [64]
  std::uint64_t (*at_least)(const float* values, float floor);

  // words[16 w + g] = the word of token 4 g + w of the block. [64]
  void (*words)(const Place& place, std::uint32_t block, std::uint32_t* words);

  // Bit i: words[i] >= threshold. [64]
  std::uint64_t (*words_at_least)(const std::uint32_t* words, std::uint32_t threshold);

  // Gumbel noise of tokens 0 ... n - 1. [n]
  void (*gumbels)(const Place& place, std::int64_t n, double* out);

  // Gumbel noise of these tokens. [n]
  void (*gumbels_of)(const Place& place, const std::int32_t* tokens, std::int64_t n, double* out);

  // out[i] = log(p[i]) + out[i], or -inf where p[i] is not a positive normal number. [n]
  void (*add_logs)(const double* p, std::int64_t n, double* out);
};

extern const SamplingKernels sampling_portable;
#if defined(__x86_64__)
extern const SamplingKernels sampling_avx2;
extern const SamplingKernels sampling_avx512;
#endif

}  // namespace outrider
