#include "simd_portable.h"

namespace outrider {
namespace {
constexpr int kQueries = 3;
constexpr int kColumns = 1;
}  // namespace
}  // namespace outrider

#include "rows_body.h"

namespace outrider {

RowKernels portable_row_kernels() { return {rms_norm, attend, expect, put_query, put_row, false}; }

}  // namespace outrider
