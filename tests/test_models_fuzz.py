"""Damaged files: each loads or is refused with ModelError, quickly and in little memory. Nothing else ever happens."""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.models.errors import ModelError
from outrider.models.load import open_model
from tiny import tiny_model, write_gguf, write_hf

EXTREMES = (0, 1, 7, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
SMALL = {"hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 32, "layers": 1, "vocabulary": 97}
LONGEST = 1.0  # seconds for one file; a sound one takes some milliseconds
MOST_MEMORY = 64 << 20


@pytest.fixture(autouse=True)
def frugal() -> Iterator[None]:
    """Peak memory of the process grows by less than 64 MiB over all files of a test."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MOST_MEMORY


def mutate(data: bytes, rng: random.Random, reach: int) -> bytes:
    """One damage among the first `reach` bytes, or a cut anywhere."""
    damaged = bytearray(data)
    kind = rng.randrange(6)
    if kind == 0:
        return bytes(damaged[: rng.randrange(len(damaged))])
    if kind == 1:  # a length, count, type or offset gone mad
        width = rng.choice((4, 8))
        at = rng.randrange(reach - width)
        damaged[at : at + width] = (rng.choice(EXTREMES) % (1 << 8 * width)).to_bytes(width, "little")
    elif kind == 2:
        at = rng.randrange(reach)
        del damaged[at : at + rng.randrange(1, 64)]
    elif kind == 3:
        at, more = rng.randrange(reach), rng.randrange(reach)
        damaged[at:at] = damaged[more : more + rng.randrange(1, 64)]
    else:
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def survive(path: Path, write: Callable[[], object]) -> bool:
    """Whether the damaged model still loads; if not it is refused with a one-line ModelError that names the place."""
    write()
    started = time.perf_counter()
    refusal = ""
    try:
        files = open_model(path)
        sum(int(tensor.raw[-1, -1]) for tensor in files.tensors.values())  # the last byte of each lies in the file
        files.tokenizer.encode("a b 1")
    except ModelError as error:
        refusal = str(error)
    assert time.perf_counter() - started < LONGEST
    assert "\n" not in refusal
    assert not refusal or path.name in refusal
    return not refusal


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_damaged_gguf_files(tmp_path: Path, kind: str) -> None:
    """700 damaged GGUF files of each kind load or are refused; both happen."""
    path = tmp_path / "tiny.gguf"
    sound = write_gguf(path, tiny_model(**SMALL), kind).read_bytes()
    reach = sound.rindex(b"token_embd.weight") + 64
    rng = random.Random(1)
    loaded = sum(survive(path, lambda: path.write_bytes(mutate(sound, rng, reach))) for _ in range(700))
    assert 0 < loaded < 700


def rewrite(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header is sound JSON and says something else."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = list(header)
    one, other = rng.choice(names[1:]), rng.choice(names[1:])
    kind = rng.randrange(5)
    if kind == 0:
        header[one], header[other] = header[other], header[one]
    elif kind == 1:
        header[one]["dtype"] = rng.choice(("F16", "BF16", "F64", "I8", "F8_E4M3", "", None, 3, [], {}))
    elif kind == 2:
        header[one]["shape"] = rng.choice(([], [0], [1, -1], [1 << 40, 1 << 40], [2, 3, 4], None, "x", [1.5], [True]))
    elif kind == 3:
        header[one]["data_offsets"][rng.randrange(2)] = rng.choice((*EXTREMES, -1, None, 1.5, "0", [1]))
    else:
        rng.shuffle(names)
        header = {name: header[name] for name in names}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def test_damaged_safetensors(tmp_path: Path) -> None:
    """600 damaged safetensors files, half of them with sound JSON, load or are refused; both happen."""
    folder = write_hf(tmp_path / "tiny", tiny_model(**SMALL))
    path = folder / "model.safetensors"
    sound = path.read_bytes()
    reach = 8 + int.from_bytes(sound[:8], "little")
    rng = random.Random(2)
    loaded = sum(survive(folder, lambda: path.write_bytes(mutate(sound, rng, reach))) for _ in range(300))
    loaded += sum(survive(folder, lambda: path.write_bytes(rewrite(sound, rng))) for _ in range(300))
    assert 0 < loaded < 600


NAMES = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", NAMES)
def test_damaged_json(tmp_path: Path, name: str) -> None:
    """150 damaged versions of each JSON file load or are refused."""
    folder = write_hf(tmp_path / "tiny", tiny_model(**SMALL), shards=2)
    path = folder / name
    sound = path.read_bytes()
    rng = random.Random(3)
    loaded = sum(survive(folder, lambda: path.write_bytes(mutate(sound, rng, len(sound)))) for _ in range(150))
    assert loaded < 150


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_json_of_other_types(tmp_path: Path, name: str) -> None:
    """Every value of the config files replaced by one of every other JSON type: loads or is refused."""
    folder = write_hf(tmp_path / "tiny", tiny_model(**SMALL))
    path = folder / name
    sound = json.loads(path.read_text())
    strange = [None, True, -1, 0, 10**400, 1.5, 1e308, "x", "", [], [[]], {}, {"a": {}}]
    for key in sound:
        for value in strange:
            survive(folder, lambda key=key, value=value: path.write_text(json.dumps(sound | {key: value})))
