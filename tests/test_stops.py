"""Where a text ends: every kind of end at every offset inside an accepted run, as plain decoding has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider import Engine, Result, SamplingParams
from outrider.drafters.costs import Costs
from rigs import Rig, engine, files, loaded, mix, prompts, said

LENGTH = 20


def twin(**settings: Any) -> Engine:
    """An engine whose draft is the target itself: runs of 7 tokens are accepted, and every offset is inside one."""
    made = Engine.from_loaded(
        loaded(files()),
        drafter="draft_model",
        draft=loaded(files()),
        drafter_options={"max_draft_tokens": 6},
        **settings,
    )
    made._controller.costs = Costs(row=0.0)  # whole drafts, whatever their chances
    return made


@pytest.fixture(scope="module")
def pair() -> tuple[Engine, Engine]:
    return engine(batch_size=1), twin(batch_size=1)


def both(pair: tuple[Engine, Engine], params: SamplingParams) -> Result:
    """The result, after checking that plain and speculative agree in all that a caller sees."""
    prompt = prompts(3)[2]
    plain, speculative = (e.generate([prompt], params)[0] for e in pair)
    assert said(plain) == said(speculative)
    assert len(speculative.origins) == len(speculative.tokens)
    assert speculative.usage.accepted_prediction_tokens == speculative.origins.count("drafted")
    return speculative


MIX = "T 0.7"


def test_runs_are_long_enough_to_end_inside_them(pair: tuple[Engine, Engine]) -> None:
    """The premise of this file: the twin accepts whole drafts."""
    result = both(pair, mix(MIX, 5, max_tokens=LENGTH))
    assert max(step.accepted for step in result.steps) == 6
    assert result.finish_reason == "length"


@pytest.mark.parametrize("offset", range(LENGTH))
def test_max_tokens_at_every_offset(pair: tuple[Engine, Engine], offset: int) -> None:
    """`length`, after exactly so many tokens."""
    result = both(pair, mix(MIX, 5, max_tokens=offset + 1))
    assert (result.finish_reason, len(result.tokens)) == ("length", offset + 1)


@pytest.mark.parametrize("offset", range(LENGTH))
def test_a_stop_token_at_every_offset(pair: tuple[Engine, Engine], offset: int) -> None:
    """The token ends the text at its first occurrence, is part of the tokens and not of the text."""
    free = both(pair, mix(MIX, 5, max_tokens=LENGTH))
    token = free.tokens[offset]
    first = free.tokens.index(token)
    result = both(pair, mix(MIX, 5, max_tokens=LENGTH, stop_token_ids=[token]))
    assert (result.finish_reason, result.stop_reason) == ("stop", token)
    assert result.tokens == free.tokens[: first + 1]
    assert free.text.startswith(result.text)


@pytest.mark.parametrize("offset", range(LENGTH))
def test_the_end_of_text_token_at_every_offset(pair: tuple[Engine, Engine], offset: int) -> None:
    """EOS drawn within a run ends it there; with `ignore_eos` it does not. EOS is set to the drawn token."""
    free = both(pair, mix(MIX, 5, max_tokens=LENGTH))
    token = free.tokens[offset]
    engines = []
    for e in pair:
        tokenizer = _WithEnd(e.tokenizer, token)
        changed = object.__new__(Engine)
        changed.__dict__.update(e.__dict__ | {"tokenizer": tokenizer})
        engines.append(changed)
    result = both((engines[0], engines[1]), mix(MIX, 5, max_tokens=LENGTH))
    assert (result.finish_reason, result.stop_reason) == ("stop", token)
    assert result.tokens == free.tokens[: free.tokens.index(token) + 1]
    assert both((engines[0], engines[1]), mix(MIX, 5, max_tokens=LENGTH, ignore_eos=True)).tokens == free.tokens


class _WithEnd:
    """A tokenizer with another end-of-text token."""

    def __init__(self, tokenizer: Any, end: int) -> None:
        self._tokenizer, self.eos = tokenizer, (end,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_strings_at_every_offset(pair: tuple[Engine, Engine], length: int, include: bool) -> None:
    """Strings inside a token and across several; the text ends before (or behind) the first one, tokens with it."""
    free = both(pair, mix(MIX, 5, max_tokens=LENGTH))
    assert len(free.text) > 8
    for at in range(len(free.text) - length + 1):
        stop = free.text[at : at + length]
        if "\ufffd" in stop:  # half a character at the very end of the text
            continue
        result = both(pair, mix(MIX, 5, max_tokens=LENGTH, stop=[stop, "never"], include_stop_str_in_output=include))
        first = free.text.index(stop)
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
        assert result.text == free.text[: first + len(stop) * include]
        assert result.tokens == free.tokens[: len(result.tokens)]


def test_the_earliest_of_several_ends_wins(pair: tuple[Engine, Engine]) -> None:
    """A stop string before the stop token before max_tokens, all inside one accepted run (and the other way round)."""
    free = both(pair, mix(MIX, 5, max_tokens=LENGTH))
    unique = [t for t in free.tokens if free.tokens.count(t) == 1]
    token = unique[len(unique) // 2]
    at = free.tokens.index(token)
    result = both(pair, mix(MIX, 5, max_tokens=at + 1, stop_token_ids=[token]))
    assert result.finish_reason == "stop"  # the token wins over the length that it fills
    result = both(pair, mix(MIX, 5, max_tokens=at, stop_token_ids=[token]))
    assert result.finish_reason == "length"


@pytest.mark.parametrize("minimum", [0, 1, 5, 9, 16])
def test_min_tokens_holds_every_end_back(pair: tuple[Engine, Engine], minimum: int) -> None:
    """No stop token is drawn, and no stop string counts, before so many tokens."""
    free = both(pair, mix(MIX, 5, max_tokens=LENGTH))
    common = max(set(free.tokens), key=free.tokens.count)
    result = both(pair, mix(MIX, 5, max_tokens=LENGTH, min_tokens=minimum, stop_token_ids=[common]))
    assert common not in result.tokens[:minimum]
    result = both(pair, mix(MIX, 5, max_tokens=LENGTH, min_tokens=minimum, stop=[free.text[0]]))
    assert len(result.tokens) >= max(1, minimum)


@pytest.mark.parametrize("spare", range(1, 10))
def test_the_context_limit_at_every_offset(spare: int) -> None:
    """The text stops with `length` when the context is full, wherever that falls in a run; a full prompt is refused."""
    prompt = prompts(3)[2]
    model = files()
    model = replace(model, config=replace(model.config, context=len(prompt) + spare))
    engines = [
        Engine.from_loaded(loaded(model, Rig(page_size=4)), batch_size=1),
        Engine.from_loaded(
            loaded(model, Rig(page_size=4)),
            drafter="draft_model",
            draft=loaded(files()),
            drafter_options={"max_draft_tokens": 6},
        ),
        Engine.from_loaded(loaded(model, Rig(page_size=4)), drafter="junk", drafter_options={"max_draft_tokens": 12}),
    ]
    results = [e.generate([prompt], mix(MIX, 5, max_tokens=100))[0] for e in engines]
    assert said(results[0]) == said(results[1]) == said(results[2])
    assert (results[0].finish_reason, len(results[0].tokens)) == ("length", spare)
    with pytest.raises(ValueError, match=r"prompt: .* tokens leave no room in the context of"):
        engines[0].add([1] * (len(prompt) + spare))


@pytest.mark.parametrize("stop", [(), ("ab",), ("\n", "é")])
def test_streamed_text_is_the_text(pair: tuple[Engine, Engine], stop: tuple[str, ...]) -> None:
    """Deltas add up to the result: text, tokens, origins and logprobs; no delta has half a character or stop string."""
    params = mix("T 1.3, min-p", 7, max_tokens=40, stop=stop)
    for e in pair:
        stream = e.stream(prompts(2)[1], params)
        deltas = list(stream)
        result = stream.result
        assert result is not None
        assert "".join(d.text for d in deltas) == result.text
        assert [t for d in deltas for t in d.tokens] == result.tokens
        assert [o for d in deltas for o in d.origins] == result.origins
        assert [p for d in deltas for p in d.logprobs] == result.logprobs
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == result.finish_reason


def test_closing_a_stream_cancels_and_frees(pair: tuple[Engine, Engine]) -> None:
    """After `close` nothing runs, pages are free, and the result says so."""
    for e in pair:
        with e.stream(prompts(2)[1], mix(MIX, 5, max_tokens=100)) as stream:
            next(stream)
        assert stream.result is not None
        assert stream.result.finish_reason == "cancelled"
        assert not e.busy
        assert e.runner.pages.free == e.runner.pages.count
