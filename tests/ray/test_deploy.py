"""A cluster that runs already: `serve deploy docs/ray.yaml`, `loragraph serve --ray-address`."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml

from tests.cli.test_serve import serve
from tests.cluster.http_files import file_server, ranged
from tests.ray.cluster import free_port, text_of, wait_until
from tests.ray.conftest import HAS_RAY
from tests.server.serving import write_files

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "ray.yaml"

pytestmark = [
    pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'loragraph[ray]'"),
    pytest.mark.slow,
]


@dataclass(frozen=True)
class Cluster:
    """A head that `ray start` started."""

    address: str
    dashboard: str
    environment: Mapping[str, str]

    @property
    def token(self) -> dict[str, str]:
        """The key of all its doors, as variables."""
        return {name: self.environment[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}

    def is_up(self) -> bool:
        """Whether its dashboard answers."""
        headers = {"Authorization": f"Bearer {self.token['RAY_AUTH_TOKEN']}"}
        url = f"{self.dashboard}/api/serve/applications/"
        try:
            return httpx.get(url, headers=headers, timeout=10).is_success
        except httpx.HTTPError:
            return False

    def run(self, *words: str) -> str:
        """One of Serve's own commands; its output."""
        done = subprocess.run(
            [str(Path(sys.executable).parent / "serve"), *words, "--address", self.dashboard],
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def applications(self) -> dict[str, str]:
        """Their statuses by name."""
        found = yaml.safe_load(self.run("status")) or {}
        return {name: one["status"] for name, one in found.get("applications", {}).items()}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """On loopback, with a dashboard, which is what `serve deploy` talks to."""
    port, dashboard, agent, agent_grpc, client = (free_port() for _ in range(5))
    folder = tempfile.mkdtemp(prefix="lg-")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment |= token  # which all who ask bring
    words = [
        *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"),
        *("--node-ip-address", "127.0.0.1", "--port", port, "--num-cpus", 2),
        *("--include-dashboard", "true", "--dashboard-port", dashboard),
        *("--dashboard-agent-listen-port", agent, "--dashboard-agent-grpc-port", agent_grpc),
        *("--ray-client-server-port", client, "--object-store-memory", 80 << 20),
        *("--temp-dir", folder, "--disable-usage-stats"),
    ]
    with open(Path(folder) / "log", "wb") as log:
        process = subprocess.Popen(
            [str(word) for word in words], env=environment, stdout=log, stderr=log
        )
    found = Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", environment)
    try:
        wait_until(found.is_up, 90)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)  # it ends what it started
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def config_of(folder: Path, port: int, source: str) -> dict[str, Any]:
    """docs/ray.yaml with the places of this test in the place of its own."""
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    (app,) = config["applications"]
    args = app["args"]
    assert [one["name"] for one in args["adapters"]] == ["pirate", "poem"]
    args["adapters"][0]["source"] = str(folder / "adapters" / "alpha.gguf")
    args["adapters"][1]["source"] = source
    own = {
        "base": str(folder / "base.gguf"),
        "lora_dir": str(folder / "adapters"),
        "lora_schemes": ["http"],
        "catalogue_dir": str(folder / "adapters" / ".catalogue"),
        "cache_dir": str(folder / "cache"),
        "cpus_per_replica": 1,
    }
    assert own.keys() <= args.keys(), "the example has another shape now"
    args.update(own)
    return config


def test_the_example_is_deployed_and_changed(cluster: Cluster, tmp_path: Path) -> None:
    """`serve deploy` of docs/ray.yaml serves; deployed anew it has what was changed, and what was
    loaded over HTTP is there still.
    """
    write_files(tmp_path)
    port = free_port()
    path = tmp_path / "ray.yaml"
    with file_server() as files:
        data = (tmp_path / "adapters" / "beta.gguf").read_bytes()
        source = files.add("/poem.gguf", data, ranged)
        config = config_of(tmp_path, port, source)
        path.write_text(yaml.safe_dump(config))
        cluster.run("deploy", str(path))
        wait_until(lambda: cluster.applications().get("loragraph") == "RUNNING", 90)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            names = {one["id"] for one in http.get("/v1/models").json()["data"]}
            assert {"base", "pirate", "poem"} <= names
            texts = {name: text_of(http, name) for name in ("base", "pirate", "poem", "alpha")}
            assert texts["pirate"] == texts["alpha"]
            assert len(set(texts.values())) == 3
            body = {"lora_name": "mine", "lora_path": "gamma.gguf"}
            assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
            assert "loragraph_cluster_replicas 1.0" in http.get("/metrics").text
            first = set(replicas(http))

            args = config["applications"][0]["args"]
            args["autoscale"], args["alias"] = [2, 2], ["renamed"]
            path.write_text(yaml.safe_dump(config))
            cluster.run("deploy", str(path))
            wait_until(lambda: len(set(replicas(http)) - first) == 2, 90)
            assert text_of(http, "renamed") == texts["base"]
            assert text_of(http, "mine") == text_of(http, "gamma")
        cluster.run("shutdown", "--yes")
        wait_until(lambda: cluster.applications() == {}, 60)


def replicas(http: httpx.Client) -> list[str]:
    """Ids of those that are ready; none while the front is replaced."""
    answer = http.get("/replicas")
    found = answer.json()["replicas"] if answer.is_success else []
    return [one["id"] for one in found if one["status"] == "ready"]


def test_the_command_on_a_cluster_that_others_use(cluster: Cluster, tmp_path: Path) -> None:
    """It serves beside another application, refuses what is taken, and takes nothing down but its
    own; the catalogue is there when it comes again.
    """
    write_files(tmp_path)
    port = free_port()
    beside = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {"name": "other", "route_prefix": "/other", "import_path": "tests.ray.beside:app"}
        ],
    }
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump(beside))
    cluster.run("deploy", str(path))
    wait_until(lambda: cluster.applications() == {"other": "RUNNING"}, 60)
    flags = [
        *("--ray", "--ray-address", cluster.address, "--lora-dir", "adapters"),
        *("--catalogue", "catalogue", "--lora-cache", "cache", "--port", str(port)),
    ]
    texts = []
    for number in range(2):
        with serve(tmp_path, *flags, **cluster.token) as process:
            with httpx.Client(base_url=process.url, timeout=60) as http:
                if number == 0:
                    body = {"lora_name": "mine", "lora_path": "beta.gguf"}
                    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
                    assert "already" in refusal(tmp_path, cluster, *flags)
                texts.append(text_of(http, "mine"))
                assert http.get("/other").text == "still here"
                assert set(cluster.applications()) == {"other", "loragraph"}
            status, _ = process.end(signal.SIGTERM)
            assert status == 0
        wait_until(lambda: set(cluster.applications()) == {"other"}, 60)
        assert httpx.get(f"http://127.0.0.1:{port}/other").text == "still here"
    assert texts[0] == texts[1]
    cluster.run("shutdown", "--yes")


def refusal(folder: Path, cluster: Cluster, *flags: str) -> str:
    """What keeps the command from serving."""
    with (
        pytest.raises(AssertionError) as caught,
        serve(folder, *flags, **cluster.token),
    ):
        pass
    return str(caught.value)
