"""Least squares of any rank on every grid, compared with NumPy."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import conditioned, forbid_replicated_triangles, kahan, rng_matrix, with_singular_values
from layouts import matrices_in_turn
from problems import DTYPES, grid_shapes

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LinAlgError
from pdgemm.linalg import lstsq

pytestmark = pytest.mark.mpi


def deficient(m: int, n: int, rank: int, dtype: str) -> np.ndarray:
    return rng_matrix(m, rank, dtype, seed=1) @ rng_matrix(rank, n, dtype, seed=2)


CASES = [  # m, n, rank
    (41, 6, 6), (41, 6, 4), (6, 41, 6), (6, 41, 4), (5, 5, 5), (1, 1, 1), (7, 3, 0), (3, 7, 0), (5, 0, 0), (0, 5, 0),
]  # fmt: skip


LARGER = [(40, 30, 30), (40, 30, 17), (30, 40, 30), (30, 40, 12)]
WAYS = [
    *((*x, "gelsd") for x in CASES),
    *((*x, "shared") for x in CASES if min(x[:2]) > 2),
    *((*x, "gelsy") for x in CASES + LARGER),
]


@pytest.mark.parametrize(("m", "n", "rank", "way"), WAYS)
def test_against_numpy(comm: Any, m: int, n: int, rank: int, way: str, monkeypatch: Any) -> None:
    """The X of least norm, and the rank.   shared : the triangle is distributed, as beyond 512 singular values."""
    monkeypatch.setattr("pdgemm.linalg.factors.householder.BLOCK", 8)  # several panels
    if way == "shared":
        monkeypatch.setattr("pdgemm.linalg.singular.svd.ON_ONE_RANK", 2)
        forbid_replicated_triangles(monkeypatch, 2)
    dtype, driver = DTYPES[(m + n + rank) % 4], "gelsy" if way == "gelsy" else "gelsd"
    solve: Any = partial(lstsq, rcond=1e-4, lapack_driver=driver)
    a, b, eps = deficient(m, n, rank, dtype), rng_matrix(m, 3, dtype, seed=3), np.finfo(dtype).eps
    x, residuals, expected_rank, s = np.linalg.lstsq(a, b, rcond=1e-4)
    bound = 100 * eps * (s[0] / s[rank - 1] if rank else 1) ** 2 * (np.linalg.norm(x) + 1)
    for A in itertools.islice(matrices_in_turn(comm, a), (m + rank) % 9, None, 9):
        B = DistMatrix.from_global(b, grid=A.grid.base, block=(4, 2))
        X, squares, of_rank, values = solve(A, B)
        assert X.dtype == dtype and X.shape == (n, 3) and of_rank == rank == expected_rank
        assert np.linalg.norm(X.allgather() - x) <= bound
        if driver == "gelsd":
            assert values.shape == s.shape and np.abs(values - s).max(initial=0) <= 30 * eps * s[:1].sum()
        else:
            assert values is None
        assert squares.shape == residuals.shape
        assert np.allclose(squares, residuals, rtol=200 * eps, atol=bound**2 + eps)
        vector, norms, *_ = solve(A, b[:, 0])
        assert np.linalg.norm(vector - x[:, 0]) <= bound and norms.shape == residuals[:1].shape
        assert len({(y.tobytes(), of_rank) for y in comm.allgather(np.append(vector, squares))}) == 1
        assert np.array_equal(A.allgather(), a) and np.array_equal(B.allgather(), b)  # unchanged
        if min(m, n):
            assert X.report.counted == X.report.predicted
            if way == "shared":
                inverse, exact = linalg.pinv(A, rtol=1e-4), np.linalg.pinv(a, rcond=1e-4)
                assert X.report.name == "lstsq" and inverse.report.counted == inverse.report.predicted
                assert np.linalg.norm(inverse.allgather() - exact) <= bound * np.linalg.norm(exact)
            assert way != "gelsd" or X.report.method in ("cholesky", "tsqr")


def spectra(k: int, eps: float) -> dict[str, np.ndarray]:
    """Return singular values without a large gap, and with groups of four equal ones."""
    stairs = np.arange(k) // 4
    return {
        "graded": np.logspace(0, np.log10(eps), k), "halves": 2.0 ** -np.arange(k), "even": np.linspace(1, eps, k),
        "tenths": 10.0**-stairs, "stairs": 2.0**-stairs,
    }  # fmt: skip


@pytest.mark.on_ranks(1, 2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_of_graded_matrices(comm: Any, dtype: str, monkeypatch: Any) -> None:
    """The rank equals that of LAPACK's gelsy; gelsd's, too, unless a singular value is near the tolerance."""
    monkeypatch.setattr("pdgemm.linalg.singular.lstsq.BLOCK", 7)  # columns of R factored on one rank at a time
    eps = float(np.finfo(dtype).eps)
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        m, n = ((20, 20), (40, 20), (20, 40))[(comm.size + DTYPES.index(dtype)) % 3]
        cases = {name: with_singular_values(m, n, s, dtype) for name, s in spectra(20, eps).items()}
        cases["kahan"] = np.pad(kahan(20, dtype, 1.25), ((0, m - 20), (0, n - 20)))
        cases["triangle"] = (np.triu(-np.ones((m, n))) + 2 * np.eye(m, n)).astype(dtype)
        cases["zero"] = np.zeros((m, n), dtype)
        for turn, (name, a) in enumerate(cases.items()):
            A, b = DistMatrix.from_global(a, grid=grid, block=(4, 3)), np.ones(m, dtype)
            s = scipy.linalg.svdvals(a)
            for rcond in (max(m, n) * eps, 0.5, 1e-5, 0.03, 1e-3)[turn % 2 :: 2]:
                rank = lstsq(A, b, rcond=rcond, lapack_driver="gelsy")[2]
                expected = scipy.linalg.lstsq(a, b, cond=rcond, lapack_driver="gelsy")
                assert rank == expected[2], (name, rcond)
                unsure = max(m, n) ** 0.5 * eps * s[0]
                if np.abs(s - rcond * s[0]).min() > 2 * unsure:
                    assert lstsq(A, b, rcond=rcond)[2] == np.count_nonzero(s > rcond * s[0]), (name, rcond)


def test_values_near_the_tolerance_are_warned_of(comm: Any) -> None:
    """All ranks warn if values cannot be distinguished from the tolerance; values up to the tolerance are dropped."""
    s = np.array([1, 1, 0.5, 0.5, 0.5, 0.1, 1e-3, 1e-3])
    with ProcessGrid(comm) as grid, warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn, dtype in enumerate(DTYPES):
            a = np.diag(s).astype(dtype) if turn % 2 else with_singular_values(12, 8, s, dtype)
            A, b = DistMatrix.from_global(a, grid=grid, block=3), np.ones(len(a), dtype)
            for rcond, kept, beside in ((0.5, 2, 3), (0.1, 5, 1), (1e-3, 6, 2)):
                calls: Any = [partial(linalg.lstsq, A, b, rcond=rcond)]
                calls += [partial(linalg.matrix_rank, A, rtol=rcond), partial(linalg.matrix_rank, A, rcond)]
                for call in calls:
                    with pytest.warns(scipy.linalg.LinAlgWarning, match=f"{beside} singular values? of A cannot be"):
                        found = call()
                    rank = found if isinstance(found, int) else found[2]
                    assert kept <= rank <= kept + beside * (turn % 2 == 0)  # exact for diagonal matrices
            for rcond, rank in ((0.7, 2), (0.3, 5), (0.01, 6), (1e-4, 8)):
                assert linalg.lstsq(A, b, rcond=rcond)[2] == linalg.matrix_rank(A, rtol=rcond) == rank
            zero = A * 0
            assert linalg.lstsq(zero, b, rcond=0.5)[2] == linalg.matrix_rank(zero) == 0


def test_backward_error(comm: Any) -> None:
    """|A^H r| <= c eps |A| (|r| + |A| |x|) for any condition number (Higham 2002, 20.7)."""
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        for kappa in (1e1, 1e6, 1e12):
            a, b = conditioned(200, 10, kappa, "float64"), rng_matrix(200, 1)[:, 0]
            x, (square,), rank, s = lstsq(DistMatrix.from_global(a, grid=grid), b)
            r = b - a @ x
            assert rank == 10 and np.isclose(s[0] / s[-1], kappa, rtol=1e-3)
            error = (np.finfo(float).eps * kappa) ** 2  # the error of r in the range of A, squared
            assert np.isclose(square, np.linalg.lstsq(a, b)[1][0], rtol=1e-13 + 10 * error)
            size = np.linalg.norm(a, 2) * (np.linalg.norm(r) + np.linalg.norm(a) * np.linalg.norm(x))
            assert np.linalg.norm(a.T @ r) <= 20 * np.finfo(float).eps * size


def test_other_types_and_large_numbers(comm: Any) -> None:
    a, b = rng_matrix(20, 4), rng_matrix(20, 2, "complex128", seed=4)
    expected = np.linalg.lstsq(a, b)[0]
    with ProcessGrid(comm) as grid:
        A, B = (DistMatrix.from_global(x, grid=grid) for x in (a, b))
        X = lstsq(A, B)[0]
        assert X.dtype == np.complex128 and np.allclose(X.allgather(), expected)
        assert np.allclose(lstsq(A, b[:, 1])[0], expected[:, 1])
        x, residuals, *_ = lstsq(A * 1e200, b[:, 0] * 1e120)
        assert np.allclose(x * 1e80, expected[:, 0]) and np.isfinite(residuals).all()


def test_nan_and_infinity(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A = DistMatrix.random((9, 4), grid=grid)
        A[3, 2] = np.nan  # type: ignore[index]
        for driver in ("gelsy", "gelsd"):
            with pytest.raises(LinAlgError, match=r"A \(9 x 4 on a .* grid\) contains NaN or infinity"):
                lstsq(A, np.ones(9), lapack_driver=driver)  # type: ignore[arg-type]
