"""The ledger's file: a SQLite database to which rows are added and, by age, taken away at the front; nothing else.

    [ removed, told by a checkpoint ][ first row ... last row = head ][ next ]

WAL with synchronous=FULL: a transaction that `append` returned from is on the disk, and one that a crash cut short is
not there at all. Readers never wait for the writer. One process writes at a time: it holds a lock on PATH.lock, which
the kernel lets go of however that process ends.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from outrider.audit.chain import ORIGIN, Head, Row, encode, fingerprint, timestamp
from outrider.audit.errors import LedgerError

__all__ = ["COLUMNS", "Event", "Ledger", "Record", "is_keyed", "open_reader"]

COLUMNS = "number, time, kind, body, previous, hash"
_APPLICATION = 0x4F547264  # "OTrd", in the file's header
_PLAIN, _KEYED = 1, 2  # user_version: how rows are hashed
_WAIT = 10.0  # seconds for another connection's transaction

# Against accidents: who means harm drops the triggers, and is found by the chain.
_GUARD = """
CREATE TRIGGER ledger_keeps_rows BEFORE DELETE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END
"""
_SCHEMA = (
    """
CREATE TABLE ledger (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  time TEXT NOT NULL,
  kind TEXT NOT NULL,
  body TEXT NOT NULL,
  previous TEXT NOT NULL,
  hash TEXT NOT NULL
) STRICT
""",
    """
CREATE TRIGGER ledger_keeps_values BEFORE UPDATE ON ledger BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END
""",
    _GUARD,
)


class Record(Protocol):
    """What becomes a row."""

    @property
    def kind(self) -> str: ...

    @property
    def time(self) -> float:
        """Unix seconds."""

    def body(self) -> Mapping[str, Any]:
        """Ready for JSON. Called by the thread that writes."""


@dataclass(frozen=True, slots=True)
class Event:
    """A record whose body is known."""

    kind: str
    time: float
    content: Mapping[str, Any]

    def body(self) -> Mapping[str, Any]:
        return self.content


class Ledger:
    """A ledger open for writing. One thread at a time.

    Raises LedgerError for a file that is no ledger, is written by another process, has another key, or whose last row
    was changed. `append` and `prune` raise sqlite3.Error or OSError where the disk fails, and then nothing was written.
    """

    def __init__(self, path: Path, *, key: bytes | None = None, made_by: str = "") -> None:
        """Open the ledger, or make it. `made_by` is the program's version, for the first row."""
        self.path, self._key = path, key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LedgerError(f"--ledger: {path}: {error.strerror}") from None
        try:
            self._claim()
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # others cannot read it
            self._connection = sqlite3.connect(path, timeout=_WAIT, isolation_level=None, check_same_thread=False)
            try:
                self._set_up(made_by)
                self._file = self._inode()
                self.head = self._checked_end()
            except BaseException:
                self._connection.close()
                raise
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, sqlite3.Error | OSError):
                raise LedgerError(f"--ledger: {path}: {getattr(error, 'strerror', None) or error}") from None
            raise

    def append(self, records: Sequence[Record]) -> Head:
        """Add rows in one transaction, and return the new head."""
        with self._transaction():
            head = self._insert(self._undisturbed(records))
        self.head = head
        return head

    def prune(self, before: float) -> int:
        """Remove the rows older than `before` (Unix seconds) and tell so in a checkpoint row; how many there were.

        Rows are removed from the front alone, up to the first one that is young enough; the last row always stays.
        """
        with self._transaction():
            through = self._oldest_kept(timestamp(before)) - 1
            removed = self._describe(through)
            if removed is None:
                return 0
            checkpoint = Event("checkpoint", time.time(), removed)
            head = self._insert(self._undisturbed([checkpoint]))
            self._connection.execute("DROP TRIGGER IF EXISTS ledger_keeps_rows")
            self._connection.execute("DELETE FROM ledger WHERE number <= ?", (through,))
            self._connection.execute(_GUARD)
        self.head = head
        return int(removed["count"])

    @property
    def ended(self) -> bool:
        """Whether the server that wrote last has written its end."""
        query = "SELECT kind FROM ledger WHERE kind IN ('start', 'end') ORDER BY number DESC LIMIT 1"
        found = self._connection.execute(query).fetchone()
        return found is None or found[0] == "end"

    def close(self) -> None:
        """Let others write. What lies in the write-ahead log moves into the file. Nothing happens the second time."""
        if self._lock >= 0:
            self._connection.close()
            os.close(self._lock)
            self._lock = -1

    # -- opening -------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip()
            raise LedgerError(
                f"--ledger: {self.path} is written by another server (process {holder}): give each server its own"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _set_up(self, made_by: str) -> None:
        run = self._connection.execute
        (application,), (version,) = run("PRAGMA application_id").fetchone(), run("PRAGMA user_version").fetchone()
        wanted = _PLAIN if self._key is None else _KEYED
        is_new = not run("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not is_new:
            _check_header(self.path, application, version)
            if version != wanted:
                raise LedgerError(_key_message(self.path, version, "--ledger-key-file"))
        (mode,) = run("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise LedgerError(f"--ledger: {self.path} lies on a file system without shared memory: take a local disk")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA secure_delete = ON")  # what is removed by age is overwritten
        if not is_new:
            return
        with self._transaction():
            run(f"PRAGMA application_id = {_APPLICATION}")
            run(f"PRAGMA user_version = {wanted}")
            for statement in _SCHEMA:
                run(statement)
            how = "sha256" if self._key is None else "hmac-sha256"
            self._insert([Event("ledger", time.time(), {"format": 1, "hash": how, "made_by": made_by})])

    def _checked_end(self) -> Head:
        row = self._last()
        if row is None:
            raise LedgerError(f"--ledger: {self.path} has no row left: keep it as evidence, and name a new file")
        if row.hash != fingerprint(row.previous, row.number, row.time, row.kind, row.body, self._key):
            why = "was changed" if self._key is None else "was changed, or the key is another one"
            raise LedgerError(
                f"--ledger: {self.path}: the last row ({row.number}) {why}: see `outrider audit verify`, "
                "keep the file as evidence, and name a new one"
            )
        return Head(row.number, row.hash)

    # -- writing -------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        try:
            yield
            run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite has rolled back by itself where the disk was full
                run("ROLLBACK")
            raise

    def _undisturbed(self, records: Sequence[Record]) -> list[Record]:
        """The records, behind one that tells if somebody else changed the end of the ledger. Checks the file first."""
        if self._inode() != self._file:
            raise OSError(0, "the ledger's file was removed or replaced while it was written", str(self.path))
        row = self._last()
        found = Head(0, ORIGIN) if row is None else Head(row.number, row.hash)
        if found == self.head:
            return list(records)
        return [Event("disturbance", time.time(), {"written": str(self.head), "found": str(found)}), *records]

    def _insert(self, records: Sequence[Record]) -> Head:
        row = self._last()
        number, previous = (0, ORIGIN) if row is None else (row.number, row.hash)
        rows = []
        for record in records:
            number += 1
            at, body = timestamp(record.time), encode(record.body())
            digest = fingerprint(previous, number, at, record.kind, body, self._key)
            rows.append((number, at, record.kind, body, previous, digest))
            previous = digest
        self._connection.executemany(f"INSERT INTO ledger ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows)
        return Head(number, previous)

    def _last(self) -> Row | None:
        found = self._connection.execute(f"SELECT {COLUMNS} FROM ledger ORDER BY number DESC LIMIT 1").fetchone()
        return None if found is None else Row(*found)

    def _inode(self) -> tuple[int, int]:
        try:
            state = os.stat(self.path)
        except FileNotFoundError:
            return (0, 0)
        return (state.st_dev, state.st_ino)

    def _oldest_kept(self, before: str) -> int:
        run = self._connection.execute
        found = run("SELECT number FROM ledger WHERE time >= ? ORDER BY number LIMIT 1", (before,)).fetchone()
        last = self._last()
        return int(found[0]) if found else last.number if last else 1

    def _describe(self, through: int) -> dict[str, Any] | None:
        """What is removed with the rows up to `through`, and under which settings the rows behind them were written."""
        run = self._connection.execute
        count, first, since, until = run(
            "SELECT count(*), min(number), min(time), max(time) FROM ledger WHERE number <= ?", (through,)
        ).fetchone()
        if not count:
            return None
        (digest,) = run("SELECT hash FROM ledger WHERE number = ?", (through,)).fetchone()
        kinds = dict(run("SELECT kind, count(*) FROM ledger WHERE number <= ? GROUP BY kind", (through,)))
        return {
            "first": first,
            "through": through,
            "count": count,
            "hash": digest,
            "since": since,
            "until": until,
            "kinds": kinds,
            "in_force": self._in_force(through),
        }

    def _in_force(self, through: int) -> list[dict[str, Any]]:
        """The start row that holds for what is kept, and the rows of drafters that were loaded since."""
        query = f"SELECT {COLUMNS} FROM ledger WHERE kind = ? AND number <= ? ORDER BY number DESC LIMIT 1"
        start = self._connection.execute(query, ("start", through)).fetchone()
        earlier = self._connection.execute(query, ("checkpoint", 2**62)).fetchone()
        told: list[dict[str, Any]] = []
        if start is None and earlier is not None:  # the start was removed before, and is told there
            told = Row(*earlier).content().get("in_force", [])
        since = 0 if start is None else Row(*start).number
        query = f"SELECT {COLUMNS} FROM ledger WHERE kind IN ('start', 'drafter') AND number BETWEEN ? AND ? ORDER BY 1"
        rows = [Row(*values) for values in self._connection.execute(query, (since, through))]
        return told + [{"number": r.number, "time": r.time, "kind": r.kind, "body": r.content()} for r in rows]


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that can only read; each statement sees one moment. Raises LedgerError for what is no ledger."""
    if not path.is_file():
        raise LedgerError(f"{path} {'is no file' if path.exists() else 'does not exist'}: there is no ledger to read")
    place = f"file:{quote(str(path.resolve()))}?mode=ro"
    # a folder that cannot be written has no room for the index of the write-ahead log; without a log none is needed
    is_still = not Path(f"{path}-wal").exists()
    for address in (place, f"{place}&immutable=1") if is_still else (place,):
        connection = sqlite3.connect(address, uri=True, timeout=_WAIT, isolation_level=None)
        connection.text_factory = _text
        try:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            _check_header(path, application, version)
            connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'ledger'").fetchone()
        except sqlite3.Error as error:
            connection.close()
            reason = str(error)
        except LedgerError:
            connection.close()
            raise
        else:
            return connection
    raise LedgerError(f"{path} cannot be read as a ledger: {reason}")


def _text(stored: bytes) -> str:
    return stored.decode("utf-8", "surrogateescape")  # what somebody changed need not be UTF-8


def is_keyed(connection: sqlite3.Connection, path: Path, key: bytes | None) -> bool:
    """Whether the rows are hashed with a key. Raises LedgerError where one is missing, or was given for nothing."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if (version == _KEYED) != (key is not None):
        raise LedgerError(_key_message(path, version, "--key-file"))
    return bool(version == _KEYED)


def _check_header(path: Path, application: int, version: int) -> None:
    if application != _APPLICATION:
        raise LedgerError(f"{path} is no ledger of outrider: give the file that `outrider serve --ledger` writes")
    if version not in (_PLAIN, _KEYED):
        raise LedgerError(f"{path} was written in format {version}, which this version of outrider does not know")


def _key_message(path: Path, version: int, option: str) -> str:
    if version == _KEYED:
        return f"{path} is hashed with a key: give its file with {option}"
    return f"{path} is hashed without a key, and {option} is given: leave it out, or name a new ledger"
