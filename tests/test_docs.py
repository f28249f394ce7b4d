"""What the documents say must hold: commands, flags, code blocks, dependencies."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import loragraph
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.lib import load_library
from tests.tiny import LINEAR_TARGETS

ROOT = Path(__file__).resolve().parent.parent
GUIDES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md")
DOCUMENTS = (
    *GUIDES,
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
    *sorted((ROOT / "demos").glob("*.md")),
)
SCRIPTS = tuple(sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file()))
PACKAGE = ROOT / "src" / "loragraph"
CLI = PACKAGE / "cli" / "main.py"

ADAPTED = {"all seven linear weights": set(LINEAR_TARGETS)}
"""What a row of demos/README.md says in words."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SEPARATORS = {"|", "||", "&&", ";", "&"}


@dataclass(frozen=True)
class Command:
    """One simple command of a document: its words, and where it stands for the message."""

    words: tuple[str, ...]
    where: str


def code_blocks(text: str, languages: set[str]) -> list[str]:
    """The fenced blocks of the given languages."""
    return [body for language, body in FENCE.findall(text) if language in languages]


def shell_lines(text: str) -> Iterator[str]:
    """Command lines: all of a `bash` block, those after a `$ ` of a `console` block."""
    for language, body in FENCE.findall(text):
        lines = body.replace("\\\n", " ").splitlines()
        if language in {"bash", "sh"}:
            yield from lines
        elif language == "console":
            yield from (line[2:] for line in lines if line.startswith("$ "))


def split_commands(line: str) -> Iterator[tuple[str, ...]]:
    """The simple commands of a line, without comments, assignments and redirections' operators."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in SEPARATORS:
            if words or not re.match(r"[A-Za-z_]\w*=", word):
                words.append(word)
        elif words:
            yield tuple(words)
            words = []


def commands(path: Path) -> list[Command]:
    """All commands that a document shows, and inline code that calls `loragraph`."""
    text = path.read_text(encoding="utf-8")
    lines = list(shell_lines(text))
    lines += re.findall(r"`(loragraph [^`]+)`", FENCE.sub("", text))
    return [
        Command(words, f"{path.name}: {line}") for line in lines for words in split_commands(line)
    ]


def requirements(project: dict[str, Any]) -> list[Requirement]:
    """What pyproject.toml names: runtime, every extra, and the build."""
    extras = project["project"]["optional-dependencies"].values()
    lines = [*project["project"]["dependencies"], *(line for extra in extras for line in extra)]
    return [Requirement(line) for line in [*lines, *project["build-system"]["requires"]]]


@cache
def pyproject() -> dict[str, Any]:
    """pyproject.toml, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def command_tree() -> Any:
    """The command line as typer builds it (a click group)."""
    if not CLI.exists():
        pytest.skip("the command line is not written yet")
    main = importlib.import_module("loragraph.cli.main")
    return typer.main.get_command(main.app)


def flags(command: Any) -> set[str]:
    """Every spelling of every option of a command."""
    spelt = {"--help"}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            spelt |= {*parameter.opts, *parameter.secondary_opts}
    return spelt


def complaints(command: Command, tree: Any) -> list[str]:
    """What is wrong with a documented `loragraph ...` command."""
    node, known = tree, flags(tree)
    name = "loragraph"
    found = []
    for word in command.words[1:]:
        if word == "--":
            break
        if re.fullmatch(r"--?[A-Za-z][\w-]*(=.*)?", word):
            if word.split("=")[0] not in known:
                found.append(f"{name} has no {word}, in {command.where}")
        elif hasattr(node, "commands"):
            if word not in node.commands:
                return [*found, f"{name} has no sub-command {word}, in {command.where}"]
            node, name = node.commands[word], f"{name} {word}"
            known = flags(node)
    return found


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_every_script_named_exists_and_is_executable(path: Path) -> None:
    """A reader who copies `scripts/x` can run it."""
    named = set(
        re.findall(r"(?<![\w/])(?:scripts|\.ci)/[a-z_]+\b(?!\.\w|/)", path.read_text("utf-8"))
    )

    assert named, f"{path.name} names no script"
    assert [name for name in sorted(named) if not os.access(ROOT / name, os.X_OK)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_and_flag_named_exists(path: Path) -> None:
    """Each `loragraph` command line in the documents is one that the program accepts."""
    shown = [command for command in commands(path) if Path(command.words[0]).name == "loragraph"]
    if not shown:
        return  # not every document shows the command line; the next test wants README to
    tree = command_tree()

    assert [line for command in shown for line in complaints(command, tree)] == []


def test_readme_shows_every_sub_command() -> None:
    """No sub-command of `loragraph` is missing from README."""
    tree = command_tree()
    shown = {command.words[1] for command in commands(GUIDES[0]) if command.words[0] == "loragraph"}

    assert set(tree.commands) - shown == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_python_blocks_compile(path: Path) -> None:
    """Every python block of the documents is valid Python."""
    for number, block in enumerate(code_blocks(path.read_text("utf-8"), {"python", "py"})):
        compile(block, f"{path.name} block {number}", "exec")


def test_readme_uses_only_public_names() -> None:
    """Every `loragraph.Name` in README's python blocks is public."""
    if not loragraph.__all__:
        pytest.skip("no name is public yet")
    blocks = "\n".join(code_blocks(GUIDES[0].read_text("utf-8"), {"python"}))
    used = set(re.findall(r"\bloragraph\.(\w+)", blocks))

    assert used, "README shows nothing of the Python interface"
    assert used - set(loragraph.__all__) == set()


@pytest.mark.parametrize("path", [*DOCUMENTS, *SCRIPTS], ids=lambda path: path.name)
def test_no_machine_specific_paths(path: Path) -> None:
    """Documents and scripts hold no absolute path of the machine they were written on."""
    pattern = r"(?<![\w.}])/(?:home|root|work|Users|opt|tmp|mnt|srv)/|file://|[A-Z]:\\"
    found = [
        f"{number}: {line}"
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path: Path) -> None:
    """Every relative link names a file of the checkout."""
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text("utf-8"))

    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_placeholder_is_left(path: Path) -> None:
    """Nothing that a writer meant to fill in later, `@name@`, is in a document."""
    assert re.findall(r"@\w+@", path.read_text("utf-8")) == []


def test_the_demo_adapters_are_as_documented() -> None:
    """demos/README.md has each adapter's bytes, rank, alpha and targets."""
    text = (ROOT / "demos" / "README.md").read_text("utf-8")
    cells = [r"`adapters/(\w+)\.gguf`", ".*?", r"(\d+)", r"(\d+)", "(.*?)", r"([\d,]+)"]
    rows = re.findall(r"^\| " + r" \| ".join(cells) + r" \|$", text, re.MULTILINE)
    folder = ROOT / "demos" / "adapters"

    assert {name for name, *_ in rows} == {path.stem for path in folder.iterdir()}
    for name, rank, alpha, targets, n_bytes in rows:
        path = folder / f"{name}.gguf"
        with GGUFFile(load_library(), path) as file:
            names = {tensor.split(".")[2] for tensor in file.tensors}
            ranks = {info.ne[1] for key, info in file.tensors.items() if key.endswith("lora_a")}
            assert file.real("adapter.lora.alpha") == float(alpha), name
        assert ranks == {int(rank)}, name
        assert names == ADAPTED.get(targets, set(targets.split(", "))), name
        assert path.stat().st_size == int(n_bytes.replace(",", "")), name


def documented_files() -> dict[str, set[str]]:
    """Layer -> files that its section of docs/architecture.md names; `*` is a part of a name."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    layers = text.split("\n## Layers\n")[1].split("\n## ")[0]
    sections = re.findall(r"^### `(\w+)/`(.*?)(?=^### |\Z)", layers, re.MULTILINE | re.DOTALL)
    return {
        layer: set(re.findall(r"`([\w/*]+\.(?:py|c|h))`", section)) for layer, section in sections
    }


def source_files() -> set[str]:
    """Paths of the package's files that are written by hand, without those at its top."""
    generated = {"__init__.py", "_declarations.py", "_kernels.c"}
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*/*")
        if path.suffix in {".py", ".c", ".h"} and path.name not in generated
    }


def test_architecture_names_every_source_file() -> None:
    """A reader finds each file of a layer in the layer's section of docs/architecture.md."""
    named = [f"{layer}/{name}" for layer, names in documented_files().items() for name in names]
    files = source_files()
    assert len(files) > 20
    assert sorted(f for f in files if not any(fnmatch(f, name) for name in named)) == []


def test_architecture_names_no_file_that_is_gone() -> None:
    """Each file that a section names exists, in its layer or among the tests."""
    files = source_files()
    gone = [
        f"{layer}: {name}"
        for layer, names in documented_files().items()
        for name in names
        if not any(fnmatch(file, f"{layer}/{name}") for file in files)
        and not any((ROOT / "tests").rglob(Path(name).name))
    ]
    assert sorted(gone) == []


def test_every_dependency_has_a_reason() -> None:
    """The tables of docs/architecture.md name each dependency of pyproject.toml and no other."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    section = text.split("\n## Dependencies\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([A-Za-z][\w.-]*)` \| (.*?) \|$", section, re.MULTILINE)
    wanted = {canonicalize_name(requirement.name) for requirement in requirements(pyproject())}

    assert {canonicalize_name(name) for name, _ in rows} == wanted
    assert [name for name, reason in rows if len(reason) < 10] == []


def test_every_dependency_is_pinned() -> None:
    """constraints.txt holds one exact version of each dependency, inside pyproject's range."""
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            assert name not in pins, f"{name} is pinned twice"
            pins[name] = version
    wrong = [
        f"{requirement}: pinned to {pins.get(canonicalize_name(requirement.name))}"
        for requirement in requirements(pyproject())
        if pins.get(canonicalize_name(requirement.name), "") not in requirement.specifier
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("loragraph run a.gguf -p 'a b' # why", [("loragraph", "run", "a.gguf", "-p", "a b")]),
        ("A=1 x | loragraph inspect f && y", [("x",), ("loragraph", "inspect", "f"), ("y",)]),
        ("# only a comment", []),
    ],
)
def test_command_lines_are_split(line: str, expected: list[tuple[str, ...]]) -> None:
    """The splitter of this file understands quotes, comments, assignments and pipes."""
    assert list(split_commands(line)) == expected


def test_a_wrong_command_is_found() -> None:
    """The check of command lines sees a wrong flag, sub-command and place of a flag."""
    app = typer.Typer()

    @app.command()
    def run(base: str, temp: float = 0.0) -> None: ...

    @app.command()
    def inspect(file: str) -> None: ...

    tree = typer.main.get_command(app)

    def check(line: str) -> int:
        return len(complaints(Command(tuple(line.split()), line), tree))

    assert check("loragraph run base.gguf --temp -0.5") == 0
    assert check("loragraph --help") == 0
    assert check("loragraph run base.gguf --heat 1") == 1
    assert check("loragraph serve base.gguf") == 1
    assert check("loragraph inspect file --temp 1") == 1
