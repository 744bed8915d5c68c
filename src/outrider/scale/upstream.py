"""One server that writes texts for the front: where it is, whether it answers, what it says of itself and counts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import httpx2

from outrider.scale.counters import Counters, Guesses

__all__ = ["About", "Address", "AddressError", "Load", "Pool", "State", "Upstream", "UpstreamError", "client"]

log = logging.getLogger("outrider.scale")

Pool = Literal["speculative", "plain"]
State = Literal["new", "up", "draining", "down"]
_KINDS = {"vllm": "vllm", "outrider": "outrider", "sglang": "sglang", "llamacpp": "llama.cpp"}  # by `owned_by`
_CONNECT, _ANSWER = 5.0, 5.0  # seconds for a connection, and for an answer about the server itself
_ODD = (ValueError, LookupError, TypeError, AttributeError)  # of JSON in a shape that is not OpenAI's


class AddressError(ValueError):
    """An address that is none: names the option and the way out."""


class UpstreamError(RuntimeError):
    """Why an upstream cannot be used."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where an upstream is. `url` has no `/v1`."""

    name: str
    url: str
    pool: Pool
    key: str | None = field(default=None, repr=False)
    # role, name and sha256, where whoever starts the server has read the files; it may tell nothing of them itself
    weights: tuple[Mapping[str, str], ...] = ()

    @classmethod
    def at(cls, url: str, pool: Pool, *, option: str = "--upstream", key: str | None = None) -> Address:
        """Of `http://host:port`, with or without `/v1`. Raises AddressError that names the option."""
        parts = urlsplit(url)
        try:
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of a port that is no number
            sound = False
        if not sound or parts.username is not None or parts.query or parts.fragment:
            raise AddressError(f"{option}: {url!r} is no address; write http://HOST:PORT")
        base = url.rstrip("/").removesuffix("/v1")
        return cls(base.partition("//")[2], base, pool, key)


@dataclass(frozen=True, slots=True)
class About:
    """What an upstream says of itself."""

    model: str  # as its requests name it
    kind: str = "other"  # vllm, outrider, sglang, llama.cpp or other
    root: str = ""  # the model's own name or path
    version: str | None = None
    context: int | None = None  # tokens
    card: Mapping[str, Any] = field(default_factory=dict)  # the model's entry in its list, but for times and rights
    weights: tuple[Mapping[str, str], ...] = ()  # role, name and sha256, where it tells them
    fingerprint: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For the ledger."""
        return {
            "kind": self.kind,
            "version": self.version,
            "model": self.model,
            "root": self.root,
            "context": self.context,
            "card": dict(self.card),
            "weights": [dict(entry) for entry in self.weights],
            "fingerprint": self.fingerprint,
        }


class Load(Protocol):
    """A request that an upstream works at."""

    def abandon(self, reason: str) -> None:
        """The upstream no longer answers."""


def client(transport: httpx2.AsyncBaseTransport | None = None) -> httpx2.AsyncClient:
    """What all requests to upstreams go through: as many connections as there are requests, kept open."""
    return httpx2.AsyncClient(
        # a request may wait long for its turn: what ends it is the front's own limit, or a failed health check
        timeout=httpx2.Timeout(None, connect=_CONNECT),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=4.0),
        headers={"Accept-Encoding": "identity", "User-Agent": "outrider"},
        trust_env=False,
        transport=transport,
    )


class Upstream:
    """Belongs to the event loop. `changed` is called whenever another state begins."""

    _ASKED_ANEW = 15  # health checks after which it is asked again who it is
    _MISSED = 3  # health checks without an answer, one after the other, until it counts as dead

    def __init__(
        self,
        address: Address,
        http: httpx2.AsyncClient,
        *,
        wanted: str | None = None,
        changed: Callable[[Upstream], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`wanted`: the model to ask it for, where it has several."""
        self.address, self.http = address, http
        self.state: State = "new"
        self.reason = "it was not asked yet"  # why it is not up
        self.about: About | None = None
        self.counters = Counters()
        self.outstanding = 0.0  # tokens that it has to read and write, about
        self.used = 0  # number of the request that came last
        self.answers: Counter[str] = Counter()  # by outcome
        self.ejections = 0
        self.per_chunk = 1.0  # tokens in a chunk of a stream, lately
        self._wanted, self._changed, self._clock = wanted, changed, clock
        self._loads: dict[Load, float] = {}  # what is left of each, in tokens
        self._missed = self._checks = 0
        self._counted = False
        self._checking: asyncio.Future[None] | None = None
        self._busy_since, self._integral = clock(), 0.0

    @property
    def name(self) -> str:
        return self.address.name

    @property
    def pool(self) -> Pool:
        return self.address.pool

    @property
    def up(self) -> bool:
        """Whether it takes requests."""
        return self.state == "up"

    @property
    def loads(self) -> int:
        """Requests that it works at."""
        return len(self._loads)

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.address.key is None else {"Authorization": f"Bearer {self.address.key}"}

    def busy(self) -> float:
        """Request-seconds so far: its growth over a time's length is how many requests ran in it on average."""
        now = self._clock()
        self._integral += len(self._loads) * (now - self._busy_since)
        self._busy_since = now
        return self._integral

    @contextmanager
    def carrying(self, load: Load, weight: float) -> Iterator[None]:
        """It works at the request, of about so many tokens, for the time of the block."""
        self.busy()
        self._loads[load] = weight
        self.outstanding += weight
        try:
            yield
        finally:
            self.busy()
            self.outstanding -= self._loads.pop(load)
            if not self._loads:
                self.outstanding = 0.0  # and no sum of roundings

    def progressed(self, load: Load, tokens: float) -> None:
        """So many tokens of a request are written."""
        done = min(tokens, self._loads.get(load, 0.0))
        if done:
            self._loads[load] -= done
            self.outstanding -= done

    # -- health ----------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Ask whether it is well, and once it is, who it is. Never raises for what a server may do."""
        if self._checking is None:
            self._checking = asyncio.ensure_future(self._check())
            self._checking.add_done_callback(self._checked)
        await asyncio.shield(self._checking)  # of several that ask at once, none ends it for the others

    def _checked(self, check: asyncio.Future[None]) -> None:
        self._checking = None

    async def _check(self) -> None:
        try:
            status = await self._health()
        except httpx2.ConnectError as error:
            self._lost(f"no connection: {_told(error)}")
            return
        except httpx2.HTTPError as error:
            self._missed += 1
            if self._missed >= self._MISSED or self.state != "up":
                self._lost(f"no answer to {self._missed} health checks: {_told(error)}")
            return
        self._missed = 0
        if status == 503:
            # it may end what it has; nothing new goes there
            self._become("draining" if self.state in ("up", "draining") else "down", "it says that it is not ready")
        elif status >= 400:
            self._become("down", f"its health check answers {status}")
        else:
            self._checks += 1
            if self.state != "up" or self._checks % self._ASKED_ANEW == 0:
                await self._meet()

    async def _health(self) -> int:
        for path in ("/health", "/v1/models"):  # some servers have no health check of their own
            answer = await self.http.get(self.address.url + path, headers=self.headers, timeout=_ANSWER)
            if answer.status_code != 404:
                break
        return answer.status_code

    async def _meet(self) -> None:
        """It is well: who is it? Another one may stand there than before, even without a check that failed."""
        try:
            about = await self._ask()
        except UpstreamError as error:
            self._become("down", str(error))
            return
        before, self.about = self.about, about
        if self.state == "up" and before != about:
            log.warning("upstream %s is another one now", self.name, extra={"fields": about.as_dict()})
            if self._changed is not None:
                self._changed(self)
        self._become("up", "")

    async def _ask(self) -> About:
        """Raises UpstreamError where it has no model for us."""
        try:
            answer = await self.http.get(f"{self.address.url}/v1/models", headers=self.headers, timeout=_ANSWER)
            if answer.status_code in (401, 403):
                raise UpstreamError(f"it wants another key ({answer.status_code}): see --upstream-key")
            cards = answer.json()["data"]
            known = [str(card["id"]) for card in cards]
            card = next((card for card in cards if card["id"] == self._wanted), cards[0])
        except (httpx2.HTTPError, *_ODD) as error:
            raise UpstreamError(f"its /v1/models tells no model: {_told(error)}") from None
        if self._wanted is not None and self._wanted not in known and len(known) > 1:
            raise UpstreamError(f"it has {', '.join(known)}, and no {self._wanted!r}")
        kind = _KINDS.get(str(card.get("owned_by")), "other")
        context = card.get("max_model_len")
        version = await self._json("/version")
        about = About(
            model=str(card["id"]),
            kind=kind,
            root=str(card.get("root") or card["id"]),
            version=_text(version.get("version")),
            context=context if isinstance(context, int) else None,
            card={name: value for name, value in card.items() if name not in ("permission", "created")},
            weights=self.address.weights,
        )
        return about if kind != "outrider" else await self._weighed(about)

    async def _weighed(self, about: About) -> About:
        """Another Outrider tells the hashes of its weights."""
        state = await self._json("/dashboard/state?since=9007199254740992")
        try:
            weights = tuple(
                {name: str(entry[name]) for name in ("role", "name", "sha256")} for entry in state["models"]
            )
            fingerprint = str(state["server"]["fingerprint"])
        except _ODD:
            return about
        return replace(about, weights=weights, fingerprint=fingerprint)

    async def _json(self, path: str) -> Mapping[str, Any]:
        """An answer that is a JSON object; nothing where there is none."""
        try:
            answer = await self.http.get(self.address.url + path, headers=self.headers, timeout=_ANSWER)
            found = answer.json() if answer.status_code == 200 else {}
        except (httpx2.HTTPError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _lost(self, reason: str) -> None:
        self._become("down", reason)
        for load in list(self._loads):
            load.abandon(reason)

    def _become(self, state: State, reason: str) -> None:
        before, self.state, self.reason = self.state, state, reason
        if before == state:
            return
        if before == "up":
            self.ejections += 1
        fields = {"upstream": self.name, "pool": self.pool, "state": state, "before": before, "reason": reason}
        level = logging.INFO if state == "up" else logging.WARNING
        log.log(level, "upstream %s: %s -> %s", self.name, before, state, extra={"fields": fields})
        if self._changed is not None:
            self._changed(self)

    # -- counters ----------------------------------------------------------------------------------------------------

    async def count(self) -> Guesses:
        """Read its counters; returns what was guessed since the last reading. Nothing where it does not tell."""
        try:
            counted = self._counted  # what it counted before somebody looked is not of now
            answer = await self.http.get(f"{self.address.url}/metrics", headers=self.headers, timeout=_ANSWER)
            if answer.status_code != 200:
                return Guesses()
            read = await asyncio.to_thread(Counters.read, answer.text)
        except (httpx2.HTTPError, ValueError):
            return Guesses()
        before, self.counters, self._counted = self.counters, read, True
        return read.guesses.since(before.guesses) if counted else Guesses()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
