"""Drafting with some of the target's own layers: over its cache rows, exact, and only where it pays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import Result
from outrider.drafters.base import DrafterError
from rigs import Rig, accepted, engine, files, mix, prompts, rejected, said

ALL = {"exit_layer": files().config.layers}
RIGS = [Rig(), Rig(runner="native", dtype="fp32"), Rig(runner="native", dtype="int8")]


def run(
    rig: Rig = RIGS[0], mixed: str = "greedy", length: int = 40, adapt: bool = False, **options: Any
) -> list[Result]:
    e = engine(rig, drafter="layer_skip", drafter_options=options, batch_size=3, prefill_chunk=8, adapt=adapt)
    got = e.generate(prompts(4), mix(mixed, 1, max_tokens=length, ignore_eos=length > 40))
    assert e.runner.pages.free == e.runner.pages.count
    return got


@pytest.mark.parametrize("rig", RIGS, ids=lambda rig: f"{rig.runner}-{rig.dtype}")
@pytest.mark.parametrize("mixed", ["greedy", "T 0.7"])
def test_with_all_layers_every_guess_is_right(rig: Rig, mixed: str) -> None:
    """The draft is then the target itself, over the same cache rows and with the same noise."""
    got = run(rig, mixed, **ALL, min_reach=0.0)
    plain = engine(rig, batch_size=1).generate(prompts(4), mix(mixed, 1, max_tokens=40))
    assert [said(r) for r in got] == [said(r) for r in plain]
    assert accepted(got) > 60
    refused = sum(step.drafted - step.accepted for r in got for step in r.steps[:-1])
    assert refused == 0


@pytest.mark.parametrize("rig", RIGS, ids=lambda rig: f"{rig.runner}-{rig.dtype}")
def test_with_fewer_layers_the_text_is_the_same(rig: Rig) -> None:
    """Guesses of the first layer alone are mostly refused, and nothing of them stays in the cache."""
    got = run(rig, exit_layer=1, min_reach=0.0)
    plain = engine(rig, batch_size=1).generate(prompts(4), mix("greedy", 1, max_tokens=40))
    assert [said(r) for r in got] == [said(r) for r in plain]
    assert rejected(got) > 0


def test_where_it_does_not_pay_it_is_not_asked() -> None:
    """On the reference runner a guess costs half a step and is mostly wrong: soon there are few."""
    busy = run(length=120, exit_layer=1, min_reach=0.0)
    calm = run(length=120, exit_layer=1, min_reach=0.0, adapt=True)
    assert sum(s.drafted for r in calm for s in r.steps) < sum(s.drafted for r in busy for s in r.steps) / 2
    assert [said(r) for r in calm] == [said(r) for r in busy]


def test_the_layers_come_from_options_or_a_file(tmp_path: Path) -> None:
    """A set that a search found; with another target's hash comes a warning with both hashes."""
    path = tmp_path / "layer_skip.json"
    path.write_text(json.dumps({"skip": [1], "target_sha256": files().sha256()}))
    count = files().config.layers
    for options in ({"file": str(path)}, {"skip": "1"}, {"skip": (1,)}):
        drafter: Any = engine(drafter="layer_skip", drafter_options=options)._drafter("layer_skip")
        assert drafter.layers == (0, *range(2, count))
    path.write_text(json.dumps({"skip": [1], "target_sha256": "0" * 64}))
    with pytest.warns(RuntimeWarning, match=f"SHA-256 {'0' * 64}.*{files().sha256()}"):
        engine(drafter="layer_skip", drafter_options={"file": str(path)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 99}, r"exit_layer 99 is outside \[1, "),
        ({"skip": "99"}, r"layer 99 is outside \[0, "),
        ({"skip": "0,1,2,3"[: 2 * files().config.layers - 1]}, "no layer is left"),
        ({"skip": "1", "exit_layer": 1}, "exit_layer and skip both say"),
        ({"file": "/no/such.json"}, "/no/such.json: No such file"),
        ({"min_reach": 1.0}, r"min_reach is in \[0, 1\)"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    """By name, before anything runs."""
    with pytest.raises(DrafterError, match=f"layer_skip: .*{message}"):
        engine(drafter="layer_skip", drafter_options=options)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """JSON of another kind, and no JSON at all."""
    for text in ("[]", "{", '{"skip": 3}', "{}"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(DrafterError, match=r"x\.json is no layer_skip\.json"):
            engine(drafter="layer_skip", drafter_options={"file": str(tmp_path / "x.json")})
