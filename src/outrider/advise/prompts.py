"""The built-in prompts: two of each workload, written for this purpose."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["WORKLOADS", "Text", "built_in"]

WORKLOADS = ("chat", "code", "json", "summarise", "rag", "creative")


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, as text of the user, chat messages or token ids, and the kind of work it stands for."""

    workload: str
    prompt: str | Sequence[dict[str, str]] | Sequence[int]
    chat: bool = True  # put into the model's chat template, where it has one


def built_in(workload: str | None = None) -> list[Text]:
    """Those of a workload, or all."""
    lines = (Path(__file__).parent / "prompts.jsonl").read_text("utf-8").splitlines()
    texts = [Text(entry["workload"], entry["prompt"]) for entry in map(json.loads, lines)]
    return [text for text in texts if workload in (None, text.workload)]
