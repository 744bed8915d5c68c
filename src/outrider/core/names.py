"""What somebody may have meant who wrote a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["near"]


def near(given: str, known: Iterable[str]) -> str:
    """`; did you mean 'NAME'?` for the end of a refusal; empty where nothing is like what was given."""
    from difflib import get_close_matches  # takes its time to import, and only who mistyped needs it

    by_lower = {name.lower(): name for name in known}
    found = get_close_matches(given.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[found[0]]!r}?" if found else ""
