"""Prompts from plain texts of your own: summaries, questions on passages, translations.

A paragraph is what blank lines set apart. Headings, tables, lists of names and lines of code are left out: a paragraph
is kept if it is whole sentences.
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from outrider.train.errors import TrainError
from outrider.train.prompts import Prompt

__all__ = ["ASKS", "passages"]

Ask = Callable[[Sequence[str], random.Random], Iterator[str]]

_END: Final = re.compile(r"(?<=[.!?])[\"'”’]?\s+(?=[\"'“‘A-ZÄÖÜ])")
_BOUNDARY: Final = re.compile(r"\n\s*\n|\n%\n")  # blank lines; what parts the entries of a fortune file
_NAME: Final = re.compile(r"(?<![.!?] )(?<!^)\b[A-Z][a-z]{3,}(?: [A-Z][a-z]+)*")


def passages(files: Sequence[Path], ask: str, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """Prompts on the paragraphs of UTF-8 text files (`.gz` too), shuffled by `seed`.

    `ask` is one of `ASKS`, or `translate:LANGUAGE`, such as `translate:German`, for texts in that language. Raises
    TrainError, naming the file or the word.
    """
    kind, _, language = ask.partition(":")
    if kind == "translate" and language:
        made: Ask = _translate(language)
    elif ask in ASKS:
        made = ASKS[ask]
    else:
        raise TrainError(f"--ask: {ask!r} is none of {', '.join(ASKS)} and translate:LANGUAGE")
    rng = random.Random(seed)
    prompts = [
        Prompt([{"role": "user", "content": text}], kind) for path in files for text in made(_paragraphs(path), rng)
    ]
    if not prompts:
        raise TrainError(f"{', '.join(map(str, files)) or 'no file'}: no paragraph of whole sentences lies there")
    rng.shuffle(prompts)
    return prompts[:limit]


def _paragraphs(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TrainError(f"{path}: not valid UTF-8 at byte {error.start}; convert it to UTF-8") from None
    found = (" ".join(block.split()) for block in _BOUNDARY.split(text))
    return [block for block in found if _is_prose(block)]


def _is_prose(text: str) -> bool:
    """Whole sentences: mostly letters and spaces, a capital first, a full stop last."""
    letters = sum(character.isalpha() or character == " " for character in text)
    return len(text) >= 40 and letters >= 0.9 * len(text) and text[0].isupper() and text[-1] in ".!?"


def _joined(paragraphs: Sequence[str], rng: random.Random, longest: int) -> Iterator[str]:
    """Neighbours joined to passages of 300 to `longest` characters, of all lengths in between."""
    taken: list[str] = []
    wanted = rng.randint(300, longest)
    for paragraph in paragraphs:
        if len(paragraph) > longest:
            continue
        taken.append(paragraph)
        if sum(map(len, taken)) >= wanted:
            yield " ".join(taken)[:longest].rsplit(". ", 1)[0].rstrip(".") + "."
            taken, wanted = [], rng.randint(300, longest)


def _summarize(paragraphs: Sequence[str], rng: random.Random) -> Iterator[str]:
    for text in _joined(paragraphs, rng, 3200):
        yield f"Summarize: {text}"


def _question(paragraphs: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Passages from several places, and a question on a name in one of them."""
    texts = list(_joined(paragraphs, rng, 900))
    for text in texts:
        names = _NAME.findall(text)
        if not names:
            continue
        shown = [text, *rng.sample(texts, min(len(texts), rng.randint(1, 3)))]
        rng.shuffle(shown)
        name = rng.choice(names)
        question = rng.choice(
            (f"What is {name}?", f"what is said about {name}", f"Why is {name} important?", f"when is {name} used?")
        )
        yield "\n".join((*shown, question))


def _translate(language: str) -> Ask:
    def ask(paragraphs: Sequence[str], rng: random.Random) -> Iterator[str]:
        for paragraph in paragraphs:
            for sentence in _END.split(paragraph):
                if 40 <= len(sentence) <= 260 and _is_prose(sentence.strip()):
                    yield f"Translate {language} to English: {sentence.strip()}"

    return ask


ASKS: Final[Mapping[str, Ask]] = {"summarize": _summarize, "question": _question}
