"""The layers of src/loragraph: a file imports only from its own layer and from those before it.

An import counts wherever it stands: in a function, and under TYPE_CHECKING too, since a reader
who has to know a type depends on its module whether or not the interpreter does.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "loragraph"
ROOT = "loragraph"

# The order of the data path (docs/architecture.md). ROOT is the package's own __init__.py, which
# gathers the public names; only the command line comes after it.
ORDER = (
    "errors",
    "config",
    "kernels",  # our own C, which knows nothing of ggml
    "ggml",
    "vocab",
    "model",
    "adapters",
    "graph",
    "engine",
    "tools",
    "cluster",
    "server",
    "ray",  # many servers as one, by Ray Serve
    ROOT,
    "cli",
)


def module_name(path: Path, source: Path) -> str:
    """Dotted name of a file, with `.__init__` kept, so that relative imports count from it."""
    return ".".join((ROOT, *path.relative_to(source).with_suffix("").parts))


def imported_modules(tree: ast.AST, module: str) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported; `module` is the importing module."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join(package + ([base] if base else []))
            # `from loragraph import graph` imports a layer, `from loragraph.graph import f` a name
            # of one, so both are told apart by the first two parts alone.
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def layer(module: str, source: Path) -> str | None:
    """The layer that a dotted name belongs to; None when it is not ours."""
    parts = module.split(".")
    if parts[0] != ROOT:
        return None
    if len(parts) == 1 or parts[1] == "__init__":
        return ROOT
    is_module = (source / parts[1]).is_dir() or (source / f"{parts[1]}.py").is_file()
    return parts[1] if is_module else ROOT


def violations(source: Path) -> list[str]:
    """One line for each import against the order and each file that stands in no layer."""
    rank = {name: index for index, name in enumerate(ORDER)}
    lines = []
    for path in sorted(source.rglob("*.py")):
        module = module_name(path, source)
        own = layer(module, source)
        if own not in rank:
            lines.append(f"{path.relative_to(source)}: {own} is in no layer; add it to ORDER")
            continue
        for line, name in imported_modules(ast.parse(path.read_bytes()), module):
            other = layer(name, source)
            if other is not None and rank.get(other, -1) > rank[own]:
                lines.append(
                    f"{path.relative_to(source)}:{line}: {own} must not import {other}, "
                    "which comes after it"
                )
    return lines


def test_each_layer_imports_only_from_those_before_it() -> None:
    """No file of the package imports from a layer that comes later on the data path."""
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    "statement",
    [
        "import loragraph.engine.scheduler",
        "from loragraph import engine",
        "from loragraph import Model",
        "from loragraph.engine import scheduler",
        "from loragraph.engine.scheduler import Scheduler",
        "from ..engine import scheduler",
        "from ..engine.scheduler import Scheduler",
        "from .. import engine",
        "from .. import Model",
        "if TYPE_CHECKING:\n    from loragraph.engine.scheduler import Scheduler",
        "def f():\n    from loragraph import engine",
    ],
)
def test_an_import_from_a_later_layer_is_found(tmp_path: Path, statement: str) -> None:
    """Each way to write an import against the order is reported with file, line and layers."""
    for name in ("graph", "engine"):
        (tmp_path / name).mkdir()
    (tmp_path / "__init__.py").write_text("from loragraph.graph.builder import Model\n")
    (tmp_path / "engine" / "scheduler.py").write_text("from ..graph import builder\n")
    (tmp_path / "graph" / "builder.py").write_text(statement + "\n")

    (line,) = violations(tmp_path)

    assert line.startswith("graph/builder.py:")
    assert "graph must not import " in line


@pytest.mark.parametrize(
    "statement",
    [
        "import numpy",
        "from loragraph.errors import LoragraphError",
        "from ..errors import LoragraphError",
        "from .builder import Builder",
        "from . import builder",
        "from loragraph.graph import builder",
    ],
)
def test_an_import_within_the_order_is_accepted(tmp_path: Path, statement: str) -> None:
    """Foreign packages, earlier layers and the file's own layer may be imported."""
    (tmp_path / "graph").mkdir()
    (tmp_path / "errors.py").write_text("")
    (tmp_path / "graph" / "builder.py").write_text("")
    (tmp_path / "graph" / "inputs.py").write_text(statement + "\n")

    assert violations(tmp_path) == []


def test_a_module_outside_all_layers_is_found(tmp_path: Path) -> None:
    """A new top-level module has to be given its place in the order."""
    (tmp_path / "helpers.py").write_text("")

    assert violations(tmp_path) == ["helpers.py: helpers is in no layer; add it to ORDER"]


def test_a_family_never_mentions_lora() -> None:
    """An architecture's file knows nothing of adapters: builder.linear is the only seam."""
    mentions = [
        f"{path.name}:{number}: {line}"
        for path in sorted((SOURCE / "graph" / "arch").glob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "lora" in line.lower().replace(ROOT, "")
    ]
    assert mentions == []
