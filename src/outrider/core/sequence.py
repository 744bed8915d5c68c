"""One text in the making: its tokens, its cache rows and the one place where it is cut.

    tokens:  [0, prompt_length) prompt | [prompt_length, len) output
    rows:    [0, rows.length) cached   | pending = tokens[rows.length:], fed with the next step; the last is the root

`rows.length < len(tokens)` always: the token that closed the last step has been drawn, and not yet fed.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from outrider.core.cache import Rows
from outrider.core.shaping import Draw, Shaping

__all__ = ["Cut", "Sequence", "Text"]


class Text(Protocol):
    """The growing text of a sequence, as far as the cut needs to know it."""

    def push(self, token: int) -> str | None:
        """Append a token. The stop string that its text completes, or None."""
        ...

    def end(self, token: int | None) -> None:
        """No further token comes. `token` is the one that ended the text, if one did."""
        ...


@dataclass(slots=True)
class Cut:
    """Where a run of drawn tokens ends: the first `kept` of them belong to the text."""

    kept: int
    finish_reason: str | None = None  # stop | length
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Sequence:
    """State of one request. Everything that a step reads or changes about it."""

    id: int
    shaping: Shaping
    rows: Rows
    text: Text
    limit: int  # tokens that the text may have in all: the context
    draws: list[Draw] = field(default_factory=list)  # of the output tokens
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def tokens(self) -> Seq[int]:
        return self.shaping.tokens

    @property
    def output_length(self) -> int:
        return len(self.shaping.tokens) - self.shaping.prompt_length

    def pending(self) -> Seq[int]:
        """Tokens that are committed and not cached, the root last. Never empty."""
        return self.shaping.tokens[self.rows.length :]

    def room(self) -> int:
        """How many tokens the text may still grow by: `max_tokens` and the context limit."""
        return min(self.shaping.params.max_tokens - self.output_length, self.limit - len(self.shaping.tokens))

    def extend(self, draws: Iterable[Draw]) -> Cut:
        """Append drawn tokens up to the first that ends the text. Tokens, draws, text and reason are all cut there.

        The order of the checks at one token is that of plain decoding: a token that ends the text, then a stop
        string, then the length. Neither of the first two counts before `min_tokens`.
        """
        if self.room() <= 0:  # of a prompt that was to be judged only
            self.text.end(None)
            self.finish_reason = "length"
            return Cut(0, self.finish_reason)
        params = self.shaping.params
        tokens: list[int] = self.shaping.tokens  # type: ignore[assignment]  # the sequence owns this list
        kept = 0
        for draw in draws:
            tokens.append(draw.token)
            self.draws.append(draw)
            kept += 1
            stop = self.text.push(draw.token)
            early = self.output_length < params.min_tokens
            if draw.token in self.shaping.ends and not early:
                self.text.end(draw.token)
                self.finish_reason, self.stop_reason = "stop", draw.token
            elif stop is not None and not early:
                self.text.end(None)
                self.finish_reason, self.stop_reason = "stop", stop
            elif self.room() <= 0:
                self.text.end(None)
                self.finish_reason = "length"
            else:
                continue
            break
        return Cut(kept, self.finish_reason, self.stop_reason)
