"""A report's file: refused before anything is measured, and there as a whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from outrider.cli.errors import CommandError

__all__ = ["ReportFile"]


class ReportFile:
    """Where a report goes that `option` names.

    A path that cannot be written raises CommandError at once and costs nobody an hour.
    """

    def __init__(self, path: str, option: str = "--json") -> None:
        self._path, self._option = Path(path), option
        try:
            if self._path.exists():
                with open(self._path, "ab"):
                    pass
            else:
                with open(self._part(), "xb"):
                    pass
                self._part().unlink()
        except OSError as error:
            raise CommandError(f"{option}: {path}: {error.strerror or error}") from None

    def write(self, text: str) -> None:
        """Put `text` there, whole. Raises CommandError, and then an older file is what it was."""
        try:
            if self._path.exists() and not self._path.is_file():  # a device or a pipe has no earlier content to keep
                self._path.write_text(text, encoding="utf-8")
                return
            self._part().write_text(text, encoding="utf-8")
            os.replace(self._part(), self._path.resolve())
        except OSError as error:
            raise CommandError(f"{self._option}: {self._path}: {error.strerror or error}") from None
        finally:
            with suppress(OSError):
                self._part().unlink(missing_ok=True)

    def _part(self) -> Path:
        place = self._path.resolve()
        return place.with_name(f".{place.name[:200]}.{os.getpid()}.part")
