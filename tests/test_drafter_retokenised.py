"""A draft of another tokenizer guesses by its text: exact, and right where its text is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider import Engine, Result
from outrider.drafters.base import DrafterError
from outrider.models.gguf_tokenizer import read_tokenizer
from outrider.models.load import ModelFiles
from rigs import Rig, accepted, engine, files, loaded, mix, prompts, rejected, said
from tiny import Metadata, tensor, tiny_model, tokenizer_metadata

ROOMY = Rig()
OPTIONS = {"retokenise": True, "max_draft_tokens": 6}


def renumbered(target: ModelFiles) -> ModelFiles:
    """The same model with its tokens in another order: it writes the same text in other ids."""
    size = target.config.vocabulary
    order = np.array([0, *range(size - 1, 0, -1)])  # new id -> old id; the end of text stays
    metadata = tokenizer_metadata(target.config)
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    metadata["tokenizer.ggml.tokens"] = [tokens[i] for i in order]
    metadata["tokenizer.ggml.token_type"] = kinds[order]
    metadata["tokenizer.ggml.unknown_token_id"] = order.tolist().index(metadata["tokenizer.ggml.unknown_token_id"])
    names = [name for name in ("embed", "head") if name in target.tensors]
    rows = {name: tensor(name, target.tensors[name].float32()[order]) for name in names}
    tokenizer = read_tokenizer(Metadata(Path("renumbered"), metadata))
    return replace(target, tensors={**target.tensors, **rows}, tokenizer=tokenizer)


def drafted(draft: ModelFiles, rig: Rig = ROOMY, **settings: Any) -> Engine:
    return Engine.from_loaded(
        loaded(files(), rig), drafter="draft_model", draft=loaded(draft, rig), drafter_options=OPTIONS, **settings
    )


def plain(name: str, **changes: Any) -> list[Result]:
    return engine(batch_size=1).generate(prompts(4), mix(name, 2, max_tokens=40, **changes))


@pytest.mark.parametrize("rig", [ROOMY, Rig(runner="native", dtype="fp32")], ids=lambda rig: rig.runner)
def test_a_draft_that_writes_the_same_text_is_accepted(rig: Rig) -> None:
    """Nearly all guesses hold, though no token has the same number on both sides."""
    e = drafted(renumbered(files()), rig, batch_size=2, prefill_chunk=8)
    got = e.generate(prompts(4), mix("greedy", 2, max_tokens=40, ignore_eos=True))
    assert [said(r)[1:4] for r in got] == [said(r)[1:4] for r in plain("greedy", ignore_eos=True)]
    assert accepted(got) > 60
    assert accepted(got) > rejected(got)


@pytest.mark.parametrize("name", ["greedy", "T 0.7, top-p, penalties", "T 1.3, min-p"])
def test_a_strange_draft_changes_nothing(name: str) -> None:
    """Another model, another vocabulary of another size: the text is that of plain decoding."""
    e = drafted(tiny_model(seed=5, vocabulary=300), batch_size=3, prefill_chunk=8)
    got = e.generate(prompts(4), mix(name, 2, max_tokens=40))
    assert [said(r) for r in got] == [said(r) for r in plain(name)]
    assert rejected(got) > 20
    draft: Any = e._drafters["draft_model"]
    draft.runner.pages.check_integrity()
    assert draft.runner.pages.free == draft.runner.pages.count


def test_under_rejection_the_guesses_are_certain() -> None:
    """They carry no law; the same seed gives the same text."""
    e = drafted(renumbered(files()), verify="rejection", batch_size=2)
    first, second = (e.generate(prompts(2), mix("T 0.7", 5, max_tokens=30)) for _ in range(2))
    assert [r.tokens for r in first] == [r.tokens for r in second]
    assert accepted(first) > 0
    assert all(r.drafter_error is None for r in first)


def test_preemption_and_small_caches() -> None:
    """A draft that runs out of rows guesses nothing; an evicted text is read anew."""
    small = Rig(page_size=4, cache_tokens=112)
    e = Engine.from_loaded(
        loaded(files(), small),
        drafter="draft_model",
        draft=loaded(renumbered(files()), Rig(page_size=4, cache_tokens=60)),
        drafter_options=OPTIONS,
        batch_size=4,
        prefill_chunk=16,
    )
    got = e.generate(prompts(4), mix("greedy", 2, max_tokens=40))
    assert e.preemptions > 0
    assert [said(r) for r in got] == [said(r) for r in plain("greedy")]


def test_it_must_be_asked_for() -> None:
    """Without the option the difference is an error that names it; trees are for drafts of the same vocabulary."""
    for options, message in (({}, "retokenise=true"), ({"retokenise": True, "width": 2}, "chains only")):
        with pytest.raises(DrafterError, match=f"another tokenizer: 96 of 97 tokens differ.*{message}"):
            Engine.from_loaded(
                loaded(files()), drafter="draft_model", draft=loaded(renumbered(files())), drafter_options=options
            )
