"""`outrider bench kernels`: what a forward costs by rows, against the machine's memory."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from outrider.cli.errors import CommandError
from outrider.cli.options import DEFAULT_MODEL
from outrider.cli.report_file import ReportFile

__all__ = ["kernels"]


def kernels(
    model: Annotated[str, typer.Option("--model", "-m", metavar="MODEL", help="Name or path.")] = DEFAULT_MODEL,
    threads: Annotated[int | None, typer.Option(metavar="N", help="[default: all cores]")] = None,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens in the cache.")] = 256,
    dtype: Annotated[str, typer.Option(metavar="DTYPE,...", help="Which to measure.")] = "int8,bf16,fp32,int4",
    rows: Annotated[str, typer.Option(metavar="M,...", help="Rows of a forward.")] = "1,2,4,8,16,32,64",
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds; their median counts.")] = 30,
    as_json: Annotated[str | None, typer.Option("--json", metavar="OUT", help="Write the report; - is stdout.")] = None,
) -> None:
    """Measure the native forward by number of rows, and this machine's read bandwidth in the same run.

    GB/s counts the weights and cache rows that a forward reads. Speculation pays where 'of one row' stays near 1.

    \b
    outrider bench kernels
    outrider bench kernels --dtype int8 --rows 1,4,8,16 --json kernels.json
    """
    from outrider import __version__
    from outrider.bench import environment
    from outrider.bench.kernels import measure
    from outrider.runtime.native import DTYPES

    dtypes = [part.strip() for part in dtype.split(",")]
    for name in dtypes:
        if name not in DTYPES:
            raise CommandError(f"--dtype: {name!r} is not one of {', '.join(DTYPES)}")
    try:
        counts = [int(part) for part in rows.split(",")]
    except ValueError:
        raise CommandError(f"--rows: {rows!r} is not a list of whole numbers like 1,4,8") from None
    if counts[0] != 1:
        raise CommandError(f"--rows: {rows!r} does not begin with 1, which the others are compared with")
    file = None if as_json is None or as_json == "-" else ReportFile(as_json)

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\rround {done} of {total}", end="" if done < total else "\r\033[K", file=sys.stderr, flush=True)

    report: dict[str, Any] = measure(
        model, threads=threads, context=context, dtypes=dtypes, rows=counts, rounds=rounds, progress=progress
    )
    report |= {
        "machine": environment.machine(),
        "versions": {"outrider": __version__, **environment.versions()},
        "git": environment.git(),
        "argv": ["outrider", *sys.argv[1:]],
    }
    if as_json == "-":
        print(json.dumps(report, indent=2))
        return
    if file is not None:
        file.write(json.dumps(report, indent=2) + "\n")
    _print(report)


def _print(report: dict[str, Any]) -> None:
    from outrider.cli.tables import print_table

    bandwidth = ", ".join(f"{value:.1f} GB/s with {count}" for count, value in report["bandwidth_gb_s"].items())
    print(f"read bandwidth by threads: {bandwidth}; context {report['context']}, {report['threads']} threads")
    columns = ["dtype", "rows", "ms", "of one row", "GB/s", "of bandwidth"]
    lines = [
        [dtype, m, f"{e['ms']:.2f}", f"{e['of_one_row']:.2f}", f"{e['gb_s']:.1f}", f"{e['of_bandwidth']:.2f}"]
        for dtype, entries in report["forward"].items()
        for m, e in entries.items()
    ]
    print_table(columns, lines, sys.stdout, numbers=range(1, 6))
    rates = ", ".join(f"{dtype} {rate:,.0f}" for dtype, rate in report["multiply_gflop_s"].items())
    print(f"arithmetic of one thread, GFLOP/s: {rates}")
    draws = "; ".join(f"{kind} {us:.1f}" for kind, us in report["draw_us"].items())
    print(f"a draw, microseconds: {draws}")
    print(f"Python's share of a plain step: {report['python_share']:.1%}")
    print(f"bookkeeping of a tree of 32 guesses: {report['tree_share']:.1%} of a plain step")
