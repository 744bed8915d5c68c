"""Lookahead decoding: the target guesses for itself, in the same forward that verifies (Fu et al. 2024).

A window of W columns and N - 1 levels holds guesses for the places ahead. Each step feeds it as a comb hung on the root
(a chain of the first level; from its j-th node, the higher levels of column j), reads the target's answer below each
column, and moves every level down by one: a Jacobi iteration along N - 1 trajectories. The n-grams that the columns
spell go into a pool; those that begin with the last token are verified beside the window, as branches of the same tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.sampling import DrawError
from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Observation, Options, Request

__all__ = ["DRAFTER"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadOptions(Options):
    max_draft_tokens: int = field(
        default=15, metadata={"help": "nodes per step at most, window and candidates together"}
    )
    window: int = field(default=4, metadata={"help": "W, columns of the window"})
    ngram: int = field(default=3, metadata={"help": "N, tokens of an n-gram; the window has N - 1 levels"})
    candidates: int = field(default=3, metadata={"help": "G, n-grams verified per step at most"})
    pool: int = field(default=16, metadata={"help": "n-grams kept per first token"})


@dataclass(slots=True)
class _Window:
    """One sequence's trajectories and the n-grams found so far."""

    levels: list[list[int]]  # [N - 1][W]
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)  # first token -> the rest, latest last
    places: list[int] = field(default_factory=list)  # node at the foot of each column in the tree of this step
    counted: int = 0  # tokens of the text whose n-grams are in the pool


class Lookahead:
    name = "lookahead"
    summary = "the target's own Jacobi window fills a pool of n-grams, verified in the same forward"
    needs = "nothing"
    helps = "where rows are nearly free and no draft fits; seldom on a CPU"
    Options = LookaheadOptions
    wants: tuple[int, ...] = ()

    def __init__(self, options: LookaheadOptions, context: Context) -> None:
        if options.window < 1 or options.ngram < 2 or options.candidates < 0 or options.pool < 1:
            raise DrafterError("lookahead: window and pool are at least 1, ngram at least 2, candidates at least 0")
        self.options = options
        self._windows: dict[int, _Window] = {}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        return [self._guess(request) for request in batch]

    def observe(self, step: Sequence[Observation]) -> None:
        for seen in step:
            window = self._windows.get(seen.request.id)
            if window is not None and window.places and seen.tree is not None:
                self._advance(window, seen, seen.tree)

    def forget(self, sequence: int) -> None:
        self._windows.pop(sequence, None)

    @classmethod
    def forecast(cls, options: LookaheadOptions, context: Context) -> dict[str, int]:
        return {}  # it grows with the texts

    def memory(self) -> dict[str, int]:
        grams = sum(len(rest) for window in self._windows.values() for rest in window.pool.values())
        return {"pool": grams * (120 + 8 * self.options.ngram)}

    def _guess(self, request: Request) -> Tree:
        tokens = request.shaping.tokens
        budget = min(request.budget, self.options.max_draft_tokens)
        window = self._windows.get(request.id)
        if window is None:
            window = self._windows[request.id] = _Window(self._start(tokens))
        self._collect(window, tokens)
        nodes, parents = [tokens[-1]], [-1]
        index: dict[tuple[int, int], int] = {}

        def node(parent: int, token: int) -> int | None:
            """The child of `parent` that guesses `token`, made if there is room."""
            place = index.get((parent, token))
            if place is None and len(nodes) <= budget:
                place = index[parent, token] = len(nodes)
                nodes.append(token)
                parents.append(parent)
            return place

        def hang(parent: int | None, path: Sequence[int]) -> int | None:
            for token in path:
                if parent is not None:
                    parent = node(parent, token)
            return parent

        if self.options.candidates:
            for rest in reversed(window.pool.get(tokens[-1], [])[-self.options.candidates :]):
                hang(0, rest)
        window.places = []
        stem: int | None = 0
        for column, token in enumerate(window.levels[0]):
            stem = hang(stem, (token,))
            foot = hang(stem, [level[column] for level in window.levels[1:]])
            if foot is None:
                break
            window.places.append(foot)
        return Tree(tuple(nodes), tuple(parents))

    def _start(self, tokens: Sequence[int]) -> list[list[int]]:
        """A window of tokens from the text: any guess will do, these are at least in use."""
        o = self.options
        return [
            [tokens[-1 - (level * o.window + c) % len(tokens)] for c in range(o.window)] for level in range(o.ngram - 1)
        ]

    def _advance(self, window: _Window, seen: Observation, tree: Tree) -> None:
        """Put the columns' n-grams into the pool and move every level down; the answers are the new last level."""
        answers: list[int] = []
        for column, place in enumerate(window.places):
            if place >= len(tree):  # cut off to fit the text's room
                break
            try:
                best, _ = seen.scores.top(seen.feed, place, 1)
            except DrawError:  # broken logits below a guess, where plain decoding never looks
                break
            answers.append(int(best[0]))
            self._remember(window, [*(level[column] for level in window.levels), answers[-1]])
        last = window.levels[-1]
        window.levels = [*window.levels[1:], [*answers, *last[len(answers) :]]]
        window.places = []

    def _collect(self, window: _Window, tokens: Sequence[int]) -> None:
        """N-grams of the text itself, the prompt's too."""
        n = self.options.ngram
        for end in range(max(n, window.counted + 1), len(tokens) + 1):
            self._remember(window, tokens[end - n : end])
        window.counted = len(tokens)

    def _remember(self, window: _Window, gram: Sequence[int]) -> None:
        kept, rest = window.pool.setdefault(gram[0], []), tuple(gram[1:])
        if rest in kept:
            kept.remove(rest)
        kept.append(rest)
        if len(kept) > self.options.pool:
            del kept[0]


DRAFTER = Lookahead
