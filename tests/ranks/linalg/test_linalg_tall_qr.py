"""QR factors of tall matrices on every grid and layout, of matrices that are hard to factor, against LAPACK."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import tiers
from factored import conditioned, rng_matrix
from fake_device import fake_device
from layouts import matrices_in_turn
from problems import DTYPES, grid_shapes

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, LinAlgError, PdgemmError
from pdgemm.linalg import qr
from pdgemm.linalg.factors.tall_qr import svd_of_tall

pytestmark = [pytest.mark.mpi, tiers.square_grid]

SHAPES = [(61, 7), (7, 7), (5, 1), (9, 8), (40, 0), (0, 0)]


def hard(m: int, n: int) -> dict[str, np.ndarray]:
    """Return matrices that are hard to factor, and their names."""
    x, kahan = rng_matrix(m, n), np.zeros((m, n))
    sine, cosine = np.sin(1.2), np.cos(1.2)  # Higham 2002, 8.3
    kahan[:n] = sine ** np.arange(n)[:, None] * (np.eye(n) - cosine * np.triu(np.ones((n, n)), 1))
    dependent = x.copy()
    dependent[:, 3], dependent[:, -1] = dependent[:, :3] @ [1, -2, 3], 0
    return {
        "Kahan": kahan,
        "Hilbert": 1 / (np.arange(m)[:, None] + np.arange(n) + 1),
        "zero": np.zeros((m, n)),
        "dependent columns": dependent,
        "one column": np.outer(x[:, 0], np.ones(n)),
        "rank 1, of rows": np.eye(m, 1) * x[:1],
        "graded columns": x * 10.0 ** -np.arange(n),
        "graded rows": x * 10.0 ** -np.arange(m)[:, None],
        "columns of any length": x * 10.0 ** np.linspace(300, -300, n),
        "large": x * 1e300,
        "Lauchli": np.vstack([np.ones((1, n)), 1e-9 * np.eye(n), np.zeros((m - n - 1, n))]),
    }


def check(A: Any, whole: np.ndarray, Q: Any, R: Any) -> None:
    """|Q^H Q - I|_F <= 3 (n + 1) eps; |A - Q R|_1 / (m |A|_1) <= 3 eps, as SLATE's test_geqrf; R is as it should be."""
    (m, n), h, eps = whole.shape, min(whole.shape), np.finfo(whole.dtype).eps
    q, r = Q.allgather(), R.allgather()
    assert q.shape == (m, h) and r.shape == (h, n) and q.dtype == r.dtype == whole.dtype
    assert Q.same_layout(A[:, :h]) and Q.order == A.order and R.grid is Q.grid
    assert np.array_equal(A.allgather(), whole)  # unchanged
    scale = np.abs(whole).max(initial=0) or 1
    x, r = whole / scale, r / scale  # which does not overflow
    assert np.linalg.norm(q.conj().T @ q - np.eye(h)) <= 3 * (h + 1) * eps
    assert np.abs(x - q @ r).sum(axis=0).max(initial=0) <= 3 * eps * m * np.abs(x).sum(axis=0).max(initial=0)
    assert np.array_equal(r, np.triu(r))
    assert (r.diagonal().real >= 0).all() and not np.any(r.diagonal().imag)
    assert Q.report.as_predicted, Q.report


@tiers.square_grid
@pytest.mark.parametrize("shape", SHAPES)
def test_every_grid_and_layout(comm: Any, shape: tuple[int, int]) -> None:
    for dtype, method in tiers.in_turn(DTYPES, ("auto", "tsqr")):
        if (comm.size not in (1, 4) or shape != SHAPES[0]) and dtype != DTYPES[sum(shape) % 4]:
            continue
        whole = rng_matrix(*shape, dtype)
        expected = np.linalg.qr(whole)[1]
        expected = expected * np.where(expected.diagonal() == 0, 1, np.sign(expected.diagonal().conj()))[:, None]
        for A in matrices_in_turn(comm, whole):
            Q, R = qr(A, method=method)
            check(A, whole, Q, R)
            error = np.abs(R.allgather() - expected).max(initial=0)
            assert error <= 1000 * np.finfo(dtype).eps * np.abs(expected).max(initial=0)  # the same factors anywhere


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_measured_decides(comm: Any, dtype: str) -> None:
    """Condition numbers from 10 to 1e16: CholeskyQR2, with a shift, and TSQR, each of which is as accurate."""
    single = np.finfo(dtype).eps > 1e-10
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        for kappa in (1e1, 1e4, 1e8, 1e12, 1e16):
            whole = conditioned(300, 20, kappa, dtype)
            A = DistMatrix.from_global(whole, grid=grid)
            Q, R = qr(A)
            check(A, whole, Q, R)
            report: Any = Q.report
            u_kappa = kappa * (1e4 if single else 1)  # of about 1e8 of double precision
            assert report.method == ("tsqr" if kappa == 1e16 or (single and kappa > 1e4) else "cholesky")
            if u_kappa <= 1e5:
                assert (report.passes, report.shift) == (2, 0) and report.departure < 0.1
            if u_kappa in (1e8, 1e12) and not (single and kappa > 1e4):
                assert report.passes in (2, 3)
            assert ("TSQR" in str(report)) == (report.method == "tsqr")
            Q, R = qr(A, method="tsqr")
            check(A, whole, Q, R)
            assert (Q.report.method, Q.report.passes, Q.report.shift) == ("tsqr", 0, 0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", hard(30, 12))
def test_hard_matrices(comm: Any, name: str) -> None:
    whole = hard(30, 12)[name]
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(whole, grid=grid, block=(4, 5))
            for method in ("auto", "tsqr"):
                Q, R = qr(A, method=method)
                check(A, whole, Q, R)
            if name in ("zero", "dependent columns", "one column", "rank 1, of rows", "columns of any length"):
                with pytest.raises(LinAlgError, match="too nearly dependent for CholeskyQR2"):
                    qr(A, method="cholesky")
            if name == "graded columns":  # their condition number is 1e11, but that of columns of length 1 is 10
                assert qr(A)[0].report.passes == 2  # type: ignore[attr-defined]


def test_many_rows(comm: Any) -> None:
    """Several blocks of rows on each rank, of sizes that do not divide the rows."""
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        for dtype, method in tiers.in_turn(("float64", "complex64"), ("auto", "tsqr")):
            whole = rng_matrix(12_345, 70, dtype)
            A = DistMatrix.from_global(whole, grid=grid, order="F")
            check(A, whole, *qr(A, method=method))


def test_wide(comm: Any) -> None:
    for whole in (
        rng_matrix(7, 20, "complex64"),
        rng_matrix(5, 6),
        np.zeros((4, 9)),
        rng_matrix(1, 5),
        rng_matrix(0, 3),
    ):
        for A in itertools.islice(matrices_in_turn(comm, whole), 0, None, 3):
            check(A, whole, *qr(A))


def test_svd_of_tall(comm: Any) -> None:
    for whole in (
        conditioned(50, 9, 1e10, "complex128"),
        np.zeros((20, 3)),
        rng_matrix(8, 8, "float32"),
        rng_matrix(5, 0),
    ):
        eps, expected = np.finfo(whole.dtype).eps, scipy.linalg.svdvals(whole) if whole.size else np.zeros(0)
        for A in itertools.islice(matrices_in_turn(comm, whole), 1, None, 3):
            U, s, Vh = svd_of_tall(A)
            u, vh, n = U.allgather(), Vh.allgather(), whole.shape[1]
            assert len({x.tobytes() for x in comm.allgather(s)}) == 1 and s.dtype == np.finfo(whole.dtype).dtype
            assert np.abs(s - expected).max(initial=0) <= 10 * (n + 1) * eps * s[:1].sum()
            assert np.abs(whole - u * s @ vh).max(initial=0) <= 20 * (n + 1) * eps * s[:1].sum()
            for q in (u, vh.conj().T):
                assert np.linalg.norm(q.conj().T @ q - np.eye(n)) <= 10 * (n + 1) * eps
            assert U.report.as_predicted and U.same_layout(A)
    with ProcessGrid(comm) as grid:
        whole = rng_matrix(9, 2)
        whole[7, 1] = np.nan
        with pytest.raises(LinAlgError, match="do not converge; does A contain NaN"):
            svd_of_tall(DistMatrix.from_global(whole, grid=grid))


def test_arguments(comm: Any) -> None:
    call: Any = qr
    with ProcessGrid(comm) as grid:
        A = DistMatrix.random((9, 4), grid=grid)
        with pytest.raises(ArgumentError, match="mode 'full' is not"):
            call(A, mode="full")
        with pytest.raises(ArgumentError, match="method 'svd' is not one of auto, "):
            call(A, method="svd")
        with pytest.raises(DTypeError, match="A has dtype float16"):
            call(A.astype("float16"))
        with pytest.raises(DTypeError, match="A must be a DistMatrix"):
            call(np.eye(3))
        with pytest.raises(LayoutError, match="at least as many rows as columns"):
            svd_of_tall(A.T)
        if comm.size > 1:
            with pytest.raises(PdgemmError):
                call(A, method="tsqr" if comm.rank else "auto")


@pytest.mark.parametrize("device", ["fake"])
def test_on_a_device(comm: Any, device: str) -> None:
    """It is copied to the host for LAPACK, and back."""
    with fake_device("late"), ProcessGrid(comm) as grid:
        A = DistMatrix.random((40, 6), grid=grid, device=device)
        Q, R = qr(A)
        assert Q.device == R.device == device
        check(A, A.allgather(), Q, R)
