#include "pool.h"

#include <algorithm>
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
// Rounds of spinning after which a thread looks at the clock, and after which it lets others run: who it waits for may
// have no core.
constexpr int kShort = 100, kPatience = 2000;
// A region was stuck if one of its threads waited so long, and for two fifths of the time: two that share a core wait for
// half of it each.
constexpr std::chrono::microseconds kLongWait{20};
// So many stuck regions in a row are no accident. A try after a rest begins at the second, not higher: its first region
// waits for threads that have fallen asleep.
constexpr int kStuck = 3;
// Regions with fewer threads before all are tried again: at first, and after many tries in vain.
constexpr int kFirstRest = 16, kLastRest = 512;

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

Pool::Pool(int threads)
    : threads_(threads), bells_(std::clamp(threads, 0, 1024)), seats_(std::clamp(threads, 0, 1024)) {
  if (threads < 1 || threads > 1024) {
    throw std::invalid_argument("threads: " + std::to_string(threads) + " is outside [1, 1024]");
  }
  for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Pool::~Pool() {
  stop_.store(true, std::memory_order_relaxed);
  for (Bell& bell : bells_) {
    bell.rung.fetch_add(1, std::memory_order_release);
    bell.rung.notify_one();
  }
  for (auto& worker : workers_) worker.join();
}

Report Pool::begin(int threads, Entry entry, void* context) {
  const std::lock_guard lock(busy_);
  entry_ = entry;
  context_ = context;
  region_threads_ = std::clamp(threads, 1, threads_);
  ++region_;
  const auto began = Clock::now();
  for (int thread = 1; thread < region_threads_; ++thread) {
    bells_[thread].rung.fetch_add(1, std::memory_order_release);
    bells_[thread].rung.notify_one();
  }
  enter(0, region_);
  for (int thread = 1; thread < region_threads_; ++thread) {
    for (int round = 0; seats_[thread].left.load(std::memory_order_acquire) != region_; ++round) {
      round < kPatience ? pause() : std::this_thread::yield();
    }
  }
  Report report{Clock::now() - began, {}};
  for (int thread = 0; thread < region_threads_; ++thread) report.waited = std::max(report.waited, seats_[thread].waited);
  return report;
}

void Pool::enter(int thread, std::uint64_t region) {
  Seat& seat = seats_[thread];
  seat.waited = {};
  seat.turn.store(region << 32, std::memory_order_release);
  entry_(context_, thread);
  seat.left.store(region, std::memory_order_release);
}

void Pool::work(int thread) {
  std::uint32_t heard = 0;
  const std::atomic<std::uint32_t>& rung = bells_[thread].rung;
  for (;;) {
    const auto since = Clock::now();
    while (rung.load(std::memory_order_acquire) == heard) {
      for (int i = 0; i < 64 && rung.load(std::memory_order_acquire) == heard; ++i) pause();
      if (Clock::now() - since > kLinger) rung.wait(heard, std::memory_order_acquire);
    }
    ++heard;
    if (stop_.load(std::memory_order_relaxed)) return;
    enter(thread, region_);
  }
}

void Pool::await(int thread, int other, std::uint64_t turn) {
  const auto behind = [&] { return seats_[other].turn.load(std::memory_order_acquire) < turn; };
  for (int round = 0; round < kShort; ++round) {
    if (!behind()) return;
    pause();
  }
  const auto since = Clock::now();
  for (int round = kShort; behind(); ++round) round < kPatience ? pause() : std::this_thread::yield();
  seats_[thread].waited += Clock::now() - since;
}

void Staffing::learn(const Report& report) {
  if (now_ < all_) {
    if (--rest_ == 0) now_ = all_;
    return;
  }
  if (report.waited < kLongWait || 5 * report.waited < 2 * report.took) {
    stuck_ = 0;
    next_rest_ = kFirstRest;
    return;
  }
  if (++stuck_ < kStuck) return;
  stuck_ = 1;
  now_ = std::max(1, all_ / 2);
  rest_ = std::max(next_rest_, kFirstRest);
  next_rest_ = std::min(2 * rest_, kLastRest);
}

}  // namespace outrider
