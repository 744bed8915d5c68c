"""Finds drafters: the files of this folder, and those that other packages bring through the entry-point group."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib import metadata
from typing import Any, cast, get_type_hints

from outrider.core.names import near
from outrider.drafters.base import Drafter, DrafterError, Options

__all__ = ["GROUP", "find", "names", "options"]

GROUP = "outrider.drafters"
_NOT_METHODS = {
    "automaton",
    "base",
    "calibration",
    "costs",
    "head_folder",
    "pace",
    "registry",
    "retokenised",
    "survival",
}  # what they share


def _own() -> list[str]:
    import outrider.drafters as folder

    return sorted(m.name for m in pkgutil.iter_modules(folder.__path__) if m.name not in _NOT_METHODS)


def _foreign() -> dict[str, metadata.EntryPoint]:
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP)}


def names() -> list[str]:
    """All methods, this package's first."""
    own = _own()
    return own + sorted(name for name in _foreign() if name not in own)


def find(name: str) -> type[Drafter]:
    """The drafter class of a method, or DrafterError that lists the methods there are."""
    if name in _own():
        return cast("type[Drafter]", importlib.import_module(f"outrider.drafters.{name}").DRAFTER)
    entry = _foreign().get(name)
    if entry is None:
        raise DrafterError(f"drafter {name!r} is unknown; there are {', '.join(names())}{near(name, names())}")
    return cast("type[Drafter]", entry.load())


def options(name: str, values: Mapping[str, Any]) -> Options:
    """The options of a method from JSON or from `key=value` strings. Unknown names and wrong kinds are refused."""
    cls = find(name).Options
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls)}
    out: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise DrafterError(f"{name}: unknown option {key!r}; there are {', '.join(sorted(known))}")
        out[key] = _convert(f"{name}: {key}", value, hints[key])
    for key, item in known.items():
        if key not in out and item.default is MISSING and item.default_factory is MISSING:
            raise DrafterError(f"{name}: option {key!r} is missing")
    if not 0 <= out.get("max_draft_tokens", 0) <= 4096:
        raise DrafterError(f"{name}: max_draft_tokens {out['max_draft_tokens']} is outside [0, 4,096]")
    return cls(**out)


def _convert(where: str, value: Any, kind: Any) -> Any:
    text = isinstance(value, str)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if text and value.lower() in ("true", "false", "1", "0", "yes", "no"):
            return value.lower() in ("true", "1", "yes")
    elif kind in (int, float) and not isinstance(value, bool):
        try:
            number = kind(value) if text or isinstance(value, int) or kind is float else value
        except (TypeError, ValueError):
            number = None
        if isinstance(number, kind) and number == number and number not in (float("inf"), float("-inf")):
            return number
    elif kind == tuple[int, ...]:
        try:
            return tuple(int(part) for part in (value.split(",") if text else value))
        except (TypeError, ValueError):
            pass
    elif (kind is str or kind == str | None) and (text or (value is None and kind is not str)):
        return value
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        kind, "whole numbers, a,b,c"
    )
    raise DrafterError(f"{where}: {value!r} is not {wanted}")
