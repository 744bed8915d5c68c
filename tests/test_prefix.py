"""The tree of shared pages: what is found is right, what is held stays, what is evicted was needed last."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.core.cache import CacheFullError, Pages, Rows

Row = tuple[int, ...]  # what a row depends on: the tokens up to its own, and those ahead


class Contents:
    """A storage that remembers what each slot was computed from."""

    def __init__(self, slots: int) -> None:
        self.rows: list[Row | None] = [None] * slots
        self.copied = 0

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        for s, t in zip(source, target, strict=True):
            self.rows[t] = self.rows[s]
            self.copied += 1


def pool(count: int, size: int, ahead: int = 0) -> tuple[Pages, Contents]:
    contents = Contents(count * size)
    return Pages(count, size, contents, ahead), contents


def feed(rows: Rows, tokens: Sequence[int], to: int, ahead: int = 0) -> None:
    """Compute the text's rows up to `to`, commit and publish them."""
    contents = rows.pool.storage
    assert isinstance(contents, Contents)
    rows.reserve(to - rows.length)
    for row in range(rows.length, to):
        contents.rows[rows.slot(row)] = tuple(tokens[: row + 1 + ahead])
    rows.commit(to - rows.length)
    rows.publish(tokens)


def fed(pages: Pages, tokens: Sequence[int]) -> Rows:
    """A new text, all of it fed but for the last token, with what could be shared."""
    rows = Rows(pages, shared=True)
    rows.adopt(rows.known(tokens))
    feed(rows, tokens, len(tokens) - 1)
    return rows


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("size", [1, 4])
def test_rows_are_those_of_the_text_whoever_wrote_them(size: int, ahead: int) -> None:
    """Random texts that begin alike come, share, grow, shrink, write on and go: each sees its own rows, always.

    After every step all references add up, and pages can be evicted in their order down to the last.
    """
    rng = random.Random(10 * size + ahead)
    pages, contents = pool(40, size, ahead)
    texts: list[tuple[list[int], Rows]] = []
    shared = full = kept = 0
    for _ in range(1500):
        if rng.random() < 0.4 or not texts:
            tokens = [rng.choice((1, 1, 1, 2)) for _ in range(rng.randint(2, 8 * size))]
            rows = Rows(pages, shared=rng.random() < 0.9)
            found = rows.known(tokens)[: rng.choice((0, 1, 99, 99))]
            rows.adopt(found)
            shared += len(found)
            texts.append((tokens, rows))
        tokens, rows = texts[rng.randrange(len(texts))]
        deed = rng.random()
        try:
            if deed < 0.6:
                feed(rows, tokens, rng.randint(rows.length, len(tokens) - ahead), ahead)
            elif deed < 0.7 and rows.length:  # another text from here on, as when a draft's text is cut anew
                rows.keep(rng.randrange(rows.length))
                tokens[rows.length + ahead :] = [rng.choice((1, 3)) for _ in tokens[rows.length + ahead :]]
                kept += rows.length % size > 0
            elif deed < 0.8 and rows.length < len(tokens) - ahead:
                more = rows.known(tokens)
                if len(more) * size > rows.length:
                    rows.adopt(more)
            else:
                rows.release()
                texts = [(t, r) for t, r in texts if r is not rows]
        except CacheFullError:
            full += 1
            rows.release()
            texts = [(t, r) for t, r in texts if r is not rows]
        pages.check_integrity(r for _, r in texts)
        for tokens, rows in texts:
            for row in range(rows.length):
                assert contents.rows[rows.slot(row)] == tuple(tokens[: row + 1 + ahead])
    assert shared > 100
    assert full > 0
    assert size == 1 or (kept and contents.copied)
    for _, rows in texts:
        rows.release()
    held = [pages.take() for _ in range(pages.count)]
    assert sorted(held) == list(range(pages.count))
    assert not len(pages.prefixes)


def test_tokens_with_equal_hashes_are_told_apart() -> None:
    """-1 and -2 have one hash in Python, and so have tuples of them: nothing is found for the other one."""
    one, other = [-1] * 5, [-2] * 5
    assert hash(tuple(one)) == hash(tuple(other))
    pages, _ = pool(4, 4)
    rows = fed(pages, one)
    assert len(rows.known(one)) == 1
    assert rows.known(other) == []


def test_the_last_token_is_always_fed() -> None:
    """A text of whole pages leaves its last page out: without a row there are no logits."""
    pages, _ = pool(8, 4)
    fed(pages, [1] * 9).release()
    assert [len(Rows(pages, shared=True).known([1] * n)) for n in (1, 4, 5, 8, 9, 20)] == [0, 0, 1, 1, 2, 2]


def test_what_was_needed_last_is_evicted_last_and_ends_before_beginnings() -> None:
    """Three texts of two pages; the first is needed again. Two new pages cost the second text its end, then all."""
    pages, _ = pool(6, 2)
    texts = [[n] * 5 for n in range(3)]
    for text in texts:
        fed(pages, text).release()
    fed(pages, texts[0]).release()
    assert (pages.free, pages.cached) == (6, 6)
    asked = Rows(pages, shared=True)
    left = []
    for _ in range(4):
        pages.take()
        left.append([len(asked.known(text)) for text in texts])
    assert left == [[2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0]]


def test_pages_in_use_are_never_evicted() -> None:
    """A full cache refuses, and changes nothing, while a holder is left of a page that others have given back."""
    pages, _ = pool(3, 2)
    first = fed(pages, [1] * 5)
    second = fed(pages, [1] * 5)
    assert first.pages == second.pages
    first.release()
    rows = Rows(pages, shared=True)
    with pytest.raises(CacheFullError, match="2 pages wanted, 1 free of 3"):
        rows.reserve(4)
    assert rows.pages == []
    pages.check_integrity([second])
    second.release()
    rows.reserve(4)
    pages.check_integrity([rows])


def test_equal_rows_are_held_once() -> None:
    """Two texts that were fed side by side end up with the same pages, and the copies are blank again."""
    pages, _ = pool(8, 4)
    texts = [Rows(pages, shared=True) for _ in range(2)]
    for rows in texts:
        rows.reserve(9)
    assert pages.free == 2
    for rows in texts:
        feed(rows, [7] * 10, 9)
    assert texts[0].pages[:2] == texts[1].pages[:2]
    assert pages.free == 4
    pages.check_integrity(texts)
