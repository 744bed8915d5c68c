"""`outrider demo`: the same text, sooner."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import DEFAULT_DRAFTER, DEFAULT_MODEL
from outrider.cli.origins import OriginPainter, wants_colour
from outrider.cli.report import tokens_per_second

if TYPE_CHECKING:
    from outrider import Engine, Result, SamplingParams

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_CODE = """\
class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("The amount must be positive.")
        self.balance = self.balance + amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("The amount must be positive.")
        if amount > self.balance:
            raise ValueError("The balance is too low.")
        self.balance = self.balance - amount
        self.history.append(("withdraw", amount))

    def show(self):
        print("Owner:", self.owner)
        print("Balance:", self.balance)
        for kind, amount in self.history:
            print(kind, amount)
"""

_PROMPTS = {
    "A code edit": f"Write this class again with the name BankAccount.\n\n```python\n{_CODE}```",
    "A question": "Why is the sky blue, and why is it red in the evening?",
}


@app.command()
def demo(
    model: Annotated[str, typer.Option("--model", "-m", help="Name or path of the model.")] = DEFAULT_MODEL,
    drafter: Annotated[str, typer.Option("--drafter", "-d", help="Drafting method.")] = DEFAULT_DRAFTER,
    draft_model: Annotated[str | None, typer.Option(help="Name or path of the second model, for draft_model.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens per answer at most.")] = 280,
) -> None:
    """Answer two built-in prompts with and without a drafter, and check that both answers are the same.

    Prints the second answer, each token marked by who wrote it. Exit code 1 if a token or a log-probability differs.

    \b
    outrider demo
    outrider demo --drafter draft_model --draft-model small.gguf
    """
    from outrider import Engine, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, logprobs=0)
    # each prompt is answered twice, and both ways shall feed it
    engine = Engine(model, drafter=drafter, draft_model=draft_model, batch_size=1, enable_prefix_caching=False)
    for _ in range(2):  # the figures below are of a warm engine, whichever way comes first
        engine.generate([_message(text) for text in _PROMPTS.values()], SamplingParams(max_tokens=32))
    print(f"{engine.files.name} ({engine.files.quantisation}), drafter {drafter}")
    painter = OriginPainter(bytes, bool, colour=wants_colour(sys.stdout))
    print(painter.legend())
    same = [_compare(engine, title, text, params) for title, text in _PROMPTS.items()]
    if not all(same):
        raise typer.Exit(1)


def _compare(engine: Engine, title: str, text: str, params: SamplingParams) -> bool:
    """Answer a prompt plainly and with the drafter, print the second answer, and whether both are the same."""
    from outrider import Speculation
    from outrider.bench.harness import difference

    prompt = _message(text)
    print(f"\n{_bold(title)}: {text.splitlines()[0]}\n")
    (plain,) = engine.generate([prompt], params, speculation=Speculation(enabled=False))
    drafted = _show(engine, prompt, params)
    found = difference(plain, drafted)
    print(
        f"\nidentical: {'yes' if found is None else f'NO, at position {found[0]}: {found[1]}'} "
        f"({len(plain.tokens)} tokens and their log-probabilities)\n"
        f"acceptance length: {drafted.mean_acceptance_length:.2f} tokens per forward of the model\n"
        f"plain: {tokens_per_second(plain):.1f} tokens/s   speculative: {tokens_per_second(drafted):.1f} tokens/s   "
        f"speed-up: {plain.seconds / drafted.seconds:.2f}x"
    )
    return found is None


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _show(engine: Engine, prompt: list[dict[str, str]], params: SamplingParams) -> Result:
    tokenizer = engine.tokenizer
    painter = OriginPainter(tokenizer.token_bytes, tokenizer.is_special, colour=wants_colour(sys.stdout))
    stream = engine.stream(prompt, params)
    for delta in stream:
        sys.stdout.write(painter.paint(delta))
        sys.stdout.flush()
    print()
    assert stream.result is not None
    return stream.result


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if wants_colour(sys.stdout) else text
