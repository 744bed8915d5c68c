"""A second, smaller model with the same vocabulary writes the guesses.

Sources: Leviathan et al. 2023 and Chen et al. 2023 (chains, rejection); Miao et al. 2024 (SpecInfer, trees);
Li et al. 2024 (EAGLE-2, section 4: grow by cumulative confidence, then re-rank).

Under match verification the draft draws with the target's own noise, so that equal laws give equal tokens. Under
rejection it draws with noise of its own, and the tree's shape is fixed before anything is drawn: which drawn token
is tested never depends on what was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core import noise
from outrider.core.cache import CacheFullError, Rows
from outrider.core.sampling import DrawError
from outrider.core.tree import Law, Tree
from outrider.core.verify import draw_children
from outrider.drafters.base import Context, DrafterError, Observation, Options, Request
from outrider.runtime.runner import Feed, Scores

__all__ = ["DRAFTER"]

_WIDEST = 64  # siblings per node: nobody pays for more


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelOptions(Options):
    max_draft_tokens: int = field(default=5, metadata={"help": "guesses per step at most"})
    depth: int = field(default=0, metadata={"help": "longest path of a tree; 0 = as long as the guesses allow"})
    width: int = field(default=1, metadata={"help": "siblings per node and nodes per level at most; 1 = a chain"})
    min_probability: float = field(
        default=0.0, metadata={"help": "match only: a path less likely than this under the draft is not extended"}
    )


@dataclass(slots=True)
class _Fed:
    """One sequence's rows in the draft's cache, and the tokens that they stand for."""

    rows: Rows
    tokens: list[int]


class DraftModel:
    name = "draft_model"
    summary = "a second, smaller model of the same vocabulary guesses"
    needs = "--draft-model NAME"
    helps = "chat and prose, where the draft is 5 to 20 % of the target"
    Options = DraftModelOptions
    wants: tuple[int, ...] = ()

    def __init__(self, options: DraftModelOptions, context: Context) -> None:
        name = _named(context)
        if not 1 <= options.width <= _WIDEST or options.depth < 0 or not 0 <= options.min_probability < 1:
            raise DrafterError(
                f"draft_model: width is in [1, {_WIDEST}], depth at least 0 and min_probability in [0, 1)"
            )
        loaded = context.load(name)
        _same_vocabulary(context.tokenizer, loaded.tokenizer)
        self.options, self.runner = options, loaded.runner
        self._target_vocabulary = context.config.vocabulary
        self._vocabulary = min(context.config.vocabulary, self.runner.config.vocabulary)
        self._fed: dict[int, _Fed] = {}

    @classmethod
    def forecast(cls, options: DraftModelOptions, context: Context) -> dict[str, int]:
        return {f"draft {purpose}": size for purpose, size in context.forecast(_named(context)).items()}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        trees = [Tree.root(request.shaping.tokens[-1]) for request in batch]
        live = [i for i, request in enumerate(batch) if self._ready(request)]
        growths = {i: _Growth(batch[i], self.options, self._depth(batch[i])) for i in live}
        while live:
            feeds = [self._feed(batch[i], growths[i]) for i in live]
            scores = self.runner.forward(feeds)
            for index, i in enumerate(live):
                feed = feeds[index]
                if len(feed.pending) > 1:  # the committed rows count from now on; the root is fed again with its tree
                    feed.rows.commit(len(feed.pending) - 1)
                self._grow(growths[i], scores, index)
            live = [i for i in live if growths[i].open]
        for i, growth in growths.items():
            trees[i] = growth.tree(self._vocabulary, self._target_vocabulary)
        return trees

    def observe(self, step: Sequence[Observation]) -> None: ...

    def forget(self, sequence: int) -> None:
        fed = self._fed.pop(sequence, None)
        if fed is not None:
            fed.rows.release()

    def memory(self) -> dict[str, int]:
        return {f"draft {purpose}": size for purpose, size in self.runner.memory().items()}

    def _depth(self, request: Request) -> int:
        guesses = min(request.budget, self.options.max_draft_tokens)
        return min(guesses, self.options.depth or guesses)

    def _ready(self, request: Request) -> bool:
        """Bring the draft's cache up to all but the last token. False where the draft cannot follow in this step."""
        tokens = request.shaping.tokens
        guesses = min(request.budget, self.options.max_draft_tokens)
        if guesses <= 0 or len(tokens) + self._depth(request) > self.runner.config.context:
            return False
        fed = self._fed.get(request.id)
        if fed is None:
            fed = self._fed[request.id] = _Fed(Rows(self.runner.pages), [])
        common = _common_prefix(fed.tokens, tokens)
        fed.rows.keep(common)
        news = tokens[common:]
        if max(news, default=0) >= self._vocabulary:  # padding ids that the draft has no row for
            return False
        try:
            fed.rows.reserve(len(tokens) - fed.rows.length + max(guesses, self._depth(request) * self.options.width))
        except CacheFullError:
            return False
        fed.tokens[common:] = news
        fed.tokens.pop()  # the root stays uncommitted: every tree begins with it
        while len(tokens) - 1 - fed.rows.length > self._CHUNK:
            chunk = tokens[fed.rows.length : fed.rows.length + self._CHUNK]
            self.runner.forward([Feed(fed.rows, chunk)])
            fed.rows.commit(len(chunk))
        return True

    _CHUNK = 512  # prompt tokens per forward of the draft

    def _feed(self, request: Request, growth: _Growth) -> Feed:
        fed = self._fed[request.id]
        return Feed(fed.rows, request.shaping.tokens[fed.rows.length :], growth.draft())

    def _grow(self, growth: _Growth, scores: Scores, feed: int) -> None:
        try:
            if growth.request.rejection:
                growth.sample(scores, feed, self._vocabulary)
            else:
                growth.extend(scores, feed, self._vocabulary)
        except DrawError:  # the draft's own logits are broken: no guess, and no error that plain decoding lacks
            growth.frontier = []


class _Growth:
    """A tree of one request while it grows, one level per forward of the draft."""

    def __init__(self, request: Request, options: DraftModelOptions, depth: int) -> None:
        self.request, self.options, self.depth = request, options, depth
        self.guesses = min(request.budget, options.max_draft_tokens)
        self.tokens, self.parents = [request.shaping.tokens[-1]], [-1]
        self.paths: list[tuple[int, ...]] = [()]
        self.confidence = [0.0]  # log of the product along the path
        self.laws: dict[int, Law] = {}
        self.frontier = [0]
        self.level = 0
        # How often the target agreed with a draft's first, second ... sibling when both share the noise; used at
        # T > 0 only, where the draft's law does not say which of its coupled draws the target repeats.
        self._coupled = np.log([0.75, 0.12] + [0.04 / 2**i for i in range(_WIDEST - 2)])

    @property
    def open(self) -> bool:
        return bool(self.frontier) and self.level < self.depth

    def draft(self) -> Tree:
        return Tree(tuple(self.tokens), tuple(self.parents))

    def extend(self, scores: Scores, feed: int, vocabulary: int) -> None:
        """Children of the frontier: the draft's likeliest draws under the target's noise, the best paths kept."""
        shaping, width = self.request.shaping, self.options.width
        found: list[tuple[float, int, int]] = []  # log confidence, parent, token
        for node in self.frontier:
            tokens, logprobs = scores.top(feed, node, width, shaping, self.paths[node])
            for rank, (token, logprob) in enumerate(zip(tokens.tolist(), logprobs.tolist(), strict=True)):
                if token < vocabulary:
                    own = logprob if shaping.params.temperature == 0 else self._coupled[rank]
                    found.append((self.confidence[node] + float(own), node, token))
        floor = math.log(self.options.min_probability) if self.options.min_probability else -math.inf
        found = sorted((f for f in found if f[0] >= floor), key=lambda f: (-f[0], f[1], f[2]))
        self._add(found[:width])

    def sample(self, scores: Scores, feed: int, vocabulary: int) -> None:
        """Children of the frontier drawn without replacement from the draft's law; a fixed number per node."""
        shaping = self.request.shaping
        left = self.guesses - (len(self.tokens) - 1)
        # siblings at the root only: the first guess decides over all that follow it
        width = self.options.width if self.level == 0 else 1
        found: list[tuple[float, int, int]] = []
        for node in self.frontier:
            count = min(width, left - len(found))
            if count <= 0:
                break
            law = scores.law(feed, node, shaping, self.paths[node])[:vocabulary]
            total = law.sum()
            if not total > 0:
                continue
            law = law / total
            position = len(shaping.tokens) + len(self.paths[node])
            # nodes of one depth share the position, so their place in the tree gives each its own noise
            gumbel = noise.gumbel(
                shaping.seed ^ (node * 0x9E3779B97F4A7C15 & (2**64 - 1)),
                position,
                np.arange(vocabulary, dtype=np.int64),
                noise.DRAFT,
            )
            children = draw_children(law, count, gumbel)
            self.laws[node] = law
            found += [(0.0, node, int(token)) for token in children]
        self._add(found)

    def _add(self, found: Sequence[tuple[float, int, int]]) -> None:
        self.frontier = []
        for confidence, parent, token in found:
            self.frontier.append(len(self.tokens))
            self.tokens.append(token)
            self.parents.append(parent)
            self.paths.append((*self.paths[parent], token))
            self.confidence.append(confidence)
        self.level += 1

    def tree(self, vocabulary: int, target_vocabulary: int) -> Tree:
        """The grown tree within its budget: by confidence under match, in order of growth under rejection."""
        if self.request.rejection:
            laws = {node: _widen(law, target_vocabulary) for node, law in self.laws.items()}
            return Tree(tuple(self.tokens), tuple(self.parents), laws).cut(self.guesses)
        if len(self.tokens) - 1 <= self.guesses:
            return self.draft()
        # a parent is never less likely than its child, so the best nodes are a tree
        best = sorted(range(1, len(self.tokens)), key=lambda n: (-self.confidence[n], n))[: self.guesses]
        return self.draft().select([0, *sorted(best)])


def _named(context: Context) -> str:
    if context.draft_model is None:
        raise DrafterError("draft_model: no draft named; pass --draft-model NAME (draft_model= in Python)")
    return context.draft_model


def _widen(law: Law, size: int) -> Law:
    if len(law) == size:
        return law
    out: NDArray[np.float64] = np.zeros(size)
    out[: len(law)] = law
    return out


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])


def _same_vocabulary(target: object, draft: object) -> None:
    """Raise DrafterError that names the first tokens that differ. Padding of either vocabulary does not matter."""
    if target.fingerprint() == draft.fingerprint():  # type: ignore[attr-defined]
        return
    shared = min(target.vocabulary, draft.vocabulary)  # type: ignore[attr-defined]
    differing = [
        f"{i}: {target.token_bytes(i)!r} / {draft.token_bytes(i)!r}"  # type: ignore[attr-defined]
        for i in range(shared)
        if target.token_bytes(i) != draft.token_bytes(i)  # type: ignore[attr-defined]
    ]
    if differing:
        raise DrafterError(
            f"draft_model: the draft has another tokenizer: {len(differing):,} of {shared:,} tokens differ, first "
            f"{'; '.join(differing[:3])} (target / draft). Use a draft of the target's family"
        )


DRAFTER = DraftModel
