"""GET and POST /lora-adapters: all adapters with their default scales, and how to change those."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Body

from loragraph.engine.registry import Generation
from loragraph.engine.table import AdapterRow
from loragraph.errors import FormatError
from loragraph.server.errors import ApiError
from loragraph.server.gate import Admin
from loragraph.server.mixes import parse_scales
from loragraph.server.routing import api_router
from loragraph.server.sidecar import Defaults, Sidecars
from loragraph.server.state import ServerState, State

router = api_router(tags=["llama-server"])


@router.get("/lora-adapters")
async def list_lora_adapters(state: State) -> list[dict[str, Any]]:
    """By id; `scale` is the default of requests that name no adapters."""
    return await asyncio.to_thread(_entries, state)


@router.post("/lora-adapters", dependencies=[Admin])
async def set_lora_adapters(state: State, body: Any = Body()) -> dict[str, Any]:  # noqa: B008
    """The default mix of requests that start later; an adapter that is left out gets scale 0."""
    if not isinstance(body, list):
        raise ApiError(400, "Request body must be an array")
    await asyncio.to_thread(_set_default_mix, state, body)
    return {"success": True}


def _set_default_mix(state: ServerState, body: list[Any]) -> None:
    scales = {name: scale for name, scale in parse_scales(state, body, "lora").items() if scale}
    state.admin.set_default_mix(state, scales)


def _entries(state: ServerState) -> list[dict[str, Any]]:
    rows = {row.name: row for row in state.engine.adapters}
    current = state.engine.registry.current()
    scales = state.default_mix
    return [
        _entry(state, number, rows[name], current.get(name), scales.get(name, 0.0))
        for name, number in state.sync_ids().items()
        if name in rows  # else it was registered just now
    ]


def _entry(
    state: ServerState, number: int, row: AdapterRow, generation: Generation | None, scale: float
) -> dict[str, Any]:
    """llama-server's fields, and ours: name, generation, whether it is in memory."""
    defaults = _defaults(state.sidecars, generation)
    entry: dict[str, Any] = {
        "id": number,
        "path": row.name if row.path is None else row.path.name,
        "scale": scale,
        "task_name": defaults.task_name,
        "prompt_prefix": defaults.prompt_prefix,
        "name": row.name,
        "generation": row.generation,
        "state": row.state.value,
    }
    if generation is not None and generation.header.invocation_tokens:
        tokens = generation.header.invocation_tokens
        vocab = state.engine.model.vocab
        known = [token for token in tokens if 0 <= token < vocab.n_tokens]
        entry["alora_invocation_string"] = b"".join(map(vocab.piece, known)).decode(
            "utf-8", "replace"
        )
        entry["alora_invocation_tokens"] = list(tokens)
    return entry


def _defaults(sidecars: Sidecars, generation: Generation | None) -> Defaults:
    """What the file and its sidecar say; a sidecar that is wrong is an error of requests only."""
    if generation is None:
        return Defaults()
    try:
        return sidecars.of(generation)
    except FormatError:
        header = generation.header
        return Defaults(task_name=header.task_name, prompt_prefix=header.prompt_prefix)
