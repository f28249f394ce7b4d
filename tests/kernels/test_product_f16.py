"""The products with F16 weights against numpy in float64, and against themselves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from loragraph.kernels.library import ffi, forced_dispatch, instruction_sets, lib
from loragraph.kernels.product import F16ProductNode, Layout, min_rows

F32 = NDArray[np.float32]
F16 = NDArray[np.float16]

LANES = {"avx2": 8, "avx512": 16}


def kernels() -> Iterator[str]:
    """The instruction sets of this CPU that multiply F16."""
    for name in instruction_sets():
        with forced_dispatch(name):
            if min_rows(Layout.F16):
                yield name


@pytest.fixture(scope="module", params=list(kernels()), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """An instruction set in force; none: the tests are skipped."""
    with forced_dispatch(request.param):
        yield request.param


def product(w: F16, x: F32, n_threads: int = 1) -> F32:
    """y (n, n_out) by the node, each thread's part after the other's; rows of y apart."""
    n_out, n_in = w.shape
    y = np.full((len(x), n_out + 3), np.nan, np.float32)
    node = F16ProductNode(w.ctypes.data, n_in, n_out, len(x))
    node.bind(x.ctypes.data, x.strides[0] // 4, y.ctypes.data, n_out + 3)
    for ith in range(n_threads):
        lib.loragraph_product_f16(ffi.NULL, ith, n_threads, ffi.cast("void *", node.userdata))
    assert np.isnan(y[:, n_out:]).all()
    return y[:, :n_out].copy()


def numbers(n_out: int, n_in: int, n_rows: int) -> tuple[F16, F32]:
    """w and x, drawn for these sizes."""
    rng = np.random.default_rng([n_out, n_in, n_rows])
    w = rng.standard_normal((n_out, n_in)).astype(np.float16)
    return w, rng.standard_normal((n_rows, n_in)).astype(np.float32)


@pytest.mark.parametrize(("n_out", "n_in"), [(1, 1), (7, 15), (23, 16), (50, 100), (97, 1537)])
@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 31])
def test_numbers(isa: str, n_out: int, n_in: int, n_rows: int) -> None:
    """Any sizes: no further from float64 than roundings of F32 in sums of n_in."""
    w, x = numbers(n_out, n_in, n_rows)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    magnitude = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T

    # A sum in so many lanes has n_in / lanes roundings a lane, the tail's and the four of the tree.
    bound = (n_in // LANES[isa] + 6) * 2.0**-24 * magnitude
    assert (np.abs(product(w, x) - exact) <= bound).all()


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 5, 6, 7, 8, 19])
@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_threads_and_other_rows_change_no_bit(n_rows: int, n_threads: int) -> None:
    """A row's product is the same alone, in any tile, and with any number of threads."""
    w, x = numbers(61, 83, n_rows)
    y = product(w, x, n_threads)

    for row in range(n_rows):
        assert np.array_equal(y[row], product(w, x[row : row + 1])[0])


def test_what_is_not_finite_stays_in_its_row() -> None:
    """A row with NaN or infinity gives no finite number, and other rows do not see it."""
    w, x = numbers(29, 40, 6)
    clean = product(w, x)
    x[1, 39], x[4, 0] = np.nan, np.inf
    y = product(w, x)

    assert not np.isfinite(y[[1, 4]]).any()
    assert np.array_equal(np.delete(y, [1, 4], 0), np.delete(clean, [1, 4], 0))


def test_strided_x() -> None:
    """Rows of x may stand apart, as in a view."""
    w, wide = numbers(16, 100, 9)
    w = np.ascontiguousarray(w[:, :64])

    assert np.array_equal(product(w, wide[:, :64]), product(w, np.ascontiguousarray(wide[:, :64])))


def test_wrong_sizes_are_refused() -> None:
    """Nothing of size 0 reaches the kernel."""
    with pytest.raises(ValueError, match="from 1 on"):
        F16ProductNode(1, 0, 1, 1)
