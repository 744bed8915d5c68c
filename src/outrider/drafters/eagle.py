"""A small head reads the target's own states and writes the guesses: EAGLE-1, -2 and -3.

Sources: Li et al. 2024 (EAGLE: features and a shifted token), 2024 (EAGLE-2, section 4: trees by cumulative confidence,
re-ranked to a budget), 2025 (EAGLE-3: states of several layers, a reduced vocabulary, training-time test). Which layers
are read, how they are fused and what the vocabulary means is data of the head (`models.heads.EagleConfig`).

Row r of the head stands for the text's token r + 1 and the target's states at r. Rows of committed tokens are fed with
the target's states, guessed ones with the head's own output; the latter are never committed:

    rows of a text:  [0, length) fed with the target's states | this step's pending ones | guesses | free

Texts that begin alike share pages of the head's rows as they share the target's. So what comes from the prefix cache is
guessed behind as if it had been fed, and a text takes no more of it than the head has rows for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.cache import CacheFullError, Rows
from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Follower, Observation, Options, Request
from outrider.drafters.head_folder import open_head, warn_of_another_target
from outrider.models.heads import Eagle
from outrider.runtime.growth import Plan, Sprout

__all__ = ["DRAFTER"]

States = NDArray[np.float32]  # [n, F], F = W * D floats of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleOptions(Options):
    max_draft_tokens: int = field(default=24, metadata={"help": "guesses per step at most"})
    head: str = field(default="", metadata={"help": "folder of the head; empty = the one shipped for this target"})
    depth: int = field(default=6, metadata={"help": "longest path of a tree"})
    width: int = field(default=8, metadata={"help": "siblings per node and nodes per level at most; 1 = a chain"})
    min_confidence: float = field(default=0.02, metadata={"help": "match only: less likely guesses are not made"})
    min_reach: float = field(
        default=0.2, metadata={"help": "match only: a level is grown if its parents are right with this chance"}
    )
    head_dtype: str = field(default="auto", metadata={"help": "fp32, bf16, int8, int4; auto = as the file has it"})


@dataclass(slots=True)
class _Text:
    """What the head has of one sequence."""

    rows: Rows
    # Position of the first row if those before the next one had none left out: distances are all that counts, and the
    # beginning of the text is worth more than true distances to it.
    origin: int
    first: int  # position of the first of the states
    parts: list[States]  # of rows to be fed, and of the last one that was, as they came
    known: int  # positions before this one have been seen

    def states(self) -> States:
        """All of them. [known - first, F]"""
        if len(self.parts) > 1:
            self.parts = [np.concatenate(self.parts)]
        return self.parts[0]

    def drop(self, before: int) -> None:
        """Forget the states of the positions before this one."""
        if before > self.first:
            self.parts = [self.states()[before - self.first :].copy()]
            self.first = before

    def leave_out(self, end: int) -> None:
        """Rows before `end` that were not fed never will be: those that follow stand right behind the fed ones."""
        self.drop(end)
        self.origin = end - self.rows.length
        self.rows.shared = False  # they are not the text's first rows any more


class EagleDrafter(Follower):
    name = "eagle"
    summary = "a trained layer over the target's own states grows a tree of guesses"
    needs = "a head: shipped for smollm2-135m, or --drafter-option head=FOLDER"
    helps = "chat, prose and code alike; the best single method where there is a head"
    Options = EagleOptions

    _FLUSH = 64  # pending rows of a prompt that are fed without waiting for a proposal
    # Pending rows of a text that was not asked for so long, and how many of them are kept: feeding all of them for
    # nothing would cost what it is not asked for.
    _IDLE, _KEPT = 128, 64

    def __init__(self, options: EagleOptions, context: Context) -> None:
        if not 1 <= options.width <= 64 or not 1 <= options.depth <= 64:
            raise DrafterError("eagle: width and depth are in [1, 64]")
        if not 0 <= options.min_confidence < 1 or not 0 <= options.min_reach < 1:
            raise DrafterError("eagle: min_confidence and min_reach are in [0, 1)")
        head = open_head(Eagle, options.head, context)
        warn_of_another_target(head, context)
        self.options = options
        self.wants: tuple[int, ...] = head.config.wants
        self._plan = Plan(context.config.vocabulary, options.width, options.min_confidence, options.min_reach)
        self._head = context.target.eagle(head, context.files, options.head_dtype)
        self._shared = context.prefix_caching
        self._floats = len(self.wants) * context.config.hidden  # F
        self._target_states = context.states_bytes(len(self.wants))
        self._texts: dict[int, _Text] = {}

    @classmethod
    def forecast(cls, options: EagleOptions, context: Context) -> dict[str, int]:
        head = open_head(Eagle, options.head, context)
        forecast = context.target.eagle_bytes(head, options.head_dtype)
        return {
            **{f"head {purpose}": size for purpose, size in forecast.items()},
            "target states": context.states_bytes(len(head.config.wants)),
        }

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        trees = [Tree.root(request.shaping.tokens[-1]) for request in batch]
        sprouts = [(i, sprout) for i, request in enumerate(batch) if (sprout := self._sprout(request)) is not None]
        if sprouts:
            for (i, _), tree in zip(sprouts, self._feed([s for _, s in sprouts]), strict=True):
                trees[i] = tree
                self._trim(self._texts[batch[i].id])
        return trees

    def observe(self, step: Sequence[Observation]) -> None:
        late: list[tuple[_Text, Sprout]] = []
        for seen in step:
            text = self._see(seen)
            waiting = text.known - text.origin - text.rows.length
            if seen.pending > 1 or seen.tree is None:
                if waiting > self._FLUSH and (sprout := self._pending(seen.request, text, 0)) is not None:
                    late.append((text, sprout))
            elif waiting > self._IDLE:
                text.leave_out(text.known - self._KEPT)
        if late:
            self._feed([sprout for _, sprout in late])
            for text, _ in late:
                self._trim(text)

    def follows(self, request: Request, length: int) -> int:
        return len(self._known(request, length)) * self._head.pages.page_size

    def skip(self, request: Request, length: int) -> None:
        self.forget(request.id)
        rows = Rows(self._head.pages, shared=True)
        rows.adopt(self._known(request, length))
        self._texts[request.id] = _Text(rows, 0, length, [np.empty((0, self._floats), np.float32)], length)

    def forget(self, sequence: int) -> None:
        text = self._texts.pop(sequence, None)
        if text is not None:
            text.rows.release()

    def memory(self) -> dict[str, int]:
        held = sum(part.nbytes for text in self._texts.values() for part in text.parts)
        head = {f"head {purpose}": size for purpose, size in self._head.memory().items()}
        return {**head, "target states": self._target_states, "states": held}

    def _known(self, request: Request, length: int) -> list[int]:
        """Pages with the head's rows for the text's first `length` tokens."""
        rows = Rows(self._head.pages, shared=self._shared)
        return rows.known(request.shaping.tokens)[: length // self._head.pages.page_size]

    def _see(self, seen: Observation) -> _Text:
        """Keep the states of the rows that were committed."""
        fed = [*range(seen.pending), *[seen.pending - 1 + node for node in seen.path]]
        states = seen.hidden(fed).reshape(len(fed), -1)
        text = self._texts.get(seen.request.id)
        if text is not None and text.known < seen.start:  # steps that nobody looked at
            sprout = self._pending(seen.request, text, 0)
            if sprout is not None:
                self._feed([sprout])
            text.parts, text.first, text.known = [states[:0]], seen.start, seen.start
            text.leave_out(seen.start)
        elif text is not None and text.known != seen.start:  # the text was begun anew
            self.forget(seen.request.id)
            text = None
        if text is None:
            # rows of a text whose beginning was never seen say nothing about other texts
            rows = Rows(self._head.pages, shared=self._shared and not seen.start)
            text = self._texts[seen.request.id] = _Text(rows, seen.start, seen.start, [], seen.start)
        text.parts.append(states)
        text.known += len(fed)
        return text

    def _sprout(self, request: Request) -> Sprout | None:
        """What is grown for a request; None where the head cannot follow in this step."""
        text = self._texts.get(request.id)
        guesses = min(request.budget, self.options.max_draft_tokens)
        if text is None or guesses <= 0 or text.known != len(request.shaping.tokens) - 1:
            return None
        if text.known == text.first:  # all rows came from the cache: the state that wrote the root is not there
            return None
        return self._pending(request, text, guesses)

    def _pending(self, request: Request, text: _Text, guesses: int) -> Sprout | None:
        """The rows that were seen and not fed, at least the last one. None where there is no room for them."""
        last = min(text.known, len(request.shaping.tokens) - 1)
        text.rows.keep(last - text.origin - 1)
        start = text.origin + text.rows.length
        depth = min(guesses, self.options.depth)
        try:
            text.rows.reserve(last - start + self._plan.rows(guesses, depth))
        except CacheFullError:
            return None
        tokens = request.shaping.tokens[start + 1 : last + 1]
        states = np.ascontiguousarray(text.states()[start - text.first : last - text.first])
        return Sprout(text.rows, tokens, request.shaping, guesses, depth, request.rejection, states)

    def _feed(self, sprouts: Sequence[Sprout]) -> list[Tree]:
        trees = self._head.grow(sprouts, self._plan)
        for sprout in sprouts:
            sprout.rows.commit(len(sprout.pending))
            sprout.rows.publish(sprout.shaping.tokens)
        return trees

    def _trim(self, text: _Text) -> None:
        """Drop the states of rows that were fed, but for the last: it is fed again if a step is repeated."""
        text.drop(text.origin + text.rows.length - 1)


DRAFTER = EagleDrafter
