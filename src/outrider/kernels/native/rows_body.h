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

// 2^x for x <= 0, exactly 1 at 0 and exactly 0 below -126; relative error under 1e-7 between.
// The polynomial is the best relative fit of degree 6 to 2^f on [-1/2, 1/2] that is 1 at 0.
inline F exp2_negative(F x) {
  F whole, f;
  split(larger(x, all(-126.0f)), whole, f);
  F p = all(0x1.41fbbcp-13f);
  p = fma(p, f, all(0x1.5f3e54p-10f));
  p = fma(p, f, all(0x1.3b2d4cp-7f));
  p = fma(p, f, all(0x1.c6aee8p-5f));
  p = fma(p, f, all(0x1.ebfbdcp-3f));
  p = fma(p, f, all(0x1.62e430p-1f));
  p = fma(p, f, all(1.0f));
  return zero_below(x, -126.0f, scale_by_power(p, whole));
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

// ---- a block of keys and values in the form in which they are multiplied ----

struct Block {
  const std::uint8_t* keys[2];
  const std::uint8_t* values[2];
  const float* scales[2];  // int8: 16 of keys, then 16 of values; else null
};

// fp32 tiles: keys [d'][16], values [16][d']
struct Single {
  using Number = float;

  template <int R>
  static void scores(const Block& block, const float* q, int padded, int tiles, F (&s)[R][2]) {
    for (int t = 0; t < tiles; ++t) {
      const auto* keys = reinterpret_cast<const float*>(block.keys[t]);
      F even[R], odd[R];  // two chains per query, so that one query alone does not wait for each sum
      for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
      for (int i = 0; i < padded; i += 2) {
        const F a = load(keys + i * 16), b = load(keys + i * 16 + 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          even[r] = fma(all(q[r * padded + i]), a, even[r]);
          odd[r] = fma(all(q[r * padded + i + 1]), b, odd[r]);
        }
      }
      for (int r = 0; r < R; ++r) s[r][t] = even[r] + odd[r];
    }
  }

  static void put_weights(float* p, F a, F b) {
    store(p, a);
    store(p + 16, b);
  }

  template <int R, int C>
  static void add_values(const Block& block, const float* weights, int column, int padded, int count, F (&acc)[R][C]) {
    for (int t = 0; t < 2; ++t) {
      const auto* values = reinterpret_cast<const float*>(block.values[t]) + column;
      const int keys = at_most(count - 16 * t, 16);
      for (int j = 0; j < keys; ++j) {
        F v[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) v[c] = load(values + j * padded + 16 * c);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const F p = all(weights[r * 32 + 16 * t + j]);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) acc[r][c] = fma(p, v[c], acc[r][c]);
        }
      }
    }
  }
};

#ifdef OUTRIDER_PAIRS
// bf16 tiles of pairs: keys [d' / 2][16][2], values [8][d'][2]; products in pairs, sums in fp32
struct Pairs {
  using Number = std::uint16_t;

  static __m512bh pair(const std::uint16_t* p) {
    int bits;
    std::memcpy(&bits, p, 4);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
  }
  static __m512bh vector(const void* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

  template <int R>
  static void scores(const Block& block, const std::uint16_t* q, int padded, int tiles, F (&s)[R][2]) {
    for (int t = 0; t < tiles; ++t) {
      const auto* keys = reinterpret_cast<const std::uint16_t*>(block.keys[t]);
      F even[R], odd[R];
      for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
      for (int i = 0; i < padded; i += 4) {
        const __m512bh a = vector(keys + i * 16), b = vector(keys + i * 16 + 32);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          even[r].v = _mm512_dpbf16_ps(even[r].v, a, pair(q + r * padded + i));
          odd[r].v = _mm512_dpbf16_ps(odd[r].v, b, pair(q + r * padded + i + 2));
        }
      }
      for (int r = 0; r < R; ++r) s[r][t] = even[r] + odd[r];
    }
  }

  static void put_weights(std::uint16_t* p, F a, F b) {
    _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.v, a.v)));
  }

  template <int R, int C>
  static void add_values(const Block& block, const std::uint16_t* weights, int column, int padded, int count,
                         F (&acc)[R][C]) {
    for (int t = 0; t < 2; ++t) {
      const auto* values = reinterpret_cast<const std::uint16_t*>(block.values[t]) + 2 * column;
      const int keys = at_most(count - 16 * t, 16);
      for (int j = 0; j + 2 <= keys; j += 2) {
        __m512bh v[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) v[c] = vector(values + j * padded + 32 * c);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512bh p = pair(weights + r * 32 + 16 * t + j);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) acc[r][c].v = _mm512_dpbf16_ps(acc[r][c].v, v[c], p);
        }
      }
      if (keys > 0 && keys % 2) {  // the pair's second key is not there: whatever lies there must not be multiplied
        const int j = keys - 1;
        for (int c = 0; c < C; ++c) {
          const __m512i both = _mm512_loadu_si512(values + j * padded + 32 * c);
          const auto v = reinterpret_cast<__m512bh>(_mm512_and_si512(both, _mm512_set1_epi32(0xffff)));
          for (int r = 0; r < R; ++r) {
            acc[r][c].v = _mm512_dpbf16_ps(acc[r][c].v, v, pair(weights + r * 32 + 16 * t + j));
          }
        }
      }
    }
  }
};
#endif

// ---- from the cache to a block ----

struct Scratch {
  std::uint8_t* gathered;   // [2] tiles, keys and values each, in the cache's format
  std::uint8_t* converted;  // the same in the format of the products
  float scales[2][32];
  float* acc;               // [kQueries, d']
  std::uint8_t* weights;    // [kQueries, 32] Numbers
};

inline const std::uint8_t* tile_of(const CacheView& cache, int head, int tile) {
  const std::int64_t index = (static_cast<std::int64_t>(tile / 4) * cache.kv_heads + head) * 4 + tile % 4;
  return cache.data + index * cache.tile_bytes;
}

template <class Number>
inline void copy_column(const Number* from, int source, Number* to, int target, int padded, int pairs) {
  // keys: element i of a row is at [i / pairs][row][i % pairs]
  for (int i = 0; i < padded / pairs; ++i) {
    std::memcpy(to + (i * 16 + target) * pairs, from + (i * 16 + source) * pairs, pairs * sizeof(Number));
  }
}

template <class Number>
inline void copy_row(const Number* from, int source, Number* to, int target, int padded, int pairs) {
  // values: element i of a row is at [row / pairs][i][row % pairs]
  const Number* a = from + (source / pairs) * padded * pairs + source % pairs;
  Number* b = to + (target / pairs) * padded * pairs + target % pairs;
  for (int i = 0; i < padded; ++i) b[i * pairs] = a[i * pairs];
}

template <class Number>
void gather(const CacheView& cache, int head, const std::int32_t* slots, int count, int padded, int pairs,
            std::uint8_t* keys, std::uint8_t* values, float* scales) {
  int begin = 0;
  if (slots[0] % 16 == 0) {  // most often a tile that is left half-way: take it whole, then set the others right
    const std::uint8_t* tile = tile_of(cache, head, slots[0] / 16);
    std::memcpy(keys, tile, 16 * padded * sizeof(Number));
    std::memcpy(values, tile + cache.values, 16 * padded * sizeof(Number));
    if (scales) std::memcpy(scales, tile + cache.scales, 32 * sizeof(float));
    while (begin < count && slots[begin] == slots[0] + begin) ++begin;
  }
  for (int i = begin; i < count; ++i) {
    const std::uint8_t* tile = tile_of(cache, head, slots[i] / 16);
    const int lane = slots[i] % 16;
    copy_column(reinterpret_cast<const Number*>(tile), lane, reinterpret_cast<Number*>(keys), i, padded, pairs);
    copy_row(reinterpret_cast<const Number*>(tile + cache.values), lane, reinterpret_cast<Number*>(values), i, padded,
             pairs);
    if (scales) {
      const auto* from = reinterpret_cast<const float*>(tile + cache.scales);
      scales[i] = from[lane];
      scales[16 + i] = from[16 + lane];
    }
  }
}

// One tile of pairs to fp32 in the order of `Single`. `keys`: pairs along d, else along the rows.
template <class Unpack>
inline void unpack_tile(Unpack unpack, int padded, bool keys, float* to) {
  for (int i = 0; i < padded * 16; i += 32) {  // 16 pairs
    F even, odd;
    unpack(i, even, odd);
    if (keys) {  // pair i / 32 of d, 16 rows
      store(to + i, even);
      store(to + i + 16, odd);
    } else {  // rows 2k and 2k + 1, columns [c, c + 16)
      const int k = i / (2 * padded), c = (i % (2 * padded)) / 2;
      store(to + 2 * k * padded + c, even);
      store(to + (2 * k + 1) * padded + c, odd);
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

template <class Number>
void convert(const CacheView& cache, const std::uint8_t* from, int padded, bool keys, std::uint8_t* to) {
#ifdef OUTRIDER_PAIRS
  if (sizeof(Number) == 2) {  // int8 to bf16, which holds every int8 exactly; the order of pairs stays
    for (int i = 0; i < padded * 16; i += 32) {
      const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(x)));
      const __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(x, 1)));
      _mm512_storeu_si512(to + 2 * i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
    }
    return;
  }
#endif
  auto* out = reinterpret_cast<float*>(to);
  if (cache.format == KvFormat::bf16) {
    unpack_tile(UnpackBf16{reinterpret_cast<const std::uint16_t*>(from)}, padded, keys, out);
  } else {
    unpack_tile(UnpackInt8{reinterpret_cast<const std::int8_t*>(from)}, padded, keys, out);
  }
}

// Tile t (0 or 1) of a block, of `count` rows that lie in `slots`; or in storage tile `tile` in order, if that is >= 0.
template <class Number>
void fetch(const Attention& a, int head, int t, int tile, const std::int32_t* slots, int count, Scratch& scratch,
           Block& block) {
  const CacheView& cache = a.cache;
  if (tile < 0 && slots[0] % 16 == 0) {
    int run = 1;
    while (run < count && slots[run] == slots[0] + run) ++run;
    if (run == count) tile = slots[0] / 16;
  }
  const std::uint8_t *keys, *values;
  const float* scales = nullptr;
  if (tile >= 0) {
    keys = tile_of(cache, head, tile);
    values = keys + cache.values;
    if (cache.format == KvFormat::int8) scales = reinterpret_cast<const float*>(keys + cache.scales);
  } else {
    std::uint8_t* place = scratch.gathered + t * 2 * 16 * a.padded * sizeof(float);
    std::uint8_t* second = place + 16 * a.padded * sizeof(float);
    switch (cache.format) {
      case KvFormat::fp32: gather<float>(cache, head, slots, count, a.padded, 1, place, second, nullptr); break;
      case KvFormat::bf16: gather<std::uint16_t>(cache, head, slots, count, a.padded, 2, place, second, nullptr); break;
      case KvFormat::int8:
        gather<std::int8_t>(cache, head, slots, count, a.padded, 2, place, second, scratch.scales[t]);
        scales = scratch.scales[t];
        break;
    }
    keys = place;
    values = second;
  }
  const bool as_stored = cache.format == KvFormat::fp32 || (cache.format == KvFormat::bf16 && sizeof(Number) == 2);
  if (!as_stored) {
    std::uint8_t* place = scratch.converted + t * 2 * 16 * a.padded * sizeof(float);
    std::uint8_t* second = place + 16 * a.padded * sizeof(float);
    convert<Number>(cache, keys, a.padded, true, place);
    convert<Number>(cache, values, a.padded, false, second);
    keys = place;
    values = second;
  }
  block.keys[t] = keys;
  block.values[t] = values;
  block.scales[t] = scales;
}

// Block `index` of a row, `count` keys of it there.
template <class Number>
void fetch_block(const Attention& a, int head, const RowView& row, int index, int count, Scratch& scratch,
                 Block& block) {
  const FeedView& feed = a.feeds[row.feed];
  const int tail = row.shared / kBlockRows;  // first block that is the row's own
  for (int t = 0; t * 16 < count; ++t) {
    const int first = index * kBlockRows + t * 16, keys = at_most(count - t * 16, 16);
    if (row.count > row.shared && index >= tail) {
      const std::int32_t* slots = a.tails + row.tail + (first - tail * kBlockRows);
      fetch<Number>(a, head, t, -1, slots, keys, scratch, block);
    } else if (const int tile = feed.tiles[first / 16]; tile >= 0) {
      fetch<Number>(a, head, t, tile, nullptr, keys, scratch, block);
    } else {
      std::int32_t slots[16];
      for (int i = 0; i < keys; ++i) {
        slots[i] = feed.pages[(first + i) / a.page_size] * a.page_size + (first + i) % a.page_size;
      }
      fetch<Number>(a, head, t, -1, slots, keys, scratch, block);
    }
  }
  if (count <= 16) {
    block.keys[1] = block.keys[0];
    block.values[1] = block.values[0];
    block.scales[1] = block.scales[0];
  }
}

// ---- attention ----

struct State {
  float best[kQueries];  // largest score so far, in units of log 2
  F total[kQueries];     // sums of weights, by lane
};

template <class Dot, int R, int C>
inline void add_columns(const Block& block, const typename Dot::Number* weights, int column, int padded, int count,
                        const float* factors, float* acc) {
  F sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sums[r][c] = load(acc + r * padded + column + 16 * c) * all(factors[r]);
  }
  Dot::template add_values<R, C>(block, weights, column, padded, count, sums);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) store(acc + r * padded + column + 16 * c, sums[r][c]);
  }
}

// R queries see the first `count` keys of a block.
template <class Dot, int R>
void see(const Attention& a, const Block& block, int count, const typename Dot::Number* queries, int first_state,
         State& state, Scratch& scratch) {
  const int padded = a.padded;
  F s[R][2];
  Dot::template scores<R>(block, queries, padded, count > 16 ? 2 : 1, s);
  auto* weights = reinterpret_cast<typename Dot::Number*>(scratch.weights);
  alignas(64) float falls[16] = {};
  for (int r = 0; r < R; ++r) {
    if (count <= 16) s[r][1] = all(-__builtin_inff());
    if (block.scales[0]) {
      s[r][0] = s[r][0] * load(block.scales[0]);
      s[r][1] = s[r][1] * load(block.scales[1]);
    }
    if (count < kBlockRows) {
      s[r][0] = first(count, s[r][0], -__builtin_inff());
      s[r][1] = first(count - 16, s[r][1], -__builtin_inff());
    }
    const float before = state.best[first_state + r];
    const float here = largest(larger(s[r][0], s[r][1]));
    const float best = here > before ? here : before;
    falls[r] = before - best;
    state.best[first_state + r] = best;
  }
  store(falls, exp2_negative(load(falls)));  // what earlier sums shrink by; exactly 1 where the maximum stays
  for (int r = 0; r < R; ++r) {
    const F best = all(state.best[first_state + r]);
    F p0 = exp2_negative(s[r][0] - best), p1 = exp2_negative(s[r][1] - best);
    F& total = state.total[first_state + r];
    total = total * all(falls[r]) + (p0 + p1);
    if (block.scales[0]) {
      p0 = p0 * load(block.scales[0] + 16);
      p1 = p1 * load(block.scales[1] + 16);
      if (count < kBlockRows) {  // a scale beyond the count may be anything
        p0 = first(count, p0, 0.0f);
        p1 = first(count - 16, p1, 0.0f);
      }
    }
    Dot::put_weights(weights + r * 32, p0, p1);
  }
  float* acc = scratch.acc + first_state * padded;
  int column = 0;
  for (; column + 16 * kColumns <= padded; column += 16 * kColumns) {
    add_columns<Dot, R, kColumns>(block, weights, column, padded, count, falls, acc);
  }
  for (; column < padded; column += 16) add_columns<Dot, R, 1>(block, weights, column, padded, count, falls, acc);
}

template <class Dot>
void see(const Attention& a, const Block& block, int count, const typename Dot::Number* queries, int n,
         int first_state, State& state, Scratch& scratch) {
  switch (n) {
    case 1: return see<Dot, 1>(a, block, count, queries, first_state, state, scratch);
    case 2: return see<Dot, 2>(a, block, count, queries, first_state, state, scratch);
    case 3: return see<Dot, 3>(a, block, count, queries, first_state, state, scratch);
    case 4: return see<Dot, at_most(4, kQueries)>(a, block, count, queries, first_state, state, scratch);
    case 5: return see<Dot, at_most(5, kQueries)>(a, block, count, queries, first_state, state, scratch);
    case 6: return see<Dot, at_most(6, kQueries)>(a, block, count, queries, first_state, state, scratch);
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
    state.best[i] = -__builtin_inff();
    state.total[i] = zero();
  }
  std::memset(scratch.acc, 0, static_cast<std::size_t>(n) * padded * sizeof(float));

  int together = 1 << 30;  // whole blocks that all rows share
  for (int row = begin / a.group; row <= (end - 1) / a.group; ++row) {
    together = at_most(together, at_most(a.rows[row].shared, a.rows[row].count) / kBlockRows);
  }
  Block block;
  for (int index = 0; index < together; ++index) {
    fetch_block<Number>(a, head, a.rows[begin / a.group], index, kBlockRows, scratch, block);
    see<Dot>(a, block, kBlockRows, queries, n, 0, state, scratch);
  }
  for (int i = begin; i < end;) {
    const RowView& row = a.rows[i / a.group];
    const int next = at_most(end, (i / a.group + 1) * a.group);
    for (int index = together; index * kBlockRows < row.count; ++index) {
      const int count = at_most(row.count - index * kBlockRows, kBlockRows);
      fetch_block<Number>(a, head, row, index, count, scratch, block);
      see<Dot>(a, block, count, queries + (i - begin) * padded, next - i, i - begin, state, scratch);
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
  const std::size_t tiles = static_cast<std::size_t>(a.padded) * kBlockRows * 2 * sizeof(float);
  Scratch scratch;
  scratch.gathered = memory;
  scratch.converted = memory + tiles;
  scratch.acc = reinterpret_cast<float*>(memory + 2 * tiles);
  scratch.weights = memory + 2 * tiles + 8 * static_cast<std::size_t>(a.padded) * sizeof(float);
  while (begin < end) {
    const int feed = a.rows[begin / a.group].feed;
    int next = begin;
    while (next < end && next - begin < kQueries && a.rows[next / a.group].feed == feed) ++next;
    attend_group<Dot>(a, head, begin, next, scratch);
    begin = next;
  }
}

void attend(const Attention& a, int head, int begin, int end, std::uint8_t* scratch) {
#ifdef OUTRIDER_PAIRS
  if (a.pairs) return attend_with<Pairs>(a, head, begin, end, scratch);
#endif
  attend_with<Single>(a, head, begin, end, scratch);
}

}  // namespace
}  // namespace outrider
