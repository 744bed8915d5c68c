// Threads of our own that live as long as the process needs them and work in lockstep: one region per forward, its
// stages divided by barriers that cost a cache line's journey. Workers spin while a region runs and sleep soon after.
//
// Lockstep needs a core for every thread. Where other programs take one, each barrier waits for the system to give some
// thread its turn, and two threads are many times slower than one; and for a tiny model, so they are at any time. Whoever
// repeats a region therefore looks at what it waited (`Staffing`). Nothing that is computed depends on the number of
// threads, so results do not tell.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace outrider {

using Clock = std::chrono::steady_clock;

// What a region of a pool took, and how long the thread that waited most waited in it.
struct Report {
  Clock::duration took{}, waited{};
};

// How many threads a region should have that is run over and over: all; or half as many, for a while, after regions that
// waited too much; then all again, to see whether they have come back.
class Staffing {
 public:
  explicit Staffing(int threads) : all_(threads), now_(threads) {}
  int threads() const { return now_; }
  void learn(const Report& report);  // about a region of threads() threads

 private:
  int all_, now_;
  int stuck_ = 0;      // regions in a row that waited too much
  int rest_ = 0;       // regions until all threads are tried again
  int next_rest_ = 0;
};

class Pool {
 public:
  // The process's pool of `threads` threads, the caller's own included. Runners share it, so that a draft's workers
  // never spin against the target's.
  static std::shared_ptr<Pool> of(int threads);

  explicit Pool(int threads);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  int threads() const { return threads_; }

  // Calls body(thread) on threads [0, threads), thread 0 being the caller, and returns when all are done. `body` must
  // not throw. Regions of several callers run one after the other.
  template <class Body>
  Report run(int threads, Body&& body) {
    return begin(
        threads, [](void* context, int thread) { (*static_cast<std::remove_reference_t<Body>*>(context))(thread); },
        &body);
  }
  template <class Body>
  Report run(Body&& body) {
    return run(threads_, body);
  }

  // Within a region: returns once every thread of it has called it as often as this one.
  void barrier(int thread) {
    const std::uint64_t turn = seats_[thread].turn.load(std::memory_order_relaxed) + 1;
    seats_[thread].turn.store(turn, std::memory_order_release);
    for (int other = 0; other < region_threads_; ++other) {
      if (seats_[other].turn.load(std::memory_order_acquire) < turn) await(thread, other, turn);
    }
  }

 private:
  using Entry = void (*)(void* context, int thread);
  struct alignas(128) Seat {             // two lines: neighbours are fetched in pairs
    std::atomic<std::uint64_t> turn{0};  // the region's number in the upper half, barriers passed in the lower
    std::atomic<std::uint64_t> left{0};  // the last region that the thread is done with
    Clock::duration waited{};            // at barriers of this region; read when the thread has left
  };
  struct alignas(128) Bell {
    std::atomic<std::uint32_t> rung{0};
  };

  Report begin(int threads, Entry entry, void* context);
  void work(int thread);
  void enter(int thread, std::uint64_t region);
  void await(int thread, int other, std::uint64_t turn);

  const int threads_;
  std::mutex busy_;
  std::vector<Bell> bells_;  // by thread: rung when there is work
  std::vector<Seat> seats_;
  std::atomic<bool> stop_{false};
  // The current region.
  Entry entry_ = nullptr;
  void* context_ = nullptr;
  std::uint64_t region_ = 0;
  int region_threads_ = 0;
  std::vector<std::thread> workers_;
};

}  // namespace outrider
