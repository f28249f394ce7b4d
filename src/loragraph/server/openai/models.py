"""GET /v1/models: the base and every adapter that a request can name."""

from __future__ import annotations

import asyncio
from typing import Any

from loragraph.engine.pool import State as PoolState
from loragraph.engine.table import AdapterRow
from loragraph.server.errors import ApiError
from loragraph.server.llamacpp.described import listed_json, meta_json
from loragraph.server.routing import api_router
from loragraph.server.state import ServerState, State

router = api_router(tags=["models"])


@router.get("/v1/models")
@router.get("/models", include_in_schema=False)
async def list_models(state: State) -> dict[str, Any]:
    """The base first, then all adapters by name."""
    data = await asyncio.to_thread(_models, state)
    listed = [listed_json(entry["id"]) for entry in data]  # llama-server's, beside OpenAI's
    return {"object": "list", "models": listed, "data": data}


@router.get("/v1/models/{model:path}")
@router.get("/models/{model:path}", include_in_schema=False)
async def get_model(model: str, state: State) -> dict[str, Any]:
    """One of them; adapters as NAME or BASE:NAME."""
    models = await asyncio.to_thread(_models, state)
    by_id = {entry["id"]: entry for entry in models}
    by_id |= {f"{base}:{name}": entry for name, entry in by_id.items() for base in state.base_names}
    by_id |= dict.fromkeys(state.base_names, models[0])
    if model not in by_id:
        known = ", ".join(entry["id"] for entry in models[:9])
        raise ApiError(
            404,
            f"no model is called {model!r:.160}; known: {known}",
            param="model",
            reason="model_not_found",
        )
    return by_id[model]


def _models(state: ServerState) -> list[dict[str, Any]]:
    rows, ids = state.engine.adapters, state.sync_ids()
    return [_base(state), *(_adapter(state, row, ids.get(row.name)) for row in rows)]


def _base(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.base_name,
        "aliases": list(state.base_names),
        "object": "model",
        "created": state.created,
        "owned_by": "loragraph",
        "parent": None,
        "root": state.base_name,
        "max_model_len": state.engine.config.sequence_limit,
        "tags": [],
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": meta_json(state.engine.model, state.engine.config.n_cells),
    }


def _adapter(state: ServerState, row: AdapterRow, number: int | None) -> dict[str, Any]:
    return {
        "id": row.name,
        "object": "model",
        "created": state.created,
        "owned_by": "loragraph",
        "parent": state.base_name,
        "root": row.name if row.path is None else row.path.name,
        "max_model_len": state.engine.config.sequence_limit,
        "adapter": {
            "id": number,
            "generation": row.generation,
            "digest": row.digest,
            "state": row.state.value,
            "resident": row.state is PoolState.RESIDENT,
            "nbytes": row.nbytes,
            "rank_max": row.rank_max,
            "is_alora": row.is_alora,
            "n_users": row.n_users,
            "default_scale": state.default_mix.get(row.name, 0.0),
        },
    }
