"""POST /slots/{id}: the cells of a slot's sequence to a file and back, or dropped.

Cells belong to no slot here: what a slot holds is what there are cells of its sequence's tokens, or
of its last one's, and what is restored is found by every request whose prompt begins so.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from loragraph.engine.engine import Engine
from loragraph.server.errors import ApiError
from loragraph.server.gate import Admin
from loragraph.server.routing import api_router
from loragraph.server.sampling import Body
from loragraph.server.state import ServerState, State

router = api_router(tags=["llama-server"])

_MAX_NAME_BYTES = 255
# llama-server's: what some system takes for a folder, a drive, a pattern or a redirection
_FORBIDDEN = re.compile(
    r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\u2215\u2216\uff0e\ufffd\ufeff\ud800-\udfff]'
)


class SlotBody(Body):
    """The file, inside --slot-save-path; for save and restore. Other fields mean nothing."""

    model_config = ConfigDict(extra="ignore", strict=True)

    filename: str | None = None


@router.post("/slots/{id_slot}", dependencies=[Admin])
async def slot_action(
    id_slot: str, state: State, body: SlotBody | None = None, action: str = ""
) -> dict[str, Any]:
    """?action=save, restore or erase; 501 without --slot-save-path."""
    folder = state.config.slot_save_path
    if folder is None:
        raise ApiError(
            501, "This server does not support slots action. Start it with `--slot-save-path`"
        )
    slot = _slot_of(state, id_slot)
    engine = state.accepting_engine
    if action == "erase":
        return {"id_slot": slot, "n_erased": await asyncio.to_thread(engine.erase_seat, slot)}
    if action not in ("save", "restore"):
        raise ApiError(400, "Invalid action: expected save, restore or erase", param="action")
    name = _checked(body.filename if body is not None else None)
    work = _save if action == "save" else _restore
    return await asyncio.to_thread(work, engine, slot, folder / name)


def _save(engine: Engine, slot: int, path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise ApiError(400, "Invalid filename: expected a file", param="filename")
    start = time.perf_counter()
    n_saved = engine.save_seat(path, slot)
    ms = 1e3 * (time.perf_counter() - start)
    return {
        "id_slot": slot,
        "filename": path.name,
        "n_saved": n_saved,
        "n_written": path.stat().st_size,
        "timings": {"save_ms": ms},
    }


def _restore(engine: Engine, slot: int, path: Path) -> dict[str, Any]:
    if not path.is_file():  # nor a pipe, which would never end
        raise ApiError(400, f"Unable to restore slot: there is no {path.name}", param="filename")
    start = time.perf_counter()
    n_restored = engine.restore_seat(path, slot)
    ms = 1e3 * (time.perf_counter() - start)
    return {
        "id_slot": slot,
        "filename": path.name,
        "n_restored": n_restored,
        "n_read": path.stat().st_size,
        "timings": {"restore_ms": ms},
    }


def _slot_of(state: ServerState, text: str) -> int:
    n_slots = state.engine.config.max_sequences
    if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < n_slots:
        return int(text)
    raise ApiError(400, f"Invalid slot ID: expected 0 to {n_slots - 1}", param="id_slot")


def _checked(name: str | None) -> str:
    """A file's name without any folder, by llama-server's rules."""
    if name is None:
        raise ApiError(400, "filename: the field is missing", param="filename")
    bad = (
        not name
        or _FORBIDDEN.search(name)
        or ".." in name
        or name != name.strip(" ")
        or name.endswith(".")
        or len(name.encode("utf-8", "replace")) > _MAX_NAME_BYTES
    )
    if bad:
        raise ApiError(400, "Invalid filename", param="filename")
    return name
