#include "rope.h"

#include <algorithm>
#include <cmath>

namespace outrider {

Rope::Rope(std::vector<double> frequencies, double factor) : frequencies_(std::move(frequencies)), factor_(factor) {}

void Rope::reserve(std::int64_t positions) {
  if (positions <= positions_) return;
  const std::int64_t grown = std::max((positions + 255) / 256 * 256, positions_ * 2);
  tables_.resize(grown * 2 * half());
  for (std::int64_t position = positions_; position < grown; ++position) {
    float* row = tables_.data() + position * 2 * half();
    for (int i = 0; i < half(); ++i) {
      const double angle = static_cast<double>(position) * frequencies_[i];
      row[i] = static_cast<float>(std::cos(angle) * factor_);
      row[half() + i] = static_cast<float>(std::sin(angle) * factor_);
    }
  }
  positions_ = grown;
}

}  // namespace outrider
