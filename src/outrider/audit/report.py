"""The auditor's page: one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.audit.account import account
from outrider.audit.reading import Choice, read
from outrider.audit.verification import Verdict

__all__ = ["render"]

_TEMPLATE = Path(__file__).with_name("report.html.jinja")


def render(path: Path, verdict: Verdict, *, made: str, made_by: str, since: str = "", until: str = "") -> str:
    """The page over the ledger at `path`, whose chain gave that verdict. `made` is the time that it shows."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.ChainableUndefined
    )
    filters: dict[str, Callable[[Any], str]] = {
        "count": _count,
        "share": _share,
        "figure": _figure,
        "listed": _listed,
        "when": _when,
        "pretty": _pretty,
    }
    environment.filters |= filters
    template = environment.from_string(_TEMPLATE.read_text("utf-8"))
    return template.render(
        name=path.name,
        verdict=verdict,
        account=account(
            read(path, Choice()),
            checkpoint=next(read(path, Choice(kind="checkpoint", last=1)), None),
            since=since,
            until=until,
        ),
        made=made,
        made_by=made_by,
        since=since,
        until=until,
    )


# A row that somebody changed may lack anything: what is not there is shown as nothing.


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _share(value: Any) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, float) else ""


def _figure(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else f"{value}"


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else ""


def _when(value: Any) -> str:
    """A timestamp, to the second."""
    return f"{str(value)[:10]} {str(value)[11:19]}"


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, default=str)
