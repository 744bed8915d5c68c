"""What every request meets behind the door, whoever writes the texts: names, limits, the list of what runs, the end."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager
from importlib.metadata import version

from starlette.requests import Request

from outrider.core.params import ParameterError
from outrider.engine.results import Result
from outrider.server.body import SamplingFields
from outrider.server.errors import ApiError
from outrider.server.history import History
from outrider.server.metrics import Metrics
from outrider.server.recorder import Recorder
from outrider.server.settings import Settings
from outrider.server.texts import Texts
from outrider.server.tracing import Tracing
from outrider.server.visit import Visit

__all__ = ["VERSION", "Desk", "visit_of"]

VERSION = version("outrider")
log = logging.getLogger("outrider.server")


def visit_of(request: Request) -> Visit:
    visit: Visit = request.state.visit
    return visit


class Desk(ABC):
    """One model under its names. Belongs to the event loop. Who writes the texts is the subclass's."""

    fault_code = "engine_ended"  # of the answer where there is a fault
    metrics: Metrics
    history: History | None
    recorder: Recorder | None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = settings.names[0]
        self.created = int(time.time())
        self.fingerprint = ""  # of weights and code, once known
        self.weights: list[dict[str, str]] = []  # role, name and SHA-256, once known
        self.tracing = Tracing.from_environment(os.environ, self.name)
        self.draining = False
        self._jobs: set[Texts] = set()
        self._by_key: Counter[str | None] = Counter()
        self._seconds = 1.0  # that a request takes, lately
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    @abstractmethod
    def fault(self) -> str | None:
        """Why no text can be written; None if it can."""

    @property
    @abstractmethod
    def places(self) -> int:
        """Texts at once; the rest waits."""

    @property
    @abstractmethod
    def context(self) -> int:
        """Tokens that a text may have in all."""

    @property
    @abstractmethod
    def root(self) -> str:
        """The model's own name."""

    @property
    @abstractmethod
    def chats(self) -> bool:
        """Whether there is a chat template."""

    @property
    @abstractmethod
    def own_drafter(self) -> str:
        """The one that requests get without asking."""

    @abstractmethod
    async def start(self) -> None:
        """Begin to serve. Call from the event loop."""

    @abstractmethod
    async def stop(self) -> None:
        """Call when nothing runs any more."""

    @abstractmethod
    async def metrics_page(self) -> bytes:
        """For Prometheus. Raises ApiError."""

    @property
    def jobs(self) -> Set[Texts]:
        """The requests that run or wait."""
        return self._jobs

    # -- what is refused -----------------------------------------------------------------------------------------

    def check_request(self, body: SamplingFields, request: Request) -> None:
        """404 for a model that is not served here, 400 for a drafter that is not offered."""
        self.check_model(body.model)
        if body.speculation is not None:
            self._check_drafter(body.speculation.drafter)
        record = visit_of(request).record
        record["stream"] = bool(body.stream)
        if body.user is not None:
            record["user"] = body.user[:256]

    def check_model(self, name: str) -> None:
        """404 for a model that is not served here."""
        if name not in self.settings.names:
            known = ", ".join(self.settings.names)
            raise ApiError(
                404,
                f"the model {name!r} is not served here; there is {known}",
                parameter="model",
                code="model_not_found",
            )

    def _check_drafter(self, name: str | None) -> None:
        if name is not None and name not in self.settings.drafters:
            known = ", ".join(self.settings.drafters)
            raise ApiError(
                400,
                f"speculation.drafter: {name!r} is not offered here; there are {known}",
                parameter="speculation.drafter",
            )

    def check_count(self, texts: int) -> None:
        """Raise ParameterError for more texts in one request than are allowed."""
        most = self.settings.limits.choices
        if texts > most:
            raise ParameterError("n", f"{texts:,} texts in one request, and {most:,} are allowed")

    def limit_output(self, wanted: int | None, default: int) -> int:
        """The text's `max_tokens`, within the operator's limit. Raises ParameterError."""
        most = self.settings.limits.output_tokens
        if wanted is None:
            return default if most is None else min(default, most)
        if most is not None and wanted > most:
            raise ParameterError("max_tokens", f"{wanted:,} is more than the {most:,} allowed here")
        return wanted

    def check_room(self, texts: int, key: str | None) -> None:
        """Raise ApiError where so many more texts of the key cannot be taken now."""
        limits = self.settings.limits
        if self.fault is not None:
            raise ApiError(503, self.fault, code=self.fault_code, retry_after=self.patience())
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=self.patience())
        if self.recorder is not None and self.recorder.refusal is not None:
            raise ApiError(
                503,
                f"nothing is served while the ledger cannot be written: {self.recorder.refusal}",
                code="ledger_failed",
                retry_after=self.patience(),
            )
        most = limits.requests_per_key
        if most is not None and self._by_key[key] >= most:
            raise ApiError(
                429,
                f"this key has {most} requests running, which is all it may",
                code="concurrency",
                retry_after=self.patience(),
            )
        there = sum(job.open for job in self._jobs)
        if there + texts > self.places + limits.queue:
            raise ApiError(
                429,
                f"the queue is full: {there} texts are in work or wait",
                code="queue_full",
                retry_after=self.patience(),
            )

    def patience(self) -> int:
        """Seconds after which a refused client may come again: about what a request takes now."""
        return min(60, max(1, math.ceil(self._seconds)))

    # -- what runs -----------------------------------------------------------------------------------------------

    @contextmanager
    def listed(self, visit: Visit, job: Texts) -> Iterator[None]:
        """The request runs, for the time of the block; cut when its time is up, closed when the block is left."""
        visit.job = job
        timer = asyncio.get_running_loop().call_later(self.settings.limits.request_seconds, job.cut)
        self._jobs.add(job)
        self._by_key[visit.key] += 1
        self._idle.clear()
        try:
            yield
        finally:
            timer.cancel()
            job.close()
            self._jobs.discard(job)
            self._by_key[visit.key] -= 1
            self._seconds += 0.2 * (time.perf_counter() - job.submitted - self._seconds)
            visit.record |= _record(job)
            if not self._jobs:
                self._idle.set()

    def never_begun(self) -> ApiError:
        """The answer to a request that was cut before it had a token."""
        message = "the request waited too long for its turn" if not self.draining else "the server is shutting down"
        return ApiError(503, message, code="timeout", retry_after=self.patience())

    async def drain(self) -> None:
        """Take no more requests; wait for those that run, and cut them when their time is up."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), self.settings.limits.drain_seconds)
        except TimeoutError:
            log.warning("cut the texts that still run", extra={"requests": len(self._jobs)})
            for job in list(self._jobs):
                job.cut()


def _record(job: Texts) -> dict[str, object]:
    done = [result for result in job.results if result is not None]
    return {
        "texts": len(job.works),
        "prompt_tokens": job.prompt_tokens,
        "cached_tokens": sum(result.usage.cached_tokens for result in done),
        "completion_tokens": sum(result.usage.completion_tokens for result in done),
        "drafted": sum(step.drafted for result in done for step in result.steps),
        "accepted": sum(step.accepted for result in done for step in result.steps),
        "drafters": sorted({result.drafter for result in done}),
        "drafter_errors": sorted({result.drafter_error for result in done if result.drafter_error}),
        "finish_reasons": [_reason(result) for result in job.results],
        "seconds": round(time.perf_counter() - job.submitted, 4),
        **job.origin,
    }


def _reason(result: Result | None) -> str:
    return "cancelled" if result is None else result.finish_reason
