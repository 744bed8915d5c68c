// 16-wide vectors in one register each. The products that accumulate are written as instructions, since compilers copy
// the accumulators of their intrinsics around (GCC 12: 32 moves per 16 products).
#pragma once

#include <immintrin.h>

#include <cstdint>

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
OUTRIDER_OP void store_small(std::uint8_t* p, Ints a) {  // 16 int8
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

}  // namespace
}  // namespace outrider
