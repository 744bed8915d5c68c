"""Pages of key/value rows, and the only place where a cache grows.

A sequence sees its rows under logical numbers 0, 1, 2 ...; a page table maps them to slots of the runner's storage:

    slot(row) = pages[row // page_size] * page_size + row % page_size

    rows of a sequence:  [0, length) committed | nodes of this step | free

A forward writes the rows after `length`; nothing is counted until `commit`. There is no roll-back: what was not
committed is overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["CacheFullError", "Pages", "Rows", "Storage"]


class CacheFullError(RuntimeError):
    """No free page is left. The scheduler shrinks drafts, then preempts."""


class Storage(Protocol):
    """Where the rows' keys and values lie: a runner's arrays."""

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy slot source[i] to slot target[i] in every layer, for i ascending."""
        ...


class Pages:
    """A pool of `count` pages of `page_size` rows each, reference-counted."""

    def __init__(self, count: int, page_size: int, storage: Storage) -> None:
        if count < 1 or page_size < 1:
            raise ValueError(f"a cache of {count} pages of {page_size} rows")
        self.count, self.page_size, self.storage = count, page_size, storage
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise CacheFullError(f"all {self.count:,} pages of {self.page_size} rows are in use")
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> int:
        """One more holder of a page whose rows are all committed."""
        assert self._references[page] > 0
        self._references[page] += 1
        return page

    def give(self, page: int) -> None:
        assert self._references[page] > 0
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)

    def check_integrity(self) -> None:
        """Every page is either free or held. For tests and for an idle engine."""
        assert sorted(self._free) == [p for p, n in enumerate(self._references) if n == 0]


class Rows:
    """The cached rows of one sequence."""

    __slots__ = ("length", "pages", "pool")

    def __init__(self, pool: Pages) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.length = 0  # committed rows

    def slot(self, row: int) -> int:
        size = self.pool.page_size
        return self.pages[row // size] * size + row % size

    def room(self) -> int:
        """Rows that fit behind the committed ones without another page."""
        return len(self.pages) * self.pool.page_size - self.length

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows behind the committed ones, or raise CacheFullError and change nothing."""
        missing = -(-(self.length + rows) // self.pool.page_size) - len(self.pages)
        if missing > self.pool.free:
            raise CacheFullError(f"{missing} pages wanted, {self.pool.free} free of {self.pool.count}")
        for _ in range(missing):
            self.pages.append(self.pool.take())

    def commit(self, pending: int, path: Iterable[int] = ()) -> None:
        """Count the first `pending` rows of this step, then the accepted nodes `path` of its tree, ascending.

        Node j >= 1 of the tree lies in row `length + pending - 1 + j`: the root is the last pending row.
        """
        base = self.length + pending - 1
        source: list[int] = []
        target: list[int] = []
        accepted = 0
        for node in path:
            accepted += 1
            if node != accepted:  # ascending, so a row is read before anything is written over it
                source.append(self.slot(base + node))
                target.append(self.slot(base + accepted))
        if source:
            self.pool.storage.move(source, target)
        self.length += pending + accepted
        assert self.length <= len(self.pages) * self.pool.page_size

    def keep(self, length: int) -> None:
        """Forget all rows from `length` on; the pages stay reserved."""
        self.length = min(self.length, length)

    def release(self) -> None:
        """Give all pages back. The sequence's text can be fed again from its first token."""
        for page in self.pages:
            self.pool.give(page)
        self.pages.clear()
        self.length = 0
