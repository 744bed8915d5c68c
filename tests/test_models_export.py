"""Export to a Hugging Face folder: what comes back is the same model, for us and for transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tiny
from outrider.cli import main
from outrider.models import export
from outrider.models.config import RopeScaling
from outrider.models.errors import ModelError
from outrider.models.load import ModelFiles, open_model
from outrider.models.registry import resolve

TEXTS = ["Call me at 555-0123, please.", "naïve  Ωmega\n\n\ttabs", "x = [1, 22, 333]", "<|endoftext|>", " 7 8"]
SCALINGS = [
    None,
    RopeScaling("linear", 2.0),
    RopeScaling("llama3", 8.0, 8192),
    RopeScaling("yarn", 4.0, 256, attention_factor=1.5),
]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_same_model_comes_back(family: str, kind: str, tmp_path: Path) -> None:
    files = tiny.tiny_model(family=family, kind=kind)
    again = open_model(export.write_hf(files, tmp_path / "out"))
    assert again.config == files.config
    assert again.tensors.keys() == files.tensors.keys()
    for name, tensor in files.tensors.items():
        assert np.array_equal(again.tensors[name].float32(), tensor.float32()), name
    for text in TEXTS:
        assert again.tokenizer.prompt(text) == files.tokenizer.prompt(text)
    assert again.tokenizer.fingerprint() == files.tokenizer.fingerprint()
    assert json.loads((again.path / "config.json").read_text())["outrider"] == {"source_sha256": files.sha256()}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_stretched_frequencies_come_back(scaling: RopeScaling | None, tmp_path: Path) -> None:
    files = tiny.tiny_model(rope_scaling=scaling)
    assert open_model(export.write_hf(files, tmp_path / "out")).config.rope_scaling == scaling


def test_a_gguf_file_comes_back_with_its_rows_in_order(tmp_path: Path) -> None:
    plain = tiny.tiny_model()
    files = open_model(tiny.write_gguf(tmp_path / "tiny.gguf", plain))
    again = open_model(export.write_hf(files, tmp_path / "out"))
    for name, tensor in plain.tensors.items():
        assert np.array_equal(again.tensors[name].float32(), tensor.float32()), name


def test_a_template_comes_along(tmp_path: Path) -> None:
    files = tiny.tiny_model(tmp_path / "in")
    again = open_model(export.write_hf(files, tmp_path / "out"))
    messages = [{"role": "user", "content": "Hello"}]
    assert again.tokenizer.chat(messages) == files.tokenizer.chat(messages)


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", "BF16"), ("fp16", "F16")])
def test_halves_are_the_nearest(dtype: str, kind: str, tmp_path: Path) -> None:
    files = tiny.tiny_model()
    again = open_model(export.write_hf(files, tmp_path / "out", dtype))
    for name, tensor in files.tensors.items():
        nearest = tiny.tensor(name, tensor.float32(), kind)
        assert again.tensors[name].kind == kind
        assert np.array_equal(again.tensors[name].float32(), nearest.float32()), name


def test_large_models_are_cut_into_shards(tmp_path: Path) -> None:
    files = tiny.tiny_model()
    said: list[tuple[int, int]] = []
    folder = export.write_hf(
        files, tmp_path / "out", shard=40_000, progress=lambda done, total: said.append((done, total))
    )
    places = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(places) > 2
    assert places[0] == f"model-00001-of-{len(places):05}.safetensors"
    weights = sum(tensor.float32().nbytes for tensor in files.tensors.values())
    assert said[-1] == (weights, weights)
    assert len(said) == len(files.tensors)
    assert json.loads((folder / "model.safetensors.index.json").read_text())["metadata"] == {"total_size": weights}
    again = open_model(folder)
    assert all(np.array_equal(again.tensors[name].float32(), files.tensors[name].float32()) for name in files.tensors)


def test_nothing_is_left_of_an_export_that_failed(tmp_path: Path) -> None:
    files = tiny.tiny_model()
    huge = tiny.tensor("norm", np.full(files.config.hidden, 1e6, np.float32))
    broken = replace(files, tensors={**files.tensors, "norm": huge})
    with pytest.raises(ModelError, match="norm has values that fp16 cannot hold: export it in bf16 or fp32"):
        export.write_hf(broken, tmp_path / "out", "fp16")
    assert list(tmp_path.iterdir()) == []


def test_refusals(tmp_path: Path) -> None:
    files = tiny.tiny_model()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for folder in (tmp_path / "full", tmp_path / "full" / "mine.txt"):
        with pytest.raises(ModelError, match="is there already: give a folder that is new or empty"):
            export.write_hf(files, folder)
    with pytest.raises(ModelError, match="'int8' is none of fp32, bf16, fp16"):
        export.write_hf(files, tmp_path / "new", "int8")
    draft = replace(files, tokens=np.arange(5))
    with pytest.raises(ModelError, match="reduced vocabulary"):
        export.write_hf(draft, tmp_path / "new")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.tiny_model())
    assert main(["export", str(path), "--to", "hf", str(tmp_path / "out")]) == 0
    assert f"{tmp_path / 'out'}: tiny in fp32" in capsys.readouterr().out
    for arguments, reason in (
        (["--to", "onnx", str(tmp_path / "new")], "--to: 'onnx' is none of hf"),
        (["--dtype", "int8", str(tmp_path / "new")], "--dtype: 'int8' is none of fp32, bf16, fp16"),
        ([str(tmp_path / "out")], "is there already"),
    ):
        assert main(["export", str(path), *arguments]) == 2
        assert reason in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]


@pytest.mark.oracle
def test_transformers_cuts_text_alike(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for bos in (False, True):
        files = tiny.tiny_model(tmp_path / f"in-{bos}")
        if bos:
            files.tokenizer.adds_bos = True
        theirs = transformers.AutoTokenizer.from_pretrained(export.write_hf(files, tmp_path / f"out-{bos}"))
        for text in TEXTS:
            assert theirs(text)["input_ids"] == files.tokenizer.prompt(text)


@pytest.mark.model
@pytest.mark.oracle
def test_the_real_model_in_transformers(tmp_path: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    files: ModelFiles = open_model(resolve("smollm2-135m"))
    folder = export.write_hf(files, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is 17 times 3?"}]
    prompt = files.tokenizer.chat(messages)
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == prompt
    for text in TEXTS:
        assert theirs(text)["input_ids"] == files.tokenizer.prompt(text)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert model.dtype == torch.float32
    torch.set_num_threads(1)
    with torch.no_grad():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    from outrider import Engine, SamplingParams

    ours = Engine(folder, dtype="fp32", drafter="none", threads=1).generate([prompt], SamplingParams(max_tokens=12))
    assert list(ours[0].tokens) == answer[: len(ours[0].tokens)]
