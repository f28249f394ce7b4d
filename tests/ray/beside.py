"""Another application of somebody else's, for a cluster that is shared."""

from __future__ import annotations

from typing import Any

from ray import serve


class Beside:
    """Says one word."""

    async def __call__(self, _request: Any) -> str:
        """The word."""
        return "still here"


_deployment: Any = serve.deployment
app = _deployment(Beside).options(ray_actor_options={"num_cpus": 0}).bind()
