"""Rows in other programs' forms: one JSON object per line, or a table."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from typing import Any, TextIO

from outrider.audit.chain import Row

__all__ = ["write_csv", "write_jsonl"]

_FIELDS = (
    "id", "endpoint", "key", "model", "status", "outcome", "finish_reasons", "drafters", "texts", "prompt_tokens",
    "completion_tokens", "drafted", "accepted", "mean_acceptance_length", "ttft", "tpot", "seconds",
)  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def write_jsonl(rows: Iterable[Row], file: TextIO) -> None:
    """Each row whole. `body` is the object whose canonical spelling the hash covers."""
    for row in rows:
        line = {
            "number": row.number,
            "time": row.time,
            "kind": row.kind,
            "body": row.content(),
            "previous": row.previous,
            "hash": row.hash,
        }
        file.write(json.dumps(line) + "\n")


def write_csv(rows: Iterable[Row], file: TextIO) -> None:
    """A line per row; what requests have in common in columns, and the body whole in the last one."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["number", "time", "kind", *_FIELDS, "hash", "body"])
    for row in rows:
        body = row.content()
        cells = [_cell(body.get(name)) if row.kind == "request" else "" for name in _FIELDS]
        writer.writerow([row.number, row.time, _cell(row.kind), *cells, row.hash, _cell(row.body)])


def _cell(value: Any) -> Any:
    """As a cell. Request ids are the client's: what a spreadsheet would run as a formula gets a quote before it."""
    if isinstance(value, list):
        value = " ".join(map(str, value))
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value
