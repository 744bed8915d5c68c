"""A second, smaller model with the same vocabulary writes the guesses.

Sources: Leviathan et al. 2023 and Chen et al. 2023 (chains, rejection); Miao et al. 2024 (SpecInfer, trees);
Li et al. 2024 (EAGLE-2, section 4: grow by cumulative confidence, then re-rank).

Under match verification the draft draws with the target's own noise, so that equal laws give equal tokens. Under
rejection it draws with noise of its own, and how many guesses a node gets is known before they are drawn: whether a
drawn token is tested never depends on which one it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.cache import CacheFullError, Rows
from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Observation, Options, Request
from outrider.drafters.retokenised import Retokenised
from outrider.models.shipped import find_shipped
from outrider.runtime.growth import Plan, Sprout

__all__ = ["DRAFTER", "difference"]

_WIDEST = 64  # siblings per node: nobody pays for more


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelOptions(Options):
    max_draft_tokens: int = field(default=5, metadata={"help": "guesses per step at most"})
    depth: int = field(default=0, metadata={"help": "longest path of a tree; 0 = as long as the guesses allow"})
    width: int = field(default=1, metadata={"help": "siblings per node and nodes per level at most; 1 = a chain"})
    min_probability: float = field(
        default=0.0, metadata={"help": "match only: a path less likely than this under the draft is not extended"}
    )
    retokenise: bool = field(
        default=False, metadata={"help": "let a draft of another tokenizer guess text, which is cut into tokens anew"}
    )


class DraftModel:
    name = "draft_model"
    summary = "a second, smaller model guesses, of the same vocabulary or by its text"
    needs = "--draft-model NAME; one is shipped for smollm2-135m"
    helps = "chat and prose, where the draft is 5 to 20 % of the target"
    Options = DraftModelOptions
    wants: tuple[int, ...] = ()

    def __init__(self, options: DraftModelOptions, context: Context) -> None:
        name = _named(context)
        if not 1 <= options.width <= _WIDEST or options.depth < 0 or not 0 <= options.min_probability < 1:
            raise DrafterError(
                f"draft_model: width is in [1, {_WIDEST}], depth at least 0 and min_probability in [0, 1)"
            )
        loaded = context.load(name)
        context.opened[loaded.files.name] = loaded.files.digest  # not the files: their tensors are packed and can go
        self.options, self.runner = options, loaded.runner
        differing = difference(context.tokenizer, loaded.tokenizer)
        self._foreign: Retokenised | None = None
        if differing is not None:
            if not options.retokenise:
                raise DrafterError(
                    f"draft_model: {differing}. Use a draft of the target's family, or let its text be cut anew: "
                    "--drafter-option retokenise=true"
                )
            if options.width > 1:
                raise DrafterError(f"draft_model: {differing}: it guesses chains only; leave out width")
            self._foreign = Retokenised(
                context.tokenizer, loaded.tokenizer, loaded.runner, shared=context.prefix_caching
            )
        self._vocabulary = min(context.config.vocabulary, self.runner.config.vocabulary)
        self._plan = Plan(context.config.vocabulary, options.width, options.min_probability)
        self._shared = context.prefix_caching
        self._rows: dict[int, Rows] = {}

    @classmethod
    def forecast(cls, options: DraftModelOptions, context: Context) -> dict[str, int]:
        return {f"draft {purpose}": size for purpose, size in context.forecast(_named(context)).items()}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        if self._foreign is not None:
            return self._foreign.propose(batch, self.options.max_draft_tokens)
        trees = [Tree.root(request.shaping.tokens[-1]) for request in batch]
        sprouts = [(i, sprout) for i, request in enumerate(batch) if (sprout := self._sprout(request)) is not None]
        if not sprouts:
            return trees
        grown = self.runner.grow([sprout for _, sprout in sprouts], self._plan)
        for (i, sprout), tree in zip(sprouts, grown, strict=True):
            sprout.rows.commit(len(sprout.pending))
            sprout.rows.publish(sprout.shaping.tokens)
            trees[i] = tree
        return trees

    def observe(self, step: Sequence[Observation]) -> None: ...

    def forget(self, sequence: int) -> None:
        if self._foreign is not None:
            self._foreign.forget(sequence)
        rows = self._rows.pop(sequence, None)
        if rows is not None:
            rows.release()

    def memory(self) -> dict[str, int]:
        return {f"draft {purpose}": size for purpose, size in self.runner.memory().items()}

    def _sprout(self, request: Request) -> Sprout | None:
        """What is grown for a request; None where the draft cannot follow in this step."""
        tokens = request.shaping.tokens
        guesses = min(request.budget, self.options.max_draft_tokens)
        depth = min(guesses, self.options.depth or guesses)
        if guesses <= 0 or len(tokens) + depth > self.runner.config.context:
            return None
        rows = self._rows.get(request.id)
        if rows is None:
            rows = self._rows[request.id] = Rows(self.runner.pages, shared=self._shared)
            rows.adopt(rows.known(tokens))
        rows.keep(len(tokens) - 1)  # a step that is run again feeds the last token again
        pending = tokens[rows.length :]
        if max(pending) >= self._vocabulary:  # padding ids that the draft has no row for
            return None
        try:
            rows.reserve(len(pending) + self._plan.rows(guesses, depth))
        except CacheFullError:
            return None
        return Sprout(rows, pending, request.shaping, guesses, depth, request.rejection)


def _named(context: Context) -> str:
    name = context.draft_model or find_shipped("draft", context.files.sha256())
    if name is None:
        raise DrafterError("draft_model: no draft named; pass --draft-model NAME (draft_model= in Python)")
    return str(name)


def difference(target: object, draft: object) -> str | None:
    """How the tokenizers differ, with the first tokens; None if they are one. Padding of either does not matter."""
    if target.fingerprint() == draft.fingerprint():  # type: ignore[attr-defined]
        return None
    shared = min(target.vocabulary, draft.vocabulary)  # type: ignore[attr-defined]
    differing = [
        f"{i}: {target.token_bytes(i)!r} / {draft.token_bytes(i)!r}"  # type: ignore[attr-defined]
        for i in range(shared)
        if target.token_bytes(i) != draft.token_bytes(i)  # type: ignore[attr-defined]
    ]
    if not differing:
        return None
    return (
        f"the draft has another tokenizer: {len(differing):,} of {shared:,} tokens differ, first "
        f"{'; '.join(differing[:3])} (target / draft)"
    )


DRAFTER = DraftModel
