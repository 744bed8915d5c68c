// Linear layers y = x W^T + b that stream their weights once, however many rows x has (up to a tile), and give
// each row of y the same bits whatever the number of rows, their places, or the split of the work over threads.
//
// Letters: M rows of activations, N outputs (rows of W), K inputs (columns of W), G inputs that share a scale.
//
// One multiplication, by T threads, with a barrier between the two parts:
//   part 1  act.prepare(w, x + r * ldx, r)            each row once, by any thread
//   part 2  multiply(w, act, M, u0, u1, y, ldy, e)    each unit of [0, w.units()) once, by any thread
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "linear/isa.h"

namespace outrider {

// How weights are kept in memory, and thereby how they are multiplied.
//   fp32  fp32 activations
//   bf16  bf16 activations where the processor multiplies bf16, fp32 activations elsewhere; fp32 sums
//   int8  weights and activations int8 in groups along K with a scale each; exact integer sums within a group
//   int4  weights 4 bits in groups of 32 with scale and offset, activations int8 in the same groups
enum class Format : std::uint8_t { fp32, bf16, int8, int4 };

// How a tensor lies in its file: GGUF's names. Blocks: 32 columns for Q8_0, Q4_0, Q4_1; 256 for Q4_K, Q5_K, Q6_K.
enum class Kind : std::uint8_t { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

// "int8" -> Format::int8, "Q4_K" -> Kind::Q4_K. Throw std::invalid_argument that lists what there is.
Format format_of(std::string_view name);
Kind kind_of(std::string_view name);
const char* name(Format format);
const char* name(Kind kind);

std::int64_t block_columns(Kind kind);                       // columns of one block: 1, 32 or 256
std::int64_t row_bytes(Kind kind, std::int64_t columns);     // bytes of a row; columns must be whole blocks

// One row as fp32, for embeddings and for tests. `row` need not be aligned. [columns]
void dequantise(Kind kind, const std::uint8_t* row, std::int64_t columns, float* out);

// A matrix as it lies in its file, row n at data + n * stride. Only read while a Linear is made.
struct Source {
  Kind kind;
  const std::uint8_t* data;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride;  // bytes, at least row_bytes(kind, columns)
};

inline constexpr int kUnit = 32;   // outputs of a unit, the grain of work: 32 columns of y, or 16 under SwiGLU
inline constexpr int kMaxRows = 512;  // most rows of one multiply

// Memory at 2 MiB boundaries, in huge pages where the system has them, handed out piece by piece: small layers share a
// page, and the layers of a model lie behind one another in the order of their making.
class Arena {
 public:
  // `single`: each allocation gets memory of its own size, and takes no more than that.
  explicit Arena(bool single = false) : single_(single) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();
  std::uint8_t* allocate(std::size_t bytes);  // zeroed, at a multiple of 4 KiB. Throws std::bad_alloc
  std::size_t bytes() const { return used_; }

 private:
  struct Chunk {
    std::uint8_t* data;
    std::size_t size;
  };
  const bool single_;
  std::vector<Chunk> chunks_;
  std::size_t free_ = 0;  // at the end of the last chunk
  std::size_t used_ = 0;
};

struct LinearOptions {
  bool paired = false;   // two sources of equal shape, gate and up: unit u holds rows [16u, 16u+16) of both, for SwiGLU
  // int8: columns to a scale. 32 (what 0 means) is as near to fp32 as GGUF's Q8_0 (KL 0.004 for SmolLM2-135M); 64 and
  // 128 stream 3 and 5 % less, take 10 and 20 % less arithmetic, and are 1.4 times as far and more. int4 has 32.
  int group = 0;
  int threads = 0;       // that pack; 0 = all
  std::shared_ptr<Arena> arena = nullptr;  // where the weights go; null = memory of their own
};

class Linear {
 public:
  Linear() = default;

  // Packs `sources`, stacked along N in their order. `bias` is null or has N values, in the same order.
  // Q8_0 in int8 and Q4_0, Q4_1, Q4_K in int4 keep their values exactly; everything else is rounded to `format`.
  // Throws std::invalid_argument for: no rows, differing K, K not whole blocks of a kind nor (int8, int4) whole
  // groups, strides too short, a pair of unequal shapes, an unknown group.
  Linear(Format format, std::span<const Source> sources, const float* bias = nullptr, LinearOptions options = {});

  Format format() const { return format_; }
  std::int64_t rows() const { return n_; }      // N, without padding; of both halves together if paired
  std::int64_t columns() const { return k_; }   // K
  int group() const { return group_; }          // G, 0 without groups
  bool paired() const { return paired_; }
  int units() const { return units_; }          // that work may be split into
  std::size_t bytes() const { return bytes_; }  // streamed by one multiply: weights and scales, padding included

  const std::uint8_t* data() const { return data_; }  // the packed weights, see layout.h

  // What is multiplied, as fp32, in the order of the sources. [N, K]
  void dequantised(float* out) const;

 private:
  friend struct LinearView;
  Format format_ = Format::fp32;
  std::int64_t n_ = 0, k_ = 0;
  int group_ = 0, units_ = 0;
  int groups_ = 0;           // of K; blocks of 16 (fp32) or 32 (bf16) without groups
  bool paired_ = false;
  std::uint8_t scales_ = 0;  // how scales are stored, see layout.h
  std::size_t unit_bytes_ = 0, bytes_ = 0;
  std::uint8_t* data_ = nullptr;  // in the arena
  std::shared_ptr<Arena> arena_;
  std::vector<float> bias_;  // by unit, padded; empty without bias
};

// Rows of activations in the form in which a Linear of (format, group, K) takes them. A workspace: made once for the
// largest layer and filled anew for each. Linears that agree in format(), group() and columns() share a preparation.
class Activations {
 public:
  Activations() = default;
  Activations(int max_rows, std::int64_t max_columns);

  // Converts one row x [K]. Rows are independent: threads may prepare different rows at the same time.
  void prepare(const Linear& linear, const float* x, int row);

  int max_rows() const { return max_rows_; }
  std::size_t bytes() const { return arena_ ? arena_->bytes() : 0; }
  static std::size_t bytes(int max_rows, std::int64_t max_columns);
  const std::uint8_t* data() const { return data_; }

 private:
  int max_rows_ = 0;
  std::int64_t max_columns_ = 0;
  std::uint8_t* data_ = nullptr;
  std::shared_ptr<Arena> arena_;
};

enum class Epilogue : std::uint8_t {
  store,   // y = x W^T + b              y [M, N]
  add,     // y = y + (x W^T + b)        y [M, N]
  swiglu,  // y = silu(gate) * up        y [M, N / 2]; the Linear must be paired
};

// Units [unit_begin, unit_end) of y. Row m of y is y + m * ldy (floats), and unit u writes its columns from 32u on
// (16u under swiglu), never beyond N. 1 <= M <= kMaxRows. Needs no memory and throws nothing.
void multiply(const Linear& linear, const Activations& activations, int M, int unit_begin, int unit_end, float* y,
              std::int64_t ldy, Epilogue epilogue);

// Asks for the first `bytes` of the weights from `unit_begin` on, without waiting: for a thread that is about to wait
// for the others, so that the memory bus is not idle meanwhile.
void prefetch(const Linear& linear, int unit_begin, std::size_t bytes);

// The share of thread t of T in `units`: [first, second).
struct Share {
  int begin, end;
};
inline Share share(int units, int thread, int threads) {
  return {static_cast<int>(static_cast<std::int64_t>(units) * thread / threads),
          static_cast<int>(static_cast<std::int64_t>(units) * (thread + 1) / threads)};
}

}  // namespace outrider
