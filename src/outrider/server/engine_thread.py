"""The engine in a thread of its own, and its texts as the event loop sees them.

    event loop                               engine thread
    job = thread.submit(works)   -- queue -> engine.add
    async for piece in job       <- call --- engine.step, deltas of a step in one call
    job.cut(), job.close()       -- queue -> engine.cancel, before the next step

The engine is single-threaded: nothing else touches it. Commands are carried out between two steps. Whatever goes wrong
in a step ends the texts that were in it, and never the thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.results import Delta, Result, TokenLogprobs
from outrider.engine.speculation import Speculation
from outrider.server.texts import Watcher

__all__ = ["EngineFaultError", "EngineThread", "Job", "NeverBegunError", "Piece", "Work"]

T = TypeVar("T")
log = logging.getLogger("outrider.engine")


class NeverBegunError(RuntimeError):
    """The job was cut before any of its texts had a token."""


class EngineFaultError(RuntimeError):
    """A step failed, and the texts in it with it."""


@dataclass(frozen=True, slots=True)
class Work:
    """One text to write."""

    tokens: Sequence[int]
    params: SamplingParams
    speculation: Speculation


@dataclass(slots=True)
class Piece:
    """What came of one of a job's texts since the reader last looked: several steps run together, if he was slow."""

    index: int
    deltas: list[Delta] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()  # with the first piece, if they were asked for
    result: Result | None = None  # with the last piece


class Job:
    """The texts of one request. Belongs to the event loop; iterate over its pieces until each text has its result.

    A text that fails raises its error out of the iteration, and the others are cancelled.
    """

    def __init__(self, works: Sequence[Work], post: Callable[[Callable[[], None]], None], owner: EngineThread) -> None:
        self.works = works
        self.submitted = time.perf_counter()
        self.last = [self.submitted] * len(works)  # when each text grew last
        self.begun = [False] * len(works)  # whether it has a token
        self.results: list[Result | None] = [None] * len(works)
        self.was_cut = False
        self._post, self._owner = post, owner
        self._news: dict[int, Piece] = {}
        self._sent = [0] * len(works)  # characters handed to the reader or waiting for him
        self._open = len(works)
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrived, self._ended = asyncio.Event(), asyncio.Event()
        self._error: Exception | None = None
        self.ids: list[int] = []  # the engine's own; of the engine thread alone
        self._unsettled = len(works)  # texts of which the engine has not told the end, whoever still reads
        self._settled: list[Callable[[], None]] = []

    @property
    def failed(self) -> bool:
        """Whether an error ended it."""
        return self._error is not None and not isinstance(self._error, NeverBegunError)

    def when_settled(self, call: Callable[[], None]) -> None:
        """Call when all results that will come are there: also those of texts that nobody waited for."""
        if self._unsettled:
            self._settled.append(call)
        else:
            call()

    @property
    def open(self) -> int:
        """Texts that have not ended."""
        return self._open

    @property
    def prompt_tokens(self) -> int:
        """Of all texts together."""
        return sum(len(work.tokens) for work in self.works)

    @property
    def origin(self) -> Mapping[str, Any]:
        """They are written here."""
        return {}

    async def admitted(self) -> None:
        """Wait until the engine has taken all texts; raises what it refused them with."""
        await self._admitted

    async def pieces(self) -> AsyncIterator[Piece]:
        """What comes, as it comes."""
        while self._news or self._open or self._error is not None:
            await self._arrived.wait()
            self._arrived.clear()
            news, self._news = self._news, {}
            if isinstance(self._error, NeverBegunError):  # in place of texts without a token
                raise self._error
            for piece in news.values():
                yield piece
            if self._error is not None:
                raise self._error

    async def whole(self) -> list[Piece]:
        """All texts, each in one piece, when the last has ended."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        return [self._news[index] for index in range(len(self.works))]

    @property
    def finished(self) -> list[Result]:
        """The results that are there, in the order of the works."""
        return [result for result in self.results if result is not None]

    def cut(self) -> None:
        """End all texts now; what they have so far becomes their result, with the reason `cancelled`."""
        if self._open:
            self.was_cut = True
            self._post(partial(self._owner.cut, self))

    def close(self) -> None:
        """Nobody reads on: cancel what still runs, before the next step."""
        if self._open:
            self._open = 0
            self._post(partial(self._owner.cut, self))

    # -- called by the engine thread through the event loop ------------------------------------------------------

    def accept(self) -> None:
        if not self._admitted.done():
            self._admitted.set_result(None)

    def settle(self, index: int, outcome: Result | Exception) -> None:
        """The engine has told the end of a text."""
        if isinstance(outcome, Result):
            self.results[index] = outcome
        self._settle(1)

    def _settle(self, texts: int) -> None:
        self._unsettled -= texts
        if not self._unsettled:
            for call in self._settled:
                call()
            self._settled.clear()

    def turn_away(self, error: Exception) -> None:
        """The engine takes none of the texts."""
        self._settle(self._unsettled)
        self.refuse(error)

    def refuse(self, error: Exception) -> None:
        self._open = 0
        if not self._admitted.done():
            self._admitted.set_exception(error)
        else:
            self._error = error
            self._arrived.set()
            self._ended.set()

    def add(self, index: int, delta: Delta | None, result: Result | None) -> None:
        """A step's delta of one text, and its result with the last one."""
        piece = self._news.setdefault(index, Piece(index))
        if delta is not None:
            piece.deltas.append(delta)
            piece.logprobs += delta.logprobs
            piece.prompt_logprobs = piece.prompt_logprobs or delta.prompt_logprobs
            piece.text += delta.text
            self._sent[index] += len(delta.text)
        if result is not None:
            piece.text += result.text[self._sent[index] :]  # of a text that was cut: half characters, held stops
            piece.result = result
            self._open -= 1
            if not self._open:
                if self.was_cut and not any(self.begun):
                    self._error = NeverBegunError()
                self._ended.set()
        self._arrived.set()


@dataclass(slots=True)
class _News:
    job: Job
    index: int
    delta: Delta | None
    outcome: Result | Exception | None


class EngineThread:
    """Steps the engine while there is work, and sleeps otherwise."""

    def __init__(self, engine: Engine, watchers: Sequence[Watcher]) -> None:
        self.engine = engine
        self._watchers = list(watchers)
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._texts: dict[int, tuple[Job, int]] = {}  # by the engine's id
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self.faults = 0  # steps that failed

    def start(self) -> None:
        """Call from the event loop that the jobs belong to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step that it is in. Jobs that are still open are left as they are."""

        def stop() -> None:
            self._stopping = True

        self._commands.put(stop)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, works: Sequence[Work]) -> Job:
        """Hand texts to the engine; `await job.admitted()` says whether it takes them, all or none."""
        job = Job(works, self._commands.put, self)
        self._commands.put(partial(self._admit, job))
        return job

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """What the engine says between two steps."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def put() -> None:
            try:
                said = question(self.engine)
            except Exception as error:
                self._call(_settle, answer, None, error)
            else:
                self._call(_settle, answer, said, None)

        self._commands.put(put)
        return await answer

    # -- the engine thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            self._obey()
            if not self._stopping and self.engine.busy:
                try:
                    self._deliver(self.engine.step())
                except Exception as error:
                    self._fault(error)

    def _obey(self) -> None:
        """Carry out the commands that lie there; wait for one if there is nothing else to do."""
        while not self._stopping and (not self.engine.busy or not self._commands.empty()):
            self._commands.get()()

    def _admit(self, job: Job) -> None:
        try:
            for work in job.works:
                job.ids.append(self.engine.add(list(work.tokens), work.params, work.speculation))
        except Exception as error:
            for id in job.ids:
                self.engine.cancel(id)
                self.engine.result(id)
            self._call(job.turn_away, error)
            return
        self._texts |= {id: (job, index) for index, id in enumerate(job.ids)}
        self._call(job.accept)

    def cut(self, job: Job) -> None:
        """Command: cancel, and hand over what is there; it counts even if nobody wants it."""
        self._hand_over(_News(*self._texts.pop(id), None, self._cancel(id)) for id in job.ids if id in self._texts)

    def _cancel(self, id: int) -> Result | Exception:
        try:
            self.engine.cancel(id)
            return self.engine.result(id)
        except Exception as error:
            log.exception("a request could not be cancelled cleanly", extra={"engine_id": id})
            return error

    def _deliver(self, deltas: Iterable[Delta]) -> None:
        news: list[_News] = []
        for delta in deltas:
            found = self._texts.get(delta.id)
            if found is None:
                continue
            outcome: Result | Exception | None = None
            if delta.finish_reason is not None:
                del self._texts[delta.id]
                try:
                    outcome = self.engine.result(delta.id)
                except ValueError as error:
                    outcome = error
            news.append(_News(*found, delta, outcome))
        self._hand_over(news)

    def _fault(self, error: Exception) -> None:
        """A step failed in a way that is nobody's in particular: the texts that were in it end, the others go on."""
        self.faults += 1
        log.exception("a step failed; its texts end with an error", exc_info=error)
        news = []
        for id in self.engine.running or tuple(self._texts):
            found = self._texts.pop(id, None)
            self._cancel(id)
            if found is not None:
                news.append(_News(*found, None, EngineFaultError(f"{type(error).__name__}: {error}")))
        self._hand_over(news)

    def _hand_over(self, news: Iterable[_News]) -> None:
        batch = list(news)
        if batch:
            self._call(self._receive, batch, time.perf_counter())

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the event loop has ended before the last step did: nobody is left to hear of it
            log.debug("the event loop is closed")

    # -- the event loop ------------------------------------------------------------------------------------------

    def _receive(self, batch: list[_News], now: float) -> None:
        for news in batch:
            job, index = news.job, news.index
            if news.delta is not None:
                for watcher in self._watchers:
                    watcher.delta(job, index, news.delta, now)
                if news.delta.tokens:
                    job.begun[index] = True
                    job.last[index] = now
            if news.outcome is not None:
                job.settle(index, news.outcome)
            if isinstance(news.outcome, Exception):
                if job.open:
                    job.refuse(news.outcome)
                    self._commands.put(partial(self.cut, job))
                continue
            if news.outcome is not None:
                for watcher in self._watchers:
                    watcher.ended(job, index, news.outcome, now)
            if job.open:
                job.add(index, news.delta, news.outcome)


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
