// Keys and values of all layers, by slot. Which sequence a slot belongs to is the host's business (core/cache.py).
//
// 32 slots of one head lie together as a tile, in the order in which attention multiplies:
//   fp32        keys [d'][32]            values [32][d']
//   bf16, int8  keys [d' / 2][32][2]     values [16][d'][2]     (int8: + 32 scales of keys, 32 of values)
// and two tiles of a head behind one another, so that a page of 64 rows is one stream for the prefetcher.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "linear/linear.h"
#include "rows.h"

namespace outrider {

KvFormat kv_format_of(std::string_view name);  // throws std::invalid_argument that lists what there is

class KvCache {
 public:
  KvCache(KvFormat format, int layers, int kv_heads, int head_dim, std::int64_t slots);

  CacheView layer(int index) const;
  std::int64_t slots() const { return slots_; }
  std::size_t bytes() const { return memory_.bytes(); }
  std::size_t row_bytes() const;  // of one slot in all layers, as read by attention

  // Copy slot source[i] to slot target[i] in every layer, for i ascending.
  void move(std::span<const std::int64_t> source, std::span<const std::int64_t> target);

 private:
  KvFormat format_;
  int layers_, kv_heads_, head_dim_, padded_;
  std::int64_t slots_, tile_bytes_, values_, scales_, layer_bytes_;
  Arena memory_;
  std::uint8_t* data_;
};

}  // namespace outrider
