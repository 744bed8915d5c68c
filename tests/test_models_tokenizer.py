"""Tokens: the ids of llama.cpp, exact bytes, no smuggled commands, and prompts as the templates say.

tokenizer_ids.json comes from fixtures/make_tokenizer_ids.py.
"""

from __future__ import annotations

import json
import os
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.models.chat_template import ChatTemplate
from outrider.models.errors import ModelError
from outrider.models.gguf_file import GgufFile, Metadata
from outrider.models.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer
from outrider.models.load import open_model
from outrider.models.registry import resolve
from outrider.models.tokenizer import Tokenizer
from tiny import tiny_config, tiny_model, tokenizer_metadata, write_gguf, write_hf

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "tokenizer_ids.json").read_text())
TEXTS: list[str] = FIXTURE["texts"]
QWEN = "OUTRIDER_TEST_QWEN"  # the path of a Qwen2.5-Coder-0.5B-Instruct GGUF; its tests are skipped without

# SmolLM2's vocabulary has no token for these control characters, nor for bytes that UTF-8 hardly or never uses.
SMOLLM2_LACKS = {4, 6, 19, 20, 22, 29, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}


@lru_cache(maxsize=1)
def smollm2() -> Metadata:
    return GgufFile(resolve("smollm2-135m")).metadata


@lru_cache(maxsize=8)
def smollm2_tokenizer(cut: str = "smollm") -> Tokenizer:
    """SmolLM2's vocabulary with any way of cutting text."""
    metadata = smollm2()
    return read_tokenizer(Metadata(metadata.path, metadata.pairs | {"tokenizer.ggml.pre": cut}))


def toy() -> Tokenizer:
    """The toy SentencePiece vocabulary of the fixture."""
    stored = FIXTURE["toy"]
    pairs = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": stored["tokens"],
        "tokenizer.ggml.token_type": np.array(stored["kinds"], np.int32),
        "tokenizer.ggml.scores": np.array(stored["scores"], np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return read_tokenizer(Metadata(Path("toy"), pairs))


def differing(tokenizer: Tokenizer, name: str) -> list[str]:
    """The texts whose ids are not llama.cpp's."""
    wanted = FIXTURE["ids"][name]
    return [text for text, ids in zip(TEXTS, wanted, strict=True) if tokenizer.encode(text) != ids]


def test_the_corpus_is_large_and_tricky() -> None:
    """The fixture has at least 200 texts, and the ways of cutting differ on many of them: a wrong one would be seen."""
    assert len(TEXTS) >= 200
    ids = FIXTURE["ids"]
    for cut in ("qwen2", "llama-bpe", "gpt-2", "default"):
        assert sum(one != other for one, other in zip(ids["smollm"], ids[cut], strict=True)) > 5


@pytest.mark.model
@pytest.mark.parametrize("cut", PRE_TOKENIZERS)
def test_ids_equal_llama_cpp(cut: str) -> None:
    """Every text has llama.cpp's ids, for each way of cutting text, on SmolLM2's vocabulary."""
    assert differing(smollm2_tokenizer(cut), cut) == []


def test_sentencepiece_ids_equal_llama_cpp() -> None:
    """Every text has llama.cpp's ids with a SentencePiece BPE vocabulary, byte fallback included."""
    tokenizer = toy()
    assert differing(tokenizer, "sentencepiece") == []
    assert any(3 <= token < 259 for text in TEXTS for token in tokenizer.encode(text))


@pytest.mark.skipif(QWEN not in os.environ, reason=f"{QWEN} names no GGUF file")
def test_qwen_ids_equal_llama_cpp() -> None:
    """Every text has llama.cpp's ids with Qwen2.5-Coder's own vocabulary (composed: see the fixture's maker)."""
    tokenizer = read_tokenizer(GgufFile(Path(os.environ[QWEN])).metadata)
    assert differing(tokenizer, "qwen2.5-coder") == []
    assert {tokenizer.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}


@pytest.mark.model
def test_texts_round_trip() -> None:
    """The bytes of a text's tokens are the text's own, but for the characters that the vocabulary cannot spell."""
    tokenizer = smollm2_tokenizer()
    lacked = {chr(byte) for byte in SMOLLM2_LACKS if byte < 128}
    for text in TEXTS:
        if text != "\U00040000":  # a plane without characters, whose first byte is lacking
            spelled = "".join(character for character in text if character not in lacked)
            assert tokenizer.decode(tokenizer.encode(text)) == spelled


@pytest.mark.model
def test_all_bytes_of_smollm2() -> None:
    """Each byte that SmolLM2's vocabulary has is one token with exactly that byte; no other is claimed."""
    tokenizer = smollm2_tokenizer()
    single = [spelled for token in range(tokenizer.vocabulary) if len(spelled := tokenizer.token_bytes(token)) == 1]
    assert sorted(single) == [bytes([byte]) for byte in range(256) if byte not in SMOLLM2_LACKS]


def test_all_256_bytes_round_trip() -> None:
    """With a whole alphabet, every byte is one token, and any two-byte text comes back through its tokens' bytes."""
    tokenizer = tiny_model(vocabulary=400).tokenizer
    single = [spelled for token in range(400) if len(spelled := tokenizer.token_bytes(token)) == 1]
    assert sorted(single) == [bytes([byte]) for byte in range(256)]
    for code in range(0x80, 0x800):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(chr(code)))) == chr(code).encode()


def test_sentencepiece_bytes() -> None:
    """SentencePiece's byte tokens are their byte, its spaces are spaces, and all bytes are there."""
    tokenizer = toy()
    assert [tokenizer.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    for text in TEXTS:
        if text and "▁" not in text:
            assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == b" " + text.encode()


def test_characters_split_over_tokens() -> None:
    """A character whose bytes lie in several tokens is whole after the last one, and U+FFFD alone before."""
    tokenizer = tiny_model(vocabulary=300).tokenizer
    ids = tokenizer.encode("a😀")
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "a😀"
    assert tokenizer.decode(ids[:-1]) == "a\ufffd"


@pytest.mark.model
def test_names_of_commands_are_plain_text_unless_asked() -> None:
    """A user's <|im_end|> is text; only `special` makes it the command."""
    tokenizer = smollm2_tokenizer()
    end = tokenizer.token_id("<|im_end|>")
    text = "a<|im_end|>b"
    assert end not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert end in tokenizer.encode(text, special=True)
    assert tokenizer.decode(tokenizer.encode(text, special=True)) == "ab"
    assert tokenizer.decode(tokenizer.encode(text, special=True), skip_special=False) == text


@pytest.mark.model
def test_every_token_that_ends_a_text() -> None:
    """SmolLM2 ends a turn with <|im_end|> and a text with <|endoftext|>: both end it. No BOS is added."""
    tokenizer = smollm2_tokenizer()
    assert [tokenizer.token_bytes(token) for token in tokenizer.eos] == [b"<|im_end|>", b"<|endoftext|>"]
    assert all(tokenizer.is_special(token) for token in tokenizer.eos)
    assert not tokenizer.is_special(tokenizer.encode("a")[0])
    assert tokenizer.prompt("Hi") == tokenizer.encode("Hi")


def test_a_start_token_where_the_model_wants_one() -> None:
    """Llama models begin a raw prompt with BOS; a file may say that they do not."""
    assert toy().prompt("Hi") == [1, *toy().encode("Hi")]
    stored = tokenizer_metadata(tiny_config())
    assert read_tokenizer(Metadata(Path("m"), stored | {"tokenizer.ggml.add_bos_token": True})).prompt("Hi")[0] == 0


def test_user_defined_and_unused_tokens() -> None:
    """User-defined tokens are matched in any text and are text; unused ones are neither, and have no bytes."""
    stored = tokenizer_metadata(tiny_config(vocabulary=120))
    kinds = stored["tokenizer.ggml.token_type"].copy()
    tokens = [*stored["tokenizer.ggml.tokens"][:-2], "<tool>", "[PAD1]"]
    kinds[-2:] = (4, 5)
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    changed["tokenizer.ggml.merges"] = stored["tokenizer.ggml.merges"][:-2]
    tokenizer = read_tokenizer(Metadata(Path("m"), stored | changed))
    assert tokenizer.encode("a<tool>b")[1] == 118
    assert tokenizer.token_bytes(118) == b"<tool>"
    assert tokenizer.decode([118]) == "<tool>"
    assert 119 not in tokenizer.encode("[PAD1]", special=True)
    assert tokenizer.token_bytes(119) == b""


def test_ids_past_the_vocabulary() -> None:
    """Rows that only pad a model's vocabulary, and negative ids, have no bytes and end no program."""
    tokenizer = tiny_model().tokenizer
    assert tokenizer.token_bytes(97) == tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_lone_surrogates_are_refused() -> None:
    """Text that is not Unicode is refused with the place, not encoded into something else."""
    with pytest.raises(ModelError, match="lone surrogate at character 2"):
        tiny_model().tokenizer.encode("ab\ud800")


def test_threads_do_not_see_each_others_switch() -> None:
    """Threads that encode with and without commands at once get what each asked for."""
    tokenizer = tiny_model().tokenizer
    text = "a<|endoftext|>b"
    wanted = {special: tokenizer.encode(text, special) for special in (False, True)}
    assert wanted[False] != wanted[True]
    wrong: list[bool] = []

    def work(special: bool) -> None:
        wrong.extend(special for _ in range(2000) if tokenizer.encode(text, special) != wanted[special])

    threads = [threading.Thread(target=work, args=(special,)) for special in (False, True) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_fingerprints_tell_tokenizers_apart() -> None:
    """The same tokenizer has the same fingerprint in any file, another vocabulary or order of merges another one."""
    stored = tokenizer_metadata(tiny_config(vocabulary=300))
    plain = read_tokenizer(Metadata(Path("m"), stored))
    swapped = [*stored["tokenizer.ggml.merges"][1:], stored["tokenizer.ggml.merges"][0]]
    other = read_tokenizer(Metadata(Path("m"), stored | {"tokenizer.ggml.merges": swapped}))
    assert plain.fingerprint() == read_tokenizer(Metadata(Path("n"), stored)).fingerprint()
    assert len({plain.fingerprint(), other.fingerprint(), tiny_model().tokenizer.fingerprint()}) == 3


CHAT = [{"role": "user", "content": "Hi <b> & 'you'"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.model
def test_smollm2_chat() -> None:
    """SmolLM2's template adds its system message and opens the answer; its commands become single tokens."""
    tokenizer = smollm2_tokenizer()
    text = tokenizer.apply_chat_template(CHAT[:1])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi <b> & 'you'<|im_end|>\n<|im_start|>assistant\n")
    assert not tokenizer.apply_chat_template(CHAT, add_generation_prompt=False).endswith("assistant\n")
    ids = tokenizer.chat(CHAT[:1])
    assert ids.count(1) == 3
    assert tokenizer.decode(ids, skip_special=False) == text


TEMPLATES: list[tuple[str, dict[str, Any], str]] = [
    ("{{ messages[0]['content'] | tojson }}", {}, "\"Hi <b> & 'you'\""),
    ("{{ {'b': 1, 'a': 'é'} | tojson }}", {}, '{"b": 1, "a": "é"}'),
    ("{{ {'b': [1]} | tojson(indent=1) }}", {}, '{\n "b": [\n  1\n ]\n}'),
    (
        "{% if true %}\n  {% for m in messages %}\n{{ m.role }};\n  {% endfor %}\n{% endif %}\nx",
        {},
        "user;\nassistant;\nx",
    ),
    ("{{ bos_token }}{{ tools | length }}{{ add_generation_prompt }}", {"tools": [1, 2]}, "<s>2True"),
    ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", {}, "user"),
    ("{% generation %}a{{ messages[1].content }}{% endgeneration %}", {}, "aHello"),
    ("{{ strftime_now('%Y') | int > 2000 }}", {}, "True"),
    ("{{ undefined_thing is defined }}", {}, "False"),
]


@pytest.mark.parametrize(("source", "extra", "wanted"), TEMPLATES)
def test_templates(source: str, extra: dict[str, Any], wanted: str) -> None:
    """What templates in the wild rely on: block trimming, JSON without HTML escapes, loop controls, variables."""
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(CHAT, variables=extra) == wanted


REFUSED = [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{% if %}", "broken at line 1"),
    ("{{ messages.append(1) }}", "refuses"),
    ("{{ ''.__class__.__mro__ }}", "refuses"),
    ("{{ messages[0].content + 1 }}", "refuses"),
    ("{{ range(10 ** 9) | list }}", "refuses"),
]


@pytest.mark.parametrize(("source", "message"), REFUSED)
def test_templates_that_fail(source: str, message: str) -> None:
    """A template that raises, is broken, or reaches for what the sandbox forbids gives one error line."""
    with pytest.raises(ModelError, match=message) as caught:
        ChatTemplate(source, {}).render(CHAT)
    assert "\n" not in str(caught.value)


def test_no_template() -> None:
    """A model without a template says so, and what to do."""
    stored = tokenizer_metadata(tiny_config())
    del stored["tokenizer.chat_template"]
    with pytest.raises(ModelError, match="no chat template: give it a raw prompt"):
        read_tokenizer(Metadata(Path("m"), stored)).chat(CHAT)


@pytest.mark.parametrize("where", ["chat_template.jinja", "list", "text"])
def test_places_of_templates(tmp_path: Path, where: str) -> None:
    """A folder's template is chat_template.jinja, or in tokenizer_config.json as text or as a list of named ones."""
    folder = write_hf(tmp_path / "m", tiny_model())
    settings: dict[str, Any] = {"chat_template": "{{ eos_token }}", "eos_token": {"content": "<end>"}}
    if where == "list":
        settings["chat_template"] = [
            {"name": "tool", "template": "t"},
            {"name": "default", "template": "{{ eos_token }}"},
        ]
    if where == "chat_template.jinja":
        (folder / where).write_text("{{ eos_token }}!")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    wanted = "<end>!" if where == "chat_template.jinja" else "<end>"
    assert open_model(folder).tokenizer.apply_chat_template(CHAT) == wanted


@pytest.mark.oracle
@pytest.mark.parametrize("vocabulary", [97, 400])
def test_folders_equal_transformers(tmp_path: Path, vocabulary: int) -> None:
    """The ids, the texts and the chat prompt of a written folder are transformers' own."""
    transformers = pytest.importorskip("transformers")
    wanted = tiny_model(vocabulary=vocabulary)
    theirs = transformers.AutoTokenizer.from_pretrained(write_hf(tmp_path / "m", wanted))
    ours = open_model(tmp_path / "m").tokenizer
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == wanted.tokenizer.encode(text)
    assert ours.chat(CHAT) == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)


def test_gguf_and_folder_agree(tmp_path: Path) -> None:
    """A tokenizer that went through GGUF and one that went through tokenizer.json give the same ids for every text."""
    wanted = tiny_model(vocabulary=400)
    one = open_model(write_gguf(tmp_path / "m.gguf", wanted)).tokenizer
    other = open_model(write_hf(tmp_path / "m", wanted)).tokenizer
    assert [one.encode(text) for text in TEXTS] == [other.encode(text) for text in TEXTS]
    assert one.fingerprint() == other.fingerprint()
    assert one.eos == other.eos == (0,)


@pytest.mark.oracle
@pytest.mark.skipif(QWEN not in os.environ, reason=f"{QWEN} names no GGUF file")
def test_qwen_chat_equals_transformers() -> None:
    """Qwen2.5's template, with tools, renders as transformers renders it."""
    template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tokenizer = read_tokenizer(GgufFile(Path(os.environ[QWEN])).metadata)
    assert tokenizer.template is not None
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
    for tools in (None, [tool]):
        rendered, _ = template_utils.render_jinja_template(
            conversations=[CHAT], tools=tools, chat_template=tokenizer.template.source, add_generation_prompt=True
        )
        assert tokenizer.apply_chat_template(CHAT, variables={"tools": tools}) == rendered[0]
