#include "rows.h"

#include "linear/isa.h"

namespace outrider {

RowKernels portable_row_kernels();
#if defined(__x86_64__)
RowKernels avx2_row_kernels();
RowKernels avx512_row_kernels();
#endif

const RowKernels& row_kernels() {
  static const RowKernels kernels = [] {
    RowKernels chosen = portable_row_kernels();
#if defined(__x86_64__)
    switch (isa()) {
      case Isa::portable: break;
      case Isa::avx2:
      case Isa::avxvnni: chosen = avx2_row_kernels(); break;
      case Isa::avx512:
        chosen = avx512_row_kernels();
        chosen.pairs = has_bf16_dot();
        break;
    }
#endif
    return chosen;
  }();
  return kernels;
}

std::size_t attention_scratch(int padded) {
  // a tile gathered and one converted, keys and values, their scales, and the sums and weights of at most eight queries
  return (4 * kTileRows * static_cast<std::size_t>(padded) + 2 * kTileRows + 8 * (padded + kTileRows)) * sizeof(float);
}

}  // namespace outrider
