"""The keys that tell what was merged into a model file: `loragraph.merge.*`.

Three arrays, one entry an adapter in the order of merging: names (of the files, without folders),
digests, scales. A base that was merged into before keeps its entries in front. llama.cpp reads past
keys that it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loragraph.ggml.gguf import GGUFFile
from loragraph.tools.deltas import Use
from loragraph.tools.gguf_header import value_bytes

NAMES_KEY = "loragraph.merge.names"
DIGESTS_KEY = "loragraph.merge.digests"
SCALES_KEY = "loragraph.merge.scales"


def record_keys(base: GGUFFile, uses: Sequence[Use], names: Sequence[str]) -> dict[str, bytes]:
    """The three keys as bytes, entries that the base has already included."""
    old_names, old_digests, old_scales = _present(base)
    scales = np.array([*old_scales, *(use.scale for use in uses)], np.float32)
    return {
        NAMES_KEY: value_bytes([*old_names, *names]),
        DIGESTS_KEY: value_bytes([*old_digests, *(use.adapter.digest for use in uses)]),
        SCALES_KEY: value_bytes(scales),
    }


def _present(base: GGUFFile) -> tuple[list[str], list[str], list[float]]:
    """What an earlier merge wrote; nothing where the keys are no such arrays."""
    kinds = [base.type_of(key) for key in (NAMES_KEY, DIGESTS_KEY, SCALES_KEY)]
    if kinds != ["array of string", "array of string", "array of f32"]:
        return [], [], []
    names, digests = (
        [text.decode("utf-8", "replace") for text in base.strings(key).to_list()]
        for key in (NAMES_KEY, DIGESTS_KEY)
    )
    scales = base.numbers(SCALES_KEY).tolist()
    return (names, digests, scales) if len(names) == len(digests) == len(scales) else ([], [], [])
