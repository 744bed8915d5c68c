// Threads of our own that live as long as the process needs them and work in lockstep: one region per forward, its
// stages divided by barriers that cost a cache line's journey. Workers spin while a region runs and sleep soon after.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace outrider {

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

  // Calls body(thread) on every thread, thread 0 being the caller, and returns when all are done. `body` must not
  // throw. Regions of several callers run one after the other.
  template <class Body>
  void run(Body&& body) {
    begin([](void* context, int thread) { (*static_cast<std::remove_reference_t<Body>*>(context))(thread); }, &body);
  }

  // Within a region: returns once every thread has called it as often as this one.
  void barrier(int thread) {
    const std::uint32_t turn = flags_[thread].value.load(std::memory_order_relaxed) + 1;
    flags_[thread].value.store(turn, std::memory_order_release);
    for (int other = 0; other < threads_; ++other) {
      if (static_cast<std::int32_t>(flags_[other].value.load(std::memory_order_acquire) - turn) < 0) await(other, turn);
    }
  }

 private:
  using Entry = void (*)(void* context, int thread);
  struct alignas(128) Flag {  // two lines: neighbours are fetched in pairs
    std::atomic<std::uint32_t> value{0};
  };

  void begin(Entry entry, void* context);
  void work(int thread);
  void await(int other, std::uint32_t turn);

  const int threads_;
  std::mutex busy_;
  Entry entry_ = nullptr;
  void* context_ = nullptr;
  Flag region_;              // counts regions; workers wait for it to change
  std::vector<Flag> flags_;  // barriers passed, by thread
  std::atomic<bool> stop_{false};
  std::vector<std::thread> workers_;
};

}  // namespace outrider
