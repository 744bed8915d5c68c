"""OpenTelemetry: a span per HTTP request, if the environment says where to send it (OTEL_EXPORTER_OTLP_ENDPOINT)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outrider.server.visit import Visit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["Tracing"]

log = logging.getLogger("outrider.server")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracing:
    """Makes a span of each visit when it is over; it continues the trace that the client names (`traceparent`).

    Attributes follow OpenTelemetry's conventions for HTTP servers and for generative models. No text is among them.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("outrider")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], model: str) -> Tracing | None:
        """None if nobody asked for traces; a warning if they cannot be had."""
        wanted = any(environment.get(name) for name in _ENDPOINTS)
        if not wanted or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set and OpenTelemetry is missing: pip install 'outrider[otel]'")
            return None
        name = environment.get("OTEL_SERVICE_NAME", "outrider")
        provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider, model)

    def visited(self, visit: Visit, route: str, headers: Mapping[str, str], seconds: float) -> None:
        """The visit is over and took so many seconds."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end = time.time_ns()
        span = self._tracer.start_span(
            f"{visit.method} {route}",
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=SpanKind.SERVER,
            start_time=end - int(seconds * 1e9),
            attributes=_attributes(visit, route, self._model),
        )
        if visit.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def _attributes(visit: Visit, route: str, model: str) -> dict[str, Any]:
    record = visit.record
    found: dict[str, Any] = {
        "http.request.method": visit.method,
        "http.route": route,
        "http.response.status_code": visit.status,
        "client.address": visit.client,
        "outrider.request_id": visit.id,
    }
    if "completion_tokens" in record:
        found |= {
            "gen_ai.operation.name": "chat" if "chat" in route else "text_completion",
            "gen_ai.request.model": model,
            "gen_ai.response.finish_reasons": record["finish_reasons"],
            "gen_ai.usage.input_tokens": record["prompt_tokens"],
            "gen_ai.usage.output_tokens": record["completion_tokens"],
            "outrider.drafters": record["drafters"],
            "outrider.drafted_tokens": record["drafted"],
            "outrider.accepted_tokens": record["accepted"],
        }
    return found
