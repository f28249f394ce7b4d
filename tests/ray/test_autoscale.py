"""Replicas that come with load and go without it, on the local cluster."""

from __future__ import annotations

import threading

from tests.ray.cluster import Front, completion, front, text_of, wait_until
from tests.ray.conftest import RayServed


def test_replicas_come_with_load_and_go_again(served: RayServed) -> None:
    """One serves until more is asked of it than it computes; both serve then, and no request fails
    when the second one goes.
    """
    options = {
        "autoscale": (1, 2),
        "parallel": 2,
        "autoscale_up_delay": 0.6,
        "autoscale_down_delay": 0.6,
        "catalogue_dir": served.folder / "scaled",
    }
    with front(served.folder, beside=served, name="scaled", route_prefix="/s", **options) as one:
        with one.client() as http:
            expected = text_of(http, "alpha")
        assert len(one.table()) == 1
        stop = threading.Event()
        threads = [threading.Thread(target=load, args=(one, stop)) for _ in range(6)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: len(one.table()) == 2)
            wait_until(lambda: all(found["busy"] for found in one.table().values()))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        with one.client() as http:

            def is_one_again() -> bool:
                assert text_of(http, "alpha") == expected
                return len(one.table()) == 1

            wait_until(is_one_again)
            assert text_of(http, "alpha") == expected


def load(one: Front, stop: threading.Event) -> None:
    """Asks again and again."""
    with one.client() as http:
        while not stop.is_set():
            completion(http, "alpha", 200, ignore_eos=True)
