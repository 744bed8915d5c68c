"""The command's entry point: `python -m outrider` is `outrider`."""

from __future__ import annotations

import sys

__all__ = ["run"]


def run() -> int:
    """Run the command; quiet on Ctrl-C from the first import on."""
    try:
        from outrider.cli import main

        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(run())
