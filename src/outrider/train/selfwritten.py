"""Prompts that the target writes itself (Magpie, Xu et al. 2024): it is given the opening of a user's turn and goes on.

A model that was tuned on conversations has learnt its users' turns as well, so what it draws there is spread like what
it was tuned on, and its answers to it are those that it gives most often.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from outrider.train.answers import Job, Writer
from outrider.train.errors import TrainError
from outrider.train.prompts import Prompt

if TYPE_CHECKING:
    from outrider.models.tokenizer import Tokenizer

__all__ = ["LONGEST", "OPENINGS", "STUBS", "follow_ups", "self_written", "self_written_stubs"]

MARK: Final = "\u2063outrider\u2063"  # stands for a user's words; nothing that a template has or changes
SHORTEST: Final = 12  # characters of a prompt
LONGEST: Final = 320  # tokens of a prompt

# What a turn begins with, and how often: the empty one leaves all to the model, the others see to kinds that are rare.
OPENINGS: Final[dict[str, float]] = {
    "": 10.0,
    "Summarize: ": 2.0,
    "Summarize the following article: ": 1.0,
    "Translate German to English: ": 1.0,
    "Write a Python function ": 1.5,
    "who ": 0.6,
    "when ": 0.6,
    "where ": 0.5,
    "what is ": 0.6,
    "how many ": 0.5,
    "Imagine you are ": 0.5,
    "Compose ": 0.4,
    "Explain ": 0.6,
    "Extract ": 0.4,
    "Solve ": 0.4,
    "Pretend to be ": 0.3,
    "Read the following passage and answer the question. ": 1.5,
}

# What a file of code begins with, and how often. It is cut behind the function's docstring.
STUBS: Final[dict[str, float]] = {
    "def ": 3.0,
    "from typing import List\n\n\ndef ": 2.0,
    "from typing import Dict, List, Optional\n\n\ndef ": 1.0,
    "import math\n\n\ndef ": 1.0,
    "import re\n\n\ndef ": 1.0,
}
# What the functions are about, which a small model does not vary of itself.
SUBJECTS: Final = (
    *("a list of integers", "two strings", "a list of strings", "a string of words", "a matrix", "a dictionary"),
    *("prime numbers", "a list of floats", "brackets in a string", "digits of a number", "a sorted list", "dates"),
    *("vowels and consonants", "a binary string", "two lists", "nested lists", "tuples", "sets", "intervals"),
    *("temperatures", "prices", "a game board", "coordinates", "roman numerals", "a text with spaces", "fractions"),
    *("palindromes", "anagrams", "the Fibonacci sequence", "factors of a number", "triangles", "a queue of tasks"),
)
ACTIONS: Final = (
    *("counts", "sorts", "filters", "compares", "checks", "converts", "finds the largest", "removes duplicates from"),
    *("sums", "encodes", "decodes", "reverses", "splits", "merges", "validates", "searches", "rounds", "groups"),
)
_STUB = re.compile(r".*?def \w+\(.*?\n +(\"\"\"|\'\'\').{20,}?\1\n", re.DOTALL)


def self_written(
    writer: Writer,
    tokenizer: Tokenizer,
    count: int,
    seed: int = 0,
    *,
    openings: dict[str, float] | None = None,
    system: str = "",
    temperature: float = 0.8,
    longest: int = LONGEST,
    cut: bool = False,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> list[Prompt]:
    """`count` user turns drawn at `temperature`, those left out that repeat another, are empty or find no end.

    `longest` bounds a turn in tokens. `system` is a system message under which the turns are drawn: what users send
    to an assistant that was told to summarise, say. It is no part of the prompts. `cut` keeps turns that find no end,
    up to their last full stop: articles are as good without their end. Raises TrainError if the model has
    no chat template, or one in which a user's words cannot be told from the rest.
    """
    turn = turn_opening(tokenizer, [{"role": "system", "content": system}] if system else [])

    def prompt(number: int, opening: str, text: str, ended: bool) -> Prompt | None:
        if not ended and cut:
            text, ended = text[: text.rfind(".") + 1], True
        if not ended or len(text.strip()) < max(SHORTEST, len(opening) + 4):
            return None
        return Prompt([{"role": "user", "content": text.strip()}], f"self {opening.strip().lower()}".strip())

    settings = (count, seed, temperature, longest)
    return _drawn(writer, tokenizer, openings or OPENINGS, lambda number: turn, prompt, settings, progress)


def follow_ups(
    writer: Writer,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    seed: int = 0,
    *,
    temperature: float = 0.8,
    longest: int = LONGEST,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> list[Prompt]:
    """Each conversation one turn longer: the target answers, and then writes what the user says to that.

    Conversations whose answer or next turn finds no end within `longest` tokens are left out.
    """

    def said(texts: Sequence[list[int]], seed: int) -> dict[int, str]:
        jobs = (Job(number, text, temperature, seed * 2**32 + number) for number, text in enumerate(texts))
        found: dict[int, str] = {}
        for done, answer in enumerate(writer(jobs, longest), start=1):
            progress(done, len(texts))
            text = tokenizer.decode(answer.answer.tolist()).strip()
            if answer.ended and text:
                found[answer.job] = text
        return found

    asked = [prompt.content for prompt in prompts if not isinstance(prompt.content, str)]
    answers = sorted(said([tokenizer.chat(messages) for messages in asked], seed).items())
    told = [[*asked[number], {"role": "assistant", "content": text}] for number, text in answers]
    turns = sorted(said([turn_opening(tokenizer, messages) for messages in told], seed + 1).items())
    return [
        Prompt([*told[number], {"role": "user", "content": text}], "self follow-up")
        for number, text in turns
        if len(text) >= SHORTEST
    ]


def self_written_stubs(
    writer: Writer,
    tokenizer: Tokenizer,
    count: int,
    seed: int = 0,
    *,
    temperature: float = 0.8,
    longest: int = LONGEST,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> list[Prompt]:
    """Python functions up to the end of their docstring, as raw text and as user turns, out of `count` drawn ones."""

    def prompt(number: int, opening: str, text: str, ended: bool) -> Prompt | None:
        found = _STUB.match(text)
        if found is None:
            return None
        stub = found.group()
        return Prompt(stub if number % 2 else [{"role": "user", "content": stub}], "self code")

    rng = random.Random(seed)
    asked: dict[int, list[int]] = {}

    def begin(number: int) -> list[int]:
        if number not in asked:
            ask = f"Write a Python function that {rng.choice(ACTIONS)} {rng.choice(SUBJECTS)}."
            ask += " Give it a docstring with examples."
            asked[number] = tokenizer.chat([{"role": "user", "content": ask}]) + tokenizer.encode("```python\n")
        return asked[number]

    return _drawn(writer, tokenizer, STUBS, begin, prompt, (count, seed, temperature, longest), progress)


def _drawn(
    writer: Writer,
    tokenizer: Tokenizer,
    weights: Mapping[str, float],
    begin: Callable[[int], list[int]],
    made: Callable[[int, str, str, bool], Prompt | None],
    settings: tuple[int, int, float, int],
    progress: Callable[[int, int], None],
) -> list[Prompt]:
    """What `made` makes of the texts that the target draws behind `begin` and an opening, each once, in order."""
    count, seed, temperature, longest = settings
    texts = list(weights)
    drawn = random.Random(seed).choices(texts, [weights[text] for text in texts], k=count)

    def jobs() -> Iterator[Job]:
        for number, opening in enumerate(drawn):
            # a token of the opening's last space would end the word before it began
            ids = begin(number) + tokenizer.encode(opening.rstrip(" "))
            yield Job(number, ids, temperature, seed * 2**32 + number)

    found: dict[str, tuple[int, Prompt]] = {}
    for done, answer in enumerate(writer(jobs(), longest), start=1):
        progress(done, count)
        opening = drawn[answer.job]
        text = opening.rstrip(" ") + tokenizer.decode(answer.answer.tolist())
        prompt = made(answer.job, opening, text, answer.ended)
        if prompt is not None and answer.job < found.get(prompt.fingerprint, (count, prompt))[0]:
            found[prompt.fingerprint] = (answer.job, prompt)
    return [prompt for _, prompt in sorted(found.values(), key=lambda pair: pair[0])]


def turn_opening(tokenizer: Tokenizer, before: Sequence[dict[str, str]] = ()) -> list[int]:
    """The tokens of a conversation up to the first character of a user's turn, behind the messages `before` it."""
    if tokenizer.template is None:
        raise TrainError("--from self: the target has no chat template; give it prompts of your own with --from jsonl")
    text = tokenizer.apply_chat_template([*before, {"role": "user", "content": MARK}])
    opening, found, _ = text.partition(MARK)
    if not found:
        raise TrainError("--from self: the target's chat template changes the user's words; use --from jsonl")
    return tokenizer.encode(opening, special=True)
