"""What happens to the others when something goes wrong: in one request, in a drafter, in the middle of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider import Engine, SamplingParams, Speculation
from outrider.core.sampling import DrawError
from outrider.core.tree import Tree
from outrider.drafters.costs import Costs
from outrider.drafters.ngram import DRAFTER as NGRAM
from rigs import Rig, accepted, draft_files, engine, files, loaded, mix, prompts, rejected, said

GOOD = mix("T 0.7", 1, max_tokens=20)
HOPELESS = SamplingParams(max_tokens=20, repetition_penalty=1e-45, seed=1)  # its logits overflow


class TornError(Exception):
    """Raised in the middle of a step."""


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return [said(r) for r in engine(batch_size=1).generate(prompts(4), GOOD)]


def speculative(**settings: Any) -> Engine:
    return engine(drafter="draft_model", drafter_options={"max_draft_tokens": 4}, batch_size=4, **settings)


def run(e: Engine) -> None:
    while e.busy:
        e.step()


def test_a_request_that_cannot_be_drawn_ends_alone(plain: list[Any]) -> None:
    """Its delta says `error`, its result raises, its pages are free, and its neighbours' texts are what they were."""
    e = speculative()
    ids = [e.add(p, HOPELESS if i == 1 else GOOD) for i, p in enumerate(prompts(4))]
    ends = {}
    while e.busy:
        ends |= {d.id: d.finish_reason for d in e.step() if d.finish_reason}
    assert ends[ids[1]] == "error"
    with pytest.raises(DrawError, match="repetition_penalty 1e-45 is too small"):
        e.result(ids[1])
    assert [said(e.result(ids[i])) for i in (0, 2, 3)] == [plain[i] for i in (0, 2, 3)]
    assert e.runner.pages.free == e.runner.pages.count


def test_generate_and_stream_raise_what_stopped_their_request(plain: list[Any]) -> None:
    """The error comes out of the call that waits for the request, and the engine is idle and usable afterwards."""
    e = speculative()
    with pytest.raises(DrawError):
        e.generate([prompts(4)[0], prompts(4)[1]], [GOOD, HOPELESS])
    stream = e.stream(prompts(4)[1], HOPELESS)
    with pytest.raises(DrawError):
        next(stream)
    assert list(stream) == []
    assert not e.busy
    assert [said(r) for r in e.generate(prompts(4), GOOD)] == plain


@pytest.mark.parametrize("place", ["forward", "verify"])
def test_a_step_that_fails_can_be_run_again(place: str, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception before the commit, now and then: no text, cache or draft is torn."""
    e = speculative()
    calls = 0

    def torn(honest: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            out = honest(*arguments)
            if calls % 7 == 3:
                raise TornError
            return out

        return call

    if place == "verify":
        monkeypatch.setattr(e, "_verify", torn(e._verify))
    else:
        monkeypatch.setattr(e.runner, place, torn(e.runner.forward))
    ids = [e.add(p, GOOD) for p in prompts(4)]
    failures = 0
    while e.busy:
        try:
            e.step()
        except TornError:
            failures += 1
    assert failures > 1
    assert [said(e.result(i)) for i in ids] == plain
    assert e.runner.pages.free == e.runner.pages.count


@pytest.mark.parametrize("place", ["propose", "observe", "forget"])
def test_a_drafter_that_fails_is_given_up(place: str, plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """From its third call on it raises: the texts go on without it, it is told once, and the results say why."""
    e = speculative()
    drafter: Any = e._drafters["draft_model"]
    honest, calls = getattr(drafter, place), 0

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= 3:
            raise TornError("no more")
        return honest(*arguments)

    monkeypatch.setattr(drafter, place, broken)
    with pytest.warns(RuntimeWarning) as told:
        both = [e.generate(prompts(4), GOOD) for _ in range(2)]
    got, again = both
    assert [said(r) for r in got] == plain
    assert [said(r) for r in again] == plain
    assert [str(w.message) for w in told] == [
        "drafter draft_model: TornError: no more; its requests go on without a drafter"
    ]
    assert [r.drafter_error for r in again] == ["drafter draft_model: TornError: no more"] * 4
    assert accepted(got) > 0
    assert place == "forget" or accepted(again) == 0
    assert e.runner.pages.free == e.runner.pages.count


def test_a_drafter_that_fails_takes_no_other_request_along(plain: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of other drafters in the same batch keep theirs."""
    e = speculative()

    def broken(batch: Any) -> Any:
        raise TornError

    monkeypatch.setattr(e._drafter("suffix"), "propose", broken)
    names = ["suffix", "draft_model", "suffix", "none"]
    with pytest.warns(RuntimeWarning, match="drafter suffix: TornError"):
        got = e.generate(prompts(4), GOOD, speculation=[Speculation(drafter=name) for name in names])
    assert [said(r) for r in got] == plain
    assert [r.drafter_error is not None for r in got] == [True, False, True, False]
    assert accepted([got[1]]) > 0 == accepted([got[0], got[2]])


def test_streams_and_generate_take_turns(plain: list[Any]) -> None:
    """Each stream has all of its own deltas, whoever makes the steps; a stream cancelled from outside just ends."""
    e = speculative()
    first, second, third = (e.stream(prompts(4)[i], GOOD) for i in (0, 1, 2))
    deltas = [next(first)]
    e.cancel(third.id)
    assert [said(r) for r in e.generate(prompts(4)[3:], GOOD)] == plain[3:]
    seconds = list(second)
    deltas += list(first)
    for stream, seen, want in ((first, deltas, plain[0]), (second, seconds, plain[1])):
        assert stream.result is not None
        assert said(stream.result) == want
        assert [t for d in seen for t in d.tokens] == stream.result.tokens
        assert "".join(d.text for d in seen) == stream.result.text
    list(third)
    assert third.result is not None
    assert third.result.finish_reason == "cancelled"
    assert not e._boxes


def test_a_stream_that_is_interrupted_frees_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside a step: no request is left behind for the next call to run."""
    e = speculative()
    stream = e.stream(prompts(4)[0], GOOD)
    next(stream)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(e.runner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert not e.busy
    assert e.runner.pages.free == e.runner.pages.count
    assert stream.result is not None
    assert stream.result.finish_reason == "cancelled"


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_draft_with_broken_logits_is_no_draft(rule: Any, plain: list[Any]) -> None:
    """NaN in the draft's head: plain decoding has no such error, so speculation has none."""
    from dataclasses import replace

    from tiny import tensor

    broken = draft_files()
    head = broken.tensors["head"].float32().copy()
    head[5] = np.nan
    broken = replace(broken, tensors={**broken.tensors, "head": tensor("head", head)})
    e = Engine.from_loaded(loaded(files()), drafter="draft_model", draft=loaded(broken), batch_size=4, verify=rule)
    got = e.generate(prompts(4), GOOD)
    assert accepted(got) == 0
    if rule == "match":
        assert [said(r) for r in got] == plain


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "draft_model", "junk", "lookahead"])
def test_the_longest_draft_is_the_callers(drafter: str) -> None:
    """`max_draft_tokens` of the engine goes beyond the method's default, and below it."""
    for most in (1, 30):
        options = {"row_cost": 0.0} if drafter == "suffix" else None
        e = engine(drafter=drafter, max_draft_tokens=most, drafter_options=options)
        e._controller.costs = Costs(row=0.0)  # or the longest would be as long as pays
        (result,) = e.generate([[5, 6, 7, 8] * 30], SamplingParams(max_tokens=60, ignore_eos=True))
        longest = max(step.drafted for step in result.steps)
        assert longest <= most
        # a window and its candidates are no larger than their own options make them
        assert longest > {"ngram": 15, "suffix": 24, "draft_model": 5, "junk": 8, "lookahead": 1}[drafter] or most == 1


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "auto", "prediction", "lookahead", "draft_model"])
def test_a_batch_of_more_rows_than_were_ever_measured(drafter: str) -> None:
    """150 texts at once: no drafter fails on it (a warning would be an error here), and the texts are plain ones."""
    rig = Rig(cache_tokens=20_000)
    asked = [[5, 6, 7, 8, 5, 6, 7, 3 + number % 80] for number in range(150)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    speculation = Speculation(prediction=[5, 6, 7, 8, 9] if drafter == "prediction" else None)
    made = engine(rig, drafter=drafter, batch_size=150)
    got = made.generate(asked, params, speculation=speculation)
    assert [r.tokens for r in got] == [r.tokens for r in engine(rig).generate(asked, params)]
    assert {r.drafter_error for r in got} == {None}
    if drafter in ("ngram", "lookahead", "draft_model"):  # the others do not guess beside so many rows
        assert rejected(got) > 0


def test_huge_drafter_options_overflow_nothing() -> None:
    """Numbers beyond all use; a width that nobody can want is refused."""
    e = engine(drafter="suffix", drafter_options={"row_cost": 1e-300, "memory_mb": 1e300})
    assert accepted(e.generate([[5, 6, 7, 8] * 20], SamplingParams(max_tokens=40, logit_bias={5: 9}))) > 0
    e = engine(drafter="ngram", drafter_options={"max_ngram": 10**30})
    assert accepted(e.generate([[5, 6, 7, 8] * 20], SamplingParams(max_tokens=40, logit_bias={5: 9}))) > 0
    with pytest.raises(ValueError, match=r"draft_model: width is in \[1, 64\]"):
        engine(drafter="draft_model", drafter_options={"width": 65})


def test_a_target_may_be_its_own_draft(plain: list[Any]) -> None:
    """One runner for both: they share its pages, and take them from one another without a trace."""
    for rows in (2048, 128, 64):
        one = loaded(files(), Rig(page_size=4, cache_tokens=rows))
        e = Engine.from_loaded(one, drafter="draft_model", draft=one, batch_size=3)
        got = e.generate(prompts(4), GOOD)
        assert [said(r) for r in got] == plain
        assert one.runner.pages.free == one.runner.pages.count
    assert e.preemptions > 0


def test_a_prompt_in_chunks_is_drafted_for_like_a_whole_one() -> None:
    """Every drafter sees the prompt's first tokens too, however it was chunked: the steps are the same."""
    head = [int(t) for t in np.random.default_rng(0).integers(3, 97, 40)]
    prompt = [*head, 1, 2, *head[:12]]
    short = {"suffix": {"row_cost": 0.02}, "lookahead": {"adaptive": False}}  # not measured: the same in every run
    for drafter in ("ngram", "suffix", "lookahead", "draft_model"):
        settings = {"drafter": drafter, "drafter_options": short.get(drafter)}
        steps = [engine(prefill_chunk=chunk, **settings).generate([prompt], GOOD)[0].steps for chunk in (512, 5, 1)]
        assert steps[0] == steps[1] == steps[2]
        assert any(step.drafted for step in steps[0])


def test_a_long_prompt_starves_nobody() -> None:
    """While a prompt is fed in chunks, a running text gets a token with every step."""
    e = engine(batch_size=2, prefill_chunk=4)
    runs = e.add([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True))
    e.step()
    e.add([7] * 60, SamplingParams(max_tokens=1))
    for _ in range(10):
        assert [len(d.tokens) for d in e.step() if d.id == runs] == [1]
    run(e)


def test_the_draft_is_not_fed_the_prompt_twice() -> None:
    """Each token of the text goes through the draft about once, not once per step."""
    e = speculative()
    draft: Any = e._drafters["draft_model"]
    fed = 0
    honest = draft.runner.grow

    def counted(batch: Any, plan: Any) -> Any:
        nonlocal fed
        fed += sum(len(sprout.pending) for sprout in batch)
        return honest(batch, plan)

    draft.runner.grow = counted
    (result,) = e.generate([[5, 6, 7, 8] * 30], mix("greedy", 0, max_tokens=40, ignore_eos=True))
    assert len(result.steps) > 8
    assert fed <= 120 + 40


def test_memory_counts_the_draft() -> None:
    """The report has the draft's weights and cache beside the target's."""
    memory = speculative().memory()
    assert memory["target weights"] > 0
    assert memory["draft_model: draft weights"] > 0
    assert memory["draft_model: draft cache"] > 0


def test_speculation_is_live_for_every_request_of_a_batch() -> None:
    """Eight at once, arriving in turn: each of them has drafts of its own."""
    e = engine(drafter="draft_model", drafter_options={"max_draft_tokens": 3}, batch_size=8, prefill_chunk=16)
    for result in e.generate(prompts(8), GOOD):
        if len(result.tokens) > 3:
            assert sum(step.drafted for step in result.steps) > 0


def test_no_drafter_is_asked_for_more_than_the_text_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token is drawn without a draft, and no draft goes beyond the last token but one."""
    asked: list[tuple[int, int]] = []
    honest = NGRAM.propose

    def propose(self: Any, batch: Any) -> Any:
        asked.extend((r.id, len(r.shaping.tokens)) for r in batch)
        return honest(self, batch)

    monkeypatch.setattr(NGRAM, "propose", propose)
    prompt = [5, 6, 7, 8] * 8
    (result,) = engine(drafter="ngram").generate([prompt], SamplingParams(max_tokens=9, ignore_eos=True))
    assert asked
    assert all(length < len(prompt) + 8 for _, length in asked)
    assert sum(step.accepted + 1 for step in result.steps) == 9


@pytest.mark.parametrize(
    "prompt",
    [None, 5, b"abc", {"role": "user", "content": "x"}, {1}, [None], ["a", 1], [{"content": "x"}], [{"role": 1}]],
)
def test_what_is_no_prompt_is_refused_by_name(prompt: Any) -> None:
    """Anything but a text, ids or messages: ParameterError, and nothing is admitted."""
    e = engine()
    with pytest.raises(ValueError, match="prompt: "):
        e.generate(prompt)
    assert not e.busy


def test_arrays_of_numpy_are_prompts() -> None:
    """Ids of any integer type give the text of the same list."""
    e = engine()
    got = e.generate([np.array([5, 6, 7]), [np.int32(5), 6, 7], [5, 6, 7]], GOOD)
    assert said(got[0])[1:] == said(got[1])[1:] == said(got[2])[1:]
    assert said(e.generate(np.array([5, 6, 7]), GOOD)[0])[1:] == said(got[0])[1:]


@pytest.mark.parametrize("chain", [True, False])
def test_an_end_that_is_only_guessed_ends_nothing(
    chain: bool, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that guesses the end of text at every step: the text ends where the target ends it."""
    end = files().tokenizer.eos[0]

    def guess(self: Any, request: Any) -> Tree:
        root = request.shaping.tokens[-1]
        guesses = [end, end, 5][: request.budget]
        return Tree.chain(root, guesses) if chain else Tree.merge(root, [[end, 7], [5, end]], request.budget)

    monkeypatch.setattr(NGRAM, "_guess", guess)
    got = engine(drafter="ngram", batch_size=4).generate(prompts(4), GOOD)
    assert [said(r) for r in got] == plain
    assert any(len(r.tokens) == 20 for r in got)


def test_a_request_without_a_step_has_an_acceptance_length() -> None:
    """Cancelled before its first token: 1, not a division by zero, and books that add up."""
    e = speculative()
    id = e.add(prompts(4)[0], GOOD)
    e.cancel(id)
    result = e.result(id)
    assert (result.mean_acceptance_length, result.steps, result.tokens) == (1.0, [], [])
    assert (result.usage.total_tokens, result.text) == (len(prompts(4)[0]), "")
