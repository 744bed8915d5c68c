"""The OpenAPI document is true: requests made of it are answered as it says, and those that are not leave no trace.

OUTRIDER_FUZZ sets how many are sent in all: `OUTRIDER_FUZZ=10000 pytest -s tests/test_server_schema.py` takes some
minutes and says what came of them. A few without it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

import httpx2
import pytest

import fuzzing
from outrider.server.settings import Limits
from serving import MODEL, Running, serving, settled, tiny_engine, wait_until

FULL = int(os.environ.get("OUTRIDER_FUZZ", "0"))
MEMORY = 0.05  # that the server may have grown by in the second half of a full run
SEED = SystemRandom().randrange(2**32) if FULL else 7


def shares(document: dict[str, Any], total: int) -> tuple[dict[tuple[str, str], int], int, int]:
    """`total` requests as those made of each operation, bodies with changed bytes, and bytes that are no HTTP."""
    operations = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    out = {operation: max(2, total // 100) for operation in operations if operation[0] == "GET"}
    bent, raw = max(20, total // 16), max(20, total // 20)
    writes = [operation for operation in operations if operation[0] == "POST"]
    assert {path for _, path in writes} == set(fuzzing.SOUND)
    for left, operation in zip(range(len(writes), 0, -1), writes, strict=True):
        out[operation] = (total - bent - raw - sum(out.values())) // left
    return out, bent, raw


def anonymous() -> int:
    """Bytes of memory of this process's own, the server's: the client is another one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmSwap:")))


def held(running: Running) -> tuple[int, int, int]:
    """Tasks of the event loop, threads and open files."""
    loop = running.service.thread._loop
    assert loop is not None
    return len(asyncio.all_tasks(loop)), threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="module")
def client() -> Iterator[Executor]:
    """The process that asks."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = Limits(output_tokens=8, request_seconds=60)
    with serving(tiny_engine(batch_size=4), limits=limits) as running:
        yield running
        settled(running)
        assert not running.service.thread.faults


def send(server: Running, client: Executor, total: int, seed: int) -> None:
    """So many requests of all kinds, one after the other."""
    operations, bent, raw = shares(httpx2.get(f"{server.url}/openapi.json").json(), total)
    sent = 0
    for (method, path), count in operations.items():
        ask = partial(fuzzing.made_of_the_document, server.url, method, path, MODEL, count, fresh=bool(FULL))
        seen = client.submit(ask).result()
        assert seen[200], (path, seen)
        sent += seen.total()
        if FULL:
            print(method, path, dict(seen), flush=True)
    changed = client.submit(fuzzing.bent, server.url, MODEL, bent, seed).result()
    nothing = client.submit(fuzzing.noise, int(server.url.rpartition(":")[2]), raw, seed).result()
    assert sent + changed.total() + nothing.total() == total
    if FULL:
        print("changed bytes", dict(changed), "no HTTP", dict(nothing), flush=True)


def test_requests_made_of_the_document_leave_no_trace(server: Running, client: Executor) -> None:
    """Valid by the document and not, with bytes changed, and no HTTP at all: never 500, never silence, errors in
    OpenAI's form, and a status that the document names. Afterwards pages, tasks, threads and files are what they were;
    in a full run, memory is what it was at its half."""
    client.submit(len, ()).result()  # its process is there
    send(server, client, 120, SEED)  # and the server's threads
    settled(server)
    before = held(server)
    memory: list[int] = []
    for half in (1, 2) if FULL else ():
        send(server, client, FULL // 2, SEED + half)
        settled(server)
        wait_until(lambda: held(server) <= before)
        memory.append(anonymous())
        print(f"{half * (FULL // 2):,} requests: tasks, threads, files {before} -> {held(server)}", end=", ")
        print(f"memory {memory[-1] / 2**20:.1f} MiB", flush=True)
    assert not memory or memory[1] <= memory[0] * (1 + MEMORY)
    send(server, client, 120, SEED)
    wait_until(lambda: held(server) <= before)


def test_a_half_open_connection_costs_nothing(server: Running) -> None:
    """Twenty clients that connect and say nothing, or half a head, keep nobody else from being served."""
    port = int(server.url.rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(20)]
    try:
        for connection in idle[::2]:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        assert server.client.completions.create(model=MODEL, prompt="ab", max_tokens=1).choices
        assert not server.service._jobs
    finally:
        for connection in idle:
            connection.close()
    settled(server)
