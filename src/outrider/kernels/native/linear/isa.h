// Which instruction set the kernels run with.
#pragma once

namespace outrider {

enum class Isa { portable, avx2, avxvnni, avx512 };

// The best set of this processor, or the one that the environment variable OUTRIDER_ISA names. Read once.
// Throws std::runtime_error for an unknown name and for a set that this processor or this build lacks.
Isa isa();

// Can `isa` run here? avx512 = F, BW, VL, DQ and VNNI; BF16 is used in addition where it exists.
bool available(Isa isa);

const char* name(Isa isa);

// Does the processor multiply pairs of bf16 itself (AVX512_BF16)? Only asked where isa() is avx512.
bool has_bf16_dot();

}  // namespace outrider
