// The row kernels, for the instruction set whose simd_*.h was included before. Everything is in an unnamed namespace:
// each including file gets its own copy, compiled for its own processor.
//
// Attention is the online softmax of Milakov and Gimelshein (2018) over blocks of 32 keys by logical position. For one
// query the order of operations is: per block, scores (sums over d in a fixed order), their maximum, weights, then the
// weighted values key by key. A key beyond the row's count is not multiplied by zero, it is left out.
#pragma once

#include <cstring>

#include "rows.h"

namespace outrider {
namespace {

constexpr int at_most(int a, int b) { return a < b ? a : b; }

// 2^x for x <= 0: exactly 1 at 0, and 0 where a float is no longer normal or soon after; relative error under 1e-7.
// The polynomial is the best relative fit of degree 6 to 2^f on [-1/2, 1/2] that is 1 at 0.
inline F exp2_negative(F x) {
  F whole, f;
  split(larger(x, all(kLowest)), whole, f);
  F p = all(0x1.41fbbcp-13f);
  p = fma(p, f, all(0x1.5f3e54p-10f));
  p = fma(p, f, all(0x1.3b2d4cp-7f));
  p = fma(p, f, all(0x1.c6aee8p-5f));
  p = fma(p, f, all(0x1.ebfbdcp-3f));
  p = fma(p, f, all(0x1.62e430p-1f));
  p = fma(p, f, all(1.0f));
  return scale_by_power(p, whole);
}

void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
  F squares[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const F v = load(x + i + 16 * j);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  for (; i + 16 <= n; i += 16) {
    const F v = load(x + i);
    squares[0] = fma(v, v, squares[0]);
  }
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < n; ++i) total += x[i] * x[i];
  const float factor = 1.0f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
  const F factors = all(factor);
  for (i = 0; i + 16 <= n; i += 16) store(y + i, load(x + i) * factors * load(weight + i));
  for (; i < n; ++i) y[i] = x[i] * factor * weight[i];
}

// ---- into the cache ----

// Rotary position embedding: turns the pairs (i, i + d / 2). Returns d.
inline int rotate(const float* x, const Position& position, float* y) {
  const int half = position.d / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    y[i] = a * position.cosines[i] - b * position.sines[i];
    y[i + half] = b * position.cosines[i] + a * position.sines[i];
  }
  return 2 * half;
}

// Rounded to nearest, ties to even.
inline void to_bf16(const float* from, int count, std::uint16_t* to) {
  for (int i = 0; i < count; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    to[i] = static_cast<std::uint16_t>(nan ? (bits >> 16) | 0x40 : rounded);
  }
}

// Symmetric: the largest magnitude becomes 127. Returns the scale.
inline float to_int8(const float* from, int count, std::int8_t* to) {
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) {
    const float magnitude = __builtin_fabsf(from[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
  for (int i = 0; i < count; ++i) to[i] = static_cast<std::int8_t>(static_cast<int>(__builtin_rintf(from[i] * factor)));
  return largest / 127.0f;
}

constexpr int kLongestHead = 1024;

void put_query(const float* query, const Position& position, float scale, bool pairs, void* to) {
  alignas(64) float turned[kLongestHead];
  const int d = rotate(query, position, turned), rest = position.padded - d;
  for (int i = 0; i < d; ++i) turned[i] *= scale;
  if (pairs) {
    auto* numbers = static_cast<std::uint16_t*>(to);
    to_bf16(turned, d, numbers);
    std::memset(numbers + d, 0, rest * sizeof(std::uint16_t));
  } else {
    auto* numbers = static_cast<float*>(to);
    std::memcpy(numbers, turned, d * sizeof(float));
    std::memset(numbers + d, 0, rest * sizeof(float));
  }
}

inline std::uint8_t* tile_of(const CacheView& cache, int head, std::int64_t tile) {
  return cache.data + ((tile / 2 * cache.kv_heads + head) * 2 + tile % 2) * cache.tile_bytes;
}

// Keys: element i of a row is at [i / Pair][row][i % Pair]. Values: at [row / Pair][i][row % Pair].
template <class Number, int Pair>
inline void spread(const Number* key, const Number* value, int d, int padded, int row, std::uint8_t* keys,
                   std::uint8_t* values) {
  auto* column = reinterpret_cast<Number*>(keys) + row * Pair;
  for (int i = 0; i < d / Pair; ++i) std::memcpy(column + i * kTileRows * Pair, key + i * Pair, Pair * sizeof(Number));
  Number* to = reinterpret_cast<Number*>(values) + row / Pair * padded * Pair + row % Pair;
  for (int i = 0; i < d; ++i) to[i * Pair] = value[i];
}

void put_row(const CacheView& cache, std::int64_t slot, int kv_head, const float* key, const float* value,
             const Position& position) {
  std::uint8_t* tile = tile_of(cache, kv_head, slot / kTileRows);
  const int row = static_cast<int>(slot % kTileRows);
  alignas(64) float turned[kLongestHead];
  const int d = rotate(key, position, turned);
  switch (cache.format) {
    case KvFormat::fp32:
      spread<float, 1>(turned, value, d, position.padded, row, tile, tile + cache.values);
      break;
    case KvFormat::bf16: {
      alignas(64) std::uint16_t numbers[2][kLongestHead];
      to_bf16(turned, d, numbers[0]);
      to_bf16(value, d, numbers[1]);
      spread<std::uint16_t, 2>(numbers[0], numbers[1], d, position.padded, row, tile, tile + cache.values);
      break;
    }
    case KvFormat::int8: {
      alignas(64) std::int8_t numbers[2][kLongestHead];
      auto* scales = reinterpret_cast<float*>(tile + cache.scales);
      scales[row] = to_int8(turned, d, numbers[0]);
      scales[kTileRows + row] = to_int8(value, d, numbers[1]);
      spread<std::int8_t, 2>(numbers[0], numbers[1], d, position.padded, row, tile, tile + cache.values);
      break;
    }
  }
}

// ---- a block of keys and values in the form in which they are multiplied ----

struct Block {
  const std::uint8_t* keys;
  const std::uint8_t* values;
  const float* scales;      // int8: 32 of keys, then 32 of values; else null
  const std::uint8_t* next;  // the tile to be seen next, fetched ahead piece by piece while this one is multiplied
};

// fp32 tiles: keys [d'][32], values [32][d']
struct Single {
  using Number = float;

  // Of the first 16 T keys, T = 1 or 2. An element of a query is fetched once for all of them.
  template <int R, int T>
  static void scores(const Block& block, const float* q, int padded, F (&s)[R][2]) {
    const auto* keys = reinterpret_cast<const float*>(block.keys);
    const std::uint8_t* next = block.next;
    F even[R][T], odd[R][T];  // two chains each, so that a query alone does not wait for every sum
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) even[r][t] = odd[r][t] = zero();
    }
    for (int i = 0; i < padded; i += 2, keys += 64, next += 256) {
      F a[T], b[T];
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) {
        a[t] = load(keys + 16 * t);
        b[t] = load(keys + 32 + 16 * t);
        prefetch(next + 64 * t);
        prefetch(next + 128 + 64 * t);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F x = all(q[r * padded + i]), y = all(q[r * padded + i + 1]);
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) {
          even[r][t] = fma(x, a[t], even[r][t]);
          odd[r][t] = fma(y, b[t], odd[r][t]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) s[r][t] = even[r][t] + odd[r][t];
    }
  }

  static void put_weights(float* p, F a, F b) {
    store(p, a);
    store(p + 16, b);
  }

  template <int R, int C>
  static void add_values(const Block& block, const float* weights, int column, int padded, int count, F (&acc)[R][C]) {
    const auto* values = reinterpret_cast<const float*>(block.values) + column;
    const std::uint8_t* next = block.next + (kTileRows * padded + column) * sizeof(float);
    for (int j = 0; j < count; ++j, values += padded, next += padded * sizeof(float)) {
      F v[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        v[c] = load(values + 16 * c);
        prefetch(next + 64 * c);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F p = all(weights[r * 32 + j]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c] = fma(p, v[c], acc[r][c]);
      }
    }
  }
};

#ifdef OUTRIDER_PAIRS
// bf16 tiles of pairs: keys [d' / 2][32][2], values [16][d'][2]; products in pairs, sums in fp32
struct Pairs {
  using Number = std::uint16_t;

  static __m512bh pair(const std::uint16_t* p) {
    int bits;
    std::memcpy(&bits, p, 4);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
  }
  static __m512bh vector(const void* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

  template <int R, int T>
  static void scores(const Block& block, const std::uint16_t* q, int padded, F (&s)[R][2]) {
    const auto* keys = reinterpret_cast<const std::uint16_t*>(block.keys);
    const std::uint8_t* next = block.next;
    F even[R][T], odd[R][T];
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) even[r][t] = odd[r][t] = zero();
    }
    for (int i = 0; i < padded; i += 4, keys += 128, next += 256) {
      __m512bh a[T], b[T];
#pragma GCC unroll 2
      for (int t = 0; t < T; ++t) {
        a[t] = vector(keys + 32 * t);
        b[t] = vector(keys + 64 + 32 * t);
        prefetch(next + 64 * t);
        prefetch(next + 128 + 64 * t);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh x = pair(q + r * padded + i), y = pair(q + r * padded + i + 2);
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) {
          even[r][t].v = _mm512_dpbf16_ps(even[r][t].v, a[t], x);
          odd[r][t].v = _mm512_dpbf16_ps(odd[r][t].v, b[t], y);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int t = 0; t < T; ++t) s[r][t] = even[r][t] + odd[r][t];
    }
  }

  static void put_weights(std::uint16_t* p, F a, F b) {
    _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v)));
  }

  template <int R, int C>
  static void add_values(const Block& block, const std::uint16_t* weights, int column, int padded, int count,
                         F (&acc)[R][C]) {
    const auto* values = reinterpret_cast<const std::uint16_t*>(block.values) + 2 * column;
    const std::uint8_t* next = block.next + (kTileRows * padded + 2 * column) * sizeof(std::uint16_t);
    int j = 0;
    for (; j + 2 <= count; j += 2, values += 2 * padded, next += 4 * padded) {
      __m512bh v[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        v[c] = vector(values + 32 * c);
        prefetch(next + 64 * c);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512bh p = pair(weights + r * 32 + j);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) acc[r][c].v = _mm512_dpbf16_ps(acc[r][c].v, v[c], p);
      }
    }
    if (j < count) {  // the pair's second key is not there: whatever lies there must not be multiplied
      for (int c = 0; c < C; ++c) {
        const __m512i both = _mm512_loadu_si512(values + 32 * c);
        const auto v = reinterpret_cast<__m512bh>(_mm512_and_si512(both, _mm512_set1_epi32(0xffff)));
        for (int r = 0; r < R; ++r) {
          acc[r][c].v = _mm512_dpbf16_ps(acc[r][c].v, v, pair(weights + r * 32 + j));
        }
      }
    }
  }
};
#endif

// ---- from the cache to a block ----

struct Scratch {
  std::uint8_t* gathered;   // a tile in the cache's format, keys and values
  std::uint8_t* converted;  // a tile in the format of the products
  float* scales;            // [2, 32] of the gathered tile
  float* acc;               // [kQueries, d']
  std::uint8_t* weights;    // [kQueries, 32] Numbers
};

template <class Number, int Pair>
void gather(const CacheView& cache, int head, const std::int32_t* slots, int count, int padded, std::uint8_t* to_keys,
            std::uint8_t* to_values, float* scales) {
  auto* keys = reinterpret_cast<Number*>(to_keys);
  auto* values = reinterpret_cast<Number*>(to_values);
  int begin = 0;
  if (slots[0] % kTileRows == 0) {  // most often a tile whose order is left half-way: take its beginning as it lies
    while (begin < count && slots[begin] == slots[0] + begin) ++begin;
    const std::uint8_t* tile = tile_of(cache, head, slots[0] / kTileRows);
    const auto* from = reinterpret_cast<const Number*>(tile);
    const int lanes = begin <= 16 ? 16 : 32;
    for (int i = 0; i < padded / Pair; ++i) {
      std::memcpy(keys + i * kTileRows * Pair, from + i * kTileRows * Pair, lanes * Pair * sizeof(Number));
    }
    std::memcpy(values, tile + cache.values, (begin + Pair - 1) / Pair * Pair * padded * sizeof(Number));
    if (scales) std::memcpy(scales, tile + cache.scales, 2 * kTileRows * sizeof(float));
  }
  for (int row = begin; row < count; ++row) {
    const std::uint8_t* tile = tile_of(cache, head, slots[row] / kTileRows);
    const int lane = slots[row] % kTileRows;
    const auto* from_keys = reinterpret_cast<const Number*>(tile) + lane * Pair;
    for (int i = 0; i < padded / Pair; ++i) {
      std::memcpy(keys + (i * kTileRows + row) * Pair, from_keys + i * kTileRows * Pair, Pair * sizeof(Number));
    }
    const auto* from = reinterpret_cast<const Number*>(tile + cache.values) + lane / Pair * padded * Pair + lane % Pair;
    Number* to = values + row / Pair * padded * Pair + row % Pair;
    for (int i = 0; i < padded; ++i) to[i * Pair] = from[i * Pair];
    if (scales) {
      const auto* from_scales = reinterpret_cast<const float*>(tile + cache.scales);
      scales[row] = from_scales[lane];
      scales[kTileRows + row] = from_scales[kTileRows + lane];
    }
  }
}

struct UnpackBf16 {
  const std::uint16_t* from;
  void operator()(int i, F& even, F& odd) const { unpack_bf16(from + i, even, odd); }
};

struct UnpackInt8 {
  const std::int8_t* from;
  void operator()(int i, F& even, F& odd) const {
    float a[16], b[16];
    for (int j = 0; j < 16; ++j) {
      a[j] = from[i + 2 * j];
      b[j] = from[i + 2 * j + 1];
    }
    even = load(a);
    odd = load(b);
  }
};

// A tile of pairs to fp32 in the order of `Single`, 16 pairs at a time.
template <class Unpack>
inline void unpack_keys(Unpack unpack, int padded, float* to) {
  for (int i = 0; i < padded; i += 2) {
    for (int t = 0; t < 2; ++t) {
      F even, odd;
      unpack(i * kTileRows + 32 * t, even, odd);
      store(to + i * kTileRows + 16 * t, even);
      store(to + (i + 1) * kTileRows + 16 * t, odd);
    }
  }
}

template <class Unpack>
inline void unpack_values(Unpack unpack, int padded, float* to) {
  for (int row = 0; row < kTileRows; row += 2) {
    for (int column = 0; column < padded; column += 16) {
      F even, odd;
      unpack(row * padded + 2 * column, even, odd);
      store(to + row * padded + column, even);
      store(to + (row + 1) * padded + column, odd);
    }
  }
}

struct Move {
  const std::uint8_t* from;
  std::uint8_t* to;
};

template <class Number>
void convert(const CacheView& cache, Block& block, int padded, std::uint8_t* to_keys, std::uint8_t* to_values) {
#ifdef OUTRIDER_PAIRS
  if (sizeof(Number) == 2) {  // int8 to bf16, which holds every int8 exactly; the order of pairs stays
    const Move moves[] = {{block.keys, to_keys}, {block.values, to_values}};
    for (int i = 0; i < padded * kTileRows; i += 32) {
      for (const auto& [from, to] : moves) {
        const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
        const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(x)));
        const __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(x, 1)));
        _mm512_storeu_si512(to + 2 * i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
      }
    }
    return;
  }
#endif
  auto* keys = reinterpret_cast<float*>(to_keys);
  auto* values = reinterpret_cast<float*>(to_values);
  if (cache.format == KvFormat::bf16) {
    unpack_keys(UnpackBf16{reinterpret_cast<const std::uint16_t*>(block.keys)}, padded, keys);
    unpack_values(UnpackBf16{reinterpret_cast<const std::uint16_t*>(block.values)}, padded, values);
  } else {
    unpack_keys(UnpackInt8{reinterpret_cast<const std::int8_t*>(block.keys)}, padded, keys);
    unpack_values(UnpackInt8{reinterpret_cast<const std::int8_t*>(block.values)}, padded, values);
  }
}

// The `count` rows that lie in `slots`; or in storage tile `tile` in order, if that is >= 0.
template <class Number>
Block fetch(const Attention& a, int head, int tile, const std::int32_t* slots, int count, Scratch& scratch) {
  const CacheView& cache = a.cache;
  if (tile < 0 && slots[0] % kTileRows == 0) {
    int run = 1;
    while (run < count && slots[run] == slots[0] + run) ++run;
    if (run == count) tile = slots[0] / kTileRows;
  }
  const std::size_t half = static_cast<std::size_t>(kTileRows) * a.padded * sizeof(float);
  Block block;
  if (tile >= 0) {
    const std::uint8_t* start = tile_of(cache, head, tile);
    block = {start, start + cache.values, reinterpret_cast<const float*>(start + cache.scales), start};
  } else {
    block = {scratch.gathered, scratch.gathered + half, scratch.scales, scratch.gathered};
    std::uint8_t* values = scratch.gathered + half;
    switch (cache.format) {
      case KvFormat::fp32:
        gather<float, 1>(cache, head, slots, count, a.padded, scratch.gathered, values, nullptr);
        break;
      case KvFormat::bf16:
        gather<std::uint16_t, 2>(cache, head, slots, count, a.padded, scratch.gathered, values, nullptr);
        break;
      case KvFormat::int8:
        gather<std::int8_t, 2>(cache, head, slots, count, a.padded, scratch.gathered, values, scratch.scales);
        break;
    }
  }
  if (cache.format != KvFormat::int8) block.scales = nullptr;
  const bool as_stored = cache.format == KvFormat::fp32 || (cache.format == KvFormat::bf16 && sizeof(Number) == 2);
  if (!as_stored) {
    convert<Number>(cache, block, a.padded, scratch.converted, scratch.converted + half);
    block.keys = scratch.converted;
    block.values = scratch.converted + half;
  }
  return block;
}

// Block `index` of a row, `count` keys of it there.
template <class Number>
Block fetch_block(const Attention& a, int head, const RowView& row, int index, int count, Scratch& scratch) {
  const FeedView& feed = a.feeds[row.feed];
  const int tail = row.shared / kTileRows;  // first block that is the row's own
  if (row.count > row.shared && index >= tail) {
    return fetch<Number>(a, head, -1, a.tails + row.tail + (index - tail) * kTileRows, count, scratch);
  }
  if (feed.tiles[index] >= 0) return fetch<Number>(a, head, feed.tiles[index], nullptr, count, scratch);
  std::int32_t slots[kTileRows];
  for (int i = 0; i < count; ++i) {
    const int position = index * kTileRows + i;
    slots[i] = feed.pages[position / a.page_size] * a.page_size + position % a.page_size;
  }
  return fetch<Number>(a, head, -1, slots, count, scratch);
}

// ---- attention ----

struct State {
  F best[kQueries];   // largest score so far, in units of log 2, in all places
  F total[kQueries];  // sums of weights, by lane
};

template <class Dot, int R, int C>
inline void add_columns(const Block& block, const typename Dot::Number* weights, int column, int padded, int count,
                        const F* falls, float* acc) {
  F sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sums[r][c] = load(acc + r * padded + column + 16 * c);
  }
  if (falls) {
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) sums[r][c] = sums[r][c] * falls[r];
    }
  }
  Dot::template add_values<R, C>(block, weights, column, padded, count, sums);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(acc + r * padded + column + 16 * c, sums[r][c]);
  }
}

template <class Dot, int R>
inline void add_all(const Block& block, const typename Dot::Number* weights, int padded, int count, const F* falls,
                    float* acc) {
  int column = 0;
  for (; column + 16 * kColumns <= padded; column += 16 * kColumns) {
    add_columns<Dot, R, kColumns>(block, weights, column, padded, count, falls, acc);
  }
  for (; column < padded; column += 16) add_columns<Dot, R, 1>(block, weights, column, padded, count, falls, acc);
}

// R queries see a block: query r its first counts[r] keys, which may be none; at most `count` anyone.
template <class Dot, int R>
void see(const Attention& a, const Block& block, int count, const int* counts, const typename Dot::Number* queries,
         int first_state, State& state, Scratch& scratch) {
  const int padded = a.padded;
  const bool whole = count == kTileRows && !counts;
  F s[R][2];
  if (count > 16) {
    Dot::template scores<R, 2>(block, queries, padded, s);
  } else {
    Dot::template scores<R, 1>(block, queries, padded, s);
  }
  auto* weights = reinterpret_cast<typename Dot::Number*>(scratch.weights);
  F falls[R];  // what earlier sums shrink by
  bool any = false;
  for (int r = 0; r < R; ++r) {
    if (count <= 16) s[r][1] = all(-__builtin_inff());
    if (block.scales) {
      s[r][0] = s[r][0] * load(block.scales);
      s[r][1] = s[r][1] * load(block.scales + 16);
    }
    if (!whole) {
      const int own = counts ? counts[r] : count;
      s[r][0] = first(own, s[r][0], -__builtin_inff());
      s[r][1] = first(own - 16, s[r][1], -__builtin_inff());
    }
    const F before = state.best[first_state + r];
    const F best = larger(largest(larger(s[r][0], s[r][1])), before);
    falls[r] = before - best;
    any |= differ(before, best);
    state.best[first_state + r] = best;
  }
  if (any) {  // else each of them is exactly 1, which multiplies nothing
    for (int r = 0; r < R; ++r) {
      falls[r] = exp2_negative(falls[r]);
      state.total[first_state + r] = state.total[first_state + r] * falls[r];
    }
  }
  for (int r = 0; r < R; ++r) {
    const F best = state.best[first_state + r];
    F p0 = exp2_negative(s[r][0] - best), p1 = exp2_negative(s[r][1] - best);
    state.total[first_state + r] = state.total[first_state + r] + (p0 + p1);
    if (block.scales) {
      p0 = p0 * load(block.scales + kTileRows);
      p1 = p1 * load(block.scales + kTileRows + 16);
      if (!whole) {  // a scale beyond the count may be anything
        const int own = counts ? counts[r] : count;
        p0 = first(own, p0, 0.0f);
        p1 = first(own - 16, p1, 0.0f);
      }
    }
    Dot::put_weights(weights + r * 32, p0, p1);
  }
  float* acc = scratch.acc + first_state * padded;
  if (!counts) return add_all<Dot, R>(block, weights, padded, count, any ? falls : nullptr, acc);
  for (int r = 0; r < R; ++r) {  // differing counts: one query after the other, none multiplies what it does not see
    add_all<Dot, 1>(block, weights + r * 32, padded, counts[r], any ? falls + r : nullptr, acc + r * padded);
  }
}

template <class Dot>
void see(const Attention& a, const Block& block, int count, const int* counts, const typename Dot::Number* queries,
         int n, int first_state, State& state, Scratch& scratch) {
  switch (n) {
    case 1: return see<Dot, 1>(a, block, count, counts, queries, first_state, state, scratch);
    case 2: return see<Dot, 2>(a, block, count, counts, queries, first_state, state, scratch);
    case 3: return see<Dot, 3>(a, block, count, counts, queries, first_state, state, scratch);
    case 4: return see<Dot, at_most(4, kQueries)>(a, block, count, counts, queries, first_state, state, scratch);
    case 5: return see<Dot, at_most(5, kQueries)>(a, block, count, counts, queries, first_state, state, scratch);
    case 6: return see<Dot, at_most(6, kQueries)>(a, block, count, counts, queries, first_state, state, scratch);
  }
}

// Queries [begin, end), at most kQueries, of rows of one feed.
template <class Dot>
void attend_group(const Attention& a, int head, int begin, int end, Scratch& scratch) {
  using Number = typename Dot::Number;
  const int padded = a.padded, n = end - begin;
  const Number* queries = static_cast<const Number*>(a.queries) +
                          (static_cast<std::int64_t>(head) * a.row_count * a.group + begin) * padded;
  State state;
  for (int i = 0; i < n; ++i) {
    state.best[i] = all(-__builtin_inff());
    state.total[i] = zero();
  }
  std::memset(scratch.acc, 0, static_cast<std::size_t>(n) * padded * sizeof(float));

  int together = 1 << 30;  // whole blocks that all rows share
  for (int row = begin / a.group; row <= (end - 1) / a.group; ++row) {
    together = at_most(together, a.rows[row].shared / kTileRows);
  }
  const std::int32_t* tiles = a.feeds[a.rows[begin / a.group].feed].tiles;
  for (int index = 0; index < together; ++index) {
    Block block = fetch_block<Number>(a, head, a.rows[begin / a.group], index, kTileRows, scratch);
    if (index + 1 < together && tiles[index + 1] >= 0) block.next = tile_of(a.cache, head, tiles[index + 1]);
    see<Dot>(a, block, kTileRows, nullptr, queries, n, 0, state, scratch);
  }
  // Then rows in their feed's order go on together, each to its own count, and a row of a branch goes alone.
  for (int i = begin; i < end;) {
    int next = at_most(end, (i / a.group + 1) * a.group);
    const RowView* last = &a.rows[i / a.group];
    const bool in_order = last->count == last->shared;
    while (in_order && next < end) {
      const RowView& row = a.rows[next / a.group];
      if (row.count != row.shared) break;
      if (row.count > last->count) last = &row;
      next = at_most(end, next + a.group);
    }
    const bool alike = (next - 1) / a.group == i / a.group;
    for (int index = together; index * kTileRows < last->count; ++index) {
      const int count = at_most(last->count - index * kTileRows, kTileRows);
      int counts[kQueries];
      for (int j = i; j < next; ++j) {
        const int left = a.rows[j / a.group].count - index * kTileRows;
        counts[j - i] = left < 0 ? 0 : at_most(left, kTileRows);
      }
      const Block block = fetch_block<Number>(a, head, *last, index, count, scratch);
      see<Dot>(a, block, count, alike ? nullptr : counts, queries + (i - begin) * padded, next - i, i - begin, state,
               scratch);
    }
    i = next;
  }
  for (int i = 0; i < n; ++i) {
    const int row = (begin + i) / a.group, query_head = head * a.group + (begin + i) % a.group;
    float* out = a.out + row * a.out_stride + static_cast<std::int64_t>(query_head) * a.head_dim;
    const float factor = 1.0f / sum(state.total[i]);
    const float* acc = scratch.acc + i * padded;
    for (int c = 0; c < a.head_dim; ++c) out[c] = acc[c] * factor;
  }
}

template <class Dot>
void attend_with(const Attention& a, int head, int begin, int end, std::uint8_t* memory) {
  const auto take = [&memory](std::size_t bytes) {
    std::uint8_t* start = memory;
    memory += bytes;
    return start;
  };
  const std::size_t row = static_cast<std::size_t>(a.padded) * sizeof(float);
  Scratch scratch;
  scratch.gathered = take(2 * kTileRows * row);
  scratch.converted = take(2 * kTileRows * row);
  scratch.scales = reinterpret_cast<float*>(take(2 * kTileRows * sizeof(float)));
  scratch.acc = reinterpret_cast<float*>(take(kQueries * row));
  scratch.weights = take(kQueries * kTileRows * sizeof(float));
  while (begin < end) {
    const int feed = a.rows[begin / a.group].feed;
    int next = begin;
    while (next < end && next - begin < kQueries && a.rows[next / a.group].feed == feed) ++next;
    attend_group<Dot>(a, head, begin, next, scratch);
    begin = next;
  }
}

void expect(const Attention& a, int head, int begin) {
  const int tile = a.feeds[a.rows[begin / a.group].feed].tiles[0];
  if (tile < 0) return;
  const std::uint8_t* start = tile_of(a.cache, head, tile);
  for (int byte = 0; byte < a.cache.tile_bytes; byte += 64) prefetch(start + byte);
}

void attend(const Attention& a, int head, int begin, int end, std::uint8_t* scratch) {
#ifdef OUTRIDER_PAIRS
  if (a.pairs) return attend_with<Pairs>(a, head, begin, end, scratch);
#endif
  attend_with<Single>(a, head, begin, end, scratch);
}

}  // namespace
}  // namespace outrider
