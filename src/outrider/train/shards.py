"""Answers on disk: append-only files of checksummed records, safe against a kill at any moment.

A shard is a run of records. A record is

    u32 length of the payload | u32 CRC-32 of the payload | payload

and its payload: i64 job | f32 temperature | u32 prompt tokens | u32 answer tokens | u32 flags | i32 tokens ...

all little-endian. A record that a kill cut short is the last of its file; the next writer cuts it off. The job number
is the key: a record counts once, so that what was written twice by mistake is still read once.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.train.errors import TrainError

__all__ = ["Answer", "Shards", "read_answers"]

_RECORD = struct.Struct("<II")
_FIELDS = struct.Struct("<qfIII")
_ENDED = 1  # flag: the text came to its own end
_LONGEST = 1 << 26


@dataclass(frozen=True, slots=True)
class Answer:
    """One text that the target wrote."""

    job: int
    temperature: float
    prompt: NDArray[np.int32]  # token ids
    answer: NDArray[np.int32]  # token ids, the end-of-text token included where it came
    ended: bool  # came to its own end; else it was cut at the limit

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.concatenate((self.prompt, self.answer))


class Shards:
    """The growing shards of one writer in a folder.

    Several writers may share a folder under different `part` numbers. Opening mends what a kill left behind.
    """

    def __init__(self, folder: Path, part: int = 0, limit: int = 64 << 20) -> None:
        """`limit` is the size in bytes at which the next shard begins."""
        self.folder, self.part, self.limit = folder, part, limit
        folder.mkdir(parents=True, exist_ok=True)
        self.jobs: set[int] = set()
        self.tokens = 0  # answer tokens on disk
        self._index = 0
        for path in self._paths():
            answers, sound = _scan(path)
            if sound < path.stat().st_size:
                os.truncate(path, sound)
            self.jobs.update(answer.job for answer in answers)
            self.tokens += sum(len(answer.answer) for answer in answers)
            self._index = int(path.stem.rpartition("-")[2])
        self._file = self._path().open("ab")

    def append(self, answer: Answer) -> None:
        """Write one record. It survives a kill of this process once this returns, and a power cut after `sync`."""
        if answer.job in self.jobs:
            raise TrainError(f"{self.folder}: job {answer.job} is there already")
        payload = _FIELDS.pack(
            answer.job, answer.temperature, len(answer.prompt), len(answer.answer), _ENDED if answer.ended else 0
        )
        payload += answer.tokens.astype("<i4").tobytes()
        self._file.write(_RECORD.pack(len(payload), zlib.crc32(payload)) + payload)
        self._file.flush()
        self.jobs.add(answer.job)
        self.tokens += len(answer.answer)
        if self._file.tell() >= self.limit:
            self.close()
            self._index += 1
            self._file = self._path().open("ab")

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()

    def _path(self) -> Path:
        return self.folder / f"answers-{self.part:02}-{self._index:05}.shard"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob(f"answers-{self.part:02}-*.shard"))


def read_answers(folder: Path) -> list[Answer]:
    """All sound records of a folder, by job number. Raises TrainError if there is none.

    A torn last record is passed over; damage before it is refused, for what lies behind it would be lost unseen.
    """
    found: dict[int, Answer] = {}
    for path in sorted(folder.glob("answers-*.shard")):
        answers, sound = _scan(path)
        if _another_record(path, sound):
            raise TrainError(f"{path}: damaged at byte {sound:,}: delete the file and let it be written again")
        for answer in answers:
            found.setdefault(answer.job, answer)
    if not found:
        raise TrainError(f"{folder}: there are no answers in it: run 'outrider train answers' first")
    return [found[job] for job in sorted(found)]


def _scan(path: Path) -> tuple[list[Answer], int]:
    """The records up to the first unsound one, and where that begins."""
    data = path.read_bytes()
    answers: list[Answer] = []
    start = 0
    for payload, end in _payloads(data):
        answers.append(_parse(payload))
        start = end
    return answers, start


def _payloads(data: bytes) -> Iterator[tuple[bytes, int]]:
    start = 0
    while start + _RECORD.size <= len(data):
        length, checksum = _RECORD.unpack_from(data, start)
        end = start + _RECORD.size + length
        payload = data[start + _RECORD.size : end]
        if length > _LONGEST or len(payload) < length or length < _FIELDS.size or zlib.crc32(payload) != checksum:
            return
        yield payload, end
        start = end


def _another_record(path: Path, start: int) -> bool:
    """Whether a whole record lies at `start`, only not a sound one: damage, and not the trace of a kill."""
    data = path.read_bytes()[start:]
    if len(data) < _RECORD.size:
        return False
    return len(data) > _RECORD.size + int(_RECORD.unpack_from(data)[0])


def _parse(payload: bytes) -> Answer:
    job, temperature, prompt, answer, flags = _FIELDS.unpack_from(payload)
    tokens = np.frombuffer(payload, "<i4", prompt + answer, _FIELDS.size).astype(np.int32)
    return Answer(job, temperature, tokens[:prompt], tokens[prompt:], bool(flags & _ENDED))
