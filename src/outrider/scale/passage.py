"""One request on its way through an upstream, and through another one where the first failed before a token came."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

import httpx2

from outrider.engine.results import FinishReason, Result, Step, Usage
from outrider.scale.events import (
    DONE,
    BrokenStreamError,
    EventCutter,
    Rewriter,
    ends,
    error_in,
    object_of,
    sums_up,
    writes,
)
from outrider.scale.fallback import DRAFTER, Measured
from outrider.scale.router import Ask
from outrider.scale.upstream import Upstream
from outrider.server.engine_thread import NeverBegunError, Work
from outrider.server.errors import ApiError

__all__ = ["Passage", "Yard"]

T = TypeVar("T")

_TRIES = 2  # at one upstream, of a request whose connection broke while the upstream is well
_LEFT = 1.0  # seconds for the end of an answer that is complete, so that its connection can be used again
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop"}
_OURS = {401, 403, 404}  # statuses that say that the front asked wrongly, not its client


class _FailedError(Exception):
    """An upstream did not do it. `answer`: what the client is told if no other one does."""

    def __init__(self, reason: str, *, lost: bool, answer: ApiError | None = None) -> None:
        super().__init__(reason)
        self.lost, self.answer = lost, answer


class _CutError(Exception):
    """The front ends the request."""


class Yard(Protocol):
    """Where passages find their upstreams, and tell what happens."""

    def choose(self, ask: Ask, tried: Mapping[Upstream, int]) -> Upstream | None:
        """An upstream that is up, and was not tried in vain; None if there is none."""

    def arrived(self, passage: Passage, index: int, tokens: float, now: float) -> None:
        """A chunk came."""

    def ended(self, passage: Passage, now: float) -> None:
        """All results are there."""

    def took(self, measured: Measured) -> None:
        """A text was written to its end."""

    def failed(self, passage: Passage, upstream: Upstream, reason: str, *, final: bool) -> None:
        """An upstream failed at it; `final`: its client has a part of the answer."""


class Passage:
    """The texts of one request (`server.texts.Texts`). Belongs to the event loop; `name`: as clients know the model."""

    def __init__(
        self,
        ask: Ask,
        works: Sequence[Work],
        yard: Yard,
        *,
        name: str,
        headers: Mapping[str, str],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.ask, self.works = ask, works
        self.submitted = clock()
        self.last = [self.submitted] * ask.texts
        self.begun = [False] * ask.texts
        self.results: list[Result | None] = [None] * ask.texts
        self.was_cut = False
        self.failed = False
        self.upstream: Upstream | None = None  # that works at it, or did so last
        self.retries = 0
        self._yard, self._name, self.headers, self.clock = yard, name, headers, clock
        self._open = ask.texts
        self._settled: list[Callable[[], None]] = []
        self._tried: Counter[Upstream] = Counter()
        self._error: _FailedError | None = None  # the last one
        self._abandoned: str | None = None  # why the upstream is given up
        self._reading: asyncio.Timeout | None = None  # while something is waited for
        self._reset()

    def _reset(self) -> None:
        """Nothing has come yet."""
        self._abandoned = None
        self._first = [math.nan] * self.ask.texts  # when each text had its first chunk
        self._reasons: list[str | None] = [None] * self.ask.texts
        self._chunks = 0
        self._written = 0.0  # tokens, as far as chunks tell
        self._usage: Mapping[str, Any] = {}
        self._speculation: Mapping[str, Any] = {}
        self._latest = b""  # chunk

    # -- what `Texts` wants ------------------------------------------------------------------------------------------

    @property
    def open(self) -> int:
        """Texts that have not ended."""
        return self._open

    @property
    def prompt_tokens(self) -> int:
        """Of all texts together, as the upstream counted them."""
        return _count(self._usage, "prompt_tokens")

    @property
    def origin(self) -> Mapping[str, Any]:
        """Who wrote the texts."""
        if self.upstream is None:
            return {"upstream": None, "retries": self.retries}
        return {"upstream": self.upstream.name, "pool": self.upstream.pool, "retries": self.retries}

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call when all results are there."""
        if self._open:
            self._settled.append(call)
        else:
            call()

    def cut(self) -> None:
        """End it now, with what has come so far."""
        if self._open:
            self.was_cut = True
            self._wake()

    def abandon(self, reason: str) -> None:
        """The upstream no longer answers: try another one, or say so."""
        self._abandoned = reason
        self._wake()

    def close(self) -> None:
        """Nobody reads on."""
        if self._open:
            self._settle("cancelled")

    def _wake(self) -> None:
        if self._reading is not None:
            self._reading.reschedule(asyncio.get_running_loop().time())

    # -- on the way --------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """The answer at once. Raises ApiError, or NeverBegunError where it was cut."""
        while True:
            upstream = self._choose()
            began = self.clock(), upstream.busy()
            try:
                with self._at(upstream):
                    answer = await self._asked(upstream)
            except _FailedError as error:
                await self._retreat(upstream, error)
            except _CutError:
                raise NeverBegunError from None
            else:
                answer["model"] = self._name
                self.sum_up(answer)
                for index, choice in enumerate(answer.get("choices", ())[: self.ask.texts]):
                    self._reasons[index] = choice.get("finish_reason")
                self._finish(upstream, *began)
                return answer

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events, several in one piece where they came so. Raises as `whole`, and after an event in its place too."""
        while True:
            upstream = self._choose()
            sent = False
            try:
                with self._at(upstream):
                    async with aclosing(self._passed(upstream)) as pieces:
                        async for piece in pieces:
                            sent = True
                            yield piece
                return
            except _FailedError as error:
                if sent:
                    await self._break_off(upstream, error)
                await self._retreat(upstream, error)
            except _CutError:
                if not sent:
                    raise NeverBegunError from None
                yield self._abort()
                self._settle("cancelled")
                return

    def _choose(self) -> Upstream:
        if self.was_cut:
            raise NeverBegunError
        upstream = self._yard.choose(self.ask, self._tried)
        if upstream is not None:
            return upstream
        self.failed = True
        error = self._error
        if error is None:
            raise ApiError(503, "no server that could write the text is up", code="no_upstream", retry_after=5)
        if error.answer is not None:
            raise error.answer
        raise ApiError(502, f"the servers that could write the text failed: {error}", code="upstream_failed")

    def _at(self, upstream: Upstream) -> Any:
        self.upstream = upstream
        self._reset()
        return upstream.carrying(self, self.ask.weight)

    async def _retreat(self, upstream: Upstream, error: _FailedError) -> None:
        """Nothing has reached the client: another one may do it. Raises ApiError where that would change nothing."""
        self._tried[upstream] += 1 if error.lost else _TRIES
        self._error = error
        self._yard.failed(self, upstream, str(error), final=False)
        if error.lost:
            await upstream.check()
        self.retries += 1

    async def _break_off(self, upstream: Upstream, error: _FailedError) -> None:
        """The client has a part of the answer: tell it that no more comes."""
        self.failed = True
        self._yard.failed(self, upstream, str(error), final=True)
        if error.lost:
            await upstream.check()
        raise ApiError(
            502,
            f"the server that wrote this text failed after {self._chunks:,} pieces, and nothing more comes: {error}",
            code="upstream_failed",
        ) from None

    async def _sent(self, upstream: Upstream) -> httpx2.Response:
        """Its answer, which has begun and is no refusal."""
        assert upstream.about is not None  # it was up
        body = {**self.ask.body, "model": upstream.about.model}
        request = upstream.http.build_request(
            "POST",
            upstream.address.url + self.ask.path,
            content=json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"),
            headers={"Content-Type": "application/json", **self.headers, **upstream.headers},
        )
        response = await self._waited(upstream.http.send(request, stream=True))
        if response.status_code != 200:
            try:
                content = await self._waited(response.aread())
            finally:
                await response.aclose()
            raise _refusal(response, content)
        return response

    async def _asked(self, upstream: Upstream) -> dict[str, Any]:
        response = await self._sent(upstream)
        try:
            answer = object_of(await self._waited(response.aread()))
        except BrokenStreamError:
            raise _FailedError("its answer is no JSON object", lost=False) from None
        finally:
            await response.aclose()
        return answer

    async def _passed(self, upstream: Upstream) -> AsyncGenerator[bytes, None]:
        """The stream's events. Those before the first token are held back until it comes."""
        response = await self._sent(upstream)
        try:
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise _FailedError(f"it answered with {kind or 'something'} in place of a stream", lost=False)
            assert upstream.about is not None
            look = _Look(self, upstream, Rewriter(upstream.about.model, self._name, with_usage=self.ask.with_usage))
            chunks = response.aiter_raw()
            held = b""
            while not look.done:
                data = await self._waited(anext(chunks, b""))
                if not data:
                    raise _FailedError("its stream ended before the text did", lost=True)
                held += look.at(data)
                if held and any(self.begun):
                    piece, held = held, b""
                    yield piece
            if None in self._reasons:
                raise _FailedError("its stream ended without a finish reason", lost=False)
            self._finish(upstream, *look.began)
            if held:
                yield held
            with suppress(TimeoutError, httpx2.HTTPError):
                async with asyncio.timeout(_LEFT):
                    await anext(chunks, b"")
        except BrokenStreamError as error:
            raise _FailedError(f"its stream is broken: {error}", lost=False) from None
        finally:
            await response.aclose()

    async def _waited(self, what: Awaitable[T]) -> T:
        """Wait for something of an upstream, unless the request is cut or the upstream given up."""
        try:
            async with asyncio.timeout(None if not (self.was_cut or self._abandoned) else 0) as self._reading:
                return await what
        except TimeoutError:
            if self.was_cut:
                raise _CutError from None
            raise _FailedError(self._abandoned or "it took too long", lost=True) from None
        except httpx2.HTTPError as error:
            raise _FailedError(f"{type(error).__name__}: {error}", lost=True) from None
        finally:
            self._reading = None

    # -- what is seen ------------------------------------------------------------------------------------------------

    def saw(self, found: Mapping[str, Any], now: float, upstream: Upstream) -> None:
        """A chunk that was parsed."""
        for choice in found.get("choices", ()):
            index = choice.get("index", 0)
            if not isinstance(index, int) or not 0 <= index < self.ask.texts:
                raise BrokenStreamError(f"a chunk of text {index!r} of {self.ask.texts}")
            if writes(choice):
                self.arrived(index, now, upstream)
            if choice.get("finish_reason") is not None:
                self._reasons[index] = str(choice["finish_reason"])
                self.begun[index] = True

    def arrived(self, index: int, now: float, upstream: Upstream) -> None:
        """A chunk with some text."""
        self._chunks += 1
        self._written += upstream.per_chunk
        self._yard.arrived(self, index, upstream.per_chunk, now)
        if not self.begun[index]:
            self.begun[index] = True
            self._first[index] = now
        upstream.progressed(self, upstream.per_chunk)
        self.last[index] = now

    def keep(self, payload: bytes) -> None:
        """The latest chunk: its frame makes the last one of a text that is cut."""
        self._latest = payload

    def sum_up(self, found: Mapping[str, Any]) -> None:
        """Usage, and what speculation did: of a whole answer, or the chunk that tells it."""
        usage, metrics = found.get("usage"), found.get("metrics")
        self._usage = usage if isinstance(usage, dict) else {}
        speculation = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        self._speculation = speculation if isinstance(speculation, dict) else {}

    def _abort(self) -> bytes:
        """The last chunk of texts that are cut."""
        frame = object_of(self._latest)
        empty: dict[str, Any] = {"delta": {}} if "chat" in self.ask.path else {"text": ""}
        frame["choices"] = [
            {"index": index, **empty, "logprobs": None, "finish_reason": "abort"}
            for index, reason in enumerate(self._reasons)
            if reason is None
        ]
        return b"data: " + json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, upstream: Upstream, began: float, busy: float) -> None:
        """All texts are complete."""
        now = self.clock()
        tokens = _count(self._usage, "completion_tokens")
        streamed = self._chunks > 0
        if streamed and tokens:
            upstream.per_chunk += 0.1 * (tokens / self._chunks - upstream.per_chunk)
        upstream.answers["finished"] += 1
        self._settle(None)
        seconds, counted = now - began, tokens
        if streamed:
            spans = [last - first for last, first in zip(self.last, self._first, strict=True)]
            seconds, counted = sum(spans), tokens - self.ask.texts
        if counted > 0 and seconds > 0 and now > began:
            load = (upstream.busy() - busy) / (now - began)
            self._yard.took(Measured(upstream.pool, max(load, 1.0), counted, seconds, streamed, self._gain))

    @property
    def _gain(self) -> float | None:
        steps = _count(self._speculation, "num_spec_steps")
        return _count(self._speculation, "num_accepted_draft_tokens") / steps if steps else None

    def _settle(self, reason: FinishReason | None) -> None:
        """Make the results; `reason` of those texts that have none of their own."""
        now = self.clock()
        steps = list(_steps(self._speculation))
        tokens = _count(self._usage, "completion_tokens") or round(self._written)
        details = self._usage.get("prompt_tokens_details") or {}
        for index in range(self.ask.texts):
            told = self._reasons[index]
            first = index == 0  # the upstream tells sums over all texts
            self.results[index] = Result(
                id=index,
                prompt_tokens=[],
                tokens=[],
                origins=[],
                text="",
                finish_reason=_REASONS.get(told or "", "cancelled") if reason is None or told else reason,
                stop_reason=None,
                logprobs=None,
                usage=Usage(
                    prompt_tokens=self.prompt_tokens if first else 0,
                    completion_tokens=tokens if first else 0,
                    cached_tokens=_count(details, "cached_tokens") if first else 0,
                ),
                steps=steps if first else [],
                seed=self.works[index].params.seed,
                ttft=self._first[index] - self.submitted,
                seconds=(self.last[index] if self._chunks else now) - self.submitted,
                drafter=steps[0].drafter if steps else "none",
                max_draft_tokens=_count(self._speculation, "num_spec_tokens"),
            )
        self._open = 0
        self._yard.ended(self, now)
        for call in self._settled:
            call()
        self._settled.clear()


class _Look:
    """Goes through what arrives from one upstream. Parses the first chunks, the endings and the usage only."""

    def __init__(self, passage: Passage, upstream: Upstream, rewrite: Rewriter) -> None:
        self.done = False
        self.began = (math.nan, math.nan)  # when the first token came, and the upstream's `busy` then
        self._passage, self._upstream, self._rewrite = passage, upstream, rewrite
        self._clock = passage.clock
        self._cutter = EventCutter()
        self._parsing = True

    def at(self, data: bytes) -> bytes:
        """The events for the client. Raises BrokenStreamError or _FailedError."""
        now = self._clock()
        out = []
        for payload in self._cutter.push(data):
            if payload == DONE:
                self.done = True
                break
            if self._passes(payload, now):
                out.append(b"data: " + self._rewrite(payload) + b"\n\n")
        return b"".join(out)

    def _passes(self, payload: bytes, now: float) -> bool:
        passage = self._passage
        if (error := error_in(payload)) is not None:
            raise _told_failure(error)
        if sums_up(payload):
            passage.sum_up(object_of(payload))
            return passage.ask.with_usage
        if self._parsing or ends(payload):
            passage.saw(object_of(payload), now, self._upstream)
            # of several texts each chunk has to say which one it belongs to
            if self._parsing and any(passage.begun):
                self.began = now, self._upstream.busy()
                self._parsing = passage.ask.texts > 1
        else:
            passage.arrived(0, now, self._upstream)
        passage.keep(payload)
        return True


def _refusal(response: httpx2.Response, content: bytes) -> Exception:
    """What an answer that is no success means: the client's fault, or the upstream's."""
    status = response.status_code
    try:
        found = object_of(content)
    except BrokenStreamError:
        found = {}
    error = found.get("error", found)
    told = error if isinstance(error, dict) else {"message": str(error)}
    message = str(told.get("message") or told.get("detail") or response.reason_phrase)
    if status in _OURS:
        return _FailedError(f"it answered {status}: {message}", lost=False)
    parameter, code = told.get("param"), told.get("code")
    retry = response.headers.get("retry-after", "")
    answer = ApiError(
        status if status < 500 or status == 503 else 502,
        message,
        parameter=parameter if isinstance(parameter, str) else None,
        code=code if isinstance(code, str) else None,
        retry_after=int(retry) if retry.isdigit() else None,
    )
    if status < 500 and status not in (408, 429):
        return answer
    return _FailedError(f"it answered {status}: {message}", lost=False, answer=answer)


def _told_failure(error: Mapping[str, Any]) -> Exception:
    """An error that came as an event."""
    message = str(error.get("message", "an error without a message"))
    code = error.get("code")
    if isinstance(code, int) and 400 <= code < 500 and code not in (408, 429):
        return ApiError(code, message)
    return _FailedError(message, lost=False)


def _count(found: Mapping[str, Any], name: str) -> int:
    value = found.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _steps(told: Mapping[str, Any]) -> list[Step]:
    """The drafts of a request, from their histogram by accepted guesses. Guesses are shared out evenly."""
    histogram = told.get("acceptance_histogram")
    if not isinstance(histogram, list) or not all(isinstance(n, int) and 0 <= n < 2**20 for n in histogram):
        return []
    count, drafted = sum(histogram), _count(told, "num_draft_tokens")
    out: list[Step] = []
    for accepted, drafts in enumerate(histogram):
        for _ in range(drafts):
            share = drafted * (len(out) + 1) // count - drafted * len(out) // count
            out.append(Step(drafted=share, depth=max(share, accepted), accepted=accepted, drafter=DRAFTER))
    return out
