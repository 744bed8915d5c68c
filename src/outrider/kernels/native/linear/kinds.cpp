#include "linear/kinds.h"

#include <stdexcept>
#include <string>

#include "linear/half.h"

namespace outrider {
namespace {

struct KindRow {
  Kind kind;
  const char* name;
  int block_columns;
  int block_bytes;
};

constexpr KindRow kKinds[] = {
    {Kind::F32, "F32", 1, 4},       {Kind::F16, "F16", 1, 2},       {Kind::BF16, "BF16", 1, 2},
    {Kind::Q8_0, "Q8_0", 32, 34},   {Kind::Q4_0, "Q4_0", 32, 18},   {Kind::Q4_1, "Q4_1", 32, 20},
    {Kind::Q5_0, "Q5_0", 32, 22},   {Kind::Q5_1, "Q5_1", 32, 24},
    {Kind::Q4_K, "Q4_K", 256, 144}, {Kind::Q5_K, "Q5_K", 256, 176}, {Kind::Q6_K, "Q6_K", 256, 210},
};

constexpr const char* kFormats[] = {"fp32", "bf16", "int8", "int4"};

const KindRow& row_of(Kind kind) { return kKinds[static_cast<int>(kind)]; }

// Eight scales and eight minima of 6 bits each, in the 12 bytes of Q4_K and Q5_K: the first four of both keep their
// low 6 bits in bytes 0..7, the last four have 4 bits in bytes 8..11 and 2 bits on top of bytes 0..7.
void unpack_scales(const std::uint8_t* p, std::uint8_t* s, std::uint8_t* t) {
  for (int j = 0; j < 4; ++j) {
    s[j] = p[j] & 63;
    t[j] = p[j + 4] & 63;
    s[j + 4] = static_cast<std::uint8_t>((p[j + 8] & 15) | (p[j] >> 6) << 4);
    t[j + 4] = static_cast<std::uint8_t>((p[j + 8] >> 4) | (p[j + 4] >> 6) << 4);
  }
}

void nibbles_32(const std::uint8_t* p, std::uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = p[i] & 15;
    q[i + 16] = p[i] >> 4;
  }
}

// 32 of them, each with a fifth bit: in four bytes before the sixteen that nibbles_32 reads.
void fives_32(const std::uint8_t* p, std::uint8_t* q) {
  nibbles_32(p + 4, q);
  for (int i = 0; i < 32; ++i) q[i] |= static_cast<std::uint8_t>((p[i / 8] >> i % 8 & 1) << 4);
}

void nibbles_k(const std::uint8_t* p, std::uint8_t* q) {  // 256 of them: 64 by 64, low nibbles first
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 32; ++i) {
      q[64 * j + i] = p[32 * j + i] & 15;
      q[64 * j + 32 + i] = p[32 * j + i] >> 4;
    }
}

void dequantise_q6_k(const std::uint8_t* block, float* out) {
  const std::uint8_t *low = block, *high = block + 128;
  const std::int8_t* scales = reinterpret_cast<const std::int8_t*>(block + 192);
  const float d = from_half(load_half(block + 208));
  for (int half = 0; half < 2; ++half, low += 64, high += 32, scales += 8, out += 128)
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int i = 0; i < 32; ++i) {
        const int four = low[(quarter & 1) * 32 + i] >> (quarter >> 1) * 4 & 15;
        const int two = high[i] >> 2 * quarter & 3;
        const float scale = d * static_cast<float>(scales[2 * quarter + i / 16]);
        out[32 * quarter + i] = scale * static_cast<float>((four | two << 4) - 32);
      }
}

void dequantise_k(const std::uint8_t* block, bool five, float* out) {
  const float d = from_half(load_half(block)), m = from_half(load_half(block + 2));
  std::uint8_t s[8], t[8], q[256];
  unpack_scales(block + 4, s, t);
  nibbles_k(block + (five ? 48 : 16), q);
  if (five)
    for (int g = 0; g < 8; ++g)
      for (int i = 0; i < 32; ++i) q[32 * g + i] |= static_cast<std::uint8_t>((block[16 + i] >> g & 1) << 4);
  for (int g = 0; g < 8; ++g) {
    const float scale = d * static_cast<float>(s[g]), offset = m * static_cast<float>(t[g]);
    for (int i = 0; i < 32; ++i) out[32 * g + i] = scale * static_cast<float>(q[32 * g + i]) - offset;
  }
}

}  // namespace

Format format_of(std::string_view name) {
  for (int i = 0; i < 4; ++i)
    if (name == kFormats[i]) return static_cast<Format>(i);
  throw std::invalid_argument("unknown weight format " + std::string(name) + ": choose fp32, bf16, int8 or int4");
}

Kind kind_of(std::string_view name) {
  std::string all;
  for (const KindRow& row : kKinds) {
    if (name == row.name) return row.kind;
    all += all.empty() ? "" : ", ";
    all += row.name;
  }
  throw std::invalid_argument("unknown tensor kind " + std::string(name) + ": known are " + all);
}

const char* name(Format format) { return kFormats[static_cast<int>(format)]; }
const char* name(Kind kind) { return row_of(kind).name; }
std::int64_t block_columns(Kind kind) { return row_of(kind).block_columns; }

std::int64_t row_bytes(Kind kind, std::int64_t columns) {
  const KindRow& row = row_of(kind);
  if (columns < 0 || columns % row.block_columns != 0)
    throw std::invalid_argument("a row of " + std::to_string(columns) + " columns is not whole blocks of " +
                                std::to_string(row.block_columns) + " of " + row.name);
  return columns / row.block_columns * row.block_bytes;
}

void dequantise(Kind kind, const std::uint8_t* row, std::int64_t columns, float* out) {
  const std::int64_t blocks = columns / row_of(kind).block_columns;
  const std::int64_t step = row_of(kind).block_bytes;
  std::uint8_t q[32];
  switch (kind) {
    case Kind::F32: std::memcpy(out, row, static_cast<std::size_t>(columns) * 4); return;
    case Kind::F16:
      for (std::int64_t i = 0; i < columns; ++i) out[i] = from_half(load_half(row + 2 * i));
      return;
    case Kind::BF16:
      for (std::int64_t i = 0; i < columns; ++i) out[i] = from_bf16(load_half(row + 2 * i));
      return;
    case Kind::Q8_0:
      for (std::int64_t b = 0; b < blocks; ++b, row += step, out += 32) {
        const float d = from_half(load_half(row));
        const std::int8_t* values = reinterpret_cast<const std::int8_t*>(row + 2);
        for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(values[i]);
      }
      return;
    case Kind::Q4_0:
      for (std::int64_t b = 0; b < blocks; ++b, row += step, out += 32) {
        const float d = from_half(load_half(row));
        nibbles_32(row + 2, q);
        for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(q[i] - 8);
      }
      return;
    case Kind::Q4_1:
      for (std::int64_t b = 0; b < blocks; ++b, row += step, out += 32) {
        const float d = from_half(load_half(row)), m = from_half(load_half(row + 2));
        nibbles_32(row + 4, q);
        for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(q[i]) + m;
      }
      return;
    case Kind::Q5_0:
      for (std::int64_t b = 0; b < blocks; ++b, row += step, out += 32) {
        const float d = from_half(load_half(row));
        fives_32(row + 2, q);
        for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(q[i] - 16);
      }
      return;
    case Kind::Q5_1:
      for (std::int64_t b = 0; b < blocks; ++b, row += step, out += 32) {
        const float d = from_half(load_half(row)), m = from_half(load_half(row + 2));
        fives_32(row + 4, q);
        for (int i = 0; i < 32; ++i) out[i] = d * static_cast<float>(q[i]) + m;
      }
      return;
    case Kind::Q4_K:
    case Kind::Q5_K:
      for (std::int64_t b = 0; b < blocks; ++b, row += step, out += 256) dequantise_k(row, kind == Kind::Q5_K, out);
      return;
    case Kind::Q6_K:
      for (std::int64_t b = 0; b < blocks; ++b, row += step, out += 256) dequantise_q6_k(row, out);
      return;
  }
}

void split(Kind kind, const std::uint8_t* row, std::int64_t columns, std::uint8_t* q, float* scale, float* offset) {
  const std::int64_t blocks = columns / row_of(kind).block_columns;
  const std::int64_t step = row_of(kind).block_bytes;
  for (std::int64_t b = 0; b < blocks; ++b, row += step) {
    const float d = from_half(load_half(row));
    if (kind == Kind::Q8_0) {
      for (int i = 0; i < 32; ++i) q[32 * b + i] = row[2 + i] ^ 0x80;
      scale[b] = d;
    } else if (kind == Kind::Q4_0) {
      nibbles_32(row + 2, q + 32 * b);
      scale[b] = d;
      offset[b] = -8.0f * d;
    } else if (kind == Kind::Q4_1) {
      nibbles_32(row + 4, q + 32 * b);
      scale[b] = d;
      offset[b] = from_half(load_half(row + 2));
    } else {  // Q4_K
      std::uint8_t s[8], t[8];
      const float m = from_half(load_half(row + 2));
      unpack_scales(row + 4, s, t);
      nibbles_k(row + 16, q + 256 * b);
      for (int g = 0; g < 8; ++g) {
        scale[8 * b + g] = d * static_cast<float>(s[g]);
        offset[8 * b + g] = -(m * static_cast<float>(t[g]));
      }
    }
  }
}

void split_scales(const std::uint8_t* row, std::int64_t columns, std::uint16_t* d, std::uint16_t* m, std::uint8_t* s,
                  std::uint8_t* t) {
  for (std::int64_t b = 0; b < columns / 256; ++b, row += row_of(Kind::Q4_K).block_bytes) {
    d[b] = load_half(row);
    m[b] = load_half(row + 2);
    unpack_scales(row + 4, s + 8 * b, t + 8 * b);
  }
}

}  // namespace outrider
