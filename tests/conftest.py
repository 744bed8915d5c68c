"""Runs the tests on another build of the native module where OUTRIDER_NATIVE names one: `make sanitize` does."""

from __future__ import annotations

import importlib.util
import os
import sys

if path := os.environ.get("OUTRIDER_NATIVE"):
    spec = importlib.util.spec_from_file_location("outrider._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["outrider._native"] = module
