"""Grammars: which tokens may come next in a text that has to be JSON, or match an expression (llguidance).

A mask is a function of the tokens written and of the path in the draft tree, so that the draw at every node is the one
that plain decoding would make there, and verification needs to know nothing of it. Guesses that the grammar forbids are
taken out before the target sees them, and tokens that it forces are guesses for free.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.params import Constraint, ParameterError
from outrider.core.sampling import DrawError
from outrider.core.tree import Tree
from outrider.models.tokenizer import Tokenizer

__all__ = ["FORCED", "Grammar", "Grammars"]

_KEPT = 64  # compiled grammars that are remembered
_LARGEST = 1 << 20  # characters of one
FORCED = "grammar"  # who guessed a token that the grammar forces
# One way to write the spaces between values, that of Python's json: no text of nothing but spaces, and more to foresee.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """The grammars of one vocabulary. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._lock = threading.Lock()
        self._words: Any = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()

    def compile(self, constraint: Constraint) -> None:
        """Make the grammar ready, which can take a while, so that `start` need not. Raises ParameterError."""
        self._matcher(constraint)

    def start(self, constraint: Constraint, tokens: Sequence[int], prompt_length: int) -> Grammar:
        """The grammar at the start of a text; `tokens` is the sequence's own list and grows with it."""
        matcher = self._matcher(constraint).deep_copy()
        return Grammar(matcher, tokens, prompt_length, frozenset(self._tokenizer.eos), self._vocabulary)

    def _matcher(self, constraint: Constraint) -> Any:
        from llguidance import LLMatcher

        with self._lock:
            found = self._compiled.get(constraint)
            if found is not None:
                self._compiled.move_to_end(constraint)
                return found
            if self._words is None:
                self._words = _words(self._tokenizer, self._vocabulary)
        if len(constraint.text) > _LARGEST:
            raise ParameterError("grammar", f"{len(constraint.text):,} characters, and {_LARGEST:,} are allowed")
        try:
            text = _translate(constraint)
        except ValueError as error:
            raise ParameterError("grammar", f"it is not sound: {_one_line(error)}") from None
        matcher = LLMatcher(self._words, text, log_level=0)
        if matcher.is_error():
            raise ParameterError("grammar", f"it is not sound: {_one_line(matcher.get_error())}")
        with self._lock:
            self._compiled[constraint] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher


class Grammar:
    """Where one text stands in its grammar. Follows the text by itself, and looks ahead along paths of a draft tree.

    consumed by the matcher:  output committed when we looked last | ahead
    """

    def __init__(
        self, matcher: Any, tokens: Sequence[int], prompt_length: int, ends: frozenset[int], vocabulary: int
    ) -> None:
        self._matcher, self._tokens, self._ends, self._vocabulary = matcher, tokens, ends, vocabulary
        self._seen = prompt_length  # tokens of the text that are consumed for good
        self._ahead: list[int] = []
        self._masks: dict[tuple[int, ...], NDArray[np.uint32]] = {}  # by path, of this step

    def mask(self, path: Sequence[int] = ()) -> NDArray[np.uint32] | None:
        """The tokens that may come after the text and `path`; None behind a path that cannot be. [ceil(V / 32)]

        Raises DrawError if the grammar has become too complex to go on.
        """
        reached = self._go(path)
        key = tuple(path)
        found = self._masks.get(key)
        if found is None and reached:
            octets = self._matcher.compute_bitmask()
            found = np.frombuffer(octets, np.uint32)[: -(-self._vocabulary // 32)]
            self._masks[key] = found
        if self._matcher.is_error():
            raise DrawError(f"the grammar cannot go on: {_one_line(self._matcher.get_error())}")
        return found

    def fit(self, tree: Tree, *, budget: int, depth: int, rejection: bool) -> Tree:
        """The tree without what the grammar forbids, and with what it forces, within `budget` guesses and `depth`.

        Under rejection sampling, a guess that was drawn from a law stays: its test is part of the law's own account.
        """
        kept = [0]
        open_ = {0}  # nodes behind which more may come
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if parent not in open_:
                continue
            token = tree.tokens[node]
            path = [tree.tokens[n] for n in tree.path(parent)]
            allowed = self._allows(path, token)
            if allowed or (rejection and parent in tree.laws):
                kept.append(node)
            if allowed and token not in self._ends:
                open_.add(node)
        return self._forced(tree.select(kept), budget, depth)

    def _forced(self, tree: Tree, budget: int, depth: int) -> Tree:
        """Chains of the tokens that the grammar forces, at the root and at the ends of the draft."""
        tokens, parents = list(tree.tokens), list(tree.parents)
        chances = None if tree.chances is None else list(tree.chances)
        sources = list(tree.sources or ("",) * len(tree))
        children = tree.children()
        for node in range(len(tree)):
            if (children[node] and node) or node in tree.laws or len(tokens) > budget:
                continue
            path = [tree.tokens[n] for n in tree.path(node)]
            if not self._go(path) or (node and tree.tokens[node] in self._ends):
                continue
            parent = node
            forced = self._matcher.compute_ff_tokens()[: min(budget + 1 - len(tokens), depth - len(path))]
            if forced and any(tree.tokens[child] == forced[0] for child in children[node]):
                continue
            for token in forced:
                tokens.append(token)
                parents.append(parent)
                sources.append(FORCED)
                if chances is not None:
                    chances.append(chances[parent])
                parent = len(tokens) - 1
        return Tree(
            tuple(tokens), tuple(parents), tree.laws, None if chances is None else tuple(chances), tuple(sources)
        )

    def _allows(self, path: Sequence[int], token: int) -> bool:
        if token in self._ends:
            return self._go(path) and bool(self._matcher.is_accepting())
        return self._go([*path, token])

    def _go(self, path: Sequence[int]) -> bool:
        """Bring the matcher behind the text and `path`; False if it cannot get there."""
        fresh = self._tokens[self._seen :]
        if fresh:
            self._masks.clear()
        target = [*fresh, *path]
        common = 0
        while common < min(len(target), len(self._ahead)) and target[common] == self._ahead[common]:
            common += 1
        if common < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - common)
        done = common
        if common < len(target):
            done += self._matcher.try_consume_tokens(target[common:])
        self._ahead = target[:done]
        if done >= len(fresh):
            self._seen += len(fresh)
            self._ahead = self._ahead[len(fresh) :]
        return done == len(target)


def _words(tokenizer: Tokenizer, vocabulary: int) -> Any:
    """The vocabulary as llguidance wants it. About a third of a second for 49,152 tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.eos:
        raise ParameterError("grammar", "the model has no token that ends a text, so no grammar could end")

    class Vocabulary:
        eos_token_id = tokenizer.eos[0]
        bos_token_id = tokenizer.bos
        special_token_ids = [token for token in range(vocabulary) if tokenizer.is_special(token)]  # noqa: RUF012
        # a leading 0xff keeps the names of special tokens out of texts
        tokens = [  # noqa: RUF012
            (b"\xff" if tokenizer.is_special(token) else b"") + tokenizer.token_bytes(token)
            for token in range(vocabulary)
        ]

        def __call__(self, text: bytes | str) -> list[int]:
            return tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)

    return LLTokenizer(
        TokenizerWrapper(Vocabulary()),
        n_vocab=vocabulary,
        eos_token=list(tokenizer.eos),
        slices=LLTokenizer.json_slices(),
    )


def _translate(constraint: Constraint) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if constraint.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(constraint.text, overrides=_SPACES))  # type: ignore[arg-type]
    if constraint.kind == "choice":
        choices = json.loads(constraint.text)
        return str(grammar_from("lark", "start: " + " | ".join(json.dumps(choice) for choice in choices)))
    if constraint.kind == "grammar" and "::=" in constraint.text:
        return str(grammar_from("gbnf", constraint.text))
    return str(grammar_from("regex" if constraint.kind == "regex" else "lark", constraint.text))


def _one_line(error: object) -> str:
    """The message without the grammar that it shows with it, line by line."""
    lines = (line.strip() for line in str(error).splitlines())
    told = " ".join(line for line in lines if not re.match(r"\d+ \||\^+$", line)).partition("<state>")[0].strip()
    return "it leaves no token that could come next" if told == "NoExtensionBias" else told[:400]
