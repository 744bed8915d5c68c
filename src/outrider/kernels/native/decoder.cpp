#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "rows.h"

namespace outrider {
namespace {

// Up to so many rows, every thread converts the activations it multiplies for itself: cheaper than a barrier.
constexpr int kOwnRows = 4;

std::int64_t padded(std::int64_t floats) {
  const std::int64_t lines = (floats + 15) / 16 * 16;
  return lines % 1024 == 0 ? lines + 16 : lines;  // rows 4 KiB apart would all fall into the same few cache lines
}

std::int64_t qkv_width(const Shape& s) { return static_cast<std::int64_t>(s.heads + 2 * s.kv_heads) * s.head_dim; }
std::int64_t heads_width(const Shape& s) { return static_cast<std::int64_t>(s.heads) * s.head_dim; }
int padded_head(const Shape& s) { return (s.head_dim + 15) / 16 * 16; }

// Columns of the widest product.
std::int64_t widest(const Shape& s, const Fusion& fusion) {
  return std::max<std::int64_t>({s.hidden, heads_width(s), s.intermediate, fusion.states, fusion.version ? 2 * s.hidden : 0});
}

void check(const Shape& s) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument("the model has " + what); };
  if (s.layers < 1 || s.outputs < 1 || s.hidden < 1 || s.vocabulary < 1 || s.intermediate < 1) refuse("an empty dimension");
  if (s.heads < 1 || s.kv_heads < 1 || s.heads % s.kv_heads) {
    refuse(std::to_string(s.heads) + " query heads for " + std::to_string(s.kv_heads) + " key heads");
  }
  if (s.head_dim < 2 || s.head_dim % 2 || s.head_dim > 1024) {
    refuse("heads of " + std::to_string(s.head_dim) + " elements; even sizes from 2 to 1024 work");
  }
}

}  // namespace

// One pass of at most kMaxRows rows through all layers; `operator()` is what each thread does.
class Decoder::Step {
 public:
  Step(Decoder& decoder, const Batch& batch, const Pass& pass, int begin, int end, std::span<const int> wants,
       float* logits, std::int64_t logits_stride, float* hidden, int threads)
      : decoder_(decoder), weights_(decoder.weights_), shape_(weights_.shape), batch_(batch), pass_(pass),
        layers_(pass.layers.empty() ? std::span<const int>(decoder.all_layers_) : pass.layers), begin_(begin),
        M_(end - begin), wants_(wants), logits_(logits), logits_stride_(logits_stride), hidden_(hidden),
        kernels_(row_kernels()), pool_(*decoder.pool_), thread_count_(threads) {
    query_scale_ = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(shape_.head_dim)));  // log2(e)
    lay_out(decoder.capacity_);
    for (int row = 0; row < M_; ++row) {
      if (batch.scored[begin + row]) scored_.push_back(row);
    }
    costs_.reserve(M_ + 1);
    costs_.push_back(0);
    for (int row = 0; row < M_; ++row) {
      // blocks of keys, and about one block's worth of beginning and ending
      costs_.push_back(costs_.back() + batch.views[begin + row].count / kTileRows + 2);
    }
  }

  static std::size_t floats(const Shape& s, const Fusion& fusion, int threads, int rows) {
    const std::int64_t per_row = padded(s.hidden) + padded(qkv_width(s)) + padded(heads_width(s)) +
                                 padded(s.intermediate) + static_cast<std::int64_t>(s.heads) * padded_head(s) +
                                 both_width(s, fusion);
    return static_cast<std::size_t>(rows * per_row + threads * per_thread(s, fusion));
  }

  void operator()(int thread) {
    weights_.fusion.version ? fuse(thread) : embed(thread);
    pool_.barrier(thread);
    for (const int index : layers_) layer(index, thread);
    finish(thread);
  }

 private:
  static std::int64_t normed_width(const Shape& s, const Fusion& f) { return padded(std::max(s.hidden, f.states)); }
  static std::int64_t both_width(const Shape& s, const Fusion& f) { return f.version ? padded(2 * s.hidden) : 0; }

  static std::int64_t per_thread(const Shape& s, const Fusion& fusion) {
    return normed_width(s, fusion) + static_cast<std::int64_t>(attention_scratch(padded_head(s)) / sizeof(float)) + 64;
  }

  void lay_out(int capacity) {
    float* at = decoder_.workspace_->data;
    const auto take = [&at](std::int64_t floats) {
      float* start = at;
      at += floats;
      return start;
    };
    h_stride_ = padded(shape_.hidden);
    qkv_stride_ = padded(qkv_width(shape_));
    heads_stride_ = padded(heads_width(shape_));
    gated_stride_ = padded(shape_.intermediate);
    h_ = take(capacity * h_stride_);
    qkv_ = take(capacity * qkv_stride_);
    attended_ = take(capacity * heads_stride_);
    gated_ = take(capacity * gated_stride_);
    both_stride_ = both_width(shape_, weights_.fusion);
    both_ = take(capacity * both_stride_);
    queries_ = take(static_cast<std::int64_t>(capacity) * shape_.heads * padded_head(shape_));
    threads_ = at;
  }

  float* normed(int thread) const { return threads_ + thread * per_thread(shape_, weights_.fusion) / 16 * 16; }
  std::uint8_t* scratch(int thread) const {
    return reinterpret_cast<std::uint8_t*>(normed(thread) + normed_width(shape_, weights_.fusion));
  }

  void embed(int thread) {
    const Share rows = share(M_, thread, thread_count_);
    const Source& table = weights_.embed;
    for (int row = rows.begin; row < rows.end; ++row) {
      dequantise(table.kind, table.data + batch_.tokens[begin_ + row] * table.stride, table.columns,
                 h_ + row * h_stride_);
    }
  }

  const float* states(int row) const {
    return pass_.states + (begin_ + row) * static_cast<std::int64_t>(pass_.own ? shape_.hidden : weights_.fusion.states);
  }

  // The input of an EAGLE head: h = what its layers add to, both = [embedding, state] as its first layer reads them
  // (version 3) or as `fc` does (version 1).
  void fuse(int thread) {
    const Fusion& fusion = weights_.fusion;
    const bool states_first = fusion.version == 3 && !pass_.own;
    if (states_first) {
      const auto row = [&](int i) {
        if (fusion.input_norm.empty()) return states(i);
        kernels_.rms_norm(states(i), fusion.input_norm.data(), fusion.states, shape_.norm_eps, normed(thread));
        return static_cast<const float*>(normed(thread));
      };
      product(fusion.fc, prepare(fusion.fc, M_, thread, row), M_, thread, h_, h_stride_, Epilogue::store);
      pool_.barrier(thread);
    }
    const Share rows = share(M_, thread, thread_count_);
    for (int row = rows.begin; row < rows.end; ++row) pair_up(row);
    if (fusion.version == 3) return;
    pool_.barrier(thread);
    product(fusion.fc, prepare(fusion.fc, M_, thread, [&](int i) { return both_ + i * both_stride_; }), M_, thread, h_,
            h_stride_, Epilogue::store);
  }

  void pair_up(int row) {
    const Fusion& fusion = weights_.fusion;
    const Source& table = weights_.embed;
    const int D = shape_.hidden;
    float* embedding = both_ + row * both_stride_;
    dequantise(table.kind, table.data + batch_.tokens[begin_ + row] * table.stride, table.columns, embedding);
    if (!fusion.embed_norm.empty()) {
      kernels_.rms_norm(embedding, fusion.embed_norm.data(), D, shape_.norm_eps, embedding);
    }
    if (fusion.version == 1) {
      std::memcpy(embedding + D, states(row), D * sizeof(float));
      return;
    }
    float* h = h_ + row * h_stride_;
    if (pass_.own) std::memcpy(h, states(row), D * sizeof(float));
    kernels_.rms_norm(h, fusion.hidden_norm.data(), D, shape_.norm_eps, embedding + D);
    if (fusion.normed_residual) std::memcpy(h, embedding + D, D * sizeof(float));
  }

  // Activations of M rows for `linear`; row(i) gives the floats of row i. Few rows: each thread makes its own.
  template <class Row>
  const Activations& prepare(const Linear& linear, int M, int thread, Row row) {
    if (M <= kOwnRows || thread_count_ == 1) {
      Activations& own = M <= kOwnRows ? decoder_.own_[thread] : decoder_.shared_;
      for (int i = 0; i < M; ++i) own.prepare(linear, row(i), i);
      return own;
    }
    const Share rows = share(M, thread, thread_count_);
    for (int i = rows.begin; i < rows.end; ++i) decoder_.shared_.prepare(linear, row(i), i);
    pool_.barrier(thread);
    return decoder_.shared_;
  }

  void product(const Linear& linear, const Activations& activations, int M, int thread, float* y, std::int64_t stride,
               Epilogue epilogue) {
    const Share units = share(linear.units(), thread, thread_count_);
    if (units.begin < units.end) multiply(linear, activations, M, units.begin, units.end, y, stride, epilogue);
  }

  const float* norm(const float* x, const std::vector<float>& weight, int thread) const {
    if (weight.empty()) return x;
    float* y = normed(thread);
    kernels_.rms_norm(x, weight.data(), shape_.hidden, shape_.norm_eps, y);
    return y;
  }

  void layer(int index, int thread) {
    const Layer& layer = weights_.layers[index];
    const bool pairs = index == 0 && weights_.fusion.version == 3;
    const auto read = [&](int i) {
      return pairs ? both_ + i * both_stride_ : norm(h_ + i * h_stride_, layer.attn_norm, thread);
    };
    product(layer.qkv, prepare(layer.qkv, M_, thread, read), M_, thread, qkv_, qkv_stride_, Epilogue::store);
    pool_.barrier(thread);
    rotate_heads(index, thread);
    pool_.barrier(thread);
    attend(index, thread);
    pool_.barrier(thread);
    product(layer.o, prepare(layer.o, M_, thread, [&](int i) { return attended_ + i * heads_stride_; }), M_, thread, h_,
            h_stride_, Epilogue::add);
    pool_.barrier(thread);
    product(layer.gate_up,
            prepare(layer.gate_up, M_, thread, [&](int i) { return norm(h_ + i * h_stride_, layer.mlp_norm, thread); }),
            M_, thread, gated_, gated_stride_, Epilogue::swiglu);
    pool_.barrier(thread);
    product(layer.down, prepare(layer.down, M_, thread, [&](int i) { return gated_ + i * gated_stride_; }), M_, thread,
            h_, h_stride_, Epilogue::add);
    pool_.barrier(thread);
    keep_hidden(index, thread);
  }

  // Norms and turns queries and keys, writes queries in attention's order and keys and values to the cache.
  // The unit of work is one head of one row, head by head, so that neighbouring rows of a tile have one writer.
  void rotate_heads(int index, int thread) {
    const Share units = share((shape_.heads + shape_.kv_heads) * M_, thread, thread_count_);
    for (int unit = units.begin; unit < units.end; ++unit) {
      const int head = unit / M_, row = unit % M_;
      if (head < shape_.heads) {
        place_query(index, head, row);
      } else {
        place_key(index, head - shape_.heads, row);
      }
    }
    const Cut first = cut(thread);
    kernels_.expect(attention_of(index), first.head, first.query);
  }

  // A head of one row, normed where the model norms queries and keys.
  float* head_of(const std::vector<float>& norm, int row, int head) const {
    float* x = qkv_ + row * qkv_stride_ + static_cast<std::int64_t>(head) * shape_.head_dim;
    if (!norm.empty()) kernels_.rms_norm(x, norm.data(), shape_.head_dim, shape_.norm_eps, x);
    return x;
  }

  Position position(int row) const {
    const std::int64_t at = batch_.positions_of[begin_ + row];
    return {decoder_.rope_.cosines(at), decoder_.rope_.sines(at), shape_.head_dim, padded_head(shape_)};
  }

  void place_query(int index, int head, int row) {
    const int group = shape_.heads / shape_.kv_heads;
    const float* query = head_of(weights_.layers[index].q_norm, row, head);
    const std::int64_t place = (static_cast<std::int64_t>(head / group) * M_ + row) * group + head % group;
    auto* to = reinterpret_cast<std::uint8_t*>(queries_) + place * padded_head(shape_) * (pairs() ? 2 : 4);
    kernels_.put_query(query, position(row), query_scale_, pairs(), to);
  }

  void place_key(int index, int head, int row) {
    const float* key = head_of(weights_.layers[index].k_norm, row, shape_.heads + head);
    const float* value = key + static_cast<std::int64_t>(shape_.kv_heads) * shape_.head_dim;
    kernels_.put_row(decoder_.cache_.layer(index), batch_.slots[begin_ + row], head, key, value, position(row));
  }

  bool pairs() const { return kernels_.pairs && decoder_.cache_.layer(0).format != KvFormat::fp32; }

  // The flat list of queries, key head by key head, is cut where the threads' shares of its cost end.
  struct Cut {
    int head, query;
  };
  Cut cut(int thread) const {
    const int group = shape_.heads / shape_.kv_heads;
    const std::int64_t of_head = costs_.back() * group;
    const std::int64_t cost = of_head * shape_.kv_heads * thread / thread_count_;
    const int head = static_cast<int>(cost / of_head);
    const std::int64_t rest = cost % of_head;
    const auto after = std::upper_bound(costs_.begin(), costs_.end(), rest / group);
    const int row = static_cast<int>(after - costs_.begin()) - 1;
    const std::int64_t of_row = costs_[row + 1] - costs_[row];
    return {head, static_cast<int>(row * group + (rest - costs_[row] * group) / of_row)};
  }

  Attention attention_of(int index) const {
    return {decoder_.cache_.layer(index),
            batch_.feeds.data(),
            batch_.views.data() + begin_,
            batch_.tails.data(),
            queries_,
            attended_,
            heads_stride_,
            batch_.page_size(),
            M_,
            shape_.heads / shape_.kv_heads,
            shape_.head_dim,
            padded_head(shape_),
            pairs()};
  }

  void attend(int index, int thread) {
    const int group = shape_.heads / shape_.kv_heads;
    const Attention attention = attention_of(index);
    const Cut from = cut(thread), to = cut(thread + 1);
    for (int head = from.head; head <= to.head && head < shape_.kv_heads; ++head) {
      const int begin = head == from.head ? from.query : 0;
      const int end = head == to.head ? to.query : M_ * group;
      if (begin < end) kernels_.attend(attention, head, begin, end, scratch(thread));
    }
  }

  float* hidden(int row, std::size_t want) const {
    return hidden_ + (static_cast<std::int64_t>(begin_ + row) * static_cast<std::int64_t>(wants_.size()) +
                      static_cast<std::int64_t>(want)) * shape_.hidden;
  }

  void keep_hidden(int index, int thread) {
    for (std::size_t want = 0; want < wants_.size(); ++want) {
      if (wants_[want] != index) continue;
      const Share rows = share(M_, thread, thread_count_);
      for (int row = rows.begin; row < rows.end; ++row) {
        std::memcpy(hidden(row, want), h_ + row * h_stride_, shape_.hidden * sizeof(float));
      }
    }
  }

  void finish(int thread) {
    for (std::size_t want = 0; want < wants_.size(); ++want) {
      if (wants_[want] != -1) continue;
      const Share rows = share(M_, thread, thread_count_);
      for (int row = rows.begin; row < rows.end; ++row) {
        std::memcpy(hidden(row, want), norm(h_ + row * h_stride_, weights_.norm, thread),
                    shape_.hidden * sizeof(float));
      }
    }
    const int scored = static_cast<int>(scored_.size());
    if (!scored) return;
    const auto final = [&](int i) { return norm(h_ + scored_[i] * h_stride_, weights_.norm, thread); };
    product(weights_.head, prepare(weights_.head, scored, thread, final), scored, thread, logits_, logits_stride_,
            Epilogue::store);
  }

  Decoder& decoder_;
  const Weights& weights_;
  const Shape& shape_;
  const Batch& batch_;
  const Pass& pass_;
  const std::span<const int> layers_;
  const int begin_, M_;
  const std::span<const int> wants_;
  float* logits_;
  const std::int64_t logits_stride_;
  float* hidden_;
  const RowKernels& kernels_;
  Pool& pool_;
  const int thread_count_;
  float query_scale_;                // into attention's units of log 2
  std::vector<int> scored_;          // rows of this pass
  std::vector<std::int64_t> costs_;  // [M + 1] of attention, summed
  std::int64_t h_stride_, qkv_stride_, heads_stride_, gated_stride_, both_stride_;
  float *h_, *qkv_, *attended_, *gated_, *both_, *queries_, *threads_;
};

Decoder::Decoder(Weights weights, Rope rope, KvFormat kv_format, std::int64_t slots, std::shared_ptr<Pool> pool)
    : weights_(std::move(weights)),
      rope_(std::move(rope)),
      cache_((check(weights_.shape), kv_format), weights_.shape.layers, weights_.shape.kv_heads,
             weights_.shape.head_dim, slots),
      pool_(std::move(pool)),
      staffing_(pool_->threads()) {
  if (rope_.half() * 2 != weights_.shape.head_dim) throw std::invalid_argument("RoPE has other heads than the model");
  const Shape& s = weights_.shape;
  for (int layer = 0; layer < s.layers; ++layer) all_layers_.push_back(layer);
  widest_ = widest(s, weights_.fusion);
  for (int thread = 0; thread < pool_->threads(); ++thread) own_.emplace_back(kOwnRows, widest_);
  make_room(16);
}

void Decoder::make_room(int rows) {
  if (rows <= capacity_) return;
  const int grown = std::min(std::max(rows, 2 * capacity_), kMaxRows);
  workspace_ = std::make_unique<Buffer>(Step::floats(shape(), weights_.fusion, pool_->threads(), grown));
  shared_ = Activations(grown, widest_);
  capacity_ = grown;
}

// A buffer of `floats` or more. A larger one replaces it, and the old lives on in the hands of those who look at it.
float* Decoder::grown(std::shared_ptr<Buffer>& buffer, std::int64_t floats) {
  const auto wanted = static_cast<std::size_t>(floats);
  if (!buffer || buffer->size < wanted) {
    buffer = std::make_shared<Buffer>(wanted);
  }
  return buffer->data;
}

std::size_t Decoder::workspace_bytes(const Shape& shape, const Fusion& fusion, int threads) {
  const std::int64_t columns = widest(shape, fusion);
  return sizeof(float) * Step::floats(shape, fusion, threads, kMaxRows) + Activations::bytes(kMaxRows, columns) +
         static_cast<std::size_t>(threads) * Activations::bytes(kOwnRows, columns) +
         (fusion.version ? sizeof(float) * static_cast<std::size_t>(kMaxRows) * static_cast<std::size_t>(shape.hidden) : 0);
}

std::size_t Decoder::workspace_bytes() const {
  std::size_t bytes = workspace_->arena.bytes() + shared_.bytes() + rope_.bytes();
  for (const Activations& own : own_) bytes += own.bytes();
  if (logits_) bytes += logits_->arena.bytes();
  if (hidden_) bytes += hidden_->arena.bytes();
  return bytes;
}

Scores Decoder::forward(const Batch& batch, std::span<const int> wants, const Pass& pass) {
  const std::lock_guard lock(busy_);
  const auto check = [this](std::span<const int> layers, int first, const char* what) {
    for (const int layer : layers) {
      if (layer < first || layer >= shape().layers) {
        throw std::invalid_argument(what + std::to_string(layer) + ": the model has layers 0 to " +
                                    std::to_string(shape().layers - 1));
      }
    }
  };
  check(wants, -1, "hidden states of layer ");
  check(pass.layers, 0, "a forward through layer ");
  if (weights_.fusion.version && !pass.states) throw std::invalid_argument("an EAGLE head reads states");
  const std::int64_t rows = batch.rows();
  Scores scores;
  scores.rows = std::count(batch.scored.begin(), batch.scored.end(), 1);
  scores.stride = padded(shape().outputs);
  float* logits = grown(logits_, std::max<std::int64_t>(1, scores.rows) * scores.stride);
  float* hidden = nullptr;
  if (!wants.empty()) {
    hidden = grown(hidden_, rows * static_cast<std::int64_t>(wants.size()) * shape().hidden);
    scores.hidden = hidden_;
  }
  scores.logits = logits_;
  make_room(static_cast<int>(std::min<std::int64_t>(rows, kMaxRows)));
  rope_.reserve(batch.positions());
  for (int begin = 0; begin < rows; begin += kMaxRows) {
    const int end = std::min<int>(begin + kMaxRows, static_cast<int>(rows));
    const int threads = staffing_.threads();
    Step step(*this, batch, pass, begin, end, wants, logits, scores.stride, hidden, threads);
    staffing_.learn(pool_->run(threads, step));
    logits += std::count(batch.scored.begin() + begin, batch.scored.begin() + end, 1) * scores.stride;
  }
  return scores;
}

}  // namespace outrider
