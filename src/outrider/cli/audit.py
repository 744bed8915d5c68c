"""`outrider audit`: what a server's ledger says, and whether it is as it was written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

if TYPE_CHECKING:
    from outrider.audit.chain import Row
    from outrider.audit.reading import Choice
    from outrider.audit.verification import Verdict

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)

File = Annotated[Path, typer.Argument(metavar="LEDGER", envvar="OUTRIDER_LEDGER", help="The file that --ledger named.")]
Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="LEDGER...", envvar="OUTRIDER_LEDGER", help="The files that --ledger named, or its replicas."
    ),
]
Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="From then on: 2h, 7d, 2026-11-30 or 2026-11-30T08:15 (UTC).")
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="Up to then.")]
Key = Annotated[str | None, typer.Option(metavar="NAME", help="Requests with this API key; - for those without one.")]
Kind = Annotated[str | None, typer.Option(metavar="KIND", help="Rows of this kind, such as request, mode or start.")]
KeyFile = Annotated[
    Path | None, typer.Option("--key-file", metavar="FILE", help="The key, if --ledger-key-file was given one.")
]
Kept = Annotated[
    str | None,
    typer.Option("--head", metavar="NUMBER:HASH", help="A head kept elsewhere, which must still be in the chain."),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to.  [default: standard output]")]


@app.callback()
def audit() -> None:
    """What the ledger of `outrider serve --ledger FILE` says, and whether it is as it was written.

    \b
    outrider audit show ledger.db --since 2h --kind request
    outrider audit verify ledger.db --head 130:5f0c...
    outrider audit verify ledger-*.db
    outrider audit export ledger.db --out ledger.csv
    outrider audit report ledger.db --out report.html
    """


@app.command()
def show(
    ledger: File,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    kind: Kind = None,
    limit: Annotated[int, typer.Option(metavar="N", help="So many rows at most, the newest.")] = 50,
) -> None:
    """Rows as a table, and the head: number and hash of the last row."""
    from outrider.audit.reading import Choice, read
    from outrider.cli.tables import print_table

    rows = [_line(row) for row in read(ledger, _choice(since, until, key, kind, limit))]
    print_table(("row", "time (UTC)", "kind", "what", "figures"), rows, sys.stdout, numbers=(0,))
    (last,) = read(ledger, Choice(last=1))
    print(f"head {last.number}:{last.hash}")


@app.command()
def verify(ledgers: Files, head: Kept = None, key_file: KeyFile = None) -> None:
    """Recompute the chain and name each row that is not as it was written. Several ledgers: each has its own chain.

    Exit code 0: intact. 1: one is not. 2: no ledger, or the key is missing.
    """
    from outrider.cli.errors import CommandError

    if head is not None and len(ledgers) > 1:
        raise CommandError(f"--head: it belongs to one chain, and {len(ledgers)} ledgers are given")
    intact = True
    for ledger in ledgers:
        if len(ledgers) > 1:
            print(f"{ledger}:")
        intact &= _told(_verdict(ledger, head, key_file), head)
    if not intact:
        raise typer.Exit(1)


def _told(verdict: Verdict, head: str | None) -> bool:
    """Print what was found; whether the chain is intact."""
    for finding in verdict.findings:
        print(finding)
    if verdict.more:
        print(f"and {verdict.more:,} more")
    how = "HMAC-SHA-256" if verdict.keyed else "SHA-256"
    print(f"{verdict.rows:,} rows, {verdict.first} to {verdict.head.number} ({how}), head {verdict.head}")
    if verdict.removed:
        print(f"rows up to {verdict.removed:,} were removed by age, as the last checkpoint tells")
    if verdict.open_ends:
        print(f"{verdict.open_ends} server run(s) without an end: killed, crashed, or still running")
    if not verdict.intact:
        print("NOT INTACT")
    else:
        print("intact" if head else "intact; rows cut off at the end show only against a head kept elsewhere (--head)")
    return verdict.intact


@app.command()
def export(
    ledger: File,
    form: Annotated[
        Literal["csv", "jsonl"] | None,
        typer.Option(
            "--format", help="csv: for spreadsheets. jsonl: rows whole.  [default: jsonl if --out ends so, else csv]"
        ),
    ] = None,
    out: Out = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    kind: Kind = None,
) -> None:
    """All rows, or chosen ones, for other programs."""
    from outrider.audit.export import write_csv, write_jsonl
    from outrider.audit.reading import read

    rows = read(ledger, _choice(since, until, key, kind, None))
    whole = form == "jsonl" or (form is None and out is not None and out.suffix == ".jsonl")
    with _opened(out) as file:
        (write_jsonl if whole else write_csv)(rows, file)


@app.command()
def report(
    ledger: File,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the page goes.")],
    since: Since = None,
    until: Until = None,
    head: Kept = None,
    key_file: KeyFile = None,
) -> None:
    """An HTML page for an auditor: what served whom when, each change of mode and why, the chain verified.

    It needs no network, and prints. Exit code 1 if the chain is not intact; the page is written all the same.
    """
    from outrider import __version__
    from outrider.audit.chain import timestamp
    from outrider.audit.reading import moment
    from outrider.audit.report import render

    begin = "" if since is None else moment("--since", since)
    end = "" if until is None else moment("--until", until)
    verdict = _verdict(ledger, head, key_file)
    page = render(ledger, verdict, made=timestamp(time.time()), made_by=__version__, since=begin, until=end)
    with _opened(out) as file:
        file.write(page)
    print(f"{out}: the chain is {'intact' if verdict.intact else 'NOT INTACT'}, head {verdict.head}")
    if not verdict.intact:
        raise typer.Exit(1)


def _choice(since: str | None, until: str | None, key: str | None, kind: str | None, limit: int | None) -> Choice:
    from outrider.audit.reading import Choice, moment

    return Choice(
        since=None if since is None else moment("--since", since),
        until=None if until is None else moment("--until", until),
        key=key,
        kind=kind,
        last=limit,
    )


def _verdict(ledger: Path, head: str | None, key_file: Path | None) -> Verdict:
    from outrider.audit.chain import Head, read_key
    from outrider.audit.verification import verify as check

    kept = None if head is None else Head.parse(head)
    return check(ledger, key=read_key("--key-file", key_file), head=kept)


@contextmanager
def _opened(out: Path | None) -> Iterator[TextIO]:
    if out is None:
        yield sys.stdout
        return
    # rows that somebody changed may hold what is no Unicode, and are shown all the same
    with out.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        yield file


def _line(row: Row) -> tuple[str, str, str, str, str]:
    body = row.content()
    try:
        what, figures = _DESCRIBED[row.kind](body)
    except (KeyError, TypeError, ValueError, AttributeError):  # a row that somebody changed may hold anything
        what, figures = "(not as this program writes it)", ""
    return str(row.number), f"{row.time[:10]} {row.time[11:23]}", row.kind, what, figures


def _request(body: dict[str, Any]) -> tuple[str, str]:
    who = body.get("key") or "no key"
    what = f"{body.get('endpoint')} by {who}: {body.get('status')}, {body.get('outcome')}"
    parts = []
    if "completion_tokens" in body:
        parts.append(f"{body['prompt_tokens']} + {body['completion_tokens']} tokens")
        parts.append(f"{'/'.join(body['drafters']) or 'no drafter'} {body['accepted']}/{body['drafted']}")
        if body["ttft"] is not None:
            parts.append(f"first after {1000 * body['ttft']:.0f} ms")
    return f"{what}, {body.get('id')}", ", ".join([*parts, f"{body.get('seconds', 0):.2f} s"])


def _start(body: dict[str, Any]) -> tuple[str, str]:
    model = body.get("model", {})
    code = body.get("code", {}).get("version", "?")
    there = model.get("upstreams")
    told = f"sha256 {str(model.get('sha256'))[:16]}" if there is None else f"in front of {len(there)} servers"
    return f"{model.get('name')} with {body.get('drafter')}", f"outrider {code}, {told}"


def _upstream(body: dict[str, Any]) -> tuple[str, str]:
    about = body.get("about") or {}
    what = f"{body.get('upstream')} ({body.get('pool')}): {body.get('state')} {body.get('reason')}".rstrip()
    return what, f"{about.get('kind', '?')} {about.get('version') or ''}, {about.get('root', '?')}"


def _mode(body: dict[str, Any]) -> tuple[str, str]:
    speed = body.get("speedup")
    figures = [] if speed is None else [f"{speed:.2f} of plain"]
    figures += [] if body.get("acceptance") is None else [f"{100 * body['acceptance']:.0f} % accepted"]
    what = f"{body.get('drafter')}: {body.get('before')} -> {body.get('after')}: {body.get('reason')}"
    return what, ", ".join([*figures, f"{body.get('requests')} texts"])


def _drafter(body: dict[str, Any]) -> tuple[str, str]:
    weights = ", ".join(f"{name} {str(digest)[:16]}" for name, digest in body.get("weights", {}).items())
    return f"{body.get('drafter')} loaded", weights


_DESCRIBED: dict[str, Callable[[dict[str, Any]], tuple[str, str]]] = {
    "ledger": lambda body: (f"made by {body.get('made_by')}", str(body.get("hash"))),
    "start": _start,
    "drafter": _drafter,
    "upstream": _upstream,
    "request": _request,
    "mode": _mode,
    "gap": lambda body: ("records that could not be written", f"{body.get('records')} since {body.get('since')}"),
    "disturbance": lambda body: ("the end was changed meanwhile", f"{body.get('written')}, found {body.get('found')}"),
    "checkpoint": lambda body: ("removed by age", f"rows {body.get('first')} to {body.get('through')}"),
    "end": lambda body: ("the server ended", f"{body.get('requests')} requests"),
}
