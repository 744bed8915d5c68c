"""Falling back and returning: traffic that switches between copying and random text, and a draft ruined on purpose.

    python benchmarks/fallback.py smollm2-135m
    python benchmarks/fallback.py MODEL --drafter suffix --rounds 4 --tokens 300 --json out.json
    python benchmarks/fallback.py MODEL --parts ruined --threads 2

`traffic`: stretches of texts that copy their prompt and of random ones, by turns. Counted in steps of
the engine: how long after a turn the mode changes, and how often. Nothing in it hangs on the clock but the costs that
the controller measures.
`ruined`: the head that comes with the model, each of its tensors shuffled, drafts for `benchmarks/prompts.jsonl` in
turns with plain decoding. The time per token after the first 100 is a matter of the clock: keep the machine quiet.

All texts are compared with plain decoding's. The exit code is 1 where a text differs or a bound is missed: a change
within 50 steps, at most two changes a turn, at most 3 % of plain decoding's time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from outrider import Engine, Result, SamplingParams, Speculation
from outrider.models.shipped import find_shipped

WITHIN, CHANGES, LOSS = 50, 2, 0.03  # the bounds: steps, changes a turn, share of plain decoding's time
FIRST = 100  # tokens that a ruined draft may take to be found out
PROMPTS = Path(__file__).parent / "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Text:
    """One text of the traffic."""

    prompt: Any  # token ids, or messages
    params: SamplingParams


def copying(number: int, tokens: int) -> Text:
    """A passage or a program that is to be written again."""
    lines = [json.loads(line) for line in PROMPTS.read_text("utf-8").splitlines() if line.strip()]
    prompts = [line["turns"][0] for line in lines if line.get("category") in ("copy", "code_edit")]
    chat = [{"role": "user", "content": prompts[number % len(prompts)]}]
    return Text(chat, SamplingParams(max_tokens=tokens, temperature=0.0))


def random(number: int, tokens: int) -> Text:
    """A text that nothing foretells: at such a temperature the noise alone decides.

    At 2 a head that draws with the target's noise still guesses a third of it.
    """
    prompt = [int(token) for token in np.random.default_rng(number).integers(1000, 20000, 24)]
    return Text(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=100.0, seed=number))


def same(one: Result, other: Result) -> bool:
    return (one.tokens, one.text, one.logprobs) == (other.tokens, other.text, other.logprobs)


def traffic(engine: Engine, drafter: str, rounds: int, tokens: int) -> dict[str, Any]:
    """Stretches by turns, copying first; each of four short texts or two long ones, one after the other."""
    turns: list[dict[str, Any]] = []
    texts: list[tuple[Text, Result]] = []
    for turn in range(2 * rounds):
        make = random if turn % 2 else copying
        start, before = engine.steps, len(engine.transitions)
        for part in range(2 if turn % 2 else 4):
            text = make(turn // 2 * 4 + part, tokens)
            (result,) = engine.generate([text.prompt], text.params, speculation=Speculation(drafter=drafter))
            texts.append((text, result))
        changes = [change.as_dict() | {"after_steps": change.step - start} for change in engine.transitions[before:]]
        turns.append({"text": make.__name__, "steps": engine.steps - start, "changes": changes})
        shown = "; ".join(
            "{before} -> {after} after {after_steps} steps, {reason}, speed-up {speedup:.2f}".format(**change)
            for change in changes
        )
        print(f"{turn:3} {make.__name__:8} {shown or 'no change'}", flush=True)
    different = sum(
        not same(result, engine.generate([text.prompt], text.params, speculation=Speculation(enabled=False))[0])
        for text, result in texts
    )
    # the first stretch begins in the mode that it wants
    late = sum(not turn["changes"] or turn["changes"][0]["after_steps"] > WITHIN for turn in turns[1:])
    restless = sum(len(turn["changes"]) > CHANGES for turn in turns)
    return {
        "drafter": drafter,
        "turns": turns,
        "late": late,
        "restless": restless,
        "different": different,
        "ok": not (late or restless or different),
    }


def ruin(folder: Path, into: Path) -> Path:
    """A copy of a head whose every tensor is shuffled."""
    shutil.copytree(folder, into)
    rng = np.random.default_rng(0)
    for file in into.glob("*.safetensors"):
        tensors = load_file(file)
        # tables of token ids stay: they say what a guess means, not how good it is
        shuffled = {
            name: value
            if value.dtype.kind in "iub" and value.ndim == 1
            else rng.permutation(value.reshape(-1)).reshape(value.shape)
            for name, value in tensors.items()
        }
        save_file({name: np.ascontiguousarray(value) for name, value in shuffled.items()}, file)
    return into


def ruined(engine: Engine, drafter: str, tokens: int, limit: int | None) -> dict[str, Any]:
    """Seconds per token behind the first of each text, plain and with the ruined head, in turns."""
    lines = [json.loads(line) for line in PROMPTS.read_text("utf-8").splitlines() if line.strip()][:limit]
    prompts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    seconds = {"plain": 0.0, "ruined": 0.0}
    written = different = accepted = 0
    for index, prompt in enumerate(prompts):
        chat = [{"role": "user", "content": prompt}]
        results: dict[str, Result] = {}
        order = ["plain", "ruined"] if index % 2 else ["ruined", "plain"]
        for kind in order:
            speculation = Speculation(drafter=drafter) if kind == "ruined" else Speculation(enabled=False)
            began = time.perf_counter()
            (results[kind],) = engine.generate([chat], params, speculation=speculation)
            took = time.perf_counter() - began - results[kind].ttft
            if written >= FIRST:
                seconds[kind] += took
        if written >= FIRST:
            accepted += results["ruined"].usage.accepted_prediction_tokens
        different += not same(results["plain"], results["ruined"])
        written += len(results["plain"].tokens)
    loss = seconds["ruined"] / seconds["plain"] - 1
    print(f"ruined head: {loss:+.1%} of plain decoding's time after the first {FIRST} tokens; accepted {accepted}")
    return {
        "drafter": drafter,
        "texts": len(prompts),
        "tokens": written,
        "seconds": seconds,
        "loss": loss,
        "accepted": accepted,
        "changes": [change.as_dict() for change in engine.transitions],
        "different": different,
        "ok": loss <= LOSS and not different,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--parts", default="traffic,ruined")
    parser.add_argument("--drafter", default="auto", help="of the traffic")
    parser.add_argument("--ruined", default="eagle", help="eagle: the ruined head alone; auto: beside suffix matches")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200, help="of each text")
    parser.add_argument("--limit", type=int, help="prompts of the ruined head")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    settings: dict[str, Any] = {"dtype": given.dtype, "threads": given.threads, "batch_size": 1}
    settings["enable_prefix_caching"] = False  # prompts come again, and shall cost the same
    report: dict[str, Any] = {}
    if "traffic" in given.parts:
        engine = Engine(given.model, drafter=given.drafter, **settings)
        report["traffic"] = traffic(engine, given.drafter, given.rounds, given.tokens)
    if "ruined" in given.parts:
        plain = Engine(given.model, **settings)
        folder = find_shipped("eagle", plain.files.sha256())
        if folder is None:
            raise SystemExit(f"fallback: no head comes with {given.model}; take smollm2-135m, or --parts traffic")
        with tempfile.TemporaryDirectory() as temporary:
            head = ruin(folder, Path(temporary) / "head")
            engine = Engine(given.model, drafter=given.ruined, drafter_options={"head": str(head)}, **settings)
            report["ruined"] = ruined(engine, given.ruined, given.tokens, given.limit)
    line = json.dumps(report)
    if given.json:
        given.json.write_text(line)
    print(line)
    return 0 if all(part["ok"] for part in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
