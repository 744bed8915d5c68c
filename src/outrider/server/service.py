"""What all routes share: the model, the engine's thread, and the door with its limits."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from hashlib import sha256
from importlib.metadata import version
from typing import Any, TypeVar

from starlette.requests import Request

from outrider.core.params import ParameterError, SamplingParams
from outrider.core.sampling import DrawError
from outrider.engine.engine import Engine, Prompt
from outrider.engine.results import Result
from outrider.server.body import SamplingFields
from outrider.server.engine_thread import EngineFaultError, EngineThread, Job, NeverBegunError, Work
from outrider.server.errors import ApiError, of_draw, of_refusal
from outrider.server.history import History
from outrider.server.metrics import Metrics
from outrider.server.recorder import Recorder
from outrider.server.settings import Settings
from outrider.server.tracing import Tracing
from outrider.server.visit import Visit

__all__ = ["VERSION", "Service", "visit_of"]

T = TypeVar("T")
VERSION = version("outrider")
log = logging.getLogger("outrider.server")


def visit_of(request: Request) -> Visit:
    visit: Visit = request.state.visit
    return visit


class Service:
    """One model behind one door. Belongs to the event loop."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.tokenizer = engine.tokenizer
        self.name = settings.names[0]
        self.created = int(time.time())
        self.fingerprint = ""  # of weights and code, known once the model's file was read
        self.metrics = Metrics(self.name, engine, VERSION)
        self.history = History(engine) if settings.dashboard else None
        self.thread = EngineThread(engine, [self.metrics, *([self.history] if self.history else [])])
        self.weights: list[dict[str, str]] = []  # role, name and SHA-256, known once the files were read
        self._sampling: asyncio.Task[None] | None = None
        self.tracing = Tracing.from_environment(os.environ, self.name)
        self.recorder = None if settings.auditing is None else Recorder(settings.auditing, self.name, engine)
        if self.recorder is not None:
            self.metrics.registry.register(self.recorder)
        self.draining = False
        self._jobs: set[Job] = set()
        self._by_key: Counter[str | None] = Counter()
        self._seconds = 1.0  # that a request takes, lately
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def jobs(self) -> Set[Job]:
        """The requests that run or wait."""
        return self._jobs

    @property
    def context(self) -> int:
        """Tokens that a text may have in all."""
        pages = self.engine.runner.pages
        return min(self.engine.config.context, pages.count * pages.page_size)

    def check_request(self, body: SamplingFields, request: Request) -> None:
        """404 for a model that is not served here, 400 for a drafter that is not offered."""
        self.check_model(body.model)
        if body.speculation is not None:
            self._check_drafter(body.speculation.drafter)
        record = visit_of(request).record
        record["stream"] = bool(body.stream)
        if body.user is not None:
            record["user"] = body.user[:256]

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

    def ready(self, params: list[SamplingParams]) -> list[SamplingParams]:
        """The parameters, their grammar compiled. Runs in any thread. Raises ParameterError."""
        if params[0].grammar is not None:
            self.engine.grammars.compile(params[0].grammar)
        return params

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

    async def refusing(self, names: Mapping[str, str], function: Callable[[], T]) -> T:
        """Run what is not the event loop's (templates, tokenizing, grammars) beside it; its refusals become 400."""
        try:
            return await asyncio.to_thread(function)
        except ValueError as error:
            raise of_refusal(error, names) from None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> list[int]:
        """The tokens of a conversation's prompt. `extra` are the template's own variables. Runs in any thread."""
        return self.tokenizer.chat(messages, **extra)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens, within the limits. Runs in any thread."""
        return self.check_prompt(self.engine.encode(prompt))

    def check_prompt(self, tokens: list[int]) -> list[int]:
        """The tokens, or ParameterError if there are too many."""
        most = self.settings.limits.prompt_tokens
        if most is not None and len(tokens) > most:
            raise ParameterError("prompt", f"{len(tokens):,} tokens are more than the {most:,} allowed here")
        if len(tokens) >= self.context:
            raise ParameterError("prompt", f"{len(tokens):,} tokens leave no room in the context of {self.context:,}")
        return tokens

    # -- the door ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def job(self, request: Request, works: Sequence[Work], names: Mapping[str, str]) -> AsyncIterator[Job]:
        """The texts of a request, admitted by the engine; cancelled when the block is left, however that happens."""
        visit = visit_of(request)
        self._check_room(len(works), visit.key)
        job = visit.job = self.thread.submit(works)
        timer = asyncio.get_running_loop().call_later(self.settings.limits.request_seconds, job.cut)
        self._jobs.add(job)
        self._by_key[visit.key] += 1
        self._idle.clear()
        try:
            try:
                await job.admitted()
            except ValueError as error:
                raise of_refusal(error, names) from None
            yield job
        except DrawError as error:
            raise of_draw(error) from None
        except NeverBegunError:
            patience = self.patience()
            message = "the request waited too long for its turn" if not self.draining else "the server is shutting down"
            raise ApiError(503, message, code="timeout", retry_after=patience) from None
        except EngineFaultError:
            raise ApiError(500, "the engine failed at this request; it is in the server's log") from None
        finally:
            timer.cancel()
            job.close()
            self._jobs.discard(job)
            self._by_key[visit.key] -= 1
            self._seconds += 0.2 * (time.perf_counter() - job.submitted - self._seconds)
            visit.record |= _record(job)
            if not self._jobs:
                self._idle.set()

    def _check_room(self, texts: int, key: str | None) -> None:
        limits = self.settings.limits
        if not self.thread.alive:
            raise ApiError(503, "the engine has ended", code="engine_ended")
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
        if there + texts > self.engine.batch_size + limits.queue:
            raise ApiError(
                429,
                f"the queue is full: {there} texts are in work or wait",
                code="queue_full",
                retry_after=self.patience(),
            )

    def patience(self) -> int:
        """Seconds after which a refused client may come again: about what a request takes now."""
        return min(60, max(1, math.ceil(self._seconds)))

    async def start(self) -> None:
        """Begin to serve. Call from the event loop."""
        digest = await asyncio.to_thread(self.engine.files.digest)
        self.fingerprint = "fp_" + sha256(f"{digest} {VERSION}".encode()).hexdigest()[:16]
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.start, self.settings)
        self.weights = await asyncio.to_thread(self._read_weights, digest)
        self.thread.start()
        if self.history is not None:
            self._sampling = asyncio.create_task(self.history.keep())

    def _read_weights(self, target: str) -> list[dict[str, str]]:
        """Of the target and of each loaded drafter. Runs in any thread."""
        out = [{"role": "target", "name": self.engine.files.name, "sha256": target}]
        for drafter in self.engine.drafters:
            weights = self.engine.provenance(drafter)["weights"]
            out += [{"role": drafter, "name": name, "sha256": digest} for name, digest in weights.items()]
        return out

    async def stop(self) -> None:
        """End the engine's thread, and send what waits to be sent."""
        if self._sampling is not None:
            self._sampling.cancel()
        await self.thread.stop()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.stop)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    async def drain(self) -> None:
        """Take no more requests; wait for those that run, and cut them when their time is up."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), self.settings.limits.drain_seconds)
        except TimeoutError:
            log.warning("cut the texts that still run", extra={"requests": len(self._jobs)})
            for job in list(self._jobs):
                job.cut()


def _record(job: Job) -> dict[str, object]:
    done = [result for result in job.results if result is not None]
    return {
        "texts": len(job.works),
        "prompt_tokens": sum(len(work.tokens) for work in job.works),
        "cached_tokens": sum(result.usage.cached_tokens for result in done),
        "completion_tokens": sum(result.usage.completion_tokens for result in done),
        "drafted": sum(step.drafted for result in done for step in result.steps),
        "accepted": sum(step.accepted for result in done for step in result.steps),
        "drafters": sorted({result.drafter for result in done}),
        "drafter_errors": sorted({result.drafter_error for result in done if result.drafter_error}),
        "finish_reasons": [_reason(result) for result in job.results],
        "seconds": round(time.perf_counter() - job.submitted, 4),
    }


def _reason(result: Result | None) -> str:
    return "cancelled" if result is None else result.finish_reason
