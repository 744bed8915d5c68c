"""The reference runner against transformers: the same logits, and the same greedy text from the real model.

transformers computes in float32, in its own order of operations; the tensors are ours, dequantised.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny
from outrider.core.cache import Rows
from outrider.core.tree import Tree
from outrider.models.config import DecoderConfig, RopeScaling
from outrider.models.load import ModelFiles, open_model
from outrider.models.registry import resolve
from outrider.models.rotary import inverse_frequencies
from outrider.runtime.reference import ReferenceRunner
from outrider.runtime.runner import Feed

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle
torch.set_num_threads(1)  # pytest may run a process per core: threads that wait for one another would crawl

FULL = bool(os.environ.get("OUTRIDER_ORACLE_FULL"))  # 20 prompts x 64 tokens instead of 4 x 16
TIE = 1e-3  # logits nearer than this may change places

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "import numpy as np\n\nx = np.",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "The three laws of thermodynamics say that",
    '{"name": "Ada", "born": 1815, "',
    "To be, or not to be,",
]
QUESTIONS = [
    "What is a prime number?",
    "Write a haiku about autumn.",
    "How do I reverse a list in Python?",
    "Name three rivers in Europe.",
    "Explain photosynthesis to a child.",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 3?",
    "Give me a recipe for pancakes.",
    "Who wrote Faust?",
    "Summarise the plot of Hamlet in one sentence.",
]


def reference_logits(files: Any, tokens: Sequence[int], scored: int) -> NDArray[np.float32]:
    """Logits after each of the last `scored` tokens, in one forward. [scored, V]"""
    runner = ReferenceRunner(files, cache_tokens=len(tokens), page_size=16)
    rows = Rows(runner.pages)
    rows.reserve(len(tokens))
    first = len(tokens) - scored
    tree = Tree.chain(tokens[first], tokens[first + 1 :])
    scores = runner.forward([Feed(rows, tokens[: first + 1], tree)])
    return np.stack([scores.logits(0, node) for node in range(scored)])


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "linear": {"rope_scaling": RopeScaling("linear", 2.5)},
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 64)},
    "yarn": {"family": "qwen2", "rope_scaling": RopeScaling("yarn", 8.0, 64)},
    "yarn-told": {
        "rope_scaling": RopeScaling("yarn", 8.0, 64, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25),
    },
}


@pytest.fixture(params=SHAPES)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelFiles, Any]:
    """The same random model, written as a Hugging Face folder, and read from it by us and by transformers."""
    files = tiny.tiny_model(tmp_path, **SHAPES[request.param])
    return files, transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()


def test_logits_equal_on_tiny_models(both: tuple[ModelFiles, Any]) -> None:
    """The logits at each of 120 positions are transformers', to 1e-4 of their spread."""
    files, model = both
    tokens = np.random.default_rng(1).integers(3, files.config.vocabulary, 120).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    got = reference_logits(files, tokens, len(tokens))
    assert np.abs(got - wanted).max() < 1e-4 * wanted.std()


def test_rope_frequencies_equal(both: tuple[ModelFiles, Any]) -> None:
    """Frequencies and attention factor are transformers', to float32's precision."""
    files, model = both
    frequencies, factor = inverse_frequencies(files.config)
    np.testing.assert_allclose(frequencies, model.model.rotary_emb.inv_freq.double().numpy(), rtol=2e-6)
    assert factor == pytest.approx(model.model.rotary_emb.attention_scaling)


@dataclass
class Dense:
    """A tensor that was dequantised once, for both sides to share."""

    values: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def float32(self) -> NDArray[np.float32]:
        return self.values


@dataclass
class Dequantised:
    config: DecoderConfig
    tensors: dict[str, Dense]
    tokens: None = None


def state_dict(files: Dequantised) -> Iterator[tuple[str, Any]]:
    """Our tensors under transformers' names, sharing their memory."""
    inner = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    inner |= {name: f"self_attn.{name}_proj" for name in "qkvo"}
    inner |= {name: f"self_attn.{name}" for name in ("q_norm", "k_norm")}
    inner |= {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    outer = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for name, tensor in files.tensors.items():
        if name in outer:
            target = outer[name] + ".weight"
        else:
            _, layer, part = name.split(".")
            kind = "bias" if part.endswith("_bias") else "weight"
            target = f"model.layers.{layer}.{inner[part.removesuffix('_bias')]}.{kind}"
        yield target, torch.from_numpy(tensor.values)
    if files.config.tied_embeddings:
        yield "lm_head.weight", torch.from_numpy(files.tensors["embed"].values)


def hugging_face(files: Dequantised) -> Any:
    """transformers' own model over the same numbers. Its GGUF reader has no part in it."""
    c = files.config
    kind = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[c.architecture]
    assert c.rope_scaling is None
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=c.vocabulary,
        hidden_size=c.hidden,
        intermediate_size=c.intermediate,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.load_state_dict(dict(state_dict(files)), assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table is no weight and was left on `meta`
    return model.eval()


def greedy(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """The oracle's own text, past the end of text too."""
    settings = transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), generation_config=settings
        )
    return out[0, len(tokens) :].tolist()


def compare_greedy(files: ModelFiles) -> str:
    """Greedy ids of both, 20 prompts x 64 tokens (or 4 x 16): equal up to a first difference between near-equal logits.

    The oracle writes; the reference reads the oracle's text in one forward and gives its own argmax after each token.
    Up to the first difference that is what it would have written itself, since its rows do not depend on how they
    were fed (test_reference.py). Returns a line that says how many texts are equal.
    """
    prompts = [files.tokenizer.encode(text) for text in PROMPTS]
    prompts += [files.tokenizer.chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    if not FULL:
        prompts = prompts[:2] + prompts[-2:]
    count = 64 if FULL else 16
    dense = Dequantised(files.config, {name: Dense(tensor.float32()) for name, tensor in files.tensors.items()})
    model = hugging_face(dense)
    equal = 0
    for prompt in prompts:
        text = greedy(model, prompt, count)
        logits = reference_logits(dense, [*prompt, *text[:-1]], count)
        differing = np.flatnonzero(logits.argmax(-1) != text)
        equal += not differing.size
        if differing.size:
            first = logits[differing[0]]
            best, other = first.max(), first[text[differing[0]]]
            assert best - other < TIE, (
                f"prompt {prompt}: token {differing[0]} differs by {best - other:.2g} in its logit"
            )
    return f"{equal} of {len(prompts)} prompts x {count} tokens equal, the others up to two logits within {TIE}"


@pytest.mark.model
def test_greedy_text_of_smollm2() -> None:
    """SmolLM2's greedy token ids are those of transformers' LlamaForCausalLM on the same dequantised weights."""
    print(compare_greedy(open_model(resolve("smollm2-135m"))))


@pytest.mark.model
@pytest.mark.skipif("OUTRIDER_TEST_QWEN" not in os.environ, reason="OUTRIDER_TEST_QWEN names no GGUF of Qwen2.5")
def test_greedy_text_of_qwen() -> None:
    """The same for a Qwen2.5 model, with its biases, and its larger vocabulary."""
    print(compare_greedy(open_model(Path(os.environ["OUTRIDER_TEST_QWEN"]))))
