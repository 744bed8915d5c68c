"""What holds for all tests.

OUTRIDER_NATIVE names another build of the native module to run them on: `make sanitize` does.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest

if path := os.environ.get("OUTRIDER_NATIVE"):
    spec = importlib.util.spec_from_file_location("outrider._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["outrider._native"] = module

# Jobs in a shell's background ignore interrupts, and so would the processes that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """`outrider serve` sends the logs of its process to standard error, which in a test is closed when it ends."""
    loggers = [logging.getLogger(name) for name in ("outrider", "uvicorn", "uvicorn.error", "py.warnings")]
    before = [(list(logger.handlers), logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    logging.captureWarnings(False)
