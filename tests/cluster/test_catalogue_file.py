"""The catalogue's file: what was told is never lost, what is damaged is never half read."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loragraph.cluster import catalogue_file as module
from loragraph.cluster.catalogue import Catalogue
from loragraph.cluster.catalogue_file import FILE, CatalogueFile, read_catalogue
from loragraph.errors import CapacityError, FormatError, LifecycleError, OutputError
from tests.cluster.test_catalogue import content_of


def filled(folder: Path, n: int = 3) -> dict[str, object]:
    """A closed file with n changes; its snapshot."""
    with CatalogueFile(folder) as file:
        for i in range(n):
            file.commit(file.catalogue.register(f"a{i}", content_of(i)))
        return file.catalogue.snapshot()


def test_what_was_committed_is_there_again(tmp_path: Path) -> None:
    """For another writer, and for readers beside it."""
    expected = filled(tmp_path)
    with CatalogueFile(tmp_path) as file:
        assert file.catalogue.snapshot() == expected
        file.commit(file.catalogue.drop("a0"))
        assert read_catalogue(tmp_path).snapshot() == file.catalogue.snapshot()
    assert read_catalogue(tmp_path / "nothing").version == 0


def test_a_writer_that_was_killed_loses_nothing_that_it_told(tmp_path: Path) -> None:
    """And its lock goes with it."""
    code = (
        "import os, sys\n"
        "from loragraph.cluster.catalogue_file import CatalogueFile\n"
        "from loragraph.cluster.content import Content\n"
        "file = CatalogueFile(sys.argv[1])\n"
        "file.commit(file.catalogue.register('a', Content('x', '0' * 64, 1)))\n"
        "os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=os.environ, timeout=60)
    assert done.returncode == 9
    with CatalogueFile(tmp_path) as file:
        assert list(file.catalogue.entries) == ["a"]


def test_a_file_cut_anywhere_gives_a_state_that_was(tmp_path: Path) -> None:
    """The changes whose lines are whole; the next commit goes on from there."""
    expected = filled(tmp_path)
    path = tmp_path / FILE
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        version = max(sum(end <= cut for end in ends) - 1, 0)
        assert read_catalogue(tmp_path).version == version
        if cut % 37 == 0:
            with CatalogueFile(tmp_path) as file:
                file.commit(file.catalogue.register("z", content_of(9)))
            assert read_catalogue(tmp_path).version == version + 1
    path.write_bytes(data)
    assert read_catalogue(tmp_path).snapshot() == expected


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (b"nonsense\n", "line 5"),
        (b"[" * 5000 + b"\n", "line 5"),
        (b'{"version":5,"op":"drop","name":"a0"}\n', "line 5"),
        (b'{"version":3,"op":"drop","name":"a0"}\n', "line 5"),
        (b'{"version":4,"op":"drop","name":"zz"}\n', "line 5"),
        (b"\xff\n", "line 5"),
        (b"x" * 600_000, "line 5"),
    ],
)
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, line: bytes, where: str) -> None:
    """Nothing behind it can be trusted, and leaving it out would bring dropped names back."""
    filled(tmp_path)
    with open(tmp_path / FILE, "ab") as file:
        file.write(line)
    for opened in (read_catalogue, CatalogueFile):
        with pytest.raises(FormatError) as caught:
            opened(tmp_path)
        assert where in str(caught.value)


@pytest.mark.parametrize("head", [b"{}\n", b"5\n", b'{"format":2}\n', b'{"format":1}\n'])
def test_a_file_of_another_format_is_refused(tmp_path: Path, head: bytes) -> None:
    """And left as it is."""
    (tmp_path / FILE).write_bytes(head)
    with pytest.raises(FormatError, match="line 1"):
        CatalogueFile(tmp_path)
    assert (tmp_path / FILE).read_bytes() == head


def test_there_is_one_writer(tmp_path: Path) -> None:
    """A second one is told so, until the first has closed."""
    first = CatalogueFile(tmp_path)
    with pytest.raises(CapacityError, match="no other writer"):
        CatalogueFile(tmp_path)
    first.close()
    first.close()
    CatalogueFile(tmp_path).close()
    with pytest.raises(LifecycleError):
        first.commit(first.catalogue.register("a", content_of(1)))


def test_a_log_is_folded_into_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the file does not grow with every change ever made."""
    monkeypatch.setattr(module, "_MIN_CHANGES", 5)
    with CatalogueFile(tmp_path) as file:
        file.commit(file.catalogue.register("a", content_of(1)))
        for i in range(30):
            file.commit(file.catalogue.swap("a", content_of(i)))
            assert len((tmp_path / FILE).read_bytes().splitlines()) <= 7
            assert read_catalogue(tmp_path).snapshot() == file.catalogue.snapshot()
    assert not (tmp_path / "catalogue.new").exists()


def test_a_change_that_cannot_be_written_did_not_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: the file and the catalogue are as before, and the next change is fine."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with CatalogueFile(tmp_path) as file:
        file.commit(file.catalogue.register("a", content_of(1)))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OutputError, match="No space left"):
                file.commit(file.catalogue.register("b", content_of(2)))
        assert list(file.catalogue.entries) == ["a"]
        assert list(read_catalogue(tmp_path).entries) == ["a"]
        file.commit(file.catalogue.register("c", content_of(3)))
        assert list(read_catalogue(tmp_path).entries) == ["a", "c"]


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path: Path) -> None:
    """With the place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        CatalogueFile(tmp_path / "file" / "folder")


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    """Sources may be signed URLs."""
    filled(tmp_path, 0)
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    assert isinstance(read_catalogue(tmp_path), Catalogue)
