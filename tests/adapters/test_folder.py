"""A folder of PEFT or MLX in place of an adapter's file: as the file that convert() makes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loragraph import (
    Adapter,
    Engine,
    LoragraphError,
    Model,
    combine_files,
    convert,
    diagnose,
    generate,
    merge,
    plan,
    resize_file,
)
from loragraph.adapters.draft import read_draft
from loragraph.adapters.folder import folder_draft
from loragraph.adapters.gguf import check_adapter, memory_of, read_adapter
from loragraph.errors import AdapterFormatError, BackendError, ConfigError, UnsupportedError
from loragraph.ggml.gguf import GGUFFile
from loragraph.ggml.lib import Library
from loragraph.tools.inspect import inspect_file, read_base_info
from tests.adapters.convert.folders import layers, lora, peft
from tests.adapters.convert.test_golden import ABOUT, GOLDEN, base_of, converted

NAME = "plain"
FOLDER, BASE = GOLDEN / NAME, base_of(NAME)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go; afterwards none is left."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The folder converted beforehand."""
    return converted(NAME, tmp_path)[0]


@pytest.mark.parametrize("name", ABOUT)
def test_the_header_is_that_of_the_converted_file(name: str, lib: Library, tmp_path: Path) -> None:
    """From headers alone: the same pairs, keys and bytes, for every kind that PEFT trains."""
    base = read_base_info(lib, base_of(name))
    path, _ = converted(name, tmp_path)
    made, read = folder_draft(lib, GOLDEN / name, base), read_draft(lib, path)

    def shapes(draft: object) -> object:
        pairs = draft.pairs  # type: ignore[attr-defined]
        return {
            target: [
                part and replace(part, offset=0, path=Path())
                for part in (pair.a, pair.b, *pair.vectors)
            ]
            for target, pair in pairs.items()
        }

    assert shapes(made) == shapes(read)
    assert memory_of(made) == memory_of(read)
    assert made.scalars.items() <= read.scalars.items()
    assert made.types.items() <= read.types.items()
    assert (made.alpha, made.invocation_tokens) == (read.alpha, read.invocation_tokens)
    assert (made.strays, made.duplicates, made.norms) == (read.strays, read.duplicates, read.norms)


def test_a_folder_loads_as_its_file(temporary: Path, file: Path) -> None:
    """Adapter.load and generate: the same content, the same text."""
    with Model.load(BASE, n_threads=1) as model:
        assert Adapter.load(FOLDER, model).digest == Adapter.load(file, model).digest
        texts = [
            generate(model, "the thing", adapters={path: 1.0}, n_ctx=64, temperature=0.0,
                     max_tokens=12, ignore_eos=True).text
            for path in (FOLDER, file)
        ]  # fmt: skip
    assert texts[0] == texts[1]


def test_the_engine_takes_folders(temporary: Path, file: Path, tmp_path: Path) -> None:
    """In `adapters`, load_adapter() and by name in `adapter_dir`, where NAME.gguf comes first."""
    folder = tmp_path / "adapters"
    shutil.copytree(FOLDER, folder / "mine")
    shutil.copytree(GOLDEN / "rslora", folder / "both")
    shutil.copy(file, folder / "both.gguf")
    (folder / "empty").mkdir()
    with Engine(BASE, {"first": FOLDER}, adapter_dir=folder, n_ctx=128, n_threads=1) as engine:
        assert engine.registry.names() == ["both", "first", "mine"]
        engine.load_adapter("second", FOLDER)
        for name in ("first", "second", "mine", "both"):
            engine.pin(name)
            assert engine.resolve(name).digest is not None
        digests = {engine.resolve(name).digest for name in ("first", "second", "mine", "both")}
        with Model.load(BASE, n_threads=1) as model:
            assert digests == {Adapter.load(file, model).digest}


def test_registering_reads_no_value(temporary: Path, tmp_path: Path) -> None:
    """A folder with NaN in it is found out by the load, not before; the error names it."""
    tensors = lora(layers(("self_attn.q_proj",)))
    next(iter(tensors.values()))[0, 0] = np.nan
    folder = peft(tmp_path / "broken", tensors)
    with Engine(BASE, {"broken": folder}, n_ctx=128, n_threads=1) as engine:
        header = engine.resolve("broken").header
        assert (header.rank_max, header.n_targets) == (4, 2)
        with pytest.raises(AdapterFormatError, match=f"{folder}.*finite"):
            engine.pin("broken")


def test_a_folder_is_read_again_after_eviction(temporary: Path) -> None:
    """Its content is the same then, so the generation goes on."""
    adapters = {"one": FOLDER, "two": GOLDEN / "rslora"}
    with Engine(BASE, adapters, max_adapters=1, n_ctx=128, n_threads=1) as engine:
        for name in ("one", "two", "one"):
            engine.pin(name)
            engine.unpin(name)
        assert engine.resolve("one").counts.n_loads == 2
        assert engine.resolve("one").number == 1


def test_tools_take_folders(temporary: Path, file: Path, lib: Library, tmp_path: Path) -> None:
    """merge, combine, resize, plan, inspect and doctor give what they give for the file."""
    paths = (FOLDER, file)
    outputs = []
    for i, path in enumerate(paths):
        out = [tmp_path / f"{kind}{i}.gguf" for kind in ("merged", "both", "small")]
        merge(BASE, {path: 0.5}, out[0])
        combine_files({path: 0.5, GOLDEN / "rslora": 1.0}, out[1], base=BASE)
        resize_file(path, out[2], rank=2, base=BASE)
        outputs.append(out)
    for mine, theirs in zip(*outputs, strict=True):
        assert tensors_of(lib, mine) == tensors_of(lib, theirs)
    costs = [replace(plan(BASE, [path]).adapters[0], name="") for path in paths]
    assert costs[0] == costs[1]
    facts = [inspect_file(lib, path, BASE) for path in paths]
    assert [one["files"] for one in facts] == [[str(path)] for path in paths]
    for key in ("digest", "weights", "targets", "problems"):
        assert facts[0][key] == facts[1][key]
    found = [diagnose(BASE, path, text="the thing", n_threads=1).to_dict() for path in paths]
    assert found[0] == found[1]


def tensors_of(lib: Library, path: Path) -> dict[str, bytes]:
    """The bytes of every tensor."""
    with GGUFFile(lib, path) as file, path.open("rb") as data:
        found = {}
        for name, info in file.tensors.items():
            data.seek(info.offset)
            found[name] = data.read(info.nbytes)
        return found


def test_without_a_base_a_folder_is_refused(lib: Library, tmp_path: Path) -> None:
    """combine, resize and inspect say that they need one, and for which folder."""
    out = tmp_path / "out.gguf"
    for call in (
        lambda: combine_files({FOLDER: 1.0}, out),
        lambda: resize_file(FOLDER, out, rank=1),
        lambda: inspect_file(lib, FOLDER),
        lambda: read_adapter(lib, FOLDER, None),
    ):
        with pytest.raises(ConfigError, match=f"{FOLDER} is a folder.*base is needed"):
            call()
    assert not out.exists()


def test_what_is_wrong_with_a_folder_names_it(
    temporary: Path, lib: Library, tmp_path: Path
) -> None:
    """Of a base, a tensor or a file alike; check_adapter lists it."""
    other = peft(tmp_path / "other", lora({"model.layers.0.self_attn.q_proj": (16, 16)}))
    dora = tmp_path / "unlike"
    shutil.copytree(FOLDER, dora)
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    empty = tmp_path / "empty"
    empty.mkdir()
    base = read_base_info(lib, BASE)
    for folder in (other, dora, empty):
        (problem,) = check_adapter(lib, folder, base)
        assert str(problem).count(str(folder)) == 1
        for load in (read_adapter, folder_draft):
            with pytest.raises(LoragraphError) as caught:
                load(lib, folder, base)
            assert str(caught.value) == str(problem)


def test_pickled_weights_are_never_read_on_the_way(lib: Library, tmp_path: Path) -> None:
    """Only convert() reads them, and says so."""
    folder = peft(tmp_path / "old")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match=r"old.*pickled.*convert"):
        read_adapter(lib, folder, read_base_info(lib, BASE))


@pytest.mark.parametrize("full", [False, True], ids=["no such place", "disk full"])
def test_without_a_place_for_the_temporary_file(
    full: bool, lib: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the machine's, names the folder, and leaves nothing behind."""
    place = tmp_path / "temporary"
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    if full:
        place.mkdir()
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(os, "replace", lambda *_paths: (_ for _ in ()).throw(error))
    with pytest.raises(BackendError, match=f"{FOLDER}.*no place for a temporary file"):
        read_adapter(lib, FOLDER, read_base_info(lib, BASE))
    assert not full or list(place.iterdir()) == []


def test_a_folder_for_a_split_base(lib: Library, temporary: Path, tmp_path: Path) -> None:
    """Whichever parts the base has."""
    parts = merge(BASE, {FOLDER: 1.0}, tmp_path / "parts.gguf", max_split_bytes=40_000).paths
    assert len(parts) > 1
    with ExitStack() as stack:
        model = stack.enter_context(Model.load(parts[0], n_threads=1))
        path, _ = convert(GOLDEN / "modules_to_save", parts[0], tmp_path / "a.gguf")
        for given in (GOLDEN / "modules_to_save", path):
            stack.enter_context(model.load_adapter(given))
        one, two = model.adapters
        assert one.digest == two.digest
