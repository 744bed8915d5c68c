#include "machine.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "linear/linear.h"
#include "pool.h"

namespace outrider {

struct Reader::Block {
  Arena arena;
  std::size_t size;
  std::uint8_t* data = arena.allocate(size);
  std::atomic<std::uint64_t> sum{0};  // somebody must want what was read
};

Reader::Reader(std::size_t bytes) : block_(new Block{.arena = {}, .size = bytes}) {
  std::memset(block_->data, 1, bytes);  // untouched pages would all be the one page of zeros
}

Reader::~Reader() { delete block_; }

namespace {

// Four streams of lines at once, fetched ahead: what one core can ask of memory.
std::uint64_t read_part(const std::uint8_t* begin, std::size_t bytes) {
  constexpr std::size_t kLine = 64, kStreams = 4, kAhead = 2048;
  const std::size_t part = bytes / kStreams / kLine * kLine;
  std::uint64_t sums[8] = {};
  for (std::size_t at = 0; at < part; at += kLine) {
    for (std::size_t stream = 0; stream < kStreams; ++stream) {
      const std::uint8_t* line = begin + stream * part + at;
      __builtin_prefetch(line + kAhead);
      std::uint64_t words[8];
      std::memcpy(words, line, kLine);
      for (int i = 0; i < 8; ++i) sums[i] += words[i];
    }
  }
  std::uint64_t total = 0;
  for (const std::uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

double Reader::read(int threads) {
  const auto pool = Pool::of(threads);
  const std::size_t part = block_->size / static_cast<std::size_t>(threads) / 4096 * 4096;
  const auto began = std::chrono::steady_clock::now();
  pool->run([&](int thread) {
    const std::uint64_t sum = read_part(block_->data + static_cast<std::size_t>(thread) * part, part);
    block_->sum.fetch_add(sum, std::memory_order_relaxed);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace outrider
