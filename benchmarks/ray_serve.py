"""Ray Serve under load: two replicas against one, one killed, all renewed; every text against the engine alone.

    unshare -n sh -c 'ip link set lo up; python benchmarks/ray_serve.py smollm2-135m --option=--dtype=int8'

Ray listens on all interfaces, so give it a network namespace of its own. Needs ray[serve].
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx2
import ray
import typer
from ray import serve

from outrider import Engine, SamplingParams
from outrider.scale.deployment import Options
from outrider.scale.ray import APPLICATION, app

PORT = 8111
URL = f"http://127.0.0.1:{PORT}/v1/chat/completions"
SUBJECTS = ["a river", "a bridge", "the moon", "bread", "a clock", "snow", "a ship", "an oak", "salt", "a violin"]


def questions(count: int) -> list[str]:
    """Made up here, each another one."""
    asks = ["Tell me about {}.", "Write two sentences about {}.", "What is {} good for?", "List facts about {}."]
    return [asks[i // len(SUBJECTS) % len(asks)].format(SUBJECTS[i % len(SUBJECTS)]) for i in range(count)]


def expected(model: str, dtype: str, asked: Sequence[str], tokens: int) -> list[str]:
    """The texts of plain decoding, one after the other."""
    engine = Engine(model, dtype=dtype, threads=1, drafter="none")
    prompts = [engine.tokenizer.chat([{"role": "user", "content": text}]) for text in asked]
    return [engine.generate([prompt], SamplingParams(max_tokens=tokens))[0].text for prompt in prompts]


class Load:
    """Closed loop: so many users, each asking the next question as soon as it has an answer."""

    def __init__(self, asked: Sequence[str], texts: Sequence[str], users: int, tokens: int) -> None:
        self._asked, self._texts, self._users, self._tokens = asked, texts, users, tokens
        self.done = 0
        self._count = threading.Lock()

    def run(self, meanwhile: Callable[[Load], None] | None = None) -> dict[str, Any]:
        """`meanwhile` runs beside it, in a thread of its own."""
        self.done = 0
        side = threading.Thread(target=meanwhile, args=(self,)) if meanwhile else None
        start = time.perf_counter()
        if side:
            side.start()
        with ThreadPoolExecutor(self._users) as pool:
            results = list(pool.map(self._ask, range(len(self._asked))))
        seconds = time.perf_counter() - start
        if side:
            side.join()
        tokens = sum(count for _, count, _ in results)
        return {
            "requests": len(results),
            "equal": sum(kind == "equal" for kind, _, _ in results),
            "other": sum(kind == "other" for kind, _, _ in results),
            "errors": [kind for kind, _, _ in results if kind not in ("equal", "other")],
            "tokens_per_second": tokens / seconds,
            "seconds_p50": median(taken for _, _, taken in results),
        }

    def _ask(self, index: int) -> tuple[str, int, float]:
        body = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": self._asked[index]}],
            "max_tokens": self._tokens,
            "temperature": 0,
        }
        start = time.perf_counter()
        try:
            answer = httpx2.post(URL, json=body, timeout=120)
        except httpx2.HTTPError as error:
            return f"no answer: {error!r}", 0, time.perf_counter() - start
        finally:
            with self._count:
                self.done += 1
        taken = time.perf_counter() - start
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.json()['error']['code']}", 0, taken
        found = answer.json()
        same = found["choices"][0]["message"]["content"] == self._texts[index]
        return "equal" if same else "other", found["usage"]["completion_tokens"], taken


def kill_one(load: Load) -> None:
    """Kill -9 of one engine's process in the middle of the load."""
    _wait(load, 4)
    pids = subprocess.run(["pgrep", "-f", "outrider serve.*--port 0"], capture_output=True, text=True, check=True)
    os.kill(int(pids.stdout.split()[0]), signal.SIGKILL)


def renew(options: Options) -> Callable[[Load], None]:
    """A rolling update in the middle of the load."""

    def update(load: Load) -> None:
        _wait(load, 4)
        serve.run(app(options), name=APPLICATION, route_prefix="/")

    return update


def _wait(load: Load, requests: int) -> None:
    while load.done < requests:
        time.sleep(0.01)


def main(
    model: str,
    dtype: Annotated[str, typer.Option()] = "int8",
    requests: Annotated[int, typer.Option(help="Of each part.")] = 40,
    users: Annotated[int, typer.Option()] = 8,
    tokens: Annotated[int, typer.Option()] = 48,
    ledger: Annotated[Path | None, typer.Option(help="Each replica keeps one beside it.")] = None,
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Run the four parts and print what came of them."""
    asked = questions(requests)
    texts = expected(model, dtype, asked, tokens)
    words = [f"--dtype={dtype}", "--threads=1", *([f"--ledger={ledger}"] if ledger else [])]
    ray.init(include_dashboard=False, num_cpus=4, object_store_memory=200 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    load = Load(asked, texts, users, tokens)
    found: dict[str, Any] = {}
    for name, replicas, meanwhile in (
        ("1 replica", 1, None),
        ("2 replicas", 2, None),
        ("2 replicas, one killed", 2, kill_one),
        ("2 replicas, renewed", 2, renew(Options(model=model, options=[*words, "--batch-size=7"], replicas=2))),
    ):
        serve.run(app(Options(model=model, options=words, replicas=replicas)), name=APPLICATION, route_prefix="/")
        found[name] = load.run(meanwhile)
        part = found[name]
        print(
            f"{name:24} {part['tokens_per_second']:7.1f} tokens/s, {part['equal']} of {part['requests']} texts equal, "
            f"{part['other']} other, errors: {part['errors'] or 'none'}",
            flush=True,
        )
    serve.shutdown()
    ray.shutdown()
    if out:
        out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
