"""Noise as a pure function of (seed, position, token, stream), with the same bits on every device.

Random words come from Philox4x32-10, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3", section 3.3): no state, so a draw can be repeated, reordered or left out without moving any other.

    key     = (low word of the seed, high word of the seed)
    counter = (token // 4, low word of the position, high word of the position, stream)
    output  = 4 words, for the tokens 4 * (token // 4) + 0, 1, 2, 3

`log` and `exp` are fixed sequences of IEEE 754 float64 operations (add, subtract, multiply, divide, and integer
operations on the bits). A maths library rounds differently from one machine to the next; these give the same bits in
numpy, in C++ without fused multiply-add, and on a GPU.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "ACCEPT",
    "DRAFT",
    "HIGHEST",
    "RESIDUAL",
    "TARGET",
    "exp",
    "gumbel",
    "log",
    "philox",
    "total",
    "uniform",
    "uniforms",
    "words",
]

# One stream per purpose, so that no two decisions at a position share noise. Rejection sampling is biased as soon as
# its draft and its residual do.
TARGET: Final = 0  # the target's own draw; under match verification the draft may look at it, that only helps it agree
DRAFT: Final = 1  # siblings drawn for rejection sampling
ACCEPT: Final = 2  # the uniform numbers of the acceptance tests
RESIDUAL: Final = 3  # the token drawn after all siblings were refused

Words = NDArray[np.uint64]  # 32-bit words, kept in 64 bits for the 32 x 32 -> 64 products

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10


def philox(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[ArrayLike, ArrayLike]) -> Words:
    """Philox4x32-10. Words of counter and key broadcast against one another. [...] each -> [..., 4]"""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, np.uint64) for word in key)
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _HALF) ^ c1 ^ k0, right & _WORD, (left >> _HALF) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)


def words(seed: int, position: int, tokens: NDArray[np.integer], stream: int) -> Words:
    """The random word of each token. `seed` counts modulo 2**64, `position` in [0, 2**64), `tokens` >= 0. [n] -> [n]"""
    tokens = np.asarray(tokens, np.int64)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    place = (position & 0xFFFFFFFF, position >> 32, stream)
    if not tokens.size:
        return np.zeros(tokens.shape, np.uint64)
    group = tokens >> 2
    low, high = int(group.min()), int(group.max())
    if high - low < tokens.size:  # dense: one call gives four tokens their words
        table = philox((np.arange(low, high + 1, dtype=np.uint64), *place), key)
        return np.asarray(table[group - low, tokens & 3])
    table = philox((group.astype(np.uint64), *place), key)
    return np.take_along_axis(table, (tokens & 3)[..., None], axis=-1)[..., 0]


def uniform(bits: Words) -> NDArray[np.float64]:
    """Words to numbers in (0, 1), never 0 or 1: (bits + 0.5) * 2**-32, exact in float64."""
    return (bits.astype(np.float64) + 0.5) * 2.0**-32


# log(x) = k ln 2 + log(m),  m in [sqrt(1/2), sqrt(2)),  log(m) = 2 atanh(s),  s = (m - 1) / (m + 1),  |s| < 0.1716.
# The series of 2 atanh(s) / s in z = s**2 stops at z**10: the next term is below 2**-57 of the first.
_SERIES = tuple(2.0 / (2 * j + 1) for j in range(1, 11))  # times z, z**2, ...
_SQRT_HALF = np.uint64(0x3FE6A09E667F3BCD)
_ONE = np.uint64(1023 << 52)
_FRACTION = np.uint64(52)
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 32 bits, so that k * _LN2_HIGH is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")


def log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive normal numbers, within 2 ulp."""
    bits = np.ascontiguousarray(x, np.float64).view(np.uint64)
    biased = (bits - _SQRT_HALF + _ONE) >> _FRACTION  # k + 1023
    k = biased.astype(np.float64) - 1023.0
    f = (bits - ((biased << _FRACTION) - _ONE)).view(np.float64) - 1.0  # m - 1, exact
    s = f / (f + 2.0)
    z = s * s
    series = np.full_like(z, _SERIES[-1])
    for coefficient in _SERIES[-2::-1]:
        series = series * z + coefficient
    return k * _LN2_HIGH + ((s + s) + ((s * z) * series + k * _LN2_LOW))


# exp(x) = 2**n exp(r),  n = round(x / ln 2),  |r| <= ln(2) / 2; the Taylor series stops at r**13: below 2**-57 left.
_INVERSE_FACTORIALS = tuple(1.0 / np.prod(np.arange(1.0, j + 1)) for j in range(14))
_LOG2_E = float.fromhex("0x1.71547652b82fep+0")
_ROUND = 1.5 * 2.0**52  # adding and subtracting it rounds to the nearest whole number
_EXP_LOWEST, _EXP_ZERO = -708.0, 2.0**-1010  # everything stays in the normal range


def exp(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(x) for x <= 0, -inf included, within 2 ulp; 0 instead of less than 2**-1010."""
    x = np.maximum(x, _EXP_LOWEST)
    n = (x * _LOG2_E + _ROUND) - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = np.full_like(r, _INVERSE_FACTORIALS[-1])
    for coefficient in _INVERSE_FACTORIALS[-2::-1]:
        series = series * r + coefficient
    scaled = (series.view(np.int64) + (n.astype(np.int64) << 52)).view(np.float64)
    return np.where(scaled >= _EXP_ZERO, scaled, 0.0)


_LANES = 16


def total(x: NDArray[np.float64]) -> float:
    """The sum of a row in one fixed order: lane i % 16 adds its elements from first to last, then the lanes fold in
    halves (8 + 8, 4 + 4 ...). A left-out element counts as 0, so a sparse sum over ascending i has the same bits. [V]
    """
    rows = -(-len(x) // _LANES)
    lanes = np.zeros((rows, _LANES))
    lanes.reshape(-1)[: len(x)] = x
    sums = np.add.accumulate(lanes, axis=0)[-1] if rows else np.zeros(_LANES)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return float(sums[0])


def gumbel(seed: int, position: int, tokens: NDArray[np.integer], stream: int) -> NDArray[np.float64]:
    """Standard Gumbel noise -log(-log(u)) of each token, in [-3.14, HIGHEST]. [n] -> [n]"""
    return -log(-log(uniform(words(seed, position, tokens, stream))))


def uniforms(seed: int, position: int, count: int, stream: int) -> NDArray[np.float64]:
    """`count` independent numbers in (0, 1) for one position. Number i has 52 bits, of words 2i and 2i + 1. [count]"""
    pair = words(seed, position, np.arange(2 * count), stream)
    bits = (pair[::2] << np.uint64(20)) | (pair[1::2] >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


HIGHEST: Final = float(-log(-log(uniform(np.array([0xFFFFFFFF], np.uint64))))[0])  # largest Gumbel noise, about 22.87
