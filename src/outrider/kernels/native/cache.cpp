#include "cache.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace outrider {
namespace {

int number_bytes(KvFormat format) {
  switch (format) {
    case KvFormat::fp32: return 4;
    case KvFormat::bf16: return 2;
    case KvFormat::int8: return 1;
  }
  return 0;
}

// One row's column of a key tile and row of a value tile, `Pair` numbers side by side.
template <class Number, int Pair>
struct Place {
  Number* keys;
  Number* values;
  int padded;

  Place(std::uint8_t* tile, std::int64_t value_offset, int row, int d)
      : keys(reinterpret_cast<Number*>(tile) + row * Pair),
        values(reinterpret_cast<Number*>(tile + value_offset) + (row / Pair) * d * Pair + row % Pair),
        padded(d) {}
  Number& key(int i) const { return keys[(i / Pair) * 16 * Pair + i % Pair]; }
  Number& value(int i) const { return values[i * Pair]; }
};

// Symmetric, the largest magnitude becomes 127.
float to_int8(const float* from, int count, std::int8_t* to) {
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::fabs(from[i]));
  const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
  for (int i = 0; i < count; ++i) to[i] = static_cast<std::int8_t>(std::lrintf(from[i] * factor));
  return largest / 127.0f;
}

}  // namespace

KvFormat kv_format_of(std::string_view name) {
  if (name == "fp32") return KvFormat::fp32;
  if (name == "bf16") return KvFormat::bf16;
  if (name == "int8") return KvFormat::int8;
  throw std::invalid_argument("kv_dtype: '" + std::string(name) + "' is not one of fp32, bf16, int8");
}

void to_bf16(const float* from, int count, std::uint16_t* to) {
  for (int i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(from[i]);
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    to[i] = static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
  }
}

KvCache::KvCache(KvFormat format, int layers, int kv_heads, int head_dim, std::int64_t slots)
    : format_(format), layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim), padded_((head_dim + 15) / 16 * 16),
      slots_((slots + 63) / 64 * 64) {
  values_ = 16 * static_cast<std::int64_t>(padded_) * number_bytes(format);
  scales_ = 2 * values_;
  tile_bytes_ = scales_ + (format == KvFormat::int8 ? 32 * static_cast<std::int64_t>(sizeof(float)) : 0);
  layer_bytes_ = slots_ / 16 * kv_heads_ * tile_bytes_;
  data_ = memory_.allocate(static_cast<std::size_t>(layer_bytes_) * layers_);
}

CacheView KvCache::layer(int index) const {
  return {data_ + index * layer_bytes_, tile_bytes_, values_, scales_, kv_heads_, format_};
}

std::size_t KvCache::row_bytes() const {
  return static_cast<std::size_t>(layers_) * kv_heads_ * tile_bytes_ / 16;
}

namespace {
std::uint8_t* tile_at(const CacheView& view, std::int64_t slot, int head) {
  const std::int64_t tile = slot / 16;
  return view.data + ((tile / 4 * view.kv_heads + head) * 4 + tile % 4) * view.tile_bytes;
}
}  // namespace

void KvCache::put(int layer_index, std::int64_t slot, int kv_head, const float* key, const float* value) {
  const CacheView view = layer(layer_index);
  std::uint8_t* tile = tile_at(view, slot, kv_head);
  const int row = static_cast<int>(slot % 16), d = head_dim_;
  switch (format_) {
    case KvFormat::fp32: {
      const Place<float, 1> place(tile, values_, row, padded_);
      for (int i = 0; i < d; ++i) place.key(i) = key[i];
      for (int i = 0; i < d; ++i) place.value(i) = value[i];
      break;
    }
    case KvFormat::bf16: {
      const Place<std::uint16_t, 2> place(tile, values_, row, padded_);
      std::uint16_t numbers[1024];
      to_bf16(key, d, numbers);
      for (int i = 0; i < d; ++i) place.key(i) = numbers[i];
      to_bf16(value, d, numbers);
      for (int i = 0; i < d; ++i) place.value(i) = numbers[i];
      break;
    }
    case KvFormat::int8: {
      const Place<std::int8_t, 2> place(tile, values_, row, padded_);
      auto* scales = reinterpret_cast<float*>(tile + scales_);
      std::int8_t numbers[1024];
      scales[row] = to_int8(key, d, numbers);
      for (int i = 0; i < d; ++i) place.key(i) = numbers[i];
      scales[16 + row] = to_int8(value, d, numbers);
      for (int i = 0; i < d; ++i) place.value(i) = numbers[i];
      break;
    }
  }
}

namespace {
template <class Number, int Pair>
void copy(const CacheView& view, int head, std::int64_t source, std::int64_t target, int padded) {
  std::uint8_t* a = tile_at(view, source, head);
  std::uint8_t* b = tile_at(view, target, head);
  const int from_row = static_cast<int>(source % 16), to_row = static_cast<int>(target % 16);
  const Place<Number, Pair> from(a, view.values, from_row, padded), to(b, view.values, to_row, padded);
  for (int i = 0; i < padded; ++i) to.key(i) = from.key(i);
  for (int i = 0; i < padded; ++i) to.value(i) = from.value(i);
  if (view.format == KvFormat::int8) {
    auto* x = reinterpret_cast<float*>(a + view.scales);
    auto* y = reinterpret_cast<float*>(b + view.scales);
    y[to_row] = x[from_row];
    y[16 + to_row] = x[16 + from_row];
  }
}
}  // namespace

void KvCache::move(std::span<const std::int64_t> source, std::span<const std::int64_t> target) {
  if (source.size() != target.size()) throw std::invalid_argument("move: as many sources as targets");
  for (const auto slots : {source, target}) {
    for (const std::int64_t slot : slots) {
      if (slot < 0 || slot >= slots_) throw std::invalid_argument("move: slot " + std::to_string(slot) + " of " + std::to_string(slots_));
    }
  }
  for (int index = 0; index < layers_; ++index) {
    const CacheView view = layer(index);
    for (std::size_t i = 0; i < source.size(); ++i) {
      for (int head = 0; head < kv_heads_; ++head) {
        switch (format_) {
          case KvFormat::fp32: copy<float, 1>(view, head, source[i], target[i], padded_); break;
          case KvFormat::bf16: copy<std::uint16_t, 2>(view, head, source[i], target[i], padded_); break;
          case KvFormat::int8: copy<std::int8_t, 2>(view, head, source[i], target[i], padded_); break;
        }
      }
    }
  }
}

}  // namespace outrider
