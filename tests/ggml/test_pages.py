"""Huge pages are a wish that never hurts."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest

from loragraph.ggml.pages import prefer_huge_pages


def test_a_range_without_a_whole_huge_page_is_left_alone() -> None:
    """Less than a huge page is refused before the system is asked."""
    assert not prefer_huge_pages(1, (2 << 20) - 1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="madvise is Linux's")
def test_memory_works_as_before() -> None:
    """What is written to such memory is read back."""
    with mmap.mmap(-1, 8 << 20) as memory:
        view = np.frombuffer(memory, np.uint8)
        prefer_huge_pages(int(view.ctypes.data), len(view))
        assert not view.any()
        del view
        memory[5 << 20] = 7
        assert memory[5 << 20] == 7
