"""A tokenizer from the metadata of a GGUF file, on top of the tokenizers library.

How text is cut before merging is not in the file: only its name (`tokenizer.ggml.pre`) is. The patterns here are those
that the models were trained with; a name that is not listed is refused, since a near miss changes tokens silently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from outrider.models.chat_template import ChatTemplate
from outrider.models.errors import ModelError
from outrider.models.gguf_file import Metadata
from outrider.models.tokenizer import CHARACTERS_TO_BYTES, SPACE, Role, Tokenizer

__all__ = ["PRE_TOKENIZERS", "read_tokenizer"]

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6

# Names that end a turn or a text, whatever the file calls its one `eos`.
ENDINGS: Final = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>",
)  # fmt: skip

GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3: Final = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _cuts(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    # Digits one by one first: a space before a digit is then a piece of its own.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


PRE_TOKENIZERS: Final[dict[str, Callable[[], pre_tokenizers.PreTokenizer]]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": _cuts(QWEN2),
    "llama-bpe": _cuts(LLAMA3),
    "default": _cuts(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}


def read_tokenizer(metadata: Metadata) -> Tokenizer:
    """The tokenizer and its chat template. Raises ModelError for a kind that is not built, or an unsound vocabulary."""
    where = str(metadata.path)
    model = metadata.text("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelError(f"{where}: tokenizer {model!r} is not supported (these are: gpt2, llama)")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    kinds = metadata.integers("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise ModelError(f"{where}: {len(tokens)} tokens have {len(kinds)} token types")
    ids = {name: token for token, name in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(name for token, name in enumerate(tokens) if ids[name] != token)
        raise ModelError(f"{where}: token {twice!r} is there twice")
    role = _role(metadata, tokens, kinds, ids)
    backend = _byte_level(metadata, ids, role) if model == "gpt2" else _sentencepiece(metadata, tokens, kinds, ids)
    _add_tokens(backend, tokens, kinds)
    return Tokenizer(backend, role, byte_level=model == "gpt2", template=_template(metadata, tokens, role))


def _role(metadata: Metadata, tokens: list[str], kinds: list[int], ids: dict[str, int]) -> Role:
    special = frozenset(token for token, kind in enumerate(kinds) if kind in (CONTROL, UNKNOWN))
    defined = frozenset(token for token, kind in enumerate(kinds) if kind == USER_DEFINED)
    unused = frozenset(token for token, kind in enumerate(kinds) if kind == UNUSED)
    ends = [_token(metadata, key, len(tokens)) for key in ("eos", "eot", "eom")]
    ends += [ids[name] for name in ENDINGS if ids.get(name) in special]
    bos = _token(metadata, "bos", len(tokens))
    # Llama 3 and SentencePiece models were trained with a token at the start; a file may say otherwise.
    usual = metadata.text("tokenizer.ggml.model") == "llama" or metadata.text("tokenizer.ggml.pre", "") == "llama-bpe"
    adds_bos = metadata.flag("tokenizer.ggml.add_bos_token", usual)
    eos = tuple(dict.fromkeys(end for end in ends if end is not None))
    return Role(special, special | defined, unused, bos, eos, adds_bos)


def _token(metadata: Metadata, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    token = metadata.integer(key)
    if not 0 <= token < count:
        raise ModelError(f"{metadata.path}: {key} is {token}, outside the vocabulary of {count}")
    return token


def _byte_level(metadata: Metadata, ids: dict[str, int], role: Role) -> tokenizers.Tokenizer:
    where = str(metadata.path)
    pre = metadata.text("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"{where}: pre-tokenizer {pre!r} is not supported (these are: {', '.join(PRE_TOKENIZERS)})")
    _check_alphabet(ids, role, where)
    merges = [tuple(merge.split(" ")) for merge in metadata.texts("tokenizer.ggml.merges")]
    unknown = _token(metadata, "unknown", len(ids))
    if unknown in role.special:
        unknown = None  # a byte that the vocabulary lacks is left out, as in training: it must not become a command
    backend = _bpe(
        where,
        vocab=ids,
        merges=merges,
        ignore_merges=pre == "llama-bpe",
        unk_token=None if unknown is None else list(ids)[unknown],
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _check_alphabet(ids: dict[str, int], role: Role, where: str) -> None:
    other = role.literal | role.unused
    strange = set("".join(name for name, token in ids.items() if token not in other)) - CHARACTERS_TO_BYTES.keys()
    if strange:
        name = next(name for name, token in ids.items() if token not in other and strange & set(name))
        raise ModelError(f"{where}: token {ids[name]} is {name!r}, which is not spelled in bytes")


def _sentencepiece(
    metadata: Metadata, tokens: list[str], kinds: list[int], ids: dict[str, int]
) -> tokenizers.Tokenizer:
    where = str(metadata.path)
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(f"{where}: {len(tokens)} tokens have {len(scores)} scores")
    if kinds.count(BYTE) != 256:
        raise ModelError(f"{where}: the vocabulary has {kinds.count(BYTE)} byte tokens, not 256: text would get lost")
    if UNKNOWN not in kinds:
        raise ModelError(f"{where}: the vocabulary has no unknown token")
    plain = {name: scores[token] for token, name in enumerate(tokens) if kinds[token] == NORMAL}
    backend = _bpe(
        where,
        vocab=ids,
        merges=_merges(plain),
        unk_token=tokens[kinds.index(UNKNOWN)],
        fuse_unk=True,
        byte_fallback=True,
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges(scores: dict[str, float]) -> list[tuple[str, ...]]:
    """The merges of a SentencePiece BPE, best first: it joins the neighbours whose union has the highest score."""
    found = [
        (-score, len(left), left, right)
        for whole, score in scores.items()
        for cut in range(1, len(whole))
        if (left := whole[:cut]) in scores and (right := whole[cut:]) in scores
    ]
    found.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in found]


def _bpe(where: str, **settings: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(**settings))
    except Exception as error:  # the library raises plain Exception, with the offending token in its message
        raise ModelError(f"{where}: the tokenizer's merges are unsound: {error}") from None


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    special = [name for name, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN) and name]
    defined = [name for name, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED and name]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in defined])


def _template(metadata: Metadata, tokens: list[str], role: Role) -> ChatTemplate | None:
    if "tokenizer.chat_template" not in metadata:
        return None
    names = {"bos_token": role.bos, "eos_token": role.eos[0] if role.eos else None}
    texts = {name: tokens[token] for name, token in names.items() if token is not None}
    return ChatTemplate(metadata.text("tokenizer.chat_template"), texts)
