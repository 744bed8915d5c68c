"""OpenAI's client, and the documentation's examples, against the real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from outrider import Engine
from serving import MODEL, Running, serving, settled

pytestmark = pytest.mark.model

ROOT = Path(__file__).parent.parent
RIVERS: dict[str, Any] = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Name three rivers."}],
    "max_tokens": 32,
    "temperature": 0,
}
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }} Call with <tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = Engine("smollm2-135m", drafter="ngram", threads=1, cache_tokens=16384)
    with serving(engine, names=("smollm2-135m", MODEL)) as running:
        yield running
        settled(running)


def test_chat_streams_what_plain_decoding_writes(server: Running) -> None:
    """The same text with the drafter, without, and in chunks; with log-probabilities; three choices differ."""
    body = RIVERS | {"logprobs": True, "top_logprobs": 2}
    drafted = server.client.chat.completions.create(**body)
    plain = server.client.chat.completions.create(**body, extra_body={"speculation": {"enabled": False}})
    assert drafted.choices == plain.choices
    text = "".join(
        chunk.choices[0].delta.content or "" for chunk in server.client.chat.completions.create(**body, stream=True)
    )
    assert text == plain.choices[0].message.content
    many = server.client.chat.completions.create(**RIVERS | {"n": 3, "temperature": 1.0, "seed": 1})
    assert len({choice.message.content for choice in many.choices}) == 3


def test_a_prediction_pays(server: Running) -> None:
    """The expected text is taken over, and what is in it is not written token by token."""
    text = server.client.chat.completions.create(**RIVERS).choices[0].message.content or ""
    answer = server.client.chat.completions.create(**RIVERS, prediction={"type": "content", "content": text})
    assert answer.choices[0].message.content == text
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert (answer.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 16


def test_forms_stops_and_errors(server: Running) -> None:
    """A JSON schema is kept, a stop string ends the text, and an error has OpenAI's class."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "length_km": {"type": "integer", "maximum": 9999}},
        "required": ["name", "length_km"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "river", "schema": schema, "strict": True}}
    answer = server.client.chat.completions.create(**RIVERS | {"max_tokens": 60}, response_format=form)
    assert list(json.loads(answer.choices[0].message.content or "")) == ["name", "length_km"]
    stopped = server.client.completions.create(
        model="smollm2-135m", prompt="One, two, three, four,", stop=", s", temperature=0
    )
    assert stopped.choices[0].text.endswith("five")
    with pytest.raises(openai.BadRequestError, match="top_p"):
        server.client.chat.completions.create(**RIVERS | {"top_p": 3})


def test_a_tool_is_called() -> None:
    """With a template that teaches calls; the arguments keep to the schema."""
    from outrider.models.chat_template import ChatTemplate

    tool: Any = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    engine = Engine("smollm2-135m", drafter="ngram", threads=1, cache_tokens=4096)
    engine.tokenizer.template = ChatTemplate(TOOL_TEMPLATE, {})
    with serving(engine) as running:
        answer = running.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=80,
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert list(json.loads(call.function.arguments)) == ["city"]


def test_the_command_serves_the_model_under_its_short_name() -> None:
    """`outrider serve` alone answers the documentation's requests: the name is the one that it is pulled by."""
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "--threads", "1", "--cache-tokens", "2048"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://\S+", process.stderr.readline())
            assert found
            with openai.OpenAI(base_url=found[0], api_key="none", max_retries=0) as client:
                assert client.models.list().data[0].id == "smollm2-135m"
                assert client.chat.completions.create(**RIVERS | {"max_tokens": 4}).model == "smollm2-135m"
        finally:
            process.terminate()
        assert process.wait(20) == 0


EXAMPLES = [
    pytest.param(language, text, id=f"{file}-{index}")
    for file in ("README.md", "docs/server.md")
    for index, (language, text) in enumerate(re.findall(r"```(bash|python)\n(.*?)```", (ROOT / file).read_text(), re.S))
    if "127.0.0.1:8000" in text
]


@pytest.mark.parametrize(("language", "text"), EXAMPLES)
def test_the_examples_run(server: Running, language: str, text: str) -> None:
    """Each curl and Python example of the documentation is answered."""
    code = text.replace("http://127.0.0.1:8000", server.url)
    command = ["bash", "-ec", code] if language == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert '"error"' not in done.stdout
    if '"stream": true' in text:
        assert done.stdout.rstrip().endswith("data: [DONE]")
    elif language == "bash":
        assert json.loads(done.stdout)["choices"]
    if language == "bash" and "json_schema" in text:
        assert json.loads(json.loads(done.stdout)["choices"][0]["message"]["content"])["age"] <= 120
