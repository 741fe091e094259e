"""QR with column pivoting, and QR of tall matrices by products: errors, pivots, difficult matrices, words."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import conditioned, kahan, rng_matrix, wide
from fake_device import fake_device
from layouts import matrices_in_turn
from problems import DTYPES, grid_shapes
from tiers import every_grid, everything, in_turn, pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LayoutError, LinAlgError
from pdgemm.linalg.factors.tall_qr import svd_of_tall
from pdgemm.local.blas.local_lapack import reflect
from pdgemm.names import AnyName

pytestmark = pytest.mark.mpi

THRESHOLD = 30  # LAPACK's tests pass below this ratio
LAYOUTS = [  # (m, n, blocks)
    (1, 1, 1), (9, 3, 2), (35, 35, 7), (40, 31, None), (23, 40, (8, 12)), (0, 3, 2),
]  # fmt: skip


@pytest.fixture(autouse=True)
def rest(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Use panels of 8 columns; one rank factors the last 20 rows, or as many as the parameter "rest" says."""
    wanted = getattr(request, "param", 20)
    monkeypatch.setattr("pdgemm.linalg.factors.householder.BLOCK", 8)
    monkeypatch.setattr("pdgemm.linalg.factors.householder.REST", wanted)
    return int(wanted)


def ratios(A: np.ndarray, Q: np.ndarray, R: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """Return |A P - Q R| / (max(m, n) |A| eps) and |Q^H Q - I| / (m eps), in 1-norms, as in LAPACK's test of geqp3."""
    eps, q, (m, n) = float(np.finfo(A.dtype).eps), wide(Q), A.shape
    size = np.linalg.norm(wide(A), 1) or 1
    residual, departure = wide(A)[:, p] - q @ wide(R), q.conj().T @ q - np.eye(min(m, n))
    return np.linalg.norm(residual, 1) / (max(m, n) * size * eps), np.linalg.norm(departure, 1) / (m * eps)


@every_grid
@pytest.mark.parametrize(
    ("layout", "dtype", "order", "rest"), third(pairs(LAYOUTS, DTYPES, "CF", (0, 20))), indirect=["rest"]
)
def test_factors(comm: Any, layout: Any, dtype: str, order: Any, rest: int) -> None:
    """A P = Q R on every grid; p is a permutation, the same on every rank; words are as predicted."""
    m, n, block = layout
    whole, k = rng_matrix(m, n, dtype), min(m, n)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(whole, grid=grid, block=block, order=order)
            Q, R, p = linalg.qr(A, pivoting=True)
            q, r = Q.allgather(), R.allgather()
            assert Q.same_layout(A[:, :k]) and q.shape == (m, k) and r.shape == (k, n) and Q.dtype == R.dtype == dtype
            assert sorted(p) == list(range(n)) and len({x.tobytes() for x in comm.allgather(p)}) == 1
            assert (np.tril(r, -1) == 0).all() and (r.diagonal().real >= 0).all() and (r.diagonal().imag == 0).all()
            assert np.array_equal(A.allgather(), whole)
            if k:
                assert max(ratios(whole, q, r, p)) < THRESHOLD
                assert Q.report.counted == Q.report.predicted, str(Q.report)
            sizes = r.diagonal().real
            for start in range(0, k, 8):
                assert (np.diff(sizes[start : start + 8]) <= 100 * np.finfo(dtype).eps * sizes.max()).all()
            if shape[0] == 1:
                alone, same = linalg.qr(A, mode="r", pivoting=True)
                assert np.array_equal(alone.allgather(), r) and np.array_equal(same, p)


def stairs(n: int, dtype: str) -> np.ndarray:
    """Return Stewart's devil's stairs: a matrix whose singular values fall in long steps."""
    left, right = (np.linalg.qr(rng_matrix(n, n, dtype, seed=x).astype("D"))[0] for x in (1, 2))
    x = left * 10.0 ** -(np.arange(n) // 12 / 2) @ right
    return (x if np.dtype(dtype).kind == "c" else x.real).astype(dtype)


def hidden(n: int, dtype: str) -> np.ndarray:
    """Return columns near a space of 3 dimensions, except for the last 20, which are shorter."""
    x = rng_matrix(n, 3, dtype) @ rng_matrix(3, n, dtype, seed=1) + 1e-3 * rng_matrix(n, n, dtype, seed=2)
    x[:, -20:] = 0.1 * rng_matrix(n, 20, dtype, seed=3)
    return x.astype(dtype)


def clustered(n: int, dtype: str) -> np.ndarray:
    """Return a matrix whose singular values are 1 (columns of the second half, nearly) and 1e-4."""
    x = np.linalg.qr(rng_matrix(n, n, dtype).astype("D"))[0]
    x = (x * np.where(np.arange(n) < n // 2, 1e-4, 1)) @ np.linalg.qr(np.eye(n) + 0.01 * rng_matrix(n, n, dtype))[0]
    return (x if np.dtype(dtype).kind == "c" else x.real).astype(dtype)


QUALITY: list[Callable[[int, str], np.ndarray]] = [
    kahan, stairs, hidden, clustered, lambda n, dtype: conditioned(n, n, 1e5, dtype),
]  # fmt: skip


@pytest.mark.on_ranks(1, 2)
@pytest.mark.parametrize(("make", "dtype", "rest"), third(pairs(QUALITY, DTYPES, (0, 20))), indirect=["rest"])
def test_diagonal_is_about_as_large_as_singular_values(comm: Any, make: Any, dtype: str, rest: int) -> None:
    """|r_jj| / s_j is within the range of LAPACK's ratios up to a factor of 4, and no row exceeds 4 r_jj."""
    whole = make(96, dtype)
    s = np.linalg.svd(wide(whole), compute_uv=False)
    best = abs(scipy.linalg.qr(wide(whole), mode="r", pivoting=True)[0].diagonal()) / s
    with ProcessGrid(comm) as grid:
        Q, R, p = linalg.qr(DistMatrix.from_global(whole, grid=grid, block=5), pivoting=True)
        r = R.allgather()
        assert max(ratios(whole, Q.allgather(), r, p)) < THRESHOLD
    ratio = r.diagonal().real / s
    assert best.min() / 4 < ratio.min() and ratio.max() < 4 * best.max(), (ratio.min(), ratio.max(), best.min())
    assert (abs(r).max(axis=1) < 4 * r.diagonal().real).all()  # in row j


RANKS = [(40, 40, 1), (40, 40, 8), (50, 40, 21), (40, 50, 33), (30, 30, 0)]  # (m, n, rank)


@pytest.mark.parametrize(("sizes", "dtype", "rest"), third(pairs(RANKS, DTYPES, (0, 20))), indirect=["rest"])
def test_rank_is_revealed(comm: Any, sizes: tuple[int, int, int], dtype: str, rest: int) -> None:
    """The number of diagonal elements above rounding errors is the rank, even if the first columns are zero."""
    m, n, rank = sizes
    whole = (rng_matrix(m, rank, dtype, 1) @ rng_matrix(rank, n, dtype, 2)).astype(dtype)
    whole[:, : n // 5] = 0
    with ProcessGrid(comm) as grid:
        Q, R, p = linalg.qr(DistMatrix.from_global(whole, grid=grid, block=7), pivoting=True)
        diagonal = R.diagonal().real
        assert max(ratios(whole, Q.allgather(), R.allgather(), p)) < THRESHOLD
        assert np.count_nonzero(diagonal > max(m, n) * np.finfo(dtype).eps * diagonal.max()) == rank
        assert Q.report.counted == Q.report.predicted


@pytest.mark.on_ranks(1, 4)
@pytest.mark.parametrize("rest", [0], indirect=True)
def test_sketches_are_drawn_again(comm: Any, rest: int) -> None:
    """The largest columns are chosen even if the trailing matrix becomes smaller than rounding errors of a sketch."""
    whole, large = rng_matrix(40, 40) * np.repeat([1, 1e-12, 1e-30], [8, 8, 24])[:, None], np.arange(28, 36)
    whole[:16, large] *= 0.01  # small in the first two panels
    whole[16:, large] *= 1e6
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            Q, R, p = linalg.qr(DistMatrix.from_global(whole, grid=grid, block=8), pivoting=True)
            assert {*p[16:24].tolist()} == {*large.tolist()}
            assert max(ratios(whole, Q.allgather(), R.allgather(), p)) < THRESHOLD
            assert Q.report.counted == Q.report.predicted


@pytest.mark.parametrize(("dtype", "rest"), in_turn(DTYPES, (0, 20)), indirect=["rest"])
def test_wide_matrices_of_one_panel(comm: Any, dtype: str, rest: int) -> None:
    """If n <= BLOCK, pivots are chosen among all columns, even with fewer rows: here the first columns are zero."""
    whole = np.zeros((5, 8), dtype)
    whole[:, 5:] = rng_matrix(5, 3, dtype)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A, b = DistMatrix.from_global(whole, grid=grid, block=2), whole.sum(axis=1)
            Q, R, p = linalg.qr(A, pivoting=True)
            assert max(ratios(whole, Q.allgather(), R.allgather(), p)) < THRESHOLD
            assert np.count_nonzero(R.diagonal()) == 3 and set(p[:3]) == {5, 6, 7}
            assert Q.report.counted == Q.report.predicted
            x, _, rank, _ = linalg.lstsq(A, b, lapack_driver="gelsy")
            assert rank == 3 and np.abs(x - (np.arange(8) > 4)).max() <= 1e4 * np.finfo(dtype).eps


@square_grid
def test_pivots_do_not_depend_on_layouts(comm: Any) -> None:
    """Pivots are equal for every layout, view and transpose of a matrix; R is equal up to rounding."""
    whole = rng_matrix(20, 29) * np.linspace(1, 3, 29)
    seen = list[tuple[np.ndarray, np.ndarray]]()
    for A in matrices_in_turn(comm, whole):
        R, p = linalg.qr(A, mode="r", pivoting=True)
        seen.append((p, R.allgather()))
    for p, r in seen:
        assert np.array_equal(p, seen[0][0])
        assert np.abs(r - seen[0][1]).max() <= 1e-12


def test_scales_and_bad_numbers(comm: Any) -> None:
    """Numbers near overflow, columns that fall by 1e300, and NaN, whose result is NaN and no hang."""
    x = rng_matrix(40, 40)
    with ProcessGrid(comm) as grid:
        for whole in (x * 1e-290, x / abs(x).max() * 1e304, x * np.logspace(-290, 0, 40)):
            Q, R, p = linalg.qr(DistMatrix.from_global(whole, grid=grid, block=8), pivoting=True)
            q, sizes = Q.allgather(), R.diagonal()
            near = whole / abs(whole).max()
            assert abs(near[:, p] - q @ (R.allgather() / abs(whole).max())).max() < 1e-13
            assert (sizes[8:] <= 3 * sizes[:-8]).all()
        x[3, 30] = np.nan
        Q, R, p = linalg.qr(DistMatrix.from_global(x, grid=grid, block=8), pivoting=True)
        assert np.isnan(R.allgather()).any() and sorted(p) == list(range(40))


@square_grid
@pytest.mark.parametrize("rest", [0, 20], indirect=True)
def test_plans(comm: Any, monkeypatch: pytest.MonkeyPatch, rest: int) -> None:
    """With the pivots that a plan assumes (random ones), counted figures equal planned ones."""

    def planned(X: np.ndarray) -> np.ndarray:
        return np.random.default_rng(X.shape[1]).permutation(X.shape[1])

    def as_they_are(X: np.ndarray, order: np.ndarray) -> np.ndarray:
        order[:] = range(X.shape[1])
        return reflect(X)

    def as_planned(X: np.ndarray, order: np.ndarray) -> np.ndarray:
        order[:] = planned(X)
        return reflect(X)

    monkeypatch.setattr("pdgemm.algorithms.panels.householder_panels.pivots_of", planned)
    monkeypatch.setattr("pdgemm.local.blas.local_qr.reflect_in_turn", as_they_are)
    monkeypatch.setattr("pdgemm.linalg.factors.householder.reflect_in_turn", as_planned)
    cases = ((31, 31, 8), (12, 29, None), (29, 12, (5, 9)))
    for number, shape in enumerate(grid_shapes(comm.size)):
        with ProcessGrid(comm, shape) as grid:
            for m, n, block in cases if everything() else cases[number % 3 :][:1]:
                A, B = (DistMatrix.random(x, grid=grid, block=block, kind="normal") for x in ((m, n), (m, 2)))
                for function, *operands, how in (
                    (linalg.qr, A, {"pivoting": True}),
                    (linalg.qr, A, {"pivoting": True, "mode": "r"}),
                    (linalg.lstsq, A, B, {"lapack_driver": "gelsy"}),
                ):
                    plan, report = linalg.plan(function, *operands, **how), function(*operands, **how)[0].report
                    assert report.counted == report.predicted, str(report)
                    assert plan.traffic(comm.rank) == report.counted, f"{plan}\n{report}"
                    assert plan.flops == report.flops
                    assert report.as_predicted and plan.extra_bytes(comm.rank) == report.extra_bytes


@pytest.mark.parametrize("rest", [0], indirect=True)
def test_on_a_device(comm: Any, rest: int) -> None:
    """Pivoting on a device equals that on the host; a tall matrix is factored by LAPACK on the host."""
    whole, fake = rng_matrix(40, 30), AnyName("fake")
    with fake_device("late"), ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(whole, grid=grid, device=fake, block=8)
        Q, R, p = linalg.qr(A, pivoting=True)
        assert Q.device == R.device == "fake"
        assert max(ratios(whole, Q.allgather(), R.allgather(), p)) < THRESHOLD
        assert np.array_equal(linalg.qr(A.to_host(), mode="r", pivoting=True)[1], p)
        B = DistMatrix.from_global(whole[:, :6].copy(), grid=grid, device=fake)
        Q, R = linalg.qr(B)  # copied to the host for LAPACK, and back
        assert Q.device == R.device == "fake"
        check(B, whole[:, :6], Q, R)


def test_modes_and_methods(comm: Any) -> None:
    call: Any = linalg.qr
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(rng_matrix(12, 5), grid=grid)
        for method in ("tsqr", "cholesky"):
            assert np.allclose(call(A, mode="r", method=method).allgather(), call(A)[1].allgather())
        assert np.allclose(call(A, mode="r", method="householder").allgather(), call(A, mode="economic")[1].allgather())
        assert len(call(A, pivoting=True, method="householder", mode="economic")) == 3


SHAPES = [(61, 7), (7, 7), (5, 1), (9, 8), (40, 0), (7, 20), (1, 5), (0, 3)]


def hard(m: int, n: int) -> dict[str, np.ndarray]:
    """Return matrices that are difficult to factor, by name."""
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
    """Check |Q^H Q - I|_F <= 3 (n + 1) eps, |A - Q R|_1 / (m |A|_1) <= 3 eps, as SLATE does; R is triangular."""
    (m, n), h, eps = whole.shape, min(whole.shape), np.finfo(whole.dtype).eps
    q, r = Q.allgather(), R.allgather()
    assert q.shape == (m, h) and r.shape == (h, n) and q.dtype == r.dtype == whole.dtype
    assert Q.same_layout(A[:, :h]) and Q.order == A.order and R.grid is Q.grid
    assert np.array_equal(A.allgather(), whole)  # unchanged
    scale = np.abs(whole).max(initial=0) or 1
    x, r = whole / scale, r / scale  # scaled: norms do not overflow
    assert np.linalg.norm(q.conj().T @ q - np.eye(h)) <= 3 * (h + 1) * eps
    assert np.abs(x - q @ r).sum(axis=0).max(initial=0) <= 3 * eps * m * np.abs(x).sum(axis=0).max(initial=0)
    assert np.array_equal(r, np.triu(r))
    assert (r.diagonal().real >= 0).all() and not np.any(r.diagonal().imag)
    assert Q.report.as_predicted, Q.report


@square_grid
@pytest.mark.parametrize("shape", SHAPES)
def test_every_grid_and_layout(comm: Any, shape: tuple[int, int]) -> None:
    for dtype, method in in_turn(DTYPES if shape == SHAPES[0] else DTYPES[sum(shape) % 4 :][:1], ("auto", "tsqr")):
        whole = rng_matrix(*shape, dtype)
        expected = np.linalg.qr(whole)[1]
        expected = expected * np.where(expected.diagonal() == 0, 1, np.sign(expected.diagonal().conj()))[:, None]
        for A in itertools.islice(matrices_in_turn(comm, whole), 0, None, 2):
            Q, R = linalg.qr(A, method=method)
            check(A, whole, Q, R)
            error = np.abs(R.allgather() - expected).max(initial=0)
            assert error <= 1000 * np.finfo(dtype).eps * np.abs(expected).max(initial=0)  # equal on all grids


@pytest.mark.parametrize("dtype", DTYPES[1:3])
def test_the_measured_condition_chooses_the_method(comm: Any, dtype: str) -> None:
    """Condition numbers from 10 to 1e16: CholeskyQR2, CholeskyQR with a shift, or TSQR, all equally accurate."""
    single = np.finfo(dtype).eps > 1e-10
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        for kappa in (1e1, 1e4, 1e8, 1e12, 1e16):
            whole = conditioned(300, 20, kappa, dtype)
            A = DistMatrix.from_global(whole, grid=grid)
            Q, R = linalg.qr(A)
            check(A, whole, Q, R)
            report: Any = Q.report
            u_kappa = kappa * (1e4 if single else 1)  # as if in double precision
            assert report.method == ("tsqr" if kappa == 1e16 or (single and kappa > 1e4) else "cholesky")
            if u_kappa <= 1e5:
                assert (report.passes, report.shift) == (2, 0) and report.departure < 0.1
            if u_kappa in (1e8, 1e12) and not (single and kappa > 1e4):
                assert report.passes in (2, 3)
            assert ("TSQR" in str(report)) == (report.method == "tsqr")
            Q, R = linalg.qr(A, method="tsqr")
            check(A, whole, Q, R)
            assert (Q.report.method, Q.report.passes, Q.report.shift) == ("tsqr", 0, 0)  # type: ignore[attr-defined]


def test_hard_matrices(comm: Any) -> None:
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        for name, whole in hard(30, 12).items():
            A = DistMatrix.from_global(whole, grid=grid, block=(4, 5))
            for method in ("auto", "tsqr"):
                Q, R = linalg.qr(A, method=method)
                check(A, whole, Q, R)
            if name in ("zero", "dependent columns", "one column", "rank 1, of rows", "columns of any length"):
                with pytest.raises(LinAlgError, match="too nearly dependent for CholeskyQR2"):
                    linalg.qr(A, method="cholesky")
            if name == "graded columns":  # condition 1e11, or 10 with scaled columns
                assert linalg.qr(A)[0].report.passes == 2  # type: ignore[attr-defined]


def test_many_rows(comm: Any) -> None:
    """Each rank has several blocks of rows, of sizes that do not divide the rows."""
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        for dtype, method in in_turn(("float64", "complex64"), ("auto", "tsqr")):
            whole = rng_matrix(5_345, 40, dtype)
            A = DistMatrix.from_global(whole, grid=grid, order="F")
            check(A, whole, *linalg.qr(A, method=method))


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
        with pytest.raises(LayoutError, match="at least as many rows as columns"):
            svd_of_tall(DistMatrix.from_global(whole.T, grid=grid))
