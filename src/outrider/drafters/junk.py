"""Random trees, for tests: whatever is proposed, the text must not change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Options, Request, Stateless

__all__ = ["DRAFTER"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JunkOptions(Options):
    seed: int = field(default=0, metadata={"help": "of the random trees"})
    chain: bool = field(default=False, metadata={"help": "chains only"})
    alphabet: int = field(
        default=0, metadata={"help": "guess among the first so many tokens; 0 = the whole vocabulary"}
    )


class Junk(Stateless):
    name = "junk"
    summary = "random trees, to test that nothing changes the text"
    needs = "nothing"
    helps = "never"
    Options = JunkOptions

    def __init__(self, options: JunkOptions, context: Context) -> None:
        if options.alphabet < 0:
            raise DrafterError(f"junk: alphabet {options.alphabet} is below 0")
        self.options = options
        self._alphabet = min(options.alphabet or context.config.vocabulary, context.config.vocabulary)

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        return [self._tree(request) for request in batch]

    def _tree(self, request: Request) -> Tree:
        tokens = request.shaping.tokens
        rng = random.Random(f"{self.options.seed} {request.shaping.seed} {len(tokens)}")
        size = rng.randint(0, min(request.budget, self.options.max_draft_tokens))
        nodes, parents = [tokens[-1]], [-1]
        taken: set[tuple[int, int]] = set()
        for node in range(1, size + 1):
            parent = node - 1 if self.options.chain else rng.randrange(node)
            # half of the guesses come from the text, so that some are accepted
            token = rng.choice(tokens) if rng.random() < 0.5 else rng.randrange(self._alphabet)
            if (parent, token) in taken:
                break
            taken.add((parent, token))
            nodes.append(token)
            parents.append(parent)
        return Tree(tuple(nodes), tuple(parents))


DRAFTER = Junk
