"""Load on servers: closed loops of users and open loops of arrivals, the servers in turns.

A **closed loop** has so many users, each of whom sends a request when the last one is answered: it shows what a server
can do. An **open loop** sends requests at times that do not depend on the answers: it shows what users get. Its times
are counted from when a request was *due*, so that a server that lags cannot hide it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from outrider.bench.client import Answer, Failure
from outrider.bench.report import load_label

__all__ = ["Block", "Load", "Sample", "arrivals", "blocks", "run_block"]

Outcome = Answer | Failure
Ask = Callable[[int, float], Awaitable[Outcome]]  # prompt, when it is due


@dataclass(frozen=True, slots=True)
class Load:
    """`closed` with so many users, or `open` with so many requests a second."""

    kind: Literal["closed", "open"]
    level: float

    def __str__(self) -> str:
        return load_label({"kind": self.kind, "level": self.level})

    def requests(self, prompts: int) -> int:
        """How many requests make a run, unless told: every prompt once, and four for each of several users."""
        return max(prompts, 4 * int(self.level)) if self.kind == "closed" and self.level > 1 else prompts


@dataclass(frozen=True, slots=True)
class Block:
    """Requests that one server answers before it is the next one's turn. `due[i]`: seconds from the block's start."""

    prompts: tuple[int, ...]
    due: tuple[float, ...] | None = None  # None: closed loop


@dataclass(frozen=True, slots=True)
class Sample:
    """One request's outcome. `late`: seconds by which it was sent after it was due, the client's own fault."""

    prompt: int
    repeat: int
    outcome: Outcome
    late: float = 0.0


def arrivals(rate: float, count: int, seed: int) -> tuple[float, ...]:
    """Times in seconds of a Poisson process of `rate` a second; the first is 0."""
    rng = random.Random(seed)
    return tuple(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def blocks(load: Load, prompts: int, requests: int, seed: int) -> list[Block]:
    """How a run of `requests` is cut into turns.

    One user's requests are answered one by one, so servers take turns at each. More users, or arrivals, are a block:
    to cut it would mean to let the load run dry in between.
    """
    order = tuple(index % prompts for index in range(requests))
    if load.kind == "open":
        return [Block(order, arrivals(load.level, requests, seed))]
    return [Block((prompt,)) for prompt in order] if load.level == 1 else [Block(order)]


async def run_block(
    block: Block,
    load: Load,
    ask: Ask,
    *,
    repeat: int,
    clock: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    done: Callable[[Sample], None] = lambda sample: None,
) -> tuple[list[Sample], float]:
    """Send a block's requests to one server: the samples in order, and the seconds to the last answer."""
    began = clock()
    samples: list[Sample | None] = [None] * len(block.prompts)

    async def send(place: int, due: float) -> None:
        late = max(0.0, clock() - due)
        sample = Sample(block.prompts[place], repeat, await ask(block.prompts[place], due), late)
        samples[place] = sample
        done(sample)

    if block.due is None:
        places = iter(range(len(block.prompts)))

        async def user() -> None:
            for place in places:
                await send(place, clock())

        await asyncio.gather(*(user() for _ in range(int(load.level))))
    else:
        tasks = []
        for place, offset in enumerate(block.due):
            wait = began + offset - clock()
            if wait > 0:
                await sleep(wait)
            tasks.append(asyncio.create_task(send(place, began + offset)))
        await asyncio.gather(*tasks)
    return [sample for sample in samples if sample is not None], clock() - began
