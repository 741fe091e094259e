"""Sorted elements, percentiles, histograms, cumulative sums and reductions without NaN, compared with NumPy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, DTypeError

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

AXES = (None, 0, 1)


def layouts(comm: Any, whole: np.ndarray) -> Iterator[Any]:
    with ProcessGrid(comm) as grid, ProcessGrid(comm, (1, 1), ranks=[comm.size - 1]) as one:
        yield DistMatrix.from_global(whole, grid=grid, block=(3, 2))
        yield DistMatrix.from_global(np.pad(whole, 1).T, grid=grid, block=2)[1:-1, 1:-1].T
        yield DistMatrix.from_global(whole, grid=one)


def drawn(dtype: str) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((13, 8)) * 5
    x[3] = x[4]  # equal elements
    whole = x.astype(dtype)
    if dtype == "float64":
        whole[0, 0], whole[1, 1], whole[2, 2] = -0.0, np.inf, -np.inf
    return whole


def agrees(comm: Any, found: Any, expected: Any, rtol: float = 0.0) -> None:
    """Check that shape, type and elements equal NumPy's on every rank, and that words are as planned."""
    if hasattr(found, "allgather"):
        assert found.report.counted == found.report.predicted
        found = found.allgather()
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert np.allclose(found, expected, rtol=rtol, atol=rtol, equal_nan=expected.dtype.kind in "fc")


@pytest.mark.parametrize("dtype", ["float64", "float32", "int8", "complex64"])
def test_sorted_columns_and_cumulative_sums(comm: Any, dtype: str) -> None:
    whole = drawn(dtype)
    if dtype == "float32":
        whole[2, 3] = whole[7, 1] = np.nan
    for A in layouts(comm, whole):
        for axis in (0, 1):
            made = np.sort(A, axis=axis)
            assert made.same_layout(A)
            agrees(comm, made, np.sort(whole, axis=axis))
            agrees(comm, np.cumsum(A, axis=axis), np.cumsum(whole, axis=axis))
        if dtype != "complex64":
            agrees(comm, np.sort(A, axis=None), np.sort(whole, axis=None)[:, None])
        agrees(comm, A[np.argsort(A[:, 1].real, kind="stable")], whole[np.argsort(whole[:, 1].real, kind="stable")])


@pytest.mark.parametrize("dtype", ["float64", "float32", "int8", "uint16", "bool"])
def test_percentiles(comm: Any, dtype: str) -> None:
    whole = drawn(dtype)
    for with_nan in (False, True) if whole.dtype.kind == "f" else (False,):
        if with_nan:
            whole[2, 3] = whole[7, 1] = np.nan
        for A in layouts(comm, whole):
            for axis in AXES:
                rtol = 0.0 if dtype == "float64" else 1e-6
                agrees(comm, np.median(A, axis=axis), np.median(whole, axis=axis), rtol)
                agrees(comm, np.nanmedian(A, axis), np.nanmedian(whole, axis), rtol)
                if dtype == "bool":
                    continue
                agrees(comm, np.percentile(A, [0, 12.5, 100], axis), np.percentile(whole, [0, 12.5, 100], axis), rtol)
                agrees(comm, np.nanquantile(A, 0.3, axis=axis), np.nanquantile(whole, 0.3, axis=axis), rtol)


def test_percentiles_are_exact(comm: Any, grid: Any) -> None:
    """Percentiles are exact for numbers that differ in the last bit, and for the smallest and largest numbers."""
    x = np.array([0.0, 5e-324, -5e-324, 1.0, np.nextafter(1, 2), np.nextafter(1, 0), -1e308, 1e308, -2.0, 2.0, 3.0])
    A = DistMatrix.from_global(x.reshape(11, 1), grid=grid, block=1)
    assert [np.quantile(A, k / 10) for k in range(11)] == np.sort(x).tolist()


def test_histograms(comm: Any) -> None:
    for dtype in ("float32", "int8"):
        whole = drawn(dtype)
        for A in layouts(comm, whole):
            for options in ({}, {"bins": 7}, {"bins": [-3, 0, 0.5, 2]}, {"range": (-1, 2)}, {"density": True}):
                for found, expected in zip(np.histogram(A, **options), np.histogram(whole, **options)):
                    agrees(comm, found, expected)


@pytest.mark.parametrize("dtype", ["float64", "int8", "complex64"])
def test_reductions_without_nan(comm: Any, dtype: str) -> None:
    whole = drawn(dtype)
    if dtype != "int8":
        whole[2, 3] = whole[7, 1] = np.nan
        whole[:, 5] = np.nan
    names = ["nansum", "nanmean", "nanvar", "nanstd"]
    # complex numbers have no order, and their product overflows
    names += ["nanmin", "nanmax", "nanprod"] * (dtype != "complex64")
    for A in layouts(comm, whole):
        for name in names:
            for axis in AXES:
                rtol = 1e-13 if dtype == "float64" else 1e-4
                with np.errstate(all="ignore"):
                    agrees(comm, getattr(np, name)(A, axis=axis), getattr(np, name)(whole, axis=axis), rtol)
        if dtype == "float64":
            agrees(comm, np.nanvar(A, axis=1, ddof=1), np.nanvar(whole, axis=1, ddof=1), 1e-13)


def test_types_without_order_and_bad_axes_are_refused_on_all_ranks(comm: Any, grid: Any) -> None:
    A = DistMatrix.from_global(drawn("complex64"), grid=grid)
    B = DistMatrix.from_global(drawn("float64"), grid=grid)
    last = comm.rank == comm.size - 1
    for call, error, message in (
        (lambda: np.sort(A, axis=None), DTypeError, "no order"),
        (lambda: np.median(A), DTypeError, "no order"),
        (lambda: np.histogram(A), DTypeError, "no order"),
        (lambda: np.cumsum(B), TypeError, "axis"),
        (lambda: np.sort(B, axis=2), ArgumentError, "axis 0 or 1"),
        (lambda: np.percentile(B, 101), ArgumentError, "from 0 to 100"),
        (lambda: np.quantile(B, [0.5, 101 if last else 1]), ArgumentError, "from 0 to 1"),
        (lambda: np.histogram(B, bins="auto"), ArgumentError, "'auto'"),
        (lambda: np.histogram(B, bins=[2, 1]), ValueError, "monotonically"),
        (lambda: np.histogram(B, bins=0 if last else 1), ArgumentError, "bins must be >= 1"),
        (lambda: np.median(B[:0]), ArgumentError, "no element"),
        (lambda: np.median(B, keepdims=True), TypeError, "not available"),
    ):
        with pytest.raises(error, match=message):
            call()
