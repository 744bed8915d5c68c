"""The prefix cache in the engine: what it saves, and that nothing of it can be seen in a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest

from heads import head_folder, medusa_folder
from outrider import Engine, Result, SamplingParams, Speculation
from outrider.drafters.base import Observation, Request, Stateless
from outrider.runtime.load import load
from rigs import Rig, accepted, draft_files, files, loaded, mix, rejected, said
from serving import MODEL, serving, settled, tiny_engine

RIG = Rig("native", "fp32", page_size=8, cache_tokens=4096)
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "draft_model": {"max_draft_tokens": 4},
    "eagle": {"head": str(head_folder())},
    "medusa": {"head": str(medusa_folder())},
    "auto": {"head": str(head_folder()), "row_cost": 0.02},
    "layer_skip": {},
    "suffix": {"row_cost": 0.02},
}


def make(drafter: str = "none", rig: Rig = RIG, **settings: Any) -> Engine:
    options = OPTIONS[drafter]
    return Engine.from_loaded(
        loaded(files(), rig), drafter=drafter, draft=loaded(draft_files(), rig), drafter_options=options, **settings
    )


def words(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 97, count).tolist()


def plainly(texts: Sequence[list[int]], params: SamplingParams) -> list[tuple[Any, ...]]:
    """What an engine without a cache of prefixes writes, one text after the other."""
    return [said(r) for r in make(batch_size=1, enable_prefix_caching=False).generate(texts, params)]


class Counting:
    """Counts the rows that are fed to a runner, guesses aside."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fed = 0
        honest = engine.runner.forward

        def forward(batch: Any, wants: Any = ()) -> Any:
            self.fed += sum(len(feed.pending) for feed in batch)
            return honest(batch, wants)

        monkeypatch.setattr(engine.runner, "forward", forward)


def pools(engine: Engine) -> list[Any]:
    drafters: list[Any] = list(engine._drafters.values())
    drafters += [d._head for d in drafters if hasattr(d, "_head") and hasattr(d._head, "_texts")]
    inner = [getattr(d, "runner", None) or getattr(d, "_head", None) for d in drafters]
    return [engine.runner.pages, *(i.pages for i in inner if hasattr(i, "pages"))]


def empty(engine: Engine) -> None:
    for pages in pools(engine):
        pages.check_integrity([])
        assert pages.free == pages.count


@pytest.mark.parametrize("verify", ["match", "rejection"])
@pytest.mark.parametrize("drafter", OPTIONS)
def test_a_second_turn_feeds_what_is_new(drafter: str, verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation in three turns: the second and third feed no page twice, and are otherwise as without a cache.

    Every step has the same guesses, too: the drafter has followed, with rows of its own where it has some.
    """
    params = mix("T 0.7", 5, max_tokens=40, ignore_eos=True)
    with_, without = (make(drafter, verify=verify, enable_prefix_caching=on) for on in (True, False))
    counting = Counting(with_, monkeypatch)
    texts: list[Result] = []
    prompt = words(90)
    for turn in range(3):
        before = counting.fed
        (got,), (want,) = (e.generate([prompt], params) for e in (with_, without))
        assert said(got) == said(want)
        assert got.steps == want.steps
        assert want.usage.cached_tokens == 0
        # rows that were fed: the rest of the prompt, and each token that a step closed with, but for the last
        assert counting.fed - before == len(prompt) - got.usage.cached_tokens + len(got.steps) - 1
        # a head is fed a step or two late, so it has a few rows less of the last turn's end than the target; and one
        # that `auto` does not ask has none of what was written since
        late = 128 if drafter == "auto" else 32
        known = len(texts[-1].prompt_tokens) + len(texts[-1].tokens) if texts else 0
        assert max(0, known - late) <= got.usage.cached_tokens <= max(0, known - 1) // 8 * 8
        if not with_._drafters[drafter].wants:
            assert got.usage.cached_tokens == max(0, known - 1) // 8 * 8
        texts.append(got)
        prompt = [*prompt, *got.tokens, *words(20, seed=turn)]
    empty(with_)
    assert pools(without)[0].cached == 0
    if drafter != "none":
        assert accepted(texts) > 0
        assert rejected(texts) > 0


@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_drafts_share_rows_of_their_own(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's own model or head is fed the second prompt's new tokens, and no others."""
    engine = make(drafter)
    owner: Any = engine._drafters[drafter]
    grower = owner.runner if drafter == "draft_model" else owner._head
    honest, pending = grower.grow, []

    def grow(batch: Any, plan: Any) -> Any:
        pending.append(sum(len(sprout.pending) for sprout in batch))
        return honest(batch, plan)

    monkeypatch.setattr(grower, "grow", grow)
    params = mix("greedy", 0, max_tokens=8)
    start = words(200)
    totals = []
    for end in (words(10, seed=1), words(10, seed=2)):
        pending.clear()
        engine.generate([[*start, *end]], params)
        totals.append(sum(pending))
    assert totals[0] > 200 > 40 > totals[1]
    empty(engine)


def test_a_text_takes_no_more_than_its_head_has() -> None:
    """A prompt that was fed for plain decoding is fed again for a head that never saw its states; then no more."""
    engine = make("eagle")
    params = mix("greedy", 0, max_tokens=12)
    prompt = words(100)
    plain, first, second = (
        engine.generate([prompt], params, speculation=Speculation(enabled=on))[0] for on in (False, True, True)
    )
    assert said(plain) == said(first) == said(second)
    assert [r.usage.cached_tokens for r in (plain, first, second)] == [0, 0, 96]
    assert first.steps == second.steps
    assert any(step.drafted for step in second.steps)


def test_a_drafter_that_wants_states_and_does_not_follow_gets_all() -> None:
    """A drafter of another package, which knows nothing of caches, sees the state of every row, as ever."""
    seen: list[int] = []

    class Watching(Stateless):
        name = "ngram"
        wants = (0,)

        def propose(self, batch: Sequence[Request]) -> list[Any]:
            return [_root(request) for request in batch]

        def observe(self, step: Sequence[Observation]) -> None:
            for s in step:
                assert len(s.hidden()) == s.pending
                seen.extend(range(s.start, s.start + s.pending))

    engine = make()
    engine._drafters["ngram"] = Watching()  # type: ignore[assignment]
    engine._guesses["ngram"] = 4
    for _ in range(2):
        seen.clear()
        (result,) = engine.generate([words(50)], mix("greedy", 0), speculation=Speculation(drafter="ngram"))
        assert seen == list(range(49 + len(result.tokens)))
        assert result.usage.cached_tokens == 0


@pytest.mark.parametrize("drafter", ["none", "eagle"])
def test_a_prompt_that_is_judged_is_fed_whole(drafter: str) -> None:
    """Log-probabilities of a prompt's tokens need its rows fed, whatever is cached; their values are the same."""
    params = mix("greedy", 0, max_tokens=6)
    asking = replace(params, prompt_logprobs=2)
    prompt = words(90)
    (want,) = make(enable_prefix_caching=False).generate([prompt], asking)
    engine = make(drafter)
    (before,), (judged,), (after,) = (engine.generate([prompt], p) for p in (params, asking, params))
    assert judged.prompt_logprobs == want.prompt_logprobs
    assert said(judged) == said(want)
    assert said(before) == said(after)
    assert [r.usage.cached_tokens for r in (before, judged, after)] == [0, 0, 88]


def _root(request: Request) -> Any:
    from outrider.core.tree import Tree

    return Tree.root(request.shaping.tokens[-1])


def test_a_follower_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever half of following raises: the text goes on without the drafter, and the cache is used."""
    prompt, params = words(60), mix("T 0.7", 3)
    want = plainly([prompt], params)

    def broken(*_: Any) -> Any:
        raise RuntimeError("lost")

    for place in ("follows", "skip"):
        engine = make("medusa")
        engine.generate([prompt], params)
        monkeypatch.setattr(engine._drafters["medusa"], place, broken)
        with pytest.warns(RuntimeWarning, match="drafter medusa: RuntimeError: lost"):
            (result,) = engine.generate([prompt], params)
        assert [said(result)] == want
        assert result.drafter_error == "drafter medusa: RuntimeError: lost"
        assert result.usage.cached_tokens == 56
        empty(engine)


@pytest.mark.parametrize("drafter", ["none", "eagle"])
def test_equal_prompts_at_once_are_fed_once(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four choices of one prompt begin in one step: while the first one's chunks are fed, the others take its pages."""
    engine = make(drafter, batch_size=4, prefill_chunk=32)
    counting = Counting(engine, monkeypatch)
    prompt = words(130)
    params = [mix("T 0.7", seed, max_tokens=1) for seed in range(4)]
    got = engine.generate([prompt] * 4, params)
    assert [said(r)[1:] for r in got] == [plainly([prompt], p)[0][1:] for p in params]
    assert counting.fed <= 130 + 3 * 32 + 3 * 8  # each is at most a chunk and a page late
    assert got[0].usage.cached_tokens == 0
    assert min(r.usage.cached_tokens for r in got[1:]) >= 96
    empty(engine)


@pytest.mark.parametrize("drafter", ["none", "eagle", "draft_model"])
def test_a_preempted_text_gets_its_pages_back(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts that do not fit beside each other: the younger one comes back to rows that it wrote itself."""
    prompts = [words(40, seed=1), words(40, seed=2)]
    params = mix("T 0.7", 1, max_tokens=60, ignore_eos=True)
    rig = replace(RIG, cache_tokens=160)  # the older one and its guesses leave a few pages
    on, off = (make(drafter, rig, batch_size=2, enable_prefix_caching=caching) for caching in (True, False))
    counts = []
    for engine in (on, off):
        counting = Counting(engine, monkeypatch)
        got = engine.generate(prompts, params)
        assert [said(r) for r in got] == plainly(prompts, params)
        assert engine.preemptions > 0
        assert [r.usage.cached_tokens for r in got] == [0, 0]  # its own rows are no prompt from the cache
        counts.append(counting.fed)
        empty(engine)
    assert counts[0] < counts[1]


def test_whatever_shares_pages_is_plain_decodings_text() -> None:
    """Forty texts that begin alike, in a cache that holds a few of them; each drafter among them, some given up.

    Hits, partial hits, evictions and preemptions all come; references add up after every step.
    """
    rng = np.random.default_rng(3)
    start = words(70)
    texts = [
        [*start[: int(rng.choice([8, 33, 64, 70]))], *words(int(rng.integers(1, 40)), seed=i % 7)] for i in range(40)
    ]
    params = [mix(list(_MIXED)[i % 3], i % 2, max_tokens=int(rng.integers(2, 30))) for i in range(40)]
    want = [plainly([t], p)[0] for t, p in zip(texts, params, strict=True)]
    engine = make("draft_model", replace(RIG, cache_tokens=260), batch_size=5, prefill_chunk=30)
    for name in ("eagle", "medusa", "auto", "layer_skip", "suffix"):
        engine.configure(name, OPTIONS[name])
    names = list(OPTIONS)
    ids: dict[int, int] = {}
    gone: set[int] = set()
    evicted = 0
    for i, (text, p) in enumerate(zip(texts, params, strict=True)):
        ids[i] = engine.add(text, p, Speculation(drafter=names[i % len(names)]))
    while engine.busy:
        entered = set(engine.runner.pages.prefixes)
        engine.step()
        evicted += len(entered - set(engine.runner.pages.prefixes))
        engine.runner.pages.check_integrity(a.sequence.rows for a in engine._active.values())
        if engine.steps % 9 == 0 and engine.running:
            engine.cancel(engine.running[-1])
            gone |= {i for i, id in ids.items() if id not in engine._active} - gone
    got = [engine.result(ids[i]) for i in range(40)]
    for result, expected in zip(got, want, strict=True):
        if result.finish_reason == "cancelled":
            assert result.tokens == expected[1][: len(result.tokens)]
        else:
            assert said(result) == expected
    assert sum(r.finish_reason != "cancelled" for r in got) > 20
    assert sum(r.finish_reason == "cancelled" for r in got) > 0
    assert sum(0 < r.usage.cached_tokens < len(r.prompt_tokens) // 8 * 8 for r in got) > 0
    assert evicted > 0
    assert engine.preemptions > 0
    assert engine.prefix_hits == sum(r.usage.cached_tokens for r in got)
    empty(engine)


_MIXED = ("greedy", "T 0.7", "T 1.3, all of them")


def test_nobody_starves() -> None:
    """A long prompt among short ones that never end to come: it is begun as soon as those before it have ended.

    Whoever came after it begins after it, however well he would fit and however much of his text is cached.
    """
    engine = make(rig=replace(RIG, cache_tokens=128), batch_size=4)
    short = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    before = [engine.add(words(20, seed=i), short) for i in range(4)]
    long = engine.add(words(100, seed=9), short)
    begun: list[int] = []
    after: list[int] = []
    steps = 0
    while long in engine._active:
        after.append(engine.add(words(20, seed=0), short))
        begun += [delta.id for delta in engine.step() if delta.tokens and delta.id not in begun]
        steps += 1
        assert steps < 40
    assert begun[: len(before)] == before
    assert not set(begun[: begun.index(long)]) & set(after)
    while engine.busy:
        begun += [delta.id for delta in engine.step() if delta.tokens and delta.id not in begun]
    assert begun == [*before, long, *after]
    empty(engine)


def test_pages_that_others_hold_are_not_counted_twice() -> None:
    """A text fits beside another one whose pages it shares, and would not with pages of its own."""
    engine = make(rig=replace(RIG, cache_tokens=128), batch_size=2)
    prompt = words(90)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    for _ in range(2):
        engine.add(prompt, params)
        engine.step()
    assert len(engine.running) == 2
    while engine.busy:
        engine.step()
    assert engine.preemptions == 0
    other = make(rig=replace(RIG, cache_tokens=128), batch_size=2, enable_prefix_caching=False)
    for _ in range(2):
        other.add(prompt, params)
        other.step()
    assert len(other.running) == 1


def test_two_engines_over_one_model_share_rows() -> None:
    """What a row holds depends on the model alone, so the cache belongs to the model that is loaded."""
    model = load(files(), dtype="fp32", threads=1, page_size=8, cache_tokens=1024)
    one, other = Engine.from_loaded(model), Engine.from_loaded(model)
    params = mix("T 0.7", 2)
    (first,), (second,) = one.generate([words(50)], params), other.generate([words(50)], params)
    assert said(first)[1:] == said(second)[1:]
    assert second.usage.cached_tokens == 48


def test_the_server_tells_what_came_from_the_cache() -> None:
    """Usage in OpenAI's form for all three routes, streams and choices; metrics under vLLM's names."""
    engine = tiny_engine(replace(RIG, cache_tokens=2048), batch_size=2)
    prompt = "the same words again and again, " * 4

    def metrics(url: str) -> dict[str, float]:
        page = httpx2.get(f"{url}/metrics").text
        return {
            line.split("{")[0] + (line.partition('state="')[2].split('"')[0]): float(line.split()[-1])
            for line in page.splitlines()
            if line.startswith(("vllm:prefix", "vllm:prompt_tokens", "outrider_cache_pages", "vllm:kv"))
        }

    with serving(engine) as running:
        create = running.client.completions.create
        first, second = (create(model=MODEL, prompt=prompt, max_tokens=4, seed=1, n=2) for _ in range(2))
        assert [c.text for c in first.choices] == [c.text for c in second.choices]
        (*_, last) = create(
            model=MODEL, prompt=prompt, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        whole = len(prompt) // 8 * 8 - 8 * (len(prompt) % 8 == 0)
        for answer, cached in ((first, 0), (second, whole), (last, whole)):
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens == len(prompt)
            assert answer.usage.prompt_tokens_details.cached_tokens == cached
        for _ in range(2):
            chat = running.client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": prompt}], max_tokens=4
            )
            answer_ = running.client.responses.create(model=MODEL, input=prompt, max_output_tokens=4)
        assert chat.usage is not None
        assert answer_.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == answer_.usage.input_tokens_details.cached_tokens > 96
        settled(running)
        seen = metrics(running.url)
        assert 0 < seen["vllm:prefix_cache_hits_total"] < seen["vllm:prefix_cache_queries_total"]
        assert seen["vllm:prefix_cache_hits_total"] == engine.prefix_hits
        assert seen["vllm:prompt_tokens_cached_total"] == engine.prefix_hits
        assert seen["vllm:prefix_cache_queries_total"] == seen["vllm:prompt_tokens_total"]
        assert seen["vllm:kv_cache_usage_perc"] == 0
        states = {state: seen[f"outrider_cache_pages{state}"] for state in ("used", "cached", "free")}
        assert states["used"] == 0 < states["cached"]
        assert sum(states.values()) == engine.runner.pages.count
