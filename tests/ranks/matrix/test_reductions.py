"""Sums, extrema, moments and norms of matrices on every grid and layout, compared with NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import drawn, matrices

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError

pytestmark = pytest.mark.mpi

NAMES = ("sum", "mean", "prod", "std", "var", "min", "max", "argmin", "argmax", "any", "all")
AXES = (None, 0, 1)


def test_reductions_with_keepdims_are_matrices_and_words_are_counted(comm: Any) -> None:
    whole = drawn((13, 8), "float32")
    for A in matrices(comm, whole):
        for name in NAMES:
            for axis in AXES:
                kept, flat = getattr(A, name)(axis=axis, keepdims=True), getattr(A, name)(axis=axis)
                expected = getattr(np, name)(whole, axis=axis, keepdims=True)
                assert kept.shape == expected.shape
                assert np.allclose(flat, np.squeeze(expected, axis), rtol=1e-4, atol=1e-5)
                assert np.array_equal(kept.allgather(), np.reshape(flat, kept.shape))
                assert kept.report.counted == kept.report.predicted
                received = kept.report.counted.words_received
                words = {"std": 3, "var": 3, "argmin": 2, "argmax": 2}.get(name, 1)
                result = 1 if axis is None else whole.shape[1 - axis]
                assert received >= words * result * (comm.size > 1 and A.grid.idle)
    report = comm.allgather(kept.report.counted)
    assert sum(x.words_sent for x in report) == sum(x.words_received for x in report)


def test_numpys_functions(comm: Any) -> None:
    whole = drawn((7, 5), "complex128")
    for A in matrices(comm, whole):
        for axis in (None, 0, 1, -1, -2, (0, 1)):
            assert np.allclose(np.sum(A, axis=axis), np.sum(whole, axis=axis))
            assert np.allclose(np.mean(A, axis), np.mean(whole, axis))
            assert np.allclose(np.var(A, axis, ddof=1), np.var(whole, axis, ddof=1))
        assert np.allclose(np.sum(A, 0, keepdims=True).allgather(), whole.sum(0, keepdims=True))
        assert np.allclose(np.trace(A), np.trace(whole))
        for offset in (-8, -3, 0, 2, 5):
            assert np.array_equal(np.diagonal(A, offset), np.diagonal(whole, offset))
            assert np.array_equal(A.H.diagonal(offset), np.conj(whole.T).diagonal(offset))
        for kind in (None, "fro", 1, np.inf):
            for x, X in ((whole, A), (whole.real.astype("float32"), A.real.astype("float32"))):
                assert np.isclose(np.linalg.norm(X, kind), np.linalg.norm(x, kind), rtol=1e-6)
        assert np.isclose(A.norm("max"), abs(whole).max())
        for kind in (0, 1, 2, np.inf, -np.inf):
            for axis in (0, 1):
                assert np.allclose(np.linalg.norm(A, kind, axis), np.linalg.norm(whole, kind, axis))
                assert np.allclose(A.norm(kind, axis), np.linalg.norm(whole, kind, axis))
            assert np.isclose(np.linalg.vector_norm(A, ord=kind), np.linalg.vector_norm(whole, ord=kind))
        for wrong in (2, -3, "x", (0,), (0, 2), (0, 3), (-3, 0), (0, "x"), (False, 1), True, 0.0):
            with pytest.raises(ArgumentError, match="axis must be None, 0 or 1, got"):
                A.sum(wrong)
        with pytest.raises(TypeError, match="numpy.sum with out"):
            np.sum(A, out=np.zeros(5))
        with pytest.raises(ArgumentError, match="norm 3 of vectors"):
            A.norm(3, axis=0)


def test_norms_of_zeros_and_tiny_elements(comm: Any) -> None:
    """Norms do not underflow although squares of elements do, also if some ranks have only zeros."""
    whole = np.zeros((13, 8))
    whole[4, 5], whole[12, 5] = 3e-200, -4e-200
    for A in matrices(comm, whole):
        assert np.isclose(A.norm(), 5e-200, rtol=1e-14, atol=0)
        assert np.allclose(A.vector_norm(2, axis=0), [0, 0, 0, 0, 0, 5e-200, 0, 0], rtol=1e-14, atol=0)
        assert A[:, :5].norm() == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "bool"])
def test_other_types(comm: Any, dtype: str) -> None:
    whole = drawn((29, 61), "bool" if dtype == "bool" else "float32").astype(dtype)
    wide = whole.astype(np.float64)
    for A in matrices(comm, whole):
        for axis in AXES:
            total = A.sum(axis=axis)
            assert np.asarray(total).dtype == (np.int64 if dtype == "bool" else dtype)
            eps = 8e-3 if dtype == "bfloat16" else 0
            assert np.allclose(np.asarray(total, float), wide.sum(axis), atol=eps * np.abs(wide).sum(axis).max())
            assert np.array_equal(np.asarray(A.max(axis), float), wide.max(axis))
            assert np.array_equal(A.argmin(axis), wide.argmin(axis))
            assert np.array_equal(A.any(axis), wide.any(axis))
            mean = np.asarray(A.mean(axis))
            assert mean.dtype == (np.float64 if dtype == "bool" else dtype)
            assert np.allclose(mean.astype(float), wide.mean(axis), atol=2 * eps + 1e-12)


def test_infinities_nans_and_large_numbers(comm: Any) -> None:
    whole = drawn((13, 8), "float64")
    whole[3, 2], whole[7, 2], whole[5, 4], whole[11, 6] = np.nan, np.nan, np.inf, -np.inf
    whole[:, 7] = 1e300
    for A in matrices(comm, whole):
        for axis in AXES:
            for name in ("sum", "min", "max", "argmin", "argmax", "mean"):
                with np.errstate(all="ignore"):
                    assert np.array_equal(
                        np.isnan(getattr(A, name)(axis)), np.isnan(getattr(np, name)(whole, axis=axis))
                    ), name
                    if name != "mean" and name != "sum":
                        expected = getattr(np, name)(whole, axis=axis)
                        assert np.array_equal(getattr(A, name)(axis), expected, equal_nan=True), (name, axis)
        norms = A.norm(axis=0)
        assert np.isclose(norms[7], 1e300 * np.sqrt(13))
        assert np.isnan(norms[2]) and norms[4] == norms[6] == np.inf
        assert np.isclose(norms[0], np.linalg.norm(whole[:, 0]))


def test_sums_lose_few_digits(comm: Any) -> None:
    """Added in order, more than 2^24 ones would stay at 2^24 in float32; the error of `sum` is a few ulp."""
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        n = 100_000
        A = DistMatrix.from_function(lambda i, j: 0.1 + 0 * i + 0 * j, (n, 3), dtype="float32", grid=grid)
        expected = n * float(np.float32(0.1))
        for found in (*A.sum(axis=0), *A.T.sum(axis=1), A.sum() / 3, *(A.mean(axis=0) * n)):
            assert abs(float(found) / expected - 1) < 3e-6
        assert A.std() < 1e-7
        shifted = DistMatrix.from_function(lambda i, j: 1e8 + i % 2 + 0 * j, (n, 3), grid=grid)
        assert np.allclose(shifted.var(axis=0), 0.25, rtol=1e-9)
