// A Llama-family decoder: all layers of a forward in one region of the thread pool.
//
// Letters: M rows of a pass, D hidden size, V vocabulary, W wanted layers.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "batch.h"
#include "cache.h"
#include "linear/linear.h"
#include "pool.h"
#include "rope.h"
#include "weights.h"

namespace outrider {

struct Buffer {
  explicit Buffer(std::size_t floats) : size(floats), data(reinterpret_cast<float*>(arena.allocate(4 * floats))) {}
  Arena arena{true};
  std::size_t size;  // floats
  float* data;
};

// What a forward leaves behind. Buffers are used again by the next forward, and live as long as somebody holds them.
struct Scores {
  std::shared_ptr<Buffer> logits;  // [scored rows, V], row i at data + i * stride
  std::int64_t rows = 0, stride = 0;
  std::shared_ptr<Buffer> hidden;  // [M, W, D]
};

// What a forward may have beside its batch.
struct Pass {
  const float* states = nullptr;  // [M, F] input of an EAGLE head: F = fusion.states, or D if `own`
  bool own = false;               // the states are the head's own outputs: the rows are guesses
  std::span<const int> layers;    // that are run, in order; none: all
};

class Decoder {
 public:
  Decoder(Weights weights, Rope rope, KvFormat kv_format, std::int64_t slots, std::shared_ptr<Pool> pool);

  const Shape& shape() const { return weights_.shape; }
  KvCache& cache() { return cache_; }

  // Runs every row of `batch` through all layers and writes their keys and values.
  // `wants`: l in [0, layers) is the residual stream after layer l, -1 the final normed state.
  // Throws std::invalid_argument for layers that the model lacks.
  Scores forward(const Batch& batch, std::span<const int> wants, const Pass& pass = {});

  const Fusion& fusion() const { return weights_.fusion; }
  const Linear& head() const { return weights_.head; }
  Pool& pool() { return *pool_; }
  int threads() const { return staffing_.threads(); }  // that its forwards have at present

  std::size_t weight_bytes() const { return weights_.bytes(); }
  std::size_t workspace_bytes() const;
  // Of a decoder that has met a long prompt, but for its tables, its logits and a target's states.
  static std::size_t workspace_bytes(const Shape& shape, const Fusion& fusion, int threads);

 private:
  class Step;

  void make_room(int rows);
  static float* grown(std::shared_ptr<Buffer>& buffer, std::int64_t floats);

  Weights weights_;
  std::vector<int> all_layers_;
  Rope rope_;
  KvCache cache_;
  std::shared_ptr<Pool> pool_;
  Staffing staffing_;
  std::mutex busy_;

  std::int64_t widest_ = 0;               // most columns that a product reads
  int capacity_ = 0;                      // rows that the workspace has room for
  std::unique_ptr<Buffer> workspace_;
  Activations shared_;                    // of all rows, each prepared by one thread
  std::vector<Activations> own_;          // by thread, of a few rows that each thread prepares for itself
  std::shared_ptr<Buffer> logits_, hidden_;
};

}  // namespace outrider
