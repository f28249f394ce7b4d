"""vLLM's and SGLang's routes that load and unload adapters."""

from __future__ import annotations

from loragraph.server.routing import api_router

router = api_router(tags=["adapters"])
