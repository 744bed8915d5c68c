// Packing, and the way from a Linear to the kernels of this machine's instruction set.
#include "linear/linear.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "linear/half.h"
#include "linear/kinds.h"
#include "linear/layout.h"

namespace outrider {
namespace {

std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

bool kept_exactly(Format format, int group, Kind kind) {
  if (format == Format::int8) return kind == Kind::Q8_0 && group == 32;
  return format == Format::int4 && (kind == Kind::Q4_0 || kind == Kind::Q4_1 || kind == Kind::Q4_K);
}

Scales choose_scales(Format format, std::span<const Source> sources) {
  if (format != Format::int4) return Scales::half;
  const auto all = [&](Kind kind) {
    return std::all_of(sources.begin(), sources.end(), [&](const Source& s) { return s.kind == kind; });
  };
  if (all(Kind::Q4_0)) return Scales::half;
  if (all(Kind::Q4_K)) return Scales::packed;
  const auto k_quant = [](const Source& s) { return s.kind == Kind::Q4_K; };
  return std::any_of(sources.begin(), sources.end(), k_quant) ? Scales::floats : Scales::halves;
}

std::size_t scale_bytes(Scales scales) {
  switch (scales) {
    case Scales::half: return 64;
    case Scales::halves: return 128;
    case Scales::floats: return 256;
    case Scales::packed: return 64;
  }
  return 0;
}

// Where group g of a unit begins: at its scales, the weights behind them.
std::size_t group_offset(const LinearView& v, int g) {
  const std::size_t i = static_cast<std::size_t>(g);
  if (v.format == Format::int8) return i * (64 + 32 * static_cast<std::size_t>(v.group));
  const std::size_t headers = v.scales == Scales::packed ? (i / 8 + 1) * kPackedHeader : 0;
  return headers + i * (scale_bytes(v.scales) + kInt4Group);
}

std::size_t unit_size(const LinearView& v) {
  switch (v.format) {
    case Format::fp32: return static_cast<std::size_t>(round_up(v.k, 16)) * 128;
    case Format::bf16: return static_cast<std::size_t>(round_up(v.k, 32)) * 64;
    case Format::int8:
    case Format::int4: break;
  }
  const std::size_t last = v.format == Format::int8 ? 64 + 32 * static_cast<std::size_t>(v.group)
                                                    : scale_bytes(v.scales) + kInt4Group;
  return group_offset(v, v.groups - 1) + last;
}

// Packs one unit after the other. Holds the buffers of a thread: a row as fp32, and a unit's integers and scales.
class Packer {
 public:
  Packer(const LinearView& view, std::span<const Source> sources, std::uint8_t* data)
      : v_(view), sources_(sources), data_(data), row_(static_cast<std::size_t>(view.k)) {
    if (v_.group != 0) {
      q_.resize(static_cast<std::size_t>(view.k));
      scale_.resize(static_cast<std::size_t>(v_.groups));
      offset_.resize(static_cast<std::size_t>(v_.groups));
    }
    if (v_.scales == Scales::packed) {
      const std::size_t blocks = static_cast<std::size_t>(v_.k / 256);
      d_.resize(blocks);
      m_.resize(blocks);
      s_.resize(8 * blocks);
      t_.resize(8 * blocks);
    }
  }

  void unit(int u) {
    unit_ = data_ + static_cast<std::size_t>(u) * v_.unit_bytes;
    for (int c = 0; c < kUnit; ++c) {
      const Source* source;
      std::int64_t n;
      if (!find(u, c, source, n)) {
        padding(c);
        continue;
      }
      const std::uint8_t* row = source->data + n * source->stride;
      if (v_.group == 0) {
        dequantise(source->kind, row, v_.k, row_.data());
        floats(c);
        continue;
      }
      if (kept_exactly(v_.format, v_.group, source->kind)) {
        split(source->kind, row, v_.k, q_.data(), scale_.data(), offset_.data());
      } else {
        dequantise(source->kind, row, v_.k, row_.data());
        v_.format == Format::int8 ? quantise_int8() : quantise_int4();
      }
      if (v_.scales == Scales::packed) split_scales(row, v_.k, d_.data(), m_.data(), s_.data(), t_.data());
      v_.format == Format::int8 ? int8(c) : int4(c);
    }
  }

 private:
  // Which row of which source is column c of unit u? False: none, it pads.
  bool find(int u, int c, const Source*& source, std::int64_t& n) const {
    if (v_.paired) {
      source = &sources_[static_cast<std::size_t>(c / 16)];
      n = static_cast<std::int64_t>(u) * 16 + c % 16;
      return n < source->rows;
    }
    n = static_cast<std::int64_t>(u) * kUnit + c;
    for (const Source& s : sources_) {
      source = &s;
      if (n < s.rows) return true;
      n -= s.rows;
    }
    return false;
  }

  void padding(int c) {
    if (v_.group == 0) return;  // the arena is zeroed
    std::fill(q_.begin(), q_.end(), v_.format == Format::int8 ? 128 : 0);
    std::fill(scale_.begin(), scale_.end(), 0.0f);
    std::fill(offset_.begin(), offset_.end(), 0.0f);
    std::fill(d_.begin(), d_.end(), std::uint16_t{0});
    std::fill(m_.begin(), m_.end(), std::uint16_t{0});
    v_.format == Format::int8 ? int8(c) : int4(c);
  }

  void floats(int c) {
    if (v_.format == Format::fp32) {
      float* w = reinterpret_cast<float*>(unit_) + c;
      for (std::int64_t k = 0; k < v_.k; ++k) w[k * kUnit] = row_[static_cast<std::size_t>(k)];
    } else {
      std::uint16_t* w = reinterpret_cast<std::uint16_t*>(unit_) + 2 * c;
      for (std::int64_t k = 0; k < v_.k; ++k) w[k / 2 * 2 * kUnit + k % 2] = to_bf16(row_[static_cast<std::size_t>(k)]);
    }
  }

  // Scale = largest / 127 as the half that is stored, and integers against that.
  void quantise_int8() {
    for (int g = 0; g < v_.groups; ++g) {
      const float* x = row_.data() + static_cast<std::ptrdiff_t>(g) * v_.group;
      float largest = 0.0f, finite = 0.0f;
      for (int i = 0; i < v_.group; ++i) {
        largest = std::max(largest, std::fabs(x[i]));
        finite += x[i] * 0.0f;
      }
      const float scale = from_half(to_half(largest / 127.0f));
      if (finite != 0.0f || !std::isfinite(scale))
        refuse("a group of weights up to " + std::to_string(largest) + " (or not finite) has no int8 scale in half "
               "precision: use bf16 or fp32");
      const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      std::uint8_t* q = q_.data() + static_cast<std::ptrdiff_t>(g) * v_.group;
      for (int i = 0; i < v_.group; ++i) {
        const float r = std::min(127.0f, std::max(-127.0f, x[i] * inverse)) + 12582912.0f;  // 1.5 * 2^23: rounds to integer
        q[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(r) + 128);
      }
      scale_[static_cast<std::size_t>(g)] = scale;
    }
  }

  // Q4_1's way: scale = (largest - smallest) / 15, offset = smallest, and integers against what is stored of them.
  void quantise_int4() {
    const bool rounded = v_.scales != Scales::floats;
    for (int g = 0; g < v_.groups; ++g) {
      const float* x = row_.data() + static_cast<std::ptrdiff_t>(g) * 32;
      float low = x[0], high = x[0], finite = 0.0f;
      for (int i = 0; i < 32; ++i) {
        low = std::min(low, x[i]);
        high = std::max(high, x[i]);
        finite += x[i] * 0.0f;
      }
      float scale = (high - low) / 15.0f, offset = low;
      if (rounded) {
        scale = from_half(to_half(scale));
        offset = from_half(to_half(offset));
      }
      if (finite != 0.0f || !std::isfinite(scale) || !std::isfinite(offset))
        refuse("a group of weights from " + std::to_string(low) + " to " + std::to_string(high) + " (or not finite) has "
               "no int4 scale in half precision: use bf16 or fp32");
      const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
      std::uint8_t* q = q_.data() + static_cast<std::ptrdiff_t>(g) * 32;
      for (int i = 0; i < 32; ++i) {
        const float r = std::min(15.0f, std::max(0.0f, (x[i] - offset) * inverse)) + 12582912.0f;
        q[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(r) & 15);
      }
      scale_[static_cast<std::size_t>(g)] = scale;
      offset_[static_cast<std::size_t>(g)] = offset;
    }
  }

  void int8(int c) {
    for (int g = 0; g < v_.groups; ++g) {
      std::uint8_t* p = unit_ + group_offset(v_, g);
      put_half(p, c, to_half(scale_[static_cast<std::size_t>(g)]));
      const std::uint8_t* q = q_.data() + static_cast<std::ptrdiff_t>(g) * v_.group;
      for (int k = 0; k < v_.group; k += 4) std::memcpy(p + 64 + k * kUnit + 4 * c, q + k, 4);
    }
  }

  void int4(int c) {
    for (int g = 0; g < v_.groups; ++g) {
      std::uint8_t* p = unit_ + group_offset(v_, g);
      int4_scales(p, g, c);
      p += scale_bytes(v_.scales) + 4 * c;
      const std::uint8_t* q = q_.data() + static_cast<std::ptrdiff_t>(g) * 32;
      for (int j = 0; j < 4; ++j, p += 4 * kUnit, q += 8)
        for (int i = 0; i < 4; ++i) p[i] = static_cast<std::uint8_t>(q[i] | q[i + 4] << 4);
    }
  }

  void int4_scales(std::uint8_t* p, int g, int c) {
    const std::size_t i = static_cast<std::size_t>(g);
    switch (v_.scales) {
      case Scales::half: put_half(p, c, to_half(scale_[i])); break;
      case Scales::halves:
        put_half(p, c, to_half(scale_[i]));
        put_half(p + 64, c, to_half(offset_[i]));
        break;
      case Scales::floats:
        std::memcpy(p + 4 * c, &scale_[i], 4);
        std::memcpy(p + 128 + 4 * c, &offset_[i], 4);
        break;
      case Scales::packed:
        if (g % 8 == 0) {
          put_half(p - kPackedHeader, c, d_[i / 8]);
          put_half(p - kPackedHeader + 64, c, m_[i / 8]);
        }
        p[c] = s_[i];
        p[32 + c] = t_[i];
        break;
    }
  }

  static void put_half(std::uint8_t* p, int c, std::uint16_t h) { std::memcpy(p + 2 * c, &h, 2); }

  const LinearView& v_;
  std::span<const Source> sources_;
  std::uint8_t* data_;
  std::uint8_t* unit_ = nullptr;
  std::vector<float> row_, scale_, offset_;
  std::vector<std::uint8_t> q_, s_, t_;
  std::vector<std::uint16_t> d_, m_;
};

void pack(const LinearView& view, std::span<const Source> sources, std::uint8_t* data, int units, int threads) {
  if (threads <= 0) threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::atomic<int> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      Packer packer(view, sources, data);
      for (int u = next++; u < units; u = next++) packer.unit(u);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      next = units;
    }
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < std::min(threads, units); ++t) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  if (error) std::rethrow_exception(error);
}

void check(Format format, std::span<const Source> sources, const LinearOptions& options) {
  if (sources.empty()) refuse("a linear layer needs at least one source of weights");
  const std::int64_t k = sources[0].columns;
  for (const Source& s : sources) {
    if (s.rows < 1 || s.columns < 1 || s.data == nullptr)
      refuse("weights of " + std::to_string(s.rows) + " x " + std::to_string(s.columns) + ": a linear layer needs rows and columns");
    if (s.columns != k)
      refuse("sources with " + std::to_string(k) + " and " + std::to_string(s.columns) + " columns cannot be stacked");
    if (s.stride < row_bytes(s.kind, k))
      refuse("rows of " + std::to_string(k) + " columns of " + name(s.kind) + " take " +
             std::to_string(row_bytes(s.kind, k)) + " bytes, but lie " + std::to_string(s.stride) + " apart");
  }
  if (options.paired && (sources.size() != 2 || sources[0].rows != sources[1].rows))
    refuse("a pair (gate and up) needs two sources with as many rows as each other");
  if (format != Format::int8 && format != Format::int4) return;
  if (options.group != 0 && format == Format::int4 && options.group != 32)
    refuse("int4 has groups of 32 columns, not of " + std::to_string(options.group));
  if (options.group != 0 && options.group != 32 && options.group != 64 && options.group != 128)
    refuse("a group of " + std::to_string(options.group) + " columns: int8 has groups of 32, 64 or 128");
  const int group = options.group == 0 ? 32 : options.group;
  if (k % group != 0)
    refuse("weights with " + std::to_string(k) + " columns are not whole groups of " + std::to_string(group) + " for " +
           name(format) + ": use bf16 or fp32");
}

}  // namespace

LinearView::LinearView(const Linear& linear)
    : format(linear.format_),
      scales(static_cast<Scales>(linear.scales_)),
      paired(linear.paired_),
      group(linear.group_),
      groups(linear.groups_),
      k(linear.k_),
      n(linear.n_),
      unit_bytes(linear.unit_bytes_),
      data(linear.data_),
      bias(linear.bias_.empty() ? nullptr : linear.bias_.data()) {}

std::size_t row_stride(const LinearView& v) {
  const std::size_t groups = static_cast<std::size_t>(v.groups);
  std::size_t bytes = 0;
  switch (v.format) {
    case Format::fp32: bytes = groups * 16 * 4; break;
    case Format::bf16: bytes = groups * 32 * (kernels().bf16_activations ? 2 : 4); break;
    case Format::int8: bytes = heads_bytes(v.groups, kInt8Head) + static_cast<std::size_t>(v.k); break;
    case Format::int4: bytes = heads_bytes(v.groups, kInt4Head) + static_cast<std::size_t>(v.k); break;
  }
  // An odd number of lines: rows a power of two apart would meet in the same few sets of L1.
  return ((bytes + 63) / 64 | 1) * 64;
}

Linear::Linear(Format format, std::span<const Source> sources, const float* bias, LinearOptions options)
    : format_(format), paired_(options.paired) {
  check(format, sources, options);
  k_ = sources[0].columns;
  for (const Source& s : sources) n_ += s.rows;
  if (format == Format::int4) group_ = 32;
  if (format == Format::int8) group_ = options.group != 0 ? options.group : 32;
  scales_ = static_cast<std::uint8_t>(choose_scales(format, sources));
  units_ = static_cast<int>(paired_ ? round_up(n_ / 2, 16) / 16 : round_up(n_, kUnit) / kUnit);
  const std::int64_t block = format == Format::fp32 ? 16 : format == Format::bf16 ? 32 : group_;
  groups_ = static_cast<int>(round_up(k_, block) / block);
  unit_bytes_ = unit_size(LinearView(*this));
  bytes_ = unit_bytes_ * static_cast<std::size_t>(units_);
  arena_ = options.arena ? options.arena : std::make_shared<Arena>(true);
  data_ = arena_->allocate(bytes_);
  if (bias != nullptr) {
    bias_.assign(static_cast<std::size_t>(units_) * kUnit, 0.0f);
    for (std::int64_t n = 0; n < n_; ++n) {
      const std::int64_t half = n_ / 2, i = paired_ ? n % half : n;
      bias_[static_cast<std::size_t>(paired_ ? i / 16 * kUnit + n / half * 16 + i % 16 : i)] = bias[n];
    }
  }
  pack(LinearView(*this), sources, data_, units_, options.threads);
}

void Linear::dequantised(float* out) const {
  const LinearView v(*this);
  for (int u = 0; u < units_; ++u)
    for (int c = 0; c < kUnit; ++c) {
      std::int64_t n = static_cast<std::int64_t>(u) * kUnit + c;
      if (paired_) {
        const std::int64_t i = static_cast<std::int64_t>(u) * 16 + c % 16;
        if (i >= n_ / 2) continue;
        n = c / 16 * (n_ / 2) + i;
      }
      if (n >= n_) continue;
      const std::uint8_t* unit = data_ + static_cast<std::size_t>(u) * v.unit_bytes;
      float* row = out + n * k_;
      for (std::int64_t k = 0; k < k_; ++k) {
        if (format_ == Format::fp32) {
          std::memcpy(row + k, unit + (k * kUnit + c) * 4, 4);
          continue;
        }
        if (format_ == Format::bf16) {
          row[k] = from_bf16(load_half(unit + (k / 2 * kUnit + c) * 4 + k % 2 * 2));
          continue;
        }
        const int g = static_cast<int>(k / group_), i = static_cast<int>(k % group_);
        const std::uint8_t* p = unit + group_offset(v, g);
        if (format_ == Format::int8) {
          const int q = p[64 + i / 4 * 4 * kUnit + 4 * c + i % 4] - 128;
          row[k] = from_half(load_half(p + 2 * c)) * static_cast<float>(q);
          continue;
        }
        const std::uint8_t byte = p[scale_bytes(v.scales) + static_cast<std::size_t>(i / 8 * 4 * kUnit + 4 * c + i % 4)];
        const float q = static_cast<float>(i / 4 % 2 ? byte >> 4 : byte & 15);
        if (v.scales == Scales::half) {
          row[k] = from_half(load_half(p + 2 * c)) * (q - 8.0f);
        } else if (v.scales == Scales::halves) {
          row[k] = from_half(load_half(p + 2 * c)) * q + from_half(load_half(p + 64 + 2 * c));
        } else if (v.scales == Scales::floats) {
          float scale, offset;
          std::memcpy(&scale, p + 4 * c, 4);
          std::memcpy(&offset, p + 128 + 4 * c, 4);
          row[k] = scale * q + offset;
        } else {
          const std::uint8_t* header = unit + group_offset(v, g / 8 * 8) - kPackedHeader;
          const float scale = from_half(load_half(header + 2 * c)) * static_cast<float>(p[c]);
          const float offset = from_half(load_half(header + 64 + 2 * c)) * static_cast<float>(p[32 + c]);
          row[k] = scale * q - offset;
        }
      }
    }
}

Activations::Activations(int max_rows, std::int64_t max_columns) : max_rows_(max_rows), max_columns_(max_columns) {
  if (max_rows < 1 || max_rows > kMaxRows || max_columns < 1)
    refuse("activations of " + std::to_string(max_rows) + " rows x " + std::to_string(max_columns) + " columns: rows from 1 to " +
           std::to_string(kMaxRows));
  arena_ = std::make_shared<Arena>(true);
  data_ = arena_->allocate(bytes(max_rows, max_columns));
}

std::size_t Activations::bytes(int max_rows, std::int64_t max_columns) {
  // The widest form is fp32, padded to 32 columns and to an odd number of lines.
  return static_cast<std::size_t>(max_rows * (round_up(max_columns, 32) * 4 + 128));
}

void Activations::prepare(const Linear& linear, const float* x, int row) {
  const LinearView view(linear);
  if (row < 0 || row >= max_rows_ || view.k > max_columns_)
    refuse("row " + std::to_string(row) + " of " + std::to_string(view.k) + " columns does not fit activations of " +
           std::to_string(max_rows_) + " x " + std::to_string(max_columns_));
  kernels().prepare(view, x, data_ + static_cast<std::size_t>(row) * row_stride(view));
}

void multiply(const Linear& linear, const Activations& activations, int M, int unit_begin, int unit_end, float* y,
              std::int64_t ldy, Epilogue epilogue) {
  kernels().multiply(LinearView(linear), activations.data(), M, unit_begin, unit_end, y, ldy, epilogue);
}

void prefetch(const Linear& linear, int unit_begin, std::size_t bytes) {
  const LinearView view(linear);
  const std::size_t begin = static_cast<std::size_t>(unit_begin) * view.unit_bytes;
  const std::size_t end = std::min(begin + bytes, linear.bytes());
  for (std::size_t i = begin; i < end; i += 64) __builtin_prefetch(view.data + i, 0, 2);
}

const Kernels& kernels() {
  static const Kernels& chosen = [&]() -> const Kernels& {
    switch (isa()) {
#if defined(__x86_64__)
      case Isa::avx512: return has_bf16_dot() ? kernels_avx512_bf16() : kernels_avx512();
      case Isa::avxvnni: return kernels_avxvnni();
      case Isa::avx2: return kernels_avx2();
#endif
      default: return kernels_portable();
    }
  }();
  return chosen;
}

}  // namespace outrider
