# Everything runs in the project's own virtual environment, .venv. Each step of the set-up leaves a stamp there and is
# done once. What is needed beforehand: Python 3.11 or later with venv, a C++20 compiler, and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
NATIVE := CMakeLists.txt $(shell find src/outrider/kernels/native -type f)
MODEL := smollm2-135m

.PHONY: help setup setup-demo demo test check sanitize bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        see it work: plain and speculative decoding of a real model"
	@echo "make test        all tests"
	@echo "make check       lint and types"
	@echo "make sanitize    the native tests under address and undefined-behaviour sanitizers"
	@echo "make bench       the drafters against plain decoding, on benchmarks/prompts.jsonl"
	@echo "make setup       the environment for the three above"
	@echo "make clean       remove the environment and all that was built"

demo: setup-demo
	@$(BIN)/outrider demo

# pytest spreads over two processes: most tests run on one core.
test: setup
	@$(BIN)/python -m pytest -n 2

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# The native tests under the address and undefined-behaviour sanitizers.
SANITIZED := build/sanitize
sanitize: setup
	@$(PIP) cmake ninja nanobind
	@$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DOUTRIDER_SANITIZE=ON \
	    -DPython_EXECUTABLE=$(abspath $(BIN))/python > /dev/null
	@$(BIN)/cmake --build $(SANITIZED) --target _native
	@OUTRIDER_NATIVE=$$(ls $(SANITIZED)/_native*.so) LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    $(BIN)/python -m pytest -p no:cacheprovider -m "not model and not oracle" tests/test_linear.py tests/test_packed.py tests/test_native_runner.py \
	    tests/test_sampling.py tests/test_noise.py tests/test_growth.py tests/test_drafters.py

bench: setup-demo
	@$(BIN)/outrider bench --prompts benchmarks/prompts.jsonl --json build/bench.json

setup: $(VENV)/stamp-development $(VENV)/stamp-model
	@:

# The product alone: no torch, no test tools.
setup-demo: $(VENV)/stamp-product $(VENV)/stamp-model
	@:

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/stamp-venv:
	@echo "set-up: $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@touch $@

$(VENV)/stamp-product: $(VENV)/stamp-venv pyproject.toml $(NATIVE)
	@echo "set-up: outrider and its native module"
	@$(PIP) --editable .
	@mkdir -p build
	@touch $@

# torch first and by itself, at the version that pyproject.toml pins: nothing installed after it may bring another build.
$(VENV)/stamp-development: pyproject.toml | $(VENV)/stamp-product
	@echo "set-up: test tools, and torch to compare with"
	@$(PIP) torch==2.13.0
	@$(PIP) --group dev --group oracle
	@touch $@

$(VENV)/stamp-model: | $(VENV)/stamp-product
	@$(BIN)/outrider pull $(MODEL)
	@touch $@
