"""Log lines for people or, with --log-json, one JSON object each. They never hold the text of a prompt or an answer.

A record's own values come as `extra={"fields": {...}}`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

__all__ = ["configure"]


def configure(level: str, *, as_json: bool) -> None:
    """Send all logs of the server to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json else _Plain())
    logging.captureWarnings(True)  # a drafter that was given up is told as a warning
    for name in ("outrider", "uvicorn", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger("outrider").level))


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(record, "fields", {})
    return found


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items() if value not in (None, "", []))
        line = f"{at} {record.levelname.lower():7} {_shown(record.getMessage())} {_shown(fields)}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _shown(text: str) -> str:
    """On one line, without anything that moves a terminal's cursor."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
