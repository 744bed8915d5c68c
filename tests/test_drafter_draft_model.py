"""Draft models as `outrider train draft` writes them: a head over some tokens, and the target's embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import Engine
from outrider.models.heads import is_draft, read_draft, write_draft
from rigs import Rig, accepted, engine, files, loaded, mix, prompts, said

NATIVE = Rig(runner="native")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("draft"), "F32")


def write(folder: Path, kind: str) -> Path:
    """The target itself as a draft that knows 70 of its tokens."""
    target = files()
    tokens = np.sort(np.random.default_rng(1).choice(target.config.vocabulary, 70, replace=False))
    head = target.tensors["head" if "head" in target.tensors else "embed"].float32()
    values = {name: part.float32() for name, part in target.tensors.items() if name not in ("embed", "head")}
    write_draft(folder, target.config, values | {"head": head[tokens]}, tokens, target=target, kind=kind)
    return folder


def drafted(name: str, rig: Rig = NATIVE, *, draft_model: str | None = None, **settings: Any) -> Engine:
    made = Engine.from_loaded(loaded(files(), rig), drafter="none", **settings)
    made._draft_model = draft_model
    made._loading = {"runner": rig.runner, "dtype": rig.dtype, "cache_tokens": rig.cache_tokens, "page_size": 16}
    if rig.runner == "native":
        made._loading["threads"] = 1
    made._default_drafter = name
    return made


@pytest.mark.parametrize("rig", [NATIVE, Rig()])
@pytest.mark.parametrize("name", ["greedy, penalised", "T 0.7"])
def test_a_draft_with_few_tokens_says_what_it_can(small: Path, rig: Rig, name: str) -> None:
    """It is the target: all its guesses are right where the target's token is among the 70, at T > 0 too."""
    assert is_draft(small)
    speculative = drafted("draft_model", rig, draft_model=str(small))
    got = speculative.generate(prompts(3), mix(name, 4, max_tokens=30))
    assert [said(r) for r in got] == [said(r) for r in engine(rig).generate(prompts(3), mix(name, 4, max_tokens=30))]
    known = set(np.asarray(read_draft(small, files()).tokens).tolist())
    wrong = [t for r in got for t, origin in zip(r.tokens, r.origins, strict=True) if origin == "corrected"]
    assert wrong
    assert not known & set(wrong)
    assert accepted(got) > 20
    told, held = speculative.forecast("draft_model"), speculative._drafter("draft_model").memory()
    for purpose in ("draft weights", "draft cache"):
        assert told[purpose] == pytest.approx(held[purpose], rel=0.05)


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_every_storage_format_drafts(kind: str, tmp_path: Path) -> None:
    """Weights in 8 bits with scales, as training writes them by default: nearly the same guesses."""
    speculative = drafted("draft_model", draft_model=str(write(tmp_path, kind)))
    assert read_draft(tmp_path, files()).tensors["head"].kind == kind
    assert accepted(speculative.generate(prompts(3), mix("greedy", 4, max_tokens=30))) > 20
