"""A suffix automaton that grows by one token at a time and counts occurrences (Blumer et al. 1985).

A state stands for all strings of the text that end at the same places; `link` leads to the state of the longest of its
ends that also occurs elsewhere. What followed a string is read off its state's transitions.
"""

from __future__ import annotations

__all__ = ["STATE_BYTES", "Automaton"]

# Measured: lists of four numbers and a dictionary of about one entry per state.
STATE_BYTES = 344


class Automaton:
    """Constant amortised time per token, except that counts are passed up at most `_CLIMB` links.

    A text of one repeated token would otherwise cost quadratic time. Counts further up are then too low, which only
    makes those short matches look rarer.
    """

    _CLIMB = 32

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]  # of the longest string of a state
        self.count = [0]  # occurrences of a state's strings
        self.last = 0  # the state of the whole text
        self.tokens = 0

    @property
    def bytes(self) -> int:
        """Memory held."""
        return len(self.link) * STATE_BYTES

    def add(self, token: int) -> None:
        """The text goes on with `token`."""
        nexts, links, lengths, counts = self.next, self.link, self.length, self.count
        state, new = self.last, len(links)
        nexts.append({})
        lengths.append(lengths[state] + 1)
        counts.append(0)
        while state >= 0 and token not in nexts[state]:
            nexts[state][token] = new
            state = links[state]
        if state < 0:
            links.append(0)
        else:
            old = nexts[state][token]
            length = lengths[state] + 1
            if lengths[old] == length:
                links.append(old)
            else:
                clone = new + 1
                links.append(clone)
                links.append(links[old])
                nexts.append(nexts[old].copy())
                lengths.append(length)
                counts.append(counts[old])
                links[old] = clone
                while state >= 0 and nexts[state].get(token) == old:
                    nexts[state][token] = clone
                    state = links[state]
        self.last = state = new
        self.tokens += 1
        for _ in range(self._CLIMB):
            if state <= 0:
                break
            counts[state] += 1
            state = links[state]

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Where the longest end of a foreign text lies after one more token: its state, and how long it is.

        `state` and `matched` are what the last call gave (0, 0 at first); the automaton may have grown since.
        """
        links, lengths = self.link, self.length
        while state > 0 and matched <= lengths[links[state]]:  # split since: the shorter strings have moved up
            state = links[state]
        while token not in self.next[state]:
            if state == 0:
                return 0, 0
            state = links[state]
            matched = lengths[state]
        return self.next[state][token], matched + 1
