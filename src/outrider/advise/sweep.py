"""Speed-up against acceptance, measured: the replay drafter sets it, a clock tells what it is worth.

Three figures for each acceptance rate a and draft length k: what was measured; what the formula of Leviathan et al.
2023 makes of the measured cost of a step; and what it makes of bare forwards, as a profile measures them. These are
taken between the texts, for machines drift from minute to minute, and the question here is whether the three agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

from outrider.advise.expected import tokens
from outrider.advise.measure import Behind
from outrider.advise.probe import tokens_of
from outrider.advise.prompts import built_in
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine, Loaded
from outrider.engine.speculation import Speculation

__all__ = ["ACCEPTANCES", "LENGTHS", "Cell", "sweep"]

ACCEPTANCES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
_SEEDS = 1000  # between two cells
_BARE = 4  # forwards of each number of rows between two texts
_CONTEXT = 192  # cached tokens of bare forwards, as many as the texts have
_PLAIN = 24  # plain steps beside each cell's
_FEWEST, _MOST = 40, 500  # steps of a cell


@dataclass(frozen=True, slots=True)
class Cell:
    """One acceptance rate and draft length. Seconds of a step, medians: the machine may be busy now and then."""

    acceptance: float
    guesses: int
    steps: int  # with that many guesses
    tokens: int  # that they brought
    seconds: float
    plain: float  # of a plain step between those of this length
    forward: float  # of a bare forward of as many rows
    plain_forward: float  # and of one row

    @property
    def measured(self) -> float:
        """Speed-up over plain decoding."""
        return self.tokens / self.steps * self.plain / self.seconds

    @property
    def formula(self) -> float:
        """Speed-up by the expected tokens of the formula and the steps' measured cost."""
        return tokens(self.acceptance, self.guesses) * self.plain / self.seconds

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "measured": self.measured, "formula": self.formula}


def sweep(
    loaded: Loaded,
    *,
    acceptances: Sequence[float] = ACCEPTANCES,
    lengths: Sequence[int] = LENGTHS,
    error: float = 0.025,
    length: int = 64,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Cell]:
    """So many steps for each cell that chance moves its mean by about `error`, within limits.

    The truth is what plain decoding writes to the built-in prompts.
    """
    engine = Engine.from_loaded(loaded)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    prompts = [tokens_of(engine, text) for text in built_in()]
    truths = [result.tokens for result in engine.generate(prompts, params)]
    replays = {
        a: Engine.from_loaded(
            loaded, drafter="replay", drafter_options={"acceptance": str(a), "max_draft_tokens": max(lengths)}
        )
        for a in acceptances
    }
    texts = list(zip(prompts, truths, strict=True))
    behind = Behind(loaded, _CONTEXT, 1)
    out: list[Cell] = []
    for guesses in lengths:
        plain = _Tally(0)
        bare: dict[int, list[float]] = {1: [], 1 + guesses: []}

        def between(bare: dict[int, list[float]] = bare) -> None:
            for rows, seconds in bare.items():
                seconds += [behind.forward(1, rows, clock) for _ in range(_BARE)]

        cells: list[tuple[float, _Tally]] = []
        for a in acceptances:
            tally = _Tally(guesses)
            seed = _SEEDS * (len(out) + len(cells))
            _fill(replays[a], tally, plain, texts, _steps(a, guesses, error), seed, between, clock)
            cells.append((a, tally))
            progress(len(out) + len(cells), len(lengths) * len(acceptances))
        forward, one = median(bare[1 + guesses]), median(bare[1])
        out += [
            Cell(a, guesses, t.steps, t.tokens, median(t.seconds), median(plain.seconds), forward, one)
            for a, t in cells
        ]
    behind.release()
    return out


def _steps(a: float, k: int, error: float) -> int:
    """Steps after which the mean of tokens per step has a relative standard error of `error`."""
    law = [a**n * (1 - a) for n in range(k)] + [a**k]  # of the guesses that are right
    mean = tokens(a, k)
    variance = sum(p * (1 + n - mean) ** 2 for n, p in enumerate(law))
    return min(max(round(variance / (error * mean) ** 2), _FEWEST), _MOST)


def _fill(
    engine: Engine,
    drafted: _Tally,
    plain: _Tally,
    texts: Sequence[tuple[list[int], list[int]]],
    wanted: int,
    seed: int,
    between: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    """`wanted` drafted steps, over as many texts as that takes, and some plain ones among them.

    Texts have seeds from `seed` on, so that other guesses are wrong than in other cells: their errors are independent.
    """
    more = plain.steps + _PLAIN
    while drafted.steps < wanted:
        prompt, truth = texts[seed % len(texts)]
        params = SamplingParams(temperature=0.0, max_tokens=len(truth), ignore_eos=True, seed=seed)
        _run(engine, prompt, truth, params, drafted, wanted, clock)
        if plain.steps < more:
            _run(engine, prompt, truth, params, plain, more, clock)
        between()
        seed += 1


@dataclass(slots=True)
class _Tally:
    """Full steps of so many guesses."""

    guesses: int
    steps: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)


def _run(
    engine: Engine,
    prompt: list[int],
    truth: list[int],
    params: SamplingParams,
    tally: _Tally,
    wanted: int,
    clock: Callable[[], float],
) -> None:
    """One text, or the part of it that is still wanted. Not counted: the prompt, and steps without room for all."""
    request = engine.add(
        prompt, params, Speculation(prediction=truth, drafter="replay", max_draft_tokens=tally.guesses)
    )
    first = True
    while request in engine.running or engine.waiting:
        began = clock()
        deltas = engine.step()
        spent = clock() - began
        if not deltas:
            continue
        step = deltas[0].step
        if not first and step is not None and step.drafted == tally.guesses:
            tally.steps += 1
            tally.tokens += 1 + step.accepted
            tally.seconds.append(spent)
        first = False
        if tally.steps >= wanted:
            engine.cancel(request)
    engine.result(request)
