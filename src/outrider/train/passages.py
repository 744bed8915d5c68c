"""Prompts from texts of your own: summaries, questions on passages, rewriting, translations.

A paragraph is what blank lines set apart, or the paragraphs of an HTML file. Headings, tables, lists of names and lines
of code are left out: a paragraph is kept if it is whole sentences.
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

from outrider.train.errors import TrainError
from outrider.train.prompts import Prompt, read_prompts

__all__ = ["ASKS", "passages"]

Document = list[str]  # its paragraphs, in order
Ask = Callable[[Sequence[Document], random.Random], Iterator[str]]

_END: Final = re.compile(r"(?<=[.!?])[\"'”’]?\s+(?=[\"'“‘A-ZÄÖÜ])")
_BOUNDARY: Final = re.compile(r"\n\s*\n|\n%\n")  # blank lines; what parts the entries of a fortune file
_NAME: Final = re.compile(r"(?<![.!?] )(?<!^)\b[A-Z][a-z]{3,}(?: [A-Z][a-z]+)*")
LONGEST: Final = 3400  # characters of what is asked about, as benchmarks of summaries and of retrieved passages have


def passages(files: Sequence[Path], ask: str, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """Prompts on the paragraphs of UTF-8 files, shuffled by `seed`.

    A file is plain text, `.html`, `.gz` of either, or `.jsonl` with prompts, each of which is a document of its own.
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
    documents = [document for path in files for document in _documents(path)]
    prompts = [Prompt([{"role": "user", "content": text}], kind) for text in made(documents, rng)]
    if not prompts:
        raise TrainError(f"{', '.join(map(str, files)) or 'no file'}: no paragraph of whole sentences lies there")
    rng.shuffle(prompts)
    return prompts[:limit]


def _documents(path: Path) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        for prompt in read_prompts([path]):
            content = prompt.content
            yield _prose(_BOUNDARY.split(content if isinstance(content, str) else content[-1]["content"]))
        return
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise TrainError(f"{path}: not valid UTF-8 at byte {error.start}; convert it to UTF-8") from None
    if ".html" in path.suffixes:
        reader = _Html()
        reader.feed(text)
        reader.close()
        yield _prose(reader.blocks)
    else:
        yield _prose(_BOUNDARY.split(text))


class _Html(HTMLParser):
    """Collects what stands in the `<p>` elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self.blocks.append("")
            self._inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.blocks[-1] += data


def _prose(blocks: Sequence[str]) -> Document:
    """The blocks that are prose, white space evened out; a very long one is cut into its sentences, four at a time."""
    found: Document = []
    for block in blocks:
        text = " ".join(block.split())
        if len(text) <= LONGEST:
            found.append(text)
        else:
            sentences = _END.split(text)
            found += [" ".join(sentences[at : at + 4]) for at in range(0, len(sentences), 4)]
    return [text for text in found if _is_prose(text)]


def _is_prose(text: str) -> bool:
    """Whole sentences: mostly letters and spaces, a capital first, a full stop last."""
    letters = sum(character.isalpha() or character == " " for character in text)
    return len(text) >= 40 and letters >= 0.9 * len(text) and text[0].isupper() and text[-1] in ".!?"


def _joined(documents: Sequence[Document], rng: random.Random, longest: int) -> Iterator[str]:
    """Neighbours of one document joined to passages of 300 to `longest` characters, of all lengths in between."""
    for document in documents:
        taken: list[str] = []
        wanted = rng.randint(300, longest)
        for paragraph in (*document, ""):
            if len(paragraph) > longest:
                continue
            taken.append(paragraph)
            size = sum(map(len, taken))
            if size >= wanted or (not paragraph and size >= 300):
                text = " ".join(taken).strip()
                yield text if len(text) <= longest else text[:longest].rsplit(". ", 1)[0].rstrip(".") + "."
                taken, wanted = [], rng.randint(300, longest)


def _summarize(documents: Sequence[Document], rng: random.Random) -> Iterator[str]:
    before = (
        *("Summarize: ",) * 6,
        *("Summarize the following article: ", "Summarize this text in three sentences.\n\n", "TL;DR of this: "),
        "What is the following text about? Give the main points.\n\n",
        "Write a short summary of the article below.\n\n",
    )
    after = ("\n\nSummarize the text above.", "\n\nWhat are the key points?", "\n\nGive me a one-sentence summary.")
    for text in _joined(documents, rng, LONGEST):
        yield f"{text}{rng.choice(after)}" if rng.random() < 0.15 else f"{rng.choice(before)}{text}"


def _question(documents: Sequence[Document], rng: random.Random) -> Iterator[str]:
    """Passages from several places, and a question on a name in one of them."""
    texts = list(_joined(documents, rng, 1100))
    for text in texts:
        names = _NAME.findall(text)
        if not names:
            continue
        shown = [text, *rng.sample(texts, min(len(texts), rng.randint(1, 3)))]
        rng.shuffle(shown)
        name = rng.choice(names)
        question = rng.choice(
            (
                *(f"What is {name}?", f"what is said about {name}", f"Why is {name} important?", f"who is {name}"),
                *(
                    f"when is {name} used?",
                    f"what happened to {name}",
                    f"where does {name} come from",
                    f"how is {name}",
                ),
                *(f"who was involved with {name}", f"what does {name} mean in the text", f"when was {name}"),
            )
        )
        if rng.random() < 0.2:
            numbered = "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(shown, start=1))
            yield f"Answer the question with the passages below.\n\n{numbered}\n\nQuestion: {question}"
        else:
            yield "\n".join((*shown, question))


def _rewrite(documents: Sequence[Document], rng: random.Random) -> Iterator[str]:
    """Passages to say again in other words, or to take something out of."""
    for text in _joined(documents, rng, 900):
        yield rng.choice(
            (
                f"Rewrite this text in simpler words.\n\n{text}",
                f"Correct the grammar of this text:\n\n{text}",
                f"Make this more concise: {text}",
                f"Rewrite the following passage as a letter to a friend.\n\n{text}",
                f"Extract all names of people, places and things from this text as a list.\n\n{text}",
                f"Turn this text into a list of bullet points.\n\n{text}",
                f"Extract the most important facts from the text and return them as JSON.\n\n{text}",
                f"What is the tone of this passage? Explain with quotes.\n\n{text}",
                f"{text}\n\nContinue this text.",
                f"{text}\n\nWrite three questions about this text, and answer them.",
            )
        )


def _translate(language: str) -> Ask:
    def ask(documents: Sequence[Document], rng: random.Random) -> Iterator[str]:
        for document in documents:
            for paragraph in document:
                for sentence in _END.split(paragraph):
                    if 40 <= len(sentence) <= 260 and _is_prose(sentence.strip()):
                        yield f"Translate {language} to English: {sentence.strip()}"

    return ask


ASKS: Final[Mapping[str, Ask]] = {"summarize": _summarize, "question": _question, "rewrite": _rewrite}
