"""Tools: calls are sound whatever the model would like to say, and read the same however the text comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import BadRequestError

from outrider import Tree
from outrider.engine.grammar import Grammars
from outrider.server.tools import (
    FORMATS,
    TOLD,
    Arguments,
    Call,
    CallReader,
    Change,
    Content,
    Tool,
    ToolFormat,
    format_of,
    grammar_of,
    told,
)
from rigs import files
from serving import MODEL, Running, serving, settled, tiny_engine

KNOWN = {form.name: form for form in (*FORMATS, TOLD)}
HERMES, LLAMA = KNOWN["hermes"], KNOWN["llama3"]
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}",
    "llama3": "{% if tools %}ipython {{ tools | tojson }}{% endif %}",
    "mistral": "{% if tools %}[TOOL_CALLS] {{ tools | tojson }}{% endif %}",
    "told": "",
}
MESSAGES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}{% endif %}{% if m.tool_call_id %}"
    "({{ m.tool_call_id }}){% endif %}{{ '\\n' }}{% endfor %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [WEATHER, CLOCK],
    "max_tokens": 1000,
}


@pytest.fixture(scope="module", params=list(TEMPLATES))
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving(tiny_engine(template=TEMPLATES[request.param] + MESSAGES)) as running:
        yield running
        settled(running)


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def check_call(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "clock":
        assert value == {}
    else:
        assert name == "get_weather"
        assert list(value) == ["city", "unit"]
        assert value["unit"] in ("C", "F")


@pytest.mark.parametrize("arguments", ["{", "null", "9" * 5000, "[" * 100_000, '{"a": NaN}', '{"a": -Infinity}'])
def test_an_earlier_call_without_an_object_is_refused(server: Running, arguments: str) -> None:
    """What a client says the model once called: also JSON that is too long or too deep to be read."""
    earlier: Any = [{"role": "assistant", "content": None, "tool_calls": [called("clock", arguments)]}]
    with pytest.raises(BadRequestError, match=r"function\.arguments: it is not a JSON object"):
        server.client.chat.completions.create(model=MODEL, messages=[*ASK["messages"], *earlier])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}])
def test_a_call_that_is_asked_for_comes(server: Running, choice: Any) -> None:
    """A random model calls too: by name, with arguments of the schema, drafted and the same without a drafter."""
    for seed in range(4):
        body = ASK | {"tool_choice": choice, "seed": seed, "temperature": 1.0, "parallel_tool_calls": False}
        answer = server.client.chat.completions.create(**body)
        (picked,) = answer.choices
        assert picked.finish_reason == "tool_calls"
        assert picked.message.content is None
        assert picked.message.tool_calls
        (call,) = picked.message.tool_calls
        assert call.type == "function"
        check_call(call.function.name, call.function.arguments)
        if choice != "required":
            assert call.function.name == "clock"
        assert answer.model_extra["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 5  # type: ignore[index]
        plain = server.client.chat.completions.create(**body, extra_body={"speculation": {"enabled": False}})
        assert plain.choices[0].message.tool_calls
        assert plain.choices[0].message.tool_calls[0].function == call.function  # type: ignore[union-attr]


def test_calls_stream(server: Running) -> None:
    """Name and id first, then the arguments in pieces; together they are the whole answer's."""
    body = ASK | {"tool_choice": "required", "seed": 1, "temperature": 1.0}
    whole = server.client.chat.completions.create(**body).choices[0].message.tool_calls
    calls: list[dict[str, str]] = []
    reasons = []
    for chunk in server.client.chat.completions.create(**body, stream=True):
        choice = chunk.choices[0]
        reasons.append(choice.finish_reason)
        assert not choice.delta.content
        for part in choice.delta.tool_calls or ():
            if part.id:
                assert part.index == len(calls)
                calls.append({"name": part.function.name, "arguments": ""})  # type: ignore[dict-item, union-attr]
            calls[part.index]["arguments"] += part.function.arguments or ""  # type: ignore[union-attr]
    assert reasons[-1] == "tool_calls"
    assert calls == [{"name": c.function.name, "arguments": c.function.arguments} for c in whole]  # type: ignore[union-attr]


def test_with_auto_the_model_may_talk(server: Running) -> None:
    """What it says without a call is content, streamed or not."""
    body = ASK | {"seed": 3, "temperature": 1.0, "max_tokens": 20}
    message = server.client.chat.completions.create(**body).choices[0].message
    assert message.content
    assert message.tool_calls is None
    texts = [c.choices[0].delta.content or "" for c in server.client.chat.completions.create(**body, stream=True)]
    assert "".join(texts) == message.content


@pytest.mark.parametrize("form", KNOWN.values(), ids=lambda form: form.name)
def test_with_auto_a_call_that_begins_is_sound(form: ToolFormat) -> None:
    """Behind an opening nothing but a call of one of the tools can follow; before it, anything."""
    tokenizer = files().tokenizer
    grammars = Grammars(tokenizer, 97)
    tools = [Tool.model_validate(tool) for tool in (WEATHER, CLOCK)]
    text = tokenizer.encode("x")
    grammar = grammars.start(grammar_of(form, tools, required=False, parallel=True), text, 1)

    def forced(written: str) -> str:
        text[1:] = tokenizer.encode(written)
        start = grammars.start(grammar_of(form, tools, required=False, parallel=True), text, 1)
        tree = start.fit(Tree.root(text[-1]), budget=40, depth=40, rejection=False)
        return tokenizer.decode(tree.tokens[1:])

    before = "" if form is LLAMA else "well, "
    assert grammar.mask(tokenizer.encode("no" if form is LLAMA else before + "{")) is not None
    opening = before + form.opening + form.before
    if form.before:
        assert forced(opening[:-1]).startswith(opening[-1])
    assert forced(f"{opening}g") == f'et_weather{form.between}{{"city": "'
    call = f"{opening}clock{form.between}{{"
    assert forced(call).startswith("}" + form.after)
    assert grammar.mask(tokenizer.encode(call + '"')) is None


def test_a_conversation_with_calls_is_rendered(server: Running) -> None:
    """Arguments reach the template as an object, a tool's answer with its id; `none` leaves the tools out."""
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [called("get_weather", '{"city": "Oslo"}')]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip
    tokens = httpx2.post(f"{server.url}/tokenize", json={"messages": messages}).json()["tokens"]
    text = server.engine.tokenizer.decode(tokens)
    assert text == "user: Weather?\nassistant: [get_weather Oslo]\ntool: rain(call_1)\n"
    without = server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)  # type: ignore[arg-type]
    with_none = server.client.chat.completions.create(
        **ASK | {"messages": messages, "tool_choice": "none", "max_tokens": 2}
    )
    with_tools = server.client.chat.completions.create(**ASK | {"messages": messages, "max_tokens": 2})
    assert without.usage and with_none.usage and with_tools.usage  # noqa: PT018
    assert without.usage.prompt_tokens == with_none.usage.prompt_tokens < with_tools.usage.prompt_tokens


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": []}, "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [tool("a", {"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", {"type": "object", "properties": {"x": {"type": "y"}}})]}, "tools"),
        ({"tools": [{"type": "code"}]}, "tools[0].type"),
        ({"tool_choice": "often"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [called("b", "[")]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_what_no_tool_can_be_is_refused(server: Running, change: dict[str, Any], parameter: str) -> None:
    """By name."""
    body = {key: value for key, value in (ASK | change).items() if value is not None}
    refused = httpx2.post(f"{server.url}/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, parameter), refused.text


RESPOND: dict[str, Any] = {
    "model": MODEL,
    "input": "Weather?",
    "tools": [{"type": "function", **tool["function"]} for tool in ASK["tools"]],
    "max_output_tokens": 1000,
    "temperature": 1.0,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "clock"}])
def test_responses_call_tools(server: Running, choice: Any) -> None:
    """The calls are items of the output, the same as a chat's, and the text is that of plain decoding."""
    body = RESPOND | {"tool_choice": choice, "extra_body": {"seed": 1}}
    answer = server.client.responses.create(**body)
    assert answer.status == "completed"
    calls = [item for item in answer.output if item.type == "function_call"]
    assert len(calls) == len(answer.output) >= 1
    for call in calls:
        assert call.status == "completed"
        check_call(call.name, call.arguments)
        assert choice == "required" or call.name == "clock"
    in_chat = choice if choice == "required" else {"type": "function", "function": {"name": "clock"}}
    chat = server.client.chat.completions.create(**ASK | {"tool_choice": in_chat, "seed": 1, "temperature": 1.0})
    told = [(call.function.name, call.function.arguments) for call in chat.choices[0].message.tool_calls or ()]  # type: ignore[union-attr]
    assert told == [(call.name, call.arguments) for call in calls]
    plain = server.client.responses.create(**body | {"extra_body": {"seed": 1, "speculation": {"enabled": False}}})
    assert [(c.name, c.arguments) for c in plain.output if c.type == "function_call"] == told


def test_responses_stream_calls(server: Running) -> None:
    """Each item is opened, grows and is closed before the next; the last event has the whole answer."""
    body = RESPOND | {"tool_choice": "required", "extra_body": {"seed": 1}}
    whole = [item.model_dump(exclude={"id", "call_id"}) for item in server.client.responses.create(**body).output]
    items: list[dict[str, Any]] = []
    events = list(server.client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    for event in events[2:]:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            assert event.item.type == "function_call"
            assert event.item.arguments == ""
            items.append({"id": event.item.id, "arguments": "", "done": False})
        elif event.type == "response.function_call_arguments.delta":
            assert (event.item_id, event.output_index) == (items[-1]["id"], len(items) - 1)
            items[-1]["arguments"] += event.delta
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == items[-1]["arguments"]
            check_call(event.name, event.arguments)
        elif event.type == "response.output_item.done":
            items[-1]["done"] = True
        else:
            assert event is events[-1]
            assert event.type == "response.completed"
            assert [item.model_dump(exclude={"id", "call_id"}) for item in event.response.output] == whole
    assert items
    assert all(item["done"] for item in items)


def test_responses_go_on_behind_a_call(server: Running) -> None:
    """A call and its outcome are sent back, as the client's own objects: the prompt is that of the same chat."""
    first = server.client.responses.create(
        **RESPOND | {"tool_choice": {"type": "function", "name": "clock"}, "parallel_tool_calls": False}
    )
    (call,) = first.output
    assert call.type == "function_call"
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    outcome = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    second = server.client.responses.create(
        **RESPOND | {"input": [*asked, *first.output, outcome], "tool_choice": "none", "max_output_tokens": 4}
    )
    assert second.output_text
    messages = [
        *asked,
        {"role": "assistant", "content": None, "tool_calls": [called("clock", call.arguments) | {"id": call.call_id}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "noon"},
    ]
    chat = server.client.chat.completions.create(**ASK | {"messages": messages, "tool_choice": "none", "max_tokens": 4})
    assert chat.usage
    assert second.usage
    assert second.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"tools": [RESPOND["tools"][0] | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [RESPOND["tools"][0]] * 2}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
        ({"input": [{"type": "image"}]}, "input[0]"),
    ],
)
def test_responses_refuse_what_no_tool_can_be(server: Running, change: dict[str, Any], parameter: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        server.client.responses.create(**RESPOND | change)
    assert refused.value.param == parameter


def test_a_special_token_opens_calls() -> None:
    """Mistral's [TOOL_CALLS] is written as the one token that the model knows, not as its letters."""
    tools = [Tool.model_validate(tool) for tool in (WEATHER, CLOCK)]
    named = {"[TOOL_CALLS]": 5, "[ARGS]": 32}
    text = grammar_of(KNOWN["mistral-args"], tools, required=True, parallel=True, special=named.get).text
    assert "start: <[5]> calls" in text
    assert 'call_1: "clock" <[32]> args_1' in text
    assert "[TOOL_CALLS]" not in text


def test_a_model_without_tools_is_told_of_them() -> None:
    """In the system message, in words; calls of the conversation and their answers are written out as well."""
    tools = [Tool.model_validate(CLOCK)]
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {}}}
    system, first, second, third = told(
        [
            {"role": "user", "content": "When?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
        ],
        tools,
    )
    assert system["role"] == "system"
    assert '{"name": "clock", "parameters": {"type"' in system["content"]
    assert first == {"role": "user", "content": "When?"}
    assert second["content"] == '<tool_call>[{"name": "clock", "arguments": {}}]</tool_call>'
    assert third == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}


def test_a_template_with_unknown_calls_says_so() -> None:
    """400 with the way out: nobody could read its calls."""
    with serving(tiny_engine(template="{{ tools }}<function=" + MESSAGES)) as running:
        refused = httpx2.post(f"{running.url}/v1/chat/completions", json=ASK)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        assert "--chat-template" in refused.json()["error"]["message"]
    assert format_of("{{ tools }}<tool_call>") is HERMES
    assert format_of("{{ tools }} ipython") is LLAMA
    assert format_of("<tool_call>") is TOLD
    for template, name in (
        ('{{ "[TOOL_CALLS] [" }} tools', "mistral-7b"),
        ("[TOOL_CALLS][ tools", "mistral"),
        ("[TOOL_CALLS] [ARGS] tools", "mistral-args"),
    ):
        found = format_of(template)
        assert found is KNOWN[name]
        assert len(found.call_id()) == 9  # all that Mistral's templates take


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
).map(lambda value: json.dumps({"value": value, "brace": '}{"\\'}))


def joined(changes: list[Change]) -> tuple[str, list[tuple[str, str]]]:
    content, calls = "", list[tuple[str, str]]()
    for change in changes:
        if isinstance(change, Content):
            content += change.text
        elif isinstance(change, Call):
            assert change.index == len(calls)
            calls.append((change.name, ""))
        else:
            assert isinstance(change, Arguments)
            assert change.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + change.text)
    return content, calls


@given(data=st.data())
def test_however_a_text_is_cut_it_says_the_same(data: st.DataObject) -> None:
    """Any text with any calls, in any pieces: content and calls are those that were written."""
    form = data.draw(st.sampled_from(list(KNOWN.values())))
    calls = data.draw(
        st.lists(st.tuples(st.sampled_from(["a", "get_b"]), ARGUMENTS), max_size=1 if form is LLAMA else 3)
    )
    content = data.draw(st.text(alphabet="ab<tool_call>\n {", max_size=12).filter(lambda t: "<tool_call>\n" not in t))
    if form is LLAMA:
        content = "" if calls else content.lstrip("{")
    written = [f"{form.before}{name}{form.between}{arguments}{form.after}" for name, arguments in calls]
    text = content + form.opening + (form.separator or "").join(written) + form.ending if calls else content
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = CallReader(form)
    changes = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        changes += reader.push(text[start:end])
    said, found = joined([*changes, *reader.end()])
    assert found == calls
    assert said == (content.rstrip() if calls else content)
    assert reader.calls == len(calls)
