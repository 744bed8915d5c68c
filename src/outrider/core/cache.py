"""Pages of key/value rows, and the only place where a cache grows.

A sequence sees its rows under logical numbers 0, 1, 2 ...; a page table maps them to slots of the runner's storage:

    slot(row) = pages[row // page_size] * page_size + row % page_size

    rows of a sequence:  [0, length) committed | nodes of this step | free

A forward writes the rows after `length`; nothing is counted until `commit`. There is no roll-back: what was not
committed is overwritten by the next step.

Pages that are full of committed rows can be published: others whose text begins the same hold them too, and they
stay when the last holder has gone, until somebody needs room. Published pages are never written.

    pages of a sequence:  [0, published) in the tree of prefixes, maybe shared | its own
    pages of the pool:    held | cached, by nobody held, the one that was given back first goes first | blank
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from outrider.core.prefix import Prefixes

__all__ = ["CacheFullError", "Pages", "Rows", "Storage"]


class CacheFullError(RuntimeError):
    """No free page is left. The scheduler shrinks drafts, then preempts."""


class Storage(Protocol):
    """Where the rows' keys and values lie: a runner's arrays."""

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy slot source[i] to slot target[i] in every layer, for i ascending."""
        ...


class Pages:
    """A pool of `count` pages of `page_size` rows each, reference-counted.

    A row depends on the tokens up to its own, and on `ahead` more. A page is given back only after those that stand
    behind it in its text, so whoever holds a page holds all before it.
    """

    def __init__(self, count: int, page_size: int, storage: Storage, ahead: int = 0) -> None:
        if count < 1 or page_size < 1:
            raise ValueError(f"a cache of {count} pages of {page_size} rows")
        self.count, self.page_size, self.storage = count, page_size, storage
        self.prefixes = Prefixes(page_size, ahead)
        self._blank = list(range(count - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # a page comes before those that it stands behind
        self._references = [0] * count

    @property
    def free(self) -> int:
        """Pages that nobody holds, those that are kept for their rows among them."""
        return len(self._blank) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody holds, kept for their rows."""
        return len(self._cached)

    def held(self, page: int) -> bool:
        return self._references[page] > 0

    def take(self) -> int:
        """A page to write into. If none is blank, the one goes whose rows were last needed longest ago."""
        if self._blank:
            page = self._blank.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self.prefixes.drop(page)
        else:
            raise CacheFullError(f"all {self.count:,} pages of {self.page_size} rows are in use")
        self._references[page] = 1
        return page

    def share(self, page: int) -> int:
        """One more holder of a published page."""
        assert page in self.prefixes
        if not self._references[page]:
            del self._cached[page]
        self._references[page] += 1
        return page

    def give(self, page: int) -> None:
        assert self._references[page] > 0
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self.prefixes:
            self._cached[page] = None
        else:
            self._blank.append(page)

    def check_integrity(self, holders: Iterable[Rows] | None = None) -> None:
        """Every page is blank, cached or held, and cached ones can go in their order. For tests and an idle engine.

        With all `holders`: each page has as many references as there are holders of it.
        """
        idle = [page for page, references in enumerate(self._references) if not references]
        assert sorted([*self._blank, *self._cached]) == idle
        assert set(self._cached) == {page for page in self.prefixes if not self._references[page]}
        gone: set[int] = set()
        for page in self._cached:
            assert gone.issuperset(self.prefixes.behind(page))
            gone.add(page)
        if holders is not None:
            held = [0] * self.count
            for rows in holders:
                for page in rows.pages:
                    held[page] += 1
            assert held == self._references


class Rows:
    """The cached rows of one sequence. Those that are not `shared` take no pages from others, and leave none."""

    __slots__ = ("length", "pages", "pool", "published", "shared")

    def __init__(self, pool: Pages, *, shared: bool = False) -> None:
        self.pool, self.shared = pool, shared
        self.pages: list[int] = []
        self.published = 0  # the first pages, which are in the pool's tree
        self.length = 0  # committed rows

    def slot(self, row: int) -> int:
        size = self.pool.page_size
        return self.pages[row // size] * size + row % size

    def room(self) -> int:
        """Rows that fit behind the committed ones without another page."""
        return len(self.pages) * self.pool.page_size - self.length

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows behind the committed ones, or raise CacheFullError and change nothing."""
        stale = max(0, self.published - self.length // self.pool.page_size)  # published, and to be written
        missing = -(-(self.length + rows) // self.pool.page_size) - len(self.pages) + stale
        if missing > self.pool.free:
            raise CacheFullError(f"{missing} pages wanted, {self.pool.free} free of {self.pool.count}")
        if stale:
            missing -= self._detach()
        for _ in range(missing):
            self.pages.append(self.pool.take())

    def _detach(self) -> int:
        """Leave the published pages from `length` on to others; rows before it come along. Returns the pages taken."""
        size, first = self.pool.page_size, self.length // self.pool.page_size
        left = self.pages[first : self.published]
        kept = range(self.length % size)
        own = [self.pool.take()] if kept else []
        if own:
            self.pool.storage.move([left[0] * size + row for row in kept], [own[0] * size + row for row in kept])
        self.pages[first : self.published] = own
        self.published = first
        for page in reversed(left):
            self.pool.give(page)
        return len(own)

    def commit(self, pending: int, path: Iterable[int] = ()) -> None:
        """Count the first `pending` rows of this step, then the accepted nodes `path` of its tree, ascending.

        Node j >= 1 of the tree lies in row `length + pending - 1 + j`: the root is the last pending row.
        """
        assert self.length // self.pool.page_size >= self.published
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

    def publish(self, tokens: Sequence[int]) -> None:
        """Let others share the full pages of committed rows: those of the text `tokens`.

        Where another page holds the same rows already, it takes the place of this sequence's own.
        """
        if not self.shared or self.length // self.pool.page_size <= self.published:
            return
        prefixes = self.pool.prefixes
        while self.published < prefixes.whole(self.length, tokens):
            own = self.pages[self.published]
            page = prefixes.add(tokens, self.pages[: self.published], own)
            if page != own:
                self.pages[self.published] = self.pool.share(page)
                self.pool.give(own)
            self.published += 1

    def known(self, tokens: Sequence[int]) -> list[int]:
        """The published pages with the first rows of the text, but for its last token: that one is always fed."""
        if not self.shared:
            return []
        return self.pool.prefixes.find(tokens, (len(tokens) - 1) // self.pool.page_size)

    def adopt(self, pages: Sequence[int]) -> None:
        """Hold these published pages, which `known` named, in place of the own ones."""
        held = [self.pool.share(page) for page in pages]
        self.release()
        self.pages, self.published = held, len(held)
        self.length = len(held) * self.pool.page_size

    def release(self) -> None:
        """Give all pages back. The sequence's text can be fed again from its first token."""
        for page in reversed(self.pages):  # what stands behind goes first
            self.pool.give(page)
        self.pages, self.published, self.length = [], 0, 0
