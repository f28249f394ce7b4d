"""Split models: the parts must be all there, in order, and of one model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loragraph.engine.model import Model
from loragraph.errors import GGUFError
from tests.tiny import TinyLlama, gguf_bytes


def part_name(number: int, count: int = 3) -> str:
    """The name of part `number`, counted from 1."""
    return f"tiny-{number:05d}-of-{count:05d}.gguf"


def rewritten(path: Path, changes: dict[str, Any], *, first: bool = False) -> None:
    """Writes part 1 or 2 of 3 again with other keys."""
    tensors = TinyLlama().raw_tensors()
    start = 0 if first else len(tensors) // 3
    part = tensors[start : start + len(tensors) // 3]
    keys: dict[str, Any] = dict(TinyLlama().metadata()) if first else {}
    keys |= {
        "split.no": np.uint16(0 if first else 1),
        "split.count": np.uint16(3),
        "split.tensors.count": np.int32(len(tensors)),
    }
    merged = {key: value for key, value in (keys | changes).items() if value is not None}
    path.write_bytes(gguf_bytes(merged, part))


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A right model in three parts."""
    return TinyLlama().write_split(tmp_path, 3)


def load(path: Path) -> None:
    """Loads and closes."""
    with Model.load(path, n_threads=1):
        pass


def test_all_parts_are_right(parts: list[Path]) -> None:
    """The three parts load through the first, each from its own map."""
    with Model.load(parts[0], n_threads=1) as model:
        assert {w.info.path for w in model.weights.by_name.values()} == set(parts)


@pytest.mark.parametrize("number", [2, 3])
def test_another_part_is_refused(number: int, parts: list[Path]) -> None:
    """The path of a later part asks for the first one."""
    with pytest.raises(GGUFError, match=r"general\.architecture|first part"):
        load(parts[number - 1])


@pytest.mark.parametrize("number", [2, 3])
def test_a_missing_part_is_named(number: int, parts: list[Path]) -> None:
    """Each missing part is named by its path."""
    parts[number - 1].unlink()
    with pytest.raises(GGUFError, match=part_name(number)):
        load(parts[0])


def test_a_renamed_first_part_is_refused(parts: list[Path]) -> None:
    """Without the numbers in its name the others cannot be found."""
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(GGUFError, match="give the path of the first part"):
        load(renamed)


def test_swapped_parts_are_refused(parts: list[Path]) -> None:
    """Parts under each other's names are told apart."""
    shutil.copy(parts[2], parts[1])
    with pytest.raises(GGUFError, match="expected part 2 of 3, got part 3 of 3"):
        load(parts[0])


WRONG_SECOND: dict[str, tuple[dict[str, Any], str]] = {
    "of another count": ({"split.count": np.uint16(4)}, "got part 2 of 4"),
    "no number": ({"split.no": None}, "split.no"),
    "number a string": ({"split.no": "1"}, "expected type integer"),
    "number negative": ({"split.no": -1}, "split.no"),
    "no count": ({"split.count": None}, "split.count"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG_SECOND.values(), ids=WRONG_SECOND)
def test_a_wrong_second_part(changes: dict[str, Any], words: str, parts: list[Path]) -> None:
    """A second part whose keys contradict the first is a GGUFError that says where."""
    rewritten(parts[1], changes)
    with pytest.raises(GGUFError, match=words):
        load(parts[0])


WRONG_FIRST: dict[str, tuple[dict[str, Any], str]] = {
    "count too high": ({"split.count": np.uint16(4)}, "first part of a model split in 4"),
    "count absurd": ({"split.count": np.uint32(1 << 30)}, "split.count"),
    "count negative": ({"split.count": np.int32(-1)}, "split.count"),
    "count a string": ({"split.count": "3"}, "expected type integer"),
    "no number": ({"split.no": None}, "split.no"),
    "fewer tensors": ({"split.tensors.count": np.int32(7)}, "expected 7 tensors"),
    "no count": ({"split.count": None}, "missing tensor"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG_FIRST.values(), ids=WRONG_FIRST)
def test_a_wrong_first_part(changes: dict[str, Any], words: str, parts: list[Path]) -> None:
    """A first part whose keys do not fit the files is a GGUFError that says where."""
    rewritten(parts[0], changes, first=True)
    with pytest.raises(GGUFError, match=words):
        load(parts[0])


def test_a_tensor_in_two_parts(parts: list[Path]) -> None:
    """A name that stands in two parts is refused."""
    tensors = TinyLlama().raw_tensors()
    keys = {"split.no": np.uint16(1), "split.count": np.uint16(3)}
    parts[1].write_bytes(gguf_bytes(keys, tensors[:3]))
    with pytest.raises(GGUFError, match="stands in two parts"):
        load(parts[0])


def test_a_damaged_part(parts: list[Path]) -> None:
    """A part that is cut, empty or no GGUF file is named."""
    whole = parts[1].read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"x" * 100):
        parts[1].write_bytes(data)
        with pytest.raises(GGUFError, match=part_name(2)):
            load(parts[0])


@pytest.mark.parametrize("name", ["missing.gguf", "", "nul\0name.gguf", "."])
def test_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    """A path that cannot be opened is a GGUFError."""
    with pytest.raises(GGUFError):
        load(tmp_path / name)
