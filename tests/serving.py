"""A server over a tiny model on a free port of this machine, in a thread of the test. For the tests of the server."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI
from openai import OpenAI

from outrider import Engine
from outrider.engine.transitions import Figures
from outrider.models.chat_template import ChatTemplate
from outrider.server.app import create_app
from outrider.server.process import listen
from outrider.server.service import Service
from outrider.server.settings import Settings
from rigs import Rig, files, loaded
from tiny import tiny_model

MODEL = "tiny"
RIG = Rig("native", "fp32", cache_tokens=8192)
OFFERED = ("none", "ngram", "suffix", "prediction", "junk")


@dataclass
class Running:
    """A server that answers. `client` is OpenAI's own."""

    url: str
    service: Service
    engine: Engine
    client: OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="key-of-the-tests", max_retries=0, timeout=60)


def tiny_engine(
    rig: Rig = RIG,
    *,
    vocabulary: int = 97,
    drafter: str = "ngram",
    template: str | None = None,
    **settings: Any,
) -> Engine:
    """An engine over a tiny model; from 257 tokens on its texts have every byte, so also half characters."""
    model = files() if vocabulary == 97 and template is None else tiny_model(vocabulary=vocabulary, context=2048)
    if template is not None:
        model.tokenizer.template = ChatTemplate(template, {})
    return Engine.from_loaded(loaded(model, rig), drafter=drafter, **settings)


@contextmanager
def serving(engine: Engine | None = None, **settings: Any) -> Iterator[Running]:
    """A server for the time of the block. `settings` are fields of `Settings`."""
    engine = engine or tiny_engine()
    app, service = create_app(engine, Settings(**{"names": (MODEL,), "drafters": OFFERED, **settings}))
    with hosted(app) as url:
        running = Running(url, service, engine)
        with running.client:
            yield running


@contextmanager
def hosted(app: FastAPI) -> Iterator[str]:
    """The application at a free port, which is told, for the time of the block."""
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5, ws="none")
    )
    listener = listen("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # so that a slow reader shows soon
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def change_modes(engine: Engine, count: int) -> None:
    """Let an idle engine tell of so many changes of mode, as its controller does."""
    for number in range(count):
        engine._transitions.change("ngram", "speculative" if number % 2 else "plain", "load", number, 1, Figures())


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for something that happens by itself; fails if it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def settled(running: Running) -> None:
    """Everything is back where it was: no job, no page, no text."""
    pages = running.engine.runner.pages
    wait_until(lambda: not running.engine.busy and not running.service._jobs and pages.free == pages.count)
    pages.check_integrity()
