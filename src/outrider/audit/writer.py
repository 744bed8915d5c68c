"""The thread that writes: records go into a queue and never make a text wait.

It commits whatever lies in the queue at once. Where the disk fails, the records stay, it tries again, and the policy
decides what happens meanwhile. `stop`: nothing new is served, so that nothing goes unrecorded. `continue`: serving goes
on, and what the queue cannot hold is lost, counted, and told by a row as soon as one can be written.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.audit.chain import Head, encode, timestamp
from outrider.audit.store import Event, Ledger, Record

__all__ = ["Policy", "Writer"]

Policy = Literal["stop", "continue"]
log = logging.getLogger("outrider.ledger")

_BATCH = 256  # rows of one transaction
_TOLD = 3600.0  # seconds between heads in the log
_PRUNED = 86_400.0  # seconds between looks for what is too old
_HOUSE = 60.0  # seconds between looks whether there is something to do


@dataclass(slots=True)
class _Gap:
    """Records that were not written."""

    records: int = 0
    since: float = 0.0

    def add(self, now: float) -> None:
        self.since = self.since or now
        self.records += 1


class Writer:
    """Writes records to a ledger, which belongs to it from now on. `put` may be called from any thread."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        policy: Policy = "stop",
        keep_seconds: float | None = None,
        capacity: int = 8192,
        retry_seconds: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.policy = policy
        self.written = self.failures = self.lost = 0
        self.failure: str | None = None  # why nothing can be written at present
        self._ledger, self._keep, self._retry, self._clock = ledger, keep_seconds, retry_seconds, clock
        self._queue: queue.Queue[Record | None] = queue.Queue()
        self._capacity = capacity
        self._gap, self._guard = _Gap(), threading.Lock()
        self._ending = threading.Event()
        self._told = ""  # the head that the log had last
        self._next_told = self._next_pruned = 0.0
        self._thread = threading.Thread(target=self._run, name="outrider-ledger", daemon=True)

    @property
    def head(self) -> Head:
        """Of what is on the disk."""
        return self._ledger.head

    @property
    def queued(self) -> int:
        """Records that wait to be written."""
        return self._queue.qsize()

    @property
    def refusal(self) -> str | None:
        """Why nothing new may be served; None while all is well, and always under `continue`."""
        if self.policy == "continue":
            return None
        if self.failure is None and self.queued > self._capacity // 2:  # the rest is for what runs already
            return f"{self.queued} records wait to be written"
        return self.failure

    def start(self) -> None:
        self._thread.start()

    def put(self, record: Record) -> None:
        """Record something; returns at once."""
        if self.queued >= self._capacity:
            self.miss()
        else:
            self._queue.put(record)

    def miss(self) -> None:
        """Something happened that is not recorded, because nothing can be written: only its number will be."""
        with self._guard:
            self.lost += 1
            self._gap.add(self._clock())

    def close(self, *last: Record) -> Head:
        """Write what waits and the last records, end the thread, close the ledger; the head that it ends with.

        Where the disk still fails, it tries once more and gives up.
        """
        for record in last:
            self.put(record)
        self._ending.set()
        self._queue.put(None)  # wakes the thread
        self._thread.join()
        head = self._ledger.head
        self._ledger.close()
        return head

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        batch: list[Event] = []
        while True:
            if not batch:
                batch = self._take()
            done = self._ending.is_set()
            if self._write(batch):
                batch = []
                self._keep_house()
                if done and self._queue.empty():
                    break
            elif done:
                self.lost += len(batch) + self.queued
                log.error("the ledger ends without its last rows", extra={"fields": {"records": self.lost}})
                break
            else:
                self._ending.wait(self._retry)
        self._tell_head()

    def _take(self) -> list[Event]:
        """What lies in the queue; waits for something, or until there is housekeeping to do."""
        out: list[Event] = []
        try:
            found = self._queue.get(timeout=_HOUSE if self.failure is None else self._retry)
            while True:
                if found is not None:
                    out += self._ready(found)
                if len(out) == _BATCH:
                    break
                found = self._queue.get_nowait()
        except queue.Empty:
            pass
        return out

    def _ready(self, record: Record) -> list[Event]:
        """The record with its body made; nothing where that fails: a fault of the program and not of the disk."""
        try:
            body = record.body()
            encode(body)
            timestamp(record.time)
        except Exception:
            log.exception("a record of the kind %r cannot be made", record.kind)
            self.miss()
            return []
        return [Event(record.kind, record.time, body)]

    def _write(self, batch: Sequence[Event]) -> bool:
        with self._guard:
            gap, self._gap = self._gap, _Gap()
        rows = [*batch]
        if gap.records:
            told = {"records": gap.records, "since": timestamp(gap.since)}
            rows.append(Event("gap", self._clock(), told))
        if not rows:
            return True
        try:
            self._ledger.append(rows)
        except (sqlite3.Error, OSError) as error:
            self._failed(error)
            with self._guard:
                self._gap.records += gap.records
                self._gap.since = gap.since or self._gap.since
            return False
        self.written += len(rows)
        self._works()
        return True

    def _works(self) -> None:
        if self.failure is not None:
            self.failure = None
            log.warning("the ledger is written again", extra={"fields": {"head": str(self._ledger.head)}})

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        if self.failure != reason:
            meanwhile = "nothing new is served" if self.policy == "stop" else "serving goes on"
            log.error("the ledger cannot be written: %s; %s until it can (--ledger-on-error)", reason, meanwhile)
        self.failure = reason

    def _keep_house(self) -> None:
        now = self._clock()
        if now >= self._next_told:
            self._next_told = now + _TOLD
            self._tell_head()
        if self._keep is not None and now >= self._next_pruned:
            try:
                removed = self._ledger.prune(now - self._keep)
            except (sqlite3.Error, OSError) as error:
                self._failed(error)
                return
            self._works()
            self._next_pruned = now + min(_PRUNED, self._keep)
            if removed:
                log.info("old rows of the ledger are removed", extra={"fields": {"rows": removed}})

    def _tell_head(self) -> None:
        head = str(self._ledger.head)
        if head != self._told:  # whoever keeps the log elsewhere can hold the ledger to it
            self._told = head
            log.info("the ledger's head", extra={"fields": {"head": head}})
