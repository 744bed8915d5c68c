"""What a machine is: the figures measured on one count for others of its kind only."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["machine"]

# What decides which kernels run.
_X86 = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_ARM = ("asimddp", "i8mm", "bf16", "sve")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system. What cannot be read is None."""
    processor = _cpuinfo()
    flags = set((processor.get("flags") or processor.get("Features") or "").split())
    return {
        "cpu": processor.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instructions": [flag for flag in (*_X86, *_ARM) if flag in flags],
        "memory_gib": _memory_gib(),
        "system": platform.platform(),
    }


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None
