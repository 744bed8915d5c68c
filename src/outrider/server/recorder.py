"""What the server puts into its ledger, and when: never the text of a prompt or an answer unless it was told so.

A request becomes a row when its answer is complete and the engine has told the end of each of its texts, also of those
that nobody waited for. Error messages are left out of rows: they may quote what a client sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.audit.store import Event
from outrider.audit.writer import Writer
from outrider.engine.engine import Engine
from outrider.engine.results import Result
from outrider.engine.transitions import Listener, Transition
from outrider.server.visit import Visit

if TYPE_CHECKING:
    from outrider.server.settings import Auditing, Settings

__all__ = ["Recorded", "Recorder", "identity"]

_GONE = 499
_PARAMETERS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "min_tokens", "max_tokens", "ignore_eos", "logprobs",
)  # fmt: skip


class Recorded(Protocol):
    """Who writes the texts: `Engine`, or other servers together."""

    @property
    def default_drafter(self) -> str: ...

    @property
    def drafters(self) -> Sequence[str]:
        """Those that were loaded here."""
        ...

    def provenance(self, drafter: str) -> Mapping[str, Any]: ...

    def watch(self, listener: Listener) -> Callable[[], None]: ...


class Recorder(Collector):
    """Turns what happens into records. Belongs to the event loop; changes of mode come on the engine's thread."""

    def __init__(
        self,
        auditing: Auditing,
        model: str,
        writing: Recorded,
        identity: Callable[[], Mapping[str, Any]],
        decode: Callable[..., str] | None,
    ) -> None:
        """`identity` tells what the model is, and may read its files; `decode` makes the texts that are kept."""
        self._auditing, self._model, self._writing = auditing, model, writing
        self._identity, self._decode = identity, decode
        self._writer = Writer(auditing.ledger, policy=auditing.on_error, keep_seconds=auditing.keep_seconds)
        self._waiting: dict[int, _Served] = {}  # answers whose texts have not all ended
        self._known: set[str] = set()  # drafters that are recorded
        self._served = 0
        self._unwatch = writing.watch(self._changed)

    @property
    def refusal(self) -> str | None:
        """Why nothing new may be served."""
        return self._writer.refusal

    def start(self, settings: Settings) -> None:
        """Record what serves, and under which settings. Reads the files that were not hashed before."""
        before = "in order" if self._auditing.ledger.ended else "no end: the server was killed, or its machine failed"
        self._writer.put(
            Event(
                "start",
                time.time(),
                {
                    **self._auditing.origin,
                    "model": self._identity(),
                    "served_as": list(settings.names),
                    "drafter": self._writing.default_drafter,
                    "request_drafters": list(settings.drafters),
                    "keys": settings.keys.names,
                    "ledger": {
                        "on_error": self._auditing.on_error,
                        "keep_seconds": self._auditing.keep_seconds,
                        "with_text": self._auditing.with_text,
                    },
                    "server_before": before,
                },
            )
        )
        self._tell_drafters()
        self._writer.start()

    def stop(self) -> None:
        """Record the end, and write all that waits."""
        self._unwatch()
        for served in list(self._waiting.values()):
            self._put(served)
        self._writer.close(Event("end", time.time(), {"requests": self._served}))

    def visited(self, visit: Visit, route: str, seconds: float) -> None:
        """An answer is complete. Recorded are the routes that write texts, once a request got past the door."""
        if visit.method != "POST" or not route.startswith("/v1/"):
            return
        self._served += 1
        if visit.job is None and self.refusal is not None:
            self._writer.miss()  # refused because nothing can be written: only their number is kept
            return
        served = _Served(time.time(), visit, route, seconds, self._model, self._decode)
        if visit.job is None:
            self._put(served)
        else:
            self._waiting[id(served)] = served
            visit.job.when_settled(partial(self._put, served))

    def _put(self, served: _Served) -> None:
        self._waiting.pop(id(served), None)
        self._tell_drafters()
        self._writer.put(served)

    def tell(self, kind: str, body: Mapping[str, Any]) -> None:
        """Something else that an auditor wants to know."""
        self._writer.put(Event(kind, time.time(), dict(body)))

    def _tell_drafters(self) -> None:
        """Methods that were loaded since; a request that is the first to name one has loaded it."""
        for name in self._writing.drafters:
            if name not in self._known:
                self._known.add(name)
                if name != "none":
                    self._writer.put(_Loaded(time.time(), self._writing, name))

    def _changed(self, transition: Transition) -> None:
        told = transition.as_dict()
        self._writer.put(Event("mode", told.pop("time"), told))

    # -- for Prometheus ------------------------------------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        writer, labels = self._writer, ["model_name"]
        counts = (
            ("outrider_ledger_rows", "Rows written to the ledger by this process.", writer.written),
            ("outrider_ledger_failures", "Tries to write to the ledger that failed.", writer.failures),
            ("outrider_ledger_lost", "Records that were not written and never will be.", writer.lost),
        )
        for name, help, value in counts:
            counter = CounterMetricFamily(name, help, labels=labels)
            counter.add_metric([self._model], value)
            yield counter
        gauges = (
            ("outrider_ledger_queue", "Records that wait to be written.", writer.queued),
            ("outrider_ledger_writable", "1 if the last try succeeded.", writer.failure is None),
            ("outrider_ledger_head", "Number of the last row on the disk.", writer.head.number),
        )
        for name, help, state in gauges:
            gauge = GaugeMetricFamily(name, help, labels=labels)
            gauge.add_metric([self._model], state)
            yield gauge


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A drafter was loaded. What it was loaded from is hashed by the thread that writes."""

    time: float
    writing: Recorded
    name: str

    @property
    def kind(self) -> str:
        return "drafter"

    def body(self) -> Mapping[str, Any]:
        return self.writing.provenance(self.name)


@dataclass(frozen=True, slots=True)
class _Served:
    """One answer. Its row is made by the thread that writes."""

    time: float
    visit: Visit
    route: str
    seconds: float
    model: str
    decode: Callable[..., str] | None  # of the tokenizer, where texts are kept

    @property
    def kind(self) -> str:
        return "request"

    def body(self) -> Mapping[str, Any]:
        visit, job = self.visit, self.visit.job
        out: dict[str, Any] = {
            "id": visit.id,
            "endpoint": self.route,
            "key": visit.key,
            "model": self.model,
            "status": visit.status,
            "stream": bool(visit.record.get("stream")),
            "outcome": self._outcome(),
            "seconds": round(self.seconds, 6),
        }
        if job is None:
            return out
        results = [result for result in job.results if result is not None]
        first = job.works[0]
        params, speculation = first.params, first.speculation
        out |= {
            "parameters": {
                **{name: getattr(params, name) for name in _PARAMETERS},
                "stop": len(params.stop),  # how many: they are the client's own text
                "stop_token_ids": len(params.stop_token_ids),
                "logit_bias": len(params.logit_bias),
                "form": None if params.grammar is None else params.grammar.kind,
                "seeds": [result.seed for result in results if result.seed is not None],
            },
            "speculation": {
                "drafter": speculation.drafter,
                "enabled": speculation.enabled,
                "max_draft_tokens": speculation.max_draft_tokens,
                "verify": speculation.verify,
                "prediction": speculation.prediction is not None,
            },
            "texts": len(job.works),
            "prompt_tokens": job.prompt_tokens,
            "finish_reasons": [result.finish_reason for result in results],
            **_counts(results),
            **job.origin,
        }
        if self.decode is not None:
            out["prompts"] = [self.decode(work.tokens, skip_special=False) for work in job.works]
            out["answers"] = [result.text for result in results]
        return out

    def _outcome(self) -> str:
        visit, job = self.visit, self.visit.job
        if visit.status == _GONE:
            return "cancelled"  # the client went
        if job is not None and job.was_cut:
            return "cut"  # its time was up, or the server ended
        if visit.status == 500 or (job is not None and job.failed):
            return "failed"
        return "refused" if visit.status >= 400 else "finished"


def _counts(results: list[Result]) -> dict[str, Any]:
    """Tokens, guesses and times of the texts of a request."""
    steps = [step for result in results for step in result.steps]
    drafts = [step for step in steps if step.drafted]
    accepted = sum(step.accepted for step in drafts)
    # the first token of an answer that another server sent at once was not seen
    written = [result for result in results if result.usage.completion_tokens and not math.isnan(result.ttft)]
    later = sum(result.usage.completion_tokens - 1 for result in written)
    return {
        "completion_tokens": sum(result.usage.completion_tokens for result in results),
        "drafters": sorted({result.drafter for result in results}),
        "drafters_failed": sorted({_failed(result.drafter_error) for result in results if result.drafter_error}),
        "forwards": len(steps),
        "drafts": len(drafts),
        "drafted": sum(step.drafted for step in drafts),
        "accepted": accepted,
        "mean_acceptance_length": round(1 + accepted / len(drafts), 6) if drafts else None,
        "ttft": round(min(result.ttft for result in written), 6) if written else None,
        "tpot": round(sum(r.seconds - r.ttft for r in written) / later, 6) if later else None,
    }


def _failed(error: str) -> str:
    """Drafter and class of the error; its message may quote the text."""
    return ": ".join(error.removeprefix("drafter ").split(": ")[:2])


def identity(engine: Engine) -> dict[str, Any]:
    """Of the model that an engine runs. Reads its files."""
    files, template = engine.files, engine.tokenizer.template
    return {
        "name": files.name,
        "file": files.path.name,
        "sha256": files.sha256(),
        "weights": files.quantisation,
        "tokenizer_sha256": engine.tokenizer.fingerprint(),
        "chat_template_sha256": None if template is None else sha256(template.source.encode()).hexdigest(),
    }
