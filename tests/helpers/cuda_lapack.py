"""The tests of cuSOLVER, triangles and factorisations on a GPU, or on CuPy without a GPU (cuda_layer.py)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from factored import EPS, norm, positive_definite, relative, rng_matrix, wide
from problems import DTYPES

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.local.blas.local_lapack import getrf, keep_triangle, potrf, trsm
from pdgemm.local.blas.local_qr import compact_qr


class CudaLapack:
    """Tests of cuSOLVER, of triangles, and of factorisations that call cuSOLVER."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_factors_and_triangles(self, comm: Any, cuda: Any, dtype: str) -> None:
        """cuBLAS solves triangular systems as BLAS does; matrices are factored if ranks access each other's memory."""
        S, b = positive_definite(70, dtype), rng_matrix(70, 20, dtype)
        for order, lower, trans, unit, side in itertools.product("CF", (True, False), "NTC", (False, True), "LR"):
            how: Any = {"lower": lower, "trans": trans, "unit": unit, "side": side, "alpha": 2}
            given, x = (
                np.asarray(S[:20, :20], order=order),
                np.array(b[:20] if side == "L" else b.T[:, :20], order=order),
            )
            on_device = cuda.to_device(x, order)
            trsm(cuda.to_device(given, order), on_device, **how)
            trsm(given, x, **how)
            assert np.allclose(cuda.to_host(on_device), x, rtol=1e-3)
        with ProcessGrid(comm) as grid:
            A, B = (DistMatrix.from_global(x, grid=grid, block=8, device="cuda") for x in (S, b))
            reach = cuda.reach(grid)
            if comm.size > 1 and reach.staged and reach.reads != "shared":
                pytest.skip("MPI takes no pointers, and ranks do not share a GPU")
            X = linalg.cho_solve(linalg.cholesky(A), B).allgather()
            assert relative(wide(b) - wide(S) @ X, norm(S) * norm(X), dtype, 70) <= EPS

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("order", "CF")
    @pytest.mark.parametrize("lower", [True, False])
    def test_lapack_cholesky(self, cuda: Any, dtype: str, order: Any, lower: bool) -> None:
        """The Cholesky factor of blocks inside larger arrays, of any size; only one triangle is read."""
        for n in (1, 5, 64, 130):
            S = positive_definite(n, dtype)
            X = cuda.to_device(whole := around(np.tril(S) if lower else np.triu(S), order, other=np.nan), order)
            assert potrf(X[2:-1, 3:-4], lower) == 0
            result = cuda.to_host(X)
            factor = wide(result[2:-1, 3:-4])
            assert not (np.triu(factor, 1) if lower else np.tril(factor, -1)).any()
            product = factor @ factor.conj().T if lower else factor.conj().T @ factor
            assert relative(product - wide(S), norm(S), dtype, n) <= EPS
            assert unchanged_around(result, whole)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("order", "CF")
    def test_lapack_cholesky_of_others(self, cuda: Any, dtype: str, order: Any) -> None:
        """If a pivot is negative, zero or NaN, `info` equals LAPACK's, also for the first pivot."""
        n = 70
        for value, at in itertools.product((-1.0, 0.0, np.nan, np.inf), (0, 1, 40, n - 1)):
            S = np.diag(np.arange(1, n + 1).astype(dtype))
            S[at, at] = value
            for lower in (True, False):
                on_host = np.array(S, order=order)
                expected = potrf(on_host, lower)
                assert expected == at + 1
                assert potrf(cuda.to_device(S, order), lower) == expected
        S = positive_definite(n, dtype)
        S[30, 9] = S[9, 30] = np.nan
        assert potrf(cuda.to_device(S, order)) == potrf(np.array(S, order=order)) == 31
        assert potrf(cuda.empty((0, 0), dtype, order)) == 0

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("m", "n"), [(1, 1), (40, 1), (64, 64), (200, 33), (20, 31)])
    def test_lapack_lu(self, cuda: Any, dtype: str, m: int, n: int) -> None:
        """Pivots are counted from 1; for real numbers they equal LAPACK's."""
        a, k = rng_matrix(m, n, dtype), min(m, n)
        pivots, on_host = np.full((2, k), -1, np.intc)
        X = cuda.to_device(whole := around(a, "F"), "F")
        assert getrf(X[2:-1, 3:-4], pivots) == getrf(np.array(a, order="F"), on_host) == 0
        result = cuda.to_host(X)
        factors, permuted = wide(result[2:-1, 3:-4]), wide(a)
        L, U = np.tril(factors, -1)[:, :k] + np.eye(m, k), np.triu(factors)[:k]
        for row, other in enumerate(pivots - 1):
            assert row <= other < m
            permuted[[row, other]] = permuted[[other, row]]
        assert relative(permuted - L @ U, norm(a), dtype, k) <= EPS
        assert np.abs(L).max() <= 1.5  # cuBLAS compares complex numbers by |x| + |y|
        assert np.array_equal(pivots, on_host) or a.dtype.kind == "c"
        assert unchanged_around(result, whole)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_lapack_lu_of_others(self, cuda: Any, dtype: str) -> None:
        """`info` is the number of the first zero pivot; pivots of a panel with NaN are valid row numbers."""
        m, n = 50, 20
        a, pivots = np.asfortranarray(rng_matrix(m, n, dtype)), np.zeros(n, np.intc)
        for zero in (0, 7, n - 1):
            x = np.eye(m, n, dtype=dtype, order="F")
            x[zero:, zero:] = 0
            assert getrf(cuda.to_device(x, "F"), pivots) == getrf(x, pivots.copy()) == zero + 1
        a[11, 3] = np.nan
        X = cuda.to_device(a, "F")
        getrf(X, pivots)
        assert (pivots > np.arange(n)).all() and (pivots <= m).all()
        assert np.isnan(cuda.to_host(X)).any()
        assert getrf(cuda.empty((0, 4), dtype, "F"), pivots[:0]) == 0

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 5), (60, 17), (300, 64)])
    def test_lapack_reflections(self, cuda: Any, dtype: str, m: int, n: int) -> None:
        """R, V (in place of the panel) and T (stored below V) form A = (I - V T V^H) R, also with a column of zeros."""
        a = rng_matrix(m, n, dtype)
        a[:, n // 2] = 0
        below = np.full((n, n), np.nan, dtype)
        X, R = cuda.to_device(np.asfortranarray(np.vstack([a, below])), "F"), cuda.empty((n, n), dtype, "F")
        compact_qr(X[:m], R, X[m:])
        V, T, r = (wide(cuda.to_host(x)) for x in (X[:m], X[m:], R))
        assert (np.triu(V[:n]) == np.eye(n)).all()
        assert (np.tril(r, -1) == 0).all() and (np.tril(T, -1) == 0).all() and (r.diagonal().imag == 0).all()
        Q = np.eye(m) - V @ T @ V.conj().T
        assert relative(Q.conj().T @ Q - np.eye(m), 1, dtype, m) <= EPS
        assert relative(Q[:, :n] @ r - wide(a), norm(a), dtype, m) <= EPS
        on_host = np.asfortranarray(a), *np.empty((2, n, n), dtype).transpose(0, 2, 1)
        compact_qr(*on_host)
        assert np.abs(np.abs(on_host[1]) - np.abs(r)).max() <= 100 * m * np.finfo(dtype).eps * norm(a)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_lapack_triangles(self, cuda: Any, dtype: str) -> None:
        """`keep_triangle` sets the other triangle to zero, even if it is NaN, and on request the diagonal to one."""
        for n, order, lower, unit in itertools.product((0, 1, 33), "CF", (True, False), (False, True)):
            a = rng_matrix(n, n, dtype)
            kept = np.tril(a) if lower else np.triu(a)
            X = cuda.to_device(whole := around(kept, order, other=np.nan), order)
            keep_triangle(X[2:-1, 3:-4], lower, unit)
            if unit:
                np.fill_diagonal(kept, 1)
            result = cuda.to_host(X)
            assert np.array_equal(result[2:-1, 3:-4], kept)
            assert unchanged_around(result, whole)


def around(a: np.ndarray, order: Any, other: float | None = None) -> np.ndarray:
    """Return a larger array whose block [2:-1, 3:-4] is `a`, or `other` where `a` is zero; elements around it are 7."""
    x = np.full((len(a) + 3, a.shape[1] + 7), 7, a.dtype, order)
    x[2:-1, 3:-4] = a if other is None else np.where(a == 0, other, a)
    return x


def unchanged_around(x: np.ndarray, before: np.ndarray) -> bool:
    """Return whether x and `before` differ only in the block [2:-1, 3:-4]."""
    x = x.copy()
    x[2:-1, 3:-4] = before[2:-1, 3:-4]
    return np.array_equal(x, before, equal_nan=True)
