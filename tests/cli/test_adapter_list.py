"""Values of --lora and --lora-scaled."""

from __future__ import annotations

import pytest

from loragraph.cli.adapter_list import adapter_list, csv_fields
from loragraph.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("a.gguf", ["a.gguf"]),
        ("a.gguf,b.gguf", ["a.gguf", "b.gguf"]),
        (
            'file1.gguf,"file2,2.gguf","file3""3"".gguf",file4".gguf',
            ["file1.gguf", "file2,2.gguf", 'file3"3".gguf', 'file4".gguf'],
        ),
        ('"a,b.gguf":0.5', ["a,b.gguf:0.5"]),
        ('"a"', ["a"]),
        ('""""', ['"']),
        ("C:\\a.gguf, b", ["C:\\a.gguf", " b"]),
        ('a"b,c"d', ['a"b', 'c"d']),
        ("é,字", ["é", "字"]),
    ],
)
def test_csv_fields(text: str, fields: list[str]) -> None:
    """Commas separate, double quotes protect, as in llama.cpp."""
    assert csv_fields(text, "--lora") == fields


@pytest.mark.parametrize("text", ["", ",", "a,", ",a", "a,,b", '""', '"a', 'a,"b,c', '"a""'])
def test_csv_errors(text: str) -> None:
    """Empty paths and open quotes are refused, with the flag's name."""
    with pytest.raises(ConfigError, match=r"^--lora: expected"):
        csv_fields(text, "--lora")


def test_adapter_list() -> None:
    """Plain adapters have scale 1; a scale is what follows the last colon."""
    assert adapter_list(["a,b"], ["c:0.5,C:\\d.gguf:-2", '"e,f:g:1e-3"']) == [
        ("a", 1.0),
        ("b", 1.0),
        ("c", 0.5),
        ("C:\\d.gguf", -2.0),
        ("e,f:g", 0.001),
    ]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a.gguf", "expected PATH:SCALE, got 'a.gguf'"),
        (":0.5", "expected PATH:SCALE, got ':0.5'"),
        ("a.gguf:", "expected a finite number as scale, got ''"),
        ("a.gguf:x", "expected a finite number as scale, got 'x'"),
        ("a.gguf:nan", "expected a finite number as scale, got 'nan'"),
        ("a.gguf:inf", "expected a finite number as scale, got 'inf'"),
        ("C:\\a.gguf", "expected a finite number as scale"),
    ],
)
def test_bad_scales(text: str, match: str) -> None:
    """A missing or meaningless scale is refused and quoted."""
    with pytest.raises(ConfigError) as caught:
        adapter_list([], [text])
    assert match in str(caught.value)
