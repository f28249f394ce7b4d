"""Which adapters a request wants: from `lora`, `adapters`, `model`, and the server's default mix.

`lora` comes first, then `adapters`, then an adapter's name as `model`, then the default mix; two
that disagree are a 400. `[]`, `{}` and scales of 0 mean the base.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from loragraph.engine.registry import Generation
from loragraph.engine.request import AdapterUse
from loragraph.errors import InvalidRequestError, ModelNotFoundError
from loragraph.server.sidecar import NO_DEFAULTS, Defaults
from loragraph.server.state import ServerState
from loragraph.vocab.chat import ChatTemplate

MAX_ENTRIES = 256


@dataclass(frozen=True, slots=True)
class RequestMix:
    """What a request is to be computed with."""

    model: str  # the name that answers carry: the adapter's if it was chosen so, else the base's
    scales: Mapping[str, float]  # names and user scales, zeros included; empty: the base
    is_default: bool = False  # nothing was asked for, so these are the server's
    defaults: Defaults = NO_DEFAULTS  # what its adapters give a request that says nothing itself
    generations: tuple[Generation, ...] = ()  # what the names meant, all at one moment

    def template(self, state: ServerState) -> ChatTemplate | None:
        """The template of its chats."""
        return self.defaults.chat_template or state.engine.model.chat_template


def resolve_mix(
    state: ServerState,
    model: str | None = None,
    lora: Any = None,
    adapters: Any = None,
    *,
    key: str = "",
    adapter_defaults: bool | None = None,
    adapters_field: str = "adapters",
) -> RequestMix:
    """The mix of a request's fields. Reads folder and sidecars of adapters, so not on the loop.

    `key` is the API key that came along; `adapter_defaults` False leaves sidecars out, but for who
    may use an adapter; `adapters_field`: where `adapters` stood. ModelNotFoundError for an unknown
    name, PermissionDeniedError for an adapter that is not for that key, FormatError for a wrong
    sidecar, InvalidRequestError for all else.
    """
    mix = _choose(state, model, lora, adapters, adapters_field)
    names = [name for name, scale in mix.scales.items() if scale != 0]
    generations = tuple(state.engine.registry.resolve_all(names))
    defaults = state.sidecars.for_mix(generations, key)
    if adapter_defaults is False:
        defaults = NO_DEFAULTS
    return replace(mix, defaults=defaults, generations=generations)


def _choose(
    state: ServerState, model: str | None, lora: Any, adapters: Any, adapters_field: str
) -> RequestMix:
    """The mix, whoever asks for it."""
    base, named = _model(state, model)
    by_lora = None if lora is None else parse_scales(state, lora, "lora")
    by_adapters = None if adapters is None else parse_scales(state, adapters, adapters_field)
    shown = base if named is None else named
    chosen = by_adapters if by_lora is None else by_lora
    if by_lora is not None and by_adapters is not None and _on(by_lora) != _on(by_adapters):
        raise InvalidRequestError(
            f"'lora' and '{adapters_field}' disagree: {_shown(by_lora)} and {_shown(by_adapters)}",
            param=adapters_field,
        )
    if chosen is None:
        if named is not None:
            return RequestMix(shown, {named: default_scale(state, named)})
        return RequestMix(shown, state.default_mix, is_default=True)
    if named is not None and named not in _on(chosen):
        field = adapters_field if by_lora is None else "lora"
        raise InvalidRequestError(
            f"'model' and '{field}' disagree: {named!r} and {_shown(chosen)}",
            param=field,
            hint="name the base as the model, or give that adapter a scale",
        )
    return RequestMix(shown, chosen)


def parse_scales(state: ServerState, value: Any, field: str) -> dict[str, float]:
    """Names with scales of [{"id" or "name", "scale"}], ["name"] or {"name": scale}.

    Names are not looked up here but for ids; InvalidRequestError for another form, a scale that is
    not finite and an adapter given twice.
    """
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list):
        if any(isinstance(entry, Mapping) and "id" in entry for entry in value):
            state.sync_ids()
        pairs = [_entry(state, entry, field) for entry in value[: MAX_ENTRIES + 1]]
    else:
        raise InvalidRequestError(
            f"Field '{field}': Error: '{field}' must be an array of objects with 'id' (or 'name') "
            "and 'scale' fields",
            param=field,
        )
    if len(pairs) > MAX_ENTRIES:
        raise InvalidRequestError(f"{field}: expected at most {MAX_ENTRIES} adapters", param=field)
    scales: dict[str, float] = {}
    for name, scale in pairs:
        if name in scales:
            raise InvalidRequestError(f"{field}: {name!r:.80} is given twice", param=field)
        scales[name] = _scale(name, scale, field)
    return scales


def default_scale(state: ServerState, name: str) -> float:
    """The scale of an adapter that is named without one; 1 for an unknown name.

    FormatError for a sidecar that is wrong.
    """
    try:
        return state.sidecars.of(state.engine.registry.resolve(name)).scale
    except ModelNotFoundError:
        return 1.0  # whoever looks it up finds out


def uses_json(uses: tuple[AdapterUse, ...]) -> list[dict[str, Any]]:
    """The field `adapters` of an answer: which adapters made it."""
    return [
        {
            "name": use.name,
            "generation": use.generation,
            "digest": use.digest,
            "scale": use.scale,
            "active": use.active_from is not None,
            "active_from": use.active_from,
        }
        for use in uses
    ]


def _model(state: ServerState, model: str | None) -> tuple[str, str | None]:
    """(base's name, adapter's name or None) of "name", "base:name" or a name of the base."""
    if not model or model in state.base_names:
        return model or state.base_name, None
    registry = state.engine.registry
    try:
        return state.base_name, registry.resolve(model).name
    except ModelNotFoundError:
        base, _, name = model.partition(":")
        if base in state.base_names and name:
            try:
                return base, registry.resolve(name).name
            except ModelNotFoundError:
                pass
    names = registry.names()
    known = ", ".join([state.base_name, *names[:8]])
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    raise ModelNotFoundError(
        f"no model is called {model!r:.160}; known: {known}{more}", param="model"
    )


def _entry(state: ServerState, entry: Any, field: str) -> tuple[str, Any]:
    """Name and scale; keys of GET /lora-adapters and others mean nothing, as in llama-server."""
    if isinstance(entry, str):
        return entry, default_scale(state, entry)
    if not isinstance(entry, Mapping):
        raise InvalidRequestError(
            f"Field '{field}': Error: '{field}' must be an array of objects with 'id' (or 'name') "
            f"and 'scale' fields, got {entry!r:.80}",
            param=field,
        )
    if "id" not in entry:
        return _named_entry(entry, field)
    number = entry["id"]
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidRequestError(
            f"{field}: expected an integer id, got {number!r:.80}", param=field
        )
    name = state.ids.name_of(number)
    if entry.get("name") not in (None, name):
        raise InvalidRequestError(
            f"{field}: 'id' and 'name' disagree: {number} is {name!r:.80}, not "
            f"{entry['name']!r:.80}",
            param=field,
            hint="GET /lora-adapters tells the ids of now",
        )
    scale = entry.get("scale")
    return name, 0.0 if scale is None else scale  # llama-server's default


def _named_entry(entry: Mapping[str, Any], field: str) -> tuple[str, Any]:
    """An entry in our form, where a scale that is missing is no 0 that nobody sees."""
    if "name" not in entry:
        raise InvalidRequestError(
            f"{field}: expected 'id' or 'name' in each object, got {dict(entry)!r:.80}",
            param=field,
        )
    name = entry["name"]
    if not isinstance(name, str):
        raise InvalidRequestError(f"{field}: expected a name, got {name!r:.80}", param=field)
    if "scale" not in entry:
        raise InvalidRequestError(
            f"{field}: 'scale' is missing in {dict(entry)!r:.80}", param=field
        )
    return name, entry["scale"]


def _scale(name: str, scale: Any, field: str) -> float:
    good = isinstance(scale, int | float) and not isinstance(scale, bool) and abs(scale) < 1e38
    if not good or not math.isfinite(scale):
        raise InvalidRequestError(
            f"{field}: expected a finite scale for {name!r:.80}, got {scale!r:.40}", param=field
        )
    return float(scale)


def _on(scales: Mapping[str, float]) -> dict[str, float]:
    return {name: scale for name, scale in scales.items() if scale != 0}


def _shown(scales: Mapping[str, float]) -> str:
    text = ", ".join(f"{name} at {scale:g}" for name, scale in _on(scales).items())
    return f"{text:.200}" or "the base"
