"""llama-server's field `samplers`: which filters are on. Their order is fixed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loragraph.errors import InvalidRequestError
from loragraph.server.llamacpp.answers import SAMPLERS
from loragraph.server.sampling import SamplingBody, refuse_speculative, refuse_unsupported

_LETTERS = "edskypmxt"  # of SAMPLERS, in their order
_OTHER_NAMES = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature"}
_IGNORED = {"infill"}  # a filter of code completions that merges candidates; see docs/api.md
_NEUTRAL: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
}


def own_sampling(body: SamplingBody) -> SamplingBody:
    """The body's sampling fields alone, with those that `samplers` leaves out switched off.

    Empty stop strings are left out, as in llama-server. InvalidRequestError for an unknown filter,
    and for another order than llama.cpp's default.
    """
    own = {name: getattr(body, name) for name in SamplingBody.model_fields}
    if isinstance(own["stop"], list):
        own["stop"] = [text for text in own["stop"] if text]
    chosen = own.pop("samplers")
    if chosen is not None:
        names = _names(chosen)
        for name in SAMPLERS:
            if name not in names:
                own |= _NEUTRAL[name]
    return SamplingBody.model_construct(**own)


def _names(chosen: list[str] | str) -> tuple[str, ...]:
    if isinstance(chosen, str):
        given = [SAMPLERS[_LETTERS.index(x)] if x in _LETTERS else x for x in chosen]
    else:
        given = [_OTHER_NAMES.get(name, name) for name in chosen if name not in _IGNORED]
    unknown = [name for name in given if name not in SAMPLERS]
    if unknown:
        raise InvalidRequestError(
            f"samplers: expected some of {', '.join(SAMPLERS)}, got {unknown[0]!r:.40}",
            param="samplers",
        )
    names = tuple(given)
    if names != tuple(name for name in SAMPLERS if name in names):
        raise InvalidRequestError(
            f"samplers: expected the order {', '.join(SAMPLERS)}, which cannot be changed here",
            param="samplers",
        )
    return names


def refuse_others(others: Mapping[str, Any]) -> None:
    """InvalidRequestError for a field outside of ours that asks for what there is not.

    Other unknown fields mean nothing, as in llama-server.
    """
    refuse_unsupported({name: value for name, value in others.items() if value is not None})
    refuse_speculative(others)
