// AVX-512 with VNNI: 8 rows x 32 columns in registers. With AVX512_BF16, in linear_bf16_avx512.cpp, also bf16 products.
#include "linear/vectors_avx512.h"

namespace outrider {
namespace {
constexpr bool kBf16 = false;
}
}  // namespace outrider

#include "linear/body.h"

namespace outrider {

const Kernels& kernels_avx512() {
  static constexpr Kernels here{prepare_here, multiply_here, kBf16};
  return here;
}

}  // namespace outrider
