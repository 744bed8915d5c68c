"""Pages and rows: what is committed stays, whatever the path and wherever the pages lie."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.core.cache import CacheFullError, Pages, Rows


class Slots:
    """A storage of one number per slot."""

    def __init__(self, count: int) -> None:
        self.values: list[int | None] = [None] * count

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for s, t in zip(source, target, strict=True):
            self.values[t] = self.values[s]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_committed_rows_are_the_accepted_path_in_order(page_size: int) -> None:
    """After random steps with random trees and paths the rows are the committed text, for every page size."""
    rng = random.Random(page_size)
    storage = Slots(600 // page_size * page_size)
    pool = Pages(600 // page_size, page_size, storage)
    rng.shuffle(pool._blank)  # pages in no order
    rows, text, moved, next_value = Rows(pool), [], 0, 0
    while len(text) < 400:
        pending, nodes = rng.randint(1, 4), rng.randint(0, 9)
        rows.reserve(pending + nodes)
        values = list(range(next_value, next_value + pending + nodes))
        next_value += len(values)
        for i, value in enumerate(values):
            storage.values[rows.slot(rows.length + i)] = value
        path = sorted(rng.sample(range(1, nodes + 1), rng.randint(0, nodes)))
        moved += path != list(range(1, len(path) + 1))
        rows.commit(pending, path)
        text += values[:pending] + [values[pending - 1 + node] for node in path]
        assert [storage.values[rows.slot(i)] for i in range(rows.length)] == text
    assert moved > 10
    rows.release()
    pool.check_integrity()
    assert pool.free == pool.count


def test_a_full_cache_refuses_and_changes_nothing() -> None:
    """A reservation is all or nothing."""
    pool = Pages(3, 4, Slots(12))
    rows, other = Rows(pool), Rows(pool)
    other.reserve(5)
    with pytest.raises(CacheFullError, match="2 pages wanted, 1 free of 3"):
        rows.reserve(5)
    assert (rows.pages, pool.free) == ([], 1)
    pool.check_integrity()
