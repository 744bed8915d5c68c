"""The true text, made wrong on purpose: for experiments that set the acceptance and measure what it is worth.

The truth is what plain decoding wrote. A guess at depth d of a draft is the true token with the probability that was
set for that depth, and another token otherwise. Whether it is right is a pure function of (seed, request's seed,
position): each position is tested at most once, so the guesses that are tested are right independently of each other,
as the formula of Leviathan et al. 2023 (section 3.1) assumes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.core.tree import Tree
from outrider.drafters.base import Context, DrafterError, Options, Request, Stateless

__all__ = ["DRAFTER"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(Options):
    acceptance: str = field(default="0.8", metadata={"help": "chance that a guess is right; A,B,... by depth"})
    truth: str = field(
        default="",
        metadata={"help": "file of `outrider generate --json` results; empty = the request's own prediction"},
    )
    seed: int = field(default=0, metadata={"help": "of which guesses are wrong"})


class Replay(Stateless):
    name = "replay"
    summary = "the true text, wrong with a set probability: for experiments"
    needs = "what plain decoding wrote: --drafter-option truth=FILE, or `prediction` in a request"
    helps = "measuring what an acceptance rate is worth on a machine"
    Options = ReplayOptions

    def __init__(self, options: ReplayOptions, context: Context) -> None:
        self.options = options
        self._acceptance = _chances(options.acceptance)
        self._vocabulary = context.config.vocabulary
        self._truths = _read(Path(options.truth)) if options.truth else {}

    def propose(self, batch: Sequence[Request]) -> list[Tree]:
        return [self._guess(request) for request in batch]

    def _guess(self, request: Request) -> Tree:
        shaping = request.shaping
        tokens, start = shaping.tokens, shaping.prompt_length
        truth = request.prediction or self._truths.get(tuple(tokens[:start]), ())
        written = len(tokens) - start
        if not truth or list(truth[:written]) != list(tokens[start:]):  # nothing is known of where the text goes now
            return Tree.root(tokens[-1])
        count = min(request.budget, self.options.max_draft_tokens)
        guesses = [
            self._replayed(token, shaping.seed, written + depth, depth)
            for depth, token in enumerate(truth[written : written + count])
        ]
        return Tree.chain(tokens[-1], guesses)

    def _replayed(self, token: int, seed: int, position: int, depth: int) -> int:
        chance = self._acceptance[min(depth, len(self._acceptance) - 1)]
        drawn = random.Random(f"{self.options.seed} {seed} {position}").random()
        return token if drawn < chance else (token + 1) % self._vocabulary


def _chances(text: str) -> list[float]:
    try:
        chances = [float(part) for part in str(text).split(",")]
    except ValueError:
        chances = []
    if not chances or not all(0 <= chance <= 1 for chance in chances):
        raise DrafterError(f"replay: acceptance {text!r} is not a number in [0, 1], or several with commas between")
    return chances


def _read(path: Path) -> dict[tuple[int, ...], list[int]]:
    """True outputs by the tokens of their prompts. One JSON object, a list of them, or one per line."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DrafterError(f"replay: truth {path} cannot be read: {error}") from None
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        try:
            found = [json.loads(line) for line in text.split("\n") if line.strip()]
        except (ValueError, RecursionError) as error:
            raise DrafterError(f"replay: truth {path} is not JSON: {error}") from None
    out: dict[tuple[int, ...], list[int]] = {}
    for entry in found if isinstance(found, list) else [found]:
        if not isinstance(entry, dict) or not all(_ids(entry.get(key)) for key in ("prompt_tokens", "tokens")):
            raise DrafterError(
                f"replay: truth {path} has no 'prompt_tokens' and 'tokens': give `outrider generate --json`'s output"
            )
        out[tuple(entry["prompt_tokens"])] = entry["tokens"]
    return out


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


DRAFTER = Replay
