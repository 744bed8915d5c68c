// Keys and values of all layers, by slot. Which sequence a slot belongs to is the host's business (core/cache.py).
//
// Sixteen slots of one head lie together as a tile, in the order in which attention multiplies:
//   fp32        keys [d'][16]            values [16][d']
//   bf16, int8  keys [d' / 2][16][2]     values [8][d'][2]     (int8: + 16 scales of keys, 16 of values)
// and four tiles of a head behind one another, so that a page of 64 rows is one stream.
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

  // Write one head's key and value [d], already rotated, to a slot.
  void put(int layer, std::int64_t slot, int kv_head, const float* key, const float* value);

  // Copy slot source[i] to slot target[i] in every layer, for i ascending.
  void move(std::span<const std::int64_t> source, std::span<const std::int64_t> target);

 private:
  KvFormat format_;
  int layers_, kv_heads_, head_dim_, padded_;
  std::int64_t slots_, tile_bytes_, values_, scales_, layer_bytes_;
  Arena memory_;
  std::uint8_t* data_;
};

// Rounded to nearest, ties to even.
void to_bf16(const float* from, int count, std::uint16_t* to);

}  // namespace outrider
