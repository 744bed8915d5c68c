"""A race of servers on the same prompts: one at a time, in turns, under one load after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx2

from outrider.bench.client import Answer, Asking, Client, Failure, Server
from outrider.bench.counters import Counters
from outrider.bench.loads import Block, Load, Sample, blocks, run_block
from outrider.bench.prompts import Content, Prompt

__all__ = ["Plan", "Taken", "race"]

_WARM_UP = "The river ran past the mill, and the river ran past the old bridge, and the river ran past"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is sent to each server."""

    prompts: Sequence[Prompt]
    loads: Sequence[Load]
    asking: Asking
    requests: int | None = None  # per load and run; None: see Load.requests
    repeat: int = 1
    warm_up: int = 1  # requests to each server before anything counts
    timeout: float = 300.0  # seconds without a sign of the server
    limit: float = 1200.0  # seconds of a request in all
    seed: int = 0  # of the arrivals

    def blocks(self, load: Load, repeat: int) -> list[Block]:
        count = load.requests(len(self.prompts)) if self.requests is None else self.requests
        return blocks(load, len(self.prompts), count, self.seed + repeat)

    @property
    def total(self) -> int:
        """Requests to one server."""
        return sum(
            len(block.prompts)
            for load in self.loads
            for repeat in range(self.repeat)
            for block in self.blocks(load, repeat)
        )


@dataclass(slots=True)
class Taken:
    """What one server did under one load. `seconds[r]`: what run r took."""

    server: Server
    model: str
    load: Load
    samples: list[Sample] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counters: Counters | None = None

    @property
    def answers(self) -> list[tuple[Sample, Answer]]:
        return [(sample, sample.outcome) for sample in self.samples if isinstance(sample.outcome, Answer)]


async def race(
    servers: Sequence[Server],
    plan: Plan,
    *,
    model: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    transport: httpx2.AsyncBaseTransport | None = None,
    progress: Callable[[Server, Load, Sample], None] = lambda server, load, sample: None,
) -> list[Taken]:
    """Put the loads on the servers, one server at a time, and return what each did, load by load.

    The servers take turns at each block, and another one begins each time. Raises UrlError for a server that does
    not answer at all.
    """
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                Client(server, timeout=plan.timeout, limit=plan.limit, clock=clock, transport=transport)
            )
            for server in servers
        ]
        for client in clients:
            await client.find_model(model)
        raw = isinstance(plan.prompts[0].content, str)
        warm_up: Content = _WARM_UP if raw else [{"role": "user", "content": _WARM_UP}]
        for client in clients:
            for _ in range(plan.warm_up):
                await client.ask(plan.asking, warm_up, 0.0)
        out: list[Taken] = []
        turn = 0
        for load in plan.loads:
            taken = [Taken(client.server, client.model, load) for client in clients]
            before = await _counters(clients)
            for repeat in range(plan.repeat):
                spent = [0.0] * len(clients)
                for block in plan.blocks(load, repeat):
                    order = [(turn + place) % len(clients) for place in range(len(clients))]
                    turn += 1
                    for which in order:
                        client, entry = clients[which], taken[which]

                        def done(sample: Sample, entry: Taken = entry) -> None:
                            progress(entry.server, entry.load, sample)

                        samples, seconds = await run_block(
                            block, load, _asker(client, plan), repeat=repeat, clock=clock, sleep=sleep, done=done
                        )
                        entry.samples += samples
                        spent[which] += seconds
                for entry, seconds in zip(taken, spent, strict=True):
                    entry.seconds.append(seconds)
            for entry, earlier, now in zip(taken, before, await _counters(clients), strict=True):
                if now is not None and earlier is not None:
                    entry.counters = now.since(earlier)
            out += taken
        return out


def _asker(client: Client, plan: Plan) -> Callable[[int, float], Awaitable[Answer | Failure]]:
    def ask(prompt: int, due: float) -> Awaitable[Answer | Failure]:
        return client.ask(plan.asking, plan.prompts[prompt].content, due)

    return ask


async def _counters(clients: Sequence[Client]) -> list[Counters | None]:
    """Each server's counters. None where two names stand for one server: its counters are of both."""
    roots = [client.server.root for client in clients]
    pages = [await client.metrics() if roots.count(client.server.root) == 1 else None for client in clients]
    return [None if page is None else Counters.read(page) for page in pages]
