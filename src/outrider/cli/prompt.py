"""Where a text comes from: an argument, a file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.cli.errors import CommandError

__all__ = ["read_prompt", "read_text"]


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt's text. `-` as argument, or nothing at all with a pipe on standard input, reads standard input.

    Raises CommandError for a prompt that is missing, empty, unreadable, no UTF-8, or given twice.
    """
    if argument is not None and file is not None:
        raise CommandError("--file: a prompt is given as an argument too; give one of the two")
    if file is not None:
        text, source = read_text("--file", file), str(file)
    elif argument not in (None, "-"):
        assert argument is not None
        text, source = argument, "PROMPT"
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise CommandError("PROMPT: not valid UTF-8; put the text into a UTF-8 file and use --file")
    else:
        if argument is None and (sys.stdin is None or sys.stdin.isatty()):
            raise CommandError("PROMPT: missing; give a text, --file FILE, or - to read standard input")
        text, source = _decode(sys.stdin.buffer.read(), "standard input"), "standard input"
    if not text:
        raise CommandError(f"{source}: the prompt is empty; give at least one character")
    return text


def read_text(option: str, file: Path) -> str:
    """The text of a UTF-8 file that an option names. Raises CommandError."""
    try:
        return _decode(file.read_bytes(), f"{option}: {file}")
    except OSError as error:
        raise CommandError(f"{option}: {file}: {error.strerror or error}") from None


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{source}: not valid UTF-8 at byte {error.start}; convert it to UTF-8") from None
