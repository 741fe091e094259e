"""Cholesky factors: SLATE's error, any layouts, one error on all ranks, and words as predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factored import DEFINITE, EPS, norm, positive_definite, relative, rng_matrix, wide
from problems import DTYPES, grid_shapes
from tiers import pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, LinAlgError

pytestmark = [pytest.mark.mpi, square_grid]

LAYOUTS = [(1, 1), (7, 2), (50, 7), (200, 64), (200, (48, 32)), (300, None), (257, (100, 30))]  # n and blocks


def error(A: np.ndarray, L: np.ndarray) -> float:
    """|A - L L^H|_1 / (n |A|_1 u)."""
    return relative(wide(A) - wide(L) @ wide(L).conj().T, norm(A), A.dtype, len(A))


@pytest.mark.parametrize(
    ("layout", "dtype", "order", "lower", "way"), third(pairs(LAYOUTS, DTYPES, "CF", (True, False), ("read", "sent")))
)
def test_factors(comm: Any, layout: Any, dtype: str, order: Any, lower: bool, way: str, monkeypatch: Any) -> None:
    """The other triangle of A is NaN, and is not read; A is unchanged; words and messages are as predicted."""
    (n, block), S = layout, positive_definite(layout[0], dtype)
    kept = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
    given = np.where(kept, S, np.nan).astype(dtype)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            monkeypatch.setattr(type(grid), "shares_memory", way == "read" and grid.shares_memory)
            A = DistMatrix.from_global(given, grid=grid, block=block, order=order)
            L = linalg.cholesky(A, lower=lower)
            monkeypatch.undo()
            report: Any = L.report
            assert report.as_predicted, str(report)
            assert report.algorithm == "cholesky"
            assert report.mover == ("shared" if way == "read" and grid.shares_memory and comm.size > 1 else "ring")
            factor = L.allgather()
            assert (factor[~kept] == 0).all()
            assert error(S, factor if lower else factor.conj().T) <= EPS
            assert np.array_equal(A.allgather(), given, equal_nan=True)


@pytest.mark.parametrize("kind", DEFINITE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_conditions(comm: Any, kind: str, dtype: str) -> None:
    S = DEFINITE[kind](150, dtype)
    with ProcessGrid(comm) as grid:
        L = linalg.cholesky(DistMatrix.from_global(S, grid=grid, block=16)).allgather()
        assert error(S, L) <= EPS
        reference = np.linalg.cholesky(S)  # LAPACK's; factors differ by the condition times rounding, residuals do not
        assert error(S, L) <= 3 * error(S, reference) + 0.1


def test_views_and_overwriting(comm: Any) -> None:
    S = positive_definite(120, "complex128")
    large = rng_matrix(200, 220, "complex128")
    large[30:150, 50:170] = S
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(large, grid=grid, block=(16, 24))
        window = A[30:150, 50:170]
        assert error(S, linalg.cholesky(window).allgather()) <= EPS
        assert error(S.conj(), linalg.cholesky(window.T).allgather()) <= EPS
        assert error(S, linalg.cholesky(window.H).allgather()) <= EPS
        L = linalg.cholesky(window, overwrite_a=True)
        assert np.shares_memory(L.local, A.local) or not L.local.size
        found = A.allgather()
        assert error(S, found[30:150, 50:170]) <= EPS
        found[30:150, 50:170] = large[30:150, 50:170] = 0
        assert np.array_equal(found, large)  # nothing around it was written to


@pytest.mark.parametrize("minor", [1, 8, 9, 33, 60])
def test_not_positive_definite(comm: Any, minor: int) -> None:
    """All ranks raise the same error, with the index that LAPACK finds."""
    S = positive_definite(60, "float64")
    S[minor - 1, minor - 1] = -1
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(S, grid=grid, block=8)
            with pytest.raises(LinAlgError, match=rf"its leading minor of order {minor} is not") as caught:
                linalg.cholesky(A)
            assert len(set(comm.allgather(str(caught.value)))) == 1
            assert np.array_equal(A.allgather(), S)


def test_bad_arguments(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        with pytest.raises(LayoutError, match="A must be square, but it is 4 x 5 on a"):
            linalg.cholesky(DistMatrix.zeros((4, 5), grid=grid))
        with pytest.raises(DTypeError, match="float16"):
            linalg.cholesky(DistMatrix.zeros((4, 4), grid=grid, dtype="float16"))
        with pytest.raises(DTypeError, match="A must be a DistMatrix, got ndarray"):
            linalg.cholesky(np.eye(3))  # type: ignore[arg-type]
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="different arguments"):
                linalg.cholesky(DistMatrix.eye(4, grid=grid), lower=comm.rank == 0)
        assert linalg.cholesky(DistMatrix.zeros((0, 0), grid=grid)).shape == (0, 0)


@pytest.mark.parametrize("lower", [True, False])
def test_solving_with_the_factor(comm: Any, lower: bool) -> None:
    """Backward error: |B - A X|_1 / (n |A|_1 |X|_1 u)."""
    S, b = hilbert_like(), rng_matrix(90, 7, "float64")
    with ProcessGrid(comm) as grid:
        L = linalg.cholesky(DistMatrix.from_global(S, grid=grid, block=16), lower=lower)
        B = DistMatrix.from_global(b, grid=grid, block=(11, 3), order="F")
        X = linalg.cho_solve(L, B, lower=lower)
        assert X.same_layout(B)
        assert np.array_equal(B.allgather(), b)
        x = X.allgather()
        assert relative(b - S @ x, norm(S) * norm(x), "float64", 90) <= EPS
        one = linalg.cho_solve(L, b[:, 0], lower=lower)
        assert relative((b[:, 0] - S @ one)[:, None], norm(S) * abs(one).sum(), "float64", 90) <= EPS


def hilbert_like() -> np.ndarray:
    return DEFINITE["hilbert"](90, "float64")
