"""Elementwise operations of matrices of different layouts and shapes, and of arrays that are on every rank."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from layouts import drawn, matrices

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, PdgemmError

pytestmark = pytest.mark.mpi


def test_operands_of_different_layouts(comm: Any, grid: Any) -> None:
    whole, other = drawn((13, 13), "float64"), drawn((13, 13), "complex64", 1)
    with ProcessGrid(comm, (comm.size, 1)) as rows:
        A = DistMatrix.from_global(whole, grid=grid, block=(2, 3))
        for X in (A, A.T.copy(), DistMatrix.from_global(whole, grid=rows), DistMatrix.from_global(whole, grid=grid)):
            found, moved = A - X, not X.same_layout(A)
            assert np.array_equal(found.allgather(), whole - X.allgather())
            assert found.same_layout(A)
            assert (found.report is not None) == moved
            assert not moved or found.report.counted == found.report.predicted
        B = DistMatrix.from_global(other, grid=rows, block=(1, 4))
        for X, Y in pairwise((A, B, A.T, B.H)):
            assert np.array_equal((X * Y).allgather(), X.allgather() * Y.allgather())
        C = A.copy()
        C -= DistMatrix.from_global(whole, grid=rows)
        assert not C.local.any()
        D = DistMatrix.zeros((13, 13), grid=rows)
        assert np.add(A, A.T, out=D) is D
        assert np.array_equal(D.allgather(), whole + whole.T)
        E = A.redistribute(like=D)
        assert E.same_layout(D) and np.array_equal(E.allgather(), whole)
        assert A.redistribute(like=B.T, dtype="float32").dtype == np.float32


@pytest.mark.parametrize("dtype", ["float64", "complex64", "float16", "int8"])
def test_products_with_vectors_and_thin_matrices(comm: Any, dtype: str) -> None:
    whole = drawn((13, 8), dtype)
    x, y, thin = whole[3].copy(), whole[:, 2].copy(), drawn((8, 2), dtype, 3)
    wide = whole.astype(np.result_type(whole, np.float32))
    for A in islice(matrices(comm, whole), 0, None, 2):
        for found, expected in ((A @ x, wide @ x), (y @ A, y @ wide), (A.matvec(x), wide @ x), (A.T @ y, wide.T @ y)):
            assert isinstance(found, np.ndarray)
            assert found.shape == expected.shape
            assert len(set(comm.allgather(found.tobytes()))) == 1
            error = 1e-2 if dtype == "float16" else 1e-5
            assert np.allclose(found.astype(expected.dtype), expected, rtol=error, atol=error)
        if dtype != "float16":
            assert np.allclose((A @ thin).allgather(), wide @ thin, rtol=1e-4, atol=1e-4)
            assert np.allclose((thin.T @ A.T).allgather(), thin.T @ wide.T, rtol=1e-4, atol=1e-4)


def test_shapes_that_do_not_match_are_refused_on_all_ranks(comm: Any, grid: Any) -> None:
    A, B = DistMatrix.zeros((6, 4), grid=grid), DistMatrix.zeros((4, 6), grid=grid)
    for wrong in (B, np.zeros(6), np.zeros((4, 1)), A[:3, :], np.zeros(0)):
        with pytest.raises(LayoutError, match="cannot be broadcast to one shape"):
            A + wrong
    with pytest.raises(LayoutError, match=r"has the shape \(2, 6, 4\)"):
        A + np.zeros((2, 1, 1))
    with pytest.raises(LayoutError, match=r"has the shape \(6, 4\), and out is 1 x 4"):
        np.add(A, 1, out=DistMatrix.zeros((1, 4), grid=grid))
    with pytest.raises(TypeError):
        A + np.array(["x"] * 4)
    with pytest.raises(DTypeError, match="mask"):
        A + np.ma.masked_array(np.zeros(4), [1, 0, 0, 0])
    with pytest.raises(LayoutError, match="the vector must have 4 numbers for 6 x 4"):
        A @ np.zeros(6)
    for options in ({"out": A}, {"grid": grid}, {"block": 2}):
        with pytest.raises(ArgumentError, match="like determines the layout"):
            A.redistribute(like=A, **options)
    with pytest.raises(LayoutError, match="shapes differ"):
        A.redistribute(like=B)
    if comm.size > 1:
        with pytest.raises(PdgemmError):
            A + np.full(4, float(comm.rank))
        with pytest.raises(PdgemmError):
            A @ np.full(4, float(comm.rank))
        mine = comm.rank == comm.size - 1  # wrong on one rank, and raised on all
        for call in (
            lambda: A[9 if mine else 0],
            lambda: A.std(ddof=-1 if mine else 0),
            lambda: A.norm(3 if mine else 2, axis=0),
            lambda: A.sum("x" if mine else 0),
            lambda: A.sum(1 if mine else 0),
            lambda: np.vstack((A, B if mine else A)),
            lambda: np.vstack((A, 1 if mine else A)),
        ):
            with pytest.raises((PdgemmError, TypeError)):
                call()
        with pytest.raises(PdgemmError):
            A + (np.zeros(4) if comm.rank else np.zeros(5))
        with ProcessGrid(comm, (1, 1), ranks=[0]) as alone:
            there = DistMatrix.from_global(np.ones((6, 4)), grid=alone)
            assert (A + there).sum() == 24
