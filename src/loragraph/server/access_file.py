"""Where the access log of a server goes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loragraph.errors import ConfigError


@contextmanager
def access_lines(path: Path | None) -> Iterator[None]:
    """Writes the lines to a file (-: standard output; None: nowhere) meanwhile.

    ConfigError where it cannot be opened.
    """
    if path is None:
        yield
        return
    handler: logging.StreamHandler[Any]
    try:
        if str(path) == "-":
            handler = logging.StreamHandler(sys.stdout)
        else:
            handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", field="--access-log") from error
    logger = logging.getLogger("loragraph.access")
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
        handler.close()
