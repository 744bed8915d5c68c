#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "linear/linear.h"

namespace outrider {
namespace {

constexpr std::size_t kHuge = std::size_t{2} << 20;
constexpr std::size_t kSmall = 4096;
constexpr std::size_t kChunk = std::size_t{64} << 20;

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// Virtual room only: the system gives pages as they are written, huge ones in the first `huge` bytes.
std::uint8_t* reserve(std::size_t bytes, std::size_t huge) {
  void* raw = mmap(nullptr, bytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw std::bad_alloc();
  std::uint8_t* begin = static_cast<std::uint8_t*>(raw);
  std::uint8_t* data = reinterpret_cast<std::uint8_t*>(round_up(reinterpret_cast<std::uintptr_t>(begin), kHuge));
  if (data > begin) munmap(begin, static_cast<std::size_t>(data - begin));
  const std::size_t after = static_cast<std::size_t>(begin + bytes + kHuge - (data + bytes));
  if (after > 0) munmap(data + bytes, after);
#if defined(MADV_HUGEPAGE)
  if (huge) madvise(data, huge, MADV_HUGEPAGE);  // a wish: without it everything works, some 15 % slower
#endif
  return data;
}

}  // namespace

std::uint8_t* Arena::allocate(std::size_t bytes) {
  bytes = round_up(std::max<std::size_t>(bytes, 1), kSmall);
  if (bytes > free_) {
    const std::size_t size = single_ ? bytes : round_up(std::max(bytes, kChunk), kHuge);
    // a huge page is there as a whole as soon as a byte of it is written
    chunks_.push_back({reserve(size, size / kHuge * kHuge), size});
    free_ = size;
  }
  Chunk& last = chunks_.back();
  std::uint8_t* piece = last.data + (last.size - free_);
  free_ -= bytes;
  used_ += bytes;
  return piece;
}

Arena::~Arena() {
  for (const Chunk& chunk : chunks_) munmap(chunk.data, chunk.size);
}

}  // namespace outrider
