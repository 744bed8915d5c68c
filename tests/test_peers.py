"""The comparison with other engines: conversions keep the model, contenders take turns, the absent are named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.models.load import open_model
from tiny import tiny_model, write_gguf

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import peers  # noqa: E402
from contenders import huggingface, llama_cpp_python, openvino_genai_pipeline  # noqa: E402
from contenders.base import Absent, Generation, Setup, Spec, in_turns  # noqa: E402
from contenders.quiet import Usage, foreign_share, usage  # noqa: E402
from contenders.race import Plan, Task, race  # noqa: E402
from contenders.report import rival_of, summarise, table  # noqa: E402
from contenders.worker import Worker  # noqa: E402
from convert_gguf import ConversionError, convert  # noqa: E402

# Of the largest value: half a step of 8 bits, a whole one of 4 bits (the largest becomes -8, its negative is cut to 7),
# and the rounding of the scale, a float of 11 bits.
ERROR = {"F32": 0.0, "BF16": 2**-8, "Q8_0": 0.5 / 127 + 2**-11, "Q4_0": 1 / 8 + 2**-11}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_model(), "Q4_1")


@pytest.mark.parametrize("kind", ERROR)
def test_a_converted_model_is_the_same_model(model: Path, tmp_path: Path, kind: str) -> None:
    """Same configuration, tokenizer and tensors; each value within the kind's rounding of the largest one."""
    made = convert(model, kind, tmp_path)
    old, new = open_model(model), open_model(made)
    assert new.quantisation == kind
    assert new.config == old.config
    assert new.tokenizer.fingerprint() == old.tokenizer.fingerprint()
    assert new.tokenizer.chat([{"role": "user", "content": "hi"}]) == old.tokenizer.chat(
        [{"role": "user", "content": "hi"}]
    )
    assert set(new.tensors) == set(old.tensors)
    for name, tensor in old.tensors.items():
        before, after = tensor.float32(), new.tensors[name].float32()
        assert after.shape == before.shape
        assert np.abs(after - before).max() <= ERROR[kind] * np.abs(before).max()
        if before.ndim == 1:
            assert (after == before).all()


def test_a_conversion_is_made_once_and_leaves_no_parts(model: Path, tmp_path: Path) -> None:
    """The second call returns the first one's file untouched, and nothing else lies in the folder."""
    made = convert(model, "Q8_0", tmp_path)
    written = made.stat().st_mtime_ns
    assert convert(model, "Q8_0", tmp_path) == made
    assert made.stat().st_mtime_ns == written
    assert list(tmp_path.iterdir()) == [made]


def test_what_cannot_be_converted_is_named(model: Path, tmp_path: Path) -> None:
    """An unknown kind and a file that is no GGUF file are refused by name."""
    with pytest.raises(ConversionError, match="'Q3_X'"):
        convert(model, "Q3_X", tmp_path)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model at all, but long enough to look like one")
    with pytest.raises(ConversionError, match=r"broken\.gguf"):
        convert(broken, "Q8_0", tmp_path)


class Fake:
    """A contender whose every token takes `pace` seconds, in a log of who was called."""

    def __init__(self, name: str, log: list[str], pace: float, fail_at: int | None = None, text: int = 0) -> None:
        self.name, self.log, self.pace, self.fail_at, self.text = name, log, pace, fail_at, text
        self.calls = 0

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generation:
        self.calls += 1
        self.log.append(self.name)
        if self.calls == self.fail_at:
            raise Absent("out of memory")
        # every fourth call is ten times slower, as on a machine that somebody else uses: one repeat of three at most
        pace = self.pace * (10 if self.calls % 4 == 0 else 1)
        return Generation([prompt[0] + self.text] * new_tokens, pace, pace * new_tokens, new_tokens // 2)

    def step_times(self, context: Sequence[int], rows: Sequence[int], repeats: int) -> dict[int, list[float]]:
        if self.name.startswith("openvino"):
            raise Absent("no call for it")
        return {number: [self.pace * 1000 * number] * repeats for number in rows}


def _plan(**changes: Any) -> Plan:
    tasks = [Task("story", (5, 6)), Task("copy", (7, 8, 9)), Task("story", (10,))]
    return Plan(**{"tasks": tasks, "new_tokens": 8, "repeats": 3, "pause": 0.0, **changes})


def _report(runners: dict[str, Fake], plan: Plan) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    done = race(runners, plan)
    return {entry["name"]: entry for entry in summarise(done, plan, {name: {} for name in runners})}, done.out


def test_contenders_take_turns_on_each_prompt() -> None:
    """After the warm-up, every prompt is run once by each before the next one, and another begins each time."""
    log: list[str] = []
    names = ["outrider:int8:plain", "llama.cpp:Q8_0:plain", "openvino:Q8_0:plain"]
    race({name: Fake(name, log, 0.001) for name in names}, _plan())
    rounds = [log[i : i + 3] for i in range(2 * 3, len(log), 3)]  # two warm-up calls each
    assert len(rounds) == 3 * 3
    assert all(sorted(turn) == sorted(names) for turn in rounds)
    assert {turn[0] for turn in rounds} == set(names)


def test_speeds_and_ratios_are_those_of_medians() -> None:
    """One slow repeat in three leaves speed, ratios and steps where they were."""
    log: list[str] = []
    runners = {
        "outrider:int8:plain": Fake("outrider:int8:plain", log, 0.001),
        "outrider:int8:ngram": Fake("outrider:int8:ngram", log, 0.0005),
        "llama.cpp:Q8_0:plain": Fake("llama.cpp:Q8_0:plain", log, 0.002),
        "llama.cpp:Q8_0:lookup-2": Fake("llama.cpp:Q8_0:lookup-2", log, 0.004, text=1),
    }
    by_name, out = _report(runners, _plan(prefills=[(1,), (2,), (3,)], step_rows=(1, 4)))
    ours, theirs = by_name["outrider:int8:plain"], by_name["llama.cpp:Q8_0:plain"]
    assert not out
    assert ours["speeds"]["all"]["tokens_per_second"] == pytest.approx(1000)
    assert ours["speeds"]["all"]["decode_tokens_per_second"] == pytest.approx(1000)
    assert ours["speeds"]["story"]["prompts"] == 2
    assert ours["prefill_ms"] == pytest.approx(1)
    assert ours["step_over_one_row"] == {"1": 1.0, "4": 4.0}
    assert ours["tokens_per_forward"] == pytest.approx(7 / 4)
    assert theirs["ours_over_this"]["copy"] == pytest.approx(2)
    assert by_name["outrider:int8:ngram"]["over_plain"]["all"] == pytest.approx(2)
    assert by_name["outrider:int8:ngram"]["same_text_as_plain"] == {"same": 3, "prompts": 3}
    assert by_name["llama.cpp:Q8_0:lookup-2"]["same_text_as_plain"] == {"same": 0, "prompts": 3}
    assert by_name["llama.cpp:Q8_0:lookup-2"]["ours_over_this"]["all"] == pytest.approx(8)


def test_one_that_fails_is_left_out_by_name() -> None:
    """A contender that fails in the middle loses all its figures; the others keep theirs."""
    log: list[str] = []
    runners = {
        "outrider:int8:plain": Fake("outrider:int8:plain", log, 0.001),
        "openvino:Q8_0:plain": Fake("openvino:Q8_0:plain", log, 0.001, fail_at=5),
    }
    by_name, out = _report(runners, _plan())
    assert set(by_name) == {"outrider:int8:plain"}
    assert out == {"openvino:Q8_0:plain": "out of memory"}
    assert by_name["outrider:int8:plain"]["speeds"]["all"]["prompts"] == 3


def test_one_that_stops_early_is_left_out() -> None:
    """Fewer tokens than asked for would look like speed."""

    class Short(Fake):
        def generate(self, prompt: Sequence[int], new_tokens: int) -> Generation:
            made = super().generate(prompt, new_tokens)
            return made._replace(tokens=made.tokens[:-1])

    _, out = _report({"llama.cpp:Q8_0:plain": Short("llama.cpp:Q8_0:plain", [], 0.001)}, _plan())
    assert out == {"llama.cpp:Q8_0:plain": "wrote 7 tokens where 8 were asked for"}


def test_numbers_of_rows_go_up_and_down() -> None:
    """Each as often as asked for, and after one round the smallest does not come straight after the largest."""
    assert list(in_turns((1, 4, 8), 3)) == [1, 4, 8, 8, 4, 1, 1, 4, 8]


def test_an_engine_without_steps_keeps_its_other_figures() -> None:
    """No call for a forward of M rows is said, and costs nothing else."""
    name = "openvino:Q8_0:plain"
    by_name, out = _report({name: Fake(name, [], 0.001)}, _plan(step_rows=(1, 4)))
    assert not out
    assert by_name[name]["no_steps"] == "no call for it"
    assert by_name[name]["step_ms"] == {}
    assert name in table(list(by_name.values()), (1, 4))


@pytest.mark.parametrize(
    ("name", "rival"),
    [
        ("llama.cpp:Q8_0:plain", "outrider:int8:plain"),
        ("llama.cpp:Q4_0:lookup-10", "outrider:int4:ngram"),
        ("openvino:Q4_1:lookup-5", "outrider:int4:ngram"),
        ("transformers:bf16:plain", "outrider:bf16:plain"),
        ("llama.cpp:F32:plain", "outrider:fp32:plain"),
        ("outrider:int8:ngram", None),
    ],
)
def test_each_is_compared_with_ours_of_its_own_kind(name: str, rival: str | None) -> None:
    """Same number of bits, and drafting beside drafting."""
    assert rival_of(name, peers.contenders("Q4_1")) == rival


def test_peers_are_chosen_by_pattern() -> None:
    """A prefix up to a colon, a pattern, a full name that is not in the list; anything else is refused."""
    known = peers.contenders("Q4_1")
    assert peers.select(None, known) == known
    assert peers.select("outrider:int8", known) == ["outrider:int8:plain", "outrider:int8:ngram"]
    assert peers.select("openvino:*:lookup-5", known) == ["openvino:Q8_0:lookup-5", "openvino:Q4_1:lookup-5"]
    assert peers.select("llama.cpp:Q8_0:lookup-4", known) == ["llama.cpp:Q8_0:lookup-4"]
    for wrong in ("vllm", "openvino:*:lookup-4"):
        with pytest.raises(ValueError, match=re.escape(repr(wrong))):
            peers.select(wrong, known)


def test_prefills_share_no_prefix() -> None:
    """A cache of prefixes cannot help: all begin at another token, and all have the wanted length."""
    text = [3, 3, 5, 8, 5, 9, 2]
    made = peers.prefills(text, 20, 4)
    assert [len(prompt) for prompt in made] == [20] * 4
    assert len({prompt[0] for prompt in made}) == 4
    with pytest.raises(ValueError, match="different tokens"):
        peers.prefills(text, 20, 6)


@pytest.mark.parametrize(
    ("engine", "package"),
    [(llama_cpp_python, "llama_cpp"), (huggingface, "transformers"), (openvino_genai_pipeline, "openvino_genai")],
)
def test_what_is_not_installed_is_absent(
    monkeypatch: pytest.MonkeyPatch, model: Path, engine: Any, package: str
) -> None:
    """An import that fails becomes Absent with a reason, not a traceback."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Absent, match="not installed"):
        engine.create(Spec("any", "Q4_1"), Setup(model, "Q4_1"))


def test_our_engine_runs_as_a_contender(model: Path, tmp_path: Path) -> None:
    """In its own process: as many tokens as asked for, with drafts the same, and times by rows."""
    setup = Setup(model, "Q4_1", threads=1, context=256, cache=tmp_path)
    prompt = [5, 6, 7, 8] * 4
    texts = []
    for decoding in ("plain", "ngram"):
        worker = Worker(Spec("outrider", "fp32", decoding), setup)
        try:
            made = worker.generate(prompt, 24)
            texts.append(made.tokens)
            assert 0 < made.ttft < made.seconds
            steps = worker.step_times(prompt, (1, 4), 2)
            assert [len(steps[rows]) for rows in (1, 4)] == [2, 2]
        finally:
            worker.close()
    assert texts[0] == texts[1]
    assert len(texts[0]) == 24


def test_a_worker_that_cannot_start_says_why(model: Path) -> None:
    """A precision that our engine does not know comes back as the reason."""
    with pytest.raises(Absent, match="fp7"):
        Worker(Spec("outrider", "fp7"), Setup(model, "Q4_1"))


def test_the_share_of_others_is_what_is_busy_and_not_ours() -> None:
    """200 ticks of two cores: 150 at work, 130 of them ours. No answer where the system gave none."""
    before, after = Usage(1000, 400, 50), Usage(1200, 550, 180)
    assert foreign_share(before, after) == pytest.approx(0.1)
    assert foreign_share(before, Usage(1200, 530, 181)) == 0.0
    assert foreign_share(None, after) is None
    assert foreign_share(before, None) is None


def test_usage_is_read_from_the_system(tmp_path: Path) -> None:
    """Guest time is not counted twice, a name with brackets and spaces misleads nobody, an ended process gives None."""
    (tmp_path / "stat").write_text("cpu  10 20 30 400 5 6 7 8 9 10\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    for pid, name in ((os.getpid(), "python"), (77, "a) b (c")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S " + " ".join(map(str, range(4, 30))))
    # fields 14 and 15 of a process, the state being the third
    assert usage([77], tmp_path) == Usage(total=486, busy=81, ours=2 * (14 + 15))
    assert usage([78], tmp_path) is None


def test_the_command_writes_its_report(model: Path, tmp_path: Path) -> None:
    """One run on a tiny model: exit code 0, the table, who was left out and why, and the report as JSON."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["a b a b a b c d e f g h"], "category": "copy"}\n')
    command = [sys.executable, str(BENCHMARKS / "peers.py"), "--model", str(model), "--prompts", str(prompts)]
    command += ["--peers", "outrider:fp32:plain,outrider:fp7:plain", "--max-tokens", "4", "--repeat", "1"]
    command += ["--threads", "1", "--context", "512", "--json", str(out), "--cache", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert [entry["name"] for entry in report["contenders"]] == ["outrider:fp32:plain"]
    assert report["contenders"][0]["speeds"]["copy"]["tokens_per_second"] > 0
    assert set(report["contenders"][0]["step_ms"]) == {str(rows) for rows in peers.ROWS}
    assert report["absent"][0]["name"] == "outrider:fp7:plain"
    assert "left out: outrider:fp7:plain" in done.stdout
    assert report["foreign_cpu_share"] is None or 0 <= report["foreign_cpu_share"] <= 1


def test_the_shipped_prompts_have_every_category() -> None:
    """Story, question, code edit, copy and summary, each with at least two prompts, all of them different."""
    lines = [json.loads(line) for line in (BENCHMARKS / "prompts" / "peers.jsonl").read_text().splitlines()]
    counts = {
        category: sum(line["category"] == category for line in lines) for category in {x["category"] for x in lines}
    }
    assert set(counts) == {"story", "question", "code edit", "copy", "summary"}
    assert min(counts.values()) >= 2
    assert len({json.dumps(line.get("messages", line.get("prompt"))) for line in lines}) == len(lines)
