"""Measures a profile: forwards by rows, batch and context, draws, and what each method adds to a step.

Everything is measured in turns, round by round, since machines drift; medians count. What a method adds is measured
where it matters: in the engine's steps on texts that it drafts for, in turns with plain decoding of the same texts. A
step counts by its ratio to the plain ones of its turn, so what slows a turn down as a whole, and what a forward costs
more within a text than bare, divides out:

    seconds of a step / seconds of a plain step in its turn = (forward by rows + what the method adds) / plain step
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

import numpy as np

from outrider.advise.probe import Followed, Moment, follow, tokens_of
from outrider.advise.prompts import Text, built_in
from outrider.core.cache import Rows
from outrider.core.params import SamplingParams
from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.drafters.base import DrafterError
from outrider.engine.engine import Engine, Loaded
from outrider.engine.profile import Counts, Drafting, Forward, Profile, key_of
from outrider.runtime.runner import Feed

__all__ = ["METHODS", "Additions", "Behind", "Plan", "Turn", "measure", "measure_forwards"]

METHODS = ("none", "ngram", "suffix", "draft_model", "medusa", "eagle", "auto")
_BY_LENGTH = ("draft_model", "eagle")  # whose guesses cost a pass each
_LIMITS = (1, 3, 5)
_FEW = 8  # tokens written behind a long prompt: it is read for its own sake
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
    prompts: tuple[int, ...] = (160, 320, 640)  # lengths of those that are read besides the texts'
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

    The engines may be one and the same, and `none` is among them; `version` is outrider's, for the record. Raises
    ParameterError where the cache is too small for the plan's forwards.
    """
    forwards, draws = measure_forwards(
        loaded, plan, clock=clock, progress=lambda done, total: progress("forwards", done, total)
    )
    profile = Profile(
        key=key_of(loaded),
        name=loaded.files.name,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        outrider=version,
        context=plan.context,
        forwards=forwards,
        draws=draws,
        draftings=[],
    )

    def forward(rows: int, context: int) -> float:
        return profile.seconds(rows, context=context)

    profile.draftings = _draftings(methods, forward, plan, clock, progress)
    return profile


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
                contexts[context].forward(batch, rows, clock)  # a text's steps follow steps of its own kind
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


@dataclass(slots=True)
class Turn:
    """One text, as all methods followed it."""

    by_method: dict[str, Followed]

    @property
    def plain(self) -> Followed:
        return self.by_method["none"]

    def context(self, followed: Followed) -> int:
        """Cached tokens on the average."""
        return followed.prompt_tokens + len(followed.tokens) // 2


class Additions:
    """What methods add to the steps of texts whose plain decoding ran in turns with them."""

    def __init__(self, turns: Sequence[Turn], forward: Callable[[int, int], float]) -> None:
        """`forward` gives seconds by rows and cached tokens."""
        self._turns = [turn for turn in turns if turn.plain.moments]
        self._forward = forward
        beside = [m.seconds - m.forward for turn in self._turns for m in turn.plain.moments]
        self.none = median(beside) if beside else 0.0
        prompts = [(turn.plain.prompt_tokens, turn.plain.prompt_seconds) for turn in turns]
        self.prompts = _line(prompts, relative=True)

    def steps(self, method: str) -> list[tuple[Moment, float]]:
        """The method's steps and what each adds to its forward; a text's first, which also reads its prompt, is out."""
        return [
            (moment, self._added(turn, turn.by_method[method], moment))
            for turn in self._turns
            for moment in turn.by_method[method].moments[1:]
        ]

    def prompt(self, method: str, usual: Callable[[Moment], float]) -> list[tuple[int, float]]:
        """(tokens, seconds) of the prompts; what a text's first step takes beyond the `usual` is its prompt's too."""
        start, each = self.prompts
        out = []
        for turn in self._turns:
            followed, plain = turn.by_method[method], turn.plain
            late = sum(max(0.0, self._added(turn, followed, m) - usual(m)) for m in followed.moments[:1])
            ratio = followed.prompt_seconds / plain.prompt_seconds
            out.append((plain.prompt_tokens, ratio * (start + each * plain.prompt_tokens) + late))
        return out

    def _added(self, turn: Turn, followed: Followed, moment: Moment) -> float:
        context = turn.context(followed)
        plain = median(m.seconds for m in turn.plain.moments)
        unit = (self._forward(1, turn.context(turn.plain)) + self.none) / plain
        return moment.seconds * unit - self._forward(1 + moment.guesses, context)


def _draftings(
    methods: Mapping[str, Engine],
    forward: Callable[[int, int], float],
    plan: Plan,
    clock: Callable[[], float],
    progress: Callable[[str, int, int], None],
) -> list[Drafting]:
    texts = list(plan.texts) or built_in()
    for method, engine in methods.items():
        follow(engine, method, texts[:1], max_tokens=16)  # wakes the threads, fills the caches
    turns = []
    for number, text in enumerate([*texts, *_long_prompts(methods["none"], texts, plan)]):
        turns.append(_turn(methods, text, plan.tokens if number < len(texts) else _FEW, None, number, clock))
        progress("methods", number + 1, len(texts) + len(plan.prompts))
    read = Additions(turns, forward)
    out = []
    for method, engine in methods.items():
        drafting = _drafting(method, read, engine)
        for turn in turns[: len(texts)]:
            found = turn.by_method[method]
            drafting.texts.setdefault(found.workload, Counts()).add(found.counts)
        if method in _BY_LENGTH:
            drafting.lengths = _lengths(method, methods, texts[:2], forward, plan, clock)
        out.append(drafting)
    return out


def _turn(
    methods: Mapping[str, Engine],
    text: Text,
    tokens: int,
    limit: int | None,
    number: int,
    clock: Callable[[], float],
) -> Turn:
    """All methods on one text, another one first each time. Raises DrafterError where one fails."""
    first = number % len(methods)
    order = [*list(methods)[first:], *list(methods)[:first]]
    out: dict[str, Followed] = {}
    for method in order:
        (out[method],) = follow(methods[method], method, [text], max_tokens=tokens, limit=limit, clock=clock)
        if out[method].error is not None:
            raise DrafterError(f"{out[method].error}; leave out the method")
    return Turn(out)


def _long_prompts(engine: Engine, texts: Sequence[Text], plan: Plan) -> list[Text]:
    """Prompts of the plan's lengths, made of all texts one behind the other, again and again."""
    tokens = [token for text in texts for token in tokens_of(engine, text)]
    room = engine.config.context - _FEW
    return [
        Text("long", [tokens[i % len(tokens)] for i in range(length)], chat=False)
        for length in plan.prompts
        if length <= room
    ]


def _lengths(
    method: str,
    methods: Mapping[str, Engine],
    texts: Sequence[Text],
    forward: Callable[[int, int], float],
    plan: Plan,
    clock: Callable[[], float],
) -> dict[int, float]:
    """What guessing costs by the most guesses that are made: checked or not, they were made."""
    both = {name: methods[name] for name in ("none", method)}
    out = {}
    for limit in _LIMITS:
        turns = [_turn(both, text, plan.tokens // 2, limit, number, clock) for number, text in enumerate(texts)]
        added = [seconds for moment, seconds in Additions(turns, forward).steps(method) if moment.guesses]
        if added:
            out[limit] = max(0.0, median(added))
    return out if len(out) > 1 else {}


def _drafting(method: str, read: Additions, engine: Engine) -> Drafting:
    steps = read.steps(method)
    idle = [seconds for moment, seconds in steps if not moment.guesses and moment.asked]
    drafted = [(moment.guesses, seconds) for moment, seconds in steps if moment.guesses]
    none = read.none if method == "none" or not steps else max(0.0, median(idle or [seconds for _, seconds in steps]))
    some, guess = _line(drafted) if drafted else (none, 0.0)

    def usual(moment: Moment) -> float:
        return some + moment.guesses * guess if moment.guesses else none

    prompt, prompt_token = read.prompts if method == "none" else _line(read.prompt(method, usual), relative=True)
    memory = sum(size for purpose, size in engine.memory().items() if purpose.startswith(f"{method}: "))
    return Drafting(method, none, some, guess, prompt, prompt_token, memory=memory)


def _line(points: Sequence[tuple[int, float]], *, relative: bool = False) -> tuple[float, float]:
    """A line through the medians of points, neither part below nothing: (at 0, per step of x).

    By distance, or by `relative` distance: then large values do not count for more than small ones.
    """
    by_x: dict[int, list[float]] = {}
    for x, y in points:
        by_x.setdefault(x, []).append(y)
    xs = np.array(sorted(by_x), float)
    ys = np.array([median(by_x[int(x)]) for x in xs])
    weights = np.sqrt([len(by_x[int(x)]) for x in xs])
    if relative and ys.min() > 0:
        weights /= ys
    if len(xs) == 1:
        return float(ys[0]), 0.0
    design = np.stack([np.ones_like(xs), xs], 1) * weights[:, None]
    (start, slope), *_ = np.linalg.lstsq(design, ys * weights, rcond=None)
    if slope < 0:
        return float(np.average(ys, weights=weights**2)), 0.0
    if start < 0:
        return 0.0, float((xs * ys * weights**2).sum() / (xs * xs * weights**2).sum())
    return float(start), float(slope)
