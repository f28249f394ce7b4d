"""GET and POST /props, GET /slots: what the server is and does."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi.responses import JSONResponse

from loragraph.engine.params import SamplingParams
from loragraph.engine.sequence_table import SequenceRow
from loragraph.server.errors import ApiError
from loragraph.server.gate import Admin
from loragraph.server.llamacpp.answers import settings_json
from loragraph.server.llamacpp.described import ftype_name, template_caps
from loragraph.server.routing import api_router
from loragraph.server.state import ServerState, State

router = api_router(tags=["llama-server"])


@router.get("/props")
async def props(state: State) -> dict[str, Any]:
    """The base, its template and the defaults of generations."""
    config, model = state.config, state.engine.model
    vocab = model.vocab
    return {
        "default_generation_settings": {
            "params": settings_json(SamplingParams()),
            "n_ctx": state.engine.config.sequence_limit,
        },
        "total_slots": state.engine.config.max_sequences,
        "model_alias": state.base_name,
        "model_ftype": ftype_name(model),
        "model_path": model.path.name,
        "modalities": {"vision": False, "audio": False, "video": False},
        "media_marker": "",
        "endpoint_slots": config.with_slots,
        "endpoint_props": config.with_props,
        "endpoint_metrics": config.with_metrics,
        "ui": config.with_page,
        "ui_settings": {},
        "chat_template": vocab.chat_template() or "",
        "chat_template_caps": template_caps(vocab.chat_template() or ""),
        "bos_token": _text(state, vocab.bos),
        "eos_token": _text(state, vocab.eos),
        "build_info": "loragraph",
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }


@router.post("/props", dependencies=[Admin])
async def set_props(state: State) -> dict[str, Any]:
    """Nothing can be changed by it, as in llama-server; 501 without --props."""
    if not state.config.with_props:
        raise ApiError(
            501, "This server does not support changing global properties. Start it with `--props`"
        )
    return {"success": True}


@router.get("/slots")
async def slots(state: State, fail_on_no_slot: str = "") -> JSONResponse:
    """A slot for each sequence that may run at once; 503 with ?fail_on_no_slot=1 if all do."""
    if not state.config.with_slots:
        raise ApiError(501, "This server does not support slots endpoint. Start it with `--slots`")
    n_slots = state.engine.config.max_sequences
    rows = await asyncio.to_thread(state.engine.sequences)
    busy = {row.seat: row for row in rows if row.seat is not None}
    if fail_on_no_slot and len(busy) >= n_slots:
        raise ApiError(503, "no slot available")
    return JSONResponse([_slot(state, number, busy.get(number)) for number in range(n_slots)])


def _slot(state: ServerState, number: int, row: SequenceRow | None) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "id": number,
        "n_ctx": state.engine.config.sequence_limit,
        "speculative": False,
        "is_processing": row is not None,
    }
    if row is None:
        return slot
    lora = [{"name": name, "scale": scale} for name, scale in row.adapters]
    unlimited = row.params.max_tokens is None
    return slot | {
        "id_task": row.request,
        "n_prompt_tokens": row.n_prompt,
        "n_prompt_tokens_processed": row.n_prompt_done - row.n_cached,
        "n_prompt_tokens_cache": row.n_cached,
        "params": {**settings_json(row.params, lora=lora), "seed": row.seed},
        "next_token": [
            {
                "has_next_token": True,
                "has_new_line": row.has_new_line,
                "n_remain": -1 if unlimited else max(0, row.n_max - row.n_decoded),
                "n_decoded": row.n_decoded,
            }
        ],
    }


def _text(state: ServerState, token: int | None) -> str:
    vocab = state.engine.model.vocab
    return "" if token is None else vocab.piece(token).decode("utf-8", "replace")
