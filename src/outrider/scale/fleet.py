"""The upstreams together: who of them writes the next text, how they are, and what they did."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.engine.speed import Speed
from outrider.engine.transitions import Listener, Mode, Reason, Transition, Transitions
from outrider.scale.fallback import DRAFTER, Fallback, Measured
from outrider.scale.passage import Passage
from outrider.scale.router import Ask, Router
from outrider.scale.upstream import Address, Pool, Upstream, client
from outrider.server.history import History
from outrider.server.metrics import Metrics, build_info, progress

__all__ = ["Fleet", "FleetState"]

log = logging.getLogger("outrider.scale")

_TRIED_UP = 2  # tries in vain after which an upstream is not asked again


@dataclass(frozen=True, slots=True)
class Cache:
    """Pages of all upstreams that tell of theirs."""

    count: int
    free: int
    page_size: int


class Fleet:
    """Belongs to the event loop. For the history, the metrics and the ledger it is what the engine is elsewhere."""

    default_drafter = DRAFTER
    drafters: Sequence[str] = ()  # none is loaded here

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        wanted: str | None = None,
        places: int = 256,
        transport: httpx2.AsyncBaseTransport | None = None,
        transitions: Transitions | None = None,
    ) -> None:
        """`wanted`: the model to ask for where an upstream has several. `places`: texts at once of each upstream."""
        self.http = client(transport)
        self.upstreams = [Upstream(address, self.http, wanted=wanted, changed=self._changed) for address in addresses]
        self.passages: set[Passage] = set()
        self.retries = 0
        self.broken = 0  # answers that ended with an error behind their first token
        self.changed: Callable[[Upstream], None] | None = None  # told of each upstream in another state
        self._places = places
        self._transitions = transitions or Transitions()
        self._router = Router()
        self._fallback = Fallback(self._transitions, self.available)
        self._watchers: list[Metrics | History] = []
        self._loops: list[asyncio.Task[None]] = []

    def watched_by(self, watcher: Metrics | History) -> None:
        """Tell it what is written and guessed."""
        self._watchers.append(watcher)

    def available(self, pool: Pool) -> bool:
        """Whether an upstream of the pool is up."""
        return any(upstream.up for upstream in self.upstreams if upstream.pool == pool)

    @property
    def up(self) -> list[Upstream]:
        return [upstream for upstream in self.upstreams if upstream.up]

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, seconds: float) -> None:
        """Ask all upstreams who they are, and go on asking how they are each so many seconds."""
        await self.check()
        pools = {upstream.pool for upstream in self.upstreams}
        self._fallback.begin("speculative" if "speculative" in pools else "plain")
        if len(pools) == 1:
            log.info("one pool of upstreams: speculation is reported on, and cannot be switched from here")
        self._loops = [asyncio.create_task(self._watch(upstream, seconds)) for upstream in self.upstreams]

    async def stop(self) -> None:
        """End the loops, and close all connections."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self.http.aclose()

    async def check(self) -> None:
        """One health check of each upstream."""
        await asyncio.gather(*(upstream.check() for upstream in self.upstreams))

    async def count(self, upstream: Upstream) -> None:
        """Read an upstream's counters."""
        guesses = await upstream.count()
        if not guesses.drafts:
            return
        if upstream.pool == "speculative":
            self._fallback.guessed(guesses)
        for watcher in self._watchers:
            if isinstance(watcher, Metrics):
                watcher.guessed(guesses.drafts, guesses.drafted, guesses.by_position)
            else:
                watcher.guessed(DRAFTER, guesses.drafts, guesses.drafted, guesses.by_position)

    async def _watch(self, upstream: Upstream, seconds: float) -> None:
        while True:
            if upstream.up:
                await self.count(upstream)
            await asyncio.sleep(seconds)
            await upstream.check()

    def _changed(self, upstream: Upstream) -> None:
        if self.changed is not None:
            self.changed(upstream)

    # -- what passages want (`passage.Yard`) -------------------------------------------------------------------------

    def choose(self, ask: Ask, tried: Mapping[Upstream, int]) -> Upstream | None:
        """Of the pool that pays, or of the other one where nobody else is left."""
        there = [upstream for upstream in self.up if tried.get(upstream, 0) < _TRIED_UP]
        if not there:
            return None
        pool: Pool = "plain"
        if ask.texts and not ask.plain:  # what writes no text says nothing of either pool
            pool = self._fallback.pool(len(self.passages))
        # one that failed at it already comes last
        fresh = [upstream for upstream in there if upstream not in tried] or there
        wanted = [upstream for upstream in fresh if upstream.pool == pool]
        return self._router.choose(ask, wanted or fresh)

    def arrived(self, passage: Passage, index: int, tokens: float, now: float) -> None:
        """A chunk came, of about so many tokens."""
        for watcher in self._watchers:
            if isinstance(watcher, Metrics):
                watcher.arrived(passage, index, now)
            else:
                watcher.arrived(passage, index, round(tokens), now)

    def ended(self, passage: Passage, now: float) -> None:
        """All results are there."""
        for index, result in enumerate(passage.results):
            if result is None:
                continue
            for watcher in self._watchers:
                if isinstance(watcher, Metrics):
                    watcher.wrote(result.usage.completion_tokens)
                watcher.ended(passage, index, result, now)

    def took(self, measured: Measured) -> None:
        """A text was written to its end."""
        self._fallback.saw(measured)

    def failed(self, passage: Passage, upstream: Upstream, reason: str, *, final: bool) -> None:
        """An upstream failed at a request; `final`: behind the first token."""
        upstream.answers["failed"] += 1
        if final:
            self.broken += 1
        else:
            self.retries += 1
        log.warning(
            "upstream %s failed: %s",
            upstream.name,
            reason,
            extra={"fields": {"upstream": upstream.name, "sent": final, **passage.headers}},
        )

    # -- what history, metrics and ledger want -----------------------------------------------------------------------

    @property
    def running(self) -> Sequence[Passage]:
        """Requests with a token."""
        return [passage for passage in self.passages if any(passage.begun)]

    @property
    def waiting(self) -> int:
        return len(self.passages) - len(self.running)

    @property
    def batch_size(self) -> int:
        return self._places * len(self.upstreams)

    @property
    def preemptions(self) -> int:
        return sum(upstream.counters.preemptions for upstream in self.upstreams)

    @property
    def pages(self) -> Cache:
        told = [upstream.counters for upstream in self.up if upstream.counters.pages]
        return Cache(
            sum(counters.pages for counters in told),
            sum(counters.free for counters in told),
            max((counters.page_size for counters in told), default=0),
        )

    @property
    def modes(self) -> Mapping[str, Mode]:
        return self._transitions.modes

    @property
    def transitions(self) -> tuple[Transition, ...]:
        return self._transitions.recent

    @property
    def transition_counts(self) -> Mapping[tuple[str, Mode, Reason], int]:
        return self._transitions.counts

    @property
    def speed(self) -> Speed:
        return self._fallback.speed

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` of each change of mode; call what is returned to end it."""
        return self._transitions.watch(listener)

    def provenance(self, drafter: str) -> Mapping[str, Any]:
        """What the upstreams say of the weights behind a pool."""
        return {"drafter": drafter, "upstreams": [self.told(upstream) for upstream in self.upstreams]}

    @staticmethod
    def told(upstream: Upstream) -> dict[str, Any]:
        """For the ledger: where it is, how it is, and what it says of itself."""
        return {
            "upstream": upstream.name,
            "pool": upstream.pool,
            "state": upstream.state,
            "reason": upstream.reason,
            "about": None if upstream.about is None else upstream.about.as_dict(),
        }


class FleetState(Collector):
    """What is read from the fleet when Prometheus asks."""

    def __init__(self, model: str, fleet: Fleet, version: str) -> None:
        self._model, self._fleet, self._version = model, fleet, version

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        yield from progress(self._model, fleet)
        labels = ["upstream", "pool"]

        def each(name: str, help: str, value: Callable[[Upstream], float], *, counts: bool = False) -> Metric:
            family = (CounterMetricFamily if counts else GaugeMetricFamily)(name, help, labels=labels)
            for upstream in fleet.upstreams:
                family.add_metric([upstream.name, upstream.pool], value(upstream))
            return family

        yield each("outrider_upstream_up", "1 while it takes requests.", lambda upstream: upstream.up)
        yield each("outrider_upstream_requests", "That it works at.", lambda upstream: upstream.loads)
        yield each(
            "outrider_upstream_outstanding_tokens",
            "To read and to write, about.",
            lambda upstream: upstream.outstanding,
        )
        yield each(
            "outrider_upstream_ejections", "Times that it stopped.", lambda upstream: upstream.ejections, counts=True
        )
        guesses = (
            ("drafts", "Drafts that it verified.", lambda upstream: upstream.counters.guesses.drafts),
            ("draft_tokens", "Guesses that it verified.", lambda upstream: upstream.counters.guesses.drafted),
            ("accepted_tokens", "Guesses that it accepted.", lambda upstream: upstream.counters.guesses.accepted),
        )
        for name, help, value in guesses:
            yield each(f"outrider_upstream_{name}", help, value, counts=True)
        answers = CounterMetricFamily("outrider_upstream_answers", "By outcome.", labels=[*labels, "outcome"])
        for upstream in fleet.upstreams:
            for outcome, count in upstream.answers.items():
                answers.add_metric([upstream.name, upstream.pool, outcome], count)
        yield answers
        for name, help, count in (
            ("outrider_retries", "Requests that were asked again, before their first token.", fleet.retries),
            ("outrider_broken_answers", "Answers that ended with an error behind their first token.", fleet.broken),
        ):
            family = CounterMetricFamily(name, help, labels=["model_name"])
            family.add_metric([self._model], count)
            yield family
        yield build_info(self._version)
