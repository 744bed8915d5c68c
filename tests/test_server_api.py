"""The API through OpenAI's own client, over a tiny model: every form of answer, and every refusal by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from outrider import SamplingParams, Speculation
from outrider.server.settings import Keys, Limits
from serving import MODEL, Running, serving, settled, tiny_engine

PROMPT = "abcd abcd abcd abcd"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ab ab ab ab ab ab"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running
        settled(running)


@pytest.fixture(scope="module")
def bytewise() -> Iterator[Running]:
    """A model whose tokens are bytes: most of its characters are in several of them."""
    with serving(tiny_engine(vocabulary=300)) as running:
        yield running
        settled(running)


def plain(running: Running, prompt: Any, **params: Any) -> Any:
    """The same text from an engine of its own, without speculation."""
    alone = tiny_engine(drafter="none", vocabulary=running.engine.config.vocabulary)
    (result,) = alone.generate([prompt], SamplingParams(**params), speculation=Speculation(enabled=False))
    return result


# -- completions ---------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_engine_writes(server: Running) -> None:
    """Text, log-probabilities, usage and finish reason equal plain decoding's."""
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0.7, seed=5, logprobs=2
    )
    wanted = plain(server, PROMPT, max_tokens=24, temperature=0.7, seed=5, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == wanted.text
    assert choice.finish_reason == wanted.finish_reason
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [entry.logprob for entry in wanted.logprobs]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(wanted.tokens)
    assert answer.usage.prompt_tokens == len(wanted.prompt_tokens)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")


def test_the_default_is_16_tokens_at_temperature_1(server: Running) -> None:
    """As OpenAI and vLLM have it."""
    answer = server.client.completions.create(model=MODEL, prompt=PROMPT, seed=1, extra_body={"ignore_eos": True})
    wanted = plain(server, PROMPT, max_tokens=16, temperature=1.0, seed=1, ignore_eos=True)
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_brings_the_same_text(server: Running) -> None:
    """The chunks joined are the whole answer; one of them has a finish reason; the last one has the usage alone."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0.6,
        "seed": 2,
        "logprobs": 1,
    }
    whole = server.client.completions.create(**body)
    chunks = list(server.client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert [c.finish_reason for c in choices if c.finish_reason] == [whole.choices[0].finish_reason]
    assert choices[-1].finish_reason
    logprobs = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs or ()]
    offsets = [value for choice in choices if choice.logprobs for value in choice.logprobs.text_offset or ()]
    assert whole.choices[0].logprobs is not None
    assert logprobs == whole.choices[0].logprobs.token_logprobs
    assert offsets == whole.choices[0].logprobs.text_offset
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_some_chunks_bring_several_tokens(server: Running) -> None:
    """What one step accepts comes in one chunk: fewer chunks than tokens, with the text given as the prediction."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 60,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    text = server.client.completions.create(**body).choices[0].text
    body["extra_body"]["prediction"] = {"type": "content", "content": text}
    chunks = list(server.client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text
    assert len(chunks) < 40
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens > 30


def test_choices_are_the_seeds_after_the_first(server: Running) -> None:
    """Choice i of n is the text of seed + i, whether streamed or not, with several prompts too."""
    prompts = [PROMPT, "xyz xyz"]
    body: dict[str, Any] = {"model": MODEL, "prompt": prompts, "max_tokens": 12, "temperature": 1.2, "seed": 7, "n": 3}
    answer = server.client.completions.create(**body)
    wanted = [
        plain(server, prompt, max_tokens=12, temperature=1.2, seed=7 + index).text
        for prompt in prompts
        for index in range(3)
    ]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len(set(wanted)) == 6
    texts = dict.fromkeys(range(6), "")
    for chunk in server.client.completions.create(**body, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == wanted
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT) + len("xyz xyz")  # each prompt once, a token per character


def test_a_prompt_may_be_tokens(server: Running) -> None:
    """Token ids, alone or in lists, are taken as they are; echo writes their text in front."""
    ids = server.engine.encode(PROMPT)
    text = server.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=9, temperature=0).choices[0].text
    for prompt in (ids, [ids, ids]):
        answer = server.client.completions.create(model=MODEL, prompt=prompt, max_tokens=9, temperature=0, echo=True)
        assert {choice.text for choice in answer.choices} == {PROMPT + text}
    chunks = server.client.completions.create(
        model=MODEL, prompt=ids, max_tokens=9, temperature=0, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + text


def test_a_stop_string_ends_a_text_and_is_never_sent(server: Running) -> None:
    """Not even half of it, in any chunk; with include_stop_str_in_output it is part of the text."""
    text = (
        server.client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
        )
        .choices[0]
        .text
    )
    stop = text[10:13]
    cut = text[: text.index(stop)]
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 30,
        "temperature": 0,
        "stop": [stop, "never"],
    }
    answer = server.client.completions.create(**body, extra_body={"ignore_eos": True})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
    assert answer.choices[0].model_extra == {"stop_reason": stop}
    chunks = list(server.client.completions.create(**body, extra_body={"ignore_eos": True}, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut
    kept = server.client.completions.create(**body, extra_body={"ignore_eos": True, "include_stop_str_in_output": True})
    assert kept.choices[0].text == cut + stop


def test_no_chunk_ends_within_a_character(bytewise: Running) -> None:
    """Each chunk is whole UTF-8: joined as bytes they are the text, with characters of several tokens in it."""
    body: dict[str, Any] = {
        "model": MODEL, "prompt": "é€", "max_tokens": 60, "temperature": 0.8, "seed": 3,
        "logit_bias": {str(token): 6.0 for token in bytewise.engine.encode("é")},
    }  # fmt: skip
    whole = bytewise.client.completions.create(**body).choices[0].text
    assert any(ord(character) > 127 and character != "\ufffd" for character in whole)
    chunks = [chunk.choices[0].text for chunk in bytewise.client.completions.create(**body, stream=True)]
    assert "".join(chunks) == whole
    assert "é" in "".join(chunks)


# -- chat ----------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered(server: Running) -> None:
    """Content and log-probabilities with their bytes equal plain decoding's of the rendered template."""
    answer = server.client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=20, temperature=0, logprobs=True, top_logprobs=3
    )
    wanted = plain(server, CHAT, max_tokens=20, temperature=0.0, logprobs=3)
    (choice,) = answer.choices
    assert choice.message.content == wanted.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == wanted.finish_reason
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [entry.logprob for entry in wanted.logprobs]
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content[:5]).decode() == wanted.text[:5]


def test_a_chat_streams(server: Running) -> None:
    """A first chunk with the role, then content, then a finish reason, for each of n choices."""
    body: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 20, "temperature": 0.9, "seed": 11, "n": 2}
    whole = server.client.chat.completions.create(**body)
    texts, reasons, roles = ["", ""], ["", ""], ["", ""]
    for chunk in server.client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] += choice.finish_reason or ""
        roles[choice.index] += choice.delta.role or ""
        assert chunk.usage is None
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert roles == ["assistant", "assistant"]


def test_content_may_be_parts(server: Running) -> None:
    """Text parts are joined, and `developer` is a system message to a template that does not know it."""
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "ab ab ab"}, {"type": "text", "text": "ab"}]},
    ]
    joined = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ab ab ab\nab"}]
    texts = {
        server.client.chat.completions.create(model=MODEL, messages=m, max_tokens=9, temperature=0)
        .choices[0]
        .message.content  # type: ignore[arg-type]
        for m in (parts, joined)
    }
    assert len(texts) == 1


# -- responses -----------------------------------------------------------------------------------------------------


def test_a_response_is_a_chat(server: Running) -> None:
    """Text, usage and status; instructions are a system message, and an answer may be sent back."""
    chat = server.client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=20, temperature=0)
    body: dict[str, Any] = {"model": MODEL, "instructions": "Be brief.", "max_output_tokens": 20, "temperature": 0}
    answer = server.client.responses.create(**body, input="ab ab ab ab ab ab", metadata={"trace": "7"})
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    ended = chat.choices[0].finish_reason == "stop"
    assert answer.status == ("completed" if ended else "incomplete")
    assert answer.metadata == {"trace": "7"}
    back = [{"role": "user", "content": "ab"}, answer.output[0].model_dump(), {"role": "user", "content": "cd"}]
    assert server.client.responses.create(**body, input=back).output_text


def test_a_response_streams(server: Running) -> None:
    """OpenAI's events in their order, numbered; the deltas joined are the text of the last one."""
    body: dict[str, Any] = {"model": MODEL, "input": "ab ab ab", "max_output_tokens": 16, "extra_body": {"seed": 2}}
    whole = server.client.responses.create(**body)
    events = list(server.client.responses.create(**body, stream=True))
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-1] == f"response.{whole.status}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"store": True}, "store"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": []}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_response_that_cannot_be_is_refused(server: Running, change: dict[str, Any], parameter: str) -> None:
    """By the names of this route."""
    body = json.dumps({"model": MODEL, "input": "ab", **change})
    refused = httpx2.post(f"{server.url}/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, parameter), refused.text


# -- speculation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "speculation",
    [
        {"enabled": False},
        {"drafter": "junk", "max_draft_tokens": 3},
        {"drafter": "suffix"},
        {"drafter": "ngram", "max_draft_tokens": 0},
        {"verify": "match"},
    ],
)
def test_speculation_changes_the_figures_and_not_the_text(server: Running, speculation: dict[str, Any]) -> None:
    """Each request has its own drafter; the answer is the same."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 100, "temperature": 0, "logprobs": 1}
    extra = {"ignore_eos": True}
    usual = server.client.completions.create(**body, extra_body=extra)
    answer = server.client.completions.create(**body, extra_body=extra | {"speculation": speculation})
    assert answer.choices == usual.choices
    figures = answer.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
    if not speculation.get("enabled", True) or speculation.get("max_draft_tokens") == 0:
        assert figures is None
        return
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] > 0
    assert sum(i * n for i, n in enumerate(figures["acceptance_histogram"])) == figures["num_accepted_draft_tokens"]
    assert figures["mean_acceptance_length"] == 1 + figures["num_accepted_draft_tokens"] / figures["num_spec_steps"]
    assert figures["draft_acceptance_rate"] == figures["num_accepted_draft_tokens"] / figures["num_draft_tokens"]
    if "max_draft_tokens" in speculation:
        assert figures["num_spec_tokens"] == speculation["max_draft_tokens"]


def test_a_prediction_is_counted_in_the_usage(server: Running) -> None:
    """OpenAI's accepted and rejected prediction tokens; the text is the same without the prediction."""
    body: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 40, "temperature": 0}
    usual = server.client.chat.completions.create(**body)
    content = usual.choices[0].message.content or ""
    wrong = content[:12] + ("!" if content[12] == "?" else "?") + content[13:]
    answer = server.client.chat.completions.create(**body, prediction={"type": "content", "content": wrong})
    assert answer.choices == usual.choices
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 8
    assert (details.rejected_prediction_tokens or 0) > 0
    assert usual.usage is not None
    assert usual.usage.completion_tokens_details is not None
    assert usual.usage.completion_tokens_details.accepted_prediction_tokens == 0


# -- forms ---------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "tall": {"type": "boolean"}},
    "required": ["name", "tall"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_keeps_to_its_schema(server: Running, stream: bool) -> None:
    """JSON of the schema, the same with and without speculation, with some of it drafted."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": CHAT,
        "temperature": 1.0,
        "seed": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    }
    plain_text = server.client.chat.completions.create(**body, extra_body={"speculation": {"enabled": False}})
    if stream:
        chunks = server.client.chat.completions.create(**body, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        answer = server.client.chat.completions.create(**body)
        text = answer.choices[0].message.content or ""
        assert answer.choices[0].finish_reason == "stop"
        assert answer.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 4  # type: ignore[index]
    assert text == plain_text.choices[0].message.content
    value = json.loads(text)
    assert list(value) == ["name", "tall"]
    assert isinstance(value["tall"], bool)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        (
            {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}},
            r"\[(true|false)(, (true|false))?\]",
        ),
        ({"regex": "[a-f]{4}-[0-9]{2}"}, "[a-f]{4}-[0-9]{2}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'root ::= "<" [a-z] ">"'}, "<[a-z]>"),
        ({"grammar": "start: /x{2,3}/"}, "x{2,3}"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_structured_outputs_are_kept(server: Running, outputs: dict[str, Any], pattern: str) -> None:
    """vLLM's field, for completions too; choices of n all keep to it."""
    answer = server.client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, n=3, seed=2, extra_body={"structured_outputs": outputs}
    )
    assert all(re.fullmatch(pattern, choice.text) for choice in answer.choices), answer.choices


# -- refusals ------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": None, "top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"logit_bias": {str(token): 1 for token in range(5000)}}, "logit_bias"),
    ({"stop_token_ids": [5000]}, "stop_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"4000": 1}}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"seed": 2**70}, "seed"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [97]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "ab" * 400}, "prompt"),
    ({"speculation": {"drafter": "nothing"}}, "speculation.drafter"),
    ({"speculation": {"drafter": "draft_model"}}, "speculation.drafter"),
    ({"speculation": {"drafter": "prediction"}}, "speculation.drafter"),
    ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
    ({"speculation": {"verify": "typical"}}, "speculation.verify"),
    ({"speculation": {"k": 1}}, "speculation.k"),
    ({"speculation": {"drafter": "ngram"}, "prediction": {"type": "content", "content": "a"}}, "prediction"),
    ({"prediction": {"type": "text", "content": "a"}}, "prediction.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
]


@pytest.mark.parametrize(("change", "parameter"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_by_name(server: Running, change: dict[str, Any], parameter: str) -> None:
    """400 in OpenAI's form; `param` is the culprit. Nothing is accepted and ignored."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, **change}
    answer = httpx2.post(
        f"{server.url}/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == parameter
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{parameter}: ")


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"max_completion_tokens": -3}, "max_completion_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"functions": []}, "functions"),
        ({"audio": {}}, "audio"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_chat_that_cannot_be_is_refused_by_name(
    server: Running, change: dict[str, Any], parameter: str | None
) -> None:
    """The same for chats, under the names that chats use."""
    body = {"model": MODEL, "messages": CHAT, **change}
    with pytest.raises(openai.BadRequestError) as refused:
        server.client.post("/chat/completions", body=body, cast_to=dict[str, Any])
    if parameter is None:
        assert (refused.value.param or "").startswith("messages[0].content[0]")
    else:
        assert refused.value.param == parameter


def test_bodies_that_are_no_json_objects_are_refused(server: Running) -> None:
    """400, never 422 or 500; a deep nest too."""
    kind = {"Content-Type": "application/json"}
    for content in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"model": ' + b"9" * 5000 + b"}"):
        answer = httpx2.post(f"{server.url}/v1/completions", content=content, headers=kind)
        assert answer.status_code == 400, content[:20]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx2.post(f"{server.url}/v1/completions", content=b"{}").status_code == 400  # no Content-Type


def test_unknown_models_and_paths_are_404(server: Running) -> None:
    """With the client's own exception for it, and the names that there are."""
    with pytest.raises(openai.NotFoundError, match="tiny") as missed:
        server.client.completions.create(model="gpt-4", prompt="a")
    assert missed.value.code == "model_not_found"
    assert httpx2.get(f"{server.url}/v1/nothing").json()["error"]["type"] == "not_found_error"
    refused = httpx2.get(f"{server.url}/v1/completions")
    assert (refused.status_code, refused.headers["Allow"]) == (405, "POST")


# -- beside the texts ----------------------------------------------------------------------------------------------


def test_the_server_says_what_it_is(server: Running) -> None:
    """Models, health and version."""
    (card,) = server.client.models.list().data
    assert (card.id, card.owned_by, card.model_extra and card.model_extra["max_model_len"]) == (MODEL, "outrider", 512)
    assert server.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}
    assert set(httpx2.get(f"{server.url}/version").json()) == {"version"}


def test_the_api_describes_itself(server: Running) -> None:
    """Every reference of the OpenAPI document resolves, each body is described, and no 422 is promised."""
    document = httpx2.get(f"{server.url}/openapi.json").json()
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)):
        found: Any = document
        for part in reference.split("/"):
            found = found[part]
    posts = {path: entry["post"] for path, entry in document["paths"].items() if "post" in entry}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"} == set(posts)
    for operation in posts.values():
        assert "application/json" in operation["requestBody"]["content"]
        assert "400" in operation["responses"]
        assert "422" not in operation["responses"]


def test_text_becomes_tokens_and_back(server: Running) -> None:
    """/tokenize and /detokenize are inverse; a conversation is tokenized as the chat would be."""
    answer = httpx2.post(f"{server.url}/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(PROMPT)
    assert "".join(answer["token_strs"]) == PROMPT
    assert httpx2.post(f"{server.url}/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": PROMPT}
    chat = httpx2.post(f"{server.url}/tokenize", json={"messages": CHAT}).json()
    assert chat["tokens"] == server.engine.encode(CHAT)
    for path, body in (
        ("tokenize", {}),
        ("tokenize", {"prompt": "a", "messages": CHAT}),
        ("detokenize", {"tokens": [97]}),
    ):
        assert httpx2.post(f"{server.url}/{path}", json=body).status_code == 400


def test_the_metrics_add_up() -> None:
    """vLLM's counters equal the sums over the requests; each HTTP answer is counted under its route."""
    with serving() as running:
        answers = [
            running.client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                max_tokens=n,
                temperature=0,
                extra_body={"ignore_eos": True, "speculation": {"drafter": "junk"}},
            )
            for n in (5, 30, 40)
        ]
        settled(running)
        page = httpx2.get(f"{running.url}/metrics").text
    values = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    label = f'{{model_name="{MODEL}"}}'
    written = sum(answer.usage.completion_tokens for answer in answers if answer.usage)
    figures = [answer.model_extra["metrics"]["speculative_decoding"] for answer in answers]  # type: ignore[index]
    figures = [entry for entry in figures if entry]
    assert figures
    assert values[f"vllm:generation_tokens_total{label}"] == written
    assert values[f"vllm:prompt_tokens_total{label}"] == 3 * len(PROMPT)
    for name, key in (
        ("drafts", "num_spec_steps"),
        ("draft_tokens", "num_draft_tokens"),
        ("accepted_tokens", "num_accepted_draft_tokens"),
    ):
        assert values[f"vllm:spec_decode_num_{name}_total{label}"] == sum(entry[key] for entry in figures)
    per_position = [value for name, value in values.items() if "per_pos_total" in name]
    assert sum(per_position) == sum(entry["num_accepted_draft_tokens"] for entry in figures)
    assert values[f"vllm:time_to_first_token_seconds_count{label}"] == 3
    assert values[f"vllm:e2e_request_latency_seconds_count{label}"] == 3
    assert values[f"vllm:num_requests_running{label}"] == 0
    assert values[f"vllm:kv_cache_usage_perc{label}"] == 0
    assert values['outrider_http_requests_total{method="POST",route="/v1/completions",status="200"}'] == 3
    assert values[f"outrider_steps_total{label}"] > 3


def test_every_answer_has_a_request_id(server: Running) -> None:
    """The client's, if it is a harmless name, else one of ours; the id of the answer holds it."""
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 1}
    named = httpx2.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "trace-7"})
    assert (named.headers["X-Request-Id"], named.json()["id"]) == ("trace-7", "cmpl-trace-7")
    strange = httpx2.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "a b<script>"})
    assert strange.headers["X-Request-Id"].isalnum()


def test_keys_are_asked_for() -> None:
    """401 without one and with a wrong one, for all but /health; the right one is let in under its name."""
    keys = Keys({"ann": "key-of-the-tests", "bob": "another-key"})
    with serving(keys=keys, limits=Limits(requests_per_key=4)) as running:
        assert running.client.models.list().data
        for headers in ({}, {"Authorization": "Bearer wrong-key"}, {"Authorization": "Basic another-key"}):
            for path in ("/v1/models", "/metrics", "/version", "/nothing"):
                refused = httpx2.get(running.url + path, headers=headers)
                assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer")
        with pytest.raises(openai.AuthenticationError):
            running.client.with_options(api_key="key-of-the-test").models.list()
        assert httpx2.get(f"{running.url}/health").status_code == 200
        assert keys.name_of("another-key") == "bob"


# -- who wrote what --------------------------------------------------------------------------------------------------


def traced(extra: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"speculation": {"trace": True}, "ignore_eos": True, **(extra or {})}


def test_a_trace_tells_who_wrote_each_piece(server: Running) -> None:
    """The spans are the text; the steps are the engine's; drafted spans name their drafter, the model's own do not."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    answer = server.client.completions.create(**body, extra_body=traced())
    (choice,) = answer.choices
    told = choice.to_dict()["outrider"]
    assert isinstance(told, dict)
    assert "".join(span["text"] for span in told["spans"]) == choice.text
    assert sum(step["tokens"] for step in told["steps"]) == 48
    drafted = [span for span in told["spans"] if span["origin"] == "drafted"]
    assert drafted
    assert {span["source"] for span in drafted} == {"ngram"}
    assert {span["source"] for span in told["spans"] if span["origin"] != "drafted"} == {None}
    metrics = answer.to_dict()["metrics"]
    assert isinstance(metrics, dict)
    counted = metrics["speculative_decoding"]
    assert isinstance(counted, dict)
    assert sum(step["drafted"] for step in told["steps"]) == counted["num_draft_tokens"]
    assert sum(step["accepted"] for step in told["steps"]) == counted["num_accepted_draft_tokens"]
    for number, step in enumerate(told["steps"]):
        own = [span for span in told["spans"] if span["step"] == number]
        assert len(own) <= step["tokens"]  # a special token has no text
        assert sum(span["origin"] == "drafted" for span in own) <= step["accepted"]
    assert 0 < told["timings"]["ttft"] <= told["timings"]["total"]


@pytest.mark.parametrize("chat", [False, True])
def test_a_streamed_trace_goes_on_over_the_chunks(bytewise: Running, chat: bool) -> None:
    """In characters of several tokens too: the chunks' spans are the chunks' text, and the steps are those at once."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "temperature": 0.9, "seed": 3, "extra_body": traced()}
    prompt: dict[str, Any] = {"messages": CHAT} if chat else {"prompt": PROMPT}
    create: Any = bytewise.client.chat.completions.create if chat else bytewise.client.completions.create
    whole = create(**body, **prompt).choices[0].to_dict()
    spans: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for chunk in create(**body, **prompt, stream=True):
        choice = chunk.choices[0].to_dict()
        told = choice.get("outrider", {"spans": [], "steps": []})
        text = choice["delta"].get("content", "") if chat else choice["text"]
        assert "".join(span["text"] for span in told["spans"]) == text
        spans += told["spans"]
        steps += told["steps"]
    assert steps == whole["outrider"]["steps"]
    assert spans == whole["outrider"]["spans"]
    assert "\N{REPLACEMENT CHARACTER}" in "".join(span["text"] for span in spans)


def test_a_trace_names_the_grammar(server: Running) -> None:
    """Tokens that the form forces are its guesses, whoever drafts beside it."""
    answer = server.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=30,
        temperature=0,
        extra_body={"speculation": {"trace": True}, "structured_outputs": {"choice": ["abababababababababab"]}},
    )
    told = answer.choices[0].to_dict()["outrider"]
    assert isinstance(told, dict)
    assert "grammar" in {span["source"] for span in told["spans"]}


def test_nothing_is_told_unasked_and_responses_refuse(server: Running) -> None:
    """`trace` is off by default; where it has no place it is refused by name."""
    answer = server.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)
    assert "outrider" not in answer.choices[0].to_dict()
    with pytest.raises(openai.BadRequestError, match=r"speculation\.trace"):
        server.client.responses.create(model=MODEL, input="ab", extra_body={"speculation": {"trace": True}})
