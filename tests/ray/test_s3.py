"""Replicas whose adapters stand in S3; skipped where s3fs and moto's server are not installed."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx

from loragraph.adapters.convert import convert
from loragraph.ray.options import AdapterArg
from tests.adapters.convert.folders import lora, peft
from tests.cluster.s3_server import s3_server
from tests.ray.cluster import app_args
from tests.ray.fleet import Fleet
from tests.ray.test_member import LOAD, run, text_of
from tests.server.serving import write_files
from tests.server.test_peft import MODULES


def test_adapters_from_s3(tmp_path: Path) -> None:
    """A file from the start on and a folder that is loaded; both replicas answer as with the files
    themselves. What is not there is told, without the credentials.
    """
    write_files(tmp_path)
    folder = tmp_path / "mine"
    peft(folder, lora(MODULES))
    convert(folder, tmp_path / "base.gguf", tmp_path / "adapters" / "direct.gguf")

    async def test(fleet: Fleet, http: httpx.AsyncClient) -> None:
        body = {"lora_name": "x", "lora_path": "s3://box/mine"}
        answer = await http.post(LOAD, json=body)
        assert answer.status_code == 200, answer.text
        for id_ in "ab":
            fleet.only = id_
            assert await text_of(http, "stored") == await text_of(http, "alpha")
            assert await text_of(http, "x") == await text_of(http, "direct")
            assert (await http.get("/v1/models/x")).json()["root"] == "mine"
        assert await text_of(http, "x") != await text_of(http, "base")
        gone = await http.post(LOAD, json=body | {"lora_name": "y", "lora_path": "s3://box/y"})
        assert gone.status_code == 502
        assert "s3://box/y: there is no such file" in gone.text
        assert "hush" not in gone.text

    with s3_server() as s3:
        client = s3.client()
        for one in (*folder.iterdir(), tmp_path / "adapters" / "alpha.gguf"):
            client.put_object(Bucket="box", Key=f"mine/{one.name}", Body=one.read_bytes())
        args = app_args(
            tmp_path,
            adapters=(AdapterArg(name="stored", source="s3://box/mine/alpha.gguf"),),
            lora_schemes=("s3",),
            storage={"s3": s3.storage(secret="hush")},
        )
        run(args, test)
