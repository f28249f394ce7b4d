"""llama-server's own routes, with its names and shapes."""

from __future__ import annotations

from fastapi import APIRouter

routers: tuple[APIRouter, ...] = ()
"""What create_app includes."""
