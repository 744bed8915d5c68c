// Sixteen floats at a time as two halves, for AVX2 and FMA. See simd_portable.h for what each operation means.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace outrider {
namespace {

struct F {
  __m256 a, b;
};

inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F larger(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }

inline F largest(F x) {
  __m256 y = _mm256_max_ps(x.a, x.b);
  y = _mm256_max_ps(y, _mm256_permute2f128_ps(y, y, 1));
  y = _mm256_max_ps(y, _mm256_permute_ps(y, 0x4e));
  y = _mm256_max_ps(y, _mm256_permute_ps(y, 0xb1));
  return {y, y};
}
inline bool differ(F x, F y) {
  const __m256 a = _mm256_cmp_ps(x.a, y.a, _CMP_NEQ_UQ), b = _mm256_cmp_ps(x.b, y.b, _CMP_NEQ_UQ);
  return _mm256_movemask_ps(_mm256_or_ps(a, b)) != 0;
}

inline F first(int count, F x, float other) {
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i n = _mm256_set1_epi32(count);
  const __m256 o = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(o, x.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, low))),
          _mm256_blendv_ps(o, x.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, high)))};
}

inline float sum(F x) {
  const __m256 b = _mm256_add_ps(x.a, x.b);
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

inline void split(F x, F& whole, F& rest) {
  whole.a = _mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  whole.b = _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  rest = x - whole;
}

constexpr float kLowest = -127.0f;

inline F scale_by_power(F x, F whole) {
  const __m256i a = _mm256_slli_epi32(_mm256_cvtps_epi32(whole.a), 23);
  const __m256i b = _mm256_slli_epi32(_mm256_cvtps_epi32(whole.b), 23);
  const __m256 lowest = _mm256_set1_ps(kLowest);
  const __m256i scaled_a = _mm256_add_epi32(_mm256_castps_si256(x.a), a);
  const __m256i scaled_b = _mm256_add_epi32(_mm256_castps_si256(x.b), b);
  return {_mm256_and_ps(_mm256_cmp_ps(whole.a, lowest, _CMP_GT_OQ), _mm256_castsi256_ps(scaled_a)),
          _mm256_and_ps(_mm256_cmp_ps(whole.b, lowest, _CMP_GT_OQ), _mm256_castsi256_ps(scaled_b))};
}

inline void unpack_bf16(const std::uint16_t* p, F& even, F& odd) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(x, mask)), _mm256_castsi256_ps(_mm256_and_si256(y, mask))};
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
}  // namespace outrider
