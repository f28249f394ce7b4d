"""What a server holds while it has nothing to do."""

from __future__ import annotations

import time

from tests.server.serving import Served


def assert_idle(served: Served, seconds: float = 10) -> None:
    """No request, sequence, cell in use, or held adapter is left; a client's leaving takes time."""
    deadline = time.monotonic() + seconds
    while held(served) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held(served) == {}


def held(served: Served) -> dict[str, int]:
    """What is not zero."""
    stats = served.engine.stats()
    counts = {
        "runs": len(served.state.runs),
        "jobs": stats.core.n_jobs,
        "running": stats.scheduler.n_running,
        "waiting": stats.scheduler.n_waiting,
        "cells in use": stats.scheduler.n_cells_in_use,
        "adapters in use": stats.pool.n_in_use,
        "tickets": stats.pool.n_tickets,
    }
    return {name: count for name, count in counts.items() if count}
