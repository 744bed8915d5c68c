"""A client that asks what nobody would ask. For the tests of the OpenAPI document.

It runs in a process of its own, so that what it remembers of its requests is not taken for the server's memory.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import httpx2
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

__all__ = ["bent", "made_of_the_document", "noise"]

STATUSES = {200, 400, 401, 404, 405, 408, 413, 429, 503}
CHAT = [{"role": "user", "content": "ab"}]
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/completions": {"prompt": "ab", "max_tokens": 4},
    "/v1/responses": {"input": "ab", "max_output_tokens": 4},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [1, 2]},
}
RAW = [
    b"GET /nowhere HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 9\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
    b"\r\n" * 50,
    b"A" * 70_000,
]


def made_of_the_document(url: str, method: str, path: str, model: str, count: int, *, fresh: bool) -> Counter[int]:
    """Send `count` requests of one operation, sound by its schema and not; the answers by status.

    A third is as the schema makes it, a third has the needed fields and few others, a third is a sound request in which
    some fields are replaced by what the schema makes. `fresh`: other requests each time. Raises AssertionError for an
    answer that the document does not know.
    """
    with httpx2.Client(base_url=url, timeout=60) as client:
        document = client.get("/openapi.json").json()
        operation = document["paths"][path][method.lower()]
        strategy = schemathesis.openapi.from_dict(document)[path][method].as_strategy()
        seen = Counter[int]()

        @settings(
            max_examples=count - 1,
            deadline=None,
            database=None,
            derandomize=not fresh,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy, seed=st.integers(0, 2**32))
        def ask(case: schemathesis.Case, seed: int) -> None:
            if method == "GET":
                answer = client.get(case.formatted_path, params=case.query)
            else:
                body = case.body
                if isinstance(body, dict):
                    body = _likelier(body, SOUND[path], _needed(document, operation), model, Random(seed))
                answer = client.post(path, json=body)
            seen[answer.status_code] += 1
            _check(answer)
            assert str(answer.status_code) in operation["responses"] or answer.status_code in (404, 405), answer.text

        ask()
        sound = SOUND[path] | {"model": model} if path in SOUND else None
        while seen.total() < count:  # at least one; more where there is little to make, such as no parameters at all
            answer = client.request(method, path.replace("{name}", model), json=sound)
            assert answer.status_code == 200, answer.text
            seen[200] += 1
    return seen


def _likelier(
    body: dict[str, Any], sound: dict[str, Any], needed: list[str], model: str, rng: Random
) -> dict[str, Any]:
    """The body, or one that is more likely to reach the engine."""
    kind = rng.randrange(3)
    if kind == 1:
        body = {key: value for key, value in body.items() if key in needed or rng.random() < 0.1}
    if kind == 2:
        others = [key for key in body if key not in ("model", *sound)] or list(body)
        body = sound | {key: body[key] for key in rng.sample(others, min(len(others), rng.randint(0, 2)))}
    return body | {"model": model} if kind or rng.random() < 0.5 else body


def _needed(document: Any, operation: Any) -> list[str]:
    reference: str = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    needed: list[str] = document["components"]["schemas"][reference.rpartition("/")[2]].get("required", [])
    return needed


def _check(answer: httpx2.Response) -> None:
    assert answer.status_code in STATUSES, (answer.request.url, answer.request.content, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, answer.text


def bent(url: str, model: str, count: int, seed: int) -> Counter[int]:
    """Send `count` sound bodies in which bytes were changed, cut out or doubled; the answers by status."""
    rng, seen = Random(seed), Counter[int]()
    changes: list[Callable[[bytearray, int], None]] = [
        lambda raw, at: raw.__setitem__(at, rng.randrange(256)),
        lambda raw, at: raw.__delitem__(slice(at, at + rng.randint(1, 9))),
        lambda raw, at: raw.__setitem__(slice(at, at), raw[at : at + rng.randint(1, 9)] * rng.randint(1, 99)),
    ]
    with httpx2.Client(base_url=url, timeout=60, headers={"Content-Type": "application/json"}) as client:
        for _ in range(count):
            path = rng.choice(list(SOUND))
            raw = bytearray(json.dumps(SOUND[path] | {"model": model}).encode())
            for _ in range(rng.randint(1, 3)):
                rng.choice(changes)(raw, rng.randrange(len(raw)))
            answer = client.post(path, content=bytes(raw))
            seen[answer.status_code] += 1
            _check(answer)
    return seen


def noise(port: int, count: int, seed: int) -> Counter[str]:
    """Send `count` times bytes that are no HTTP, each on its own connection; `refused` (4xx) and `closed` ones."""
    rng, seen = Random(seed), Counter[str]()
    for raw in RAW + [rng.randbytes(rng.randint(1, 200)) for _ in range(max(0, count - len(RAW)))]:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            try:
                connection.sendall(raw)
                connection.shutdown(socket.SHUT_WR)
                said = connection.recv(1 << 16)
            except ConnectionError:
                said = b""
        assert not said or said.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), (raw[:60], said[:60])
        seen["refused" if said else "closed"] += 1
    return seen
