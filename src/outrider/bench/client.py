"""One request to a server with OpenAI's API, as its client sees it: times, text, or why it failed."""

from __future__ import annotations

import asyncio
import codecs
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import httpx2

from outrider.bench.prompts import Content

__all__ = ["Answer", "Asking", "Client", "Failure", "Server", "UrlError"]

_CUT = ("abort", "error")  # finish reasons of a text that the server did not write to its end
_TOLD, _HISTOGRAM = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens"), "acceptance_histogram"
_MOST = 2**53  # a count beyond that is none: floats no longer tell it from the next
_ODD = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # of JSON in a shape that is not OpenAI's


class UrlError(ValueError):
    """An address that cannot be used, or a server that does not answer: names it and the way out."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server to be measured. `url` ends with the API's version (`/v1`); `body` is added to each request."""

    name: str
    url: str
    key: str | None = field(default=None, repr=False)
    body: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, name: str, url: str, *, key: str | None = None, body: Mapping[str, Any] | None = None) -> Server:
        """Of `http://host:port`, with or without `/v1`. Raises UrlError."""
        parts = urlsplit(url)
        try:
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of a port that is no number
            sound = False
        if not sound:
            raise UrlError(f"--url: {url!r} is no address; write http://HOST:PORT or NAME=http://HOST:PORT")
        if parts.username is not None or parts.query or parts.fragment:
            raise UrlError("--url: an address here has no user, query or fragment; a key goes into --api-key")
        base = url.rstrip("/")
        return cls(name, base if base.endswith("/v1") else f"{base}/v1", key, dict(body or {}))

    @property
    def root(self) -> str:
        """Where `/metrics` is."""
        return self.url.removesuffix("/v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What all requests of a run have in common."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    def body(self, model: str, content: Content) -> dict[str, Any]:
        what = {"prompt": content} if isinstance(content, str) else {"messages": content}
        return {
            "model": model,
            **what,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            **({"ignore_eos": True} if self.ignore_eos else {}),
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole text. Times in seconds, from when the request was due to be sent."""

    text: str
    tokens: int
    ttft: float  # to the first chunk with text
    seconds: float  # to the last chunk with text
    gaps: tuple[float, ...] = ()  # between chunks with text; a chunk may hold several tokens
    prompt_tokens: int | None = None
    counted: bool = True  # whether the server told the number of tokens; else chunks were counted
    speculation: Mapping[str, Any] | None = None  # vLLM's `metrics.speculative_decoding`, if the server tells it

    @property
    def tpot(self) -> float | None:
        """Seconds per token behind the first; None of a single one."""
        return (self.seconds - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Failure:
    """No whole text. Equal reasons have equal texts, so that they can be counted."""

    reason: str


class Client:
    """Sends requests to one server. `clock` in seconds.

    A request is given up when nothing comes for `timeout` seconds, and after `limit` seconds in all: a server that says
    a little now and then must not hold up the run.
    """

    def __init__(
        self,
        server: Server,
        *,
        timeout: float,
        limit: float,
        clock: Callable[[], float],
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.server = server
        self.model = ""
        self._timeout = timeout
        self._limit = limit
        self._clock = clock
        self._http = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {server.key}"} if server.key else {},
            timeout=timeout,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            transport=transport,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def find_model(self, wanted: str | None = None) -> str:
        """The model to ask for: `wanted`, or the first that the server lists. Raises UrlError."""
        if wanted is None:
            try:
                async with asyncio.timeout(self._limit):
                    answer = await self._http.get(f"{self.server.url}/models")
                answer.raise_for_status()
                wanted = _whole(str(answer.json()["data"][0]["id"]))
            except (httpx2.HTTPError, TimeoutError, *_ODD) as error:
                raise UrlError(
                    f"--url: {self.server.name}: {self.server.url}/models told no model ({_reason(error)}); "
                    "is it running, does it need --api-key? --model names one"
                ) from None
        self.model = wanted
        return wanted

    async def metrics(self) -> str | None:
        """The server's page of Prometheus metrics; None where there is none."""
        try:
            async with asyncio.timeout(self._limit):
                answer = await self._http.get(f"{self.server.root}/metrics")
        except (httpx2.HTTPError, TimeoutError):
            return None
        return answer.text if answer.status_code == 200 else None

    async def ask(self, asking: Asking, content: Content, due: float) -> Answer | Failure:
        """One streamed request, which was due at `due` by the clock. Never raises for what a server may do."""
        route = "completions" if isinstance(content, str) else "chat/completions"
        body = {**asking.body(self.model, content), **self.server.body}
        try:
            async with (
                asyncio.timeout(self._limit),
                self._http.stream("POST", f"{self.server.url}/{route}", json=body) as answer,
            ):
                if answer.status_code != 200:
                    return Failure(f"HTTP {answer.status_code}: {_message(await answer.aread())}")
                return await self._read(_events(_lines(answer.aiter_bytes())), due)
        except TimeoutError:
            return Failure(f"not done after {self._limit:g} s")
        except (httpx2.HTTPError, *_ODD) as error:
            return Failure(_reason(error, self._timeout))

    async def _read(self, chunks: AsyncIterator[dict[str, Any]], due: float) -> Answer | Failure:
        times: list[float] = []
        text, ending = "", None
        usage: Mapping[str, Any] = {}
        speculation: Mapping[str, Any] | None = None
        async for chunk in chunks:
            if "error" in chunk:
                return Failure(f"error in the stream: {_message(json.dumps(chunk).encode())}")
            choice = (chunk.get("choices") or [{}])[0]
            piece = _text(choice)
            if piece:
                times.append(self._clock())
                text += piece
            ending = choice.get("finish_reason") or ending
            usage = chunk.get("usage") or usage
            speculation = _speculation(chunk) or speculation
        if ending is None:
            return Failure("the stream broke off before its end")
        if ending in _CUT:
            return Failure(f"the server cut the text ({ending})")
        tokens, prompt_tokens = (_count(name, usage.get(name)) for name in ("completion_tokens", "prompt_tokens"))
        if not times:  # a text that ended at once
            times.append(self._clock())
        return Answer(
            _whole(text),
            len(times) if tokens is None else tokens,
            times[0] - due,
            times[-1] - due,
            tuple(after - before for before, after in pairwise(times)),
            prompt_tokens,
            tokens is not None,
            speculation,
        )


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The lines of a stream of server-sent events, which CR, LF or both end and nothing else: JSON may hold U+2028."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True)
    rest = ""
    async for part in parts:
        *lines, rest = (rest + decoder.decode(part)).split("\n")
        for line in lines:
            yield line
    for line in (rest + decoder.decode(b"", final=True)).split("\n"):
        yield line


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events. Raises ValueError for what is none."""
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError("an event that is no object")
        yield chunk


def _text(choice: Mapping[str, Any]) -> str:
    """What a chunk adds: of a chat or of a completion; thoughts are text too."""
    delta = choice.get("delta") or {}
    parts = (choice.get("text"), delta.get("reasoning"), delta.get("reasoning_content"), delta.get("content"))
    return "".join(part for part in parts if isinstance(part, str))


def _whole(text: str) -> str:
    """The text with characters that two chunks had halves of; a half that stayed alone becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _count(name: str, value: object) -> int | None:
    """A count that a server told; None of none. Raises ValueError for what is no count."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST or value != int(value):
        raise ValueError(f"{name} {str(value)[:20]!r} is no count")
    return int(value)


def _speculation(chunk: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The counts in vLLM's object, or llama.cpp's of drafted and accepted tokens in its form."""
    found = (chunk.get("metrics") or {}).get("speculative_decoding")
    if found is None:
        timings = chunk.get("timings") or {}
        if "draft_n" not in timings:
            return None
        found = {
            "num_draft_tokens": timings["draft_n"],
            "num_accepted_draft_tokens": timings.get("draft_n_accepted"),
        }
    out: dict[str, Any] = {name: _count(name, found.get(name)) or 0 for name in _TOLD}
    return out | {_HISTOGRAM: [_count(_HISTOGRAM, depth) or 0 for depth in found.get(_HISTOGRAM) or ()]}


def _message(body: bytes) -> str:
    """What an error's body says, in a short line."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = body.decode("utf-8", "replace")
    if isinstance(content, dict):
        error = content.get("error", content)
        content = error.get("message", error) if isinstance(error, dict) else error
    return _whole(" ".join(str(content).split())[:160])


def _reason(error: Exception, timeout: float | None = None) -> str:
    if isinstance(error, httpx2.TimeoutException | TimeoutError):
        return "timed out" if timeout is None else f"timed out: nothing came for {timeout:g} s"
    if isinstance(error, httpx2.ConnectError):
        return "no connection"
    if isinstance(error, httpx2.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    if isinstance(error, httpx2.TransportError):
        return "the connection broke off"
    if isinstance(error, RecursionError):
        return "an answer that is not OpenAI's (JSON that is nested too deep)"
    return f"an answer that is not OpenAI's ({_whole(' '.join(str(error).split())[:80])})"
