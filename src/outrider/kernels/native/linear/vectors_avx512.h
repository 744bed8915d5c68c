// 16-wide vectors in one register each. The products that accumulate are written as instructions, since compilers copy
// the accumulators of their intrinsics around (GCC 12: 32 moves per 16 products).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "linear/layout.h"

namespace outrider {
namespace {

#define OUTRIDER_OP __attribute__((always_inline)) inline

constexpr int kRows = 8, kBlocks = 2;
constexpr bool kSigned = false;

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};
struct Bytes {  // of weights: 16 columns x 4
  __m512i v;
};
using Left = Bytes;
using Nibbles = Bytes;
using Right = Bytes;  // 4 bytes of activations, for all columns

OUTRIDER_OP Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
OUTRIDER_OP void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
OUTRIDER_OP Floats spread(const float* p) { return {_mm512_set1_ps(*p)}; }
OUTRIDER_OP Floats spread(float x) { return {_mm512_set1_ps(x)}; }
OUTRIDER_OP Floats zero_floats() { return {_mm512_setzero_ps()}; }
OUTRIDER_OP Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
OUTRIDER_OP Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
OUTRIDER_OP Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
OUTRIDER_OP Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
OUTRIDER_OP Floats negative(Floats a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
OUTRIDER_OP Floats magnitude(Floats a) { return {_mm512_abs_ps(a.v)}; }
OUTRIDER_OP Floats at_least(Floats bound, Floats x) { return {_mm512_max_ps(bound.v, x.v)}; }  // NaN of x stays
OUTRIDER_OP Floats at_most(Floats bound, Floats x) { return {_mm512_min_ps(bound.v, x.v)}; }
OUTRIDER_OP Floats round_even(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
OUTRIDER_OP Floats times_two_to(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }
OUTRIDER_OP float highest(Floats a) { return _mm512_reduce_max_ps(a.v); }

OUTRIDER_OP void add_product(Floats& sum, Floats a, Floats b) { sum.v = _mm512_fmadd_ps(a.v, b.v, sum.v); }

OUTRIDER_OP Floats load_halves(const std::uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
OUTRIDER_OP Floats load_small(const std::uint8_t* p) {  // 16 u8
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
OUTRIDER_OP void widen(const std::uint8_t* p, Floats& even, Floats& odd) {  // 16 pairs of bf16
  const __m512i pairs = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

OUTRIDER_OP Ints zero_ints() { return {_mm512_setzero_si512()}; }
OUTRIDER_OP Ints spread(const std::int32_t* p) { return {_mm512_set1_epi32(*p)}; }
OUTRIDER_OP Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
OUTRIDER_OP Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
OUTRIDER_OP Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
OUTRIDER_OP std::int32_t total(Ints a) { return _mm512_reduce_add_epi32(a.v); }
OUTRIDER_OP void store_small(std::int8_t* p, Ints a) {  // 16 int8
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}

OUTRIDER_OP Bytes load_bytes(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
OUTRIDER_OP Left left(Bytes a) { return a; }
OUTRIDER_OP Right right(const std::uint8_t* p) {
  return {_mm512_set1_epi32(*reinterpret_cast<const std::int32_t*>(p))};
}
OUTRIDER_OP void split_nibbles(Bytes a, Nibbles& low, Nibbles& high) {
  const __m512i mask = _mm512_set1_epi8(15);
  low.v = _mm512_and_si512(a.v, mask);
  high.v = _mm512_and_si512(_mm512_srli_epi16(a.v, 4), mask);
}
OUTRIDER_OP void dot(Ints& sum, Bytes weights, Right activations) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(weights.v), "v"(activations.v));
}
OUTRIDER_OP void add_pairs(Floats& sum, Bytes weights, Right activations) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum.v) : "v"(weights.v), "v"(activations.v));
}
OUTRIDER_OP void store_bf16(std::uint8_t* p, Floats a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
}

// The lane-wise operation f over all 16 lanes of each of four vectors: every 128-bit part of the result holds the four.
template <class F>
OUTRIDER_OP __m512 across(__m512 a, __m512 b, __m512 c, __m512 d, F f) {
  const __m512 ab = f(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = f(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  __m512 all = f(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  all = f(all, _mm512_shuffle_f32x4(all, all, 0x4e));
  return f(all, _mm512_shuffle_f32x4(all, all, 0xb1));
}

// The heads of four groups: { scale ; -128 * sum }, or { scale ; -8 * sum ; scale * sum ; unused }.
OUTRIDER_OP void store_heads(std::uint8_t* head, __m128 scale, __m128i sum, bool four) {
  float* out = reinterpret_cast<float*>(head);
  const __m128 start = _mm_castsi128_ps(_mm_sub_epi32(_mm_setzero_si128(), _mm_slli_epi32(sum, four ? 3 : 7)));
  const __m128 low = _mm_unpacklo_ps(scale, start), high = _mm_unpackhi_ps(scale, start);
  if (!four) {
    _mm_storeu_ps(out, low);
    _mm_storeu_ps(out + 4, high);
    return;
  }
  const __m128 scaled = _mm_mul_ps(scale, _mm_cvtepi32_ps(sum));
  const __m128 more_low = _mm_unpacklo_ps(scaled, scaled), more_high = _mm_unpackhi_ps(scaled, scaled);
  _mm_storeu_ps(out, _mm_movelh_ps(low, more_low));
  _mm_storeu_ps(out + 4, _mm_movehl_ps(more_low, low));
  _mm_storeu_ps(out + 8, _mm_movelh_ps(high, more_high));
  _mm_storeu_ps(out + 12, _mm_movehl_ps(more_high, high));
}

// What prepare_ints<32> does, for the first groups. Returns how many. A division serves 16 groups, a reduction across lanes
// four of them.
OUTRIDER_OP int prepare_first(const float* x, std::uint8_t* head, std::int8_t* out, int groups, bool four) {
  // Packing works within 128-bit parts; this puts the dwords of two groups back in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const int all = groups / 4 * 4;
  for (int first = 0; first < all; first += 16) {
    const int fours = all - first < 16 ? (all - first) / 4 : 4;
    __m128 four_peaks[4] = {_mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps()};
    for (int f = 0; f < fours; ++f) {
      const auto peak = [&](int i) {  // the larger magnitude of two
        const float* p = x + 32 * (4 * f + i);
        return _mm512_range_ps(_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16), 0x0b);
      };
      four_peaks[f] = _mm512_castps512_ps128(
          across(peak(0), peak(1), peak(2), peak(3), [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); }));
    }
    __m512 peaks = _mm512_insertf32x4(_mm512_castps128_ps512(four_peaks[0]), four_peaks[1], 1);
    peaks = _mm512_insertf32x4(_mm512_insertf32x4(peaks, four_peaks[2], 2), four_peaks[3], 3);
    alignas(64) float scales[16], inverses[16];
    const __mmask16 some = _mm512_cmp_ps_mask(peaks, _mm512_set1_ps(1e-30f), _CMP_GE_OQ);
    _mm512_store_ps(inverses, _mm512_maskz_div_ps(some, _mm512_set1_ps(127.0f), peaks));
    _mm512_store_ps(scales, _mm512_maskz_mul_ps(some, peaks, _mm512_set1_ps(1.0f / 127.0f)));
    for (int f = 0; f < fours; ++f, x += 128, out += 128, head += 4 * (four ? kInt4Head : kInt8Head)) {
      __m512i q[8];
      for (int i = 0; i < 8; ++i)
        q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * i), _mm512_set1_ps(inverses[4 * f + i / 2])));
      for (int i = 0; i < 2; ++i) {
        const __m512i bytes =
            _mm512_packs_epi16(_mm512_packs_epi32(q[4 * i], q[4 * i + 1]), _mm512_packs_epi32(q[4 * i + 2], q[4 * i + 3]));
        _mm512_storeu_si512(out + 64 * i, _mm512_permutexvar_epi32(order, bytes));
      }
      const auto sum = [&](int i) { return _mm512_castsi512_ps(_mm512_add_epi32(q[2 * i], q[2 * i + 1])); };
      const __m512 four_sums = across(sum(0), sum(1), sum(2), sum(3), [](__m512 a, __m512 b) {
        return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
      });
      store_heads(head, _mm_load_ps(scales + 4 * f), _mm_castps_si128(_mm512_castps512_ps128(four_sums)), four);
    }
  }
  return all;
}

}  // namespace
}  // namespace outrider
