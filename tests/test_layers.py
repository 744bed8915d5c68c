"""The house's order: imports go one way, files are named after ideas, and the CPU product needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import outrider

HOUSE = Path(outrider.__file__).parent

_ENGINE = {"core", "models", "kernels", "runtime", "drafters", "engine", "_native"}
_ROOMS = {"server", "bench", "train", "advise", "scale", "audit"}

# folder -> what its files may import of outrider, beside their own folder
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "models": {"core"},
    "kernels": {"core", "_native"},
    "runtime": {"core", "models", "kernels", "_native"},
    "drafters": {"core", "models", "runtime"},
    "engine": {"core", "models", "runtime", "drafters"},
    "audit": {"core", "models"},
    "bench": _ENGINE,
    "train": _ENGINE,
    "advise": _ENGINE,
    "server": _ENGINE | {"audit"},
    "scale": _ENGINE | {"audit", "server"},
    "cli": _ENGINE | _ROOMS | {"outrider"},
    "outrider": {"core", "engine"},  # __init__.py and __main__.py
}
# `python -m outrider` is the command line
MAY_IMPORT_BY_FILE = {"__main__.py": {"cli"}}
FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "helpers", "v2", "legacy"}


def imports(source: str, package: str) -> Iterator[str]:
    """First folder below `outrider` of each import in `source`; `outrider` itself for a public name.

    `package` is the dotted package that the source belongs to, for relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "outrider" else [module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "outrider":
                known = len(parts) > 1 and (parts[1] in MAY_IMPORT or parts[1] == "_native")
                yield parts[1] if known else "outrider"


def files() -> list[Path]:
    return sorted(HOUSE.rglob("*.py"))


def folder(path: Path) -> str:
    parts = path.relative_to(HOUSE).parts
    return parts[0] if len(parts) > 1 else "outrider"


def test_imports_go_one_way() -> None:
    """core <- models, kernels <- runtime <- drafters <- engine <- server, bench, train, advise, scale <- cli."""
    wrong: list[str] = []
    for path in files():
        package = ".".join(("outrider", *path.relative_to(HOUSE).parts[:-1]))
        allowed = MAY_IMPORT[folder(path)] | {folder(path)} | MAY_IMPORT_BY_FILE.get(path.name, set())
        strange = set(imports(path.read_text(), package)) - allowed
        wrong += [f"{path.relative_to(HOUSE)} imports {target}" for target in sorted(strange)]
    assert not wrong


def test_the_table_of_imports_has_no_circle() -> None:
    """Folders can be put into an order in which each imports only earlier ones."""
    left, done = dict(MAY_IMPORT), {"_native"}
    while left:
        free = [name for name, targets in left.items() if targets <= done | {name}]
        assert free, f"a circle among {sorted(left)}"
        for name in free:
            done.add(name)
            del left[name]


@pytest.mark.parametrize(
    ("source", "package", "expected"),
    [
        ("import outrider.core.tree", "outrider.models", ["core"]),
        ("from outrider.engine import results", "outrider.core", ["engine"]),
        ("from outrider import engine", "outrider.core", ["engine"]),
        ("from outrider import Engine", "outrider.bench", ["outrider"]),
        ("from ..engine.results import Result", "outrider.core", ["engine"]),
        ("from . import tree", "outrider.core", ["core"]),
        ("def f():\n    from outrider.cli import main", "outrider.core", ["cli"]),
        ("import numpy.core", "outrider.core", []),
    ],
)
def test_the_reader_of_imports_sees_each_form(source: str, package: str, expected: list[str]) -> None:
    """Absolute, relative, late and public imports are all read, and other packages are not taken for ours."""
    assert list(imports(source, package)) == expected


def test_no_file_is_named_after_nothing() -> None:
    """A file is named after its idea: no utils, common, misc, v2, legacy."""
    for path in files():
        words = path.relative_to(HOUSE).with_suffix("").as_posix().replace("/", "_").split("_")
        assert not FORBIDDEN_NAMES & set(words), path


@pytest.mark.parametrize(
    "code",
    ["import outrider", "import sys; sys.argv = ['outrider', '--help']; from outrider.cli import main; main()"],
    ids=["import", "help"],
)
def test_no_torch_on_the_way_in(code: str) -> None:
    """`import outrider` and `outrider --help` load neither torch nor transformers, though both are installed here."""
    heavy = "{'torch', 'transformers'} & set(sys.modules)"
    report = f"import atexit, sys; atexit.register(lambda: print('loaded:', {heavy}))"
    done = subprocess.run([sys.executable, "-c", f"{report}; {code}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: set()"
