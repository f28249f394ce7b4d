"""aLoRA behind a front."""

from __future__ import annotations

import httpx2 as httpx

from tests.ray.same import taken_from
from tests.server.llamacpp import test_alora
from tests.server.llamacpp.test_alora import X, Y

TAKEN = (test_alora,)
globals().update(
    taken_from(
        test_alora,
        # Cells are a member's own, and its two requests may go to two.
        ("test_the_prefix_before_it_is_the_bases",),
        own_server=True,
    )
)


def test_the_prefix_before_it_is_the_bases_on_one_member(http: httpx.Client) -> None:
    """Which a client asks for by the header of the base's answer."""
    prompt = [*range(150, 190), X, Y]
    body = {"prompt": prompt, "temperature": 0, "n_predict": 12}
    base = http.post("/completion", json=body)
    there = {"X-Loragraph-Replica": base.headers["x-loragraph-replica"]}
    body["lora"] = [{"name": "alora", "scale": 1}]

    answer = http.post("/completion", json=body, headers=there)

    assert answer.headers["x-loragraph-replica"] == base.headers["x-loragraph-replica"]
    assert answer.json()["timings"]["cache_n"] == 40
