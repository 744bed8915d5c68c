"""What the target thinks while it reads its own answers: hidden states of chosen layers at every token.

They are computed in chunks when a batch first needs them, and kept on disk as bfloat16 up to a bound in bytes; what
does not fit is computed anew each time. A kill of the process loses nothing that was kept: an entry is written after
its states.

Letters: n tokens of a text, W wanted layers, D hidden size.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from outrider.core.cache import Rows
from outrider.models.tensor import bfloat16_bits
from outrider.runtime.runner import Feed, Runner
from outrider.train.shards import Answer

if TYPE_CHECKING:
    from outrider.models.load import ModelFiles

__all__ = ["Bits", "FeatureStore", "Reader", "runner_reader", "torch_reader"]

Bits = NDArray[np.uint16]  # bfloat16 values as their bits
# texts -> the states of each, [n, W, D]
Reader = Callable[[Sequence[NDArray[np.int32]]], list[Bits]]


def runner_reader(runner: Runner, wants: Sequence[int], chunk: int = 512) -> Reader:
    """States as the runner gives them: the very numbers that a drafter will see."""

    def read(texts: Sequence[NDArray[np.int32]]) -> list[Bits]:
        out = []
        for text in texts:
            rows = Rows(runner.pages)
            parts = []
            try:
                for start in range(0, len(text), chunk):
                    tokens = text[start : start + chunk].tolist()
                    rows.reserve(len(tokens))
                    scores = runner.forward([Feed(rows, tokens)], wants)
                    parts.append(bfloat16_bits(scores.hidden(0)))
                    rows.commit(len(tokens))
            finally:
                rows.release()
            out.append(np.concatenate(parts))
        return out

    return read


def torch_reader(
    files: ModelFiles, wants: Sequence[int], *, device: str = "cpu", dtype: str = "bf16", rows: int = 4096
) -> Reader:
    """States from the decoder in torch: for GPUs, and for CPUs without the native runner.

    `rows` bounds how many padded tokens are computed at once.
    """
    import torch

    from outrider.train.decoder import Decoder

    model = Decoder.of(files.config, files.tensors, {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], device)

    @torch.inference_mode()
    def read(texts: Sequence[NDArray[np.int32]]) -> list[Bits]:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        out: dict[int, Bits] = {}
        while order:
            count = max(1, min(len(order), rows // len(texts[order[-1]])))
            taken, order = order[-count:], order[:-count]
            width = len(texts[taken[-1]])
            tokens = torch.zeros(count, width, dtype=torch.long)
            for row, index in enumerate(taken):
                tokens[row, : len(texts[index])] = torch.from_numpy(texts[index].astype(np.int64))
            states = model(tokens.to(device), wants).to(torch.bfloat16).cpu().view(torch.uint16).numpy()
            for row, index in enumerate(taken):
                out[index] = states[row, : len(texts[index])].copy()
        return [out[index] for index in range(len(texts))]

    return read


_ENTRY = struct.Struct("<16sqqI")  # hash of the text | first row | rows | CRC-32 of what is before it


class FeatureStore:
    """The states of a list of answers. Index i is answers[i].

    On disk lie two append-only files: rows, and an index that says which text has which. A text that was added later,
    or one that another process has read, is found there as well; a row without an entry is the trace of a kill.
    """

    def __init__(
        self,
        folder: Path | None,
        answers: Sequence[Answer],
        wants: Sequence[int],
        hidden: int,
        reader: Reader,
        *,
        target: str = "",
        limit: int = 16 << 30,
    ) -> None:
        """`folder` None keeps nothing. `limit` bounds the bytes on disk. `target` is the sha256 of who read."""
        self.answers, self.wants, self.shape = answers, tuple(wants), (len(wants), hidden)
        self._reader, self._limit = reader, limit
        self._row = len(wants) * hidden * 2
        self._places: dict[bytes, tuple[int, int]] = {}
        self._read = 0  # bytes of the index that are known
        self._files: tuple[Path, Path] | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(repr((target, self.wants, hidden)).encode()).hexdigest()[:16]
        self._files = folder / f"states-{name}.bf16", folder / f"states-{name}.index"
        for path in self._files:
            path.touch()
        self._refresh()

    def get(self, indexes: Sequence[int]) -> list[Bits]:
        """States of these answers, each [n, W, D]."""
        keys = [_key(self.answers[i].tokens) for i in indexes]
        if any(key not in self._places for key in keys):
            self._refresh()
        missing = [i for i, key in zip(indexes, keys, strict=True) if key not in self._places]
        fresh: dict[bytes, Bits] = {}
        if missing:
            for i, states in zip(missing, self._reader([self.answers[i].tokens for i in missing]), strict=True):
                fresh[_key(self.answers[i].tokens)] = states
            self._keep(fresh)
        return [fresh[key] if key in fresh else self._load(key) for key in keys]

    @property
    def ready(self) -> int:
        """Answers whose states lie on disk."""
        return sum(_key(answer.tokens) in self._places for answer in self.answers)

    def _load(self, key: bytes) -> Bits:
        assert self._files is not None
        start, rows = self._places[key]
        flat = np.fromfile(self._files[0], np.uint16, rows * self._row // 2, offset=start * self._row)
        return flat.reshape(rows, *self.shape)

    def _keep(self, fresh: Mapping[bytes, Bits]) -> None:
        """Append rows, then their entries, under a lock that other processes heed."""
        if self._files is None:
            return
        rows, index = self._files
        with rows.open("ab") as data, index.open("ab") as entries:
            fcntl.flock(data, fcntl.LOCK_EX)
            size = data.seek(0, os.SEEK_END)
            if torn := size % self._row:
                data.truncate(size - torn)
                size -= torn
            torn = entries.seek(0, os.SEEK_END) % _ENTRY.size
            if torn:
                entries.truncate(entries.tell() - torn)
            for key, states in fresh.items():
                if size + states.nbytes > self._limit:
                    continue
                data.write(states.tobytes())
                data.flush()
                body = _ENTRY.pack(key, size // self._row, len(states), 0)[:-4]
                entries.write(body + struct.pack("<I", zlib.crc32(body)))
                entries.flush()
                self._places[key] = (size // self._row, len(states))
                size += states.nbytes

    def _refresh(self) -> None:
        if self._files is None:
            return
        with self._files[1].open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = len(data) - len(data) % _ENTRY.size
        for at in range(0, whole, _ENTRY.size):
            key, start, rows, checksum = _ENTRY.unpack_from(data, at)
            if zlib.crc32(data[at : at + _ENTRY.size - 4]) == checksum:
                self._places.setdefault(key, (start, rows))
        self._read += whole


def _key(text: NDArray[np.int32]) -> bytes:
    return hashlib.sha256(text.tobytes()).digest()[:16]
