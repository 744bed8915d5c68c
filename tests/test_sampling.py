"""Shaping and draws: what each parameter does, and that the native core gives the oracle's tokens and bits."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from instruction_sets import SETS, run_with
from outrider.core import noise, sampling
from outrider.core.params import SamplingParams
from outrider.core.sampling import DrawError
from outrider.core.shaping import Draw, Shaping
from outrider.runtime import native_sampling

BOTH = pytest.mark.parametrize("core", [sampling, native_sampling], ids=["oracle", "native"])


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def shaped(*, tokens=(0, 1), prompt=1, seed=7, ends=(), mask=None, **params) -> Shaping:
    shaping = Shaping(SamplingParams(**params), seed, list(tokens), prompt, tuple(ends))
    shaping.mask = mask
    return shaping


def mask_of(size: int, *allowed: int) -> np.ndarray:
    words = np.zeros(-(-size // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words


# ---- what the parameters mean


@BOTH
def test_greedy_takes_the_largest_and_of_equals_the_lower_id(core):
    assert core.draw(row(1, 3, 2, 3), shaped()).token == 1
    assert core.draw(np.zeros(200, np.float32), shaped()).token == 0
    assert core.draw(row(-0.0, 0.0), shaped()).token == 0


@BOTH
def test_draw_is_the_argmax_of_logits_and_scaled_noise(core):
    """By its definition, for several temperatures and positions; the noise is that of the position to be filled."""
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)
    for temperature in (0.3, 1.0, 2.5):
        for path in ((), (4,), (4, 9, 9)):
            shaping = shaped(tokens=range(10), temperature=temperature)
            gumbel = noise.gumbel(7, 10 + len(path), np.arange(300), noise.TARGET)
            expected = np.argmax(logits.astype(np.float64) + temperature * gumbel)
            assert core.draw(logits, shaping, path).token == expected


@BOTH
def test_bias_is_added_before_everything_else(core):
    logits = row(0, 1, 2)
    assert core.draw(logits, shaped(logit_bias={0: 3.0})).token == 0
    assert core.law(logits, shaped(temperature=1, logit_bias={0: 1.0}, top_k=2)).tolist()[0] > 0
    # a positive logit after the bias is divided by the repetition penalty
    assert core.draw(row(-1, 0.9), shaped(tokens=[0, 0], logit_bias={0: 2.0}, repetition_penalty=1.2)).token == 1


@BOTH
def test_repetition_counts_prompt_output_and_path_the_others_output_and_path(core):
    logits = row(1, 1, 1, 1, 0.9)
    history = {"tokens": [0, 1], "prompt": 1}
    law = core.law(logits, shaped(temperature=1, repetition_penalty=2.0, **history), (2,))
    scores = np.log(law) - np.log(law[3])
    assert scores == pytest.approx([-0.5, -0.5, -0.5, 0, -0.1], abs=1e-6)
    law = core.law(logits, shaped(temperature=1, frequency_penalty=0.25, presence_penalty=0.5, **history), (2, 1, 2))
    scores = np.log(law) - np.log(law[3])
    assert scores == pytest.approx([0, -1.0, -1.0, 0, -0.1], abs=1e-6)
    assert core.law(row(-1, 0), shaped(temperature=1, repetition_penalty=2.0, tokens=[0]))[0] == pytest.approx(
        math.exp(-2) / (1 + math.exp(-2))
    )


@BOTH
def test_penalties_follow_the_growing_text(core):
    """The same shaping over many steps equals a fresh one at each: nothing is counted twice or forgotten."""
    rng = np.random.default_rng(3)
    params = {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    growing = shaped(tokens=[1, 2, 3], prompt=2, **params)
    for _ in range(60):
        logits = rng.normal(size=40).astype(np.float32)
        path = tuple(rng.integers(40, size=rng.integers(4)).tolist())
        fresh = shaped(tokens=growing.tokens, prompt=2, **params)
        assert core.draw(logits, growing, path) == sampling.draw(logits, fresh, path)
        growing.tokens.append(core.draw(logits, growing).token)


@BOTH
def test_min_tokens_keeps_the_ends_out_until_enough_is_written(core):
    logits = row(5, 1, 0)
    shaping = shaped(tokens=[1, 1, 1], prompt=1, ends=[0], min_tokens=4)
    assert core.draw(logits, shaping).token == 1
    assert core.draw(logits, shaping, (1,)).token == 1  # the fourth
    assert core.draw(logits, shaping, (1, 1)).token == 0  # the fifth


@BOTH
def test_mask_allows_only_its_tokens(core):
    logits = np.arange(70, dtype=np.float32)
    assert core.draw(logits, shaped(mask=mask_of(70, 3, 40))).token == 40
    assert core.draw(logits, shaped(mask=mask_of(32, 3))).token == 3, "tokens behind the mask's end are kept out"
    assert np.flatnonzero(core.law(logits, shaped(temperature=50, mask=mask_of(70, 3, 69)))).tolist() == [3, 69]


@BOTH
def test_min_p_is_relative_to_the_likeliest_at_temperature(core):
    logits = np.log(row(0.5, 0.3, 0.15, 0.05))
    assert np.count_nonzero(core.law(logits, shaped(temperature=1, min_p=0.299))) == 3
    assert np.count_nonzero(core.law(logits, shaped(temperature=1, min_p=0.301))) == 2
    assert np.count_nonzero(core.law(logits, shaped(temperature=0.5, min_p=0.1))) == 2  # 0.09 of the highest
    assert np.count_nonzero(core.law(row(1, 1, 0), shaped(temperature=1, min_p=1.0))) == 2


@BOTH
def test_top_k_keeps_k_and_of_equals_the_lower_ids(core):
    assert np.flatnonzero(core.law(row(0, 2, 1, 1, 1), shaped(temperature=1, top_k=3))).tolist() == [1, 2, 3]
    flat = core.law(np.zeros(1000, np.float32), shaped(temperature=1, top_k=10))
    assert np.flatnonzero(flat).tolist() == list(range(10))


@BOTH
def test_top_p_keeps_the_tokens_before_which_the_mass_is_short_of_it(core):
    logits = np.log(row(0.2, 0.5, 0.05, 0.25))
    for top_p, kept in ((0.49, [1]), (0.51, [1, 3]), (0.74, [1, 3]), (0.76, [0, 1, 3]), (0.96, [0, 1, 2, 3])):
        assert np.flatnonzero(core.law(logits, shaped(temperature=1, top_p=top_p))).tolist() == kept
    assert np.flatnonzero(core.law(logits, shaped(temperature=1, top_p=1e-300))).tolist() == [1]


@BOTH
def test_top_p_is_of_what_top_k_left(core):
    """vLLM's order: 0.5 and 0.25 remain and are 2/3 and 1/3."""
    logits = np.log(row(0.2, 0.5, 0.05, 0.25))
    assert np.flatnonzero(core.law(logits, shaped(temperature=1, top_k=2, top_p=0.66))).tolist() == [1]
    assert np.flatnonzero(core.law(logits, shaped(temperature=1, top_k=2, top_p=0.67))).tolist() == [1, 3]


@BOTH
def test_filters_agree_with_a_plain_sort(core):
    """Against a few lines of exact arithmetic on probabilities, away from ties and thresholds."""
    rng = np.random.default_rng(4)
    for _ in range(300):
        size = int(rng.integers(2, 400))
        logits = (rng.normal(size=size) * rng.choice([0.1, 1, 4])).astype(np.float32)
        temperature, min_p = float(rng.choice([0.5, 1.0, 2.0])), float(rng.choice([0, 0.03, 0.3]))
        top_k, top_p = int(rng.choice([0, 1, 7, 100])), float(rng.choice([1.0, 0.3, 0.8, 0.97]))
        p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
        order = np.argsort(-p)
        order = order[p[order] >= min_p][: top_k or size]
        before = np.cumsum(p[order]) - p[order]
        order = order[before < top_p * p[order].sum()]
        expected = np.zeros(size)
        expected[order] = p[order] / p[order].sum()
        law = core.law(logits, shaped(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p))
        assert law == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert law.sum() == pytest.approx(1, abs=1e-12)


@BOTH
def test_law_at_temperature_zero_is_a_point_mass(core):
    assert core.law(row(0, 4, 4), shaped(top_k=2, top_p=0.1)).tolist() == [0, 1, 0]


@BOTH
def test_top_lists_what_draw_would_give_first_second_and_third(core):
    """Keep out each token that was listed, and `draw` gives the next; the log-probabilities are the law's."""
    logits = np.random.default_rng(5).normal(size=90).astype(np.float32)
    for params in ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 4}):
        tokens, logprobs = core.top(logits, 5, shaped(**params))
        assert len(tokens) == min(5, params.get("top_k", 5))
        law = core.law(logits, shaped(**{**params, "temperature": params.get("temperature", 1.0)}))
        assert logprobs == pytest.approx(np.log(law[tokens]), abs=1e-6)
        if "top_k" in params:
            continue
        left = set(range(90))
        for token in tokens.tolist():
            assert core.draw(logits, shaped(mask=mask_of(90, *left), **params)).token == token
            left.remove(token)


@BOTH
def test_top_without_shaping_is_by_plain_logits(core):
    logits = row(1, 3, -np.inf, 3, 2)
    tokens, logprobs = core.top(logits, 10)
    assert tokens.tolist() == [1, 3, 4, 0]
    assert logprobs == pytest.approx(np.log(np.exp([3, 3, 2, 1]) / np.exp([1, 3, 3, 2]).sum()), abs=1e-6)
    assert core.top(logits, 0)[0].size == 0


@BOTH
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_draft_is_sure_of_what_the_target_would_draw(core, temperature):
    """First comes what the same row would make the target draw; the shares of all that could come sum to one. With
    noise, a token that is too far behind to be worth it (here 3) is none of them."""
    logits = np.random.default_rng(6).normal(size=12).astype(np.float32)
    shaping = shaped(temperature=temperature, logit_bias={3: -9.0})
    ranked = core.ranked(logits, 12, shaping, (4,))
    assert ranked[0][0] == core.draw(logits, shaping, (4,)).token
    best = core.top(logits, 12, shaping, (4,))[0].tolist()
    assert [token for token, _ in ranked] == [token for token in best if token != 3 or temperature == 0]
    assert sum(np.exp(sure) for _, sure in ranked) == pytest.approx(1)
    known = np.arange(5, 29, 2, dtype=np.int32)
    drawn = core.ranked(logits, 3, shaping, (), known, 40)
    assert len(drawn) == 3
    wide = np.full(40, -np.inf, np.float32)
    wide[known] = logits
    assert drawn[0][0] == core.draw(wide, shaping).token


def test_native_drafts_are_as_sure_as_the_oracle():
    """Any parameters, drafts with a vocabulary of their own too; a refusal has the same words."""
    rng = np.random.default_rng(8)
    for _ in range(600):
        logits, shaping, path = case(rng, 200)
        known = np.sort(rng.choice(200, 60, replace=False)).astype(np.int32)
        for arguments in ((logits, 5, shaping, path), (logits[:60], 5, shaping, path, known, 200)):
            try:
                expected = sampling.ranked(*arguments)
            except DrawError as error:
                with pytest.raises(DrawError, match=re.escape(str(error))):
                    native_sampling.ranked(*arguments)
                continue
            got = native_sampling.ranked(*arguments)
            assert [token for token, _ in got] == [token for token, _ in expected]
            assert [sure for _, sure in got] == pytest.approx([sure for _, sure in expected], rel=1e-5, abs=1e-5)


@BOTH
def test_logprobs_are_of_the_unshaped_logits(core):
    """Whatever the parameters do to the draw (fault: log-probabilities 0.0, missing or of the wrong law)."""
    logits = np.random.default_rng(7).normal(size=50).astype(np.float32)
    exact = logits.astype(np.longdouble) - np.log(np.exp(logits.astype(np.longdouble)).sum())
    params = {"temperature": 0.7, "top_k": 3, "logit_bias": {8: 50.0}, "presence_penalty": 1.0}
    drawn = core.draw(logits, shaped(logprobs=2, **params))
    best = np.argsort(-logits)[:2]
    assert drawn.token == 8
    assert drawn.logprob == pytest.approx(float(exact[8]), rel=1e-13)
    assert [token for token, _ in drawn.top] == best.tolist()
    assert [logprob for _, logprob in drawn.top] == pytest.approx([float(exact[t]) for t in best], rel=1e-13)
    assert core.draw(logits, shaped(logprobs=0, **params)) == Draw(8, drawn.logprob)
    assert core.draw(logits, shaped(**params)) == Draw(8)
    assert sampling.describe(logits, 8, 2) == drawn
    assert core.log_softmax(logits, [8]).tolist() == [drawn.logprob]


@BOTH
def test_ids_outside_the_row_are_skipped(core):
    """A draft with a smaller vocabulary meets the target's bias, ends and history."""
    params = {"logit_bias": {9: 5.0}, "repetition_penalty": 1.5, "frequency_penalty": 1.0, "min_tokens": 9}
    assert core.draw(row(0, 1), shaped(tokens=[9, 9], ends=[9], **params), (9,)).token == 1


def test_pick_takes_the_token_at_which_the_running_sum_passes_u():
    p = np.array([0.0, 0.2, 0.0, 0.5, 0.3, 0.0]) * 7  # need not sum to one
    for u, token in ((1e-300, 1), (0.199, 1), (0.201, 3), (0.699, 3), (0.701, 4), (1 - 2**-53, 4)):
        assert sampling.pick(p, u) == token
    with pytest.raises(DrawError):
        sampling.pick(np.zeros(3), 0.5)


# ---- refusals


@BOTH
@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (row(0, np.nan, 1), "token 1 for position 2 is NaN"),
        (row(0, 1, np.inf), "token 2 for position 2 is +inf"),
        (row(-np.inf, -np.inf), "all 2 of the model's logits for position 2 are -inf"),
    ],
)
def test_broken_logits_are_named_and_never_drawn_from(core, logits, words):
    for attempt in (
        lambda: core.draw(logits, shaped()),
        lambda: core.draw(logits, shaped(mask=mask_of(3, 0))),
        lambda: core.law(logits, shaped(temperature=1)),
        lambda: core.top(logits, 2, shaped(temperature=1)),
    ):
        with pytest.raises(DrawError) as error:
            attempt()
        assert words in str(error.value)
    with pytest.raises(DrawError):
        core.top(logits, 1)


@BOTH
def test_nan_is_found_anywhere_in_a_long_row(core):
    for token in (0, 63, 64, 4095, 4096, 4099):
        logits = np.zeros(4100, np.float32)
        logits[token] = np.nan
        with pytest.raises(DrawError, match=f"token {token} .*NaN"):
            core.draw(logits, shaped(temperature=1))


@BOTH
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mask": mask_of(3)}, "the mask (grammar)"),
        ({"ends": (0, 1, 2), "min_tokens": 5}, "min_tokens"),
        ({"ends": (0,), "min_tokens": 5, "mask": mask_of(3, 0)}, "the mask (grammar) and min_tokens"),
    ],
)
def test_when_everything_is_kept_out_the_cause_is_named(core, settings, words):
    with pytest.raises(DrawError, match="no token is left for position 2") as error:
        core.draw(row(0, 1, 2), shaped(**settings))
    assert words in str(error.value)


@BOTH
def test_a_penalty_that_overflows_is_named(core):
    with pytest.raises(DrawError, match="repetition_penalty 1e-300"):
        core.draw(row(1, 2), shaped(tokens=[0], repetition_penalty=1e-300))


# ---- the native core against the oracle


def case(rng: np.random.Generator, size: int) -> tuple[np.ndarray, Shaping, tuple[int, ...]]:
    """A row and a mix of parameters, rich in ties, flat and steep rows, impossible tokens and extreme values."""
    kind = rng.integers(6)
    logits = rng.normal(size=size) * (0.01, 3, 50, 1, 1, 2.5)[kind]
    if kind == 3:
        logits = rng.integers(-3, 3, size=size).astype(float)
    elif kind == 4:
        logits[:] = 0
    elif kind == 5:
        logits[rng.random(size) < 0.3] = -np.inf
        logits[rng.integers(size)] = 1

    def one_of(*values: float) -> float:
        return float(rng.choice(values))

    params = SamplingParams(
        temperature=one_of(0, 0.3, 0.7, 1, 1, 1.5, 100, 1e-5, 1e-310),
        top_k=int(one_of(0, 0, 1, 2, 5, 40, 1000)),
        top_p=one_of(1, 1, 0.1, 0.5, 0.9, 0.999, 1e-9, 1 - 2**-53),
        min_p=one_of(0, 0, 0.01, 0.2, 1, 1e-320),
        repetition_penalty=one_of(1, 1, 1.2, 0.7),
        frequency_penalty=one_of(0, 0, 0.5, -1),
        presence_penalty=one_of(0, 0, 0.5),
        logit_bias={int(t): float(rng.normal() * 5) for t in rng.integers(size, size=rng.integers(3))},
        min_tokens=int(one_of(0, 0, 20)),
        logprobs=(None, 0, 1, 5)[rng.integers(4)],
    )
    tokens = rng.integers(size, size=rng.integers(1, 30)).tolist()
    ends = tuple(rng.integers(size, size=rng.integers(2)).tolist())
    shaping = Shaping(
        params, int(rng.integers(2**64, dtype=np.uint64)), tokens, int(rng.integers(1, len(tokens) + 1)), ends
    )
    if rng.random() < 0.2:
        shaping.mask = rng.integers(2**32, size=-(-size // 32), dtype=np.uint32)
    return logits.astype(np.float32), shaping, tuple(rng.integers(size, size=rng.integers(4)).tolist())


def outcomes(core, logits: np.ndarray, shaping: Shaping, path: tuple[int, ...], k: int) -> list[object]:
    """Everything that a core says of a row, as comparable values; a refusal as its message."""
    out: list[object] = []
    for attempt in (
        lambda: core.draw(logits, shaping, path),
        lambda: core.law(logits, shaping, path).tobytes(),
        lambda: tuple(part.tobytes() for part in core.top(logits, k, shaping, path)),
        lambda: tuple(part.tobytes() for part in core.top(logits, k)),
    ):
        try:
            out.append(attempt())
        except DrawError as error:
            out.append(str(error))
    return out


@pytest.mark.parametrize(("size", "count"), [(3, 1500), (50, 1500), (1000, 1200), (49152, 60)])
def test_native_equals_the_oracle_bit_for_bit(size, count):
    """Tokens, log-probabilities, laws, best tokens and messages, over thousands of random mixes."""
    rng = np.random.default_rng(size)
    filtered = refused = 0
    for _ in range(count):
        logits, shaping, path = case(rng, size)
        k = int(rng.choice([1, 3, 8, 100, 1000]))
        expected = outcomes(sampling, logits, shaping, path, k)
        assert outcomes(native_sampling, logits, shaping, path, k) == expected, (shaping, path)
        refused += isinstance(expected[0], str)
        filtered += shaping.params.temperature > 0 and shaping.params.top_p < 1
    assert filtered > count / 4
    assert refused > 0 or size > 3


PROGRAM = """
import hashlib
import numpy as np
from test_sampling import case, outcomes
from outrider.runtime import native_sampling
rng, digest = np.random.default_rng(12), hashlib.sha256()
for size in (3, 100, 1003, 9000):
    for _ in range(250):
        digest.update(repr(outcomes(native_sampling, *case(rng, size), 8)).encode())
        digest.update(repr(native_sampling.draw_children(rng.dirichlet(np.ones(size)), 5, size, 3)).encode())
print(digest.hexdigest())
"""


def test_all_instruction_sets_give_the_same_draws():
    """1,000 random mixes with portable, AVX2 and AVX-512 code, as far as this processor has them."""
    from pathlib import Path

    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{PROGRAM}"
    outputs = {name: run_with(name, program) for name in SETS}
    assert outputs["portable"] is not None
    assert len({text for text in outputs.values() if text}) == 1


def test_pruned_noise_never_loses_a_winner():
    """20,000 draws from rows in which the winner is often far from the top: steep, flat, long tails, odd lengths."""
    rng = np.random.default_rng(8)
    surprises = 0
    for trial in range(20_000):
        size = int(rng.choice([65, 127, 300, 1000]))
        kind = trial % 4
        logits = (-np.arange(size) * 0.02, rng.normal(size=size) * 4, np.zeros(size), -rng.exponential(5, size))[kind]
        logits = logits.astype(np.float32)
        shaping = shaped(seed=trial, temperature=1.0)
        token = native_sampling.draw(logits, shaping).token
        gumbel = native_sampling.gumbel(trial, 2, size, noise.TARGET)
        assert token == np.argmax(logits.astype(np.float64) + gumbel)
        surprises += logits[token] < logits.max() - 3
    assert surprises > 500
