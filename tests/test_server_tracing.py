"""Spans, and vLLM's way to choose a drafter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.cli.errors import CommandError
from outrider.cli.options import DraftOptions
from outrider.cli.speculative_config import merged
from outrider.server.tracing import Tracing
from serving import MODEL, serving, settled


def test_a_request_becomes_a_span_in_its_clients_trace() -> None:
    """With the route, the tokens and no text; nothing is traced unless the environment asks."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace = "0af7651916cd43dd8448eb211c80319c"
    with serving() as running:
        assert running.service.tracing is None
        running.service.tracing = Tracing(provider, MODEL)
        running.client.completions.create(
            model=MODEL, prompt="secret", max_tokens=4, extra_headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        )
        settled(running)
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == trace
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.input_tokens"] == 6
    assert span.attributes["http.response.status_code"] == 200
    assert "secret" not in span.to_json()


def test_traces_are_made_if_the_environment_asks() -> None:
    """An endpoint is enough; a disabled SDK is not."""
    assert Tracing.from_environment({}, MODEL) is None
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert Tracing.from_environment(endpoint | {"OTEL_SDK_DISABLED": "true"}, MODEL) is None
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    tracing = Tracing.from_environment(endpoint, MODEL)
    assert tracing is not None
    tracing.close()


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
            {"drafter": "ngram", "max_draft_tokens": 5, "drafter_option": ["max_ngram=4"]},
        ),
        ({"model": "a.gguf"}, {"drafter": "draft_model", "draft_model": "a.gguf"}),
        ({"method": "eagle3", "model": "head"}, {"drafter": "eagle", "drafter_option": ["head=head"]}),
        ({"method": "suffix"}, {"drafter": "suffix"}),
        ({"method": "suffix", "min_acceptance": 0.6}, {"drafter": "suffix", "min_acceptance": 0.6}),
    ],
)
def test_vllms_config_is_understood(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Its keys become our options."""
    assert merged(DraftOptions(), json.dumps(config)) == DraftOptions(**wanted)
    assert merged(DraftOptions(), None) == DraftOptions()


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ("{}", "method"),
        ('{"method": "mtp"}', "'mtp'"),
        ('{"method": "draft_model"}', "model is missing"),
        ('{"method": "ngram", "model": "a"}', "'model'"),
        ('{"method": "suffix", "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size"),
        ('{"method": "ngram", "num_speculative_tokens": "5"}', "num_speculative_tokens"),
        ('{"method": "ngram", "min_acceptance": "high"}', "min_acceptance 'high' is not a number"),
    ],
)
def test_what_vllms_config_cannot_say_here_is_refused(text: str, culprit: str) -> None:
    """By name."""
    with pytest.raises(CommandError, match=culprit):
        merged(DraftOptions(), text)
    with pytest.raises(CommandError, match="other options"):
        merged(DraftOptions(drafter="ngram"), '{"method": "ngram"}')
    with pytest.raises(CommandError, match="--min-acceptance too"):
        merged(DraftOptions(min_acceptance=0.5), '{"method": "ngram", "min_acceptance": 0.6}')
