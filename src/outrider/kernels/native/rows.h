// What is computed row by row: norms and attention. One implementation per instruction set behind one table.
//
// Letters: M rows of a pass, g query heads per key/value head, d head size, d' = d rounded up to 16 (zeros behind d).
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

// Cache rows that lie together (see cache.h), and keys that attention sees at a time.
inline constexpr int kTileRows = 32;

enum class KvFormat : std::uint8_t { fp32, bf16, int8 };

// One layer of the cache. The tile of slots [32t, 32t + 32) of a head starts at
//   data + (((t / 2) * kv_heads + head) * 2 + t % 2) * tile_bytes
// and holds keys, values (at `values`) and, in int8, 32 scales of keys and 32 of values (at `scales`).
struct CacheView {
  std::uint8_t* data;
  std::int64_t tile_bytes, values, scales;
  int kv_heads;
  KvFormat format;
};

// Where a sequence's committed and pending rows lie.
struct FeedView {
  const std::int32_t* tiles;  // storage tile of its rows [32i, 32i + 32), or -1 where they do not fill one in order
  const std::int32_t* pages;
};

// What a row sees: `count` keys, itself the last. The first `shared` of them are its feed's rows 0, 1 ...; a row of a
// tree that leaves its feed's order has the slots of its keys from `shared` rounded down to a tile on at tails[tail].
struct RowView {
  std::int32_t feed, count, shared, tail;
};

struct Attention {
  CacheView cache;
  const FeedView* feeds;
  const RowView* rows;       // [M]
  const std::int32_t* tails;
  const void* queries;       // [kv_heads, M * g, d'] fp32, or bf16 if `pairs`; scaled by log2(e) / sqrt(d)
  float* out;                // [M, heads * d]
  std::int64_t out_stride;
  int page_size, row_count, group, head_dim, padded;
  bool pairs;                // multiply pairs of bf16
};

// Where a row stands, for RoPE.
struct Position {
  const float *cosines, *sines;  // [d / 2]
  int d, padded;
};

struct RowKernels {
  // y = x / sqrt(mean(x^2) + eps) * weight. [n]
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y);
  // Queries [begin, end) of [0, M * g) of one key/value head. A query's result is a function of its own keys alone:
  // `begin` and `end` only say who is computed together. `scratch` has attention_scratch(d') bytes, 64-aligned.
  void (*attend)(const Attention& attention, int kv_head, int begin, int end, std::uint8_t* scratch);
  // Has the first keys that query `begin` will see fetched into the cache of this processor.
  void (*expect)(const Attention& attention, int kv_head, int begin);
  // Turns a query by its position, scales it, and writes it as `Attention::queries` has it.
  void (*put_query)(const float* query, const Position& position, float scale, bool pairs, void* to);
  // Turns a key by its position, and writes it and its value to a slot of the cache.
  void (*put_row)(const CacheView& cache, std::int64_t slot, int kv_head, const float* key, const float* value,
                  const Position& position);
  bool pairs;  // Attention::pairs may be set for caches in bf16 and int8
};

const RowKernels& row_kernels();  // for isa()

std::size_t attention_scratch(int padded);

}  // namespace outrider
