// AVX2 with VNNI for its 32-byte registers (Alder Lake, Zen 5 and later).
#include "linear/vectors_avx2.h"

namespace outrider {
namespace {

constexpr bool kSigned = false;
using Left = Bytes;

OUTRIDER_OP Left left(Bytes a) { return a; }
OUTRIDER_OP void dot(Ints& sum, Bytes weights, Right activations) {
  for (int i = 0; i < 2; ++i)
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.v[i]) : "x"(weights.v[i]), "x"(activations.v));
}

}  // namespace
}  // namespace outrider

#include "linear/body.h"

namespace outrider {

const Kernels& kernels_avxvnni() {
  static constexpr Kernels here{prepare_here, multiply_here, kBf16};
  return here;
}

}  // namespace outrider
