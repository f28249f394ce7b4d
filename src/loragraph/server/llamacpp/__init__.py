"""llama-server's own routes, with its names and shapes."""

from __future__ import annotations

from fastapi import APIRouter

from loragraph.server.llamacpp import completion, lora_adapters, props, refused, slots, tokens

routers: tuple[APIRouter, ...] = (
    completion.router,
    tokens.router,
    lora_adapters.router,
    props.router,
    slots.router,
    refused.router,
)
"""What create_app includes."""
