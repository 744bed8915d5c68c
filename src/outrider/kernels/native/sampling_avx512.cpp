// The loops over a row of logits for AVX-512 (F, BW, VL, DQ).
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12 warns about its own header's _mm512_undefined_*
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "sampling_kernels.h"

namespace outrider {
namespace {

constexpr int kWidth = 8, kTogether = 8;
using F64 = double __attribute__((vector_size(64)));
using U64 = std::uint64_t __attribute__((vector_size(64)));

inline F64 widen(const float* x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }
inline F64 maximum(F64 a, F64 b) { return _mm512_max_pd(a, b); }
inline F64 zero_below(F64 x, F64 least) { return _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x, least, _CMP_GE_OQ), x); }
inline U64 multiply(U64 a, U64 b) {
  return __builtin_bit_cast(U64, _mm512_mul_epu32(__builtin_bit_cast(__m512i, a), __builtin_bit_cast(__m512i, b)));
}
inline unsigned mask_at_least(U64 x, std::uint32_t threshold) {
  return _mm512_cmpge_epu64_mask(__builtin_bit_cast(__m512i, x), _mm512_set1_epi64(threshold));
}

inline bool maximum64(const float* x, float& out) {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16), c = _mm512_loadu_ps(x + 32),
               d = _mm512_loadu_ps(x + 48), infinity = _mm512_set1_ps(__builtin_inff());
  const unsigned bad = _mm512_cmp_ps_mask(a, infinity, _CMP_NLT_UQ) | _mm512_cmp_ps_mask(b, infinity, _CMP_NLT_UQ) |
                       _mm512_cmp_ps_mask(c, infinity, _CMP_NLT_UQ) | _mm512_cmp_ps_mask(d, infinity, _CMP_NLT_UQ);
  out = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d)));
  return !bad;
}
std::uint64_t at_least64(const float* x, float floor) {
  std::uint64_t mask = 0;
  for (int i = 0; i < kBlock; i += 16)
    mask |= std::uint64_t{_mm512_cmp_ps_mask(_mm512_loadu_ps(x + i), _mm512_set1_ps(floor), _CMP_GE_OQ)} << i;
  return mask;
}

#include "sampling_lanes.h"

}  // namespace

const SamplingKernels sampling_avx512 = {maxima, exps, mass, at_least64, words_of_block, words_at_least, gumbels,
gumbels_of, add_logs};

}  // namespace outrider
