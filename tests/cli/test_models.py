"""`loragraph models`: the registry as a table and as JSON."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from loragraph.cli.main import app
from loragraph.graph.arch import FAMILIES, REFUSED


def run(*args: str) -> str:
    """The command's output in a wide terminal; it must succeed."""
    result = CliRunner().invoke(app, ["models", *args], env={"COLUMNS": "400"})
    assert result.exit_code == 0
    return result.output


def test_json_is_the_registry() -> None:
    """Each family with what its file says of it, and each refused relative with its reason."""
    facts = json.loads(run("--json"))
    assert facts["families"].keys() == FAMILIES.keys()
    for arch, entry in facts["families"].items():
        about = FAMILIES[arch].about
        assert entry == {
            "models": about.models,
            "real": list(about.real),
            "synthetic": about.synthetic,
            "unsupported": list(about.unsupported),
        }
    assert facts["refused"] == REFUSED
    assert not facts["families"].keys() & facts["refused"].keys()


def test_the_table_names_everything() -> None:
    """No family, model, limit or reason is left out."""
    text = run()
    for arch, family in FAMILIES.items():
        about = family.about
        for words in (arch, about.models, *about.real, about.synthetic, *about.unsupported):
            assert words in text
    for arch, reason in REFUSED.items():
        assert f"{arch}: {reason}" in text


def test_every_family_says_whose_models_it_computes() -> None:
    """A family without a word about its models is not finished."""
    assert all(family.about.models for family in FAMILIES.values())
