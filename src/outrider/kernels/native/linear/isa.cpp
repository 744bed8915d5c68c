#include "linear/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace outrider {
namespace {

#if defined(__x86_64__)

struct Features {
  bool avx2 = false, avxvnni = false, avx512 = false, bf16 = false;
};

// Registers that the operating system saves: bits 1, 2 = xmm, ymm; 5, 6, 7 = zmm and masks.
unsigned saved_registers() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

Features detect() {
  Features found;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
  if (!osxsave || (saved_registers() & 0x06) != 0x06) return found;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  found.avx2 = fma && f16c && (b >> 5 & 1);
  const bool zmm = (saved_registers() & 0xe6) == 0xe6;
  const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1, vnni = c >> 11 & 1;
  found.avx512 = found.avx2 && zmm && f && dq && bw && vl && vnni;
  const unsigned subleaves = a;
  if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
    found.avxvnni = found.avx2 && (a >> 4 & 1);
    found.bf16 = found.avx512 && (a >> 5 & 1);
  }
  return found;
}

const Features& features() {
  static const Features found = detect();
  return found;
}

#endif

Isa choose() {
  constexpr Isa all[] = {Isa::avx512, Isa::avxvnni, Isa::avx2, Isa::portable};
  const char* wish = std::getenv("OUTRIDER_ISA");
  if (wish == nullptr || *wish == '\0') {
    for (Isa isa : all)
      if (available(isa)) return isa;
  }
  std::string here;
  for (Isa isa : all) {
    if (!available(isa)) continue;
    if (wish == std::string(name(isa))) return isa;
    here += here.empty() ? "" : ", ";
    here += name(isa);
  }
  for (Isa isa : all)
    if (wish == std::string(name(isa)))
      throw std::runtime_error("OUTRIDER_ISA=" + std::string(wish) + " is not available on this processor, which has: " + here);
  throw std::runtime_error("OUTRIDER_ISA=" + std::string(wish) + " is unknown: choose one of " + here);
}

}  // namespace

bool available(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::avx512: return features().avx512;
    case Isa::avxvnni: return features().avxvnni;
    case Isa::avx2: return features().avx2;
    case Isa::portable: return true;
  }
  return false;
#else
  return isa == Isa::portable;
#endif
}

bool has_bf16_dot() {
#if defined(__x86_64__)
  return features().bf16;
#else
  return false;
#endif
}

const char* name(Isa isa) {
  switch (isa) {
    case Isa::portable: return "portable";
    case Isa::avx2: return "avx2";
    case Isa::avxvnni: return "avxvnni";
    case Isa::avx512: return "avx512";
  }
  return "?";
}

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace outrider
