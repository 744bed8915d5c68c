"""The n-gram model: counted as its formula says, read as it was written, and last among the lengths of a match."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from heads import ngrams
from outrider import SamplingParams
from outrider.core.shaping import Shaping
from outrider.drafters.base import DrafterError, Request
from outrider.models.errors import ModelError
from outrider.models.ngrams import read_ngrams, write_ngrams
from outrider.train.ngram_model import count, right
from outrider.train.settings import NgramModelSettings
from outrider.train.shards import Answer
from rigs import engine, files

ALL = NgramModelSettings(least_single=1, least_pair=1, least_news=0.0, least_chance=0.001, discount=0.5)


def answer(prompt: list[int], tokens: list[int]) -> Answer:
    return Answer(0, 0.0, np.array(prompt, np.int32), np.array(tokens, np.int32), True)


def test_counts_are_interpolated_with_a_discount() -> None:
    """After (1, 2): 3 twice and 4 once, below it after 2 alone: 3 twice, 4 once, 5 once."""
    single, pairs = count([answer([1], [2, 3, 1, 2, 3, 1, 2, 4, 9, 2, 5])], ALL)
    below = {3: 1.5 / 4, 4: 0.5 / 4, 5: 0.5 / 4}  # what three discounts leave is not given to anything
    assert dict(single[2,]) == pytest.approx(below)
    left = 0.5 * 2 / 3
    assert dict(pairs[1, 2]) == pytest.approx(
        {3: 1.5 / 3 + left * below[3], 4: 0.5 / 3 + left * below[4], 5: left * below[5]}
    )
    assert (1,) in single  # the prompt's last token is a context
    assert all(1 not in dict(row) for row in (single[2,], pairs[1, 2]))


def test_rare_rows_and_rows_without_news_are_left_out() -> None:
    """A pair that says what its last token says has no row; one that was seen once has none either."""
    texts = [answer([8], [2, 3, 2, 3, 2, 3, 2, 3]), answer([7], [2, 4])]
    strict = NgramModelSettings(least_single=1, least_pair=2, least_news=1.0, discount=0.5)
    single, pairs = count(texts, strict)
    assert [token for token, _ in single[2,]] == [3, 4]
    assert (7, 2) not in pairs  # once
    assert (3, 2) not in pairs  # three times 3, as after most of 2
    assert (3, 2) in count(texts, ALL)[1]
    first, some = right(texts, [single, pairs])
    assert (first, some) == (7 / 10, 8 / 10)  # 8 and 7 have no row, and 4 is the second guess after 2


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Chances to a 255th, the longest context first, nothing after what was never seen."""
    rows = [{(5,): [(7, 0.5), (1, 0.25)], (6,): [(2, 1.0)]}, {(4, 5): [(9, 0.8)]}]
    write_ngrams(tmp_path, rows, {"target_sha256": "ab"})
    table = read_ngrams(tmp_path, 10)
    assert table.after([4, 5]) == ((9, pytest.approx(0.8, abs=0.002)),)
    assert [token for token, _ in table.after([3, 5])] == [7, 1]
    assert [token for token, _ in table.after([6])] == [2]
    assert table.after([1, 1]) == table.after([]) == ()
    assert (table.order, table.target_sha256) == (2, "ab")


def drafter(table: Path, **options: Any) -> Any:
    given = {"table": str(table), "row_cost": 0.01, **options}
    return engine(drafter="ngram_model", drafter_options=given)._drafter("ngram_model")


def guesses(made: Any, tokens: list[int], budget: int = 30) -> Any:
    return made.guess(Request(0, Shaping(SamplingParams(), 0, tokens, 1), budget))


def test_matches_of_the_text_come_first_and_the_model_takes_what_they_leave(tmp_path: Path) -> None:
    """A new text is guessed by the model alone; what the text repeats is likelier than what the model says."""
    write_ngrams(tmp_path, [{(5,): [(7, 0.6)], (7,): [(8, 0.9)]}, {(7, 8): [(9, 0.9)]}], {})
    new = guesses(drafter(tmp_path), [3, 5])
    assert new.tokens == [5, 7, 8, 9]  # one chain: each row leads to the next, the last by its pair
    assert new.chances[1:] == pytest.approx([0.6, 0.54, 0.486], abs=0.01)
    again = guesses(drafter(tmp_path), [1, 2, 5, 4, 1, 2, 5, 6, 1, 2, 5])
    first = {t: c for t, c, p in zip(again.tokens, again.chances, again.parents, strict=True) if p == 0}
    assert first == pytest.approx({4: 0.3, 6: 0.3, 7: 0.4 * 0.6}, abs=0.01)  # a match of three tokens leaves 0.4
    assert guesses(drafter(tmp_path), [3, 5], budget=0).tokens == [5]


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        ({"tokens.1": np.array([96, 4000], np.int32)}, "4000"),
        ({"contexts.1": np.array([[6], [5]], np.uint16)}, "ascend"),
        ({"counts.1": np.array([1, 3], np.uint8)}, "fit"),
    ],
)
def test_a_damaged_table_is_refused(damage: dict[str, Any], word: str, tmp_path: Path) -> None:
    """By name, before anything is drafted."""
    write_ngrams(tmp_path, [{(5,): [(7, 0.5)], (6,): [(2, 0.5)]}], {})
    save_file({**load_file(tmp_path / "model.safetensors"), **damage}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=word):
        read_ngrams(tmp_path, 97)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    """An empty folder, another kind, bytes that are no tensors, and a target that none was shipped for."""
    with pytest.raises(DrafterError, match="No such file"):
        drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"outrider": {"kind": "draft"}}))
    with pytest.raises(DrafterError, match="'draft', no n-gram model"):
        drafter(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"outrider": {"kind": "ngram_model", "orders": 1}}))
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(DrafterError, match="no n-gram model of"):
        drafter(tmp_path)
    with pytest.raises(DrafterError, match="train ngram-model"):
        engine(drafter="ngram_model")


def test_a_table_of_another_target_warns(tmp_path: Path) -> None:
    """With both hashes; the shipped one is chosen by hash and needs no warning."""
    ngrams(tmp_path, files())
    config = json.loads((tmp_path / "config.json").read_text())
    drafter(tmp_path)  # its own: silent, for warnings are errors here
    config["outrider"]["target_sha256"] = "0" * 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(RuntimeWarning, match="0{64}"):
        drafter(tmp_path)
