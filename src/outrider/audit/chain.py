"""The chain: what a row's hash covers, so that anybody can recompute it with SHA-256 and nothing of ours.

    hash(row n) = SHA-256( previous LF number LF time LF kind LF body )

`previous` is the hash of row n - 1 in lower-case hex, 64 zeros for the first row. `number` is decimal, `time` is UTC as
2026-11-30T22:15:01.123456Z, `kind` a word, and `body` a JSON object in one spelling: keys sorted, no spaces, ASCII
alone. None of the first four can hold a line feed, so no two rows have the same bytes. With a key it is HMAC-SHA-256.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.audit.errors import LedgerError

__all__ = ["ORIGIN", "Head", "Row", "encode", "fingerprint", "read_key", "timestamp"]

ORIGIN = "0" * 64  # what the first row follows
_SHORTEST_KEY = 16  # bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it is stored."""

    number: int
    time: str
    kind: str
    body: str
    previous: str
    hash: str

    def content(self) -> dict[str, Any]:
        """The body as an object; an empty one where somebody left none."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a chain: who knows it can tell whether rows behind or before it were changed."""

    number: int
    hash: str

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """From NUMBER:HASH. Raises LedgerError."""
        number, _, digest = text.strip().partition(":")
        if not (re.fullmatch(r"[0-9]{1,18}", number) and re.fullmatch(r"[0-9a-f]{64}", digest)):
            raise LedgerError(f"--head: {text!r} is not of the form NUMBER:HASH, as `outrider audit show` prints it")
        return cls(int(number), digest)


def encode(body: Mapping[str, Any]) -> str:
    """The one spelling of a body. Raises ValueError for NaN and infinity, TypeError for what JSON has not."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def timestamp(seconds: float) -> str:
    """Unix seconds as UTC, to the microsecond; sorts as text."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def fingerprint(previous: str, number: int, time: str, kind: str, body: str, key: bytes | None = None) -> str:
    """The hash of a row, in hex."""
    # surrogates can only be in rows that somebody changed: they must hash to something too
    message = f"{previous}\n{number}\n{time}\n{kind}\n{body}".encode("utf-8", "surrogatepass")
    if key is None:
        return hashlib.sha256(message).hexdigest()
    return hmac.new(key, message, hashlib.sha256).hexdigest()


def read_key(option: str, file: Path | None) -> bytes | None:
    """The key in a file, without white space around it; None without a file. Raises LedgerError."""
    if file is None:
        return None
    try:
        key = file.read_bytes().strip()
    except OSError as error:
        raise LedgerError(f"{option}: {file}: {error.strerror}") from None
    if len(key) < _SHORTEST_KEY:
        raise LedgerError(f"{option}: {file} has fewer than {_SHORTEST_KEY} bytes: `openssl rand -hex 32` makes a key")
    return key
