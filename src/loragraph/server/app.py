"""All routes in one application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from loragraph.engine.engine import Engine
from loragraph.server import (
    access_log,
    adapters_api,
    errors,
    health,
    llamacpp,
    metrics,
    openai,
    page,
)
from loragraph.server.config import ServerConfig
from loragraph.server.gate import Gate, cors_options
from loragraph.server.prefix import ApiPrefix
from loragraph.server.routing import own_version
from loragraph.server.state import AdapterAdmin, Ids, ServerState


def create_app(
    engine: Engine | None,
    config: ServerConfig,
    *,
    admin: AdapterAdmin | None = None,
    ids: Ids | None = None,
) -> FastAPI:
    """The application for one engine, which the caller closes.

    Without one it answers 503 until `app.state.loragraph.opened(engine)` is called. `admin` and
    `ids`: who changes and numbers the adapters, where that is not a matter of this server alone.
    """
    state = ServerState(config, admin or adapters_api.LocalAdmin(), ids)
    app = FastAPI(
        title="loragraph",
        version=own_version(),
        lifespan=_lifespan,
        strict_content_type=False,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        responses={key: {"model": errors.ErrorAnswer} for key in ("4XX", "5XX")},
    )
    app.state.loragraph = state
    errors.install(app)
    # Looked through in this order: what generates comes first.
    for router in (*llamacpp.routers, *openai.routers, adapters_api.router, health.router):
        app.include_router(router)
    metrics.install(app, state)
    if config.with_page:
        page.install(app, state)
    app.add_middleware(Gate, config=config)
    if config.api_prefix:
        app.add_middleware(ApiPrefix, prefix=config.api_prefix)
    if config.cors_origins:  # outside of the gate, so that its refusals can be read too
        app.add_middleware(CORSMiddleware, **cors_options(config))
    access_log.install(app, state)
    if engine is not None:
        state.opened(engine)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state: ServerState = app.state.loragraph
    executor = ThreadPoolExecutor(state.config.n_http_threads, "loragraph-http")
    asyncio.get_running_loop().set_default_executor(executor)
    yield
