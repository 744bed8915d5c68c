// Sixteen floats at a time, for AVX-512. See simd_portable.h for what each operation means.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace outrider {
namespace {

struct F {
  __m512 v;
};

inline F zero() { return {_mm512_setzero_ps()}; }
inline F all(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F larger(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F largest(F a) {
  __m512 x = _mm512_max_ps(a.v, _mm512_shuffle_f32x4(a.v, a.v, 0x4e));
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
  return {_mm512_max_ps(x, _mm512_permute_ps(x, 0xb1))};
}
inline bool differ(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ) != 0; }

inline F first(int count, F a, float other) {
  const __mmask16 mask = count >= 16 ? 0xffff : count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
  return {_mm512_mask_blend_ps(mask, _mm512_set1_ps(other), a.v)};
}

inline float sum(F a) {
  const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

inline void split(F x, F& whole, F& rest) {
  whole.v = _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  rest.v = _mm512_sub_ps(x.v, whole.v);
}

constexpr float kLowest = -200.0f;  // 2^-200 is 0 once rounded

inline F scale_by_power(F x, F whole) { return {_mm512_scalef_ps(x.v, whole.v)}; }

inline void unpack_bf16(const std::uint16_t* p, F& even, F& odd) {
  const __m512i x = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
}  // namespace outrider
