"""What a command refuses by itself."""

from __future__ import annotations

__all__ = ["CommandError"]


class CommandError(ValueError):
    """An argument, option or file that the command line refuses: names the culprit and the way out."""
