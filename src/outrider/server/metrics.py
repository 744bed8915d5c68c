"""Prometheus metrics: vLLM's under vLLM's names, so that its dashboards work, and ours under `outrider_`.

Counters of text are kept per step as it happens, those of requests when they end. Per request: the object that vLLM
calls `metrics.speculative_decoding`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.engine.engine import Engine
from outrider.engine.results import Delta, Result, Step

if TYPE_CHECKING:
    from outrider.server.history import Writing
    from outrider.server.texts import Texts

__all__ = ["CONTENT_TYPE", "EngineState", "Metrics", "build_info", "progress", "speculative_decoding"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_PER_STEP = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)


class Metrics:
    """Watches texts (`texts.Watcher`) and the HTTP requests of one server."""

    def __init__(self, model: str, state: Collector) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._positions: list[Counter] = []
        self.registry.register(state)

        def counter(name: str, help: str) -> Counter:
            made = Counter(name, help, ["model_name"], registry=self.registry)
            return made.labels(model)

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(name, help, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model)

        self._prompt = counter("vllm:prompt_tokens", "Tokens of the prompts.")
        self._cached = counter("vllm:prompt_tokens_cached", "Tokens of the prompts that came from the prefix cache.")
        self._generated = counter("vllm:generation_tokens", "Tokens written.")
        self._success = Counter(
            "vllm:request_success",
            "Texts that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between two steps of one text.", _SECONDS)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first, by text.", _SECONDS
        )
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompt_lengths = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._lengths = histogram("vllm:request_generation_tokens", "Tokens of a text.", _TOKENS)
        self._drafts = counter("vllm:spec_decode_num_drafts", "Drafts verified.")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Guesses verified.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Guesses accepted.")
        self._per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Guesses accepted, by their place in the draft.",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._wasted = counter("outrider_wasted_tokens", "Guesses verified in vain.")
        self._step_tokens = histogram("outrider_tokens_per_step", "Tokens that one step added to one text.", _PER_STEP)
        self._given_up = counter("outrider_drafter_failures", "Texts whose drafter failed and was given up.")
        self._http = Counter(
            "outrider_http_requests", "HTTP requests answered.", ["route", "method", "status"], registry=self.registry
        )
        self._http_seconds = Histogram(
            "outrider_http_seconds", "From the request to the end of its answer.", ["route"], registry=self.registry
        )

    def delta(self, job: Texts, index: int, delta: Delta, now: float) -> None:
        """A step added to a text."""
        step = delta.step
        if step is not None and step.drafted:
            self._drafts.inc()
            self._draft_tokens.inc(step.drafted)
            self._accepted.inc(step.accepted)
            self._wasted.inc(step.drafted - step.accepted)
            for counter in self._by_position(step.accepted):
                counter.inc()
        if not delta.tokens:
            return
        self._generated.inc(len(delta.tokens))
        self._step_tokens.observe(len(delta.tokens))
        self.arrived(job, index, now)

    def arrived(self, job: Texts, index: int, now: float) -> None:
        """A text grew."""
        if job.begun[index]:
            self._itl.observe(now - job.last[index])
        else:
            self._ttft.observe(now - job.submitted)

    def wrote(self, tokens: int) -> None:
        """So many tokens were written elsewhere, in steps that cannot be seen from here."""
        self._generated.inc(tokens)

    def guessed(self, drafts: int, drafted: int, by_position: Sequence[int]) -> None:
        """Drafts were verified elsewhere; `by_position` are the accepted guesses by their place in the draft."""
        accepted = sum(by_position)
        self._drafts.inc(drafts)
        self._draft_tokens.inc(drafted)
        self._accepted.inc(accepted)
        self._wasted.inc(max(0, drafted - accepted))
        for counter, count in zip(self._by_position(len(by_position)), by_position, strict=True):
            counter.inc(count)

    def ended(self, job: Texts, index: int, result: Result, now: float) -> None:
        """A text has its end, if only by being cancelled."""
        usage = result.usage
        self._success.labels(
            self._model, "abort" if result.finish_reason == "cancelled" else result.finish_reason
        ).inc()
        self._prompt.inc(usage.prompt_tokens)
        self._cached.inc(usage.cached_tokens)
        if result.drafter_error is not None:
            self._given_up.inc()
        self._prompt_lengths.observe(usage.prompt_tokens)
        self._lengths.observe(usage.completion_tokens)
        self._whole.observe(now - job.submitted)
        if usage.completion_tokens > 1 and not math.isnan(result.ttft):
            self._tpot.observe((result.seconds - result.ttft) / (usage.completion_tokens - 1))

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """An HTTP answer is complete. `route`: the route's template, not what the client wrote."""
        self._http.labels(route, method, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)

    def _by_position(self, accepted: int) -> list[Counter]:
        while len(self._positions) < accepted:
            self._positions.append(self._per_position.labels(self._model, str(len(self._positions))))
        return self._positions[:accepted]


class EngineState(Collector):
    """What is read from the engine when somebody asks. Plain reads of whole numbers: safe from another thread."""

    def __init__(self, model: str, engine: Engine, version: str) -> None:
        self._model, self._engine, self._version = model, engine, version
        self.memory: Mapping[str, int] = {}  # what `Engine.memory` said in the engine's thread

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        engine, model = self._engine, self._model
        pages = engine.pages

        def gauge(name: str, help: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, help, labels=["model_name"])
            family.add_metric([model], value)
            return family

        def counter(name: str, help: str, value: float) -> Metric:
            family = CounterMetricFamily(name, help, labels=["model_name"])
            family.add_metric([model], value)
            return family

        yield from progress(model, engine)
        states = GaugeMetricFamily("outrider_cache_pages", "Pages of the cache.", labels=["model_name", "state"])
        free, cached = pages.free, pages.cached
        for state, count in (("used", pages.count - free), ("cached", cached), ("free", free - cached)):
            states.add_metric([model, state], count)
        yield states
        yield counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", engine.prefix_queries
        )
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found there.", engine.prefix_hits)
        yield counter("outrider_steps", "Forwards of the target.", engine.steps)
        seconds = CounterMetricFamily("outrider_step_seconds", "Seconds in steps.", labels=["model_name", "phase"])
        for phase, value in engine.seconds.items():
            seconds.add_metric([model, phase], value)
        yield seconds
        memory = GaugeMetricFamily("outrider_memory_bytes", "Bytes held, by purpose.", labels=["model_name", "purpose"])
        for purpose, size in self.memory.items():
            memory.add_metric([model, purpose], size)
        yield memory
        yield build_info(self._version)


def build_info(version: str) -> Metric:
    """Which Outrider answers."""
    build = GaugeMetricFamily("outrider_build_info", "1, with the version as label.", labels=["version"])
    build.add_metric([version], 1)
    return build


def progress(model: str, writing: Writing) -> Iterator[Metric]:
    """Of whoever writes the texts: load, modes and speed."""
    pages, speed = writing.pages, writing.speed
    gauges = (
        ("vllm:num_requests_running", "Texts in the batch.", len(writing.running)),
        ("vllm:num_requests_waiting", "Texts that wait for a place in it.", writing.waiting),
        (
            "vllm:kv_cache_usage_perc",
            "Share of the cache's pages in use; 1 is all.",
            1 - pages.free / pages.count if pages.count else 0.0,
        ),
    )
    for name, help, value in gauges:
        gauge = GaugeMetricFamily(name, help, labels=["model_name"])
        gauge.add_metric([model], value)
        yield gauge
    labels = ["model_name", "drafter"]
    mode = GaugeMetricFamily("outrider_mode", "1 while the drafter drafts, 0 while it does not pay.", labels=labels)
    for drafter, current in writing.modes.items():
        mode.add_metric([model, drafter], current == "speculative")
    yield mode
    changes = CounterMetricFamily(
        "outrider_mode_transitions", "Changes of mode, by new mode and reason.", labels=[*labels, "mode", "reason"]
    )
    for (drafter, after, reason), count in writing.transition_counts.items():
        changes.add_metric([model, drafter, after, reason], count)
    yield changes
    counters = (
        ("vllm:num_preemptions", "Texts put back for want of pages.", writing.preemptions),
        ("outrider_decoded_tokens", "Tokens of steps that did nothing but decode.", speed.tokens),
        ("outrider_decode_seconds", "Seconds in those steps.", speed.seconds),
        (
            "outrider_compared_decode_seconds",
            "Of these, with a drafter, while the time of a plain step was known.",
            speed.compared_seconds,
        ),
        (
            "outrider_plain_decode_seconds",
            "What their tokens would have taken without guesses; over the compared ones it is the speed-up.",
            speed.plain_seconds,
        ),
    )
    for name, help, value in counters:
        family = CounterMetricFamily(name, help, labels=["model_name"])
        family.add_metric([model], value)
        yield family


def speculative_decoding(results: Sequence[Result]) -> dict[str, Any] | None:
    """vLLM's `metrics.speculative_decoding` over the texts of one request; None if nothing was drafted.

    The histogram counts drafts by how many of their guesses were accepted; its sum is `num_spec_steps`.
    `mean_acceptance_length` is 1 + accepted / drafts.
    """
    steps: list[Step] = [step for result in results for step in result.steps if step.drafted]
    if not steps:
        return None
    accepted = sum(step.accepted for step in steps)
    drafted = sum(step.drafted for step in steps)
    histogram = [0] * (max(step.accepted for step in steps) + 1)
    for step in steps:
        histogram[step.accepted] += 1
    return {
        "mean_acceptance_length": 1 + accepted / len(steps),
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max(result.max_draft_tokens for result in results),
    }
