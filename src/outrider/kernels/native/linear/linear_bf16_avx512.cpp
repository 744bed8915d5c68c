// AVX-512 with VNNI and BF16.
#include "linear/vectors_avx512.h"

namespace outrider {
namespace {
constexpr bool kBf16 = true;
}
}  // namespace outrider

#include "linear/body.h"

namespace outrider {

const Kernels& kernels_avx512_bf16() {
  static constexpr Kernels here{prepare_here, multiply_here, kBf16};
  return here;
}

}  // namespace outrider
