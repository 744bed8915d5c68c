"""Programs run with each instruction set that the native core has code for."""

from __future__ import annotations

import os
import subprocess
import sys

SETS = ("portable", "avx2", "avx512")


def run_with(instructions: str, program: str) -> str | None:
    """The program's output with that instruction set; None if this processor lacks it."""
    environment = {**os.environ, "OUTRIDER_ISA": instructions}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    if done.returncode and "OUTRIDER_ISA" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr
    return done.stdout
