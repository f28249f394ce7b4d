"""GET /health: loading, ready or draining."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from loragraph.server.errors import ApiError
from loragraph.server.state import Phase, State

router = APIRouter(tags=["server"])


def not_ready(phase: Phase) -> ApiError:
    """What a server says that is loading or draining, in llama-server's words."""
    said = "Loading model" if phase is Phase.LOADING else "the server is shutting down"
    return ApiError(503, said, phase=phase.value)


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(state: State) -> JSONResponse:
    """200 {"status": "ok"} once requests are served, else 503."""
    if state.phase is not Phase.READY:
        return not_ready(state.phase).response
    return JSONResponse({"status": "ok"})
