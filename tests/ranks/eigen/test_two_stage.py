"""Reductions of Hermitian matrices to a band and to tridiagonal form, on every grid: similarity and words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factored import EPS, relative, rng_matrix
from problems import grid_shapes
from tiers import every_grid

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.linalg.eigen.two_stage import Band, TwoStages
from pdgemm.linalg.functions.iterations import Work
from pdgemm.local.blas.band import eigenvalues_of_band

pytestmark = pytest.mark.mpi
TYPES = ("d", "F", "f", "D")
ORDERS = (1, 2, 7, 8, 9, 17, 60, 83)


@pytest.fixture(autouse=True)
def narrow_band(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several panels, and several tasks in a sweep, at small orders."""
    monkeypatch.setattr("pdgemm.linalg.eigen.two_stage.BAND", 8)


def hermitian(n: int, dtype: str) -> np.ndarray:
    x = rng_matrix(n, n, dtype)
    return x + x.conj().T


def lower_only(x: np.ndarray) -> np.ndarray:
    """NaN above the diagonal, which is not read."""
    return np.where(np.tri(len(x), dtype=bool), x, np.nan).astype(x.dtype)


def applied(reduction: Any, work: Any, grid: Any, n: int, dtype: Any) -> np.ndarray:
    """Q, as the reduction applies it to an identity."""
    return reduction.apply(work, DistMatrix.eye(n, grid=grid, dtype=np.finfo(dtype).dtype)).allgather()


@every_grid
@pytest.mark.parametrize("n", ORDERS)
def test_reductions_are_similarities(comm: Any, n: int) -> None:
    """|A - Q T Q^H| and |Q^H Q - I| within c n eps, T real and the same on every rank; words are those planned."""
    for turn, shape in enumerate(grid_shapes(comm.size)):
        dtype = TYPES[(turn + n) % 4]
        a, block = hermitian(n, dtype), [8, (5, 3), None][turn % 3]
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(lower_only(a), grid=grid, block=block, order="CF"[turn % 2])
            work = Work("two stages")
            reduction = TwoStages.of(work, A)
            assert np.array_equal(A.allgather(), lower_only(a), equal_nan=True)
            d, e = reduction.d, reduction.e
            assert d.dtype == e.dtype == np.finfo(dtype).dtype and (d.shape, e.shape) == ((n,), (max(0, n - 1),))
            assert len(set(comm.allgather(d.tobytes() + e.tobytes()))) == 1
            Q = applied(reduction, work, grid, n, a.dtype)
            report: Any = work.reported(A, 1).report
            assert report.counted == report.predicted
        T = np.diag(d) + np.diag(e, 1) + np.diag(e, -1)
        assert relative(Q @ T @ Q.conj().T - a, float(np.linalg.norm(a, 1)), a.dtype, n) <= EPS
        assert relative(Q.conj().T @ Q - np.eye(n), 1, a.dtype, n) <= EPS


@every_grid
@pytest.mark.parametrize("dtype", TYPES)
def test_bands(comm: Any, dtype: str) -> None:
    """The band has the eigenvalues of A, its diagonal is real, and every rank has all of it."""
    for turn, shape in enumerate(grid_shapes(comm.size)):
        n = [45, 31, 64][turn % 3]
        a = hermitian(n, dtype)
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(lower_only(a), grid=grid, block=(8, 8), source=(shape[0] - 1, 0))
            band = Band.of(Work("band"), A).elements
        w = eigenvalues_of_band(band)
        assert band.shape == (9, n) and len(set(comm.allgather(band.tobytes()))) == 1
        b = sum(np.diag(band[k, : n - k], -k) for k in range(9))
        b = b + np.tril(b, -1).conj().T
        exact, bound = np.linalg.eigvalsh(a.astype("D")), EPS * n * np.finfo(dtype).eps * np.linalg.norm(a, 2)
        assert np.abs(np.linalg.eigvalsh(b) - exact).max() <= bound
        assert np.abs(w - exact).max() <= bound and w.dtype == np.finfo(dtype).dtype


@every_grid
def test_narrow_matrices_of_vectors(comm: Any) -> None:
    """Q times fewer columns than ranks, none of them included, of any layout."""
    n, a = 40, hermitian(40, "D")
    with ProcessGrid(comm) as grid:
        reduction = TwoStages.of(Work("x"), DistMatrix.from_global(a, grid=grid, block=5))
        Q, y = applied(reduction, Work("x"), grid, n, a.dtype), rng_matrix(n, 5, "D", seed=3)
        for k in (0, 1, 5):
            X = reduction.apply(Work("x"), DistMatrix.from_global(y[:, :k].copy(), grid=grid, block=(3, 2))).allgather()
            assert X.shape == (n, k) and np.allclose(X, Q @ y[:, :k], atol=1e-13)
