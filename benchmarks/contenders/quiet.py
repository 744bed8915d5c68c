"""Whether the machine was ours while we measured: the share of its time that other processes used.

A run is judged by this, and not by whether its figures please.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Usage", "foreign_share", "usage"]

IDLE = (3, 4)  # fields of /proc/stat's first line: idle, waiting for a disk
COUNTED = 8  # user, nice, system, idle, iowait, irq, softirq, steal; what follows is part of user and nice


@dataclass(frozen=True, slots=True)
class Usage:
    """Clock ticks since the machine started: of all cores, those at work, and those that some processes used."""

    total: int
    busy: int
    ours: int


def usage(processes: Iterable[int], proc: Path = Path("/proc")) -> Usage | None:
    """Usage now, with this process counted among ours. None where the system does not tell, or a process has ended."""
    try:
        ticks = [int(field) for field in (proc / "stat").read_text().split("\n", 1)[0].split()[1 : 1 + COUNTED]]
        ours = sum(_ticks(proc / str(pid) / "stat") for pid in (os.getpid(), *processes))
    except (OSError, ValueError, IndexError):
        return None
    return Usage(sum(ticks), sum(ticks) - sum(ticks[field] for field in IDLE), ours)


def foreign_share(before: Usage | None, after: Usage | None) -> float | None:
    """Part of all cores' time between the two that others used: 0 = the machine was ours, 1 = none of it was."""
    if before is None or after is None or after.total <= before.total:
        return None
    others = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0.0, others / (after.total - before.total))


def _ticks(stat: Path) -> int:
    """User and system time of a process with all its threads. Its name, in brackets, may hold anything."""
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])
