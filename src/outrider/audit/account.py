"""What the rows add up to: who was served by what, when, and how speculation went. For the auditor's page."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.audit.chain import Row

__all__ = ["Account", "Run", "Tally", "account"]

_CHANGES = 1000  # changes of mode that are listed one by one, the newest
_NO_KEY = "(no key)"


@dataclass(slots=True)
class Tally:
    """Sums over requests."""

    requests: int = 0
    texts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, body: dict[str, Any]) -> None:
        self.requests += 1
        self.outcomes[str(body.get("outcome"))] += 1
        for name in ("texts", "prompt_tokens", "completion_tokens", "drafts", "drafted", "accepted"):
            value = body.get(name)  # a row that somebody changed may hold anything
            setattr(self, name, getattr(self, name) + (value if isinstance(value, int) else 0))

    @property
    def acceptance(self) -> float | None:
        """Accepted guesses per checked one."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def length(self) -> float | None:
        """Mean acceptance length: 1 + accepted / drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None


@dataclass(slots=True)
class Run:
    """One server process, from its start row on."""

    number: int  # of the start row
    started: str
    content: dict[str, Any]
    drafters: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None
    last: str = ""  # time of its last row
    is_told: bool = False  # its start row was removed by age, and a checkpoint tells of it
    tally: Tally = field(default_factory=Tally)

    @property
    def key_names(self) -> list[str]:
        """Of the API keys; `keys` is a method of each dict to a template."""
        return list(map(str, _listed(self.content, "keys")))


@dataclass(slots=True)
class Account:
    """Everything the page shows of the rows."""

    rows: int = 0
    since: str = ""
    until: str = ""
    total: Tally = field(default_factory=Tally)
    by_key: dict[str, Tally] = field(default_factory=dict)
    by_day: dict[str, Tally] = field(default_factory=dict)
    by_model: dict[str, Tally] = field(default_factory=dict)
    by_drafter: dict[str, Tally] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    changes: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_CHANGES))
    reasons: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # drafter, new mode, reason
    incidents: list[tuple[Row, dict[str, Any]]] = field(default_factory=list)  # gaps, disturbances, checkpoints


def account(rows: Iterable[Row], *, checkpoint: Row | None = None, since: str = "", until: str = "") -> Account:
    """Add up rows in order. Those outside [since, until) only tell which server runs were on.

    `checkpoint`: the last one there is. It tells of the run whose start was removed, and whose later rows were kept.
    """
    out = Account()
    if checkpoint is not None:
        _tell(out, checkpoint.content())
    for row in rows:
        body = row.content()
        _follow(out, row, body)
        if row.time < since or (until and row.time >= until):
            continue
        out.rows += 1
        out.since = out.since or row.time
        out.until = row.time
        if row.kind == "request":
            _count(out, row, body)
        elif row.kind == "mode":
            out.changes.append({"number": row.number, "at": row.time, **body})
            out.reasons[str(body.get("drafter")), str(body.get("after")), str(body.get("reason"))] += 1
        elif row.kind in ("gap", "disturbance", "checkpoint"):
            out.incidents.append((row, body))
    out.runs = [
        run for run in out.runs if (run.last >= since or not run.ended) and not (until and run.started >= until)
    ]
    return out


def _follow(out: Account, row: Row, body: dict[str, Any]) -> None:
    """Which server run a row belongs to."""
    if row.kind == "start":
        out.runs.append(Run(row.number, row.time, body))
    elif row.kind == "drafter" and out.runs and isinstance(body.get("weights"), dict):
        out.runs[-1].drafters.append(body)
    elif row.kind == "end" and out.runs:
        out.runs[-1].ended = row.time
    if out.runs:
        out.runs[-1].last = row.time


def _listed(body: Mapping[str, Any], name: str) -> list[Any]:
    """A list in a row; an empty one where somebody left none."""
    found = body.get(name)
    return found if isinstance(found, list) else []


def _tell(out: Account, body: dict[str, Any]) -> None:
    for entry in _listed(body, "in_force"):
        told = entry.get("body") if isinstance(entry, dict) else None
        if not isinstance(told, dict):
            continue
        if entry.get("kind") == "start":
            out.runs.append(Run(entry.get("number"), str(entry.get("time")), told, is_told=True))
        elif out.runs and isinstance(told.get("weights"), dict):
            out.runs[-1].drafters.append(told)


def _count(out: Account, row: Row, body: dict[str, Any]) -> None:
    run = out.runs[-1] if out.runs else None
    model = str(body.get("model"))
    tallies = [
        out.total,
        out.by_key.setdefault(str(body.get("key") or _NO_KEY), Tally()),
        out.by_day.setdefault(row.time[:10], Tally()),
        out.by_model.setdefault(model, Tally()),
        out.by_drafter.setdefault(", ".join(map(str, _listed(body, "drafters"))) or "(none began)", Tally()),
    ]
    if run is not None:
        tallies.append(run.tally)
    for tally in tallies:
        tally.add(body)
