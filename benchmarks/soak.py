"""A server under mixed traffic for an hour: whether its memory, pages and tasks stay where they were.

    python benchmarks/soak.py smollm2-135m --minutes 60 --json out.json
    python benchmarks/soak.py MODEL --minutes 5 --rate 2 --users 4

One server process on a free port of this machine. Users send requests of every kind, `--rate` in all per second: chats
and completions, streamed or not, drafters, temperatures, forms, log-probabilities, several choices, clients that go
after a chunk, and bodies that are refused. Every `--every` seconds the server's memory, open files, threads
and running texts are noted. The first fifth of the time is a warm-up, in which caches fill; then the mean of the last
quarter of the samples is compared with that of the first. Exit code 0: flat within 2 %, all pages and places free at
the end, and no 500.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from server_process import Server, serving

FLAT = 0.02  # growth that is still called flat
WARM_UP = 0.2  # part of the time in which caches fill
WORDS = ("river", "stone", "light", "house", "green", "seven", "window", "letter", "market", "morning", "paper")
FORMS: tuple[dict[str, Any] | None, ...] = (
    None,
    None,
    None,
    {"regex": "(yes|no), [a-z]{3,9}[.]"},
    {"choice": ["left", "right"]},
    {"json": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}},
)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the server holds at one moment."""

    seconds: float
    memory: int  # bytes of its own, resident or swapped out: pages of files come and go as the system likes
    files: int
    threads: int
    running: int  # texts
    waiting: int
    pages: float  # part of the cache that is in use


def request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body: everything that clients do, and some that they should not."""
    body: dict[str, Any] = {
        "model": "soak",
        "max_tokens": rng.randint(1, 48),
        "temperature": rng.choice([0, 0, 0.7, 1.2]),
        "seed": rng.randint(0, 2**40),
        "stream": rng.random() < 0.5,
    }
    words = [rng.choice(WORDS) for _ in range(rng.randint(1, 12))]
    text = " ".join(words * rng.randint(1, 6))
    if rng.random() < 0.3:
        body["n"] = rng.randint(2, 3)
    if rng.random() < 0.5:
        body["speculation"] = {"drafter": rng.choice(["none", "ngram", "suffix", "lookahead"])}
    elif rng.random() < 0.3:
        body["prediction"] = {"type": "content", "content": text}
    form = rng.choice(FORMS)
    if form is not None:
        body["structured_outputs"] = form
    if rng.random() < 0.2:
        body["stop"] = [" the", "\n"]
    if rng.random() < 0.05:
        body[rng.choice(["temperature", "n", "unheard_of"])] = -1
    if rng.random() < 0.5:
        return "chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    if rng.random() < 0.3:
        body |= {"logprobs": 2, "echo": rng.random() < 0.5}
    return "completions", body | {"prompt": text}


def send(client: httpx2.Client, path: str, body: dict[str, Any], *, leaves: bool) -> str:
    """What came of it: the status, `left` for a client that went after its first chunk, or what broke."""
    try:
        with client.stream("POST", f"/v1/{path}", json=body) as answer:
            for _ in answer.iter_bytes():
                if leaves:
                    return "left"
            return str(answer.status_code)
    except httpx2.HTTPError as error:
        return type(error).__name__


def sample(server: Server, client: httpx2.Client, started: float) -> Sample:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if ":" in line
    )
    values = {
        name.partition("{")[0]: float(value)
        for name, _, value in (line.rpartition(" ") for line in client.get("/metrics").text.splitlines())
        if name and not name.startswith("#")
    }
    return Sample(
        seconds=round(time.monotonic() - started, 1),
        memory=1024 * sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap")),
        files=len(list(Path(f"/proc/{server.pid}/fd").iterdir())),
        threads=int(status["Threads"]),
        running=int(values["vllm:num_requests_running"]),
        waiting=int(values["vllm:num_requests_waiting"]),
        pages=values["vllm:kv_cache_usage_perc"],
    )


def growth(samples: Sequence[Sample], seconds: float) -> float:
    """Part by which memory has grown after the warm-up: last quarter against first. NaN of too few samples."""
    memory = [one.memory for one in samples if one.seconds >= WARM_UP * seconds]
    quarter = len(memory) // 4
    if not quarter:
        return float("nan")
    return statistics.fmean(memory[-quarter:]) / statistics.fmean(memory[:quarter]) - 1


def soak(server: Server, options: argparse.Namespace) -> tuple[list[Sample], Counter[str]]:
    started = time.monotonic()
    end = started + 60 * options.minutes
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def user(number: int, client: httpx2.Client) -> None:
        rng = random.Random(f"{options.seed} {number}")
        while time.monotonic() < end:
            path, body = request(rng)
            outcome = send(client, path, body, leaves=body["stream"] and rng.random() < 0.15)
            with lock:
                counts[outcome] += 1
            time.sleep(max(0.0, min(rng.expovariate(options.rate / options.users), end - time.monotonic())))

    samples: list[Sample] = []
    with httpx2.Client(base_url=server.url, timeout=120) as client, ThreadPoolExecutor(options.users) as pool:
        users = [pool.submit(user, number, client) for number in range(options.users)]
        while time.monotonic() < end:
            samples.append(sample(server, client, started))
            time.sleep(max(0.0, min(options.every, end - time.monotonic())))
        for one in users:
            one.result()
        for _ in range(100):  # clients that left: their texts end with the step that runs
            samples.append(sample(server, client, started))
            if not samples[-1].running and not samples[-1].waiting:
                break
            time.sleep(0.1)
            samples.pop()
    return samples, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second, of all users")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--option", action="append", default=[], help="of `outrider serve`, such as --option=--threads=1"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with serving([options.model, "--served-model-name", "soak", *options.option]) as server:
        samples, counts = soak(server, options)
    first, last = samples[0], samples[-1]
    grown = growth(samples, 60 * options.minutes)
    broken = sum(count for outcome, count in counts.items() if outcome not in ("200", "400", "left", "429", "503"))
    idle = not last.running and not last.waiting
    flat = grown <= FLAT
    print(
        f"{sum(counts.values()):,} requests: " + ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
    )
    print(f"memory: {first.memory / 2**20:.1f} MiB at the start, {last.memory / 2**20:.1f} at the end")
    print(f"after the warm-up it grew by {grown:+.2%}: {'flat' if flat else 'not flat'} within {FLAT:.0%}")
    print(f"files {first.files} -> {last.files}, threads {first.threads} -> {last.threads}, idle at the end: {idle}")
    if options.json:
        report = {
            "argv": sys.argv[1:],
            "outcomes": counts,
            "growth": grown,
            "samples": [asdict(one) for one in samples],
        }
        options.json.write_text(json.dumps(report))
    return 0 if flat and idle and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
