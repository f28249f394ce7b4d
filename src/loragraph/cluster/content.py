"""What a name of the catalogue means: a source, its digest and defaults, checked. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from loragraph.errors import InvalidRequestError

MAX_SOURCE = 4096
"""Characters of a path or URL."""

MAX_F32 = 3.4e38
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class Content:
    """What a name is to mean. `source` may hold a signed URL, so it is never shown whole."""

    source: str = field(repr=False)
    digest: str  # SHA-256 of the file, 64 hexadecimal digits
    size_bytes: int
    scale: float = 1.0  # where a request gives none
    pinned: bool = False

    def __post_init__(self) -> None:
        _check_content(self)


def redacted(source: str) -> str:
    """A source as it may be shown: without user, password, query and fragment."""
    if "://" not in source:
        return source
    scheme, _, rest = source.partition("://")
    rest = re.split(r"[?#]", rest, maxsplit=1)[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def _check_content(content: Content) -> None:
    """InvalidRequestError for what cannot be an entry."""
    source, scale = content.source, content.scale
    if not isinstance(source, str) or not 0 < len(source) <= MAX_SOURCE or "\0" in source:
        raise InvalidRequestError(
            f"source: expected a path or URL of 1 to {MAX_SOURCE} characters", param="source"
        )
    if "://" in source:
        _check_url(source)
    if not isinstance(content.digest, str) or not _DIGEST.fullmatch(content.digest):
        raise InvalidRequestError(
            f"digest: expected 64 hexadecimal digits, got {content.digest!r:.80}", param="digest"
        )
    size = content.size_bytes
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_BYTES:
        raise InvalidRequestError(
            f"size_bytes: expected a number of bytes, got {size!r:.40}", param="size_bytes"
        )
    good = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not good or not math.isfinite(scale) or abs(scale) > MAX_F32:
        raise InvalidRequestError(
            f"scale: expected a finite number, got {scale!r:.40}", param="scale"
        )
    if not isinstance(content.pinned, bool):
        raise InvalidRequestError("pinned: expected true or false", param="pinned")


def _check_url(source: str) -> None:
    try:
        password = urlsplit(source).password
    except ValueError as error:
        raise InvalidRequestError("source: expected a URL", param="source") from error
    if password is not None:
        raise InvalidRequestError(
            f"source: expected a URL without a password, got one for {redacted(source)}",
            param="source",
            hint="the catalogue is written to disk; give each replica its credentials",
        )
