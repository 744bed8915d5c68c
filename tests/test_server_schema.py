"""The OpenAPI document is true: requests made of it are answered as it says, and those that are not leave no trace.

OUTRIDER_FUZZ sets how many requests are made of it in all (10,000 take some minutes); a few without it.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from outrider.server.settings import Limits
from serving import MODEL, Running, serving, settled, tiny_engine

FULL = int(os.environ.get("OUTRIDER_FUZZ", "0"))
ROUTES = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /tokenize",
    "POST /detokenize",
)
STATUSES = {200, 400, 401, 404, 405, 408, 413, 429, 503}


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = Limits(output_tokens=8, request_seconds=60)
    with serving(tiny_engine(batch_size=4), limits=limits) as running:
        yield running
        settled(running)
        assert not running.service.thread.faults


@pytest.mark.parametrize("route", ROUTES)
def test_requests_made_of_the_document_are_answered(server: Running, route: str) -> None:
    """Valid by the document and not: never 500, never silence, errors in OpenAI's form, and a status that the document
    names. Half of the bodies ask for the model that is there, so that they reach the engine."""
    method, path = route.split()
    document = httpx2.get(f"{server.url}/openapi.json").json()
    responses = document["paths"][path][method.lower()]["responses"]
    schema = schemathesis.openapi.from_dict(document)
    strategy = schema[path][method].as_strategy()
    rng, seen = Random(path), Counter[int]()
    count = max(5, FULL // len(ROUTES))

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=not FULL,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def ask(case: schemathesis.Case) -> None:
        body = case.body
        if isinstance(body, dict):
            body = dict(body)
            if "model" in body and rng.random() < 0.5:
                body["model"] = MODEL
            if rng.random() < 0.5:  # only a body with few fields is likely to be sound as a whole
                known = document["components"]["schemas"]
                needed = known[_name(document, path)].get("required", [])
                body = {key: value for key, value in body.items() if key in needed or rng.random() < 0.1}
        answer = httpx2.request(method, f"{server.url}{path}", json=body, timeout=60)
        seen[answer.status_code] += 1
        assert answer.status_code in STATUSES, (body, answer.text)
        assert str(answer.status_code) in responses or answer.status_code == 405
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    before = resident()
    ask()
    settled(server)
    assert seen.total() >= min(count, 5)
    if FULL:
        print(route, dict(seen), f"memory {before / 2**20:.1f} -> {resident() / 2**20:.1f} MiB")
        assert seen[200], seen


def _name(document: object, path: str) -> str:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]  # type: ignore[index]
    return str(body["$ref"].rpartition("/")[2])


RAW = [
    b"GET /nowhere HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 9\r\n\r\n{}",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\r\n" * 50,
    b"A" * 70_000,
]


def test_bytes_that_are_no_http_leave_no_trace(server: Running) -> None:
    """Broken heads, other protocols and noise are refused or the connection is closed; the next client is served."""
    rng = Random(7)
    noise = [rng.randbytes(rng.randint(1, 200)) for _ in range(FULL or 20)]
    port = int(server.url.rpartition(":")[2])
    for raw in RAW + noise:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            try:
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
                said = connection.recv(1 << 16)
            except ConnectionError:
                said = b""
        assert not said or said.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (raw[:60], said[:60])
    settled(server)
    assert server.client.completions.create(model=MODEL, prompt="ab", max_tokens=1).choices


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
