"""GET /health: loading, ready or draining."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from loragraph.server.errors import ApiError
from loragraph.server.state import Phase, State

router = APIRouter(tags=["server"])


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(state: State) -> JSONResponse:
    """200 {"status": "ok"} once requests are served, else 503."""
    if state.phase is Phase.LOADING:
        return ApiError(503, "Loading model", phase="loading").response
    if state.phase is Phase.DRAINING:
        return ApiError(503, "the server is shutting down", phase="draining").response
    return JSONResponse({"status": "ok"})
