"""The model that is served here: its engine in a thread of its own, behind the desk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, TypeVar

from starlette.requests import Request

from outrider.core.params import ParameterError, SamplingParams
from outrider.core.sampling import DrawError
from outrider.engine.engine import Engine, Prompt
from outrider.server.desk import VERSION, Desk, visit_of
from outrider.server.engine_thread import EngineFaultError, EngineThread, Job, NeverBegunError, Work
from outrider.server.errors import ApiError, of_draw, of_refusal
from outrider.server.history import History
from outrider.server.metrics import EngineState, Metrics
from outrider.server.recorder import Recorder, identity
from outrider.server.settings import Settings

__all__ = ["Service"]

T = TypeVar("T")


class Service(Desk):
    """One model behind one door. Belongs to the event loop."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        super().__init__(settings)
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self._state = EngineState(self.name, engine, VERSION)
        self.metrics = Metrics(self.name, self._state)
        self.history = History(engine) if settings.dashboard else None
        self.thread = EngineThread(engine, [self.metrics, *([self.history] if self.history else [])])
        self.recorder = None
        if settings.auditing is not None:
            decode = self.tokenizer.decode if settings.auditing.with_text else None
            self.recorder = Recorder(settings.auditing, self.name, engine, lambda: identity(engine), decode)
            self.metrics.registry.register(self.recorder)
        self._sampling: asyncio.Task[None] | None = None

    @property
    def fault(self) -> str | None:
        return None if self.thread.alive else "the engine has ended"

    @property
    def places(self) -> int:
        return self.engine.batch_size

    @property
    def context(self) -> int:
        pages = self.engine.pages
        return min(self.engine.config.context, pages.count * pages.page_size)

    @property
    def root(self) -> str:
        return self.engine.files.name

    @property
    def chats(self) -> bool:
        return self.tokenizer.template is not None

    @property
    def own_drafter(self) -> str:
        return self.engine.default_drafter

    def ready(self, params: list[SamplingParams]) -> list[SamplingParams]:
        """The parameters, their grammar compiled. Runs in any thread. Raises ParameterError."""
        if params[0].grammar is not None:
            self.engine.grammars.compile(params[0].grammar)
        return params

    async def refusing(self, names: Mapping[str, str], function: Callable[[], T]) -> T:
        """Run what is not the event loop's (templates, tokenizing, grammars) beside it; its refusals become 400."""
        try:
            return await asyncio.to_thread(function)
        except ValueError as error:
            raise of_refusal(error, names) from None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]) -> list[int]:
        """The tokens of a conversation's prompt. `extra` are the template's own variables. Runs in any thread."""
        return self.tokenizer.chat(messages, variables=extra)

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

    @asynccontextmanager
    async def job(self, request: Request, works: Sequence[Work], names: Mapping[str, str]) -> AsyncIterator[Job]:
        """The texts of a request, admitted by the engine; cancelled when the block is left, however that happens."""
        visit = visit_of(request)
        self.check_room(len(works), visit.key)
        job = self.thread.submit(works)
        with self.listed(visit, job):
            try:
                try:
                    await job.admitted()
                except ValueError as error:
                    raise of_refusal(error, names) from None
                yield job
            except DrawError as error:
                raise of_draw(error) from None
            except NeverBegunError:
                raise self.never_begun() from None
            except EngineFaultError:
                raise ApiError(500, "the engine failed at this request; it is in the server's log") from None

    async def start(self) -> None:
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

    async def metrics_page(self) -> bytes:
        if not self.thread.alive:
            raise ApiError(503, "the engine has ended")
        self._state.memory = await self.thread.ask(lambda engine: engine.memory())
        return self.metrics.render()
