"""The server under load: a closed loop of users, for plain, every-request-speculative and adaptive serving.

    python benchmarks/load.py smollm2-135m --users 1,4,16,32 --rounds 3 --requests 1 --max-tokens 96
    python benchmarks/load.py MODEL --option=--dtype=int8 --peer "llama.cpp=llama-server -m Q8_0.gguf --port {port}"

All servers run at once, each a process of its own on a free port of this machine, and take turns: in each round every
mode gets the same users and prompts, in another order, so that noise hits all alike. Each user sends one streamed chat
after the other, with no pause between them, and begins at another prompt; a turn has at least 8 of them. The first
prompt of all is a warm-up. Greedy texts of all modes and loads are compared: they are equal, or the exit code is 1;
those of peers are not. A token's time is that of the chunk it came in.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2

from server_process import foreign, serving

LEAST = 8  # requests in a turn of one mode, however few users there are
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


def ask(url: str, model: str, index: int, prompt: str, max_tokens: int) -> Answer:
    body = {
        "model": model,
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
    tokens = tokens or len(times)  # of a server that counts none: a token is a chunk
    return Answer(index, text, tokens, times[0] - sent if times else float("nan"), gaps)


def loop(
    url: str, model: str, prompts: Sequence[str], users: int, requests: int, max_tokens: int, first: int
) -> tuple[list[Answer], float]:
    """What all users got, and the seconds it took. `first`: the prompt that the first user begins with."""

    def user(number: int) -> list[Answer]:
        order = [(first + number * requests + i) % len(prompts) for i in range(requests)]
        return [ask(url, model, index, prompts[index], max_tokens) for index in order]

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


def shown(row: dict[str, Any]) -> str:
    return (
        f"{row['mode']:12} {row['users']:3} users {row['tokens_per_second']:8.1f} tokens/s   "
        f"TTFT {row['ttft_ms']['p50']:7.1f} / {row['ttft_ms']['p95']:7.1f} ms   "
        f"ITL {row['itl_ms']['p50']:6.1f} / {row['itl_ms']['p95']:6.1f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--users", default="1,4,16,32")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each mode at each load")
    parser.add_argument(
        "--requests", type=int, default=1, help=f"of each user in a turn; few users send {LEAST} in all"
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--option", action="append", default=[], help="of `outrider serve`, such as --option=--dtype=int8"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="another server")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    prompts = read(given.prompts)
    modes = given.modes.split(",")
    texts: dict[int, str] = {}
    rows, different = [], 0
    with ExitStack() as stack:
        urls: dict[str, str] = {}
        for mode in modes:
            options = ["--threads", str(given.threads), "--batch-size", str(given.batch_size), *given.option]
            options.append("--no-enable-prefix-caching")  # the prompts come again at each load, and shall cost the same
            if mode != "plain":
                options += ["--drafter", given.drafter]
            arguments = [given.model, "--served-model-name", "load", *options, *MODES[mode]]
            urls[mode] = stack.enter_context(serving(arguments)).url
        for peer in given.peer:
            name, _, command = peer.partition("=")
            urls[name] = stack.enter_context(foreign(shlex.split(command), {})).url
        names = {mode: httpx2.get(f"{url}/v1/models").json()["data"][0]["id"] for mode, url in urls.items()}
        for mode, url in urls.items():
            ask(url, names[mode], 0, prompts[0], given.max_tokens)
        for users in map(int, given.users.split(",")):
            requests = max(given.requests, -(-LEAST // users))
            got: dict[str, list[Answer]] = {mode: [] for mode in urls}
            spent = dict.fromkeys(urls, 0.0)
            for turn in range(given.rounds):
                order = list(urls)[turn % len(urls) :] + list(urls)[: turn % len(urls)]
                for mode in order:
                    first = turn * users * requests
                    answers, seconds = loop(urls[mode], names[mode], prompts, users, requests, given.max_tokens, first)
                    got[mode] += answers
                    spent[mode] += seconds
                    if mode in modes:
                        different += sum(texts.setdefault(a.prompt, a.text) != a.text for a in answers)
            for mode in urls:
                rows.append(summed_up(mode, users, got[mode], spent[mode]))
                print(shown(rows[-1]), flush=True)
    print(f"texts that differ between modes or loads: {different}")
    if given.json:
        given.json.write_text(json.dumps({"runs": rows, "differences": different, "argv": sys.argv[1:]}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
