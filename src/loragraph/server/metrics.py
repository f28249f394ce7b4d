"""Counters for Prometheus."""

from __future__ import annotations

from fastapi import FastAPI

from loragraph.server.state import ServerState


def install(app: FastAPI, state: ServerState) -> None:
    """Adds what counts, and the route that shows it."""
