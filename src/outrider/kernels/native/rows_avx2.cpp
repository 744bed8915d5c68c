#include "simd_avx2.h"

namespace outrider {
namespace {
constexpr int kQueries = 3;  // 3 x 2 sums of two registers each leave 4 of 16 for values and weights
constexpr int kColumns = 2;
}  // namespace
}  // namespace outrider

#include "rows_body.h"

namespace outrider {

RowKernels avx2_row_kernels() { return {rms_norm, attend, expect, put_query, put_row, false}; }

}  // namespace outrider
