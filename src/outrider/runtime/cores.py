"""How many threads a bus-bound program should run here."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["physical_cores"]

_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def physical_cores(topology: Path = _TOPOLOGY, quota: Path = _QUOTA) -> int:
    """Cores that this process may use: siblings of one core count once, and a container's quota is kept.

    Threads beyond that wait for each other at every barrier of a step.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(topology, cpu) for cpu in usable}
    return max(1, min(len(cores), _quota(quota, len(cores))))


def _siblings(topology: Path, cpu: int) -> str:
    try:
        return (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(path: Path, cores: int) -> int:
    """Whole cores' worth of time that the control group (version 2) grants; `cores` where it grants all."""
    try:
        granted, period = path.read_text().split()
        return cores if granted == "max" else int(granted) // int(period)
    except (OSError, ValueError):
        return cores
