"""Recomputes the chain and names each row that is not as it was written.

What it finds without help: rows that were changed, removed, put in, moved or exchanged anywhere before the last one.
What it cannot find without help: rows cut off at the end, and a chain that was computed anew from some row on. For both
somebody has to know a head (number and hash of the row that once was the last), or the rows be hashed with a key.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from outrider.audit.chain import ORIGIN, Head, Row, fingerprint
from outrider.audit.errors import LedgerError
from outrider.audit.store import COLUMNS, is_keyed, open_reader

__all__ = ["Fault", "Finding", "Verdict", "verify"]

Fault = Literal["changed", "replaced", "moved", "inserted", "missing", "cut off", "disturbed", "damaged", "other head"]
_FINDINGS = 200  # told one by one
_NEAR = 16  # rows before and behind that a moved row is looked for at
_LOOKS = 50  # through all rows, for the row before a moved one


@dataclass(frozen=True, slots=True)
class Finding:
    """One row, or one range of rows, that is not as it was written."""

    first: int
    last: int
    kind: str  # of the row; "" where no row is left to tell
    fault: Fault
    text: str

    def __str__(self) -> str:
        rows = f"row {self.first}" if self.first == self.last else f"rows {self.first} to {self.last}"
        return f"{rows}{f' ({self.kind})' if self.kind else ''}: {self.fault}: {self.text}"


@dataclass(slots=True)
class Verdict:
    """What the chain says."""

    rows: int = 0
    first: int = 0
    head: Head = field(default_factory=lambda: Head(0, ORIGIN))
    keyed: bool = False
    findings: list[Finding] = field(default_factory=list)
    more: int = 0  # findings beyond those that are told
    kinds: Counter[str] = field(default_factory=Counter)
    open_ends: int = 0  # server runs without an end row: killed, crashed, or still running
    removed: int = 0  # last row that was removed by age, as a checkpoint tells

    @property
    def intact(self) -> bool:
        return not self.findings

    def add(self, finding: Finding) -> None:
        if len(self.findings) < _FINDINGS:
            self.findings.append(finding)
        else:
            self.more += 1


def verify(path: Path, *, key: bytes | None = None, head: Head | None = None) -> Verdict:
    """Check the ledger at `path`, against a head that somebody kept if there is one.

    Raises LedgerError for what is no ledger, for a key that is missing, and for a head older than all rows.
    """
    connection = open_reader(path)
    try:
        verdict = Verdict(keyed=is_keyed(connection, path, key))
        # one read transaction: a server may write meanwhile
        connection.execute("BEGIN")
        _Walk(connection, verdict, key).run()
        if head is not None:
            _check_head(connection, verdict, head)
        return verdict
    finally:
        connection.close()


class _Walk:
    """One pass over the rows, in order."""

    def __init__(self, connection: sqlite3.Connection, verdict: Verdict, key: bytes | None) -> None:
        self._connection, self._verdict, self._key = connection, verdict, key
        self._before: Row | None = None
        self._sound = True  # the row before is as it was written, where it was written
        self._suspect: Row | None = None  # it ends a broken link: it was replaced, or the row behind it was
        self._gaps: list[tuple[int, int]] = []
        self._moved: dict[int, tuple[int, str]] = {}  # number -> number as written, kind
        self._shift = 0  # of the last moved row
        self._looks = 0
        self._highest = 0  # number that a row was written as
        self._running = False

    def run(self) -> None:
        try:
            for row in self._rows():
                self._see(row)
        except sqlite3.Error as error:
            at = 0 if self._before is None else self._before.number
            self._verdict.add(Finding(at + 1, at + 1, "", "damaged", f"the file cannot be read from here on: {error}"))
        self._accuse(self._suspect)
        self._tell_numbers()
        self._tell_removed()
        self._tell_end()
        self._verdict.open_ends += self._running

    def _rows(self) -> Iterator[Row]:
        for number, time, kind, body, previous, digest in self._connection.execute(
            f"SELECT {COLUMNS} FROM ledger ORDER BY number"
        ):
            yield Row(number, str(time), str(kind), str(body), str(previous), str(digest))

    def _see(self, row: Row) -> None:
        verdict, before = self._verdict, self._before
        verdict.rows += 1
        verdict.kinds[row.kind] += 1
        if before is None:
            verdict.first = row.number
        elif row.number != before.number + 1:
            self._gaps.append((before.number + 1, row.number - 1))
            self._sound = False
        origin = self._origin(row)
        if origin is None:
            verdict.add(Finding(row.number, row.number, row.kind, "changed", "its content does not fit its hash"))
        elif origin != row.number:
            self._moved[row.number] = (origin, row.kind)
        self._highest = max(self._highest, origin or row.number)
        self._link(row, origin == row.number)
        if row.kind == "disturbance" and origin is not None:
            self._disturbed(row)
        if row.kind in ("start", "end"):
            verdict.open_ends += self._running and row.kind == "start"
            self._running = row.kind == "start"
        self._before = row
        verdict.head = Head(row.number, row.hash)

    def _link(self, row: Row, is_sound: bool) -> None:
        """A sound row behind a sound row names the hash of the row before."""
        suspect, self._suspect = self._suspect, None
        if is_sound and self._sound:
            follows = ORIGIN if self._before is None else self._before.hash
            is_start = self._before is None and row.number > 1  # what was before was removed; see _tell_removed
            if row.previous != follows and not is_start:
                if self._before is None:
                    self._accuse(row)
                    return
                # of three rows with two broken links, the one in the middle is the one that was replaced
                self._suspect = self._before if suspect is None else row
                if suspect is not None:
                    self._accuse(self._before)
                    self._suspect = None
                self._sound = True
                return
        self._accuse(suspect)
        self._sound = is_sound

    def _accuse(self, row: Row | None) -> None:
        if row is not None:
            text = "it is not the row that the one behind it was written after; its hash was computed anew"
            self._verdict.add(Finding(row.number, row.number, row.kind, "replaced", text))

    def _origin(self, row: Row) -> int | None:
        """The number under which the row was written; None if its content was changed."""
        if self._fits(row, row.number):
            return row.number
        for candidate in self._candidates(row):
            if candidate != row.number and self._fits(row, candidate):
                self._shift = candidate - row.number
                return candidate
        return None

    def _fits(self, row: Row, number: int) -> bool:
        return fingerprint(row.previous, number, row.time, row.kind, row.body, self._key) == row.hash

    def _candidates(self, row: Row) -> Iterator[int]:
        if self._shift:
            yield row.number + self._shift
        for distance in range(1, _NEAR + 1):
            yield row.number + distance
            yield row.number - distance
        if self._looks < _LOOKS:
            self._looks += 1
            found = self._connection.execute("SELECT number FROM ledger WHERE hash = ?", (row.previous,)).fetchone()
            if found is not None:
                yield int(found[0]) + 1

    def _disturbed(self, row: Row) -> None:
        told = row.content()
        written, found = told.get("written"), told.get("found")
        text = f"the server had written up to {written} and found {found}: somebody changed the end meanwhile"
        self._verdict.add(Finding(row.number, row.number, row.kind, "disturbed", text))

    # -- when all rows were seen ---------------------------------------------------------------------------------

    def _tell_numbers(self) -> None:
        """Rows that stand elsewhere, rows too many, and rows too few."""
        claimed = {origin for origin, _ in self._moved.values()}
        for run in _runs(sorted(self._moved.items())):
            (first, (origin, kind)), (last, (until, _)) = run[0], run[-1]
            written = f"row {origin}" if first == last else f"rows {origin} to {until}"
            self._verdict.add(Finding(first, last, kind if first == last else "", "moved", f"written as {written}"))
        free = [number for gap in self._gaps for number in claimed if gap[0] <= number <= gap[1]]
        taken = [number for number in claimed if self._verdict.first <= number <= self._verdict.head.number]
        for number in sorted(set(taken) - set(self._moved) - set(free)):
            kind = self._kind(number)
            text = "another row was written under this number"
            self._verdict.add(Finding(number, number, kind, "inserted", text))
        lost = [number for number in self._moved if number not in claimed and 1 <= number <= self._highest]
        for first, last in [*self._gaps, *((number, number) for number in lost)]:
            for a, b in _without(first, min(last, self._highest), claimed):
                self._verdict.add(Finding(a, b, "", "missing", "no such row is there"))

    def _kind(self, number: int) -> str:
        found = self._connection.execute("SELECT kind FROM ledger WHERE number = ?", (number,)).fetchone()
        return "" if found is None else str(found[0])

    def _tell_removed(self) -> None:
        """What is gone at the front must be what the last checkpoint tells of."""
        first = self._verdict.first
        if self._verdict.rows == 0 or first == 1:
            return
        if first < 1:
            if first not in self._moved:
                self._verdict.add(Finding(first, 0, "", "inserted", "rows are counted from 1"))
            return
        row = self._read("number = ?", first)
        found = self._read("kind = ? ORDER BY number DESC LIMIT 1", "checkpoint")
        told = {} if found is None else found.content()
        if row is not None and (told.get("through"), told.get("hash")) == (first - 1, row.previous):
            self._verdict.removed = first - 1
            return
        through = int(told.get("through", 0))
        if through >= first:
            self._verdict.add(
                Finding(first, through, "", "inserted", "the last checkpoint says that they were removed")
            )
            return
        text = "the checkpoint has another hash" if through == first - 1 else "no checkpoint tells of them"
        begin = min(through + 1, first - 1)
        self._verdict.add(Finding(begin, first - 1, "", "missing", f"no such row is there, and {text}"))

    def _read(self, condition: str, value: object) -> Row | None:
        found = self._connection.execute(f"SELECT {COLUMNS} FROM ledger WHERE {condition}", (value,)).fetchone()
        return None if found is None else Row(*found)

    def _tell_end(self) -> None:
        """SQLite keeps the highest number ever given: it tells of rows that were cut off without care."""
        try:
            found = self._connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'ledger'").fetchone()
        except sqlite3.Error:
            found = None
        last = max(self._verdict.head.number, self._highest)
        if found is not None and int(found[0]) > last:
            text = f"SQLite has counted up to {found[0]}"
            self._verdict.add(Finding(last + 1, int(found[0]), "", "cut off", text))


def _check_head(connection: sqlite3.Connection, verdict: Verdict, head: Head) -> None:
    """The row that once was the last must be there, with that hash."""
    if head.number <= verdict.removed:
        raise LedgerError(
            f"--head: row {head.number} was removed by age, with all up to {verdict.removed}: give a later head"
        )
    found = connection.execute("SELECT kind, hash FROM ledger WHERE number = ?", (head.number,)).fetchone()
    if found is None:
        end = verdict.head.number
        fault: Fault = "cut off" if head.number > end else "missing"
        first = end + 1 if head.number > end else head.number
        verdict.add(Finding(first, head.number, "", fault, f"the head that was kept is row {head.number}"))
    elif found[1] != head.hash:
        text = "it has another hash than the head that was kept: the chain was computed anew, here or before"
        verdict.add(Finding(head.number, head.number, str(found[0]), "other head", text))


def _runs(moved: list[tuple[int, tuple[int, str]]]) -> Iterator[list[tuple[int, tuple[int, str]]]]:
    """Neighbours that moved together."""
    run: list[tuple[int, tuple[int, str]]] = []
    for number, (origin, kind) in moved:
        if run and (number != run[-1][0] + 1 or origin != run[-1][1][0] + 1):
            yield run
            run = []
        run.append((number, (origin, kind)))
    if run:
        yield run


def _without(first: int, last: int, there: set[int]) -> Iterator[tuple[int, int]]:
    """The parts of [first, last] that are not there."""
    begin = first
    for number in sorted(n for n in there if first <= n <= last):
        if begin < number:
            yield begin, number - 1
        begin = number + 1
    if begin <= last:
        yield begin, last
