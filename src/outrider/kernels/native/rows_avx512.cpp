// GCC 12 takes the undefined operands in its own intrinsics for uninitialised variables.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "simd_avx512.h"

namespace outrider {
namespace {
constexpr int kQueries = 6;  // queries that are computed together: 6 x 4 sums, 4 values and a weight fill 29 registers
constexpr int kColumns = 4;  // vectors of values
}  // namespace
}  // namespace outrider
#define OUTRIDER_PAIRS

#include "rows_body.h"

namespace outrider {

RowKernels avx512_row_kernels() { return {rms_norm, attend, expect, put_query, put_row, true}; }

}  // namespace outrider
