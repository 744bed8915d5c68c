// What is computed row by row: norms and attention. One implementation per instruction set behind one table.
//
// Letters: M rows of a pass, g query heads per key/value head, d head size, d' = d rounded up to 16 (zeros behind d).
#pragma once

#include <cstddef>
#include <cstdint>

namespace outrider {

inline constexpr int kTileRows = 16;               // cache rows that lie together, see cache.h
inline constexpr int kBlockRows = 2 * kTileRows;   // keys of a block: what attention sees at a time

enum class KvFormat : std::uint8_t { fp32, bf16, int8 };

// One layer of the cache. The tile of slots [16t, 16t + 16) of a head starts at
//   data + (((t / 4) * kv_heads + head) * 4 + t % 4) * tile_bytes
// and holds keys, values (at `values`) and, in int8, 16 scales of keys and 16 of values (at `scales`).
struct CacheView {
  std::uint8_t* data;
  std::int64_t tile_bytes, values, scales;
  int kv_heads;
  KvFormat format;
};

// Where a sequence's committed and pending rows lie.
struct FeedView {
  const std::int32_t* tiles;  // storage tile of its rows [16i, 16i + 16), or -1 where they do not fill one in order
  const std::int32_t* pages;
};

// What a row sees: `count` keys, itself the last. The first `shared` of them are its feed's rows 0, 1 ...; a row of a
// tree that leaves its feed's order has the slots of its keys from `shared` rounded down to a block on at tails[tail].
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

struct RowKernels {
  // y = x / sqrt(mean(x^2) + eps) * weight. [n]
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y);
  // Queries [begin, end) of [0, M * g) of one key/value head. A query's result is a function of its own keys alone:
  // `begin` and `end` only say who is computed together. `scratch` has attention_scratch(d') bytes, 64-aligned.
  void (*attend)(const Attention& attention, int kv_head, int begin, int end, std::uint8_t* scratch);
  bool pairs;  // Attention::pairs may be set for caches in bf16 and int8
};

const RowKernels& row_kernels();  // for isa()

std::size_t attention_scratch(int padded);

}  // namespace outrider
