"""A draft of another tokenizer: its text goes to the target's tokenizer, and the target's text to its own.

The draft continues the text greedily in its own tokens; what it wrote is cut into the target's tokens and guessed as a
chain (Timor et al. 2025, string-level verification). The guesses are certain, not drawn, so they are exact under both
rules of verification. A guess ends where the draft's text may still grow into another token: the last one is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.cache import CacheFullError, Rows
from outrider.core.params import SamplingParams
from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.drafters.base import Request
from outrider.runtime.growth import Plan, Sprout
from outrider.runtime.runner import Runner

__all__ = ["Retokenised"]


@dataclass(slots=True)
class _Text:
    """One sequence as the draft sees it."""

    rows: Rows
    tokens: list[int] = field(default_factory=list)  # the draft's own
    text: str = ""  # what they spell
    seen: int = 0  # tokens of the target that are in `text`
    fed: list[int] = field(default_factory=list)  # tokens whose rows may be in the cache


class Retokenised:
    """Chains for requests of one target by a runner with another tokenizer."""

    _TAIL = 6  # last tokens that may be cut anew when the text goes on

    def __init__(self, target: Any, draft: Any, runner: Runner, *, shared: bool) -> None:
        """`target` and `draft` are tokenizers. `shared`: texts that begin alike share rows."""
        self._target, self._draft, self._runner, self._shared = target, draft, runner, shared
        self._plan = Plan(runner.config.vocabulary)
        self._texts: dict[int, _Text] = {}

    def propose(self, batch: Sequence[Request], guesses: int) -> list[Tree]:
        """At most `guesses` guesses per request; as many tokens of the draft are written for them."""
        trees = [Tree.root(request.shaping.tokens[-1]) for request in batch]
        sprouts = [(i, s) for i, request in enumerate(batch) if (s := self._sprout(request, guesses)) is not None]
        if sprouts:
            grown = self._runner.grow([sprout for _, sprout in sprouts], self._plan)
            for (i, sprout), tree in zip(sprouts, grown, strict=True):
                sprout.rows.commit(len(sprout.pending))
                sprout.rows.publish(sprout.shaping.tokens)
                trees[i] = self._cut(batch[i], tree, guesses)
        return trees

    def forget(self, sequence: int) -> None:
        text = self._texts.pop(sequence, None)
        if text is not None:
            text.rows.release()

    def _sprout(self, request: Request, guesses: int) -> Sprout | None:
        """What the draft is to continue; None where it cannot follow in this step."""
        guesses = min(request.budget, guesses)
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = _Text(Rows(self._runner.pages, shared=self._shared))
        if guesses <= 0 or not self._read(text, request.shaping.tokens):
            return None
        if len(text.tokens) + guesses > self._runner.config.context:
            return None
        if not text.rows.length:
            text.rows.adopt(text.rows.known(text.tokens))
        pending = text.tokens[text.rows.length :]
        try:
            text.rows.reserve(len(pending) + self._plan.rows(guesses, guesses))
        except CacheFullError:
            return None
        # the likeliest text, whatever the request's own parameters: they speak of the target's tokens
        shaping = Shaping(SamplingParams(temperature=0.0), 0, text.tokens, 0)
        return Sprout(text.rows, pending, shaping, guesses, guesses)

    def _read(self, text: _Text, tokens: Sequence[int]) -> bool:
        """Bring the draft's tokens up to the target's text. False in the middle of a character."""
        raw = b"".join(self._target.token_bytes(token) for token in tokens[text.seen :])
        try:
            news = raw.decode()
        except UnicodeDecodeError:
            return False
        text.seen = len(tokens)
        text.text += news
        kept = max(0, len(text.tokens) - self._TAIL)
        spelt = sum(len(self._draft.token_bytes(token)) for token in text.tokens[:kept])
        encoded = text.text.encode()
        try:
            end = encoded[spelt:].decode()
        except UnicodeDecodeError:  # a token of the draft ends inside a character: cut the whole text
            kept, end = 0, text.text
        text.tokens[kept:] = self._draft.encode(end, special=True)
        common = _common_prefix(text.tokens, text.fed)
        text.rows.keep(min(common, len(text.tokens) - 1))
        text.fed = list(text.tokens)
        return bool(text.tokens)

    def _cut(self, request: Request, tree: Tree, guesses: int) -> Tree:
        """The draft's chain in the target's tokens, each with the chance of the draft's token that it ends in."""
        root = request.shaping.tokens[-1]
        pieces = [self._draft.token_bytes(token) for token in tree.tokens[1:]]
        written = b"".join(pieces).decode(errors="ignore")
        tail = list(request.shaping.tokens[-self._TAIL :])
        before = b"".join(self._target.token_bytes(token) for token in tail).decode(errors="ignore")
        found = self._target.encode(before + written, special=True)
        if found[: len(tail)] != tail:  # the text so far was not cut as it would be now
            tail, found = [], self._target.encode(written, special=True)
        found = found[len(tail) : -1][: min(guesses, request.budget)]
        ends, total = [], 0
        for piece in pieces:
            total += len(piece)
            ends.append(total)
        chances, spelt = [], 0
        for token in found:
            spelt += len(self._target.token_bytes(token))
            place = next((i for i, end in enumerate(ends) if end >= spelt), len(ends) - 1)
            chances.append(tree.chances[place + 1] if tree.chances else 1.0)
        return Tree.chain(root, found, chances=chances)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
