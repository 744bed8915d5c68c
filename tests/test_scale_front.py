"""The front as its clients see it: over scripted servers, and over other Outriders, whose texts it must not change."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from outrider.audit.reading import Choice, read
from outrider.audit.store import Ledger
from outrider.audit.verification import verify
from outrider.cli import main
from outrider.scale.fleet import Fleet
from outrider.scale.front import Front, create_front
from outrider.scale.upstream import Address, AddressError
from outrider.server.settings import Auditing, Keys, Settings
from serving import MODEL, hosted, serving, wait_until
from test_serve_process import served
from tiny import tiny_model, write_gguf
from upstreams import Server, fleet_of, text, whole

KEY = "key-of-the-tests"


@contextmanager
def fronting(fleet: Fleet, **settings: Any) -> Iterator[tuple[OpenAI, Front]]:
    """OpenAI's client of a front over the fleet."""
    app, front = create_front(fleet, Settings(**{"names": (MODEL,), "drafters": (), **settings}))
    with hosted(app) as url, OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client, front


def fleet_at(*urls: str) -> Fleet:
    return Fleet([Address.at(url, "speculative") for url in urls])


def get(client: OpenAI, path: str) -> httpx2.Response:
    url = str(client.base_url).removesuffix("/v1/")
    return httpx2.get(f"{url}{path}", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)


# -- over scripted servers ---


def test_the_door_is_the_same() -> None:
    """Keys, names, ranges and unknown parameters are refused before an upstream hears of anything."""
    server = Server([whole("x")])
    with fronting(fleet_of(a=server), keys=Keys({"alice": KEY})) as (client, _):
        for status, body in (
            (404, {"model": "other"}),
            (400, {"top_p": 3}),
            (400, {"extra_body": {"beam": 2}}),
            (400, {"n": 1000}),
            (400, {"extra_body": {"speculation": {"drafter": "ngram"}}}),
            (400, {"extra_body": {"speculation": {"enabled": False}}}),  # there is no plain pool
            (400, {"extra_body": {"prediction": {"type": "content", "content": "x"}}}),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(**{"model": MODEL, "prompt": "abc", **body})
            assert caught.value.status_code == status, body
        with pytest.raises(openai.BadRequestError, match="messages"):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": None}])  # type: ignore[arg-type]
        assert httpx2.get(f"{client.base_url}models").status_code == 401
        assert not server.asked
        answer = client.completions.create(model=MODEL, prompt="abc", user="u", extra_headers={"X-Request-Id": "me"})
        assert (answer.choices[0].text, answer.model) == ("x", MODEL)
        (asked,), (headers,) = server.asked, server.headers
        assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("theirs", 1.0, 16)
        assert headers["x-request-id"] == "me"
        assert "authorization" not in headers  # the front's keys stay here


def test_a_client_that_wants_no_speculation_is_sent_to_the_plain_pool() -> None:
    servers = {"a": Server([whole("x")]), "b": Server([whole("y")])}
    with fronting(fleet_of(("b",), **servers)) as (client, _):
        for wanted, written in ((True, "x"), (False, "y")):
            answer = client.completions.create(
                model=MODEL, prompt="abc", extra_body={"speculation": {"enabled": wanted}}
            )
            assert answer.choices[0].text == written
    assert all("speculation" not in asked for server in servers.values() for asked in server.asked)


def test_an_answer_that_breaks_off_ends_with_an_error_event_and_its_end() -> None:
    """OpenAI's client raises; the ledger says that it failed, the metrics count it, and no text is in any row."""
    parts = [*text("one", "two")[:1], httpx2.ReadError("reset")]
    with fronting(fleet_of(a=Server([parts]))) as (client, front):
        url = f"{client.base_url}completions"
        answer = httpx2.post(url, json={"model": MODEL, "prompt": "abc", "stream": True}, timeout=60)
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "upstream_failed"
        wait_until(lambda: not front.jobs)
        assert "outrider_broken_answers_total{" in get(client, "/metrics").text


def test_without_an_upstream_health_and_answers_say_so() -> None:
    """503 with a time to come again; the page says which is down and why; all is well when one is there."""
    server = Server([whole("x")], health=httpx2.ConnectError("refused"))
    with fronting(fleet_of(a=server)) as (client, front):
        assert get(client, "/health").status_code == 503
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="abc")
        assert (caught.value.status_code, caught.value.code) == (503, "no_upstream")
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert 'outrider_upstream_up{pool="speculative",upstream="a"} 0.0' in get(client, "/metrics").text
        server.health = 200
        wait_until(lambda: front.fault is None)
        assert client.completions.create(model=MODEL, prompt="abc").choices[0].text == "x"
        assert get(client, "/dashboard/state").json()["queue"]["running"] == 0


def test_metrics_and_dashboard_have_what_the_upstreams_count() -> None:
    """Acceptance comes from their counters, the growth since the front began."""
    page = 'vllm:spec_decode_num_drafts_total{{engine="0"}} {0}.0\nvllm:spec_decode_num_draft_tokens_total 4{0}.0\n'
    page += "vllm:spec_decode_num_accepted_tokens_total 1{0}.0\n"
    page += 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} 1{0}.0\n'
    server = Server([whole("x")], page=page.format(0))
    with fronting(fleet_of(a=server)) as (client, front):
        (upstream,) = front.fleet.upstreams
        wait_until(lambda: upstream.counters.speculates)
        server.page = page.format(5)
        wait_until(lambda: upstream.counters.guesses.drafts == 5)
        found = get(client, "/metrics").text
        for name, value in (("drafts", 5), ("draft_tokens", 5), ("accepted_tokens", 5)):
            assert f'vllm:spec_decode_num_{name}_total{{model_name="{MODEL}"}} {value}.0' in found
        assert get(client, "/dashboard/state").json()["acceptance"]["upstream"]["accepted"] == 5


# -- over other Outriders ---


def test_texts_through_the_front_are_the_direct_ones(tmp_path: Path) -> None:
    """Streamed or whole, with log-probabilities, several at once, or several pieces of a conversation."""
    auditing = Auditing(ledger=Ledger(tmp_path / "ledger.db"))
    with serving() as running, fronting(fleet_at(running.url), auditing=auditing) as (client, _):
        for change in (
            {"temperature": 0},
            {"seed": 3, "n": 2, "logprobs": 2},
            {"seed": 4, "extra_body": {"speculation": {"drafter": "suffix", "trace": True}}},
            {"temperature": 0, "prompt": ["abcd", "bcda abc"], "echo": True},
        ):
            body = {"model": MODEL, "prompt": "abcd abcd", "max_tokens": 24, **change}
            direct, through = (c.completions.create(**body) for c in (running.client, client))
            assert [c.model_dump() for c in through.choices] == [c.model_dump() for c in direct.choices] or any(
                "timings" in str(choice) for choice in through.choices
            )
            assert [c.text for c in through.choices] == [c.text for c in direct.choices]
            assert through.usage == direct.usage
            streamed = [""] * len(direct.choices)
            for chunk in client.completions.create(**body, stream=True):
                for choice in chunk.choices:
                    streamed[choice.index] += choice.text
            assert streamed == [choice.text for choice in direct.choices]
        assert client.models.list().data[0].id == MODEL
    assert not verify(tmp_path / "ledger.db").findings
    start = next(read(tmp_path / "ledger.db", Choice(kind="start"))).content()
    (told,) = start["model"]["upstreams"]
    assert (told["about"]["kind"], told["about"]["weights"][0]["role"]) == ("outrider", "target")
    rows = [row.content() for row in read(tmp_path / "ledger.db", Choice(kind="request"))]
    assert len(rows) == 8
    assert all(row["outcome"] == "finished" and row["upstream"] == told["upstream"] for row in rows)
    assert all(row["completion_tokens"] for row in rows)
    assert sum(row["drafted"] for row in rows) > 0
    assert "abcd" not in json.dumps(rows)


def test_killing_an_upstream_under_load_leaves_no_request_without_an_answer(tmp_path: Path) -> None:
    """kill -9 while it writes: each text is whole and the right one, or ends with an error; the ledger is intact."""
    model = write_gguf(tmp_path / "tiny.gguf", tiny_model(context=4096))
    with ExitStack() as stack:
        (doomed, one), (_, other) = (stack.enter_context(served(model)) for _ in range(2))
        auditing = Auditing(ledger=Ledger(tmp_path / "ledger.db"))
        client, front = stack.enter_context(fronting(fleet_at(one, other), auditing=auditing))
        body = {"model": MODEL, "max_tokens": 600, "temperature": 0, "extra_body": {"ignore_eos": True}}
        prompts = [f"abcd {letter}" for letter in "abcdefghijkl"]
        with OpenAI(base_url=f"{other}/v1", api_key="none", max_retries=0, timeout=60) as direct:
            written = [direct.completions.create(**{**body, "model": "tiny"}, prompt=prompt) for prompt in prompts]
        wanted = {prompt: answer.choices[0].text for prompt, answer in zip(prompts, written, strict=True)}
        got: dict[str, str] = {}
        failed: list[str] = []

        def ask(index: int, prompt: str) -> None:
            words = ""
            try:
                if index % 3:
                    for chunk in client.completions.create(**body, prompt=prompt, stream=True):
                        words += chunk.choices[0].text
                else:  # an answer at once, which can be asked for again
                    words = client.completions.create(**body, prompt=prompt).choices[0].text
                got[prompt] = words
            except openai.APIError as error:
                assert wanted[prompt].startswith(words)
                failed.append(str(error))

        threads = [threading.Thread(target=ask, args=entry) for entry in enumerate(prompts)]
        for thread in threads:
            thread.start()
        gone, there = front.fleet.upstreams
        wait_until(lambda: gone.loads >= 4)
        doomed.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        assert len(got) + len(failed) == len(prompts)
        assert all(got[prompt] == wanted[prompt] for prompt in got)
        assert all("nothing more comes" in reason for reason in failed)
        assert {prompts[index] for index in range(0, len(prompts), 3)} <= set(got)  # those were asked for again
        wait_until(lambda: gone.state == "down")
        assert there.up
        assert client.completions.create(**body, prompt=prompts[0]).choices[0].text == wanted[prompts[0]]
    assert not verify(tmp_path / "ledger.db").findings
    rows = [row.content() for row in read(tmp_path / "ledger.db", Choice(kind="request"))]
    assert sorted(row["outcome"] for row in rows) == sorted(["finished"] * (len(got) + 1) + ["failed"] * len(failed))
    states = [row.content()["state"] for row in read(tmp_path / "ledger.db", Choice(kind="upstream"))]
    assert states == ["down"]


# -- the command line ---


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--upstream", "gpu-1:8000"], "no address"),
        (["m", "--upstream", "http://a:1", "--plain-upstream", "http://a:1/v1"], "given twice"),
        (["--upstream", "http://a:1"], "MODEL"),
        (["m", "--upstream", "http://a:1", "--dtype", "int8"], "--dtype"),
        (["m", "--upstream", "http://a:1", "--drafter", "ngram"], "--drafter"),
        (["m", "--upstream", "http://a:1", "--prompt-tokens", "9"], "--prompt-tokens"),
        (["m", "--upstream", "http://a:1", "--no-enable-prefix-caching"], "--no-enable-prefix-caching"),
        (["m", "--upstream", "http://a:1", "--hardware", "h100"], "--hardware: it comes with --backend vllm"),
        (["m", "--upstream", "http://a:1", "--replicas", "3"], "--replicas: it comes with --backend vllm or --ray"),
        (["--plain-replicas", "2"], "--plain-replicas: it comes with --backend vllm"),
        (["--vllm", "x"], "--vllm: it comes with --backend vllm"),
        (["--ray", "--plain-replicas", "2"], "--plain-replicas: it comes with --backend vllm"),
        (["--upstream-key", "k"], "--upstream-key: it comes with --upstream or --plain-upstream"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options if options[0] == "m" or fault == "MODEL" else ["m", *options]
    assert main(["serve", *options, "--port", "0"]) == 2
    assert fault in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://", "ftp://a", "http://u:p@a", "http://a?x=1", "http://a:99999"])
def test_an_address_that_is_none_names_the_option(url: str) -> None:
    with pytest.raises(AddressError, match="--plain-upstream"):
        Address.at(url, "plain", option="--plain-upstream")
    assert Address.at("http://a:1/v1/", "plain").url == "http://a:1"
