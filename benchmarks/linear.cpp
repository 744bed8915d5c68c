// Linear layers alone: time and bandwidth by number of rows, against this machine's read bandwidth in the same run.
//
//   bench_linear [threads] [N x K ...]      default: 2 threads, the shapes of SmolLM2-135M and one of Qwen2.5-1.5B
//
// Each layer has so many copies that none is in a cache when its turn comes. Rows, formats and plain reading take turns, so
// that a drift of the machine meets all of them alike; medians are shown. A row's preparation is part of its time. M = 512
// shows the rate of arithmetic in a prefill.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "linear/linear.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#define PAUSE _mm_pause()
#else
#define PAUSE static_cast<void>(0)
#endif

using namespace outrider;

namespace {

// Waits busily, and lets others run after a while: whoever is waited for may have no core at the moment.
template <class Done>
void wait_until(Done done) {
  for (int i = 0; !done(); ++i) i < 10000 ? PAUSE : std::this_thread::yield();
}

// Threads that wait busily between two pieces of work.
class Crew {
 public:
  explicit Crew(int threads) : threads_(threads) {
    for (int t = 1; t < threads; ++t)
      helpers_.emplace_back([this, t] {
        for (int seen = 0;;) {
          wait_until([&] { return round_.load(std::memory_order_acquire) != seen; });
          ++seen;
          if (stop_) return;
          work_(t);
          done_.fetch_add(1, std::memory_order_release);
        }
      });
  }
  ~Crew() {
    stop_ = true;
    round_.fetch_add(1);
    for (std::thread& helper : helpers_) helper.join();
  }
  void run(std::function<void(int)> work) {
    work_ = std::move(work);
    done_ = 1;
    round_.fetch_add(1, std::memory_order_release);
    work_(0);
    wait_until([&] { return done_.load(std::memory_order_acquire) == threads_; });
  }
  int threads() const { return threads_; }

 private:
  int threads_;
  std::atomic<int> round_{0}, done_{0};
  bool stop_ = false;
  std::function<void(int)> work_;
  std::vector<std::thread> helpers_;
};

volatile std::uint64_t sink;

void read(const std::uint8_t* p, std::size_t bytes) {
  std::uint64_t sums[8] = {};
  for (std::size_t i = 0; i + 64 <= bytes; i += 64) {
    __builtin_prefetch(p + i + 8192);
    const std::uint64_t* line = reinterpret_cast<const std::uint64_t*>(p + i);
    for (int j = 0; j < 8; ++j) sums[j] ^= line[j];
  }
  std::uint64_t all = 0;
  for (std::uint64_t sum : sums) all ^= sum;
  sink = all;
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double median(std::vector<double>& times) {
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

void measure(Crew& crew, std::int64_t N, std::int64_t K, Format format) {
  const int T = crew.threads();
  // The weights' values do not matter to speed: random blocks of Q4_1 with small scales.
  std::vector<std::uint8_t> raw(static_cast<std::size_t>(N * row_bytes(Kind::Q4_1, K)));
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < raw.size(); i += 20) {
    raw[i] = raw[i + 2] = 0;
    raw[i + 1] = raw[i + 3] = 0x20;  // 2^-7
    for (std::size_t j = 4; j < 20; ++j) raw[i + j] = static_cast<std::uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
  }
  const Source source{Kind::Q4_1, raw.data(), N, K, row_bytes(Kind::Q4_1, K)};
  auto arena = std::make_shared<Arena>();
  std::vector<Linear> copies;
  do copies.emplace_back(format, std::span(&source, 1), nullptr, LinearOptions{.arena = arena});
  while (arena->bytes() < (std::size_t{320} << 20));
  const std::size_t bytes = copies[0].bytes();

  constexpr int kRows[] = {1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 512};
  constexpr int kCount = std::size(kRows);
  std::vector<float> x(static_cast<std::size_t>(kMaxRows * K)), y(static_cast<std::size_t>(kMaxRows * N));
  for (float& value : x) value = static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1.0f;
  Activations activations(kMaxRows, K);
  std::vector<double> times[kCount + 1];
  std::size_t turn = 0;
  const double start = seconds();
  for (int round = 0; round < 300 && (round < 5 || seconds() - start < 2.5); ++round)
    for (int i = 0; i <= kCount; ++i) {
      if (i < kCount && kRows[i] > 16 && round % 16 != 0) continue;
      const Linear& linear = copies[turn++ % copies.size()];
      if (i == kCount) {
        const std::uint8_t* data = linear.data();
        const double begin = seconds();
        crew.run([&](int t) { read(data + bytes / 64 * t / T * 64, bytes / 64 / T * 64); });
        times[i].push_back(seconds() - begin);
        continue;
      }
      const int M = kRows[i];
      const double begin = seconds();
      crew.run([&](int t) {
        for (int r = t; r < M; r += T) activations.prepare(linear, x.data() + r * K, r);
      });
      crew.run([&](int t) {
        const Share mine = share(linear.units(), t, T);
        multiply(linear, activations, M, mine.begin, mine.end, y.data(), N, Epilogue::store);
      });
      times[i].push_back(seconds() - begin);
    }
  const double bus = static_cast<double>(bytes) / median(times[kCount]) / 1e9;
  const double one = median(times[0]), many = median(times[kCount - 1]);
  std::printf("%6lld x %-5lld %s/%-3d bus %5.1f GB/s | 1 %8.1f us %5.1f GB/s %3.0f%%", static_cast<long long>(N),
              static_cast<long long>(K), name(format), copies[0].group(), bus, one * 1e6, static_cast<double>(bytes) / one / 1e9,
              static_cast<double>(bytes) / one / bus / 1e7);
  for (int i = 1; i + 1 < kCount; ++i) std::printf(" | %d x%.2f", kRows[i], median(times[i]) / one);
  std::printf(" | %d %.0f GMAC/s\n", kRows[kCount - 1], 512.0 * static_cast<double>(N * K) / many / 1e9);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  Crew crew(argc > 1 ? std::atoi(argv[1]) : 2);
  std::vector<std::pair<std::int64_t, std::int64_t>> shapes;
  for (int i = 2; i + 1 < argc; i += 2) shapes.emplace_back(std::atoll(argv[i]), std::atoll(argv[i + 1]));
  if (shapes.empty()) shapes = {{960, 576}, {576, 576}, {3072, 576}, {576, 1536}, {49152, 576}, {8960, 1536}};
  std::printf("%s, %d threads\n", name(isa()), crew.threads());
  for (auto [N, K] : shapes)
    for (Format format : {Format::int8, Format::int4, Format::bf16, Format::fp32}) measure(crew, N, K, format);
}
