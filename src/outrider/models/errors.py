"""The one error of this package."""

from __future__ import annotations

__all__ = ["ModelError"]


class ModelError(ValueError):
    """A model cannot be found, read or run as asked. The message is one line, names the culprit and the way out."""
