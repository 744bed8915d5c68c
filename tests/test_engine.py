"""The engine's door and its books: prompts, refusals, usage, seeds, rejection sampling end to end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from outrider import Engine, SamplingParams, Speculation
from outrider.core.params import ParameterError
from outrider.core.tree import Tree
from outrider.drafters.base import DrafterError, Request
from outrider.drafters.ngram import DRAFTER as NGRAM
from rigs import Rig, accepted, engine, files, loaded, mix, prompts, rejected, said
from tiny import tiny_model


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engine()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt: it is empty"),
        ([], "prompt: it is empty"),
        ([1, 97], "prompt: token 97 is outside the vocabulary of 97"),
        ([1, -1], "prompt: token -1 is outside"),
        ([1, 2.5], "prompt: 2.5 is not a token id"),
        ([1] * 600, "prompt: 600 tokens leave no room in the context of 512"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_is_admitted(plain: Engine, prompt: Any, message: str) -> None:
    """The error names the culprit; the engine stays idle."""
    with pytest.raises(ParameterError, match=message):
        plain.add(prompt)
    assert not plain.busy


def test_a_bad_request_among_good_ones_loses_nothing(plain: Engine) -> None:
    """`generate` admits all or none: after the refusal no page is held and the engine works."""
    with pytest.raises(ParameterError, match="prompt: it is empty"):
        plain.generate([[1, 2, 3], []])
    assert not plain.busy
    assert plain.runner.pages.free == plain.runner.pages.count
    assert len(plain.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=3))) == 2


def test_text_tokens_and_messages_are_prompts(plain: Engine) -> None:
    """A text equals its token ids; messages go through the chat template."""
    params = SamplingParams(max_tokens=5)
    text = "hello"
    ids = plain.tokenizer.prompt(text)
    assert plain.generate(text, params)[0].tokens == plain.generate(ids, params)[0].tokens
    messages = [{"role": "user", "content": "hi"}]
    assert plain.generate(messages, params)[0].prompt_tokens == plain.tokenizer.chat(messages)
    assert [r.prompt_tokens for r in plain.generate([text, ids], params)] == [ids, ids]
    assert plain.generate([], params) == []


def test_one_parameter_set_per_prompt_or_one_for_all(plain: Engine) -> None:
    """A list of another length is refused."""
    with pytest.raises(ParameterError, match="params: 1 of them for 2 prompts"):
        plain.generate([[1], [2]], [SamplingParams()])
    two = plain.generate([[1], [2]], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)])
    assert [len(r.tokens) for r in two] == [2, 3]


def test_a_seed_that_was_drawn_is_reported_and_repeats_the_text(plain: Engine) -> None:
    """Without a seed each request gets its own; the reported one gives the same text again."""
    free = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    first, second = (plain.generate([[1, 2, 3]], free)[0] for _ in range(2))
    assert first.seed != second.seed
    assert first.tokens != second.tokens
    assert plain.generate([[1, 2, 3]], replace(free, seed=first.seed))[0].tokens == first.tokens


def test_the_books_add_up() -> None:
    """Tokens = steps + accepted guesses kept; usage, origins and steps tell the same story."""
    speculative = engine(drafter="draft_model", drafter_options={"max_draft_tokens": 6, "width": 2}, batch_size=3)
    for result in speculative.generate(prompts(4), mix("T 0.7", 2, max_tokens=40)):
        usage = result.usage
        assert usage.completion_tokens == len(result.tokens) == len(result.origins)
        assert usage.accepted_prediction_tokens == result.origins.count("drafted")
        assert usage.accepted_prediction_tokens + usage.rejected_prediction_tokens == sum(
            s.drafted for s in result.steps
        )
        assert sum(1 + s.accepted for s in result.steps) >= len(result.tokens)
        assert 1.0 <= result.mean_acceptance_length <= 7.0
        assert result.seconds >= result.ttft > 0
        assert all(s.accepted <= s.depth <= s.drafted for s in result.steps)


def test_every_origin_appears() -> None:
    """Drafted, corrected, bonus and plain tokens all occur, and a plain engine knows only plain ones."""
    speculative = engine(drafter="draft_model", drafter_options={"max_draft_tokens": 1})
    origins = Counter(o for r in speculative.generate(prompts(4), mix("greedy", 0)) for o in r.origins)
    assert set(origins) == {"drafted", "corrected", "bonus", "plain"}
    assert {o for r in engine().generate(prompts(2), mix("greedy", 0)) for o in r.origins} == {"plain"}


def test_speculation_is_chosen_per_request() -> None:
    """Drafter, budget and off switch of one request; an unknown method is refused by name."""
    speculative = engine(drafter="ngram", drafter_options={"min_ngram": 1})
    results = speculative.generate(
        [prompts(3)[2]] * 3,
        mix("greedy", 0),
        speculation=[Speculation(), Speculation(enabled=False), Speculation(max_draft_tokens=1)],
    )
    assert said(results[0])[1:] == said(results[1])[1:] == said(results[2])[1:]
    assert [max(s.drafted for s in r.steps) for r in results][1:] == [0, 1]
    assert max(s.drafted for s in results[0].steps) > 1
    with pytest.raises(DrafterError, match="drafter 'nope' is unknown"):
        speculative.add([1], speculation=Speculation(drafter="nope"))
    with pytest.raises(DrafterError, match="draft_model: no draft named; pass --draft-model"):
        speculative.add([1], speculation=Speculation(drafter="draft_model"))
    assert not speculative.busy


def test_a_draft_with_another_tokenizer_is_refused_with_the_first_differences() -> None:
    """Same size, other tokens: the message names ids and both texts."""
    other = tiny_model(seed=3)
    tokenizer = _Renamed(other.tokenizer)
    draft = loaded(other)
    draft.tokenizer = tokenizer  # type: ignore[assignment]
    with pytest.raises(
        DrafterError, match=r"another tokenizer: 2 of 97 tokens differ, first 40: b.*; 41: .*target / draft"
    ):
        Engine.from_loaded(loaded(files()), drafter="draft_model", draft=draft)


class _Renamed:
    """A tokenizer with two tokens swapped."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def fingerprint(self) -> str:
        return "other"

    def token_bytes(self, id: int) -> bytes:
        return bytes(self._tokenizer.token_bytes({40: 41, 41: 40}.get(id, id)))


@pytest.mark.parametrize("rows", [97, 104])
def test_a_padded_vocabulary_does_not_matter(rows: int) -> None:
    """The draft has as many or more embedding rows than tokens; both verification rules work, texts stay equal."""
    model = tiny_model(seed=5)
    padded = _pad(model, rows)
    for target, draft in ((model, padded), (padded, model)):
        speculative = Engine.from_loaded(
            loaded(target), drafter="draft_model", draft=loaded(draft), drafter_options={"max_draft_tokens": 4}
        )
        plain = Engine.from_loaded(loaded(target))
        got, want = (e.generate(prompts(3), mix("T 0.7", 4)) for e in (speculative, plain))
        assert [said(r) for r in got] == [said(r) for r in want]
        assert accepted(got) > 0
        by_law = speculative.generate(prompts(3), mix("T 0.7", 4), speculation=Speculation(verify="rejection"))
        assert accepted(by_law) > 0


def _pad(model: Any, rows: int) -> Any:
    from tiny import tensor

    tensors = dict(model.tensors)
    for name in ("embed", "head"):
        if name in tensors:
            values = tensors[name].float32()
            padded = np.zeros((rows, values.shape[1]), np.float32)
            padded[: len(values)] = values
            tensors[name] = tensor(name, padded)
    return replace(model, config=replace(model.config, vocabulary=rows), tensors=tensors)


def test_a_draft_with_a_shorter_context_gives_up_where_it_ends() -> None:
    """Beyond the draft's context the target goes on plainly, with the same text."""
    model = files()
    short = replace(model, config=replace(model.config, context=40))
    speculative = Engine.from_loaded(
        loaded(model), drafter="draft_model", draft=loaded(short), drafter_options={"max_draft_tokens": 4}
    )
    want = engine().generate(prompts(2), mix("greedy", 0, max_tokens=50))
    got = speculative.generate(prompts(2), mix("greedy", 0, max_tokens=50))
    assert [said(r) for r in got] == [said(r) for r in want]
    assert accepted(got) > 20
    assert {step.drafted for result in got for step in result.steps[-10:]} == {0}


def test_a_drafter_that_proposes_no_tree_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a drafter is told, with the node, and is never a wrong text nor the end of one."""

    def broken(self: Any, request: Request) -> Tree:
        return Tree((request.shaping.tokens[-1], 5, 5), (-1, 0, 0))

    monkeypatch.setattr(NGRAM, "_guess", broken)
    with pytest.warns(RuntimeWarning, match="ngram: TreeError: node 2 repeats its sibling's token 5"):
        (result,) = engine(drafter="ngram").generate([[1, 2, 3]])
    assert result.drafter_error == "drafter ngram: TreeError: node 2 repeats its sibling's token 5"
    assert said(result) == said(engine().generate([[1, 2, 3]], SamplingParams(seed=result.seed))[0])


@pytest.mark.parametrize("name", ["prefill_chunk", "batch_size"])
def test_engine_settings_are_checked(name: str) -> None:
    """Zero sequences or zero rows make no engine."""
    with pytest.raises(ParameterError, match=f"{name}: 0 is not a whole number of at least 1"):
        engine(**{name: 0})


@pytest.mark.parametrize("options", [{"max_draft_tokens": 2}, {"max_draft_tokens": 5, "width": 3, "depth": 2}])
def test_rejection_sampling_keeps_the_law_through_the_whole_engine(options: dict[str, Any]) -> None:
    """Law of the first three drawn tokens over 12,000 seeds against the exact product of the target's laws.

    Chi-square with a false-alarm chance of 1e-6; a vocabulary of 5, top-p and temperature 0.9 on both models. The
    first token comes without a draft, the next two from drafts, refused and accepted.
    """
    draws = 12_000
    model, guide = tiny_model(seed=11, vocabulary=5, layers=1), tiny_model(seed=12, vocabulary=5, layers=1)
    rig = Rig(runner="native", dtype="fp32", cache_tokens=4096)
    speculative = Engine.from_loaded(
        loaded(model, rig),
        drafter="draft_model",
        draft=loaded(guide, rig),
        drafter_options=options,
        verify="rejection",
        batch_size=64,
    )
    params = SamplingParams(temperature=0.9, top_p=0.97, max_tokens=3, ignore_eos=True)
    results = speculative.generate([[1, 2]] * draws, [replace(params, seed=s) for s in range(draws)])
    assert rejected(results) > draws // 10
    assert accepted(results) > draws // 10
    seen = Counter(tuple(r.tokens) for r in results)
    expected = _law(model, [1, 2], params, 3)
    assert set(seen) <= set(expected)
    statistic = sum((seen[k] - draws * p) ** 2 / (draws * p) for k, p in expected.items() if draws * p >= 5)
    freedom = sum(draws * p >= 5 for p in expected.values())
    # Wilson-Hilferty: (x / k) ** (1/3) is nearly normal; 4.9 standard deviations leave less than 1e-6 above
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 4.9


def _law(model: Any, prompt: list[int], params: SamplingParams, depth: int) -> dict[tuple[int, ...], float]:
    """Probability of each continuation, from the target's own laws by the reference runner."""
    from outrider.core.cache import Rows
    from outrider.core.shaping import Shaping
    from outrider.runtime.runner import Feed

    runner = loaded(model).runner
    out: dict[tuple[int, ...], float] = {}
    laws: dict[tuple[int, ...], Any] = {}
    for level in range(depth):
        for start in product(range(5), repeat=level):
            rows = Rows(runner.pages)
            tokens = [*prompt, *start]
            rows.reserve(len(tokens))
            scores = runner.forward([Feed(rows, tokens, Tree.root(tokens[-1]))])
            laws[start] = scores.law(0, 0, Shaping(params, 0, tokens, len(prompt)))
            rows.release()
    for text in product(range(5), repeat=depth):
        p = float(np.prod([laws[text[:i]][text[i]] for i in range(depth)]))
        if p > 0:
            out[text] = p
    return out


def test_other_drafters_have_options_of_their_own() -> None:
    """Given before first use; refused if unknown, or too late."""
    e = engine()
    e.configure("junk", {"max_draft_tokens": 3, "chain": True})
    (result,) = e.generate([[1, 2, 3]], mix("greedy", 0), speculation=Speculation(drafter="junk"))
    assert 0 < max(step.drafted for step in result.steps) <= 3
    with pytest.raises(DrafterError, match="junk: it is loaded already"):
        e.configure("junk", {})
    with pytest.raises(DrafterError, match="suffix: unknown option 'speed'"):
        e.configure("suffix", {"speed": 9})
