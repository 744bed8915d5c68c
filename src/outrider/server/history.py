"""What happened lately, second by second, for the dashboard. Bounded; no text is kept."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import astuple, dataclass, field, fields
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from outrider.engine.results import Delta, Result, Step
from outrider.engine.speed import Speed
from outrider.engine.transitions import Mode, Reason, Transition
from outrider.server.texts import Texts

__all__ = ["History", "Pages", "Sample", "Writing"]

_SECONDS = 600  # that the time axis reaches back
_LATENCIES = 2048  # of each kind
_STEPS = 2048  # with guesses, for acceptance
_TRANSITIONS = 64  # that the state has; the others are asked for
_QUANTILES = (0.5, 0.9, 0.95, 0.99)
_RUNNING = 32  # requests that are listed


@dataclass(frozen=True, slots=True)
class Sample:
    """One second. Sums are of this second alone."""

    time: float  # Unix seconds, at its end
    mode: str | None  # speculative, plain, probing (plain, with a trial of the drafter); None if nothing was decoded
    tokens: int  # written
    decoded: int  # of these, in steps that did nothing but decode
    seconds: float  # in those steps
    compared: float  # of these, with a drafter while the time of a plain step was known
    compared_tokens: int  # written in them
    plain: float  # seconds that those would have taken without guesses
    drafted: int  # guesses checked
    accepted: int
    running: int
    waiting: int
    cache: float  # share of the cache's pages in use


@dataclass(slots=True)
class _Acceptance:
    """Of one drafter's latest steps."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=list)  # by position: drafts that were so deep
    right: list[int] = field(default_factory=list)  # of these, accepted up to there
    sources: Counter[str] = field(default_factory=Counter)  # accepted guesses, by who made them

    def add(self, step: Step) -> None:
        self.drafts += 1
        self.drafted += step.drafted
        self.accepted += step.accepted
        grow = [0] * (step.depth - len(self.reached))
        self.reached += grow
        self.right += grow
        for position in range(step.depth):
            self.reached[position] += 1
            self.right[position] += position < step.accepted
        self.sources.update(step.sources)

    def add_many(self, drafts: int, drafted: int, by_position: Sequence[int]) -> None:
        """Sums that another server told: as deep as they are on average."""
        self.drafts += drafts
        self.drafted += drafted
        self.accepted += sum(by_position)
        depth = max(len(by_position), math.ceil(drafted / drafts) if drafts else 0)
        grow = [0] * (depth - len(self.reached))
        self.reached += grow
        self.right += grow
        for position, right in enumerate(by_position):
            self.right[position] += right
        for position in range(depth):
            self.reached[position] += max(drafts if position * drafts < drafted else 0, *by_position[position:], 0)

    def as_dict(self) -> dict[str, Any]:
        return {
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "reached": self.reached,
            "right": self.right,
            "sources": dict(self.sources),
        }


class Pages(Protocol):
    """Of the cache; none where it is not known."""

    @property
    def count(self) -> int: ...

    @property
    def free(self) -> int: ...

    @property
    def page_size(self) -> int: ...


class Writing(Protocol):
    """Who writes the texts: `Engine`, or other servers together. Safe to read from the event loop."""

    @property
    def running(self) -> Sized: ...

    @property
    def waiting(self) -> int: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def preemptions(self) -> int: ...

    @property
    def pages(self) -> Pages: ...

    @property
    def modes(self) -> Mapping[str, Mode]: ...

    @property
    def transitions(self) -> Sequence[Transition]: ...

    @property
    def transition_counts(self) -> Mapping[tuple[str, Mode, Reason], int]: ...

    @property
    def speed(self) -> Speed: ...


class History:
    """Watches texts (`texts.Watcher`); belongs to the event loop."""

    def __init__(self, engine: Writing, clock: Callable[[], float] = time.time) -> None:
        self._engine, self._clock = engine, clock
        self._first = 0  # number of the oldest sample
        self._samples: deque[Sample] = deque(maxlen=_SECONDS)
        self._ttft: deque[float] = deque(maxlen=_LATENCIES)
        self._itl: deque[float] = deque(maxlen=_LATENCIES)
        self._steps: deque[Step] = deque(maxlen=_STEPS)
        self._told: deque[tuple[str, int, int, tuple[int, ...]]] = deque(maxlen=_SECONDS)  # of drafts elsewhere
        self._written: WeakKeyDictionary[Texts, int] = WeakKeyDictionary()
        self._ended: Counter[str] = Counter()  # texts, by reason
        self._tokens = self._drafted = self._accepted = 0  # since the start
        self._before = (0, 0, 0)
        self._speed = Speed()
        self._drafters: set[str] = set()  # that drafted in this second

    def delta(self, job: Texts, index: int, delta: Delta, now: float) -> None:
        """A step added to a text."""
        step = delta.step
        if step is not None and step.drafted:
            self._steps.append(step)
            self._drafted += step.drafted
            self._accepted += step.accepted
            if step.asked:
                self._drafters.add(step.drafter)
        if not delta.tokens:
            return
        self.arrived(job, index, len(delta.tokens), now)

    def arrived(self, job: Texts, index: int, tokens: int, now: float) -> None:
        """A text grew."""
        self._tokens += tokens
        self._written[job] = self._written.get(job, 0) + tokens
        if job.begun[index]:
            self._itl.append(now - job.last[index])
        else:
            self._ttft.append(now - job.submitted)

    def guessed(self, drafter: str, drafts: int, drafted: int, by_position: Sequence[int]) -> None:
        """Drafts of one kind were verified elsewhere; `by_position` are the accepted guesses by their place."""
        self._told.append((drafter, drafts, drafted, tuple(by_position)))
        self._drafted += drafted
        self._accepted += sum(by_position)
        if drafts:
            self._drafters.add(drafter)

    def ended(self, job: Texts, index: int, result: Result, now: float) -> None:
        """A text has its end."""
        self._ended[result.finish_reason] += 1

    async def keep(self) -> None:
        """Take a sample each second, until cancelled."""
        while True:
            await asyncio.sleep(1)
            self.sample()

    def sample(self) -> None:
        """Close a second."""
        engine, speed = self._engine, self._engine.speed
        tokens, drafted, accepted = (new - old for new, old in zip(self._sums, self._before, strict=True))
        pages = engine.pages
        if len(self._samples) == _SECONDS:
            self._first += 1
        self._samples.append(
            Sample(
                time=self._clock(),
                mode=self._mode() if tokens else None,
                tokens=tokens,
                decoded=speed.tokens - self._speed.tokens,
                seconds=speed.seconds - self._speed.seconds,
                compared=speed.compared_seconds - self._speed.compared_seconds,
                compared_tokens=speed.compared_tokens - self._speed.compared_tokens,
                plain=speed.plain_seconds - self._speed.plain_seconds,
                drafted=drafted,
                accepted=accepted,
                running=len(engine.running),
                waiting=engine.waiting,
                cache=1 - pages.free / pages.count if pages.count else 0.0,
            )
        )
        self._before, self._speed = self._sums, speed
        self._drafters.clear()

    @property
    def _sums(self) -> tuple[int, int, int]:
        return self._tokens, self._drafted, self._accepted

    def _mode(self) -> str:
        """Of this second."""
        if not self._drafters:
            return "plain"
        modes = self._engine.modes
        on = any(modes.get(drafter, "speculative") == "speculative" for drafter in self._drafters)
        return "speculative" if on else "probing"

    def state(self, since: int, jobs: Iterable[Texts], now: float) -> dict[str, Any]:
        """Ready for JSON. `since`: the number of the first sample wanted; `now`: of `time.perf_counter`."""
        engine, pages = self._engine, self._engine.pages
        first = max(since, self._first)
        rows = [_row(sample) for sample in list(self._samples)[first - self._first :]]
        return {
            "time": self._clock(),
            "queue": {
                "running": len(engine.running),
                "waiting": engine.waiting,
                "places": engine.batch_size,
                "preemptions": engine.preemptions,
            },
            "requests": self._requests(jobs, now),
            "cache": {"pages": pages.count, "free": pages.free, "page_size": pages.page_size},
            "modes": {drafter: mode for drafter, mode in engine.modes.items() if drafter != "none"},
            "transitions": [transition.as_dict() for transition in engine.transitions[-_TRANSITIONS:]],
            "transitions_kept": len(engine.transitions),
            "samples": {
                "columns": [column.name for column in fields(Sample)],
                "next": self._first + len(self._samples),
                "rows": rows,
            },
            "latency": {"ttft": _percentiles(self._ttft), "itl": _percentiles(self._itl)},
            "acceptance": self._acceptance(),
            "speed": engine.speed._asdict(),
            "totals": {
                "tokens": self._tokens,
                "drafted": self._drafted,
                "accepted": self._accepted,
                "wasted": self._drafted - self._accepted,
                "ended": dict(self._ended),
            },
        }

    def transitions(self) -> list[dict[str, Any]]:
        """All changes of mode that are still known, oldest first. Ready for JSON."""
        return [transition.as_dict() for transition in self._engine.transitions]

    def _acceptance(self) -> Mapping[str, Any]:
        """By drafter, over the latest steps with guesses."""
        found: dict[str, _Acceptance] = {}
        for step in self._steps:
            found.setdefault(step.drafter, _Acceptance()).add(step)
        for drafter, drafts, drafted, by_position in self._told:
            found.setdefault(drafter, _Acceptance()).add_many(drafts, drafted, by_position)
        return {drafter: acceptance.as_dict() for drafter, acceptance in found.items()}

    def _requests(self, jobs: Iterable[Texts], now: float) -> list[dict[str, Any]]:
        """Those that run or wait, oldest first."""
        there = sorted(jobs, key=lambda job: job.submitted)[:_RUNNING]
        return [
            {
                "seconds": round(now - job.submitted, 3),
                "texts": job.open,
                "prompt_tokens": job.prompt_tokens,
                "written": self._written.get(job, 0),
                "begun": any(job.begun),
            }
            for job in there
        ]


def _row(sample: Sample) -> list[Any]:
    return [round(value, 5) if isinstance(value, float) else value for value in astuple(sample)]


def _percentiles(seconds: Sequence[float]) -> dict[str, Any]:
    """Nearest rank (the smallest value that so large a share does not exceed), in seconds; None where there is none."""
    ranked = sorted(seconds)
    return {"count": len(ranked)} | {
        f"p{round(100 * q)}": ranked[math.ceil(q * len(ranked)) - 1] if ranked else None for q in _QUANTILES
    }
