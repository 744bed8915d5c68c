"""Log-probabilities in the two forms that clients know."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from outrider.engine.results import TokenLogprobs

__all__ = ["CompletionLogprobs", "chat_logprobs", "token_name"]

Bytes = Callable[[int], bytes]


def token_name(raw: bytes) -> str:
    """A token's text; `bytes:\\xe2\\x80` of one that holds half a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(entries: Sequence[TokenLogprobs], token_bytes: Bytes) -> dict[str, Any]:
    """`{"content": [{"token", "logprob", "bytes", "top_logprobs"}]}`"""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": token_name(raw), "logprob": logprob, "bytes": list(raw)}

    return {
        "content": [
            {**one(entry.token, entry.logprob), "top_logprobs": [one(token, value) for token, value in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """Of one text: `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, a piece at a time.

    `start`: what stands before the text, an echoed prompt.
    """

    def __init__(self, token_bytes: Bytes, is_special: Callable[[int], bool], start: str = "") -> None:
        self._bytes, self._is_special = token_bytes, is_special
        self._start, self._offset = start, len(start)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of the echoed prompt; its first token has none."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets, at = [], 0
        for token in tokens:
            offsets.append(at)
            text = decoder.decode(self._bytes(token))
            if not self._is_special(token) or self._start.startswith(text, at):  # one that the client wrote is shown
                at += len(text)
        known = self.take([entry for entry in entries if entry is not None])
        self._offset = len(self._start)
        self._decoder.reset()
        return {
            "tokens": [token_name(self._bytes(token)) for token in tokens],
            "token_logprobs": [None, *known["token_logprobs"]],
            "top_logprobs": [None, *known["top_logprobs"]],
            "text_offset": offsets,
        }

    def take(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            if not self._is_special(entry.token):
                self._offset += len(self._decoder.decode(self._bytes(entry.token)))
        name = {entry.token: token_name(self._bytes(entry.token)) for entry in entries}
        return {
            "tokens": [name[entry.token] for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {token_name(self._bytes(token)): value for token, value in entry.top}
                | {name[entry.token]: entry.logprob}
                for entry in entries
            ],
            "text_offset": offsets,
        }
