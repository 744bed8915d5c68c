"""The time to first token of each turn of a conversation, with and without the prefix cache.

    python benchmarks/turns.py smollm2-135m
    python benchmarks/turns.py MODEL --turns 4 --max-tokens 64 --drafter none --json

Each way has its own engine, and they take turns. Their texts must be equal: if they are not, the
exit code is 1. The first conversation warms up and is not counted; times are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field

from outrider import Engine, Result, SamplingParams

SYSTEM = "You are a guide. " + "Answer in whole sentences, name the place, and say what it is known for. " * 12
ASKED = ("Tell me of a river.", "And of a mountain?", "Which of the two is older?", "What grows there?", "And now?")


@dataclass(slots=True)
class Talk:
    """One conversation: its messages, and the result of each turn."""

    messages: list[dict[str, str]]
    results: list[Result] = field(default_factory=list)

    def ask(self, engine: Engine, question: str, params: SamplingParams) -> None:
        self.messages.append({"role": "user", "content": question})
        (result,) = engine.generate([self.messages], params)
        self.messages.append({"role": "assistant", "content": result.text})
        self.results.append(result)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=3, help=f"of a conversation, at most {len(ASKED)}")
    parser.add_argument("--repeat", type=int, default=3, help="conversations that count")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    given = parser.parse_args()
    if not 1 <= given.turns <= len(ASKED) or given.repeat < 1:
        parser.error(f"--turns is in [1, {len(ASKED)}] and --repeat at least 1")
    engines = {
        way: Engine(given.model, drafter=given.drafter, threads=given.threads, enable_prefix_caching=way == "with")
        for way in ("with", "without")
    }
    params = SamplingParams(temperature=0.0, max_tokens=given.max_tokens)
    talks: dict[str, list[Talk]] = {way: [] for way in engines}
    for number in range(given.repeat + 1):
        opening = {"role": "system", "content": f"Conversation {number}. {SYSTEM}"}  # nothing comes from the last one
        for way in engines:
            talks[way].append(Talk([opening]))
        for question in ASKED[: given.turns]:
            for way, engine in engines.items():
                talks[way][-1].ask(engine, question, params)
    rows = []
    for turn in range(given.turns):
        row: dict[str, float] = {"turn": turn + 1}
        for way in engines:
            results = [talk.results[turn] for talk in talks[way][1:]]
            row[f"ttft_ms_{way}"] = round(1000 * statistics.median(result.ttft for result in results), 1)
        row["prompt_tokens"] = results[-1].usage.prompt_tokens
        row["cached_tokens"] = talks["with"][-1].results[turn].usage.cached_tokens
        rows.append(row)
        print(
            "turn {turn}: {prompt_tokens} prompt tokens, {cached_tokens} of them cached; TTFT {ttft_ms_with} ms with, "
            "{ttft_ms_without} ms without the prefix cache".format(**row)
        )
    same = all(
        a.tokens == b.tokens
        for one, other in zip(talks["with"], talks["without"], strict=True)
        for a, b in zip(one.results, other.results, strict=True)
    )
    print(f"texts are {'the same' if same else 'DIFFERENT'}")
    if given.json:
        print(json.dumps({"turns": rows, "same": same, "model": given.model, "drafter": given.drafter}))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
