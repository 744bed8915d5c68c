// AVX2 without VNNI: products of bytes go through 16 bits.
#include "linear/vectors_avx2.h"

namespace outrider {
namespace {

constexpr bool kSigned = true;

// Two products of bytes must fit 16 bits: |weight| <= 128 and |activation| <= 127 do (32512), a weight of 0..255 does not.
// So the sign moves from the weight to the activation.
struct Left {
  __m256i sign[2], magnitude[2];
};

OUTRIDER_OP Left left(Bytes a) {
  Left out;
  for (int i = 0; i < 2; ++i) {
    out.sign[i] = _mm256_xor_si256(a.v[i], _mm256_set1_epi8(static_cast<char>(0x80)));
    out.magnitude[i] = _mm256_abs_epi8(out.sign[i]);
  }
  return out;
}

OUTRIDER_OP void dot(Ints& sum, Nibbles weights, Right activations) {
  for (int i = 0; i < 2; ++i) {
    const __m256i pairs = _mm256_maddubs_epi16(weights.v[i], activations.v);
    sum.v[i] = _mm256_add_epi32(sum.v[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
}
OUTRIDER_OP void dot(Ints& sum, const Left& weights, Right activations) {
  for (int i = 0; i < 2; ++i) {
    const __m256i pairs = _mm256_maddubs_epi16(weights.magnitude[i], _mm256_sign_epi8(activations.v, weights.sign[i]));
    sum.v[i] = _mm256_add_epi32(sum.v[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
}

}  // namespace
}  // namespace outrider

#include "linear/body.h"

namespace outrider {

const Kernels& kernels_avx2() {
  static constexpr Kernels here{prepare_here, multiply_here, kBf16};
  return here;
}

}  // namespace outrider
