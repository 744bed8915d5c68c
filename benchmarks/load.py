"""The server under load: a closed loop of users, for plain, every-request-speculative and adaptive serving.

    python benchmarks/load.py smollm2-135m --users 1,4,16 --requests 3 --max-tokens 96
    python benchmarks/load.py MODEL --prompts FILE.jsonl --drafter ngram --modes plain,adaptive --json out.json

One server process per mode, on a free port of this machine. Each user sends one streamed chat after the other, with no
pause between them, and begins at another prompt. The first prompt of all is a warm-up. Greedy texts of all modes and
loads are compared: they are equal, or the exit code is 1. A token's time is that of the chunk it came in.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2

MODES = {
    "plain": ["--drafter", "none"],
    "speculative": ["--no-adapt"],
    "adaptive": [],
}


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it. Times in seconds."""

    prompt: int
    text: str
    tokens: int
    ttft: float
    gaps: tuple[float, ...]  # between chunks


def ask(url: str, index: int, prompt: str, max_tokens: int) -> Answer:
    body = {
        "model": "load",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, text, tokens = time.perf_counter(), "", 0
    times: list[float] = []
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            content = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
            if content:
                times.append(time.perf_counter())
                text += content
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    gaps = tuple(after - before for before, after in pairwise(times))
    return Answer(index, text, tokens, times[0] - sent if times else float("nan"), gaps)


@contextmanager
def server(model: str, options: Sequence[str]) -> Iterator[str]:
    """A server process, and its URL."""
    command = [sys.executable, "-m", "outrider", "serve", model, "--port", "0", "--served-model-name", "load"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                found = re.search(r"http://[^/\s]+", line)
                if found:
                    break
            else:
                raise SystemExit("load: the server did not start; see its message above")
            Thread(target=process.stderr.read, daemon=True).start()  # so that its log never fills the pipe
            yield found[0]
        finally:
            process.terminate()


def loop(url: str, prompts: Sequence[str], users: int, requests: int, max_tokens: int) -> tuple[list[Answer], float]:
    """What all users got, and the seconds it took."""

    def user(number: int) -> list[Answer]:
        order = [(number * requests + i) % len(prompts) for i in range(requests)]
        return [ask(url, index, prompts[index], max_tokens) for index in order]

    started = time.perf_counter()
    with ThreadPoolExecutor(users) as pool:
        answers = [answer for each in pool.map(user, range(users)) for answer in each]
    return answers, time.perf_counter() - started


def summed_up(mode: str, users: int, answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    def quantiles(values: Sequence[float]) -> dict[str, float]:
        cuts = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else [*values] * 19
        return {"p50": round(cuts[9] * 1e3, 2), "p95": round(cuts[18] * 1e3, 2)}

    tokens = sum(answer.tokens for answer in answers)
    return {
        "mode": mode,
        "users": users,
        "requests": len(answers),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
        "ttft_ms": quantiles([answer.ttft for answer in answers]),
        "itl_ms": quantiles([gap for answer in answers for gap in answer.gaps]),
    }


def read(path: Path) -> list[str]:
    """The first message of each line."""
    out = []
    for line in path.read_text("utf-8").splitlines():
        if line.strip():
            entry = json.loads(line)
            out.append(entry["turns"][0] if "turns" in entry else entry["prompt"])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--users", default="1,4,16")
    parser.add_argument("--requests", type=int, default=3, help="of each user")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    prompts = read(given.prompts)
    texts: dict[int, str] = {}
    rows, different = [], 0
    for mode in given.modes.split(","):
        options = ["--threads", str(given.threads), "--batch-size", str(given.batch_size)]
        if mode != "plain":
            options += ["--drafter", given.drafter]
        with server(given.model, [*options, *MODES[mode]]) as url:
            ask(url, 0, prompts[0], given.max_tokens)
            for users in map(int, given.users.split(",")):
                answers, seconds = loop(url, prompts, users, given.requests, given.max_tokens)
                different += sum(texts.setdefault(answer.prompt, answer.text) != answer.text for answer in answers)
                rows.append(summed_up(mode, users, answers, seconds))
                print(
                    "{mode:12} {users:3} users {tokens_per_second:8.1f} tokens/s   TTFT {ttft_ms[p50]:7.1f} / "
                    "{ttft_ms[p95]:7.1f} ms   ITL {itl_ms[p50]:6.1f} / {itl_ms[p95]:6.1f} ms".format(**rows[-1]),
                    flush=True,
                )
    print(f"texts that differ between modes or loads: {different}")
    if given.json:
        given.json.write_text(json.dumps({"runs": rows, "differences": different, "argv": sys.argv[1:]}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
