"""Who runs in the next step, with how many rows.

Every step feeds each running sequence its pending tokens: one while it decodes, a chunk while it is prefilled. The
rows of all prefill chunks of a step together stay within `prefill_chunk`, so that decoding never starves behind a long
prompt. A text that begins as others did takes their cache rows over, whenever there are more of them than it has
itself: at its first chunk, at a later one where another is ahead of it, or after a preemption.

When pages run out, drafts are given up first; then the youngest sequence is preempted: it gives its pages back and is
fed again later, from its first token that is no longer cached. Neither can be seen in the text. Nobody overtakes: a
sequence that has to wait for pages is the next to get them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from outrider.core.cache import CacheFullError
from outrider.core.sequence import Sequence

__all__ = ["Scheduler", "Turn"]


@dataclass(slots=True)
class Turn:
    """One sequence's part in a step."""

    sequence: Sequence
    rows: int  # pending tokens fed
    scored: bool  # whether the last of them is the sequence's last token


class Scheduler:
    """First come, first served; at most `batch_size` sequences at once.

    `known` names the pages of others that a sequence may take over now, and `reuse` lets it do so.
    """

    def __init__(
        self,
        batch_size: int,
        prefill_chunk: int,
        known: Callable[[Sequence], list[int]],
        reuse: Callable[[Sequence], None],
    ) -> None:
        self.batch_size, self.prefill_chunk = batch_size, prefill_chunk
        self._known, self._reuse = known, reuse
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """A sequence has finished or was cancelled: its pages are free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.rows.release()

    def pick(self) -> tuple[list[Turn], list[Sequence]]:
        """The turns of the next step, their rows reserved, and the sequences that had to be preempted for them."""
        while self.waiting and len(self.running) < self.batch_size and self._fits(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        turns: list[Turn] = []
        preempted: list[Sequence] = []
        budget = self.prefill_chunk
        for sequence in list(self.running):
            if sequence not in self.running:  # preempted for an older one
                continue
            left = len(sequence.tokens) - sequence.rows.length
            if left > 1:
                self._reuse(sequence)
                left = len(sequence.tokens) - sequence.rows.length
            rows = left if left == 1 else min(left, budget)
            if not rows or not self._reserve(sequence, rows, preempted):
                continue
            if left > 1:
                budget -= rows
            turns.append(Turn(sequence, rows, rows == left))
        return turns, preempted

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the free pages hold the whole text so far: no prefill begins that cannot end. Alone, any may try.

        Pages that others hold and the text shares cost nothing; those that are only cached are among the free ones.
        """
        if not self.running:
            return True
        pool = sequence.rows.pool
        shared = sum(pool.held(page) for page in self._known(sequence))
        return -(-(len(sequence.tokens) + 1) // pool.page_size) - shared <= pool.free

    def _reserve(self, sequence: Sequence, rows: int, preempted: list[Sequence]) -> bool:
        while True:
            try:
                sequence.rows.reserve(rows)
            except CacheFullError:
                victim = self.running.pop()
                victim.rows.release()
                self.waiting.appendleft(victim)
                self.preemptions += 1
                preempted.append(victim)
                if victim is sequence:
                    return False
            else:
                return True
