"""OpenAI's routes, each also without /v1."""

from __future__ import annotations

from fastapi import APIRouter

from loragraph.server.openai import chat, models

routers: tuple[APIRouter, ...] = (chat.router, models.router)
"""What create_app includes."""
