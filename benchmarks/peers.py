"""Our engine beside llama.cpp, transformers and OpenVINO GenAI: the same model, prompts and threads, in one run.

    python benchmarks/peers.py --model smollm2-135m --json OUT.json
    python benchmarks/peers.py --model smollm2-135m --peers outrider:int8,llama.cpp:Q8_0,openvino

A contender is named engine:precision:decoding. Each has a process of its own, is warmed up, and takes turns with the
others on each prompt; all get the same token ids, decode greedily and go on past the end of the text. Whoever is not
installed or cannot run is left out by name. docs/performance.md says how to install them.
"""

from __future__ import annotations

import argparse
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from contenders.base import Absent, Setup, Spec
from contenders.quiet import foreign_share, usage
from contenders.race import Plan, Task, race
from contenders.report import summarise, table
from contenders.worker import ENGINES, Worker
from convert_gguf import DEFAULT_FOLDER

HERE = Path(__file__).parent
PARTS = ("text", "prefill", "steps")
ROWS = (1, 2, 4, 8, 16, 32)
QUIET = 0.05  # part of the machine that others may use; above it a run is not to be trusted
CONTEXT = 256  # tokens before a step, and of the prompt of a prefill


def contenders(quantisation: str) -> list[str]:
    """All contenders for a GGUF file of this quantisation."""
    quantised = list(dict.fromkeys(["Q8_0", quantisation, "Q4_0"]))
    drafted = {"outrider": ["ngram"], "llama.cpp": ["lookup-10", "lookup-2"], "openvino": ["lookup-5", "lookup-10"]}
    kinds = {
        "outrider": ["int8", "int4", "bf16", "fp32"],
        "llama.cpp": [*quantised, "BF16", "F32"],
        "openvino": quantised[:2],
        "transformers": ["bf16", "fp32"],
    }
    return [
        f"{engine}:{kind}:{decoding}"
        for engine, precisions in kinds.items()
        for kind in precisions
        for decoding in ("plain", *drafted.get(engine, ["lookup"]))
    ]


def select(wanted: str | None, known: list[str]) -> list[str]:
    """Those of `known` that a pattern of the comma-separated list names, whole or up to a colon, in their order.

    A full name that is not known is taken as it stands (`llama.cpp:Q8_0:lookup-4`). Raises ValueError for the rest.
    """
    if wanted is None:
        return known
    chosen: list[str] = []
    for pattern in filter(None, (part.strip() for part in wanted.split(","))):
        found = [name for name in known if fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ":*")]
        whole = pattern.count(":") == 2 and not set(pattern) & set("*?[")
        if not found and whole and pattern.partition(":")[0] in ENGINES:
            found = [pattern]
        if not found:
            raise ValueError(f"--peers: {pattern!r} names none of {', '.join(known)}")
        chosen += found
    return list(dict.fromkeys(chosen))


def prefills(text: list[int], length: int, number: int) -> list[list[int]]:
    """`number` prompts of `length` tokens, each of which begins at another token: no prefix can be used twice."""
    distinct = list(dict.fromkeys(text))
    if len(distinct) < number:
        raise ValueError(f"{number} prefills need as many different tokens, the prompts have {len(distinct)}")
    circle = text * (2 + length // len(text))
    return [circle[(start := text.index(first)) : start + length] for first in distinct[:number]]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="name or path of a GGUF model (default: %(default)s)")
    parser.add_argument("--peers", help="comma-separated names or patterns (default: all)")
    parser.add_argument("--list", action="store_true", help="print the contenders' names and end")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts" / "peers.jsonl", help="JSON Lines of prompts")
    parser.add_argument("--categories", help="comma-separated; only these prompts")
    parser.add_argument("--limit", type=int, help="at most so many prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens per prompt (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds over the prompts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="for every contender (default: %(default)s)")
    parser.add_argument("--context", type=int, default=2048, help="size of the contexts (default: %(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, of %(default)s")
    parser.add_argument("--cache", type=Path, default=DEFAULT_FOLDER, help="folder for converted models")
    parser.add_argument("--json", type=Path, help="write the report here; without it, it is the last line printed")
    out = parser.parse_args(argv)
    out.parts = out.parts.split(",")
    for part in out.parts:
        if part not in PARTS:
            parser.error(f"--parts: {part!r} is none of {', '.join(PARTS)}")
    for name in ("limit", "max_tokens", "repeat", "threads", "context"):
        value = getattr(out, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: {value} is not at least 1")
    return out


def tasks_of(options: argparse.Namespace, tokenizer: Any) -> list[Task]:
    """The prompts as token ids, in the file's order. Raises ValueError for one that the context cannot hold."""
    from outrider.bench.prompts import read_prompts

    wanted = options.categories.split(",") if options.categories else None
    taken: dict[str, int] = {}
    tasks: list[Task] = []
    for prompt in read_prompts(options.prompts):
        category = prompt.category or "other"
        taken[category] = taken.get(category, 0) + 1
        if (wanted and category not in wanted) or (options.limit and taken[category] > options.limit):
            continue
        ids = tokenizer.prompt(prompt.content) if isinstance(prompt.content, str) else tokenizer.chat(prompt.content)
        if len(ids) + options.max_tokens > options.context:
            raise ValueError(
                f"{options.prompts}:{prompt.line}: {len(ids)} tokens and {options.max_tokens} new ones do not fit into "
                f"--context {options.context}"
            )
        tasks.append(Task(category, tuple(ids)))
    if not tasks:
        raise ValueError(f"{options.prompts}: no prompt is of the categories {', '.join(wanted or ())}")
    return tasks


def plan_of(options: argparse.Namespace, tokenizer: Any) -> Plan:
    tasks = tasks_of(options, tokenizer)
    text = [token for task in tasks for token in task.prompt]
    return Plan(
        tasks=tasks if "text" in options.parts else [],
        new_tokens=options.max_tokens,
        repeats=options.repeat,
        prefills=prefills(text, CONTEXT, 8) if "prefill" in options.parts else [],
        step_context=prefills(text, CONTEXT, 1)[0],
        step_rows=ROWS if "steps" in options.parts else (),
    )


def start(names: list[str], setup: Setup, absent: dict[str, str]) -> dict[str, Worker]:
    """A running worker for each name that can take part; the others go into `absent`."""
    workers: dict[str, Worker] = {}
    for name in names:
        say(f"loading {name}")
        try:
            workers[name] = Worker(Spec(*name.split(":")), setup)
        except Absent as reason:
            absent[name] = str(reason)
    return workers


def say(text: str) -> None:
    print(f"\r\x1b[K{text}" if sys.stderr.isatty() else text, end="" if sys.stderr.isatty() else "\n", file=sys.stderr)


def main() -> int:
    options = arguments()
    try:
        from outrider.bench import environment
        from outrider.models.load import open_model
        from outrider.models.registry import resolve
    except ImportError as error:
        print(f"peers: outrider is not installed in this environment ({error})", file=sys.stderr)
        return 2
    workers: dict[str, Worker] = {}
    try:
        files = open_model(resolve(options.model))
        known = contenders(files.quantisation)
        if options.list:
            print("\n".join(known))
            return 0
        names = select(options.peers, known)
        plan = plan_of(options, files.tokenizer)
        setup = Setup(files.path, files.quantisation, options.threads, options.context, options.cache)
        absent: dict[str, str] = {}
        workers = start(names, setup, absent)
        processes = [worker.process for worker in workers.values()]
        before = usage(processes)
        done = race(workers, plan, say)
        foreign = foreign_share(before, usage(processes))
        absent |= done.out
        entries = summarise(done, plan, {name: worker.settings for name, worker in workers.items()})
    except ValueError as error:  # all refusals of ours are
        print(f"peers: {error}", file=sys.stderr)
        return 2
    finally:
        for worker in workers.values():
            worker.close()
    say("")
    print(table(entries, plan.step_rows))
    for reason, name in {entry["no_steps"]: entry["engine"] for entry in entries if entry["no_steps"]}.items():
        print(f"no steps by rows: {name}: {reason}")
    for name, reason in absent.items():
        print(f"left out: {name}: {reason}")
    if foreign is None:
        print("whether other processes ran meanwhile is not known")
    else:
        verdict = "" if foreign <= QUIET else f": more than {QUIET:.0%}, do not trust these figures"
        print(f"other processes used {foreign:.1%} of the machine{verdict}")
    report = {
        "model": {"name": files.name, "quantisation": files.quantisation, "sha256": files.sha256()},
        "prompts": len(plan.tasks),
        "max_tokens": options.max_tokens,
        "repeats": options.repeat,
        "threads": options.threads,
        "foreign_cpu_share": foreign,
        "contenders": entries,
        "absent": [{"name": name, "reason": reason} for name, reason in absent.items()],
        "machine": environment.machine(),
        "versions": environment.versions(),
        "git": environment.git(),
        "argv": sys.argv,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(report))
    return 0 if entries else 1


if __name__ == "__main__":
    sys.exit(main())
