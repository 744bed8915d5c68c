"""Reads rows for people: those of a time, a key name, a kind."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from outrider.audit.chain import Row, timestamp
from outrider.audit.errors import LedgerError
from outrider.audit.store import COLUMNS, open_reader

__all__ = ["KINDS", "Choice", "duration", "moment", "read"]

# in the order in which a server's life writes them
KINDS = ("ledger", "start", "drafter", "upstream", "request", "mode", "gap", "disturbance", "checkpoint", "end")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_ANONYMOUS = "-"  # stands for requests without a key


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which rows are wanted; None = any."""

    since: str | None = None  # timestamps of `chain.timestamp`, or beginnings of them
    until: str | None = None
    key: str | None = None  # the name of an API key; - for requests without one
    kind: str | None = None
    last: int | None = None  # so many at most, the newest

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise LedgerError(f"--kind: {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.last is not None and not 1 <= self.last < 2**63:
            raise LedgerError(f"--limit: {self.last} is {'below 1' if self.last < 1 else 'more than a ledger holds'}")
        if self.key is not None and any("\ud800" <= character <= "\udfff" for character in self.key):
            raise LedgerError(f"--key: {self.key!r} is not UTF-8: no key has such a name")


def read(path: Path, choice: Choice) -> Iterator[Row]:
    """The chosen rows, oldest first. Raises LedgerError for what is no ledger."""
    conditions: list[str] = []
    values: list[object] = []
    for condition, value in (("time >= ?", choice.since), ("time < ?", choice.until), ("kind = ?", choice.kind)):
        if value is not None:
            conditions.append(condition)
            values.append(value)
    if choice.key is not None:
        conditions.append("kind = 'request' AND json_valid(body) AND json_extract(body, '$.key') IS ?")
        values.append(None if choice.key == _ANONYMOUS else choice.key)
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    query = f"SELECT {COLUMNS} FROM ledger {where}"
    if choice.last is None:
        query = f"{query} ORDER BY number"
    else:
        query = f"SELECT * FROM ({query} ORDER BY number DESC LIMIT {choice.last}) ORDER BY number"
    connection = open_reader(path)
    try:
        for found in connection.execute(query, values):
            yield Row(*found)
    finally:
        connection.close()


def duration(option: str, text: str) -> float:
    """Seconds of 90d, 12h, 30m, 2w. Raises LedgerError."""
    found = re.fullmatch(r"(\d{1,6})([smhdw])", text.strip())
    if found is None or not int(found[1]):
        raise LedgerError(f"{option}: {text!r} is no time span such as 90d, 12h or 30m")
    return int(found[1]) * _UNITS[found[2]]


def moment(option: str, text: str, now: float | None = None) -> str:
    """A timestamp of a span before now (2h), a day (2026-11-30) or a moment (2026-11-30T08:15, UTC unless it says so).

    Raises LedgerError.
    """
    if re.fullmatch(r"\d+[smhdw]", text.strip()):
        return timestamp((time.time() if now is None else now) - duration(option, text))
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise LedgerError(f"{option}: {text!r} is no time: give 2h, 2026-11-30 or 2026-11-30T08:15") from None
    return timestamp((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp())
