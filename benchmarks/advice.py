"""Predicted against measured speed-up of each drafting method: how far `outrider advise` can be trusted on a machine.

    python benchmarks/advice.py --prompts spec_bench.jsonl --dtype int8 --threads 2 --json build/advice.json

Each method guesses for one half of the prompts: its guesses are counted, its time is not looked at. From these counts
and a profile's costs the speed-up on the other half is predicted; that half is then run with a clock, all methods in
turn on each prompt. A last column predicts once more, from the counts of the second half itself: what is left there is
the error of the costs, the rest is that of the texts.

This goes in `--blocks`, each with a profile of its own that is measured just before: on a shared machine the memory
changes its speed by the minute, and with it what guesses are worth. The prediction of a block knows no clock but that.
`--only I --keep FILE` runs one of the blocks, and tells of all that FILE has by then.

Speed-ups are over plain decoding in the same run, reading the prompt included; texts must be equal, or the run ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from outrider import Engine, __version__
from outrider.advise.measure import Plan, measure
from outrider.advise.predict import predict
from outrider.advise.probe import Followed, follow
from outrider.advise.prompts import Text
from outrider.bench import environment
from outrider.bench.prompts import read_prompts
from outrider.engine.profile import Counts, Profile

METHODS = ("ngram", "suffix", "draft_model", "medusa", "eagle")


@dataclass(frozen=True)
class Line:
    """One method. Speed-ups over plain decoding."""

    method: str
    predicted: float  # from the counts of the other prompts
    of_own_counts: float  # from the counts of the measured run
    measured: float
    tokens_per_step_before: float
    tokens_per_step: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Block:
    """A profile, and what was run just behind it: by method, each text."""

    profile: Profile
    before: dict[str, list[Followed]]  # counted
    after: dict[str, list[Followed]]  # by the clock


def main() -> None:
    arguments = _arguments()
    engine = Engine(
        arguments.model,
        dtype=arguments.dtype,
        threads=arguments.threads,
        cache_tokens=Plan().cache_rows,
        batch_size=1,
        enable_prefix_caching=False,  # every method reads every prompt
    )
    methods = ("none", *METHODS)
    for method in methods:
        engine.prepare(method)
    texts = _texts(arguments.prompts, 2 * arguments.count, engine)
    blocks = []
    for number in range(arguments.blocks) if arguments.only is None else [arguments.only]:
        part = texts[2 * arguments.count * number // arguments.blocks :][: 2 * arguments.count // arguments.blocks]
        plan = Plan(rounds=arguments.rounds, tokens=arguments.tokens)
        profile = measure(
            engine.loaded, dict.fromkeys(methods, engine), version=__version__, plan=plan, progress=_progress
        )
        before = _run(engine, METHODS, part[0::2], arguments.max_tokens, "count")
        after = _run(engine, methods, part[1::2], arguments.max_tokens, "measure")
        _require_equal(after)
        blocks.append(Block(profile, before, after))
    if arguments.keep is not None:
        blocks = _kept(arguments.keep, blocks)
    lines = [_line(method, blocks) for method in METHODS]
    _print(lines)
    if arguments.json is not None:
        report: dict[str, Any] = {
            "lines": [{**line.__dict__, "error": line.error} for line in lines],
            "prompts": sum(len(block.after["none"]) for block in blocks),
            "blocks": len(blocks),
            "max_tokens": arguments.max_tokens,
            "model": engine.files.name,
            "machine": environment.machine(),
            "versions": {"outrider": __version__, **environment.versions()},
            "git": environment.git(),
            "argv": sys.argv,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON Lines, as for `outrider bench`")
    parser.add_argument("--count", type=int, default=24, help="prompts of each half, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--blocks", type=int, default=3, help="that the prompts are split into")
    parser.add_argument("--only", type=int, default=None, metavar="I", help="run this block alone, counted from 0")
    parser.add_argument("--keep", type=Path, default=None, help="file that blocks are added to")
    parser.add_argument("--rounds", type=int, default=6, help="of a profile's forwards")
    parser.add_argument("--tokens", type=int, default=32, help="that a profile writes per text and method")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def _texts(path: Path, count: int, engine: Engine) -> list[Text]:
    """Prompts spread evenly over the file, those that leave room in the context."""
    found = read_prompts(path, chat=True)
    room = engine.config.context - 512
    fitting = [p for p in found if len(engine.encode(p.content)) < room]
    step = max(1, len(fitting) // count)
    return [Text(p.category or "given", p.content, chat=False) for p in fitting[::step][:count]]


def _run(
    engine: Engine, methods: Sequence[str], texts: Sequence[Text], max_tokens: int, what: str
) -> dict[str, list[Followed]]:
    """Each method on each text, in turns, another one first each time."""
    out: dict[str, list[Followed]] = {method: [] for method in methods}
    for number, text in enumerate(texts):
        turn = number % len(methods)
        for method in (*methods[turn:], *methods[:turn]):
            out[method] += follow(engine, method, [text], max_tokens=max_tokens)
        _progress(what, number + 1, len(texts))
    return out


def _require_equal(after: dict[str, list[Followed]]) -> None:
    for method, followed in after.items():
        for number, (plain, drafted) in enumerate(zip(after["none"], followed, strict=True)):
            if plain.tokens != drafted.tokens:
                raise SystemExit(f"{method}: text {number} differs from plain decoding's")


def _line(method: str, blocks: Sequence[Block]) -> Line:
    counted = _counts([one for block in blocks for one in block.before[method]])
    own = _counts([one for block in blocks for one in block.after[method]])
    plain, drafted = ([one for block in blocks for one in block.after[name]] for name in ("none", method))
    return Line(
        method,
        _predicted(method, blocks, counted),
        _predicted(method, blocks, own),
        sum(map(_seconds, plain)) / sum(map(_seconds, drafted)),
        counted.tokens_per_step,
        own.tokens_per_step,
    )


def _predicted(method: str, blocks: Sequence[Block], counts: Counts) -> float:
    """Speed-up on the texts that were run with a clock, if guesses come out as in `counts`."""
    plain = drafted = 0.0
    for block in blocks:
        wanted = _counts(block.after[method])
        rate = predict(block.profile, method, counts)
        prompts = predict(block.profile, method, wanted)  # for the prompts' part alone
        share = wanted.tokens / counts.tokens
        plain += prompts.plain_prompt + share * (rate.plain - rate.plain_prompt)
        drafted += prompts.drafted_prompt + share * (rate.drafted - rate.drafted_prompt)
    return plain / drafted


def _kept(path: Path, blocks: Sequence[Block]) -> list[Block]:
    """Those of the file and these, which are added to it, a line each."""
    with path.open("a", encoding="utf-8") as file:
        for block in blocks:
            file.write(json.dumps(asdict(block)) + "\n")
    adapter = TypeAdapter(Block)
    return [adapter.validate_json(line) for line in path.read_text("utf-8").splitlines()]


def _counts(followed: Sequence[Followed]) -> Counts:
    out = Counts()
    for one in followed:
        out.add(one.counts)
    return out


def _seconds(followed: Followed) -> float:
    return followed.prompt_seconds + sum(moment.seconds for moment in followed.moments)


def _print(lines: Sequence[Line]) -> None:
    print("| method | predicted | measured | error | from its own counts | tokens per step, counted / measured |")
    print("|---|---|---|---|---|---|")
    for line in sorted(lines, key=lambda line: -line.measured):
        print(
            f"| `{line.method}` | {line.predicted:.2f}x | {line.measured:.2f}x | {line.error:+.0%} | "
            f"{line.of_own_counts:.2f}x | {line.tokens_per_step_before:.2f} / {line.tokens_per_step:.2f} |"
        )
    ranked = [[line.method for line in sorted(lines, key=key)] for key in (_by_predicted, _by_measured)]
    print(f"\nranked by prediction: {', '.join(ranked[0])}\nranked by clock: {', '.join(ranked[1])}")
    print(f"largest error: {max(abs(line.error) for line in lines):.0%}")


def _by_predicted(line: Line) -> float:
    return -line.predicted


def _by_measured(line: Line) -> float:
    return -line.measured


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{what}: {done} of {total}\033[K", end="" if done < total else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
