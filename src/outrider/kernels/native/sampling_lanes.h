// The loops of sampling_kernels.h for vectors of kWidth float64 lanes. Included once by each file of an instruction set,
// inside its unnamed namespace, after it has defined
//   kWidth                 float64 lanes of a vector
//   kTogether              vectors whose exp is computed together, as many as fit the registers
//   F64, U64               vectors of kWidth doubles and 64-bit words (GCC's vector extension: operators work by lane)
//   widen(const float*)    kWidth floats to doubles
//   maximum(F64, F64)      by lane
//   zero_below(F64, x)     lanes below x to 0
//   multiply(U64, U64)     products of the low 32 bits of each lane
//   mask_at_least(U64, x)  bit i: lane i >= x, all numbers below 2**32
//   maximum64, at_least64  the maximum of 64 floats (and whether all are < +inf); bit i: values[i] >= floor
//
// Each lane does exactly the operations of noise.h, so the bits do not depend on kWidth.

inline F64 splat(double x) { return x - F64{}; }
inline U64 splat(std::uint64_t x) { return x - U64{}; }
inline F64 as_double(U64 x) { return __builtin_bit_cast(F64, x); }
inline U64 as_bits(F64 x) { return __builtin_bit_cast(U64, x); }

// Whole numbers below 2**52 to doubles and back, by their place in the fraction.
inline F64 to_double(U64 x) { return as_double(x | splat(std::uint64_t{0x433} << 52)) - 0x1p52; }

// log of kAbreast vectors, in place. Several at once, because each is one long chain of dependent operations.
constexpr int kAbreast = 4;
inline void log_lanes(F64 (&x)[kAbreast]) {
  F64 k[kAbreast], s[kAbreast], z[kAbreast], series[kAbreast];
  for (int i = 0; i < kAbreast; ++i) {
    const U64 bits = as_bits(x[i]);
    const U64 biased = (bits - fixed::sqrt_half + fixed::one) >> 52;
    const F64 f = as_double(bits - ((biased << 52) - fixed::one)) - 1.0;
    k[i] = to_double(biased) - 1023.0;
    s[i] = f / (f + 2.0);
    z[i] = s[i] * s[i];
    series[i] = splat(fixed::log_series[9]);
  }
  for (int j = 8; j >= 0; --j)
    for (int i = 0; i < kAbreast; ++i) series[i] = series[i] * z[i] + fixed::log_series[j];
  for (int i = 0; i < kAbreast; ++i)
    x[i] = k[i] * fixed::ln2_high + ((s[i] + s[i]) + ((s[i] * z[i]) * series[i] + k[i] * fixed::ln2_low));
}

// exp of kTogether vectors, in place.
inline void exp_lanes(F64 (&x)[kTogether]) {
  U64 power[kTogether];
  F64 series[kTogether];
  for (int i = 0; i < kTogether; ++i) {
    x[i] = maximum(x[i], splat(fixed::exp_lowest));
    const F64 sum = x[i] * fixed::log2_e + fixed::rounder;  // its low bits are n, in two's complement
    const F64 n = sum - fixed::rounder;
    x[i] = (x[i] - n * fixed::ln2_high) - n * fixed::ln2_low;
    power[i] = as_bits(sum) << 52;
    series[i] = splat(fixed::exp_series[13]);
  }
  for (int j = 12; j >= 0; --j)
    for (int i = 0; i < kTogether; ++i) series[i] = series[i] * x[i] + fixed::exp_series[j];
  for (int i = 0; i < kTogether; ++i) x[i] = zero_below(as_double(as_bits(series[i]) + power[i]), splat(fixed::exp_zero));
}

struct WordLanes {
  U64 w[4];
};

// The words of kWidth groups.
inline WordLanes word_lanes(const Place& place, U64 groups) {
  U64 c0 = groups;
  U64 c1 = splat(place.position & 0xFFFFFFFF), c2 = splat(place.position >> 32), c3 = splat(std::uint64_t{place.stream});
  const U64 m0 = splat(std::uint64_t{philox::multiplier0}), m1 = splat(std::uint64_t{philox::multiplier1});
  std::uint32_t k0 = static_cast<std::uint32_t>(place.seed), k1 = static_cast<std::uint32_t>(place.seed >> 32);
  for (int round = 0; round < philox::rounds; ++round) {
    const U64 left = multiply(c0, m0), right = multiply(c2, m1);
    // multiply() reads low halves only, so the high halves of c1 and c3 may hold what they like until they are used
    c0 = (right >> 32) ^ (c1 & 0xFFFFFFFF) ^ std::uint64_t{k0};
    c1 = right;
    c2 = (left >> 32) ^ (c3 & 0xFFFFFFFF) ^ std::uint64_t{k1};
    c3 = left;
    k0 += philox::weyl0;
    k1 += philox::weyl1;
  }
  return {{c0, c1 & 0xFFFFFFFF, c2, c3 & 0xFFFFFFFF}};
}

// The words of kWidth groups from `group` on.
inline WordLanes word_lanes(const Place& place, std::uint32_t group) {
  U64 groups = splat(std::uint64_t{group});
  for (int lane = 0; lane < kWidth; ++lane) groups[lane] += static_cast<std::uint64_t>(lane);
  return word_lanes(place, groups);
}

bool maxima(const float* row, std::int64_t blocks, float* out) {
  bool good = true;
  for (std::int64_t b = 0; b < blocks; ++b) good &= maximum64(row + b * kBlock, out[b]);
  return !good;
}

constexpr int kStride = kTogether * kWidth;  // values that go through exp together: a multiple of kLanes
static_assert(kStride % kLanes == 0 && kBlock % kStride == 0);

template <bool Divide>
inline void add_terms(const float* values, double highest, double temperature, F64* sums, double* out) {
  F64 x[kTogether];
  for (int i = 0; i < kTogether; ++i) {
    x[i] = widen(values + i * kWidth) - highest;
    if constexpr (Divide) x[i] = x[i] / temperature;
  }
  exp_lanes(x);
  for (int i = 0; i < kTogether; ++i) sums[i % (kLanes / kWidth)] += x[i];
  if (out) std::memcpy(out, x, sizeof x);
}

template <bool Divide>
inline double exps_by(const float* values, std::int64_t n, double highest, double temperature, double* out) {
  F64 sums[kLanes / kWidth] = {};
  std::int64_t i = 0;
  for (; i + kStride <= n; i += kStride)
    add_terms<Divide>(values + i, highest, temperature, sums, out ? out + i : nullptr);
  if (i < n) {
    float rest[kStride];
    double terms[kStride];
    for (int j = 0; j < kStride; ++j) rest[j] = i + j < n ? values[i + j] : -__builtin_inff();
    add_terms<Divide>(rest, highest, temperature, sums, terms);
    if (out) std::memcpy(out + i, terms, static_cast<std::size_t>(n - i) * sizeof *terms);
  }
  double lanes[kLanes];
  std::memcpy(lanes, sums, sizeof lanes);
  for (int half = kLanes / 2; half; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

double exps(const float* values, std::int64_t n, double highest, double temperature, double* out) {
  // x / 1 is x: the same bits without the division
  return temperature == 1.0 ? exps_by<false>(values, n, highest, temperature, out)
                            : exps_by<true>(values, n, highest, temperature, out);
}

template <bool Divide>
inline std::uint64_t mass_by(const float* values, std::int64_t n, float floor, double highest, double temperature) {
  U64 sum{};
  for (std::int64_t at = 0; at < n; at += kStride) {
    F64 x[kTogether];
    U64 kept[kTogether];
    for (int i = 0; i < kTogether; ++i) {
      x[i] = widen(values + at + i * kWidth);
      kept[i] = __builtin_bit_cast(U64, x[i] >= static_cast<double>(floor));
      x[i] = x[i] - highest;
      if constexpr (Divide) x[i] = x[i] / temperature;
    }
    exp_lanes(x);
    for (int i = 0; i < kTogether; ++i) sum += as_bits(x[i] * fixed::mass + 0x1p52) & fixed::fraction & kept[i];
  }
  std::uint64_t total = 0;
  for (int lane = 0; lane < kWidth; ++lane) total += sum[lane];
  return total;
}

std::uint64_t mass(const float* values, std::int64_t n, float floor, double highest, double temperature) {
  return temperature == 1.0 ? mass_by<false>(values, n, floor, highest, temperature)
                            : mass_by<true>(values, n, floor, highest, temperature);
}

using U32 = std::uint32_t __attribute__((vector_size(4 * kWidth)));

void words_of_block(const Place& place, std::uint32_t block, std::uint32_t* out) {
  for (int part = 0; part < kGroups; part += kWidth) {
    const WordLanes lanes = word_lanes(place, block * kGroups + static_cast<std::uint32_t>(part));
    for (int w = 0; w < 4; ++w) {
      const U32 narrow = __builtin_convertvector(lanes.w[w], U32);
      std::memcpy(out + w * kGroups + part, &narrow, sizeof narrow);
    }
  }
}

std::uint64_t words_at_least(const std::uint32_t* words, std::uint32_t threshold) {
  std::uint64_t mask = 0;
  for (int first = 0; first < kBlock; first += kWidth) {
    U32 narrow;
    std::memcpy(&narrow, words + first, sizeof narrow);
    mask |= static_cast<std::uint64_t>(mask_at_least(__builtin_convertvector(narrow, U64), threshold)) << first;
  }
  return mask;
}

void gumbels(const Place& place, std::int64_t n, double* out) {
  for (std::int64_t first = 0; first < n; first += 4 * kWidth) {
    const WordLanes lanes = word_lanes(place, static_cast<std::uint32_t>(first / 4));
    F64 x[4];
    for (int w = 0; w < 4; ++w) x[w] = (to_double(lanes.w[w]) + 0.5) * 0x1p-32;
    log_lanes(x);
    for (int w = 0; w < 4; ++w) x[w] = -x[w];
    log_lanes(x);
    for (int lane = 0; lane < kWidth; ++lane)
      for (int w = 0; w < 4; ++w)
        if (const std::int64_t token = first + 4 * lane + w; token < n) out[token] = -x[w][lane];
  }
}

void gumbels_of(const Place& place, const std::int32_t* tokens, std::int64_t n, double* out) {
  constexpr int stride = kAbreast * kWidth;
  for (std::int64_t first = 0; first < n; first += stride) {
    F64 x[kAbreast];
    for (int i = 0; i < kAbreast; ++i) {
      U64 groups{}, of_group{};
      for (int lane = 0; lane < kWidth; ++lane) {
        const std::int64_t at = first + i * kWidth + lane;
        const auto token = static_cast<std::uint64_t>(tokens[at < n ? at : n - 1]);
        groups[lane] = token / 4;
        of_group[lane] = token % 4;
      }
      const WordLanes lanes = word_lanes(place, groups);
      U64 words{};
      for (std::uint64_t w = 0; w < 4; ++w) words |= lanes.w[w] & __builtin_bit_cast(U64, of_group == splat(w));
      x[i] = (to_double(words) + 0.5) * 0x1p-32;
    }
    log_lanes(x);
    for (F64& part : x) part = -part;
    log_lanes(x);
    for (F64& part : x) part = -part;
    const std::int64_t here = n - first < stride ? n - first : stride;
    std::memcpy(out + first, x, static_cast<std::size_t>(here) * sizeof *out);
  }
}

void add_logs(const double* p, std::int64_t n, double* out) {
  constexpr int stride = kAbreast * kWidth;
  for (std::int64_t first = 0; first < n; first += stride) {
    const std::int64_t here = n - first < stride ? n - first : stride;
    F64 x[kAbreast];
    double sums[stride], values[stride];
    for (int i = 0; i < stride; ++i) values[i] = i < here ? p[first + i] : 1.0;
    std::memcpy(x, values, sizeof x);
    log_lanes(x);
    std::memcpy(sums, x, sizeof x);
    for (int i = 0; i < here; ++i)
      out[first + i] = values[i] >= 0x1p-1022 ? sums[i] + out[first + i] : -__builtin_inf();
  }
}
