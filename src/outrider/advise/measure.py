"""Measures a profile: forwards by rows, batch and context, draws, and what each method adds to a step.

Everything is measured in turns, round by round, since machines drift; medians count. What a method adds is measured
where it matters: on texts that it drafts for, as the wall time of the engine's steps less that of their forwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

import numpy as np

from outrider.advise.probe import Followed, follow
from outrider.advise.prompts import Text, built_in
from outrider.core.cache import Rows
from outrider.core.params import SamplingParams
from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.drafters.base import DrafterError
from outrider.engine.engine import Engine, Loaded
from outrider.engine.profile import Counts, Drafting, Forward, Profile, key_of
from outrider.runtime.runner import Feed

__all__ = ["METHODS", "Behind", "Plan", "measure", "measure_forwards"]

METHODS = ("none", "ngram", "suffix", "draft_model", "medusa", "eagle", "auto")
_BY_LENGTH = ("draft_model", "eagle")  # whose guesses cost a pass each
_LIMITS = (1, 3, 5)
_DRAWS = {"greedy": SamplingParams(temperature=0.0), "temperature 1": SamplingParams(temperature=1.0)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured; the defaults take less than a minute with a small model."""

    rows: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 17, 20, 24, 25, 32, 48, 64)  # of one sequence
    batches: tuple[int, ...] = (2, 4, 8)
    rows_each: tuple[int, ...] = (1, 2, 3, 5, 9)  # of each sequence of a batch
    context: int = 256
    long: int = 1024  # the context that the slope is measured with
    long_rows: tuple[int, ...] = (1, 8, 32)
    rounds: int = 15
    tokens: int = 48  # written per text and method
    texts: tuple[Text, ...] = ()  # those of the methods; none given: the built-in ones

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(batch, rows of each, context)"""
        return [
            *((1, rows, self.context) for rows in self.rows),
            *((batch, rows, self.context) for batch in self.batches for rows in self.rows_each),
            *((1, rows, self.long) for rows in self.long_rows),
        ]

    @property
    def cache_rows(self) -> int:
        """Cache rows that the forwards need, in whole pages of 64."""
        deepest = max((*self.batches, 1)) * (self.context + max(self.rows_each) + 128)
        return max(deepest, self.context + max(self.rows) + 128) + self.long + max(self.long_rows) + 128


def measure(
    loaded: Loaded,
    methods: Mapping[str, Engine],
    *,
    version: str,
    plan: Plan = Plan(),
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Profile:
    """The profile of a model. `methods` are engines over it, by the method that each is to draft with.

    The engines may be one and the same; `version` is outrider's, for the record. Raises ParameterError where the cache
    is too small for the plan's forwards.
    """
    forwards, draws = measure_forwards(
        loaded, plan, clock=clock, progress=lambda done, total: progress("forwards", done, total)
    )
    return Profile(
        key=key_of(loaded),
        name=loaded.files.name,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        outrider=version,
        context=plan.context,
        forwards=forwards,
        draws=draws,
        draftings=_draftings(methods, plan, clock, progress),
    )


def measure_forwards(
    loaded: Loaded,
    plan: Plan,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Forward], dict[str, float]]:
    """Seconds of the plan's forwards, and of one draw by parameters."""
    contexts = {
        context: Behind(loaded, context, max((batch for batch, _, c in plan.shapes if c == context), default=1))
        for context in sorted({shape[2] for shape in plan.shapes})
    }
    times: dict[tuple[int, int, int], list[float]] = {shape: [] for shape in plan.shapes}
    draws: dict[str, list[float]] = {name: [] for name in _DRAWS}
    try:
        for number in range(plan.rounds):
            for shape in plan.shapes:
                batch, rows, context = shape
                times[shape].append(contexts[context].forward(batch, rows, clock))
            for name, params in _DRAWS.items():
                draws[name].append(contexts[plan.context].draw(params, clock))
            progress(number + 1, plan.rounds)
    finally:
        for behind in contexts.values():
            behind.release()
    return (
        [Forward(batch, batch * rows, context, median(seconds)) for (batch, rows, context), seconds in times.items()],
        {name: median(seconds) for name, seconds in draws.items()},
    )


class Behind:
    """Some sequences with `context` cached tokens each, and forwards of any number of rows behind them."""

    def __init__(self, loaded: Loaded, context: int, batch: int) -> None:
        self._runner = loaded.runner
        vocabulary = loaded.runner.config.vocabulary
        self._sequences = [Rows(loaded.runner.pages) for _ in range(batch)]
        for number, rows in enumerate(self._sequences):
            rows.reserve(context)
            self._runner.forward([Feed(rows, [(17 + number + 31 * i) % vocabulary for i in range(context)])])
            rows.commit(context)

    def forward(self, batch: int, rows: int, clock: Callable[[], float]) -> float:
        """Seconds of a forward of `batch` sequences, each with a root and a chain of guesses: `rows` rows."""
        tree = Tree.chain(1, range(2, rows + 1))
        for sequence in self._sequences[:batch]:
            sequence.reserve(rows)
        feeds = [Feed(sequence, [1], tree) for sequence in self._sequences[:batch]]
        began = clock()
        self._runner.forward(feeds)
        return clock() - began

    def draw(self, params: SamplingParams, clock: Callable[[], float], count: int = 16) -> float:
        """Seconds of one draw, the mean of a few."""
        self._sequences[0].reserve(1)
        scores = self._runner.forward([Feed(self._sequences[0], [1], Tree.root(1))])
        shaping = Shaping(params, seed=0, tokens=[1], prompt_length=1)
        scores.draw(0, 0, shaping)  # the first one prepares
        began = clock()
        for _ in range(count):
            scores.draw(0, 0, shaping)
        return (clock() - began) / count

    def release(self) -> None:
        for sequence in self._sequences:
            sequence.release()


def _draftings(
    methods: Mapping[str, Engine],
    plan: Plan,
    clock: Callable[[], float],
    progress: Callable[[str, int, int], None],
) -> list[Drafting]:
    texts = list(plan.texts) or built_in()
    done = 0
    found: dict[str, list[Followed]] = {method: [] for method in methods}
    for method, engine in methods.items():
        follow(engine, method, texts[:1], max_tokens=16)  # wakes the threads, fills the caches
    for text in texts:  # in turns: a machine that slows down favours none
        for method, engine in methods.items():
            found[method] += follow(engine, method, [text], max_tokens=plan.tokens, clock=clock)
            done += 1
            progress("methods", done, len(texts) * len(methods))
    out = []
    for method, followed in found.items():
        broken = next((f.error for f in followed if f.error), None)
        if broken is not None:
            raise DrafterError(f"{broken}; leave out the method")
        drafting = _drafting(method, followed, methods[method])
        if method in _BY_LENGTH:
            drafting.lengths = _lengths(method, methods[method], texts, plan, clock)
        out.append(drafting)
    return out


def _lengths(
    method: str, engine: Engine, texts: Sequence[Text], plan: Plan, clock: Callable[[], float]
) -> dict[int, float]:
    """What guessing costs by the most guesses that are made: checked or not, they were made."""
    out = {}
    for limit in _LIMITS:
        followed = follow(engine, method, texts[:2], max_tokens=plan.tokens // 2, limit=limit, clock=clock)
        spent = [m.seconds - m.forward for f in followed for m in f.moments[1:] if m.guesses]
        if spent:
            out[limit] = median(spent)
    return out if len(out) > 1 else {}


def _drafting(method: str, followed: Sequence[Followed], engine: Engine) -> Drafting:
    """What the method added to its steps. The first step of a text also reads its prompt: that part is the prompt's."""
    later = [(m.guesses, m.seconds - m.forward) for f in followed for m in f.moments[1:]]
    idle = [seconds for guesses, seconds in later if not guesses]
    drafted = [(guesses, seconds) for guesses, seconds in later if guesses]
    none = median(idle) if idle else min((seconds for _, seconds in drafted), default=0.0)
    some, guess = _line(drafted) if drafted else (none, 0.0)

    def usual(guesses: int) -> float:
        return some + guesses * guess if guesses else none

    prompts = [
        (
            f.prompt_tokens,
            f.prompt_seconds + sum(max(0.0, m.seconds - m.forward - usual(m.guesses)) for m in f.moments[:1]),
        )
        for f in followed
    ]
    prompt, prompt_token = _line(prompts)
    texts: dict[str, Counts] = {}
    for f in followed:
        texts.setdefault(f.workload, Counts()).add(f.counts)
    memory = sum(size for purpose, size in engine.memory().items() if purpose.startswith(f"{method}: "))
    return Drafting(method, none, some, guess, prompt, prompt_token, memory=memory, texts=texts)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """A line through the medians of points, neither part below nothing: (at 0, per step of x)."""
    by_x: dict[int, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    xs = np.array(sorted(by_x), float)
    ys = np.array([median(by_x[int(x)]) for x in xs])
    weights = np.sqrt([len(by_x[int(x)]) for x in xs])
    if len(xs) == 1:
        return float(ys[0]), 0.0
    design = np.stack([np.ones_like(xs), xs], 1) * weights[:, None]
    (start, slope), *_ = np.linalg.lstsq(design, ys * weights, rcond=None)
    if slope < 0:
        return float(np.average(ys, weights=weights**2)), 0.0
    if start < 0:
        return 0.0, float((xs * ys * weights**2).sum() / (xs * xs * weights**2).sum())
    return float(start), float(slope)
