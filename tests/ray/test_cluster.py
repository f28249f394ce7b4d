"""What many replicas add: affinity, spread, one catalogue, and what is left when something dies."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from loragraph.cluster.fleet import hash_of, rendezvous
from tests.ray.cluster import completion, text_of, wait_until
from tests.ray.conftest import RayServed

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LONG = {"ignore_eos": True, "max_tokens": 900, "temperature": 0, "n": 8, "logprobs": 5}


def replica_of(http: httpx.Client, model: str, **fields: Any) -> str:
    """Who served a request."""
    body = {"prompt": "hello", "model": model, "max_tokens": 2, "temperature": 0, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-loragraph-replica"]


def generation_of(http: httpx.Client, name: str) -> int:
    """What GET /v1/models says."""
    found = http.get(f"/v1/models/{name}")
    assert found.status_code == 200, found.text
    return int(found.json()["adapter"]["generation"])


@contextmanager
def loaded(http: httpx.Client, name: str, path: str) -> Iterator[None]:
    """An adapter that is there meanwhile."""
    answer = http.post(LOAD, json={"lora_name": name, "lora_path": path})
    assert answer.status_code == 200, answer.text
    try:
        yield
    finally:
        http.post(UNLOAD, json={"lora_name": name})


def kill_replica(id_: str) -> None:
    """As a machine's failure would."""
    import ray

    ray.kill(actor_of(id_))


def actor_of(part: str) -> Any:
    """The actor whose name has this part."""
    import ray

    for one in ray.util.list_named_actors(all_namespaces=True):
        if part in one["name"]:
            return ray.get_actor(one["name"], namespace=one["namespace"])
    raise AssertionError(f"no actor is called {part}")


def ready_replicas(served: RayServed) -> set[str]:
    """Ids of those that serve."""
    return {id_ for id_, one in served.table().items() if one["status"] == "ready"}


def test_health_and_figures_of_all(served: RayServed, http: httpx.Client) -> None:
    """The whole is healthy; each replica is listed; metrics are sums, or each replica's own."""
    table = served.table()

    assert http.get("/health").json() == {"status": "ok"}
    assert len(table) == 2
    assert {one["status"] for one in table.values()} == {"ready"}
    before = served.metric("loragraph_generated_tokens_total")
    completion(http, "alpha", 7, ignore_eos=True)
    assert served.metric("loragraph_generated_tokens_total") == before + 7
    name = "loragraph_generated_tokens_total"
    assert served.metric(name, "/metrics/replicas") == served.metric(name)
    labelled = http.get("/metrics/replicas").text
    assert all(f'replica="{id_}"' in labelled for id_ in table)
    assert served.metric("loragraph_cluster_replicas") == 2


def test_an_adapter_that_is_not_hot_stays_on_one_replica(
    served: RayServed, http: httpx.Client
) -> None:
    """Twenty requests, one after the other, load it once."""
    time.sleep(1)  # five reports: none still calls a replica busy with what ran before
    with loaded(http, "cold", "alpha.gguf"):
        time.sleep(1)
        homes = {replica_of(http, "cold", prompt=f"prompt {i}") for i in range(20)}
        generation = generation_of(http, "cold")
        holders = [
            id_
            for id_, one in served.table().items()
            if {"name": "cold", "generation": generation} in one["resident"]
        ]
    # Loading put it on the replica that loaded it, which is then the one that holds it.
    assert len(homes) == 1
    assert homes == set(holders)


def test_a_hot_adapter_spreads_and_shrinks_again(served: RayServed, http: httpx.Client) -> None:
    """With more requests at once than a replica computes it is served by both; when they have
    ended, and reports of them too, by the first of its order alone.
    """
    went = Counter[str]()
    homes = list[str]()

    def ask(number: int) -> None:
        with served.client() as own:
            went[replica_of(own, "hot", prompt=f"{number}", max_tokens=60, n=2)] += 1

    def has_shrunk() -> bool:
        """Thirty in a row, of prompts that no replica has had."""
        homes.append(replica_of(http, "hot", prompt=f"alone {len(homes)}"))
        return homes[-30:] == [first] * 30

    with loaded(http, "hot", "beta.gguf"):
        with ThreadPoolExecutor(24) as threads:
            list(threads.map(ask, range(48)))
        ids = list(served.table())
        assert set(went) == set(ids)
        hashes = np.array([hash_of(id_) for id_ in ids], np.uint64)
        first = ids[rendezvous(hash_of("hot"), hashes)[0]]
        wait_until(has_shrunk)


def test_the_base_is_served_by_all(served: RayServed, http: httpx.Client) -> None:
    """It goes anywhere."""
    homes = {replica_of(http, "base", prompt=f"{i} other prompts") for i in range(20)}
    assert homes == set(served.table())


def test_a_change_is_seen_at_once_by_all(served: RayServed, http: httpx.Client) -> None:
    """Loaded, swapped and unloaded: every next request has it, whoever serves it."""
    texts = {name: text_of(http, name) for name in ("alpha", "beta", "gamma")}
    with loaded(http, "shared", "alpha.gguf"):
        for i in range(6):
            name = ("beta", "gamma", "alpha")[i % 3]
            body = {"lora_name": "shared", "lora_path": f"{name}.gguf", "load_inplace": True}
            assert http.post(LOAD, json=body).status_code == 200
            with ThreadPoolExecutor(8) as threads:
                found = list(threads.map(lambda _: text_of(http, "shared"), range(8)))
            assert set(found) == {texts[name]}
        numbers = {generation_of(http, "shared") for _ in range(6)}
        assert len(numbers) == 1
    gone = [http.post("/v1/completions", json={"prompt": "a", "model": "shared"}) for _ in range(6)]
    assert {one.status_code for one in gone} == {404}
    assert {http.get("/v1/models/shared").status_code for _ in range(6)} == {404}


def test_a_file_of_the_folder_is_one_adapter_for_all(served: RayServed, http: httpx.Client) -> None:
    """It enters the catalogue when it is first asked for, with a generation and an id."""
    path = served.folder / "adapters" / "alpha.gguf"
    (served.folder / "adapters" / "found.gguf").write_bytes(path.read_bytes())

    assert text_of(http, "found") == text_of(http, "alpha")
    rows = [http.get("/v1/models/found").json()["adapter"] for _ in range(6)]
    assert len({(row["generation"], row["id"]) for row in rows}) == 1
    assert http.post(UNLOAD, json={"lora_name": "found"}).status_code == 200
    gone = [http.get("/v1/models/found").status_code for _ in range(6)]
    assert set(gone) == {404}


def test_the_default_mix_is_one_for_all(served: RayServed, http: httpx.Client) -> None:
    """Set through any replica."""
    base, alpha = text_of(http, "base"), text_of(http, "alpha")
    number = http.get("/v1/models/alpha").json()["adapter"]["id"]
    try:
        assert http.post("/lora-adapters", json=[{"id": number, "scale": 1.0}]).status_code == 200
        assert {text_of(http, "base") for _ in range(8)} == {alpha}
    finally:
        http.post("/lora-adapters", json=[])
    assert {text_of(http, "base") for _ in range(8)} == {base}


def test_pins_are_kept_by_all(served: RayServed, http: httpx.Client) -> None:
    """A pinned adapter is in the catalogue as such; an unknown name is a 404."""
    assert http.post("/v1/pin_lora_adapter", json={"lora_name": "alpha"}).status_code == 200
    assert http.post("/v1/unpin_lora_adapter", json={"lora_name": "alpha"}).status_code == 200
    assert http.post("/v1/pin_lora_adapter", json={"lora_name": "no"}).status_code == 404


@pytest.mark.parametrize("path", ["../base.gguf", "/etc/passwd", "s3://b/a.gguf", "http://x/a"])
def test_what_may_not_be_loaded(http: httpx.Client, path: str) -> None:
    """Nothing outside of the folder, and no URL that the server was not told of."""
    answer = http.post(LOAD, json={"lora_name": "bad", "lora_path": path})
    assert answer.status_code in (400, 403)
    assert http.get("/v1/models/bad").status_code == 404


def test_a_swap_under_traffic_is_atomic(served: RayServed, http: httpx.Client) -> None:
    """Every answer, and all prompts of one request, are of one generation, and never of one from
    before a swap that was told as done when the request was sent.
    """
    order = ("alpha", "beta", "gamma")
    texts = {name: text_of(http, name) for name in order}
    stop, wrong = threading.Event(), list[Any]()
    least = 0  # generations that requests have to have, at least
    n_answers = 0

    def ask() -> None:
        nonlocal n_answers
        with served.client() as own:
            while not stop.is_set():
                asked_at = least
                found = completion(own, "x", prompt=["hello"] * 3)
                got = {
                    (choice["adapters"][0]["generation"], choice["text"])
                    for choice in found["choices"]
                }
                generation, text = next(iter(got))
                if len(got) != 1 or generation < asked_at or text != meaning[generation]:
                    wrong.append((asked_at, got))
                n_answers += 1

    class Meaning(dict[int, str]):
        """The text of each generation; one that is being told as done is any."""

        def __missing__(self, number: int) -> str:
            return texts[pending[0]]

    meaning, pending = Meaning(), ["alpha"]
    with loaded(http, "x", "alpha.gguf"):
        least = generation_of(http, "x")
        meaning[least] = texts["alpha"]
        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        try:
            for i in range(1, 10):
                pending[0] = order[i % 3]
                body = {"lora_name": "x", "lora_path": f"{order[i % 3]}.gguf", "load_inplace": True}
                answer = http.post(LOAD, json=body)
                assert answer.status_code == 200, answer.text
                number = generation_of(http, "x")
                meaning[number] = texts[order[i % 3]]
                least = number
                before = n_answers
                wait_until(lambda before=before: n_answers > before + 6 or wrong)  # type: ignore[misc]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert wrong == []


def test_a_client_that_leaves_ends_its_request(served: RayServed, http: httpx.Client) -> None:
    """In the middle of a stream."""
    before = served.metric("loragraph_generated_tokens_total")
    with http.stream(
        "POST", "/v1/completions", json={"prompt": "a", **LONG, "stream": True}
    ) as got:
        next(got.iter_lines())
    wait_until(lambda: all(one["busy"] == 0 for one in served.table().values()))
    assert served.metric("loragraph_generated_tokens_total") < before + 8 * 900


def test_a_killed_replica_loses_only_its_running_streams(
    served: RayServed, http: httpx.Client
) -> None:
    """They end with an error event; another replica's go on to their end; new requests are served
    throughout; the replica comes back.
    """
    before = ready_replicas(served)
    homes: dict[str, httpx.Response] = {}
    clients = []
    number = 0
    while len(homes) < 2:
        client = served.client()
        clients.append(client)
        body = {"prompt": f"stream {number}", **LONG, "stream": True}
        request = client.build_request("POST", "/v1/completions", json=body)
        response = client.send(request, stream=True)
        number += 1
        home = response.headers["x-loragraph-replica"]
        if home in homes:
            response.close()
        else:
            homes[home] = response
    (_, other), (victim, lost) = homes.items()  # the younger is far from its end
    kill_replica(victim)
    cut = [line for line in lost.iter_lines() if line]
    whole = [line for line in other.iter_lines() if line]
    during = [
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}) for _ in range(10)
    ]
    for client in clients:
        client.close()

    error = json.loads(cut[-2].removeprefix("data: "))["error"]
    assert (error["code"], cut[-1]) == (502, "data: [DONE]")
    assert whole[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in whole)
    assert {answer.status_code for answer in during} == {200}
    wait_until(lambda: len(ready_replicas(served)) == 2 and ready_replicas(served) != before)


def test_requests_that_sent_nothing_are_tried_elsewhere(
    served: RayServed, http: httpx.Client
) -> None:
    """Whole answers that a killed replica was computing come from another one."""
    wait_until(lambda: len(ready_replicas(served)) == 2)
    before = served.metric("loragraph_cluster_retries_total")
    with ThreadPoolExecutor(6) as threads:
        body = {"prompt": "hello", **LONG, "n": 2, "max_tokens": 400, "logprobs": None}

        def ask(number: int) -> httpx.Response:
            with served.client() as own:
                return own.post("/v1/completions", json={**body, "seed": number})

        answers = [threads.submit(ask, number) for number in range(6)]
        wait_until(lambda: any(one["running"] for one in served.table().values()))
        busiest = max(served.table().values(), key=lambda one: int(one["running"]))
        kill_replica(busiest["id"])
        found = [answer.result() for answer in answers]
    assert {answer.status_code for answer in found} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in found}) == 1
    assert served.metric("loragraph_cluster_retries_total") > before


def test_the_catalogue_survives_its_actor(served: RayServed, http: httpx.Client) -> None:
    """While it is gone requests are served, and a change waits for it; nothing that was told is
    lost.
    """
    import ray

    wait_until(lambda: len(ready_replicas(served)) == 2)
    with loaded(http, "kept", "beta.gguf"):
        generation = generation_of(http, "kept")
        expected = text_of(http, "beta")
        ray.kill(actor_of("loragraph-catalogue"), no_restart=False)
        assert {text_of(http, "kept") for _ in range(6)} == {expected}
        body = {"lora_name": "kept", "lora_path": "gamma.gguf", "load_inplace": True}
        assert http.post(LOAD, json=body).status_code == 200
        assert {text_of(http, "kept") for _ in range(6)} == {text_of(http, "gamma")}
        assert generation_of(http, "kept") > generation


def test_the_catalogue_and_a_replica_are_lost_at_once(
    served: RayServed, http: httpx.Client
) -> None:
    """Requests are served throughout, a change waits for the one and not for the other, and the
    replica that comes has it.
    """
    import ray

    wait_until(lambda: len(ready_replicas(served)) == 2)
    with loaded(http, "twice", "beta.gguf"):
        victim = replica_of(http, "twice")
        ray.kill(actor_of("loragraph-catalogue"), no_restart=False)
        kill_replica(victim)
        assert {text_of(http, "twice") for _ in range(6)} == {text_of(http, "beta")}
        body = {"lora_name": "twice", "lora_path": "gamma.gguf", "load_inplace": True}
        assert http.post(LOAD, json=body).status_code == 200
        expected = text_of(http, "gamma")
        assert {text_of(http, "twice") for _ in range(6)} == {expected}
        wait_until(lambda: len(ready_replicas(served) - {victim}) == 2)
        for id_ in ready_replicas(served) - {victim}:
            there = {"X-Loragraph-Replica": id_}
            wait_until(lambda there=there: is_served(http, there, expected))  # type: ignore[misc]


def is_served(http: httpx.Client, there: dict[str, str], expected: str) -> bool:
    """By the replica of this header, as soon as the router knows it; never with another text."""
    body = {"prompt": "hello", "model": "twice", "max_tokens": 8, "temperature": 0}
    answer = http.post("/v1/completions", json=body, headers=there)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, expected)
    return answer.headers["x-loragraph-replica"] == there["X-Loragraph-Replica"]
