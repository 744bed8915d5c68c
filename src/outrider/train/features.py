"""What the target thinks while it reads its own answers: hidden states of chosen layers at every token.

They are computed in chunks when a batch first needs them, and kept on disk as bfloat16 up to a bound in bytes; what
does not fit is computed anew each time. A kill of the process loses nothing that was kept: an answer's flag is set
after its states are written.

Letters: n tokens of a text, W wanted layers, D hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.cache import Rows
from outrider.runtime.runner import Feed, Runner
from outrider.train.errors import TrainError
from outrider.train.shards import Answer

if TYPE_CHECKING:
    from outrider.models.load import ModelFiles

__all__ = ["Bits", "FeatureStore", "Reader", "runner_reader", "to_bits", "torch_reader"]

Bits = NDArray[np.uint16]  # bfloat16 values as their bits
# texts -> the states of each, [n, W, D]
Reader = Callable[[Sequence[NDArray[np.int32]]], list[Bits]]


def to_bits(values: NDArray[np.float32]) -> Bits:
    """float32 to the nearest bfloat16, ties to even."""
    raw = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)


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
                    parts.append(to_bits(scores.hidden(0)))
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


class FeatureStore:
    """The states of a list of answers. Index i is answers[i]."""

    def __init__(
        self,
        folder: Path | None,
        answers: Sequence[Answer],
        wants: Sequence[int],
        hidden: int,
        reader: Reader,
        limit: int = 16 << 30,
    ) -> None:
        """`folder` None keeps nothing. `limit` bounds the bytes on disk."""
        self.answers, self.wants, self.shape = answers, tuple(wants), (len(wants), hidden)
        self._reader = reader
        lengths = np.array([len(answer.prompt) + len(answer.answer) for answer in answers], np.int64)
        self._starts = np.concatenate(([0], np.cumsum(lengths)))
        row = len(wants) * hidden * 2
        self.kept = 0 if folder is None else int(np.searchsorted(self._starts[1:], limit // row, side="right"))
        self._done: Any = np.zeros(0, np.uint8)
        if folder is None or not self.kept:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._check(folder, hidden)
        shape = (int(self._starts[self.kept]), *self.shape)
        self._states = _array(folder / "states.bf16", np.uint16, shape)
        self._done = _array(folder / "states.done", np.uint8, (self.kept,))

    def get(self, indexes: Sequence[int]) -> list[Bits]:
        """States of these answers, each [n, W, D]."""
        missing = [i for i in indexes if not (i < self.kept and self._done[i])]
        fresh = dict(zip(missing, self._reader([self.answers[i].tokens for i in missing]), strict=True)) if missing else {}
        for i, states in fresh.items():
            if i < self.kept:
                self._states[self._starts[i] : self._starts[i + 1]] = states
                self._done[i] = 1
        return [fresh[i] if i in fresh else self._states[self._starts[i] : self._starts[i + 1]] for i in indexes]

    @property
    def ready(self) -> int:
        """Answers whose states lie on disk."""
        return int(np.count_nonzero(self._done))

    def _check(self, folder: Path, hidden: int) -> None:
        digest = hashlib.sha256()
        for answer in self.answers:
            digest.update(answer.tokens.tobytes())
        wanted = {"layers": list(self.wants), "hidden": hidden, "kept": self.kept, "texts": digest.hexdigest()}
        path = folder / "states.json"
        if path.exists() and json.loads(path.read_text()) != wanted:
            raise TrainError(f"{folder}: holds states of other texts or layers: delete the folder, or give another")
        path.write_text(json.dumps(wanted) + "\n")


def _array(path: Path, kind: Any, shape: tuple[int, ...]) -> Any:
    return np.memmap(path, kind, "r+" if path.exists() else "w+", shape=shape)
