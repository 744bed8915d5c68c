"""Answers and states survive a kill, are written once, and are the target's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lessons import WANTS, answers, store, target
from outrider.engine.engine import Engine
from outrider.runtime.load import load
from outrider.train.answers import AnswerSettings, Job, engine_writer, make_jobs, torch_writer, write_answers
from outrider.train.errors import TrainError
from outrider.train.prompts import Prompt, factbook, read_prompts, stdlib, without, write_prompts
from outrider.train.shards import Answer, Shards, read_answers
from tiny import tiny_model, write_hf


def test_a_torn_record_is_cut_off_and_written_again(tmp_path: Path) -> None:
    """A shard cut at any byte keeps all whole records before the cut; the writer goes on behind them, none twice."""
    texts = answers(5)
    whole = Shards(tmp_path / "whole")
    ends = []
    for answer in texts:
        whole.append(answer)
        ends.append((tmp_path / "whole" / "answers-00-00000.shard").stat().st_size)
    whole.close()
    data = (tmp_path / "whole" / "answers-00-00000.shard").read_bytes()
    for cut in [*range(ends[2], ends[3] + 1, 3), *range(ends[3], ends[4], 5)]:
        folder = tmp_path / f"cut-{cut}"
        folder.mkdir()
        (folder / "answers-00-00000.shard").write_bytes(data[:cut])
        kept = sum(end <= cut for end in ends)
        assert len(read_answers(folder)) == kept
        again = Shards(folder)
        assert again.jobs == set(range(kept))
        for answer in texts[kept:]:
            again.append(answer)
        again.close()
        assert (folder / "answers-00-00000.shard").read_bytes() == data


def test_damage_inside_a_shard_is_refused(tmp_path: Path) -> None:
    """A flipped bit before the last record would hide what lies behind it: the file is named."""
    shards = Shards(tmp_path)
    for answer in answers(4):
        shards.append(answer)
    shards.close()
    path = tmp_path / "answers-00-00000.shard"
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(TrainError, match="damaged at byte 0"):
        read_answers(tmp_path)


def test_shards_grow_and_parts_share_a_folder(tmp_path: Path) -> None:
    """Two writers with small shards: every answer is read once, in the order of jobs; a job is refused twice."""
    texts = answers(12)
    for part in (0, 1):
        shards = Shards(tmp_path, part, limit=300)
        for answer in texts[part::2]:
            shards.append(answer)
        with pytest.raises(TrainError, match="there already"):
            shards.append(texts[part])
        shards.close()
    assert len(list(tmp_path.glob("*.shard"))) > 4
    assert [answer.job for answer in read_answers(tmp_path)] == list(range(12))


def test_answers_are_the_target_s_own(tmp_path: Path) -> None:
    """Written in batches through the engine, each answer equals what the target writes alone, greedy and drawn."""
    loaded = load(tiny_model(seed=1), runner="reference", cache_tokens=1024, page_size=16)
    engine = Engine.from_loaded(loaded, batch_size=4)
    prompts = [Prompt(f"number {i} is", "raw") for i in range(10)]
    settings = AnswerSettings(max_tokens=9, greedy=0.5, temperatures=(0.9,))
    jobs = make_jobs(prompts, loaded.tokenizer, settings)
    assert {job.temperature for job in jobs} == {0.0, 0.9}
    tokens = write_answers(tmp_path, jobs, engine_writer(engine, 4), settings, target="t")
    found = read_answers(tmp_path)
    assert tokens == sum(len(answer.answer) for answer in found)
    assert len(found) == 10
    alone = engine_writer(Engine.from_loaded(loaded, batch_size=1), 1)
    for job, answer in zip(sorted(jobs, key=lambda job: job.number), found, strict=True):
        (single,) = alone(iter([job]), 9)
        np.testing.assert_array_equal(single.answer, answer.answer)
    again = write_answers(tmp_path, jobs, _no_writer, settings, target="t")
    assert again == tokens
    with pytest.raises(TrainError, match="target_sha256"):
        write_answers(tmp_path, jobs, _no_writer, settings, target="another")


@pytest.mark.oracle
def test_the_torch_writer_says_what_the_engine_says() -> None:
    """Answers at temperature 0, prompts of differing lengths, slots refilled: the same tokens from torch in float32."""
    pytest.importorskip("torch")
    files = tiny_model(seed=3)
    prompts = [Prompt("ab" * (1 + i), "raw") for i in range(12)]
    settings = AnswerSettings(max_tokens=14, greedy=1.0)
    jobs = make_jobs(prompts, files.tokenizer, settings)
    engine = Engine.from_loaded(load(files, runner="reference", cache_tokens=1024, page_size=16), batch_size=4)
    wanted = {answer.job: answer for answer in engine_writer(engine, 4)(iter(jobs), 14)}
    found = {answer.job: answer for answer in torch_writer(files, batch=4, dtype="fp32")(iter(jobs), 14)}
    assert found.keys() == wanted.keys()
    for job, answer in found.items():
        np.testing.assert_array_equal(answer.tokens, wanted[job].tokens)
        assert answer.ended == wanted[job].ended


def _no_writer(jobs: Iterator[Job], max_tokens: int) -> Iterator[Answer]:
    assert next(jobs, None) is None
    return iter(())


def test_kill_9_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """The command, killed with SIGKILL in the middle and started again, ends with the answers of one that was not."""
    write_hf(tmp_path / "model", tiny_model(seed=2, context=128))
    write_prompts(tmp_path / "p.jsonl", [Prompt(f"tell {i}", "raw") for i in range(40)])

    def command(out: str) -> list[str]:
        options = ["--target", str(tmp_path / "model"), "--prompts", str(tmp_path / "p.jsonl"), "--runner", "reference"]
        options += ["--out", str(tmp_path / out), "--batch", "4", "--set", "answers.max_tokens=24"]
        return [sys.executable, "-m", "outrider", "train", "answers", *options]

    killed = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shard = tmp_path / "killed" / "answers-00-00000.shard"
    for _ in range(1200):
        if shard.exists() and shard.stat().st_size > 1000:
            break
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    assert 0 < len(read_answers(tmp_path / "killed")) < 40
    for out in ("killed", "whole"):
        subprocess.run(command(out), check=True, capture_output=True, timeout=120)
    one, two = read_answers(tmp_path / "killed"), read_answers(tmp_path / "whole")
    assert [a.job for a in one] == [a.job for a in two]
    assert len(one) == 40
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


def test_states_are_kept_and_found_again(tmp_path: Path) -> None:
    """States come from the target once; a torn file, a new store and a bound change none of their bits."""
    files, texts = target(), answers(6)
    fresh = store(files, texts).get(range(6))
    kept = store(files, texts[:4], tmp_path)
    kept.get(range(3))
    assert kept.ready == 3
    (rows,) = tmp_path.glob("*.bf16")
    (index,) = tmp_path.glob("*.index")
    with rows.open("ab") as file:
        file.write(b"torn")
    with index.open("ab") as file:
        file.write(b"torn")
    second = store(files, texts, tmp_path)
    assert second.ready == 3
    second._reader = _refuse_known(second._reader, [texts[i].tokens for i in range(3)])
    for i, states in enumerate(second.get(range(6))):
        assert states.shape == (len(texts[i].tokens), len(WANTS) + 1, files.config.hidden)
        np.testing.assert_array_equal(states, fresh[i])
    third = store(files, texts, tmp_path)
    assert third.ready == 6
    for states, wanted in zip(third.get(range(6)), fresh, strict=True):
        np.testing.assert_array_equal(states, wanted)


def _refuse_known(reader, known):
    def read(texts):
        assert not any(np.array_equal(text, old) for text in texts for old in known)
        return reader(texts)

    return read


def test_prompts_are_collected_the_same_each_time(tmp_path: Path) -> None:
    """Python's own library gives many prompts of every kind, equal for equal seeds, that survive the file."""
    found = stdlib(limit=300, seed=3)
    assert found == stdlib(limit=300, seed=3)
    assert found != stdlib(limit=300, seed=4)
    assert len({prompt.kind for prompt in found}) == 7
    assert write_prompts(tmp_path / "p.jsonl", found) == 300
    assert read_prompts([tmp_path / "p.jsonl"]) == list({p.fingerprint: p for p in found}.values())


def test_a_factbook_gives_every_kind(tmp_path: Path) -> None:
    """A country profile gives summaries, questions, JSON, tables, letters; a folder without one is refused."""
    facts = {f"Fact {i}": {"text": f"value {i} of it"} for i in range(20)}
    long = {"text": "A sentence about the place. " * 20}
    name = {"Country name": {"conventional short form": {"text": "Nowhere"}}}
    profile = {"Introduction": {"Background": long}, "Government": name, "Facts": facts}
    (tmp_path / "world").mkdir()
    import json

    (tmp_path / "world" / "xx.json").write_text(json.dumps(profile))
    found = factbook(tmp_path)
    kinds = {"summary", "question", "json", "table", "writing", "translation", "long summary"}
    assert kinds <= {prompt.kind for prompt in found}
    with pytest.raises(TrainError, match=r"factbook\.json"):
        factbook(tmp_path / "world")


def test_measured_prompts_are_left_out() -> None:
    """A prompt that one measures with is dropped, whatever its spacing and case."""
    mine = [Prompt([{"role": "user", "content": "What is  two and two?"}]), Prompt("other")]
    assert without(mine, [Prompt("what is two\nand TWO?")]) == mine[1:]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "not JSON"),
        ("[]", "none"),
        ('{"prompt": "a", "text": "b"}', "prompt and text"),
        ('{"prompt": ""}', "non-empty"),
        ('{"messages": [{"role": "user"}]}', "messages"),
        ('{"turns": []}', "turns"),
    ],
)
def test_a_bad_prompt_line_is_named(line: str, word: str, tmp_path: Path) -> None:
    """File, line number and fault of a prompt that cannot be read."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(TrainError, match=f"p.jsonl:2.*{word}"):
        read_prompts([path])
