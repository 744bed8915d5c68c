"""The front: the same door, desk and API as over our own engine, and other servers behind them.

What a client sends is checked here, by the same forms, and passed on as it came; what an upstream answers passes back
as it came. Templates, tokens and grammars are the upstream's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from hashlib import sha256
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.core.params import ParameterError, SamplingParams
from outrider.engine.speculation import Speculation
from outrider.scale.fleet import Fleet, FleetState
from outrider.scale.passage import Passage
from outrider.scale.router import Ask, prefixes_of, weight_of
from outrider.scale.supervise import Supervisor
from outrider.scale.upstream import Upstream
from outrider.server.answers import EventStream, unless_gone
from outrider.server.app import assemble
from outrider.server.body import SamplingFields, names
from outrider.server.chat import UNLIMITED, ChatRequest, rendered
from outrider.server.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from outrider.server.desk import VERSION, Desk, visit_of
from outrider.server.engine_thread import NeverBegunError, Work
from outrider.server.errors import ERRORS, of_refusal
from outrider.server.history import History
from outrider.server.metrics import Metrics
from outrider.server.recorder import Recorder
from outrider.server.settings import Settings
from outrider.server.tokens import DetokenizeRequest, TokenizeRequest
from outrider.server.tools import check_tools

__all__ = ["Front", "create_front"]

_CHECK_SECONDS = 2.0  # between two looks at an upstream
_TEXT = "tools"  # stands for a template that knows of tools: whether the upstream's does, it says itself


def create_front(fleet: Fleet, settings: Settings, supervisor: Supervisor | None = None) -> tuple[FastAPI, Front]:
    """The application over upstreams, which belong to it from now on, and its desk. `supervisor` keeps them running."""
    front = Front(fleet, settings, supervisor)
    return assemble(front, [_router(front)]), front


class Front(Desk):
    """Other servers behind one door. Belongs to the event loop."""

    fault_code = "no_upstream"

    def __init__(self, fleet: Fleet, settings: Settings, supervisor: Supervisor | None = None) -> None:
        super().__init__(settings)
        self.fleet, self.supervisor = fleet, supervisor
        self.metrics = Metrics(self.name, FleetState(self.name, fleet, VERSION))
        self.history = History(fleet) if settings.dashboard else None
        for watcher in (self.metrics, self.history):
            if watcher is not None:
                fleet.watched_by(watcher)
        self.recorder = None
        if settings.auditing is not None:
            self.recorder = Recorder(settings.auditing, self.name, fleet, self._identity, None)
            self.metrics.registry.register(self.recorder)
        fleet.changed = self._changed
        self._recording = False  # the first row of a run says who was there
        self._sampling: asyncio.Task[None] | None = None

    @property
    def fault(self) -> str | None:
        return None if self.fleet.up else "no server that could write texts is up"

    @property
    def places(self) -> int:
        return self.fleet.batch_size

    @property
    def context(self) -> int:
        """The least that an upstream tells; 0 if none does."""
        told = [upstream.about.context for upstream in self.fleet.upstreams if upstream.about is not None]
        return min((context for context in told if context is not None), default=0)

    @property
    def root(self) -> str:
        return next((upstream.about.root for upstream in self.fleet.upstreams if upstream.about), self.name)

    @property
    def chats(self) -> bool:
        return True

    @property
    def own_drafter(self) -> str:
        return self.fleet.default_drafter

    @property
    def native(self) -> bool:
        """Whether all upstreams that are known are other Outriders, which take what is ours alone."""
        known = [upstream.about for upstream in self.fleet.upstreams if upstream.about is not None]
        return bool(known) and all(about.kind == "outrider" for about in known)

    async def start(self) -> None:
        if self.supervisor is not None:
            await self.supervisor.start()
        await self.fleet.start(_CHECK_SECONDS)
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.start, self.settings)
            self._recording = True
        if self.history is not None:
            self._sampling = asyncio.create_task(self.history.keep())

    async def stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
        await self.fleet.stop()
        if self.supervisor is not None:
            await self.supervisor.stop()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.stop)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    async def metrics_page(self) -> bytes:
        return self.metrics.render()

    def _identity(self) -> Mapping[str, Any]:
        return {"name": self.root, "upstreams": [self.fleet.told(upstream) for upstream in self.fleet.upstreams]}

    def _changed(self, upstream: Upstream) -> None:
        """An upstream came, went, or came back as something else: the ledger has to know who writes."""
        self.weights = [
            {"role": f"{entry['role']} of {other.name}", "name": entry["name"], "sha256": entry["sha256"]}
            for other in self.fleet.upstreams
            for entry in (other.about.weights if other.about else ())
        ]
        told = [self.fleet.told(other)["about"] for other in self.fleet.upstreams]
        self.fingerprint = "fp_" + sha256(json.dumps([VERSION, told], sort_keys=True).encode()).hexdigest()[:16]
        if self.recorder is not None and self._recording:
            self.recorder.tell("upstream", self.fleet.told(upstream))

    # -- what is refused, and what is asked for --------------------------------------------------------------------

    def ask(self, body: SamplingFields, given: dict[str, Any], path: str, texts: int, size: int) -> Ask:
        """What the upstreams are asked. `given`: the body as it came. Raises ParameterError."""
        for name in ("speculation", "prediction"):
            if given.get(name) is None:
                given.pop(name, None)
        plain = self._check_speculation(body, given)
        if given.get("temperature") is None:
            given["temperature"] = 1.0  # whatever the upstream's default is
        if body.stream:
            given["stream_options"] = {"include_usage": True}
        return Ask(
            path=path,
            body=given,
            texts=texts,
            weight=weight_of(given, texts, size),
            prefixes=prefixes_of(given),
            with_usage=body.include_usage,
            plain=plain,
        )

    def _check_drafter(self, name: str | None) -> None:
        """Other Outriders refuse by themselves what they do not offer; `_check_speculation` refuses it for the rest."""

    def _check_speculation(self, body: SamplingFields, given: dict[str, Any]) -> bool:
        """Whether the client wants plain decoding. Takes out what no upstream is to see."""
        wanted = body.speculation
        if self.native:
            return wanted is not None and not wanted.enabled
        if body.prediction is not None:
            raise ParameterError("prediction", "the servers behind this one cannot use it; leave it out")
        if wanted is None:
            return False
        for name in ("drafter", "max_draft_tokens", "verify"):
            if getattr(wanted, name) is not None:
                raise ParameterError(f"speculation.{name}", "the servers behind this one leave no choice; leave it out")
        if wanted.trace:
            raise ParameterError("speculation.trace", "the servers behind this one do not tell it; leave it out")
        if not wanted.enabled and not any(upstream.pool == "plain" for upstream in self.fleet.upstreams):
            raise ParameterError("speculation.enabled", "no server behind this one decodes plainly")
        del given["speculation"]
        return not wanted.enabled

    @contextmanager
    def passage(self, request: Request, ask: Ask, params: Sequence[SamplingParams]) -> Iterator[Passage]:
        """The texts of a request, on their way for the time of the block."""
        visit = visit_of(request)
        self.check_room(ask.texts, visit.key)
        headers = {"X-Request-Id": visit.id}
        if "traceparent" in request.headers:
            headers["traceparent"] = request.headers["traceparent"]
        works = [Work((), each, Speculation(enabled=not ask.plain)) for each in params]
        passage = Passage(ask, works, self.fleet, name=ask.body["model"], headers=headers)
        self.fleet.passages.add(passage)
        try:
            with self.listed(visit, passage):
                try:
                    yield passage
                except NeverBegunError:
                    raise self.never_begun() from None
        finally:
            self.fleet.passages.discard(passage)


def _router(front: Front) -> APIRouter:
    routes = APIRouter()

    async def answer(
        body: SamplingFields, request: Request, path: str, params: Callable[[], list[SamplingParams]], **name: str
    ) -> Response:
        front.check_request(body, request)
        given = await request.json()
        try:
            each = params()
            if each[0].max_tokens != UNLIMITED and given.get("max_completion_tokens") is None:
                given["max_tokens"] = each[0].max_tokens  # the limit, or the default, is ours
            ask = front.ask(body, given, path, len(each), len(await request.body()))
        except ValueError as error:
            raise of_refusal(error, names(body, **name)) from None

        async def events() -> AsyncGenerator[bytes, None]:
            with front.passage(request, ask, each) as passage:
                async with aclosing(passage.stream()) as stream:
                    async for piece in stream:
                        yield piece

        async def whole() -> dict[str, Any]:
            with front.passage(request, ask, each) as passage:
                return await passage.whole()

        if body.stream:
            return EventStream(events(), patience=front.settings.limits.send_seconds)
        return JSONResponse(await unless_gone(request, whole()))

    @routes.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""

        def params() -> list[SamplingParams]:
            body.check()
            front.check_count(body.n or 1)
            rendered(body.messages, _TEXT)
            if body.tools is not None:
                check_tools(body.tools, body.tool_choice)
            wanted = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
            return body.sampling(
                max_tokens=front.limit_output(wanted, UNLIMITED),
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            )

        return await answer(
            body,
            request,
            "/v1/chat/completions",
            params,
            prompt="messages",
            logprobs="top_logprobs",
            max_tokens="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        )

    @routes.post("/v1/completions", responses=ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more texts."""

        def params() -> list[SamplingParams]:
            body.check()
            prompts = body.prompts()
            front.check_count(len(prompts) * (body.n or 1))
            limit = front.limit_output(body.max_tokens, DEFAULT_MAX_TOKENS)
            judged = body.logprobs if body.echo else None
            return len(prompts) * body.sampling(max_tokens=limit, logprobs=body.logprobs, prompt_logprobs=judged)

        return await answer(body, request, "/v1/completions", params)

    async def relayed(request: Request, path: str, model: str | None) -> Response:
        front.check_model(model or front.name)
        given = await request.json() | {"model": model or front.name}
        size = len(await request.body())
        ask = Ask(path=path, body=given, texts=0, weight=size // 16)
        with front.passage(request, ask, ()) as passage:
            found = await unless_gone(request, passage.whole())
        del found["model"]
        return JSONResponse(found)

    @routes.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The tokens of a text, or of a conversation's prompt."""
        return await relayed(request, "/tokenize", body.model)

    @routes.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of the tokens, special ones written out."""
        return await relayed(request, "/detokenize", body.model)

    return routes
