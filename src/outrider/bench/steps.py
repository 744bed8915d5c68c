"""What a forward costs by its number of rows: the price of guesses, measured on a runner that is loaded anyway."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from outrider.core.cache import Rows
from outrider.core.tree import Tree
from outrider.runtime.runner import Feed, Runner

__all__ = ["Forwards", "filler", "step_cost"]

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_CONTEXT = 256
_ROUNDS = 9


class Forwards:
    """Forwards of any number of rows behind `context` cached tokens. Holds cache pages until `release`."""

    def __init__(self, runner: Runner, context: int) -> None:
        self.runner = runner
        self.rows = Rows(runner.pages)
        self.rows.reserve(context)
        runner.forward([Feed(self.rows, filler(context, runner.config.vocabulary))])
        self.rows.commit(context)

    def seconds(self, rows: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """A forward of the root and a chain of guesses, `rows` rows in all."""
        tree = Tree.chain(1, range(2, rows + 1))
        self.rows.reserve(rows)
        feeds = [Feed(self.rows, [1], tree)]
        began = clock()
        self.runner.forward(feeds)
        return clock() - began

    def release(self) -> None:
        self.rows.release()


def step_cost(
    runner: Runner, rows: Sequence[int] = _ROWS, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any] | None:
    """Median milliseconds of a forward by rows, each number of rows in turn. None if the cache has no room for it.

    A drafter's guesses pay as long as their rows cost little beside a forward of one row.
    """
    context = min(_CONTEXT, runner.config.context - max(rows))
    room = runner.pages.free * runner.pages.page_size
    if context < 1 or room < context + max(rows) + runner.pages.page_size:
        return None
    forwards = Forwards(runner, context)
    try:
        times = [[forwards.seconds(count, clock) for count in rows] for _ in range(_ROUNDS)]
    finally:
        forwards.release()
    return {
        "context": context,
        "rounds": _ROUNDS,
        "rows": list(rows),
        "ms": [1000 * median(column) for column in zip(*times, strict=True)],
    }


def filler(length: int, vocabulary: int) -> list[int]:
    """Tokens that repeat seldom, the same each time."""
    return [17 + 31 * i % (vocabulary - 20) for i in range(length)]
