"""The dashboard's page and its data over HTTP: who gets what, what it says, and that its sums are the engine's."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx2
import pytest

from outrider.drafters.costs import Costs
from outrider.engine.speed import Speedometer
from outrider.server.dashboard import FREE_PATHS, STATE_PATH
from outrider.server.history import History
from outrider.server.settings import Keys
from serving import MODEL, Running, change_modes, serving, settled, tiny_engine

BODY: dict[str, Any] = {"model": MODEL, "prompt": "abcd abcd abcd abcd", "max_tokens": 40, "temperature": 0}
KEY = "secret-of-the-tests"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running
        settled(running)


def state(running: Running, **query: int) -> dict[str, Any]:
    answer = httpx2.get(f"{running.url}{STATE_PATH}", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def write(running: Running, **extra: Any) -> Any:
    return running.client.completions.create(**BODY, extra_body={"ignore_eos": True, **extra})


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_and_all_that_it_names_come_from_here(server: Running) -> None:
    """No address of another machine is in any file; each file that one names is served, under a strict policy."""
    named = set()
    for path in FREE_PATHS:
        answer = httpx2.get(server.url + path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        own = answer.text.replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
        assert not re.search(r"(https?:)?//[a-z]", re.sub(r"(?m)(^|\s)// .*", "", own)), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", own), path
        named |= set(re.findall(r"""["'](/dashboard/[\w.]+)["'?]""", own))
    assert named - {STATE_PATH, "/dashboard/transitions"} <= set(FREE_PATHS)
    assert {path for path in FREE_PATHS if path != "/"} <= named


def test_a_page_that_has_not_changed_is_not_sent_again(server: Running) -> None:
    first = httpx2.get(server.url + "/")
    again = httpx2.get(server.url + "/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_without_a_dashboard_there_is_nothing() -> None:
    """`--no-dashboard`: neither page nor data, and nothing is sampled."""
    with serving(dashboard=False) as running:
        for path in (*FREE_PATHS, STATE_PATH):
            assert httpx2.get(running.url + path).status_code == 404
        assert running.service.history is None
        assert write(running).choices[0].text


def test_the_page_is_free_and_its_data_want_a_key() -> None:
    """Like a login page: whoever has no key sees nothing of the server."""
    with serving(keys=Keys({"a": KEY})) as running:
        assert all(httpx2.get(running.url + path).status_code == 200 for path in FREE_PATHS)
        assert httpx2.get(running.url + STATE_PATH).status_code == 401
        wrong = httpx2.get(running.url + STATE_PATH, headers={"Authorization": "Bearer nothing"})
        assert wrong.status_code == 401
        right = httpx2.get(running.url + STATE_PATH, headers={"Authorization": f"Bearer {KEY}"})
        assert right.status_code == 200
        assert KEY not in right.text


def test_a_page_of_another_name_is_refused() -> None:
    """The guard against DNS rebinding holds for the page too."""
    with serving(hosts=("127.0.0.1",)) as running:
        assert httpx2.get(running.url + "/").status_code == 200
        assert httpx2.get(running.url + "/", headers={"Host": "evil.example"}).status_code == 403


# -- the data --------------------------------------------------------------------------------------------------------


def test_the_state_of_a_server_that_did_nothing_yet_is_empty() -> None:
    with serving() as running:
        told = state(running)
        assert told["latency"]["ttft"] == {"count": 0, "p50": None, "p90": None, "p95": None, "p99": None}
        assert told["acceptance"] == {}
        assert told["totals"] == {"tokens": 0, "drafted": 0, "accepted": 0, "wasted": 0, "ended": {}}
        assert told["transitions"] == told["requests"] == []
        assert told["transitions_kept"] == 0
        assert told["queue"] == {"running": 0, "waiting": 0, "places": running.engine.batch_size, "preemptions": 0}


def test_all_changes_of_mode_can_be_had() -> None:
    """The state has the latest 64 of them and says how many there are; the others have a route of their own."""
    with serving() as running:
        change_modes(running.engine, 150)
        told = state(running)
        every = httpx2.get(f"{running.url}/dashboard/transitions").json()["transitions"]
    assert [entry["step"] for entry in every] == list(range(150))
    assert told["transitions"] == every[-64:]
    assert told["transitions_kept"] == 150


def test_sums_are_those_of_the_answers() -> None:
    """Tokens, guesses, acceptance by drafter and position, and latencies: what the requests themselves were told."""
    with serving() as running:
        answers = [write(running, speculation={"drafter": name}) for name in ("ngram", "suffix", "none")]
        told = state(running)
        settled(running)
    counted = [answer.to_dict()["metrics"]["speculative_decoding"] for answer in answers]
    assert counted[2] is None
    drafts = [each for each in counted if each is not None]
    assert told["totals"]["tokens"] == 120
    assert told["totals"]["ended"] == {"length": 3}
    assert told["totals"]["drafted"] == sum(each["num_draft_tokens"] for each in drafts) > 0
    assert told["totals"]["accepted"] == sum(each["num_accepted_draft_tokens"] for each in drafts) > 0
    assert told["totals"]["wasted"] == told["totals"]["drafted"] - told["totals"]["accepted"]
    assert told["latency"]["ttft"]["count"] == 3
    assert told["latency"]["ttft"]["p50"] <= told["latency"]["ttft"]["p99"]
    assert set(told["acceptance"]) == {"ngram", "suffix"}
    for name, each in zip(("ngram", "suffix"), drafts, strict=True):
        by_drafter = told["acceptance"][name]
        assert by_drafter["drafts"] == each["num_spec_steps"]
        assert by_drafter["accepted"] == sum(by_drafter["right"]) == each["num_accepted_draft_tokens"]
        assert by_drafter["sources"] == {name: each["num_accepted_draft_tokens"]}
        assert by_drafter["right"] == sorted(by_drafter["right"], reverse=True)
        assert all(r <= t for r, t in zip(by_drafter["right"], by_drafter["reached"], strict=True))


def test_weights_and_drafters_are_named(server: Running) -> None:
    told = state(server)
    assert told["models"][0] == {
        "role": "target",
        "name": server.engine.files.name,
        "sha256": server.engine.files.digest(),
    }
    assert told["drafters"]["own"] == "ngram"
    assert told["server"]["name"] == MODEL


@pytest.mark.parametrize("since", ["-1", "many", str(2**60)])
def test_a_number_of_a_sample_that_is_none_is_refused(server: Running, since: str) -> None:
    answer = httpx2.get(f"{server.url}{STATE_PATH}", params={"since": since})
    assert answer.status_code == 400
    assert "since" in answer.json()["error"]["message"]


def test_samples_are_of_one_second_each_and_come_once() -> None:
    """Sums of a second are its own, and its mode; `since` leaves out what was sent; the oldest are dropped."""
    time = 0.0
    with serving() as running:
        history = running.service.history
        assert history is not None
        own = History(running.engine, lambda: time)
        running.service.thread._watchers.append(own)
        for second in (1.0, 2.0, 3.0):
            time = second
            if second == 2.0:
                write(running)
                settled(running)
            own.sample()
        told = own.state(0, (), 0.0)
        rows = [dict(zip(told["samples"]["columns"], row, strict=True)) for row in told["samples"]["rows"]]
        assert [row["tokens"] for row in rows] == [0, 40, 0]
        assert [row["time"] for row in rows] == [1.0, 2.0, 3.0]
        assert rows[0]["mode"] is rows[2]["mode"] is None
        assert rows[1]["mode"] == "speculative"
        assert rows[1]["drafted"] > rows[1]["accepted"] > 0
        assert rows[1]["decoded"] == 39  # the first token came with the prompt
        assert own.state(2, (), 0.0)["samples"]["rows"] == told["samples"]["rows"][2:]
        assert own.state(99, (), 0.0)["samples"]["rows"] == []
        for _ in range(700):
            own.sample()
        assert own.state(0, (), 0.0)["samples"]["next"] == 703
        assert len(own.state(0, (), 0.0)["samples"]["rows"]) == 600
        assert len(own.state(700, (), 0.0)["samples"]["rows"]) == 3


def test_a_request_that_runs_is_listed_and_its_text_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its text is written, without a word of it; and no longer."""
    with serving(tiny_engine(batch_size=1)) as running:
        step, steps, seen = running.engine.step, count(), threading.Event()

        def slow() -> Any:
            """From the third step on, the text waits until it was seen."""
            if next(steps) > 2:
                seen.wait(60)
            return step()

        monkeypatch.setattr(running.engine, "step", slow)
        with running.client.completions.create(
            **BODY | {"max_tokens": 8000}, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
            (only,) = state(running)["requests"]
            assert only["begun"]
            assert only["texts"] == 1
            assert only["written"] > 0
            seen.set()
        settled(running)
        told = state(running)
        assert told["requests"] == []
        assert "abcd" not in str(told)


# -- the measured speed-up -------------------------------------------------------------------------------------------


def test_the_speed_up_compares_with_plain_steps_of_the_same_texts() -> None:
    """Plain steps of 10 ms (8 of them the forward), then 3 tokens in 15 ms: twice as fast.

    Texts that asked for no drafter teach what a plain step takes, and are no part of the speed-up.
    """
    costs = Costs(live=True)
    meter = Speedometer(costs)
    for _ in range(200):
        costs.measured(1, 0.008)
        meter.record(texts=1, guesses=0, tokens=1, seconds=0.010, beside=0.002, wanted=False)
    assert meter.speed.tokens == 200
    assert meter.speed.compared_seconds == meter.speed.plain_seconds == 0.0
    for _ in range(10):
        meter.record(texts=1, guesses=4, tokens=3, seconds=0.015, beside=0.002)
    speed = meter.speed
    assert (speed.tokens, speed.compared_tokens) == (230, 30)
    assert speed.compared_seconds == pytest.approx(0.15)
    assert speed.plain_seconds / speed.compared_seconds == pytest.approx(2.0)


def test_without_measured_costs_nothing_is_compared() -> None:
    """`--no-adapt` measures no plain step: the speed is told, a speed-up is not."""
    meter = Speedometer(Costs(live=False))
    meter.record(texts=2, guesses=0, tokens=2, seconds=0.01, beside=0.002)
    meter.record(texts=2, guesses=4, tokens=5, seconds=0.02, beside=0.002)
    assert meter.speed == (7, 0.03, 0.0, 0, 0.0)


def test_the_engine_counts_steps_that_only_decode(server: Running) -> None:
    """All tokens of a text but the first, which comes with the end of its prompt."""
    before = server.engine.speed
    write(server)
    settled(server)
    assert server.engine.speed.tokens - before.tokens == 39
    assert server.engine.speed.seconds > before.seconds
