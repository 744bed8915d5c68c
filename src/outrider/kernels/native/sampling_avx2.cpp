// The loops over a row of logits for AVX2.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "sampling_kernels.h"

namespace outrider {
namespace {

constexpr int kWidth = 4, kTogether = 4;
using F64 = double __attribute__((vector_size(32)));
using U64 = std::uint64_t __attribute__((vector_size(32)));

inline F64 widen(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
inline F64 maximum(F64 a, F64 b) { return _mm256_max_pd(a, b); }
inline F64 zero_below(F64 x, F64 least) { return _mm256_and_pd(x, _mm256_cmp_pd(x, least, _CMP_GE_OQ)); }
inline U64 multiply(U64 a, U64 b) {
  return __builtin_bit_cast(U64, _mm256_mul_epu32(__builtin_bit_cast(__m256i, a), __builtin_bit_cast(__m256i, b)));
}
inline unsigned mask_at_least(U64 x, std::uint32_t threshold) {
  const __m256i below = _mm256_cmpgt_epi64(_mm256_set1_epi64x(threshold), __builtin_bit_cast(__m256i, x));
  return static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(below))) ^ 0xF;
}

inline bool maximum64(const float* x, float& out) {
  const __m256 infinity = _mm256_set1_ps(__builtin_inff());
  __m256 highest = _mm256_loadu_ps(x), bad = _mm256_cmp_ps(highest, infinity, _CMP_NLT_UQ);
  for (int i = 8; i < kBlock; i += 8) {
    const __m256 next = _mm256_loadu_ps(x + i);
    bad = _mm256_or_ps(bad, _mm256_cmp_ps(next, infinity, _CMP_NLT_UQ));
    highest = _mm256_max_ps(highest, next);
  }
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(highest), _mm256_extractf128_ps(highest, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  out = _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
  return !_mm256_movemask_ps(bad);
}
std::uint64_t at_least64(const float* x, float floor) {
  std::uint64_t mask = 0;
  for (int i = 0; i < kBlock; i += 8) {
    const __m256 kept = _mm256_cmp_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(floor), _CMP_GE_OQ);
    mask |= static_cast<std::uint64_t>(static_cast<unsigned>(_mm256_movemask_ps(kept))) << i;
  }
  return mask;
}

#include "sampling_lanes.h"

}  // namespace

const SamplingKernels sampling_avx2 = {maxima, exps, mass, at_least64, words_of_block, words_at_least, gumbels,
gumbels_of, add_logs};

}  // namespace outrider
