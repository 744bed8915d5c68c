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

ACCEPTANCES = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
_SEEDS = 1000  # between two cells
_TURNS = 4  # of drafted steps, plain ones and bare forwards in a cell
_PLAIN, _BARE = 10, 6  # plain steps, and forwards of each number of rows, in a turn
_SHORTEST = 5  # of the built-in prompts: each text reads its prompt first
_CONTEXT = 96  # cached tokens of bare forwards, about as many as the texts have
_FEWEST, _MOST = 40, 500  # steps of a cell


@dataclass(frozen=True, slots=True)
class Cell:
    """One acceptance rate and draft length. Seconds of a step, medians over turns."""

    acceptance: float
    guesses: int
    steps: int  # with that many guesses
    tokens: int  # that they brought
    seconds: float
    plain: float  # of a plain step in turns with them
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
    error: float = 0.03,
    length: int = 64,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Cell]:
    """So many steps for each cell that chance moves its mean by about `error`, within limits.

    The truth is what plain decoding writes to the shortest of the built-in prompts.
    """
    engine = Engine.from_loaded(loaded, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    prompts = sorted((tokens_of(engine, text) for text in built_in()), key=len)[:_SHORTEST]
    truths = [result.tokens for result in engine.generate(prompts, params)]
    replays = {
        a: Engine.from_loaded(
            loaded,
            drafter="replay",
            drafter_options={"acceptance": str(a), "max_draft_tokens": max(lengths)},
            enable_prefix_caching=False,
        )
        for a in acceptances
    }
    texts = list(zip(prompts, truths, strict=True))
    behind = Behind(loaded, _CONTEXT, 1)
    out: list[Cell] = []
    for guesses in lengths:
        for a in acceptances:
            tally = _Cell(a, guesses)
            tally.fill(replays[a], behind, texts, _steps(a, guesses, error), _SEEDS * len(out), clock)
            out.append(tally.cell())
            progress(len(out), len(lengths) * len(acceptances))
    behind.release()
    return out


def _steps(a: float, k: int, error: float) -> int:
    """Steps after which the mean of tokens per step has a relative standard error of `error`."""
    law = [a**n * (1 - a) for n in range(k)] + [a**k]  # of the guesses that are right
    mean = tokens(a, k)
    variance = sum(p * (1 + n - mean) ** 2 for n, p in enumerate(law))
    return min(max(round(variance / (error * mean) ** 2), _FEWEST), _MOST)


@dataclass(slots=True)
class _Tally:
    """Full steps of so many guesses."""

    guesses: int
    steps: int = 0
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Turn:
    """Drafted steps, plain ones and bare forwards, one after the other. Seconds."""

    drafted: list[float]
    plain: list[float]
    rows: list[float]  # forwards of as many rows as the drafted steps have
    row: list[float]  # and of one


@dataclass(slots=True)
class _Cell:
    """A cell while it is measured, in turns."""

    acceptance: float
    guesses: int
    steps: int = 0
    tokens: int = 0
    turns: list[_Turn] = field(default_factory=list)

    def fill(
        self,
        engine: Engine,
        behind: Behind,
        texts: Sequence[tuple[list[int], list[int]]],
        wanted: int,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        """`wanted` drafted steps, over as many texts as that takes.

        Texts have seeds from `seed` on, so that other guesses are wrong than in other cells: chance moves each alone.
        """
        for turn in range(1, _TURNS + 1):
            drafted, plain = _Tally(self.guesses), _Tally(0)
            while self.steps + drafted.steps < wanted * turn // _TURNS:
                _run(engine, texts[seed % len(texts)], seed, drafted, wanted * turn // _TURNS - self.steps, clock)
                seed += 1
            _run(engine, texts[seed % len(texts)], seed, plain, _PLAIN, clock)
            self.steps += drafted.steps
            self.tokens += drafted.tokens
            rows, row = [[behind.forward(1, count, clock) for _ in range(_BARE)] for count in (1 + self.guesses, 1)]
            self.turns.append(_Turn(drafted.seconds, plain.seconds, rows, row))

    def cell(self) -> Cell:
        """Ratios within a turn, for the machine may be busy in one and idle in the next; medians over the turns."""
        plain = median(second for turn in self.turns for second in turn.plain)
        row = median(second for turn in self.turns for second in turn.row)
        cost = median(median(turn.drafted) / median(turn.plain) for turn in self.turns)
        bare = median(median(turn.rows) / median(turn.row) for turn in self.turns)
        return Cell(self.acceptance, self.guesses, self.steps, self.tokens, cost * plain, plain, bare * row, row)


def _run(
    engine: Engine,
    text: tuple[list[int], list[int]],
    seed: int,
    tally: _Tally,
    wanted: int,
    clock: Callable[[], float],
) -> None:
    """One text, or the part of it that is still wanted. Not counted: the prompt, and steps without room for all."""
    prompt, truth = text
    params = SamplingParams(temperature=0.0, max_tokens=len(truth), ignore_eos=True, seed=seed)
    guessing = Speculation(prediction=truth, drafter="replay", max_draft_tokens=tally.guesses)
    request = engine.add(prompt, params, guessing)
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
