"""OpenAI's routes, each also without /v1."""

from __future__ import annotations

from fastapi import APIRouter

from loragraph.server.openai import chat, completions, embeddings, models

routers: tuple[APIRouter, ...] = (chat.router, completions.router, embeddings.router, models.router)
"""What create_app includes."""
