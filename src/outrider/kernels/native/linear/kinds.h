// What packing takes from a file's blocks besides their values as fp32: the integers and scales themselves.
#pragma once

#include <cstdint>

#include "linear/linear.h"

namespace outrider {

// One row of a kind that int8 (Q8_0) or int4 (Q4_0, Q4_1, Q4_K) keeps as it is, in groups of 32.
//   Q8_0  weight = scale * (q - 128)          q [columns] in 0..255
//   Q4_0  weight = scale * q + offset         q in 0..15, offset = -8 * scale
//   Q4_1  the same with its own offset
//   Q4_K  the same with scale = d * s, offset = -(m * t)
void split(Kind kind, const std::uint8_t* row, std::int64_t columns, std::uint8_t* q, float* scale, float* offset);

// The scales of a row of Q4_K as they stand: d, m [columns / 256] half; s, t [columns / 32].
void split_scales(const std::uint8_t* row, std::int64_t columns, std::uint16_t* d, std::uint16_t* m, std::uint8_t* s,
                  std::uint8_t* t);

}  // namespace outrider
