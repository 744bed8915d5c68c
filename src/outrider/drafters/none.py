"""No draft: plain decoding, and the baseline that everything is measured against."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.tree import Tree
from outrider.drafters import base
from outrider.drafters.base import Context, Request, Stateless

__all__ = ["DRAFTER"]


class Plain(Stateless):
    name = "none"
    summary = "plain decoding, the baseline"
    needs = "nothing"
    helps = "large batches, and text that nothing can guess"
    Options = base.Options

    def __init__(self, options: base.Options, context: Context) -> None: ...

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        return [Tree.root(request.shaping.tokens[-1]) for request in batch]


DRAFTER = Plain
