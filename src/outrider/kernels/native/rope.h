// Rotary position embeddings: tables of cosines and sines, grown as positions are used.
#pragma once

#include <cstdint>
#include <vector>

namespace outrider {

class Rope {
 public:
  Rope() = default;
  // Radians per position of each pair [d / 2], and the factor on cosine and sine (models/rope.py).
  Rope(std::vector<double> frequencies, double factor);

  void reserve(std::int64_t positions);  // makes tables of positions [0, positions); not while a pass runs
  const float* cosines(std::int64_t position) const { return tables_.data() + position * 2 * half(); }
  const float* sines(std::int64_t position) const { return cosines(position) + half(); }
  int half() const { return static_cast<int>(frequencies_.size()); }
  std::size_t bytes() const { return tables_.capacity() * sizeof(float); }

 private:
  std::vector<double> frequencies_;
  double factor_ = 1.0;
  std::int64_t positions_ = 0;
  std::vector<float> tables_;  // [positions][2][d / 2]
};

}  // namespace outrider
