#include "cache.h"

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
  Number& key(int i) const { return keys[(i / Pair) * kTileRows * Pair + i % Pair]; }
  Number& value(int i) const { return values[i * Pair]; }
};

}  // namespace

KvFormat kv_format_of(std::string_view name) {
  if (name == "fp32") return KvFormat::fp32;
  if (name == "bf16") return KvFormat::bf16;
  if (name == "int8") return KvFormat::int8;
  throw std::invalid_argument("kv_dtype: '" + std::string(name) + "' is not one of fp32, bf16, int8");
}

KvCache::KvCache(KvFormat format, int layers, int kv_heads, int head_dim, std::int64_t slots)
    : format_(format), layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim), padded_((head_dim + 15) / 16 * 16),
      slots_((slots + 63) / 64 * 64) {
  values_ = kTileRows * static_cast<std::int64_t>(padded_) * number_bytes(format);
  scales_ = 2 * values_;
  tile_bytes_ = scales_ + (format == KvFormat::int8 ? 2 * kTileRows * static_cast<std::int64_t>(sizeof(float)) : 0);
  layer_bytes_ = slots_ / kTileRows * kv_heads_ * tile_bytes_;
  data_ = memory_.allocate(static_cast<std::size_t>(layer_bytes_) * layers_);
}

CacheView KvCache::layer(int index) const {
  return {data_ + index * layer_bytes_, tile_bytes_, values_, scales_, kv_heads_, format_};
}

std::size_t KvCache::row_bytes() const {
  return static_cast<std::size_t>(layers_) * kv_heads_ * tile_bytes_ / kTileRows;
}

namespace {
std::uint8_t* tile_at(const CacheView& view, std::int64_t slot, int head) {
  const std::int64_t tile = slot / kTileRows;
  return view.data + ((tile / 2 * view.kv_heads + head) * 2 + tile % 2) * view.tile_bytes;
}
}  // namespace

namespace {
template <class Number, int Pair>
void copy(const CacheView& view, int head, std::int64_t source, std::int64_t target, int padded) {
  std::uint8_t* a = tile_at(view, source, head);
  std::uint8_t* b = tile_at(view, target, head);
  const int from_row = static_cast<int>(source % kTileRows), to_row = static_cast<int>(target % kTileRows);
  const Place<Number, Pair> from(a, view.values, from_row, padded), to(b, view.values, to_row, padded);
  for (int i = 0; i < padded; ++i) to.key(i) = from.key(i);
  for (int i = 0; i < padded; ++i) to.value(i) = from.value(i);
  if (view.format == KvFormat::int8) {
    auto* x = reinterpret_cast<float*>(a + view.scales);
    auto* y = reinterpret_cast<float*>(b + view.scales);
    y[to_row] = x[from_row];
    y[kTileRows + to_row] = x[kTileRows + from_row];
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
