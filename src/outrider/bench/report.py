"""The report of a benchmark: one JSON document, and its reading.

docs/bench.md describes the format. A change of meaning gets another `SCHEMA`; a new key does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.bench import environment
from outrider.bench.prompts import Prompt, digest

__all__ = ["SCHEMA", "ReportError", "document", "load_label", "read_report", "run_key", "run_label"]

SCHEMA = "outrider-bench/1"
_SECRETS = ("--api-key",)


class ReportError(ValueError):
    """A file that is no report, or not one that can be used here: names it and the way out."""


def document(
    kind: str,
    runs: Sequence[Mapping[str, Any]],
    prompts: Sequence[Prompt],
    *,
    settings: Mapping[str, Any],
    source: str,
    argv: Sequence[str],
    version: str,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole report. `kind`: `engine` or `server`; `source`: of the prompts; `more`: the kind's own keys."""
    categories: dict[str, int] = {}
    for prompt in prompts:
        categories[prompt.group] = categories.get(prompt.group, 0) + 1
    return {
        "schema": SCHEMA,
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": list(runs),
        "prompts": {"source": source, "count": len(prompts), "sha256": digest(prompts), "categories": categories},
        "settings": dict(settings),
        **(more or {}),
        "machine": environment.machine(),
        "versions": {"outrider": version, **environment.versions()},
        "git": environment.git(),
        "argv": _without_secrets(argv),
    }


def _without_secrets(argv: Sequence[str]) -> list[str]:
    out: list[str] = []
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if out and out[-1] in _SECRETS:
            out.append("***")
        else:
            out.append(f"{name}=***" if equals and name in _SECRETS else argument)
    return out


def read_report(path: Path) -> dict[str, Any]:
    """A report from its file. Raises ReportError."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ReportError(f"{path}: not JSON; give a report that outrider bench --json wrote") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA or not isinstance(found.get("runs"), list) or not found["runs"]:
        raise ReportError(
            f"{path}: its schema is {schema!r} and not {SCHEMA!r}; give a report that this version's "
            "outrider bench --json wrote"
        )
    return dict(found)


def run_key(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a run is known by among the others, and in another report."""
    if "server" in run:
        return run["server"], run["load"]["kind"], run["load"]["level"]
    return run["drafter"], run["temperature"], run["verify"]


def load_label(load: Mapping[str, Any]) -> str:
    """A load in words: `1 user`, `4 users`, `2.5 requests/s`."""
    plural = "" if load["level"] == 1 else "s"
    return f"{load['level']:g} request{plural}/s" if load["kind"] == "open" else f"{load['level']:g} user{plural}"


def run_label(run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """A run's name, as short as it can be among `runs`."""
    if "server" in run:
        several = len({(one["load"]["kind"], one["load"]["level"]) for one in runs}) > 1
        return f"{run['server']}, {load_label(run['load'])}" if several else str(run["server"])
    parts = [str(run["drafter"])]
    if len({one["temperature"] for one in runs}) > 1:
        parts.append(f"T={run['temperature']:g}")
    if len({one["verify"] for one in runs}) > 1 and run["drafter"] != "none":
        parts.append(str(run["verify"]))
    return " ".join(parts)
