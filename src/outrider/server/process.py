"""The server as a process: its socket, and what the signals do.

The first SIGTERM or SIGINT begins the end: new requests get 503, running texts may finish for a while and are then cut
with a proper last chunk. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from outrider.server.desk import Desk
from outrider.server.settings import SettingsError

__all__ = ["listen", "serve"]

log = logging.getLogger("outrider.server")

# A thread that has Python code to run waits at most this long for another one's. The engine's thread and the event
# loop's take turns; with CPython's 5 ms a step of 2 ms could take 7.
_SWITCH_SECONDS = 0.0005


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address, before any model is loaded. Raises SettingsError if it cannot be had.

    asyncio sends small packets at once (TCP_NODELAY) only on sockets that name their protocol; without it a chunk of a
    stream waits until the client's system has acknowledged the one before, up to 40 ms.
    """
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError:
            found.close()
            raise
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        way_out = "; give another --port, or 0 for a free one" if taken else ""
        raise SettingsError(
            f"--host, --port: cannot listen at {host}:{port}: {error.strerror or error}{way_out}"
        ) from None
    return found


def serve(app: FastAPI, desk: Desk, listener: socket.socket) -> None:
    """Serve until a signal says to end. Returns when all is closed."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=15,
        ws="none",
    )
    _Server(config, desk).run(sockets=[listener])
    log.info("ended")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, desk: Desk) -> None:
        super().__init__(config)
        self._desk = desk
        self._ending: asyncio.Task[None] | None = None
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections, and only then say where."""
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            log.info("serving %s at http://%s:%d/v1", self._desk.name, shown, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Runs between two bytecodes of the main thread, as signal handlers do."""
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + sig)
        log.info("%s: take no more requests, and end the running ones", signal.Signals(sig).name)
        asyncio.get_running_loop().call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        await self._desk.drain()
        self.should_exit = True
