"""LU factors: SLATE's error, LAPACK's pivots, any layouts, words as predicted from the pivots; determinants."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import EPS, hilbert, kahan, norm, relative, rng_matrix, wide
from problems import DTYPES, grid_shapes
from tiers import pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, LinAlgError

pytestmark = [pytest.mark.mpi, square_grid]

LAYOUTS = [  # m and n, blocks
    (1, 1, 1), (7, 7, 2), (50, 50, 7), (150, 150, 64), (150, 150, (48, 32)), (200, 200, None), (90, 90, (100, 30)),
    (120, 40, 16), (40, 120, (16, 9)), (1, 9, 2), (9, 1, 2),
]  # fmt: skip


def error(A: np.ndarray, factors: np.ndarray, perm: np.ndarray) -> float:
    """|P A - L U|_1 / (n |A|_1 u)."""
    k = min(A.shape)
    L, U = np.tril(wide(factors)[:, :k], -1) + np.eye(len(A), k), np.triu(wide(factors)[:k])
    return relative(wide(A)[perm] - L @ U, norm(A), A.dtype, max(A.shape))


@pytest.mark.parametrize(("layout", "dtype", "order", "way"), third(pairs(LAYOUTS, DTYPES, "CF", ("read", "sent"))))
def test_factors(comm: Any, layout: Any, dtype: str, order: Any, way: str, monkeypatch: Any) -> None:
    m, n, block = layout
    given = rng_matrix(m, n, dtype)
    _, pivots = scipy.linalg.lu_factor(given)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            monkeypatch.setattr(type(grid), "shares_memory", way == "read" and grid.shares_memory)
            A = DistMatrix.from_global(given, grid=grid, block=block, order=order)
            found = linalg.lu_factor(A)
            monkeypatch.undo()
            report: Any = found.report
            assert report.as_predicted, str(report)
            assert report.mover == ("shared" if way == "read" and grid.shares_memory and comm.size > 1 else "ring")
            assert np.array_equal(found.pivots, pivots)
            assert found.zero_pivot == 0
            assert error(given, found.LU.allgather(), found.perm) <= EPS
            assert np.array_equal(A.allgather(), given)


def wilkinson(n: int, dtype: str) -> np.ndarray:
    """The matrix whose last column grows to 2^(n-1) (Higham 2002, 9.4)."""
    A = np.eye(n) - np.tri(n, k=-1)
    A[:, -1] = 1
    return A.astype(dtype)


def nearly_singular(n: int, dtype: str) -> np.ndarray:
    x = rng_matrix(n, 1, dtype)
    return (x @ x.T + np.finfo(dtype).eps * rng_matrix(n, n, dtype, seed=1)).astype(dtype)


def graded(n: int, dtype: str) -> np.ndarray:
    d = np.logspace(0, -6 if np.finfo(dtype).eps < 1e-10 else -3, n)
    return (rng_matrix(n, n, dtype) * d * d[::-1, None]).astype(dtype)


NASTY: dict[str, Callable[[int, str], np.ndarray]] = {
    "wilkinson": wilkinson, "nearly singular": nearly_singular, "graded": graded, "hilbert": hilbert, "kahan": kahan,
}  # fmt: skip


@pytest.mark.parametrize("kind", NASTY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nasty_matrices(comm: Any, kind: str, dtype: str) -> None:
    """The residual is at most SLATE's, or where elements grow 3 u |L||U| (Higham 2002, 9.3)."""
    given = NASTY[kind](60, dtype)
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(given, grid=grid, block=8)
        found = linalg.lu_factor(A)
        factors = found.LU.allgather()
        grown = max(1, abs(np.triu(factors)).max() / abs(given).max())
        assert error(given, factors, found.perm) <= EPS * grown
        if kind == "wilkinson":
            assert factors[-1, -1] == 2.0**59


@pytest.mark.parametrize("at", [1, 8, 9, 30])
def test_singular(comm: Any, at: int) -> None:
    """A column of zeros: factors as LAPACK leaves them, determinants of 0, and one error on all ranks."""
    given = rng_matrix(30, 30, "float64")
    given[:, at - 1] = 0
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid, warnings.catch_warnings():
            warnings.simplefilter("error")
            A = DistMatrix.from_global(given, grid=grid, block=(8, 7))
            found = linalg.lu_factor(A)
            assert found.zero_pivot == at
            assert error(given, found.LU.allgather(), found.perm) <= EPS
            for call in (
                partial(linalg.lu_solve, found, given[0]),
                partial(linalg.solve, A, A),
                partial(linalg.inv, A),
            ):
                with pytest.raises(LinAlgError, match=f"is singular: pivot {at} of .* is zero") as caught:
                    call()
                assert len(set(comm.allgather(str(caught.value)))) == 1
            assert linalg.det(A) == 0
            assert linalg.slogdet(A) == (0, -np.inf)


def test_ones_and_equal_rows(comm: Any) -> None:
    """Ties: any of the largest may be the pivot."""
    given = np.where(rng_matrix(64, 64, "float64") > 0, 1.0, -1.0)
    with ProcessGrid(comm) as grid:
        found = linalg.lu_factor(DistMatrix.from_global(given, grid=grid, block=8))
        assert error(given, found.LU.allgather(), found.perm) <= EPS
        assert linalg.lu_factor(DistMatrix.zeros((5, 5), grid=grid, block=2)).zero_pivot == 1


@pytest.mark.parametrize("n", [0, 1, 5, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_determinants_and_factors_apart(comm: Any, n: int, dtype: str) -> None:
    given = rng_matrix(n, n, dtype)
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(given, grid=grid, block=3)
        sign, logarithm = linalg.slogdet(A)
        expected = np.linalg.slogdet(wide(given))
        tolerance = 100 * max(1, n) * np.finfo(dtype).eps
        assert abs(sign - expected.sign) <= tolerance
        assert abs(logarithm - expected.logabsdet) <= tolerance * max(1, abs(expected.logabsdet))
        assert abs(linalg.det(A) - np.linalg.det(wide(given))) <= tolerance * abs(np.linalg.det(wide(given)))
        p, L, U = linalg.lu(A)
        lower, upper = L.allgather(), U.allgather()
        assert np.array_equal(lower, np.tril(lower)) and np.array_equal(upper, np.triu(upper))
        assert (np.diag(lower) == 1).all()
        assert relative(wide(given) - (wide(lower) @ wide(upper))[p], norm(given), dtype, n) <= EPS
        if n:
            assert np.array_equal(p, scipy.linalg.lu(given, p_indices=True)[0])


def test_slogdet_does_not_overflow(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        found = linalg.slogdet(DistMatrix.eye(300, grid=grid, block=16) * 1e200)
        assert found.sign == 1 and np.isclose(found.logabsdet, 300 * np.log(1e200))


@pytest.mark.parametrize(("shape", "p"), [((120, 40), 2), ((40, 120), 2), ((90, 90), 3)])
def test_rectangles_apart(comm: Any, shape: tuple[int, int], p: int) -> None:
    given = rng_matrix(*shape, "float64")
    with ProcessGrid(comm) as grid:
        order, L, U = linalg.lu(DistMatrix.from_global(given, grid=grid, block=(9, 11)))
        assert L.shape == (shape[0], min(shape)) and U.shape == (min(shape), shape[1])
        assert relative(given - (L.allgather() @ U.allgather())[order], norm(given), "float64", max(shape)) <= EPS


def test_views_and_overwriting(comm: Any) -> None:
    large = rng_matrix(200, 220, "complex128")
    inner = large[30:90, 50:110].copy()
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(large, grid=grid, block=(16, 24))
        window = A[30:90, 50:110]
        for view, given in ((window, inner), (window.T, inner.T), (window.H, inner.conj().T)):
            found = linalg.lu_factor(view)
            assert error(given, found.LU.allgather(), found.perm) <= EPS
        found = linalg.lu_factor(window, overwrite_a=True)
        assert np.shares_memory(found.LU.local, A.local) or not found.LU.local.size
        whole = A.allgather()
        assert error(inner, whole[30:90, 50:110], found.perm) <= EPS
        whole[30:90, 50:110] = large[30:90, 50:110] = 0
        assert np.array_equal(whole, large)  # nothing around it was written to


@pytest.mark.on_ranks(3, 4)
def test_idle_ranks(comm: Any) -> None:
    if comm.size == 1:
        pytest.skip("no rank is left over")
    given = rng_matrix(40, 40, "float64")
    with ProcessGrid(comm, (1, comm.size - 1), ranks=range(1, comm.size)) as grid:
        found = linalg.lu_factor(DistMatrix.from_global(given, grid=grid, block=8))
        assert np.array_equal(found.pivots, scipy.linalg.lu_factor(given)[1])
        report: Any = found.report
        assert report.as_predicted
        x = linalg.lu_solve(found, given[0])
        assert relative((given[0] - given @ x)[:, None], norm(given) * abs(x).sum(), "float64", 40) <= EPS


def test_bad_arguments(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        square = linalg.lu_factor(DistMatrix.eye(5, grid=grid, block=2))
        with pytest.raises(LayoutError, match="factors.LU must be square, but it is 4 x 5 on a"):
            linalg.lu_solve(linalg.lu_factor(DistMatrix.zeros((4, 5), grid=grid, block=2)), np.zeros(4))
        with pytest.raises(LayoutError, match="so B must have 5 elements, but it has 4"):
            linalg.lu_solve(square, np.zeros(4))
        with pytest.raises(ArgumentError, match='trans is "N", "T" or "C"'):
            linalg.lu_solve(square, np.zeros(5), trans="X")  # type: ignore[arg-type]
        with pytest.raises(DTypeError, match="float16"):
            linalg.lu_factor(DistMatrix.zeros((4, 4), grid=grid, dtype="float16"))
        with pytest.raises(LayoutError, match="A must be square"):
            linalg.det(DistMatrix.zeros((4, 5), grid=grid))
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="different arguments"):
                linalg.lu_factor(DistMatrix.eye(4, grid=grid), overwrite_a=comm.rank == 0)
        empty = linalg.lu_factor(DistMatrix.zeros((0, 0), grid=grid))
        assert empty.LU.shape == (0, 0) and empty.pivots.size == 0
