"""vLLM's and SGLang's routes that load, unload, pin and unpin adapters while requests run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import Field

from loragraph.adapters.convert.source import CONFIG
from loragraph.adapters.folder import folder_problem, is_adapter_folder
from loragraph.engine.registry import MAX_NAME, Generation, check_name
from loragraph.errors import InvalidRequestError, ModelNotFoundError
from loragraph.server.errors import ApiError
from loragraph.server.gate import Admin
from loragraph.server.routing import api_router
from loragraph.server.sampling import Body
from loragraph.server.state import ServerState, State

router = api_router(tags=["adapters"], dependencies=[Admin])

_MAX_CHANGES = 4
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class LoadBody(Body):
    """What to load."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None  # replace what the name means now
    pinned: bool | None = None  # SGLang's: keep it in memory
    base_model_name: str | None = None  # has to be a name of the base
    lora_int_id: Any = None  # ignored: ours are given by the server
    is_3d_lora_weight: Any = None  # ignored: tensors say so themselves


class NameBody(Body):
    """Which adapter."""

    lora_name: Name
    lora_int_id: Any = None  # ignored


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_adapter(body: LoadBody, state: State) -> PlainTextResponse:
    """Loads a file of the adapters' folder under a name, and waits until it is in memory."""
    await _load(state, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_adapter(body: NameBody, state: State) -> PlainTextResponse:
    """The name means nothing at once; the memory goes when the last request is done."""
    await _unload(state, body)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/load_lora_adapter")
async def load_adapter_sglang(body: LoadBody, state: State) -> JSONResponse:
    """The same with SGLang's answer."""
    await _load(state, body)
    return await _loaded(state)


@router.post("/unload_lora_adapter")
async def unload_adapter_sglang(body: NameBody, state: State) -> JSONResponse:
    """The same with SGLang's answer."""
    await _unload(state, body)
    return await _loaded(state)


@router.post("/v1/pin_lora_adapter")
async def pin_adapter(body: NameBody, state: State) -> JSONResponse:
    """Loads an adapter and keeps it in memory; 503 where there is no room."""
    async with _changing(state, body.lora_name):
        await asyncio.to_thread(state.admin.pin, state, body.lora_name)
    return JSONResponse({"success": True})


@router.post("/v1/unpin_lora_adapter")
async def unpin_adapter(body: NameBody, state: State) -> JSONResponse:
    """Lets a pinned adapter be dropped."""
    async with _changing(state, body.lora_name):
        await asyncio.to_thread(state.admin.unpin, state, body.lora_name)
    return JSONResponse({"success": True})


def confined_path(folder: Path | None, given: str) -> Path:
    """The real path of an adapter's file or folder inside the folder; else InvalidRequestError.

    `given` is relative to the folder, or an absolute path into it. Links are followed first, so
    none leads out.
    """
    if folder is None:
        raise InvalidRequestError(
            "this server has no folder to load adapters from",
            param="lora_path",
            hint="it takes --lora-dir",
        )
    root = folder.resolve()
    try:
        real = (root / given).resolve()
        inside = real.is_relative_to(root)
        found = inside and (real.is_file() or (real.is_dir() and real != root))
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
        inside = found = False
    if not inside:
        raise InvalidRequestError(
            f"lora_path: expected a path inside the adapters' folder, got {given!r:.200}",
            param="lora_path",
        )
    if not found:
        raise InvalidRequestError(
            f"lora_path: there is no {given!r:.200} in the adapters' folder",
            param="lora_path",
        )
    return real


async def _load(state: ServerState, body: LoadBody) -> None:
    async with _changing(state, body.lora_name):
        # Goes on to its end should the client leave, so that the name is never half loaded.
        await asyncio.shield(asyncio.to_thread(state.admin.load, state, body))


class LocalAdmin:
    """Changes adapters of this server alone; see AdapterAdmin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # no name leaves between its look-up and the mix with it

    def load(self, state: ServerState, body: LoadBody) -> None:
        """Loads what a body names, from the adapters' folder."""
        load_confined(state, body)

    def unload(self, state: ServerState, name: str) -> None:
        """Of this engine."""
        with self._lock:
            state.engine.unload_adapter(name)
            state.forget_adapter(name)

    def pin(self, state: ServerState, name: str) -> None:
        """In this engine's memory."""
        state.engine.pin(name)

    def unpin(self, state: ServerState, name: str) -> None:
        """In this engine's memory."""
        state.engine.unpin(name)

    def set_default_mix(self, state: ServerState, scales: Mapping[str, float]) -> None:
        """Of this server's requests."""
        with self._lock:
            for name in scales:  # an unknown name shall not become everybody's error
                state.engine.registry.resolve(name)
            state.set_default_mix(scales)


def check_load(state: ServerState, body: LoadBody) -> None:
    """Raises for names that cannot be loaded."""
    name = body.lora_name
    check_name(name)
    if name in state.base_names or name.partition(":")[0] in state.base_names:
        raise InvalidRequestError(f"lora_name: {name!r} is the base's name", param="lora_name")
    if body.base_model_name is not None and body.base_model_name not in state.base_names:
        raise ModelNotFoundError(
            f"base_model_name: expected {state.base_name!r}, got {body.base_model_name!r:.160}",
            param="base_model_name",
        )


def load_confined(state: ServerState, body: LoadBody) -> Generation:
    """Loads what a body names; blocks until it is in memory."""
    check_load(state, body)
    engine, name = state.engine, body.lora_name
    path = confined_path(state.config.adapter_dir, body.lora_path)
    state.sidecars.check(path)
    loaded = engine.registry.known(name) is not None and not body.load_inplace
    if path.is_dir():
        check_folder(path, state.config.adapter_dir)
    if loaded:
        raise loaded_already(name)
    return engine.load_adapter(name, path, pin=bool(body.pinned), preload=True)


def check_folder(folder: Path, root: Path | None) -> None:
    """InvalidRequestError for a folder that is no adapter's, or whose links lead out of ours."""
    assert root is not None  # confined_path() came before
    problem = None if is_adapter_folder(folder) else f"no {CONFIG}"
    problem = problem or folder_problem(folder, root.resolve())
    if problem is not None:
        raise InvalidRequestError(
            f"lora_path: expected a GGUF file or a folder of PEFT or MLX, got {folder.name} with "
            f"{problem}",
            param="lora_path",
        )


def loaded_already(name: str) -> InvalidRequestError:
    """vLLM's words for a name that is taken."""
    return InvalidRequestError(
        f"The lora adapter '{name}' has already been loaded.",
        param="lora_name",
        hint="set load_inplace to replace it",
    )


async def _unload(state: ServerState, body: NameBody) -> None:
    async with _changing(state, body.lora_name):
        await asyncio.to_thread(state.admin.unload, state, body.lora_name)


@asynccontextmanager
async def _changing(state: ServerState, name: str) -> AsyncIterator[None]:
    """One change of a name at a time; 409 for a second. Few at once, as each holds a thread."""
    names: set[str] = state.extra.setdefault("changing", set())
    if name in names:
        raise ApiError(409, f"another request is changing {name!r}", param="lora_name")
    names.add(name)
    places: asyncio.Semaphore = state.extra.setdefault("changes", asyncio.Semaphore(_MAX_CHANGES))
    try:
        async with places:
            yield
    finally:
        names.discard(name)


async def _loaded(state: ServerState) -> JSONResponse:
    """SGLang's answer: all adapters of now."""
    current: Callable[[], dict[str, Generation]] = state.engine.registry.current
    found = await asyncio.to_thread(current)
    loaded = {name: one.path.name if one.path else "" for name, one in found.items()}
    return JSONResponse({"success": True, "error_message": "", "loaded_adapters": loaded})
