"""The one error of the ledger."""

from __future__ import annotations

__all__ = ["LedgerError"]


class LedgerError(ValueError):
    """A ledger that cannot be opened, read or used like this: names the file and the way out."""
