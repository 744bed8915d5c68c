"""vLLM's servers as child processes: started, watched, started anew when they die, and ended with us."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from outrider.scale.upstream import Address, Pool

__all__ = ["Child", "FlagError", "Supervisor", "free_port", "vllm_command"]

log = logging.getLogger("outrider.scale")

_OURS = ("--host", "--port", "--served-model-name", "--speculative-config", "--api-key", "--uds")
_PAUSES = (1.0, 2.0, 5.0, 15.0, 60.0)  # seconds before a server is started again, growing with each time
_LASTING = 300.0  # seconds after which a server's death is its first again
_LOOK = 0.2  # seconds between two looks at whether it runs
_END = 20.0  # seconds that a server gets to end


class FlagError(ValueError):
    """A flag for vLLM that cannot be passed on: names it and the way out."""


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def vllm_command(
    program: Sequence[str], model: str, port: int, flags: Sequence[str], speculative: str | None
) -> tuple[str, ...]:
    """The command of one server. `flags` are vLLM's own; `speculative` its JSON. Raises FlagError."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name in _OURS:
            way_out = "give it before the --" if name == "--speculative-config" else "it is set here"
            raise FlagError(f"-- {name}: {way_out}")
    drafting = [] if speculative is None else ["--speculative-config", speculative]
    return (*program, "serve", model, "--host", "127.0.0.1", "--port", str(port), *drafting, *flags)


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One server to run."""

    command: Sequence[str]
    port: int
    pool: Pool
    weights: tuple[Mapping[str, str], ...] = ()  # role, name and sha256 of what it loads, if its files were read

    @property
    def address(self) -> Address:
        return Address(f"127.0.0.1:{self.port}", f"http://127.0.0.1:{self.port}", self.pool, weights=self.weights)


class Supervisor:
    """Keeps servers running. Belongs to the event loop."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = tuple(children)
        self.restarts = 0
        self._processes: dict[Child, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []

    def pid(self, child: Child) -> int | None:
        """Of its process, while there is one."""
        process = self._processes.get(child)
        return None if process is None else process.pid

    async def start(self) -> None:
        """Start all; whether they answer yet is for the health checks to see."""
        self._keepers = [asyncio.create_task(self._keep(child)) for child in self.children]

    async def stop(self) -> None:
        """End all, with everything that they started."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, child: Child) -> None:
        deaths = 0
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            said = await self._run(child)
            deaths = 1 if clock() - began > _LASTING else deaths + 1
            pause = _PAUSES[min(deaths, len(_PAUSES)) - 1]
            self.restarts += 1
            fields = {"port": child.port, "pool": child.pool, "restarts": self.restarts}
            log.error("a server ended (%s); again in %g s", said, pause, extra={"fields": fields})
            await asyncio.sleep(pause)

    async def _run(self, child: Child) -> str:
        """Run it to its end. Returns what it said last."""
        try:
            process = await asyncio.create_subprocess_exec(
                *child.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # it starts processes of its own, which are to end with it
            )
        except OSError as error:
            return f"cannot start {child.command[0]}: {error.strerror or error}"
        self._processes[child] = process
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=3)
        following = asyncio.create_task(_follow(process.stdout, child, last))
        try:
            # `Process.wait` waits for the end of its output too, which processes that it started may keep open
            while process.returncode is None:
                await asyncio.sleep(_LOOK)
            code = process.returncode
        finally:
            await asyncio.shield(_end(process))
            self._processes.pop(child, None)
            await asyncio.wait({following}, timeout=_END)
            following.cancel()
        return f"exit code {code}: {' | '.join(last)}"


async def _follow(output: asyncio.StreamReader, child: Child, last: deque[str]) -> None:
    """Log what a server says until it says no more; the latest lines go into `last`."""
    while True:
        try:
            line = await output.readline()
        except ValueError:  # longer than the buffer
            continue
        if not line:
            return
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            last.append(text[-300:])
            log.debug("%s", text, extra={"fields": {"port": child.port}})


async def _end(process: asyncio.subprocess.Process) -> None:
    """The process and its whole group."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sig)
        try:
            await asyncio.wait_for(process.wait(), _END)
        except TimeoutError:
            continue
        with suppress(ProcessLookupError):  # what it left behind
            os.killpg(process.pid, signal.SIGKILL)
        return
