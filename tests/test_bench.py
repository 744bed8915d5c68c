"""The benchmark harness: its prompts, its statistics, and that it catches an engine that lies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench import environment
from outrider.bench.harness import (
    Contender,
    acceptance_by_position,
    acceptance_rate,
    contenders,
    difference,
    differences,
    mean_acceptance_length,
    measure,
    summarise,
)
from outrider.bench.prompts import Prompt, PromptFileError, cut, digest, read_prompts
from outrider.bench.spread import percentile, percentiles, ratio_interval
from outrider.engine.results import Result, Step, TokenLogprobs, Usage


def result(tokens: Sequence[int] = (5, 6, 7), steps: Sequence[Step] = (), seconds: float = 0.3) -> Result:
    return Result(
        id=0,
        prompt_tokens=[1],
        tokens=list(tokens),
        origins=["plain"] * len(tokens),
        text=" ".join(map(str, tokens)),
        finish_reason="length",
        stop_reason=None,
        logprobs=[TokenLogprobs(token, -token / 10) for token in tokens],
        usage=Usage(1, len(tokens)),
        steps=list(steps) or [Step(0, 0, 0)] * len(tokens),
        seed=0,
        ttft=0.1,
        seconds=seconds,
    )


class FakeEngine:
    """Answers each prompt with tokens made from it, in simulated time, and lies where it is told to."""

    def __init__(self, seconds: dict[str, float], lies: dict[tuple[str, str], Result] | None = None) -> None:
        self.seconds, self.lies = seconds, lies or {}
        self.now = 0.0
        self.calls: list[str] = []

    def clock(self) -> float:
        return self.now

    def generate(self, drafter: str, batch: Sequence[Prompt]) -> list[Result]:
        self.calls.append(drafter)
        self.now += self.seconds[drafter]
        truth = {prompt: result([len(str(prompt.content)), 2, 3, 4]) for prompt in batch}
        return [self.lies.get((drafter, str(prompt.content)), truth[prompt]) for prompt in batch]


def prompts(*texts: str, category: str | None = None) -> list[Prompt]:
    return [Prompt(line, text, category) for line, text in enumerate(texts, start=1)]


NONE = Contender("none")


def test_the_baseline_is_always_there_and_first() -> None:
    assert contenders(["ngram", "ngram", "none", "junk"]) == [NONE, Contender("ngram"), Contender("junk")]


def test_rules_and_temperatures_are_measured_side_by_side() -> None:
    """Plain decoding at each temperature; at 0 both rules are one; only rejection above 0 may write another text."""
    plan = contenders(["a", "b"], [0.0, 0.8, 0.8], ["match", "rejection"])
    assert [str(one) for one in plan] == [
        "none",
        "a",
        "b",
        "none T=0.8 match",
        "a T=0.8 match",
        "b T=0.8 match",
        "a T=0.8 rejection",
        "b T=0.8 rejection",
    ]
    assert [str(one) for one in plan if not one.exact] == ["a T=0.8 rejection", "b T=0.8 rejection"]
    assert {one.baseline for one in plan} == {NONE, Contender("none", 0.8)}


def test_drafters_take_turns_on_each_batch() -> None:
    """Every drafter runs on every batch, and the one that begins changes."""
    engine = FakeEngine({"none": 1.0, "a": 1.0, "b": 1.0})
    measure(engine.generate, ["none", "a", "b"], prompts("x", "y", "z", "w"), batch_size=2)
    assert engine.calls == ["none", "a", "b", "a", "b", "none"]


def test_repeats_take_turns_too() -> None:
    """A slow minute falls on all contenders: no one's repeats run in one piece."""
    engine = FakeEngine({"none": 1.0, "a": 1.0})
    measure(engine.generate, ["none", "a"], prompts("x"), repeat=3)
    assert engine.calls == ["none", "a", "a", "none", "none", "a"]


def test_speed_and_speed_up_are_tokens_over_wall_time() -> None:
    engine = FakeEngine({"none": 2.0, "fast": 0.5})
    out = measure(engine.generate, ["none", "fast"], prompts("x", "y"), clock=engine.clock)
    run = summarise(Contender("fast"), "int8", out["fast"], out["none"])
    assert run["tokens"] == 8
    assert run["tokens_per_second"] == pytest.approx(8 / 1.0)
    assert run["speedup"] == pytest.approx(4.0)
    assert (run["prompts"], run["identical"], run["differences"]) == (2, 2, [])


def test_each_repeat_has_its_own_speed_and_speed_up() -> None:
    """Speeds of 4 tokens in 2, 1 and 4 seconds beside plain ones in 4, 4 and 8."""
    times = {"none": iter([4.0, 4.0, 8.0]), "fast": iter([2.0, 1.0, 4.0])}
    engine = FakeEngine({"none": 0.0, "fast": 0.0})

    def generate(drafter: str, batch: Sequence[Prompt]) -> list[Result]:
        engine.now += next(times[drafter])
        return engine.generate(drafter, batch)

    out = measure(generate, ["none", "fast"], prompts("x"), repeat=3, clock=engine.clock)
    run = summarise(Contender("fast"), "int8", out["fast"], out["none"])
    assert run["tokens_per_second_by_repeat"] == [2.0, 4.0, 1.0]
    assert run["speedup_by_repeat"] == [2.0, 4.0, 2.0]
    assert run["tokens_per_second"] == 2.0
    assert run["speedup_interval"] is None


def test_a_drafter_that_was_given_up_is_told() -> None:
    broken = replace(result(), drafter_error="no such file")
    out = measure(lambda drafter, batch: [broken] * 2, ["broken"], prompts("x", "y"), batch_size=2)
    run = summarise(Contender("broken"), "int8", out["broken"], out["broken"])
    assert run["drafter_failures"] == {"no such file": 2}


def test_a_batch_counts_its_wall_time_once() -> None:
    engine = FakeEngine({"none": 2.0})
    out = measure(engine.generate, ["none"], prompts("x", "y"), batch_size=2, clock=engine.clock)
    assert summarise(NONE, "int8", out["none"], out["none"])["tokens_per_second"] == pytest.approx(8 / 2.0)


def test_repeats_count_with_their_median() -> None:
    times = iter([9.0, 1.0, 2.0])
    engine = FakeEngine({"none": 0.0})

    def generate(drafter: str, batch: Sequence[Prompt]) -> list[Result]:
        engine.now += next(times)
        return engine.generate(drafter, batch)

    out = measure(generate, ["none"], prompts("x"), repeat=3, clock=engine.clock)
    assert out["none"][0].seconds == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("lie", "position", "what"),
    [
        (result([1, 2, 9, 4]), 2, "tokens"),
        (result([1, 2, 3]), 3, "tokens"),
        (result([1, 2, 3, 4, 5]), 4, "tokens"),
        (replace(result([1, 2, 3, 4]), logprobs=None), 0, "logprobs"),
        (
            replace(
                result([1, 2, 3, 4]),
                logprobs=[TokenLogprobs(t, -t / 10 - (1e-12 if t == 3 else 0)) for t in (1, 2, 3, 4)],
            ),
            2,
            "logprobs",
        ),
        (replace(result([1, 2, 3, 4]), finish_reason="stop"), 4, "finish_reason"),
        (replace(result([1, 2, 3, 4]), text="x"), 4, "text"),
    ],
)
def test_an_engine_that_lies_is_caught(lie: Result, position: int, what: str) -> None:
    """A difference of one token, one bit of a log-probability or the end is found, placed and counted."""
    engine = FakeEngine({"none": 1.0, "liar": 1.0}, {("liar", "y"): lie})
    out = measure(engine.generate, ["none", "liar"], prompts("x", "y", "z"))
    (found,) = differences("liar", out["none"], out["liar"])
    assert (found.prompt, found.line, found.position, found.what) == (1, 2, position, what)
    assert f"position {position}, {what}" in str(found)
    assert found.plain != found.drafted
    run = summarise(Contender("liar"), "int8", out["liar"], out["none"])
    assert (run["prompts"], run["identical"], len(run["differences"])) == (3, 2, 1)
    json.dumps(run, allow_nan=False)


def test_a_lie_in_a_repeated_run_is_caught() -> None:
    """The first run is right and the second is not: the wrong one is kept and found."""
    lies = iter([result(), result([5, 6, 8])])
    out = measure(
        lambda drafter, contents: [next(lies) if drafter == "liar" else result()],
        ["none", "liar"],
        prompts("x"),
        repeat=2,
    )
    assert [found.position for found in differences("liar", out["none"], out["liar"])] == [2]


def test_equal_results_differ_nowhere() -> None:
    assert difference(result(), replace(result(), id=3, seconds=9.0, origins=["drafted"] * 3)) is None


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 95) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([float(i) for i in range(101)], 95) == pytest.approx(95.0)


def test_no_values_have_no_percentiles() -> None:
    assert set(percentiles([]).values()) == {None}


def test_an_interval_is_narrow_where_all_prompts_gain_alike_and_wide_where_they_do_not() -> None:
    """Of equal gains it is a point; of gains of 1 and 3 it holds the whole ratio between them; of two prompts none."""
    tokens, base = [10.0] * 8, ([10.0] * 8, [3.0] * 8)
    assert ratio_interval([(tokens, [1.5] * 8)], [base]) == pytest.approx((2.0, 2.0))
    low, high = ratio_interval([(tokens, [1.0, 3.0] * 4)], [base]) or (0.0, 0.0)
    assert 1.0 <= low < 24 / 16 < high <= 3.0
    assert ratio_interval([(tokens[:2], [1.0, 3.0])], [(tokens[:2], [3.0, 3.0])]) is None


def test_what_shifts_all_speeds_alike_leaves_a_ratio_of_ratios_alone() -> None:
    """Twice as fast a machine: each speed is doubled, the speed-up is not."""
    times = [1.0, 2.0, 4.0, 3.0]
    run, plain = ([8.0] * 4, times), ([8.0] * 4, [4.0, 5.0, 6.0, 7.0])
    faster, faster_plain = ([8.0] * 4, [t / 2 for t in times]), ([8.0] * 4, [2.0, 2.5, 3.0, 3.5])
    assert ratio_interval([faster, plain], [run, faster_plain]) == pytest.approx((1.0, 1.0))


def test_acceptance_is_counted_per_forward_and_per_depth() -> None:
    """Accepted 2, 0 and 1 of drafts of depth 3, 1 and 3, and one forward without a draft."""
    steps = [Step(3, 3, 2), Step(1, 1, 0), Step(5, 3, 1), Step(0, 0, 0)]
    assert mean_acceptance_length([result(steps=steps)]) == 1 + 3 / 4
    assert acceptance_by_position([result(steps=steps)]) == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert acceptance_rate([result(steps=steps)]) == 3 / 9
    assert acceptance_rate([result()]) is None
    assert mean_acceptance_length([]) == 1.0
    assert acceptance_by_position([result()]) == []


def test_categories_add_up() -> None:
    engine = FakeEngine({"none": 1.0, "liar": 0.5}, {("liar", "y"): result([1])})
    chosen = [*prompts("x", "z", category="code"), *prompts("y", category="chat"), *prompts("w")]
    out = measure(engine.generate, ["none", "liar"], chosen, clock=engine.clock)
    groups = summarise(Contender("liar"), "int8", out["liar"], out["none"])["by_category"]
    assert {name: (group["prompts"], group["identical"]) for name, group in groups.items()} == {
        "code": (2, 2),
        "chat": (1, 0),
        "uncategorised": (1, 1),
    }
    assert groups["code"]["speedup"] == pytest.approx(2.0)


def test_a_run_has_the_keys_of_the_contract() -> None:
    engine = FakeEngine({"none": 1.0})
    out = measure(engine.generate, ["none"], prompts("x"))
    run = summarise(NONE, "int8", out["none"], out["none"])
    assert {
        "drafter",
        "dtype",
        "prompts",
        "identical",
        "tokens",
        "tokens_per_second",
        "speedup",
        "mean_acceptance_length",
        "acceptance_by_position",
        "ttft_ms",
        "tpot_ms",
        "by_category",
    } <= run.keys()
    assert run["ttft_ms"] == {"mean": 100.0, "p50": 100.0, "p90": 100.0, "p95": 100.0, "p99": 100.0}
    assert run["tpot_ms"]["p50"] == pytest.approx(200 / 3)


def test_the_three_kinds_of_prompt_line(tmp_path: Path) -> None:
    """Raw text, the first turn, and messages; other keys and blank lines are passed over, line numbers are kept."""
    path = tmp_path / "p.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = [
        {"prompt": "a\u2028b", "task_id": 1},
        {"turns": ["t1", "t2"], "category": "qa", "prediction": "p"},
        {"messages": messages},
    ]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n", encoding="utf-8")
    user = [{"role": "user", "content": "t1"}]
    assert read_prompts(path) == [Prompt(1, "a\u2028b"), Prompt(3, user, "qa", "p"), Prompt(5, messages)]
    assert read_prompts(path, 1) == [Prompt(1, "a\u2028b")]
    assert read_prompts(path, 1, chat=True) == [Prompt(1, [{"role": "user", "content": "a\u2028b"}])]


def test_a_cut_keeps_every_category() -> None:
    chosen = [*prompts("a", "b", "c", category="x"), *prompts("d", "e", category="y")]
    assert [prompt.content for prompt in cut(chosen, None, 2)] == ["a", "b", "d", "e"]
    assert [prompt.content for prompt in cut(chosen, 3, 2)] == ["a", "b", "d"]
    with pytest.raises(PromptFileError, match="--per-category"):
        cut(chosen, None, 0)


def test_a_digest_is_of_what_is_asked() -> None:
    """Equal prompts from other lines have it too; another word or category has not."""
    assert digest(prompts("a", "b")) == digest([Prompt(7, "a"), Prompt(9, "b")])
    assert len({digest(prompts("a", "b")), digest(prompts("b", "a")), digest(prompts("a", "b", category="x"))}) == 3


@pytest.mark.parametrize(
    ("line", "culprit"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not an object"),
        ("{}", "none of them"),
        ('{"prompt": "a", "turns": ["b"]}', "'prompt' and 'turns'"),
        ('{"prompt": ""}', "'prompt' is not a non-empty text"),
        ('{"prompt": 3}', "'prompt' is not a non-empty text"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"turns": []}', "'turns' is not a list"),
        ('{"turns": "abc"}', "'turns' is not a list"),
        ('{"turns": [3]}', "'turns' is not a non-empty text"),
        ('{"messages": []}', "'messages' is not a list"),
        ('{"messages": [{"content": "a"}]}', "message 0 has no 'role'"),
        ('{"messages": [{"role": "user"}]}', "message 0's 'content'"),
        ('{"prompt": "a", "category": 3}', "'category' is 3"),
        ('{"prompt": "a", "prediction": ["b"]}', "'prediction' is not a non-empty text"),
    ],
)
def test_a_bad_prompt_line_is_named(tmp_path: Path, line: str, culprit: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(PromptFileError) as caught:
        read_prompts(path)
    assert culprit in str(caught.value)
    assert f"{path}:2: " in str(caught.value)
    assert read_prompts(path, 1) == [Prompt(1, "fine")]


def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    empty, latin = tmp_path / "empty.jsonl", tmp_path / "latin.jsonl"
    empty.write_text("\n \n")
    latin.write_bytes(b'{"prompt": "caf\xe9"}')
    for path, culprit in (
        (tmp_path, "directory"),
        (tmp_path / "no", "No such file"),
        (empty, "no prompt"),
        (latin, "UTF-8"),
    ):
        with pytest.raises(PromptFileError, match=culprit):
            read_prompts(path)
    with pytest.raises(PromptFileError, match="--limit"):
        read_prompts(empty, 0)


def test_the_environment_says_where_it_was() -> None:
    """Machine and versions are filled in; git is a commit where the sources lie in a repository."""
    machine, versions, git = environment.machine(), environment.versions(), environment.git()
    assert machine["cores"] >= 1
    assert machine["cpu"]
    assert versions["python"]
    assert versions["numpy"]
    assert git is None or len(git["commit"]) == 40
