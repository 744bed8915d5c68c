// What the machine itself can do, for benchmarks to be compared with.
#pragma once

#include <cstddef>

namespace outrider {

// A block of memory far larger than any cache, read again and again.
class Reader {
 public:
  explicit Reader(std::size_t bytes);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Reads the whole block once, each of `threads` threads its own part, and returns seconds.
  double read(int threads);

 private:
  struct Block;
  Block* block_;
};

}  // namespace outrider
