"""Text to tokens and back, exact to the byte."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from outrider.models.chat_template import ChatTemplate
from outrider.models.errors import ModelError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["BYTES_TO_CHARACTERS", "Role", "Tokenizer"]

# texts come one at a time: threads for them would only stand in the engine's way, and be warned of at each fork
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _bytes_to_characters() -> dict[int, str]:
    # GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on, in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


BYTES_TO_CHARACTERS: Final = _bytes_to_characters()
CHARACTERS_TO_BYTES: Final = {character: byte for byte, character in BYTES_TO_CHARACTERS.items()}
SPACE: Final = "\u2581"  # SentencePiece's stand-in for a space


@dataclass(frozen=True, slots=True)
class Role:
    """What a vocabulary is used for beside plain text."""

    special: frozenset[int]  # tokens that are commands and no text
    literal: frozenset[int]  # tokens whose name is their text as it is, special ones included
    unused: frozenset[int] = frozenset()  # padding of the vocabulary
    bos: int | None = None
    eos: tuple[int, ...] = ()
    adds_bos: bool = False  # a text begins with `bos`


class Tokenizer:
    """The tokenizer of a model. Safe to use from several threads.

    `byte_level` says how names of tokens spell bytes: in GPT-2's alphabet, or as SentencePiece does (`▁` and `<0x41>`).
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, role: Role, *, byte_level: bool, template: ChatTemplate | None = None
    ) -> None:
        self._backend = backend
        self._role = role
        self._byte_level = byte_level
        self._lock = threading.Lock()  # guards the switch for special tokens, which the backend keeps as state
        self._bytes: dict[int, bytes] = {}
        self.template = template
        self.bos = role.bos
        self.eos = role.eos
        self.adds_bos = role.adds_bos
        self.vocabulary: int = max(backend.get_vocab_size(), max(role.literal, default=-1) + 1)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The tokens of a text, nothing added before or after.

        A character whose bytes the vocabulary lacks (SmolLM2's lacks six control characters, such as U+0004) is left
        out, as it was in training.

        With `special`, names of special tokens in the text, such as <|im_end|>, become these tokens; without, they are
        plain text, so that nobody can smuggle one in. Raises ModelError for text that is not Unicode (lone surrogates).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ModelError(
                f"the text has a lone surrogate at character {error.start}, which is not Unicode"
            ) from None
        with self._lock:
            self._backend.encode_special_tokens = not special
            # a batch, because only that lets other threads run meanwhile: a long text takes seconds
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def prompt(self, text: str) -> list[int]:
        """The tokens of a raw prompt, written-out special tokens too; behind `bos` where the model was trained so."""
        start = [self.bos] if self.adds_bos and self.bos is not None else []
        return start + self.encode(text, special=True)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of the tokens: their bytes joined, with U+FFFD for what is not UTF-8."""
        kept = (token for token in ids if not (skip_special and token in self._role.special))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes that a token stands for, a special one for its name; none for the padding of a vocabulary."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._spell(token)
        return found

    def is_special(self, token: int) -> bool:
        """Whether the token is a command and no text."""
        return token in self._role.special

    def token_id(self, name: str) -> int | None:
        """The token of this name, such as <|im_end|>, if there is one."""
        found: int | None = self._backend.token_to_id(name)
        return found

    def name_of(self, token: int) -> str:
        """The name of a token in the vocabulary. Raises ModelError for a token outside it."""
        found: str | None = self._backend.id_to_token(token) if token >= 0 else None
        if found is None:
            raise ModelError(f"token {token} is outside the vocabulary of {self.vocabulary}")
        return found

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. `variables` are the template's own.

        Raises ModelError if the model has no template, or it refuses the messages.
        """
        if self.template is None:
            raise ModelError("the model has no chat template: give it a raw prompt, or use an instruction-tuned model")
        return self.template.render(messages, add_generation_prompt, variables)

    def chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens of a conversation's prompt. The template writes `bos` itself where it wants one."""
        return self.encode(self.apply_chat_template(messages, variables=variables), special=True)

    def to_json(self) -> str:
        """The content of a tokenizer.json that Hugging Face's libraries read."""
        text: str = self._backend.to_str()
        return text

    def fingerprint(self) -> str:
        """SHA-256 over the names of all tokens and the merges in order: the same in any file format.

        Tokens that only pad the vocabulary do not count.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        stored = json.loads(self.to_json())
        names = self._backend.get_vocab(with_added_tokens=True)
        used = sorted((token, name) for name, token in names.items() if token not in self._role.unused)
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"].get("merges", [])]
        return hashlib.sha256(json.dumps([used, merges]).encode()).hexdigest()

    def _spell(self, token: int) -> bytes:
        name: str | None = self._backend.id_to_token(token) if token >= 0 else None
        if name is None or token in self._role.unused:
            return b""
        if token in self._role.literal:
            return name.encode()
        if self._byte_level:
            return bytes(CHARACTERS_TO_BYTES[character] for character in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace(SPACE, " ").encode()
