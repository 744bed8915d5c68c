"""Prompts from texts and from the target itself."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.models.load import open_model
from outrider.models.tokenizer import Tokenizer
from outrider.train.answers import Job
from outrider.train.errors import TrainError
from outrider.train.passages import passages
from outrider.train.prompts import Prompt
from outrider.train.selfwritten import follow_ups, self_written, self_written_stubs, turn_opening
from outrider.train.shards import Answer
from tiny import tiny_model, write_hf

SENTENCE = "The old lighthouse on the northern coast was built by Captain Morgan in a single summer. "


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_hf(tmp_path / "model", tiny_model(seed=5, vocabulary=300))
    return open_model(tmp_path / "model").tokenizer


def text_file(tmp_path: Path) -> Path:
    """Paragraphs of prose, and a heading, a table and code, which are none."""
    blocks = ["Chapter One", "| a | b |\n| 1 | 2 |", "x = {1: 2}; y = x[1] + 3.", *[SENTENCE * 3] * 20]
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress("\n\n".join(blocks).encode()))
    return path


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ("summarize", r"(?i)summar|TL;DR|points"),
        ("question", r"(?i)(who|what|when|where|why|how) .*(Captain Morgan|Morgan|northern)"),
        ("rewrite", r"[.:] ?(\n|$)"),
        ("translate:German", "^Translate German to English: The"),
    ],
)
def test_texts_give_prompts_of_whole_sentences(ask: str, said: str, tmp_path: Path) -> None:
    """Each way of asking shows prose alone, the same for the same seed."""
    found = passages([text_file(tmp_path)], ask, seed=1)
    assert found == passages([text_file(tmp_path)], ask, seed=1)
    assert len(found) > 2
    for prompt in found:
        text = prompt.content[0]["content"]
        assert re.search(said, text)
        assert SENTENCE.strip() in text
        assert "Chapter" not in text
        assert "|" not in text
    if ask == "question":
        assert all("Morgan" in prompt.content[0]["content"].splitlines()[-1] for prompt in found)


def test_documents_come_from_pages_and_from_prompts(tmp_path: Path) -> None:
    """Only what stands in <p> is read of a page; each prompt of a .jsonl file is a document of its own."""
    page = tmp_path / "a.html"
    page.write_text(f"<h1>Title.</h1><script>var x = 1.</script><p>{SENTENCE * 4}<b>It still stands.</b></p>")
    found = passages([page], "rewrite")
    assert len(found) == 1
    text = found[0].content[0]["content"]
    assert "single summer. It still stands." in text
    assert "Title" not in text
    assert "var" not in text

    drawn = tmp_path / "drawn.jsonl"
    articles = [f"Article {word}. {SENTENCE * 4}".strip() for word in ("one", "two")]
    drawn.write_text("".join(json.dumps({"prompt": article}) + "\n" for article in articles))
    asked = [prompt.content[0]["content"] for prompt in passages([drawn], "summarize", seed=3)]
    assert len(asked) == 2
    assert all(sum(article in text for article in articles) == 1 for text in asked)


def test_texts_without_prose_and_unknown_words_are_refused(tmp_path: Path) -> None:
    """The file, or the word, is named."""
    (tmp_path / "t.txt").write_text("a b c\n\nd e f")
    with pytest.raises(TrainError, match=r"t\.txt"):
        passages([tmp_path / "t.txt"], "summarize")
    with pytest.raises(TrainError, match="explain"):
        passages([tmp_path / "t.txt"], "explain")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(TrainError, match=r"b\.txt.*UTF-8"):
        passages([tmp_path / "b.txt"], "summarize")


def writer(tokenizer: Tokenizer, says: list[tuple[str, bool]], seen: list[Job]):
    """A target that says these texts in turn, each with whether it found an end."""

    def write(jobs: Iterator[Job], max_tokens: int) -> Iterator[Answer]:
        made = []
        for job in jobs:
            seen.append(job)
            text, ended = says[job.number % len(says)]
            ids = np.array(tokenizer.encode(text), np.int32)
            made.append(Answer(job.number, job.temperature, np.array(job.prompt, np.int32), ids, ended))
        yield from reversed(made)  # done in any order

    return write


def test_the_target_writes_user_turns(tokenizer: Tokenizer) -> None:
    """It goes on from the template's opening; repeated, unfinished and empty turns are left out, whatever the order."""
    seen: list[Job] = []
    says = [("How do boats float?", True), ("cut in the mid", False), ("", True), ("how do BOATS float?", True)]
    found = self_written(writer(tokenizer, says, seen), tokenizer, 8, seed=2, openings={"": 1.0})
    assert [prompt.content for prompt in found] == [[{"role": "user", "content": "How do boats float?"}]]
    opening = turn_opening(tokenizer)
    assert tokenizer.decode(opening) == "user: "
    assert all(job.prompt == opening for job in seen)
    assert len({job.seed for job in seen}) == 8

    says[1] = ("The ship has sailed. Then it is cut in the mid", False)
    parts = self_written(writer(tokenizer, says[1:2], []), tokenizer, 1, openings={"": 1.0}, cut=True)
    assert [prompt.content[0]["content"] for prompt in parts] == ["The ship has sailed."]

    told = self_written(writer(tokenizer, says, seen := []), tokenizer, 8, openings={"": 1.0}, system="Be brief.")
    assert told == found
    assert tokenizer.decode(seen[0].prompt) == "system: Be brief.\nuser: "

    begun = self_written(writer(tokenizer, says[:1], seen), tokenizer, 1, openings={"Summarize: ": 1.0})
    assert begun[0].content[0]["content"] == "Summarize:How do boats float?"
    assert begun[0].kind == "self summarize:"


def test_the_target_writes_the_next_turn(tokenizer: Tokenizer) -> None:
    """It answers, and goes on from the opening of the next turn; conversations without an end are left out."""
    ask = Prompt([{"role": "user", "content": "How do boats float?"}])
    seen: list[Job] = []
    says = [("They push water away.", True), ("", True), ("And why do stones sink?", True)]

    def write(jobs: Iterator[Job], max_tokens: int) -> Iterator[Answer]:
        answering = not seen
        for job, (text, ended) in zip(jobs, says if answering else says[2:], strict=False):
            seen.append(job)
            ids = np.array(tokenizer.encode(text), np.int32)
            yield Answer(job.number, job.temperature, np.array(job.prompt, np.int32), ids, ended)

    raw = Prompt("def add(a, b):")
    found = follow_ups(write, tokenizer, [ask, raw, ask])
    assert [prompt.content for prompt in found] == [
        [
            {"role": "user", "content": "How do boats float?"},
            {"role": "assistant", "content": "They push water away."},
            {"role": "user", "content": "And why do stones sink?"},
        ]
    ]
    assert len(seen) == 3
    assert tokenizer.decode(seen[2].prompt).endswith("They push water away.\nuser: ")
    assert len({job.seed for job in seen}) == 3


def test_the_target_writes_functions_up_to_their_docstring(tokenizer: Tokenizer) -> None:
    """What comes after the docstring is cut; a function without one is left out; every other one is raw text."""
    stub = ' add(a, b):\n    """Return the sum of two whole numbers."""\n'
    says = [(stub + "    return a + b\n", False), (" sub(a, b):\n    return a - b\n", True)]
    seen: list[Job] = []
    found = self_written_stubs(writer(tokenizer, says, seen), tokenizer, 12, seed=1)
    assert found
    for prompt in found:
        text = prompt.content if isinstance(prompt.content, str) else prompt.content[0]["content"]
        assert text.endswith('whole numbers."""\n')
        assert "def add(a, b)" in text
        assert "return a" not in text
    assert len({tuple(job.prompt) for job in seen}) > 6


def test_a_model_without_a_template_cannot_write_turns(tokenizer: Tokenizer) -> None:
    """The way out is named."""
    tokenizer.template = None
    with pytest.raises(TrainError, match="--from jsonl"):
        turn_opening(tokenizer)
