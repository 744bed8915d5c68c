"""What the front adds: time to the first token, between tokens and in all, through it and directly, by turns.

Behind it is a stand-in server, in a process of its own, that sends a short event each `--gap` milliseconds and computes
nothing: what is measured is the way, not a model. Requests go alternately directly and through the front, `--users` at
once. The last line is one JSON object.

    python benchmarks/front.py --requests 200 --tokens 64 --gap 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import httpx2

MODEL = "stand-in"


async def stand_in(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An ASGI application with vLLM's routes, as far as the front asks for them."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break

    async def answer(kind: bytes, content: bytes, *, more: bool = False) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": content, "more_body": more})

    path = scope["path"]
    if path == "/v1/models":
        card = {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 4096}
        await answer(b"application/json", json.dumps({"object": "list", "data": [card]}).encode())
        return
    if path != "/v1/completions":
        await answer(b"application/json", b"{}")
        return
    given = json.loads(body)
    gap = given["seed"] / 1000  # milliseconds, smuggled in
    await answer(b"text/event-stream", b"", more=True)
    frame = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}
    count = given["max_tokens"]
    due = time.perf_counter()
    for index in range(count):
        due += gap
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        end = "length" if index == count - 1 else None
        choice = {"index": 0, "text": f"{time.perf_counter():.6f} ", "logprobs": None, "finish_reason": end}
        event = json.dumps({**frame, "choices": [choice]}, separators=(",", ":"))
        await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
    usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": count + 3}
    last = json.dumps({**frame, "choices": [], "usage": usage}, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {last}\n\ndata: [DONE]\n\n".encode()})


async def ask(client: httpx2.AsyncClient, url: str, tokens: int, gap: int) -> tuple[float, float, list[float]]:
    """Seconds to the first token, to the end, and of each token from its being sent to its being read."""
    body = {"model": MODEL, "prompt": "abc", "max_tokens": tokens, "seed": gap, "stream": True}
    began, first, ways = time.perf_counter(), math.nan, []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            now = time.perf_counter()
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            if choices:
                first = now - began if math.isnan(first) else first
                ways.append(now - float(choices[0]["text"]))
    assert len(ways) == tokens
    return first, time.perf_counter() - began, ways


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank, in milliseconds."""
    ranked = sorted(values)
    return 1000 * ranked[math.ceil(share * len(ranked)) - 1]


async def measure(urls: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Each user asks alternately directly and through the front."""
    found: dict[str, list[tuple[float, float, list[float]]]] = {name: [] for name in urls}
    async with httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(max_connections=None)) as client:
        for url in urls.values():  # connections and code are warm then
            await asyncio.gather(*(ask(client, url, 4, 1) for _ in range(options.users)))

        async def user(number: int) -> None:
            order = list(urls.items())
            for index in range(options.requests // options.users):
                for name, url in order if (index + number) % 2 else reversed(order):
                    found[name].append(await ask(client, url, options.tokens, options.gap))

        await asyncio.gather(*(user(number) for number in range(options.users)))
    return {
        name: {
            what: {f"p{round(100 * q)}": round(percentile(values, q), 3) for q in (0.5, 0.95)}
            for what, values in (
                ("first token", [first for first, _, _ in rows]),
                ("way of a token", [way for _, _, ways in rows for way in ways]),
                ("whole answer", [whole for _, whole, _ in rows]),
            )
        }
        for name, rows in found.items()
    }


@contextmanager
def running(command: Sequence[str], url: str) -> Any:
    """A server, once it is well."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 120
            while True:
                try:
                    if httpx2.get(f"{url}/health").status_code == 200:
                        break
                except httpx2.HTTPError:
                    pass
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{command[0]} did not start")
                time.sleep(0.1)
            yield
        finally:
            process.terminate()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100, help="of each kind")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gap", type=int, default=10, help="milliseconds between tokens")
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--stand-in", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stand_in is not None:
        import uvicorn

        uvicorn.run(stand_in, host="127.0.0.1", port=options.stand_in, log_level="error", lifespan="off")
        return
    behind, before = free_port(), free_port()
    urls = {"direct": f"http://127.0.0.1:{behind}", "front": f"http://127.0.0.1:{before}"}
    front = [sys.executable, "-m", "outrider", "serve", MODEL, "--upstream", urls["direct"], "--port", str(before)]
    with (
        running([sys.executable, __file__, "--stand-in", str(behind)], urls["direct"]),
        running([*front, "--log-level", "warning"], urls["front"]),
    ):
        found = asyncio.run(measure(urls, options))
    print(
        f"{options.requests} requests each, {options.users} at once, {options.tokens} tokens {options.gap} ms apart; ms"
    )
    print(f"{'':16} {'direct p50':>11} {'p95':>8} {'front p50':>10} {'p95':>8} {'added p50':>10} {'p95':>8}")
    for what in found["direct"]:
        direct, through = found["direct"][what], found["front"][what]
        added = [through[p] - direct[p] for p in ("p50", "p95")]
        print(
            f"{what:16} {direct['p50']:11.2f} {direct['p95']:8.2f} {through['p50']:10.2f} {through['p95']:8.2f} "
            f"{added[0]:10.2f} {added[1]:8.2f}"
        )
    print(json.dumps({"options": vars(options), "ms": found}))


if __name__ == "__main__":
    main()
