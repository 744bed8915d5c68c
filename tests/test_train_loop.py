"""A training that was killed and resumed is the training that was not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from lessons import answers, target  # noqa: E402
from outrider.models.heads import Eagle, Medusa, read_draft, read_head  # noqa: E402
from outrider.models.load import ModelFiles, open_model  # noqa: E402
from outrider.models.ngrams import read_ngrams  # noqa: E402
from outrider.runtime.reference import ReferenceRunner  # noqa: E402
from outrider.train import session as lesson  # noqa: E402
from outrider.train.chains import ChainCount  # noqa: E402
from outrider.train.errors import TrainError  # noqa: E402
from outrider.train.loop import batches  # noqa: E402
from outrider.train.recipe import Recipe  # noqa: E402
from outrider.train.session import Session  # noqa: E402
from outrider.train.shards import Shards  # noqa: E402
from outrider.train.target import Target  # noqa: E402

QUICK = {
    "data": {"held": 0.2, "kind": "F32", "about": "sums", "licence": "MIT"},
    "train": {"epochs": 2.0, "rows": 160, "check": 4, "warmup": 2, "rate": 3e-3},
    "eagle": {"draft_vocabulary": 90, "depth": 3, "autocast": False, "layers": [0, 1, 2], "stride": 2, "others": 30},
    "medusa": {"draft_vocabulary": 90, "heads": 2, "autocast": False, "others": 30},
    "draft": {"draft_vocabulary": 90, "count": 2, "depth": 3, "autocast": False},
    "layer_skip": {"tokens": 120, "depth": 2, "most": 0.5},
}


class KilledError(Exception):
    """Stands for SIGKILL: nothing of the run's memory survives it."""


def session(folder: Path, out: str, files: ModelFiles, *, muon: bool = False, **changes: object) -> Session:
    shards = folder / "answers"
    if not shards.exists():
        written = Shards(shards)
        for answer in answers(48):
            written.append(answer)
        written.close()
    settings: dict[str, object] = {"runner": "reference", **changes}
    recipe = Recipe(QUICK | {"train": QUICK["train"] | {"muon": muon}})
    return Session(files, [shards], folder / out, recipe, **settings)


@pytest.mark.parametrize(
    ("method", "muon"),
    [
        ("train_eagle", False),
        ("train_eagle", True),
        ("train_medusa", False),
        ("train_medusa", True),
        ("train_draft", True),
    ],
)
def test_kill_and_resume_gives_the_same_weights(method: str, muon: bool, tmp_path: Path) -> None:
    """Killed after step 6, two steps after its last checkpoint, and resumed: weights, moments and best are equal."""
    files, train = target(), getattr(lesson, method)
    whole = train(session(tmp_path, "whole", files, muon=muon))
    assert whole.steps > 8

    def die(step: int, steps: int, note: str) -> None:
        if step == 6:
            raise KilledError

    with pytest.raises(KilledError):
        train(session(tmp_path, "parts", files, muon=muon, progress=die))
    with pytest.raises(TrainError, match="--resume"):
        train(session(tmp_path, "parts", files, muon=muon))
    with pytest.raises(TrainError, match=f"muon = {muon}"):
        train(session(tmp_path, "parts", files, muon=not muon, resume=True))
    resumed = train(session(tmp_path, "parts", files, muon=muon, resume=True))

    assert (resumed.steps, resumed.tokens, resumed.best, resumed.best_step) == (
        whole.steps,
        whole.tokens,
        whole.best,
        whole.best_step,
    )
    for name in ("run/checkpoint.safetensors", "model.safetensors"):
        one, two = load_file(tmp_path / "whole" / name), load_file(tmp_path / "parts" / name)
        assert one.keys() == two.keys()
        for key in one:
            assert torch.equal(one[key], two[key]), key


@pytest.mark.parametrize("method", ["train_eagle", "train_medusa", "train_draft"])
def test_a_training_begins_with_the_weights_of_another(method: str, tmp_path: Path) -> None:
    """At a rate of nothing it ends where the other one ended, though its draft vocabulary is another."""
    files, train = target(), getattr(lesson, method)
    train(session(tmp_path, "first", files))
    name = method.removeprefix("train_")
    still = {
        **QUICK,
        "train": {**QUICK["train"], "rate": 0.0, "decay": 0.0, "epochs": 0.2},
        name: {**QUICK[name], "draft_vocabulary": 80},
    }
    second = session(tmp_path, "second", files, start=tmp_path / "first")
    second.recipe = Recipe(still)
    train(second)
    one, two = (load_file(tmp_path / out / "run" / "checkpoint.safetensors") for out in ("first", "second"))
    before, after = (json.loads((tmp_path / out / "run/draft_tokens.json").read_text()) for out in ("first", "second"))
    assert len(after) == 80
    for key in (key for key in one if key.startswith("weight.")):
        if len(one[key]) == 90:
            kept = [(before.index(token), row) for row, token in enumerate(after) if token in before]
            assert kept
            assert all(torch.equal(one[key][old], two[key][new]) for old, new in kept)
        else:
            assert torch.equal(one[key], two[key]), key
    notes = json.loads((tmp_path / "second" / "config.json").read_text())["outrider"]
    assert notes["began_with"]["step"] > 8
    card = " ".join((tmp_path / "second" / "README.md").read_text().split())
    assert f"training, of {notes['began_with']['step']} steps" in card

    with pytest.raises(TrainError, match="no training"):
        train(session(tmp_path, "third", files, start=tmp_path / "answers"))
    wider = session(tmp_path, "fourth", files, start=tmp_path / "second")
    other = next(m for m in ("train_eagle", "train_medusa") if m != method)
    with pytest.raises(TrainError, match="another drafter"):
        getattr(lesson, other)(wider)


def test_other_settings_do_not_resume(tmp_path: Path) -> None:
    """A run goes on with the settings it was begun with, or is refused by name."""
    files = target()
    lesson.train_medusa(session(tmp_path, "run", files))
    changed = session(tmp_path, "run", files, resume=True)
    changed.recipe = Recipe({**QUICK, "train": {**QUICK["train"], "rate": 1e-3}})
    with pytest.raises(TrainError, match="rate"):
        lesson.train_medusa(changed)


def test_what_is_trained_is_read_again(tmp_path: Path) -> None:
    """Each method leaves a folder that its reader opens, with the target's sha256 and how it was made."""
    files = target()
    lesson.train_eagle(session(tmp_path, "eagle", files))
    head = read_head(tmp_path / "eagle", files.config)
    assert isinstance(head, Eagle)
    assert head.warning(files.sha256()) is None
    assert str(head.warning("0" * 64)).count("0" * 64) == 1
    card = (tmp_path / "eagle" / "README.md").read_text()
    assert all(word in card for word in (files.sha256(), "to sums;", "**Licence**: MIT."))
    config = json.loads((tmp_path / "eagle" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["outrider"]["settings"]["train"]["rate"] == 3e-3
    assert config["outrider"]["validation"]["length"] >= 1

    lesson.train_medusa(session(tmp_path, "medusa", files))
    heads = read_head(tmp_path / "medusa", files.config)
    assert isinstance(heads, Medusa)
    assert heads.config.heads == 2
    assert heads.tokens is not None

    lesson.train_draft(session(tmp_path, "draft", files))
    draft = read_draft(tmp_path / "draft", files)
    tokens = draft.tokens
    assert tokens is not None
    assert draft.tensors["head"].shape == (90, files.config.hidden) == (len(tokens), 32)
    assert draft.tensors["embed"] is files.tensors["embed"]

    lesson.find_layer_skip(session(tmp_path, "skip", files))
    found = json.loads((tmp_path / "skip" / "layer_skip.json").read_text())
    assert [len(skip["layers"]) for skip in found["sets"]] == [1, 2]
    assert found["target_sha256"] == files.sha256()

    said: list[str] = []
    lesson.count_ngrams(session(tmp_path, "ngrams", files, say=said.append))
    table = read_ngrams(tmp_path / "ngrams", files.config.vocabulary)
    assert (table.order, table.target_sha256) == (2, files.sha256())
    assert "is right at" in said[-1]
    assert said[-1].removeprefix("held out: ") in (tmp_path / "ngrams" / "README.md").read_text().replace("\n  ", " ")


def test_a_draft_with_the_whole_vocabulary_is_a_model(tmp_path: Path) -> None:
    """Without a reduced vocabulary the draft is a Hugging Face folder: it opens, runs, and has the target's tokens."""
    files = target()
    recipe = {**QUICK, "draft": {**QUICK["draft"], "draft_vocabulary": 0}}
    run = session(tmp_path, "draft", files)
    run.recipe = Recipe(recipe)
    lesson.train_draft(run)
    opened = open_model(tmp_path / "draft")
    assert opened.config.layers == 2
    assert opened.tokenizer.fingerprint() == files.tokenizer.fingerprint()
    ReferenceRunner(opened, cache_tokens=16, page_size=16)


def test_batches_hold_each_text_once_and_keep_their_bound() -> None:
    """An epoch is a permutation of the texts, in batches of bounded padded size, another one each epoch."""
    lengths = np.random.default_rng(0).integers(5, 60, 700).tolist()
    first, second = batches(lengths, 400, 3, 0), batches(lengths, 400, 3, 1)
    for found in (first, second):
        assert sorted(i for batch in found for i in batch) == list(range(700))
        assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 400 for batch in found)
    assert first != second
    assert first == batches(lengths, 400, 3, 0)


def test_acceptance_counts_a_decoder_s_walk() -> None:
    """By hand: 6 tokens after the first root; guesses hold for 2, miss, then 1: three steps for five tokens."""
    count = ChainCount(2)
    right = np.array([[1, 1], [1, 0], [0, 0], [0, 1], [1, 0], [0, 0]], bool)
    count.add(right, np.array([6, 5, 4, 3, 2, 1]))
    found = count.acceptance()
    # root 0 takes 2 + 1, root 3 takes 0 + 1, root 4 takes the last one, which its guess has already said
    assert found.length == pytest.approx(5 / 3)
    assert found.by_depth == (pytest.approx(3 / 5), pytest.approx(1 / 4))


def test_a_recipe_names_what_it_does_not_know() -> None:
    """Unknown sections, unknown names and wrong types are refused by name; changes come on top."""
    recipe = Recipe.read(None, ["train.rate=5e-4", "eagle.loss=0.5*kl+0.5*tv", "eagle.layers=[1, 2]"])
    assert recipe.settings("train", lesson.TrainSettings).rate == 5e-4
    assert recipe.settings("eagle", lesson.EagleSettings).layers == (1, 2)
    for change, name in (("train.speed=1", "speed"), ("train.rows=many", "rows"), ("best.x=1", "best"), ("x", "x")):
        with pytest.raises(TrainError, match=name):
            Recipe.read(None, [change])


def test_texts_of_several_folders_are_learnt_from(tmp_path: Path) -> None:
    """Answers of two folders are one list of texts; the states are kept in the first."""
    files = target()
    made = session(tmp_path, "out", files)
    more = Shards(tmp_path / "more")
    for answer in answers(16, seed=7):
        more.append(answer)
    more.close()
    made.answers = [*made.answers, tmp_path / "more"]
    texts, learn, _ = made.read()
    assert len(texts) == 48 + 16
    assert max(learn) >= 48
    store = made.store(texts, (0, -1))
    store.get([0, 50])
    assert list((tmp_path / "answers").glob("states-*.bf16"))
    assert not list((tmp_path / "more").glob("states-*"))
    assert made.notes(lesson.Report(1, 1, 1.0, None, 0))["tokens_on_disk"] == made.tokens


def test_a_recipe_is_checked_before_any_work(tmp_path: Path) -> None:
    """A mistake in a section that comes last is told when the recipe is read."""
    path = tmp_path / "r.toml"
    path.write_text("[answers]\nseed = 1\n[eagle]\nlayer = [1]\n")
    with pytest.raises(TrainError, match=r"eagle\.layer is unknown"):
        Recipe.read(path)


def test_a_part_of_the_vocabulary_holds_what_the_batch_says() -> None:
    """The columns hold the batch's tokens, others, and differ from seed to seed; all is all."""
    files = target()
    known = Target.of(files, np.arange(5, 95), torch.float32)
    tokens = torch.tensor([[7, 9, 90, 2]])
    choice = known.narrow(tokens, 20, seed=3)
    assert choice.columns is not None
    assert {2, 4, 85} <= set(choice.columns.tolist())
    assert 20 <= len(choice.columns) <= 23
    for column, draft in enumerate(choice.columns.tolist()):
        assert choice.index[draft + 5] == column
    assert choice.index[2] == -1
    other = known.narrow(tokens, 20, seed=4)
    assert other.columns is not None
    assert other.columns.tolist() != choice.columns.tolist()
    states = torch.randn(3, files.config.hidden)
    whole, part = known.law(states), known.law(states, choice.columns)
    torch.testing.assert_close(part, whole[:, choice.columns] / whole[:, choice.columns].sum(-1, keepdim=True))
    assert known.narrow(tokens, 0, 1).columns is None
    assert known.narrow(tokens, 90, 1).columns is None
