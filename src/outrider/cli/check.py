"""`outrider check`: whether a draft is good for a target."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.errors import CommandError
from outrider.cli.report_file import ReportFile

if TYPE_CHECKING:
    from outrider.advise.check import CheckReport

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name or path of the target.")],
    draft: Annotated[
        str,
        typer.Option(
            metavar="D",
            help="Draft model or head: name, GGUF file or folder; or eagle, medusa, draft_model as shipped.",
        ),
    ],
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Prompts as for 'outrider bench'.  [default: built in]")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Use the first prompts only.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each 'prompt' into the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Tokens per prompt.")] = 64,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto, int8, int4, bf16 or fp32.")] = "auto",
    threads: Annotated[int | None, typer.Option(metavar="N", help="[default: all cores]")] = None,
    retokenise: Annotated[
        bool, typer.Option("--retokenise", help="Let a draft of another tokenizer guess by its text.")
    ] = False,
    against: Annotated[
        Path | None, typer.Option(metavar="REPORT", help="An earlier report: find what has changed since.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="REPORT", help="Write the report for a later --against.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check a draft against its target: do they fit, how often is it right, and does it pay here?

    Exit code 0: good. 1: weak, or drift was found. 2: harmful, or refused - and, as everywhere, bad input: then nothing
    is printed on standard output, while a verdict always is.

    \b
    outrider check smollm2-135m --draft eagle
    outrider check target.gguf --draft small.gguf --prompts mine.jsonl --out report.json
    outrider check target.gguf --draft small.gguf --against report.json
    outrider check smollm2-135m --draft other-family.gguf --retokenise
    """
    from outrider import __version__
    from outrider.advise.check import CheckReport, judge, probe, refusal
    from outrider.advise.compatibility import compare
    from outrider.cli.drafts import drafting_engine, opened, shipped, texts_of
    from outrider.engine.profile import ProfileError, find

    if max_tokens < 2:
        raise CommandError(f"--max-tokens: {max_tokens} is not at least 2")
    earlier = None if against is None else CheckReport.read(against)
    file = None if out is None else ReportFile(out, "--out")
    texts = texts_of(prompts, limit, chat=chat)
    target = opened(model)
    found = compare(target, shipped(target, draft))
    if found.foreign and retokenise:
        found.allow_foreign()
    if found.refused is not None:
        report = refusal(target, found, __version__)
    else:
        engine = drafting_engine(
            model,
            found,
            options={"retokenise": True} if found.foreign else None,
            dtype=dtype,
            threads=threads,
            adapt=False,
            batch_size=1,
        )
        with warnings.catch_warnings():
            # a head of another target is among the findings
            warnings.filterwarnings("ignore", message=".*made for the target", category=RuntimeWarning)
            engine.prepare(found.method)
        try:
            profile = find(engine.loaded)
        except ProfileError as error:
            profile = None
            print(f"{error}; measured instead", file=sys.stderr)
        measured = probe(
            engine,
            found.method,
            texts,
            max_tokens=max_tokens,
            profile=profile,
            draft_sha256=found.sha256,
            progress=_Dots(len(texts)),
        )
        report = judge(target, found, measured, __version__, against=earlier)
    text = json.dumps(report.as_json(), indent=2)
    if file is not None:
        file.write(text + "\n")
    if as_json:
        print(text)
    else:
        _print(report)
    raise typer.Exit(report.exit_code)


class _Dots:
    """How far the probe is, on a terminal."""

    def __init__(self, total: int) -> None:
        self._done, self._total = 0, total

    def __call__(self) -> None:
        self._done += 1
        if sys.stderr.isatty():
            end = "" if self._done < self._total else "\r\033[K"
            print(f"\rtext {self._done} of {self._total}", end=end, file=sys.stderr, flush=True)


def _print(report: CheckReport) -> None:
    from outrider.cli.tables import print_table

    rows = [[finding.level, finding.what, finding.told] for finding in report.draft.findings]
    found = report.probe
    if found is not None:
        acceptance = ", ".join(f"{a:.2f}" for a in found.counts.acceptance()[:8])
        rows += [
            ["", "acceptance", f"by depth {acceptance}; {found.counts.tokens_per_step:.2f} tokens per step"],
            ["", "memory", f"{found.memory / 1e6:,.1f} MB beside the target's"],
            ["", "speed-up", f"{found.speedup:.2f}x, {found.basis}"],
        ]
    drift = report.drift
    if drift is not None:
        changed = ", ".join(drift.changed) or "no file"
        texts = "" if drift.comparable else " (other texts: the two are hardly comparable)"
        told = f"{changed} changed since {drift.against}; {drift.tokens_then:.2f} tokens per step then, "
        rows.append(["drift" if drift.found else "ok", "since then", f"{told}{drift.tokens_now:.2f} now{texts}"])
    print_table(["", report.draft.name, f"as {report.draft.method} for {report.target}"], rows, sys.stdout)
    print(f"{report.verdict}: {report.reason}")
