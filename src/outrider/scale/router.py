"""Which upstream writes a text: the one with the least to do, or the one whose cache has the text's beginning."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from outrider.scale.upstream import Upstream

__all__ = ["Ask", "Router", "prefixes_of", "weight_of"]

_BLOCK = 256  # characters, or token ids, of a prompt that is no conversation
_BLOCKS = 64  # of a prompt that are looked up
_BYTES_PER_TOKEN = 4  # about
_USUAL_OUTPUT = 256  # tokens, where the request sets no limit


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as it is to be asked: checked, and not yet the upstream's."""

    path: str
    body: Mapping[str, Any]
    texts: int
    weight: int  # tokens to read and to write, about
    prefixes: Sequence[tuple[bytes, int]] = field(default=(), repr=False)  # of `prefixes_of`
    with_usage: bool = True  # whether the client wants the usage in its stream
    plain: bool = False  # whether the client wants no speculation


def prefixes_of(body: Mapping[str, Any]) -> tuple[tuple[bytes, int], ...]:
    """What stands for the beginnings of a prompt, shortest first, and about how many tokens each has.

    Of a conversation there is one after each message, of another prompt one after each block.
    """
    parts: list[str]
    messages = body.get("messages")
    if messages is not None:
        parts = [json.dumps(message, sort_keys=True) for message in messages]
        parts[0] = json.dumps(body.get("tools")) + parts[0]
    else:
        prompt = body["prompt"]
        first = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else prompt
        parts = [str(first[i : i + _BLOCK]) for i in range(0, min(len(first), _BLOCK * _BLOCKS), _BLOCK)]
    state, size, out = blake2b(digest_size=16), 0, []
    for part in parts:
        content = part.encode("utf-8", "surrogatepass")
        state.update(content + b"\0")
        size += len(content)
        out.append((state.digest(), size // _BYTES_PER_TOKEN))
    return tuple(out)


def weight_of(body: Mapping[str, Any], texts: int, size: int) -> int:
    """Tokens, about, of a request of `size` bytes."""
    wanted = body.get("max_completion_tokens") or body.get("max_tokens") or _USUAL_OUTPUT
    return size // _BYTES_PER_TOKEN + texts * min(int(wanted), 16 * _USUAL_OUTPUT)


class Router:
    """Remembers where beginnings were read last. Nothing else depends on anything but the upstreams given."""

    _REMEMBERED = 65_536
    _SLACK = 256  # tokens that a home may have to do more than the idlest one, whatever it saves

    def __init__(self) -> None:
        self._homes: OrderedDict[bytes, Upstream] = OrderedDict()
        self._asked = 0

    def choose(self, ask: Ask, upstreams: Sequence[Upstream]) -> Upstream:
        """One of them. A conversation stays where it is, unless that costs more waiting than it saves reading."""
        idlest = min(upstreams, key=lambda upstream: (upstream.outstanding, upstream.used))
        chosen = idlest
        for prefix, saved in reversed(ask.prefixes):
            home = self._homes.get(prefix)
            if home is None or home not in upstreams:
                continue
            if home.outstanding - idlest.outstanding <= self._SLACK + saved:
                chosen = home
            break
        self._asked += 1
        chosen.used = self._asked
        self._remember(ask, chosen)
        return chosen

    def _remember(self, ask: Ask, upstream: Upstream) -> None:
        for prefix, _ in ask.prefixes:
            self._homes[prefix] = upstream
            self._homes.move_to_end(prefix)
        while len(self._homes) > self._REMEMBERED:
            self._homes.popitem(last=False)
