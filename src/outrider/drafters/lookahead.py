"""Lookahead decoding: the target guesses for itself, in the same forward that verifies (Fu et al. 2024).

A window of W columns and N - 1 levels holds guesses for the places ahead. Each step feeds it as a comb hung on the root
(a chain of the first level; from its j-th node, the higher levels of column j), reads the target's answer below each
column, and moves every level down by one: a Jacobi iteration along N - 1 trajectories. The n-grams that the columns
spell go into a pool; those that begin with the last token are verified beside the window, as branches of the same tree.

The n-grams of the text itself are in the pool for nothing. The window's rows are not free on a CPU: it stands only as
long as its own n-grams bring more than it costs, and is tried again now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.sampling import DrawError
from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Observation, Options, Request
from outrider.drafters.pace import Pace

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
    adaptive: bool = field(default=True, metadata={"help": "pause the window where it does not pay"})


@dataclass(slots=True)
class _Window:
    """One sequence's trajectories and the n-grams found so far."""

    levels: list[list[int]]  # [N - 1][W]
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)  # first token -> the rest, latest last
    places: list[int] = field(default_factory=list)  # node at the foot of each column in the tree of this step
    counted: int = 0  # tokens of the text whose n-grams are in the pool
    born: set[tuple[int, ...]] = field(default_factory=set)  # n-grams of the pool that the window alone has found
    hung: int = 0  # nodes of candidates in the tree of this step; the window's come behind them
    worth: Pace = field(default_factory=lambda: Pace(gain=1.0, cost=0.3))  # of the window


class Lookahead:
    name = "lookahead"
    summary = "the target's own Jacobi window fills a pool of n-grams, verified in the same forward"
    needs = "nothing"
    helps = "where rows are nearly free and no draft fits; on a CPU little, beyond repetition"
    Options = LookaheadOptions
    wants: tuple[int, ...] = ()

    def __init__(self, options: LookaheadOptions, context: Context) -> None:
        if options.window < 1 or options.ngram < 2 or options.candidates < 0 or options.pool < 1:
            raise DrafterError("lookahead: window and pool are at least 1, ngram at least 2, candidates at least 0")
        self.options = options
        self._costs = context.costs
        self._windows: dict[int, _Window] = {}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        return [self._guess(request) for request in batch]

    def observe(self, step: Sequence[Observation]) -> None:
        for seen in step:
            window = self._windows.get(seen.request.id)
            if window is not None and seen.tree is not None and seen.tree.guesses and window.places:
                self._weigh(window, seen, seen.tree)
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
        window.places, window.hung = [], len(nodes) - 1
        stem: int | None = 0
        for column, token in enumerate(window.levels[0] if self._opens(window) else ()):
            stem = hang(stem, (token,))
            foot = hang(stem, [level[column] for level in window.levels[1:]])
            if foot is None:
                break
            window.places.append(foot)
        return Tree(tuple(nodes), tuple(parents))

    def _opens(self, window: _Window) -> bool:
        """Whether the window stands in this step."""
        return not self.options.adaptive or window.worth.wanted()

    def _weigh(self, window: _Window, seen: Observation, tree: Tree) -> None:
        """What the window brought in this step, and what its rows took."""
        # under rejection the text depends on the guesses: nothing that is measured may choose them
        curve = self._costs.assumed if seen.request.rejection else self._costs.curve
        path = tuple(tree.tokens[node] for node in seen.path)
        ngram = (tree.tokens[0], *path)
        found = any(gram[: len(ngram)] == ngram for gram in window.born)
        price = curve[min(len(tree), len(curve) - 1)] - curve[min(1 + window.hung, len(curve) - 1)]
        window.worth.saw(len(path) if found else 0, price)

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
            gram = [*(level[column] for level in window.levels), answers[-1]]
            if tuple(gram[1:]) not in window.pool.get(gram[0], ()):
                window.born.add(tuple(gram))
            self._remember(window, gram)
        last = window.levels[-1]
        window.levels = [*window.levels[1:], [*answers, *last[len(answers) :]]]
        window.places = []

    def _collect(self, window: _Window, tokens: Sequence[int]) -> None:
        """N-grams of the text itself, the prompt's too."""
        n = self.options.ngram
        for end in range(max(n, window.counted + 1), len(tokens) + 1):
            window.born.discard(tuple(tokens[end - n : end]))
            self._remember(window, tokens[end - n : end])
        window.counted = len(tokens)

    def _remember(self, window: _Window, gram: Sequence[int]) -> None:
        kept, rest = window.pool.setdefault(gram[0], []), tuple(gram[1:])
        if rest in kept:
            kept.remove(rest)
        kept.append(rest)
        if len(kept) > self.options.pool:
            window.born.discard((gram[0], *kept.pop(0)))


DRAFTER = Lookahead
