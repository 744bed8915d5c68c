"""Noise is a pure function of (seed, position, token, stream), with the same bits from numpy and the native core."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from instruction_sets import SETS, run_with
from outrider.core import noise
from outrider.runtime import native_sampling


@pytest.mark.parametrize(
    ("counter", "key", "output"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, output):
    """The known answers for Philox4x32-10 of Salmon et al. 2011."""
    assert tuple(int(word) for word in noise.philox(counter, key)) == output


def test_counter_and_key_are_laid_out_as_documented():
    """Word 4g + w is output w of counter (g, low position, high position, stream) under key (low seed, high seed)."""
    seed, position, token = 0x0123456789ABCDEF, (7 << 32) + 9, 4 * 11 + 2
    word = noise.words(seed, position, np.array([token]), noise.RESIDUAL)[0]
    assert word == noise.philox((11, 9, 7, noise.RESIDUAL), (0x89ABCDEF, 0x01234567))[2]


def test_a_token_has_the_same_noise_whatever_is_asked_beside_it():
    """Dense ranges, sparse picks, repeats and single tokens agree."""
    tokens = np.arange(5000)
    whole = noise.gumbel(3, 17, tokens, noise.TARGET)
    rng = np.random.default_rng(0)
    for picked in (tokens[-1:], tokens[7:19], rng.choice(tokens, 40), np.array([0, 4999, 3, 3]), tokens[::-1]):
        assert (noise.gumbel(3, 17, picked, noise.TARGET) == whole[picked]).all()
    assert noise.gumbel(3, 17, tokens[:0], noise.TARGET).size == 0


def test_each_argument_changes_all_the_noise():
    """Other seed (each half), position (each half), stream: no number is left as it was."""
    tokens = np.arange(64)
    base = noise.gumbel(5, 6, tokens, noise.DRAFT)
    for seed, position, stream in ((4, 6, 1), (5 + 2**40, 6, 1), (5, 7, 1), (5, 6 + 2**40, 1), (5, 6, 0), (5, 6, 2)):
        assert not (noise.gumbel(seed, position, tokens, stream) == base).any()


def test_seeds_count_modulo_two_to_the_64():
    assert (noise.uniforms(-1, 0, 8, noise.ACCEPT) == noise.uniforms(2**64 - 1, 0, 8, noise.ACCEPT)).all()


def test_uniform_numbers_are_never_zero_or_one():
    ends = noise.uniform(np.array([0, 0xFFFFFFFF], np.uint64))
    assert ends.tolist() == [2.0**-33, 1 - 2.0**-33]
    largest = (float(2**52 - 1) + 0.5) * 2.0**-52
    assert largest == 1 - 2.0**-53 < 1


def test_uniform_numbers_take_52_bits_of_two_words():
    """Number i is (word 2i, high 20 bits of word 2i + 1), and asking for more does not move the first ones."""
    pair = [int(word) for word in noise.words(8, 3, np.arange(10), noise.ACCEPT)]
    expected = [((pair[2 * i] << 20 | pair[2 * i + 1] >> 12) + 0.5) / 2**52 for i in range(5)]
    assert noise.uniforms(8, 3, 5, noise.ACCEPT).tolist() == expected
    assert noise.uniforms(8, 3, 2, noise.ACCEPT).tolist() == expected[:2]


def test_logarithm_and_exponential_are_within_two_ulp_of_libm():
    rng = np.random.default_rng(1)
    inputs = np.concatenate([rng.random(50_000), 1 - rng.random(50_000) * 1e-9, np.exp(rng.normal(size=50_000) * 100)])
    assert (np.abs(noise.log(inputs) - np.log(inputs)) <= 2 * np.spacing(np.abs(np.log(inputs)))).all()
    inputs = -rng.random(50_000) * 690
    assert (np.abs(noise.exp(inputs) - np.exp(inputs)) <= 2 * np.spacing(np.exp(inputs))).all()


def test_exponential_at_its_ends():
    assert noise.exp(np.array([0.0, -0.0, -701.0, -1e300, -np.inf])).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_total_follows_its_documented_order():
    """Lane i % 16 from first to last, then halves; zeros left out change nothing."""
    x = np.random.default_rng(2).random(1003) ** 20
    lanes = [0.0] * 16
    for i, value in enumerate(x.tolist()):
        lanes[i % 16] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    assert noise.total(x) == lanes[0]
    assert noise.total(np.concatenate([x, np.zeros(29)])) == lanes[0]
    assert noise.total(x) == pytest.approx(math.fsum(x), rel=1e-14)


def test_gumbel_noise_has_the_gumbel_law():
    """Kolmogorov-Smirnov on 200,000 numbers of one position and of one token; false alarm 1e-6 each."""
    critical = math.sqrt(math.log(2 / 1e-6) / 2)
    one_position = noise.gumbel(11, 0, np.arange(200_000), noise.TARGET)
    keys = np.arange(200_000, dtype=np.uint64)
    words = noise.philox((1, 5, 0, noise.TARGET), (keys, 0))[:, 2]
    one_token = -noise.log(-noise.log(noise.uniform(words)))
    for sample in (one_position, one_token):
        law = np.exp(-np.exp(-np.sort(sample)))
        n = len(sample)
        distance = max((np.arange(1, n + 1) / n - law).max(), (law - np.arange(n) / n).max())
        assert distance * math.sqrt(n) < critical
    assert one_position.max() <= noise.HIGHEST < 22.88


@pytest.mark.parametrize("count", [1, 3, 4, 5, 63, 64, 65, 1000, 49152])
def test_native_noise_has_the_same_bits(count):
    for seed, position, stream in ((0, 0, 0), (2**64 - 1, 2**33 + 5, 3), (123456789, 77, 1)):
        own = native_sampling.gumbel(seed, position, count, stream)
        assert (own == noise.gumbel(seed, position, np.arange(count), stream)).all()


PROGRAM = """
import hashlib, numpy as np
from outrider.runtime import native_sampling
digest = hashlib.sha256()
for position in range(20):
    digest.update(native_sampling.gumbel(99, position, 1003, 1).tobytes())
print(digest.hexdigest())
"""


def test_all_instruction_sets_give_the_same_noise():
    """Portable, AVX2 and AVX-512 vectors, as far as this processor has them, against numpy."""
    digest = hashlib.sha256()
    for position in range(20):
        digest.update(noise.gumbel(99, position, np.arange(1003), noise.DRAFT).tobytes())
    outputs = {name: run_with(name, PROGRAM) for name in SETS}
    assert outputs["portable"] is not None
    assert {text.strip() for text in outputs.values() if text} == {digest.hexdigest()}
