"""What a server writes into its ledger: who was served what by what, and never a text or a key."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from outrider import Engine
from outrider.audit.reading import Choice, read
from outrider.audit.store import Ledger
from outrider.audit.verification import verify
from outrider.cli import main
from outrider.engine.transitions import Figures
from outrider.server.settings import Auditing, Keys
from serving import MODEL, Running, serving, tiny_engine, wait_until
from test_serve_process import served
from test_server_limits import raw_stream, slowed
from tiny import tiny_model, write_gguf

KEY = "key-of-the-tests"  # what `serving`'s client sends
SECRETS = ("qhvzk", "xwjyf", "zzqqk", "jjxxw", KEY)  # parts of every text that a client sends below


@contextmanager
def audited(path: Path, engine: Engine | None = None, **settings: Any) -> Iterator[Running]:
    """A server with a ledger at `path`; `settings` are fields of `Auditing`."""
    auditing = Auditing(ledger=Ledger(path), **settings)
    with serving(engine, keys=Keys({"alice": KEY}), auditing=auditing) as running:
        yield running


def bodies(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row.content() for row in read(path, Choice(kind=kind))]


def ask(running: Running, **change: Any) -> Any:
    given = {"model": MODEL, "prompt": "qhvzk qhvzk", "max_tokens": 12, "temperature": 0, **change}
    return running.client.completions.create(**given)


def test_a_request_becomes_a_row_without_its_text(tmp_path: Path) -> None:
    """Counts, parameters, times, the key's name are there; prompt, answer, stops, prediction, form and key are not."""
    path = tmp_path / "ledger.db"
    with audited(path) as running:
        answer = ask(running, seed=7, n=2, stop=["xwjyf"], user="zzqqk", extra_body={"ignore_eos": True})
        ask(running, extra_body={"prediction": {"type": "content", "content": "jjxxw jjxxw"}})
        ask(running, extra_body={"structured_outputs": {"choice": ["zzqqk"]}})
        with pytest.raises(openai.BadRequestError):
            ask(running, extra_body={"speculation": {"drafter": "xwjyf"}})
        with pytest.raises(openai.NotFoundError):
            ask(running, model="zzqqk")
    first, predicted, formed, refused, missed = bodies(path, "request")
    assert (first["key"], first["endpoint"], first["model"]) == ("alice", "/v1/completions", MODEL)
    assert (first["status"], first["outcome"], first["texts"]) == (200, "finished", 2)
    assert first["finish_reasons"] == ["length", "length"]
    assert first["completion_tokens"] == answer.usage.completion_tokens == 24
    assert first["prompt_tokens"] == 2 * answer.usage.prompt_tokens
    assert first["parameters"]["seeds"] == [7, 8]
    assert first["parameters"]["stop"] == 1
    told = answer.model_extra["metrics"]["speculative_decoding"]
    assert first["drafted"] == told["num_draft_tokens"] > 0
    assert first["accepted"] == told["num_accepted_draft_tokens"]
    assert first["mean_acceptance_length"] == pytest.approx(told["mean_acceptance_length"], abs=1e-6)
    assert 0 < first["ttft"] <= first["seconds"]
    assert first["tpot"] > 0
    assert predicted["speculation"]["prediction"]
    assert formed["parameters"]["form"] == "choice"
    assert [(row["status"], row["outcome"]) for row in (refused, missed)] == [(400, "refused"), (404, "refused")]
    texts = [choice.text for choice in answer.choices]
    everything = path.read_bytes() + Path(f"{path}.lock").read_bytes()
    for secret in (*SECRETS, *texts):
        assert secret.encode() not in everything
    assert verify(path).intact


def test_texts_are_kept_only_if_it_was_told_so(tmp_path: Path) -> None:
    """`--ledger-text`, and then they are whole; the key is not there even so."""
    path = tmp_path / "ledger.db"
    with audited(path, with_text=True) as running:
        answer = ask(running)
    (row,) = bodies(path, "request")
    assert row["prompts"] == ["qhvzk qhvzk"]
    assert row["answers"] == [answer.choices[0].text]
    assert KEY.encode() not in path.read_bytes()


def test_the_start_says_what_serves(tmp_path: Path) -> None:
    """Hashes of model, tokenizer and template, drafters with their options, names of keys, and a proper end."""
    path = tmp_path / "ledger.db"
    engine = tiny_engine()
    with audited(path, engine, origin={"code": {"version": "x"}}) as running:
        ask(running, extra_body={"speculation": {"drafter": "suffix"}})
    with audited(path, engine):
        pass
    start, second = bodies(path, "start")
    assert start["model"]["sha256"] == engine.files.sha256()
    assert start["model"]["tokenizer_sha256"] == engine.tokenizer.fingerprint()
    assert (start["code"], start["keys"], start["drafter"]) == ({"version": "x"}, ["alice"], "ngram")
    assert [row["drafter"] for row in bodies(path, "drafter")] == ["ngram", "suffix", "ngram", "suffix"]
    assert bodies(path, "drafter")[0]["options"]["max_draft_tokens"] > 0
    assert second["server_before"] == "in order"
    assert [row["requests"] for row in bodies(path, "end")] == [1, 0]


def test_a_client_that_goes_is_counted_to_its_end(tmp_path: Path) -> None:
    """Cancelled requests are rows too, with the tokens that were written for nobody."""
    path = tmp_path / "ledger.db"
    engine = slowed(tiny_engine(drafter="none"), 0.01)
    with serving(engine, auditing=Auditing(ledger=Ledger(path))) as running:
        with raw_stream(running, stream=True) as connection:
            wait_until(lambda: running.engine.steps > 3)
            connection.close()
        wait_until(lambda: not running.engine.busy)
    (row,) = bodies(path, "request")
    assert (row["outcome"], row["status"], row["finish_reasons"]) == ("cancelled", 499, ["cancelled"])
    assert row["completion_tokens"] >= 3
    assert row["key"] is None


def test_changes_of_mode_and_failing_drafters_are_rows(tmp_path: Path) -> None:
    """With the reason and the figures; of an error the class alone, since its message may quote the text."""
    path = tmp_path / "ledger.db"
    engine = tiny_engine()

    def broken(batch: Any) -> Any:
        raise ValueError("qhvzk")

    with audited(path, engine) as running:
        engine._transitions.change("ngram", "plain", "does not pay", 17, 2, Figures(0.5, 0.25))
        engine._transitions.change("ngram", "speculative", "pays again", 40, 1, Figures(1.5))
        engine._drafter("ngram").propose = broken  # type: ignore[method-assign]
        with pytest.warns(RuntimeWarning, match="go on without"):
            ask(running)
    changes = bodies(path, "mode")
    assert [(row["before"], row["after"], row["reason"]) for row in changes] == [
        ("speculative", "plain", "does not pay"),
        ("plain", "speculative", "pays again"),
        ("speculative", "plain", "drafter failed"),
    ]
    assert (changes[0]["speedup"], changes[0]["acceptance"], changes[0]["requests"]) == (0.5, 0.25, 2)
    (row,) = bodies(path, "request")
    assert row["drafters_failed"] == ["ngram: ValueError"]
    assert b"qhvzk" not in path.read_bytes()


def full(ledger: Ledger) -> None:
    (pages,) = ledger._connection.execute("PRAGMA page_count").fetchone()
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_full_disk_stops_the_server_or_does_not(tmp_path: Path, policy: Any) -> None:
    """By --ledger-on-error: 503 with the reason, from /health too, until there is room again; or going on."""
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    with serving(auditing=Auditing(ledger=ledger, on_error=policy)) as running:
        writer = running.service.recorder._writer  # type: ignore[union-attr]
        wait_until(lambda: writer.queued == 0 and writer.written >= 2)
        full(ledger)
        for _ in range(30):  # until the rows no longer fit
            if writer.failure is not None:
                break
            with suppress(openai.InternalServerError):  # the last one may be refused already
                ask(running)
        wait_until(lambda: writer.failure is not None)
        health = httpx2.get(f"{running.url}/health")
        metrics = httpx2.get(f"{running.url}/metrics").text
        assert 'outrider_ledger_writable{model_name="tiny"} 0.0' in metrics
        if policy == "stop":
            with pytest.raises(openai.InternalServerError, match="database or disk is full") as refused:
                ask(running)
            assert refused.value.code == "ledger_failed"
            assert "retry-after" in refused.value.response.headers
            assert (health.status_code, "disk is full" in health.text) == (503, True)
        else:
            assert ask(running).choices
            assert health.status_code == 200
        ledger._connection.execute("PRAGMA max_page_count = 1000000")
        wait_until(lambda: writer.failure is None)
        assert ask(running).choices
        assert httpx2.get(f"{running.url}/health").status_code == 200
    rows = list(read(path, Choice()))
    assert rows[-1].kind == "end"
    assert any(row.kind == "gap" for row in rows) == (policy == "stop")  # the refused request
    assert verify(path).intact


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("ledger") / "tiny.gguf", tiny_model(context=4096))


def test_kill_9_leaves_a_ledger_that_goes_on(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process is killed in a stream and started again: the chain is whole, and says that there was no end."""
    path, page = tmp_path / "ledger.db", tmp_path / "report.html"
    for _ in range(2):
        with served(model, "--ledger", str(path)) as (process, url):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
            client.completions.create(model="tiny", prompt="abcd abcd", max_tokens=4)
            wait_until(lambda: len(list(read(path, Choice(kind="request")))) > 0)
            stream = client.completions.create(
                model="tiny", prompt="abcd", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
            )
            next(stream)
            process.send_signal(signal.SIGKILL)
            process.wait()
            client.close()
    assert [row["server_before"][:6] for row in bodies(path, "start")] == ["in ord", "no end"]
    start = bodies(path, "start")[0]
    assert len(start["code"]["sha256"]) == 64
    assert (start["settings"]["threads"], start["ledger"]["on_error"]) == (1, "stop")
    assert main(["audit", "verify", str(path)]) == 0
    assert "2 server run(s) without an end" in capsys.readouterr().out
    assert main(["audit", "report", str(path), "--out", str(page)]) == 0
    html = page.read_text()
    assert start["model"]["sha256"] in html
    assert "http://" not in html
    assert "https://" not in html


def test_a_second_server_on_the_same_ledger_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any model is loaded, with exit code 2; and so are options that come without a ledger, or make no sense."""
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    for options, culprit in (
        (["--ledger", str(path)], "written by another server"),
        (["--ledger", str(tmp_path)], str(tmp_path)),
        (["--ledger-keep", "90d"], "--ledger FILE"),
        (["--ledger", str(tmp_path / "new.db"), "--ledger-keep", "soon"], "--ledger-keep"),
        (["--ledger", str(tmp_path / "new.db"), "--ledger-key-file", str(tmp_path / "none")], "--ledger-key-file"),
    ):
        assert main(["serve", str(model), "--port", "0", *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert culprit in line
    ledger.close()


def test_a_file_that_may_grow_no_further_is_a_full_disk(model: Path, tmp_path: Path) -> None:
    """A real error of the system's own: the process keeps running, says why in its log, and answers 503."""
    path = tmp_path / "ledger.db"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    with served(model, "--ledger", str(path), limit=limit) as (process, url):
        statuses = []
        for _ in range(200):
            body = {"model": "tiny", "prompt": "abcd", "max_tokens": 1}
            statuses.append(httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code)
            if statuses[-1] != 200:
                break
        assert statuses[-1] == 503
        assert set(statuses[:-1]) == {200}
        process.terminate()
        assert process.wait(60) == 0
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr]
    assert any("the ledger cannot be written" in line["message"] for line in lines)
    assert verify(path).intact
