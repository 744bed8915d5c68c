"""The contract of every drafter in the folder: it may guess what it likes, and nothing of it shows in the text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from heads import head_folder, medusa_folder, ngrams_folder
from outrider import Engine, Result, Speculation
from outrider.core.shaping import Shaping
from outrider.drafters import registry
from outrider.drafters.base import Request
from rigs import Rig, accepted, draft_files, files, loaded, mix, prompts, rejected, said

NAMES = registry.names()
ROOMY = Rig()


# The reference runner's rows are all dear: drafters that measure would soon guess nothing.
OPTIONS: dict[str, Any] = {name: {"row_cost": 0.02} for name in ("auto", "suffix", "prediction")}
OPTIONS["lookahead"] = {"adaptive": False}


def options_of(name: str) -> dict[str, Any] | None:
    """What a method cannot do without here: the tiny target has no head of its own in the package."""
    if name in ("auto", "eagle"):
        return {"head": str(head_folder()), **OPTIONS.get(name, {})}
    if name == "medusa":
        return {"head": str(medusa_folder())}
    if name == "ngram_model":
        return {"table": str(ngrams_folder()), "row_cost": 0.02}
    return OPTIONS.get(name)


def make(name: str, rig: Rig = ROOMY, **settings: Any) -> Engine:
    settings = {"drafter_options": options_of(name), **settings}
    return Engine.from_loaded(loaded(files(), rig), drafter=name, draft=loaded(draft_files(), rig), **settings)


def expected(name: str, texts: Sequence[Result]) -> list[Speculation]:
    """What `replay` and `prediction` need: the true output, and one that is right at first, and then wrong."""
    if name == "replay":
        return [Speculation(drafter=name, prediction=r.tokens) for r in texts]
    if name != "prediction":
        return [Speculation()] * len(texts)
    return [Speculation(prediction=[*r.tokens[:9], 1, 2, *r.tokens[11:]]) for r in texts]


@pytest.fixture(scope="module")
def plain() -> list[Result]:
    return make("none", batch_size=1).generate(prompts(4), mix("T 0.7", 8, max_tokens=40))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verify", ["match", "rejection"])
def test_parity_and_no_row_is_left_behind(name: str, verify: Any, plain: list[Result]) -> None:
    """Equal texts under match, whole texts under rejection; target and draft caches are empty afterwards."""
    engine = make(name, batch_size=3, prefill_chunk=10, verify=verify)
    got = engine.generate(prompts(4), mix("T 0.7", 8, max_tokens=40), speculation=expected(name, plain))
    if verify == "match":
        assert [said(r) for r in got] == [said(r) for r in plain]
        assert (rejected(got) > 0) == (name != "none")  # a draft that is always right could not show a fault
        if name not in ("none", "junk"):
            assert accepted(got) > 0
    else:
        assert [r.usage.completion_tokens for r in got] == [len(r.tokens) for r in got]
    engine.runner.pages.check_integrity()
    assert engine.runner.pages.free == engine.runner.pages.count
    again = engine.generate(prompts(4), mix("T 0.7", 8, max_tokens=40), speculation=expected(name, plain))
    assert [r.tokens for r in again] == [r.tokens for r in got]  # nothing of the first round is left


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_of_nothing_gives_the_root(name: str) -> None:
    """An empty draft is the tree of plain decoding, not an error."""
    engine = make(name)
    drafter = engine._drafter(name)
    shaping = Shaping(mix("greedy", 0), 0, prompts(2)[1], len(prompts(2)[1]))
    (tree,) = drafter.propose([Request(77, shaping, 0)])
    assert (tree.tokens, tree.parents) == ((prompts(2)[1][-1],), (-1,))
    drafter.forget(77)


@pytest.mark.parametrize("name", NAMES)
def test_preemption_and_forgetting_unknown_sequences(name: str, plain: list[Result]) -> None:
    """Eviction in the middle of a text changes nothing; forgetting what was never seen is no error."""
    engine = make(name, Rig(page_size=4, cache_tokens=112), batch_size=4, prefill_chunk=16)
    engine._drafter(name).forget(12345)
    got = engine.generate(prompts(4), mix("T 0.7", 8, max_tokens=40), speculation=expected(name, plain))
    assert engine.preemptions > 0
    assert [said(r) for r in got] == [said(r) for r in plain]


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_a_line_for_it(name: str) -> None:
    """Name, idea, needs and use are there; options carry help."""
    drafter = registry.find(name)
    assert drafter.name == name
    assert all((drafter.summary, drafter.needs, drafter.helps))
    from dataclasses import fields

    assert all(f.metadata.get("help") for f in fields(drafter.Options))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rig", [ROOMY, Rig(runner="native", dtype="int8")], ids=lambda rig: rig.runner)
def test_memory_is_told_before_loading(name: str, rig: Rig) -> None:
    """What a drafter says that it will hold, from shapes alone, is what it then holds, within 5 %.

    The workspace grows with the largest batch so far, which the tiny models of this test do not reach.
    """
    engine = make(name, rig)
    both = engine.forecast(name), engine._drafter(name).memory()
    told, held = (sum(size for purpose, size in one.items() if "workspace" not in purpose) for one in both)
    assert told == pytest.approx(held, rel=0.05)


def test_junk_from_a_hostile_drafter_never_shows(plain: list[Result]) -> None:
    """Large random trees at every step, with most guesses refused."""
    engine = make("junk", drafter_options={"max_draft_tokens": 40}, batch_size=4)
    got = engine.generate(prompts(4), mix("T 0.7", 8, max_tokens=40))
    assert [said(r) for r in got] == [said(r) for r in plain]
    assert sum(s.drafted for r in got for s in r.steps) > 1000


PACKAGE = {
    "echo_drafter.py": """
from outrider.core.tree import Tree
from outrider.drafters.base import Options, Stateless

class Echo(Stateless):
    name, summary, needs, helps, Options = "echo", "the last token again", "nothing", "rulers", Options
    def __init__(self, options, context): self.most = options.max_draft_tokens
    def propose(self, batch):
        return [Tree.chain(t := r.shaping.tokens[-1], [t] * min(self.most, r.budget)) for r in batch]
""",
    "echo_drafter-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: echo-drafter\nVersion: 1.0\n",
    "echo_drafter-1.0.dist-info/entry_points.txt": "[outrider.drafters]\necho = echo_drafter:Echo\n",
}


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site folder with one installed package, which brings a drafter of its own."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("foreign")
def test_a_drafter_of_another_package_passes_the_contract(plain: list[Result]) -> None:
    """Its entry point is enough: it is found by name and keeps the promise like those of the house."""
    assert registry.names()[-1] == "echo"
    test_parity_and_no_row_is_left_behind("echo", "match", plain)
    test_parity_and_no_row_is_left_behind("echo", "rejection", plain)
    test_a_budget_of_nothing_gives_the_root("echo")
    test_preemption_and_forgetting_unknown_sequences("echo", plain)
    test_the_table_has_a_line_for_it("echo")


def test_a_drafter_of_another_package_is_listed(foreign: Path) -> None:
    """`outrider drafters` in a process of its own shows it among the others."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(foreign), *sys.path])}
    shown = subprocess.run(
        [sys.executable, "-m", "outrider", "drafters", "--json"], env=environment, capture_output=True, check=True
    )
    (line,) = [entry for entry in json.loads(shown.stdout) if entry["name"] == "echo"]
    assert (line["summary"], line["needs"], line["helps"]) == ("the last token again", "nothing", "rulers")
