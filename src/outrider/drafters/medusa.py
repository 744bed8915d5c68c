"""Heads on the target's final state, one for each token ahead: Medusa (Cai et al. 2024).

The state that wrote the last token is read by K heads at once: head k guesses the k-th token after it, not knowing the
ones between. Their best tokens make a tree. The paper fixes its shape beforehand from accuracies on a calibration set;
here it is grown best first by the heads' own probabilities of this step, which know when a head is unsure. The guesses
are certain, not drawn, so that they are exact under both rules of verification. Above temperature 0 the target's own
noise is added to the heads' logits: equal laws then give equal tokens.

Letters: S sequences, D hidden size, K heads, V tokens of the draft vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling import DrawError
from outrider.core.shaping import Shaping
from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Follower, Observation, Options, Request
from outrider.drafters.head_folder import open_head, warn_of_another_target
from outrider.models.heads import Medusa
from outrider.runtime.medusa import MedusaHeads, forecast

__all__ = ["DRAFTER"]

_RANKS = 10  # tokens of each head that may enter a tree


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaOptions(Options):
    max_draft_tokens: int = field(default=16, metadata={"help": "guesses per step at most"})
    head: str = field(default="", metadata={"help": "folder of the heads; empty = those shipped for this target"})
    min_confidence: float = field(default=0.02, metadata={"help": "less likely guesses are not made"})
    head_dtype: str = field(default="auto", metadata={"help": "fp32, bf16, int8, int4; auto = as the file has it"})


class MedusaDrafter(Follower):
    name = "medusa"
    summary = "heads on the target's final state guess several tokens ahead at once"
    needs = "heads: shipped for smollm2-135m, or --drafter-option head=FOLDER"
    helps = "chat and prose at small cost: one pass of the heads per step, whatever the depth"
    Options = MedusaOptions

    def __init__(self, options: MedusaOptions, context: Context) -> None:
        if not 0 < options.min_confidence <= 1:
            raise DrafterError("medusa: min_confidence is in (0, 1]")
        heads = open_head(Medusa, options.head, context)
        warn_of_another_target(heads, context)
        self.options = options
        self.wants: tuple[int, ...] = heads.config.wants
        self._heads = MedusaHeads(heads, context.target, options.head_dtype)
        self._target_states = context.states_bytes(len(self.wants))
        self._states: dict[int, tuple[int, NDArray[np.float32]]] = {}  # length of the text that the state wrote, [D]

    @classmethod
    def forecast(cls, options: MedusaOptions, context: Context) -> dict[str, int]:
        heads = open_head(Medusa, options.head, context)
        return {
            "heads": forecast(heads, context.target, options.head_dtype),
            "target states": context.states_bytes(len(heads.config.wants)),
        }

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        trees = [Tree.root(request.shaping.tokens[-1]) for request in batch]
        live = [i for i, request in enumerate(batch) if self._ready(request)]
        if live:
            # [K, S, V]
            logits = self._heads.logits(np.stack([self._states[batch[i].id][1] for i in live]))
            for index, i in enumerate(live):
                trees[i] = self._tree(batch[i], logits[:, index])
        return trees

    def observe(self, step: Sequence[Observation]) -> None:
        for seen in step:
            if seen.tree is not None:  # else a part of a prompt that does not reach its end
                row = seen.pending - 1 + (seen.path[-1] if seen.path else 0)
                self._states[seen.request.id] = len(seen.request.shaping.tokens), seen.hidden([row])[0, 0]

    def forget(self, sequence: int) -> None:
        self._states.pop(sequence, None)

    def memory(self) -> dict[str, int]:
        held = sum(state.nbytes for _, state in self._states.values())
        return {"heads": self._heads.nbytes, "target states": self._target_states, "states": held}

    def _ready(self, request: Request) -> bool:
        """Whether the state that wrote the last token is at hand, and guesses are wanted."""
        length, _ = self._states.get(request.id, (0, None))
        return length == len(request.shaping.tokens) and min(request.budget, self.options.max_draft_tokens) > 0

    def _tree(self, request: Request, logits: NDArray[np.float32]) -> Tree:
        """The likeliest paths through the heads' best tokens, most likely node first. [K, V]"""
        levels: list[list[tuple[int, float]]] = []
        for depth, row in enumerate(logits):
            level = self._best(request.shaping, row, depth)
            if not level:
                break
            levels.append(level)
        most = min(request.budget, self.options.max_draft_tokens)
        tokens, parents, chances = [request.shaping.tokens[-1]], [-1], [1.0]
        heap: list[tuple[float, int, int, int, int]] = []  # -chance, order, depth, rank, parent

        def push(depth: int, rank: int, parent: int) -> None:
            if depth < len(levels) and rank < len(levels[depth]):
                chance = chances[parent] * levels[depth][rank][1]
                if chance >= self.options.min_confidence:
                    heapq.heappush(heap, (-chance, len(tokens) * _RANKS + rank, depth, rank, parent))

        push(0, 0, 0)
        while heap and len(tokens) <= most:
            negative, _, depth, rank, parent = heapq.heappop(heap)
            tokens.append(levels[depth][rank][0])
            parents.append(parent)
            chances.append(-negative)
            push(depth, rank + 1, parent)
            push(depth + 1, 0, len(tokens) - 1)
        return Tree(tuple(tokens), tuple(parents), chances=tuple(chances))

    def _best(self, shaping: Shaping, row: NDArray[np.float32], depth: int) -> list[tuple[int, float]]:
        """The tokens that the target would draw at this depth if the head were right, and how likely each is. [V]"""
        path = (shaping.tokens[-1],) * depth  # only its length matters, but for penalties
        try:
            return [(token, math.exp(sure)) for token, sure in self._heads.ranked(row, _RANKS, shaping, path)]
        except DrawError:  # broken logits, or nothing left of them: no guess, and no error that plain decoding lacks
            return []


DRAFTER = MedusaDrafter
