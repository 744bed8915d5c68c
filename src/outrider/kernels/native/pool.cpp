#include "pool.h"

#include <chrono>
#include <map>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outrider {
namespace {

// Long enough to bridge the moments between two forwards of one loop, far too short to be seen as load.
constexpr std::chrono::microseconds kLinger{40};
// Rounds of waiting after which a thread lets others run: someone it waits for may have no core at the moment.
constexpr int kPatience = 2000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

std::shared_ptr<Pool> Pool::of(int threads) {
  static std::mutex guard;
  static std::map<int, std::weak_ptr<Pool>> pools;
  const std::lock_guard lock(guard);
  auto pool = pools[threads].lock();
  if (!pool) pools[threads] = pool = std::make_shared<Pool>(threads);
  return pool;
}

Pool::Pool(int threads) : threads_(threads), flags_(threads < 1 ? 0 : threads) {
  if (threads < 1 || threads > 1024) {
    throw std::invalid_argument("threads: " + std::to_string(threads) + " is outside [1, 1024]");
  }
  for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
  stop_.store(true, std::memory_order_relaxed);
  region_.value.fetch_add(1, std::memory_order_release);
  region_.value.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::begin(Entry entry, void* context) {
  const std::lock_guard lock(busy_);
  entry_ = entry;
  context_ = context;
  region_.value.fetch_add(1, std::memory_order_release);
  region_.value.notify_all();
  entry(context, 0);
  barrier(0);
}

void Pool::work(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    const auto since = std::chrono::steady_clock::now();
    while (region_.value.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < 64 && region_.value.load(std::memory_order_acquire) == seen; ++i) pause();
      if (std::chrono::steady_clock::now() - since > kLinger) region_.value.wait(seen, std::memory_order_acquire);
    }
    ++seen;
    if (stop_.load(std::memory_order_relaxed)) return;
    entry_(context_, thread);
    barrier(thread);
  }
}

void Pool::await(int other, std::uint32_t turn) {
  for (int round = 0;; ++round) {
    if (static_cast<std::int32_t>(flags_[other].value.load(std::memory_order_acquire) - turn) >= 0) return;
    if (round < kPatience) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace outrider
