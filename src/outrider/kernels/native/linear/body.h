// The kernels, written once over 16-wide vectors. Included by linear_*.cpp, each of which first defines, in an unnamed
// namespace, its vectors (Floats, Ints, Bytes, Right), their operations, and:
//   kRows    rows of a chunk, kept in registers together with
//   kBlocks  blocks of 16 columns of a chunk: 1, or 2 = the whole unit
//   kSigned  does dot() take weights as signed, so that no correction by the sum of activations is due?
//   kBf16    does it multiply bf16 by bf16?
//
// Every output element is computed by the same operations in the same order, whatever R, the chunk or the tile:
// fp32 and bf16 add along K, one product (or pair) after the other; int8 and int4 add exactly within a group and then
// acc = fma(float(sum), scale of weight * scale of activation, acc), group after group.
//
// Speed rests on three things. Weights are one stream per unit with prefetches kAhead in front, spread evenly over the
// arithmetic: that reaches the bus limit, and goes on doing so under 8 rows' arithmetic. Up to 16 rows share what was
// loaded: the second tile of 8 finds the group's weights in L1. And a chunk holds nothing in registers but integer sums;
// sums of floats wait in L1, where a load per group costs nothing.
#pragma once

#include "linear/layout.h"

#if defined(__clang__)
#define OUTRIDER_UNROLL _Pragma("clang loop unroll(full)")
#define OUTRIDER_LOOP _Pragma("clang loop unroll(disable)")
#else
#define OUTRIDER_UNROLL _Pragma("GCC unroll 16")
#define OUTRIDER_LOOP _Pragma("GCC unroll 1")  // unrolled along K: 8 % slower at one row, 30 % at 16
#endif
#if !defined(OUTRIDER_CHUNK)
#define OUTRIDER_CHUNK OUTRIDER_OP  // inlined
#endif

namespace outrider {
namespace {

constexpr std::size_t kAhead = 8192;  // bytes; 4096 leaves 15 % at 8 rows, 16384 loses 5 % at one
constexpr std::size_t kLine = 64;

OUTRIDER_OP void ask(const std::uint8_t* p) { __builtin_prefetch(p, 0, 3); }

// Compilers would rather keep the sums of floats in registers from group to group, at the price of the integer sums' room
// and of converting them all at once: 15 % slower at 16 rows.
OUTRIDER_OP void keep_in_memory() { __asm__ volatile("" ::: "memory"); }

// Chunk `index` asks for its share, of `sharers` equal ones, of the `lines` of the block kAhead in front: at step s of its
// loop, when two lines are consumed per step.
template <int sharers>
OUTRIDER_OP void ask_share(const std::uint8_t* ahead, int index, int lines, int s) {
  if (index >= sharers) return;
  const std::uint8_t* p = ahead + static_cast<std::size_t>(lines / sharers * index) * kLine;
  if constexpr (sharers == 1) {
    ask(p + static_cast<std::size_t>(s) * 2 * kLine);
    ask(p + (static_cast<std::size_t>(s) * 2 + 1) * kLine);
  } else {
    constexpr int steps = sharers / 2;
    if (s % steps == 0) ask(p + static_cast<std::size_t>(s / steps) * kLine);
  }
}

constexpr int sharers_of(int chunks) { return chunks >= 8 ? 8 : chunks >= 4 ? 4 : chunks >= 2 ? 2 : 1; }

// --- chunks: R rows x B blocks of 16 columns over one group or a run of blocks ------------------------------------------
// w: the unit's weights from block g on; a: the activations of the chunk's first row from there on, `stride` bytes from
// row to row; column: the chunk's first; acc: [R][32] sums from there on; ahead: what to prefetch, as `index`-th chunk.

struct Place {
  int column, g, blocks, index;
  std::size_t stride;
  const std::uint8_t* head;  // of the group of the first row
};

struct Fp32 {
  static constexpr std::size_t kWeights = 16 * kUnit * 4, kActivations = 16 * 4, kHead = 0;
  static constexpr int kRun = 2;
  static std::size_t lead(int) { return 0; }

  template <int R, int B, int sharers>
  static OUTRIDER_CHUNK void chunk(const std::uint8_t* w, const std::uint8_t* a, const Place& at, float* acc,
                                    const std::uint8_t* ahead) {
    w += 4 * at.column;
    Floats sum[R][B];
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) OUTRIDER_UNROLL for (int b = 0; b < B; ++b) sum[r][b] = load(acc + 32 * r + 16 * b);
    for (int i = 0; i < at.blocks; ++i, w += kWeights, a += kActivations, ahead += kWeights) {
      OUTRIDER_LOOP for (int k = 0; k < 16; ++k) {
        Floats x[B];
        OUTRIDER_UNROLL for (int b = 0; b < B; ++b) x[b] = load(reinterpret_cast<const float*>(w + k * kUnit * 4 + 64 * b));
        ask_share<sharers>(ahead, at.index, kWeights / kLine, k);
        OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
          const Floats y = spread(reinterpret_cast<const float*>(a + at.stride * r + 4 * k));
          OUTRIDER_UNROLL for (int b = 0; b < B; ++b) add_product(sum[r][b], x[b], y);
        }
      }
    }
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) OUTRIDER_UNROLL for (int b = 0; b < B; ++b) store(acc + 32 * r + 16 * b, sum[r][b]);
  }
};

// bf16 weights with bf16 activations, where the processor multiplies pairs of them.
struct Bf16 {
  static constexpr std::size_t kWeights = 32 * kUnit * 2, kActivations = 32 * 2, kHead = 0;
  static constexpr int kRun = 2;
  static std::size_t lead(int) { return 0; }

  template <int R, int B, int sharers>
  static OUTRIDER_CHUNK void chunk(const std::uint8_t* w, const std::uint8_t* a, const Place& at, float* acc,
                                    const std::uint8_t* ahead) {
    w += 4 * at.column;
    Floats sum[R][B];
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) OUTRIDER_UNROLL for (int b = 0; b < B; ++b) sum[r][b] = load(acc + 32 * r + 16 * b);
    for (int i = 0; i < at.blocks; ++i, w += kWeights, a += kActivations, ahead += kWeights) {
      OUTRIDER_LOOP for (int k = 0; k < 16; ++k) {
        Bytes x[B];
        OUTRIDER_UNROLL for (int b = 0; b < B; ++b) x[b] = load_bytes(w + k * kUnit * 4 + 64 * b);
        ask_share<sharers>(ahead, at.index, kWeights / kLine, k);
        OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
          const Right y = right(a + at.stride * r + 4 * k);
          OUTRIDER_UNROLL for (int b = 0; b < B; ++b) add_pairs(sum[r][b], x[b], y);
        }
      }
    }
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) OUTRIDER_UNROLL for (int b = 0; b < B; ++b) store(acc + 32 * r + 16 * b, sum[r][b]);
  }
};

// bf16 weights widened to fp32, with fp32 activations.
struct WideBf16 {
  static constexpr std::size_t kWeights = 32 * kUnit * 2, kActivations = 32 * 4, kHead = 0;
  static constexpr int kRun = 2;
  static std::size_t lead(int) { return 0; }

  template <int R, int B, int sharers>
  static OUTRIDER_CHUNK void chunk(const std::uint8_t* w, const std::uint8_t* a, const Place& at, float* acc,
                                    const std::uint8_t* ahead) {
    w += 4 * at.column;
    Floats sum[R][B];
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) OUTRIDER_UNROLL for (int b = 0; b < B; ++b) sum[r][b] = load(acc + 32 * r + 16 * b);
    for (int i = 0; i < at.blocks; ++i, w += kWeights, a += kActivations, ahead += kWeights) {
      OUTRIDER_LOOP for (int k = 0; k < 16; ++k) {
        Floats even[B], odd[B];
        OUTRIDER_UNROLL for (int b = 0; b < B; ++b) widen(w + k * kUnit * 4 + 64 * b, even[b], odd[b]);
        ask_share<sharers>(ahead, at.index, kWeights / kLine, k);
        OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
          const Floats first = spread(reinterpret_cast<const float*>(a + at.stride * r + 8 * k));
          const Floats second = spread(reinterpret_cast<const float*>(a + at.stride * r + 8 * k + 4));
          OUTRIDER_UNROLL for (int b = 0; b < B; ++b) {
            add_product(sum[r][b], even[b], first);
            add_product(sum[r][b], odd[b], second);
          }
        }
      }
    }
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) OUTRIDER_UNROLL for (int b = 0; b < B; ++b) store(acc + 32 * r + 16 * b, sum[r][b]);
  }
};

template <int G>
struct Int8 {
  static constexpr std::size_t kScales = 64, kWeights = kScales + G * kUnit;
  static constexpr std::size_t kActivations = G, kHead = kInt8Head;
  static constexpr int kRun = 1;
  static std::size_t lead(int) { return 0; }

  template <int R, int B, int sharers>
  static OUTRIDER_CHUNK void chunk(const std::uint8_t* group, const std::uint8_t* a, const Place& at, float* acc,
                                    const std::uint8_t* ahead) {
    const std::uint8_t* w = group + kScales + 4 * at.column;
    Ints sum[R][B];
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) OUTRIDER_UNROLL for (int b = 0; b < B; ++b) sum[r][b] = kSigned ? zero_ints() : spread(reinterpret_cast<const std::int32_t*>(at.head + at.stride * r + 4));
    if (at.index == 0) ask(ahead + G * kUnit);
    OUTRIDER_LOOP for (int k = 0; k < G / 4; ++k) {
      Left x[B];
      OUTRIDER_UNROLL for (int b = 0; b < B; ++b) x[b] = left(load_bytes(w + k * kUnit * 4 + 64 * b));
      ask_share<sharers>(ahead, at.index, G * kUnit / kLine, k);
      OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
        const Right y = right(a + at.stride * r + 4 * k);
        OUTRIDER_UNROLL for (int b = 0; b < B; ++b) dot(sum[r][b], x[b], y);
      }
    }
    Floats weight[B];
    OUTRIDER_UNROLL for (int b = 0; b < B; ++b) weight[b] = load_halves(group + 2 * at.column + 32 * b);
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
      const Floats scale = spread(reinterpret_cast<const float*>(at.head + at.stride * r));
      OUTRIDER_UNROLL for (int b = 0; b < B; ++b) {
        float* y = acc + 32 * r + 16 * b;
        store(y, fma(to_floats(sum[r][b]), mul(weight[b], scale), load(y)));
        keep_in_memory();
      }
    }
  }
};

template <Scales S>
struct Int4 {
  static constexpr std::size_t kScales = S == Scales::halves ? 128 : S == Scales::floats ? 256 : 64;
  static constexpr std::size_t kWeights = kScales + kInt4Group;
  static constexpr std::size_t kActivations = 32, kHead = kInt4Head;
  static constexpr int kRun = 1;
  // `packed` has a header in front of each 8 groups.
  static std::size_t lead(int g) { return S == Scales::packed && g % 8 == 0 ? kPackedHeader : 0; }

  static OUTRIDER_OP Floats scale_of(const std::uint8_t* group, const std::uint8_t* header, int column) {
    if constexpr (S == Scales::floats) return load(reinterpret_cast<const float*>(group) + column);
    if constexpr (S == Scales::packed) return mul(load_halves(header + 2 * column), load_small(group + column));
    return load_halves(group + 2 * column);
  }
  static OUTRIDER_OP Floats offset_of(const std::uint8_t* group, const std::uint8_t* header, int column) {
    if constexpr (S == Scales::floats) return load(reinterpret_cast<const float*>(group + 128) + column);
    if constexpr (S == Scales::packed) return negative(mul(load_halves(header + 64 + 2 * column), load_small(group + 32 + column)));
    return load_halves(group + 64 + 2 * column);
  }

  template <int R, int B, int sharers>
  static OUTRIDER_CHUNK void chunk(const std::uint8_t* group, const std::uint8_t* a, const Place& at, float* acc,
                                    const std::uint8_t* ahead) {
    const std::uint8_t* w = group + kScales + 4 * at.column;
    const std::uint8_t* header = group - static_cast<std::size_t>(at.g % 8) * kWeights - kPackedHeader;
    Ints sum[R][B];
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) OUTRIDER_UNROLL for (int b = 0; b < B; ++b) sum[r][b] = S == Scales::half ? spread(reinterpret_cast<const std::int32_t*>(at.head + at.stride * r + 4)) : zero_ints();
    if (at.index == 0)
      OUTRIDER_UNROLL for (std::size_t i = 0; i < kScales; i += kLine) ask(ahead + kInt4Group + i);
    OUTRIDER_UNROLL for (int j = 0; j < 4; ++j) {
      Nibbles low[B], high[B];
      OUTRIDER_UNROLL for (int b = 0; b < B; ++b) split_nibbles(load_bytes(w + j * kUnit * 4 + 64 * b), low[b], high[b]);
      ask_share<sharers>(ahead, at.index, kInt4Group / kLine, j);
      OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
        const Right y = right(a + at.stride * r + 8 * j), z = right(a + at.stride * r + 8 * j + 4);
        OUTRIDER_UNROLL for (int b = 0; b < B; ++b) dot(sum[r][b], low[b], y);
        OUTRIDER_UNROLL for (int b = 0; b < B; ++b) dot(sum[r][b], high[b], z);
      }
    }
    Floats weight[B], offset[B];
    OUTRIDER_UNROLL for (int b = 0; b < B; ++b) {
      weight[b] = scale_of(group, header, at.column + 16 * b);
      if constexpr (S != Scales::half) offset[b] = offset_of(group, header, at.column + 16 * b);
    }
    OUTRIDER_UNROLL for (int r = 0; r < R; ++r) {
      const float* scales = reinterpret_cast<const float*>(at.head + at.stride * r);
      const Floats scale = spread(scales), scaled_sum = spread(scales + 2);
      OUTRIDER_UNROLL for (int b = 0; b < B; ++b) {
        float* y = acc + 32 * r + 16 * b;
        Floats value = fma(to_floats(sum[r][b]), mul(weight[b], scale), load(y));
        if constexpr (S != Scales::half) value = fma(offset[b], scaled_sum, value);
        store(y, value);
        keep_in_memory();
      }
    }
  }
};

// --- a unit: up to two tiles of rows over the whole of K ----------------------------------------------------------------

constexpr int chunks(int rows) { return (rows + kRows - 1) / kRows * (2 / kBlocks); }

// Rows [row, R) of a tile: chunk after chunk, kRows rows and kBlocks blocks of columns each.
template <class Op, int R, int count, int row = 0>
OUTRIDER_OP void tile_rows(const std::uint8_t* w, const std::uint8_t* a, Place at, float* acc) {
  if constexpr (row < R) {
    constexpr int here = R - row < kRows ? R - row : kRows;
    for (at.column = 0; at.column < kUnit; at.column += 16 * kBlocks, ++at.index)
      Op::template chunk<here, kBlocks, sharers_of(count)>(w, a, at, acc + 32 * row + at.column, w + kAhead);
    at.head += at.stride * here;
    tile_rows<Op, R, count, row + kRows>(w, a + at.stride * here, at, acc);
  }
}

template <class Op, int R0, int R1>
void unit(const LinearView& v, const std::uint8_t* w, const std::uint8_t* a, std::size_t stride, float* acc) {
  constexpr int count = chunks(R0) + chunks(R1);
  for (int i = 0; i < (R0 + R1) * 2; ++i) {
    store(acc + 16 * i, zero_floats());
    keep_in_memory();  // or this becomes a call of memset
  }
  // fp32 and bf16: one chunk alone keeps its sums in registers along the whole of K, several take turns on what L1 holds.
  const int run = count == 1 && Op::kRun > 1 ? v.groups : Op::kRun;
  const std::uint8_t* head = a;
  a += heads_bytes(v.groups, Op::kHead);
  for (int g = 0; g < v.groups; g += run) {
    const int blocks = g + run < v.groups ? run : v.groups - g;
    w += Op::lead(g);
    tile_rows<Op, R0, count>(w, a, {0, g, blocks, 0, stride, head}, acc);
    if constexpr (R1 > 0)
      tile_rows<Op, R1, count>(w, a + R0 * stride, {0, g, blocks, chunks(R0), stride, head + R0 * stride}, acc + 32 * R0);
    w += static_cast<std::size_t>(run) * Op::kWeights;
    a += static_cast<std::size_t>(run) * Op::kActivations;
    head += Op::kHead;
  }
}

using UnitFunction = void (*)(const LinearView&, const std::uint8_t*, const std::uint8_t*, std::size_t, float*);

template <class Op>
UnitFunction unit_of(int rows) {
  static constexpr UnitFunction table[kBlock] = {
      unit<Op, 1, 0>, unit<Op, 2, 0>, unit<Op, 3, 0>, unit<Op, 4, 0>, unit<Op, 5, 0>, unit<Op, 6, 0>,
      unit<Op, 7, 0>, unit<Op, 8, 0>, unit<Op, 8, 1>, unit<Op, 8, 2>, unit<Op, 8, 3>, unit<Op, 8, 4>,
      unit<Op, 8, 5>, unit<Op, 8, 6>, unit<Op, 8, 7>, unit<Op, 8, 8>};
  return table[rows - 1];
}

UnitFunction unit_for(const LinearView& v, int rows) {
  switch (v.format) {
    case Format::fp32: return unit_of<Fp32>(rows);
    case Format::bf16:
      if constexpr (kBf16) return unit_of<Bf16>(rows);
      else return unit_of<WideBf16>(rows);
    case Format::int8:
      return v.group == 32 ? unit_of<Int8<32>>(rows) : v.group == 64 ? unit_of<Int8<64>>(rows) : unit_of<Int8<128>>(rows);
    case Format::int4: break;
  }
  switch (v.scales) {
    case Scales::half: return unit_of<Int4<Scales::half>>(rows);
    case Scales::halves: return unit_of<Int4<Scales::halves>>(rows);
    case Scales::floats: return unit_of<Int4<Scales::floats>>(rows);
    case Scales::packed: break;
  }
  return unit_of<Int4<Scales::packed>>(rows);
}

// --- epilogues ----------------------------------------------------------------------------------------------------------

// exp(x) for |x| <= 87: 2^n * (Taylor series of e^r to r^7), |r| <= ln 2 / 2; relative error below 2e-7.
OUTRIDER_OP Floats exponential(Floats x) {
  const Floats n = round_even(mul(x, spread(1.44269504f)));
  Floats r = fma(n, spread(-0.693145752f), x);  // ln 2 in two parts, the first exact in few bits
  r = fma(n, spread(-1.42860677e-6f), r);
  Floats p = spread(1.0f / 5040);
  p = fma(p, r, spread(1.0f / 720));
  p = fma(p, r, spread(1.0f / 120));
  p = fma(p, r, spread(1.0f / 24));
  p = fma(p, r, spread(1.0f / 6));
  p = fma(p, r, spread(0.5f));
  p = fma(p, r, spread(1.0f));
  p = fma(p, r, spread(1.0f));
  return times_two_to(p, n);
}

OUTRIDER_OP Floats silu(Floats x) {  // x / (1 + e^-x); NaN stays
  const Floats bounded = at_least(spread(-87.0f), at_most(spread(87.0f), x));
  return div(x, add(spread(1.0f), exponential(negative(bounded))));
}

// Up to 16 values to y.
OUTRIDER_OP void put(float* y, Floats value, int count, bool add_to_y) {
  if (count >= 16) {
    store(y, add_to_y ? add(load(y), value) : value);
    return;
  }
  alignas(64) float values[16];
  store(values, value);
  for (int i = 0; i < count; ++i) y[i] = add_to_y ? y[i] + values[i] : values[i];
}

void finish(const LinearView& v, int u, const float* acc, int rows, float* y, std::int64_t ldy, Epilogue epilogue) {
  const bool swiglu = epilogue == Epilogue::swiglu, add_to_y = epilogue == Epilogue::add;
  const std::int64_t first = static_cast<std::int64_t>(u) * (swiglu ? 16 : kUnit);
  const std::int64_t left = (swiglu ? v.n / 2 : v.n) - first;
  const int count = left < kUnit ? static_cast<int>(left) : kUnit;
  Floats bias[2] = {zero_floats(), zero_floats()};
  if (v.bias != nullptr)
    for (int b = 0; b < 2; ++b) bias[b] = load(v.bias + static_cast<std::int64_t>(u) * kUnit + 16 * b);
  for (int r = 0; r < rows; ++r, acc += kUnit) {
    float* out = y + r * ldy + first;
    Floats value[2] = {load(acc), load(acc + 16)};
    if (v.bias != nullptr)
      for (int b = 0; b < 2; ++b) value[b] = add(value[b], bias[b]);
    if (swiglu) {
      put(out, mul(silu(value[0]), value[1]), count, false);
    } else {
      put(out, value[0], count, add_to_y);
      if (count > 16) put(out + 16, value[1], count - 16, add_to_y);
    }
  }
}

// What the stream's own prefetches come too late for: the first weights, and activations that another thread prepared.
void ask_first(const LinearView& v, const std::uint8_t* activations, int M, int unit_begin, int unit_end) {
  const std::size_t weights = static_cast<std::size_t>(unit_end - unit_begin) * v.unit_bytes;
  const std::uint8_t* w = v.data + static_cast<std::size_t>(unit_begin) * v.unit_bytes;
  for (std::size_t i = 0; i < kAhead && i < weights; i += kLine) ask(w + i);
  if (M > kBlock) return;
  const std::size_t bytes = static_cast<std::size_t>(M) * row_stride(v);
  for (std::size_t i = 0; i < bytes; i += kLine) ask(activations + i);
}

void multiply_here(const LinearView& v, const std::uint8_t* activations, int M, int unit_begin, int unit_end, float* y,
                   std::int64_t ldy, Epilogue epilogue) {
  alignas(64) float acc[kBlock * kUnit];
  const std::size_t stride = row_stride(v);
  const UnitFunction whole = unit_for(v, M < kBlock ? M : kBlock);
  const UnitFunction rest = M % kBlock == 0 ? whole : unit_for(v, M % kBlock);
  ask_first(v, activations, M, unit_begin, unit_end);
  for (int u = unit_begin; u < unit_end; ++u) {
    const std::uint8_t* w = v.data + static_cast<std::size_t>(u) * v.unit_bytes;
    for (int m = 0; m < M; m += kBlock) {
      const int rows = M - m < kBlock ? M - m : kBlock;
      (rows == kBlock ? whole : rest)(v, w, activations + static_cast<std::size_t>(m) * stride, stride, acc);
      finish(v, u, acc, rows, y + m * ldy, ldy, epilogue);
    }
  }
}

// --- activations --------------------------------------------------------------------------------------------------------

void prepare_floats(const LinearView& v, const float* x, std::uint8_t* row) {
  const std::int64_t padded = static_cast<std::int64_t>(v.groups) * (v.format == Format::fp32 ? 16 : 32);
  float* out = reinterpret_cast<float*>(row);
  std::int64_t k = 0;
  for (; k + 16 <= v.k; k += 16) store(out + k, load(x + k));
  for (; k < padded; ++k) out[k] = k < v.k ? x[k] : 0.0f;
}

template <class Vector>  // Floats, where store_bf16() takes them
void prepare_bf16(const LinearView& v, const float* x, std::uint8_t* row) {
  const std::int64_t padded = static_cast<std::int64_t>(v.groups) * 32;
  std::int64_t k = 0;
  for (; k + 16 <= v.k; k += 16) store_bf16(row + 2 * k, Vector(load(x + k)));
  for (; k < padded; k += 16) {
    alignas(64) float last[16] = {};
    for (std::int64_t i = k; i < v.k && i < k + 16; ++i) last[i - k] = x[i];
    store_bf16(row + 2 * k, Vector(load(last)));
  }
}

// Scale = largest / 127 of each group, integers rounded to nearest even, and their sums.
template <int G>
void prepare_ints(const LinearView& v, const float* x, std::uint8_t* row) {
  const bool four = v.format == Format::int4;
  const std::size_t head_bytes = four ? kInt4Head : kInt8Head;
  std::uint8_t* head = row;
  std::int8_t* out = reinterpret_cast<std::int8_t*>(row + heads_bytes(v.groups, head_bytes));
  int g = G == 32 ? prepare_first(x, head, out, v.groups, four) : 0;
  head += static_cast<std::size_t>(g) * head_bytes;
  for (x += g * G, out += g * G; g < v.groups; ++g, x += G, out += G, head += head_bytes) {
    Floats part[G / 16], largest = zero_floats();
    OUTRIDER_UNROLL for (int i = 0; i < G / 16; ++i) {
      part[i] = load(x + 16 * i);
      largest = at_least(largest, magnitude(part[i]));
    }
    const float peak = highest(largest);
    const bool zero = peak < 1e-30f;  // 127 / peak must stay finite
    const Floats inverse = spread(zero ? 0.0f : 127.0f / peak);
    Ints sums = zero_ints();
    OUTRIDER_UNROLL for (int i = 0; i < G / 16; ++i) {
      const Ints q = to_ints(mul(part[i], inverse));
      sums = add(sums, q);
      store_small(out + 16 * i, q);
    }
    const std::int32_t sum = total(sums);
    float* scale = reinterpret_cast<float*>(head);
    scale[0] = zero ? 0.0f : peak * (1.0f / 127.0f);
    reinterpret_cast<std::int32_t*>(head)[1] = (four ? -8 : -128) * sum;
    if (four) scale[2] = scale[0] * static_cast<float>(sum);
  }
}

void prepare_here(const LinearView& v, const float* x, std::uint8_t* row) {
  if (v.format == Format::fp32 || (v.format == Format::bf16 && !kBf16)) return prepare_floats(v, x, row);
  if (v.format == Format::bf16) {
    if constexpr (kBf16) prepare_bf16<Floats>(v, x, row);
    return;
  }
  v.group == 32 ? prepare_ints<32>(v, x, row) : v.group == 64 ? prepare_ints<64>(v, x, row) : prepare_ints<128>(v, x, row);
}

}  // namespace
}  // namespace outrider
