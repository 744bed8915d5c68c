// 16-wide vectors in two registers each, for AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace outrider {
namespace {

#define OUTRIDER_OP __attribute__((always_inline)) inline

constexpr int kRows = 4, kBlocks = 1;
constexpr bool kBf16 = false;

struct Floats {
  __m256 v[2];
};
struct Ints {
  __m256i v[2];
};
struct Bytes {
  __m256i v[2];
};
using Nibbles = Bytes;
struct Right {
  __m256i v;
};

OUTRIDER_OP Floats load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
OUTRIDER_OP void store(float* p, Floats a) {
  _mm256_storeu_ps(p, a.v[0]);
  _mm256_storeu_ps(p + 8, a.v[1]);
}
OUTRIDER_OP Floats spread(float x) {
  const __m256 all = _mm256_set1_ps(x);
  return {{all, all}};
}
OUTRIDER_OP Floats spread(const float* p) { return spread(*p); }
OUTRIDER_OP Floats zero_floats() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
OUTRIDER_OP Floats add(Floats a, Floats b) { return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}}; }
OUTRIDER_OP Floats mul(Floats a, Floats b) { return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}}; }
OUTRIDER_OP Floats div(Floats a, Floats b) { return {{_mm256_div_ps(a.v[0], b.v[0]), _mm256_div_ps(a.v[1], b.v[1])}}; }
OUTRIDER_OP Floats fma(Floats a, Floats b, Floats c) {
  return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
OUTRIDER_OP Floats negative(Floats a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {{_mm256_xor_ps(a.v[0], sign), _mm256_xor_ps(a.v[1], sign)}};
}
OUTRIDER_OP Floats magnitude(Floats a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {{_mm256_andnot_ps(sign, a.v[0]), _mm256_andnot_ps(sign, a.v[1])}};
}
OUTRIDER_OP Floats at_least(Floats bound, Floats x) {  // NaN of x stays
  return {{_mm256_max_ps(bound.v[0], x.v[0]), _mm256_max_ps(bound.v[1], x.v[1])}};
}
OUTRIDER_OP Floats at_most(Floats bound, Floats x) {
  return {{_mm256_min_ps(bound.v[0], x.v[0]), _mm256_min_ps(bound.v[1], x.v[1])}};
}
OUTRIDER_OP Floats round_even(Floats a) {
  constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {{_mm256_round_ps(a.v[0], how), _mm256_round_ps(a.v[1], how)}};
}
OUTRIDER_OP Floats times_two_to(Floats a, Floats n) {  // |n| <= 126
  Floats out;
  for (int i = 0; i < 2; ++i) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v[i]), _mm256_set1_epi32(127));
    out.v[i] = _mm256_mul_ps(a.v[i], _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  }
  return out;
}
OUTRIDER_OP float highest(Floats a) {
  const __m256 eight = _mm256_max_ps(a.v[0], a.v[1]);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

OUTRIDER_OP void add_product(Floats& sum, Floats a, Floats b) { sum = fma(a, b, sum); }

OUTRIDER_OP Floats load_halves(const std::uint8_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {{_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))}};
}
OUTRIDER_OP Floats load_small(const std::uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {{_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
           _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)))}};
}
OUTRIDER_OP Bytes load_bytes(const std::uint8_t* p) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(p);
  return {{_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)}};
}
OUTRIDER_OP void widen(const std::uint8_t* p, Floats& even, Floats& odd) {
  const Bytes pairs = load_bytes(p);
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  for (int i = 0; i < 2; ++i) {
    even.v[i] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs.v[i], 16));
    odd.v[i] = _mm256_castsi256_ps(_mm256_and_si256(pairs.v[i], mask));
  }
}

OUTRIDER_OP Ints zero_ints() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
OUTRIDER_OP Ints spread(const std::int32_t* p) {
  const __m256i all = _mm256_set1_epi32(*p);
  return {{all, all}};
}
OUTRIDER_OP Ints add(Ints a, Ints b) { return {{_mm256_add_epi32(a.v[0], b.v[0]), _mm256_add_epi32(a.v[1], b.v[1])}}; }
OUTRIDER_OP Floats to_floats(Ints a) { return {{_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}}; }
OUTRIDER_OP Ints to_ints(Floats a) { return {{_mm256_cvtps_epi32(a.v[0]), _mm256_cvtps_epi32(a.v[1])}}; }
OUTRIDER_OP std::int32_t total(Ints a) {
  const __m256i eight = _mm256_add_epi32(a.v[0], a.v[1]);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
OUTRIDER_OP void store_small(std::int8_t* p, Ints a) {
  const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.v[0], a.v[1]), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1)));
}

OUTRIDER_OP int prepare_first(const float*, std::uint8_t*, std::int8_t*, int, bool) { return 0; }  // no shortcut
OUTRIDER_OP Right right(const std::uint8_t* p) {
  return {_mm256_set1_epi32(*reinterpret_cast<const std::int32_t*>(p))};
}
OUTRIDER_OP void split_nibbles(Bytes a, Nibbles& low, Nibbles& high) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int i = 0; i < 2; ++i) {
    low.v[i] = _mm256_and_si256(a.v[i], mask);
    high.v[i] = _mm256_and_si256(_mm256_srli_epi16(a.v[i], 4), mask);
  }
}

}  // namespace
}  // namespace outrider
