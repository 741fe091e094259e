"""QR with column pivoting: LAPACK's errors, diagonals of R as large as singular values, pivots, words."""

from __future__ import annotations

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
from pdgemm.errors import ArgumentError, DTypeError
from pdgemm.local.blas.local_lapack import reflect
from pdgemm.names import AnyName

pytestmark = [pytest.mark.mpi, square_grid]

THRESHOLD = 30  # LAPACK's tests pass below it
LAYOUTS = [  # rows, columns and blocks
    (1, 1, 1), (9, 3, 2), (3, 9, 2), (50, 50, 7), (60, 31, None), (23, 70, (8, 12)), (40, 40, (64, 5)), (8, 30, 4),
    (0, 3, 2), (3, 0, 2), (30, 8, 4),
]  # fmt: skip


@pytest.fixture(autouse=True)
def rest(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Small matrices have many panels; the order of the part for one rank: 20 if the test has no parameter "rest"."""
    wanted = getattr(request, "param", 20)
    monkeypatch.setattr("pdgemm.linalg.factors.pivoted_qr.BLOCK", 8)
    monkeypatch.setattr("pdgemm.linalg.factors.pivoted_qr.REST", wanted)
    return int(wanted)


def ratios(A: np.ndarray, Q: np.ndarray, R: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """|A P - Q R| / (max(m, n) |A| eps) and |Q^H Q - I| / (m eps), in 1-norms, as in LAPACK's test of geqp3."""
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
            alone, same = linalg.qr(A, mode="r", pivoting=True)
            assert np.array_equal(alone.allgather(), r) and np.array_equal(same, p)


def stairs(n: int, dtype: str) -> np.ndarray:
    """Stewart's devil's stairs: singular values in long steps."""
    left, right = (np.linalg.qr(rng_matrix(n, n, dtype, seed=x).astype("D"))[0] for x in (1, 2))
    x = left * 10.0 ** -(np.arange(n) // 12 / 2) @ right
    return (x if np.dtype(dtype).kind == "c" else x.real).astype(dtype)


def hidden(n: int, dtype: str) -> np.ndarray:
    """Most columns lie near a space of 3 dimensions; those that do not come last, and are shorter."""
    x = rng_matrix(n, 3, dtype) @ rng_matrix(3, n, dtype, seed=1) + 1e-3 * rng_matrix(n, n, dtype, seed=2)
    x[:, -20:] = 0.1 * rng_matrix(n, 20, dtype, seed=3)
    return x.astype(dtype)


def clustered(n: int, dtype: str) -> np.ndarray:
    """Half of the singular values are 1, the others 1e-4, and the columns of the large ones come last."""
    x = np.linalg.qr(rng_matrix(n, n, dtype).astype("D"))[0]
    x = (x * np.where(np.arange(n) < n // 2, 1e-4, 1)) @ np.linalg.qr(np.eye(n) + 0.01 * rng_matrix(n, n, dtype))[0]
    return (x if np.dtype(dtype).kind == "c" else x.real).astype(dtype)


def rising(n: int, dtype: str) -> np.ndarray:
    """Columns from 1e-5 to 1 in length."""
    return (rng_matrix(n, n, dtype) * np.logspace(-5, 0, n)).astype(dtype)


QUALITY: list[Callable[[int, str], np.ndarray]] = [
    kahan, stairs, hidden, clustered, rising, lambda n, dtype: conditioned(n, n, 1e5, dtype),
]  # fmt: skip


@pytest.mark.parametrize("rest", [0, 20], indirect=True)
@pytest.mark.parametrize(("make", "dtype"), in_turn(QUALITY, DTYPES))
def test_diagonal_is_about_as_large_as_singular_values(comm: Any, make: Any, dtype: str, rest: int) -> None:
    """|r_jj| / s_j stays within the ratios of LAPACK's pivots, but for a factor of 4; so do the sizes of later rows."""
    whole = make(96, dtype)
    s = np.linalg.svd(wide(whole), compute_uv=False)
    best = abs(scipy.linalg.qr(wide(whole), mode="r", pivoting=True)[0].diagonal()) / s
    with ProcessGrid(comm) as grid:
        Q, R, p = linalg.qr(DistMatrix.from_global(whole, grid=grid, block=5), pivoting=True)
        r = R.allgather()
        assert max(ratios(whole, Q.allgather(), r, p)) < THRESHOLD
    ratio = r.diagonal().real / s
    assert best.min() / 4 < ratio.min() and ratio.max() < 4 * best.max(), (ratio.min(), ratio.max(), best.min())
    assert (abs(r).max(axis=1) < 4 * r.diagonal().real).all()  # no later column has more of this direction


@pytest.mark.parametrize("rest", [0, 20], indirect=True)
@pytest.mark.parametrize(
    ("sizes", "dtype"), in_turn([(60, 60, 1), (60, 60, 8), (90, 50, 21), (50, 90, 33), (40, 40, 0)], DTYPES)
)
def test_rank_is_revealed(comm: Any, sizes: tuple[int, int, int], dtype: str, rest: int) -> None:
    """As many diagonal elements as the rank are not rounding errors, also where the first columns are zero."""
    m, n, rank = sizes
    whole = (rng_matrix(m, rank, dtype, 1) @ rng_matrix(rank, n, dtype, 2)).astype(dtype)
    whole[:, : n // 5] = 0
    with ProcessGrid(comm) as grid:
        Q, R, p = linalg.qr(DistMatrix.from_global(whole, grid=grid, block=7), pivoting=True)
        diagonal = R.diagonal().real
        assert max(ratios(whole, Q.allgather(), R.allgather(), p)) < THRESHOLD
        assert np.count_nonzero(diagonal > max(m, n) * np.finfo(dtype).eps * diagonal.max()) == rank
        assert Q.report.counted == Q.report.predicted


@every_grid
@pytest.mark.parametrize("rest", [0], indirect=True)
def test_sketches_are_drawn_again(comm: Any, rest: int) -> None:
    """Where the trailing matrix falls by more than a sketch has digits, the largest columns are chosen."""
    whole, large = rng_matrix(40, 40) * np.repeat([1, 1e-12, 1e-30], [8, 8, 24])[:, None], np.arange(28, 36)
    whole[:16, large] *= 0.01  # not chosen for the first two panels
    whole[16:, large] *= 1e6
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            Q, R, p = linalg.qr(DistMatrix.from_global(whole, grid=grid, block=8), pivoting=True)
            assert {*p[16:24].tolist()} == {*large.tolist()}
            assert max(ratios(whole, Q.allgather(), R.allgather(), p)) < THRESHOLD
            assert Q.report.counted == Q.report.predicted


@every_grid
@pytest.mark.parametrize("rest", [0, 20], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_matrices_of_one_panel(comm: Any, dtype: str, rest: int) -> None:
    """Pivots are chosen among all n <= BLOCK columns, also where there are fewer rows: the first columns are zero."""
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


@every_grid
def test_layouts_do_not_decide(comm: Any) -> None:
    """Pivots are the same in every layout, of views and of transposed matrices, and R is but for rounding."""
    whole = rng_matrix(20, 29) * np.linspace(1, 3, 29)
    seen = list[tuple[np.ndarray, np.ndarray]]()
    for A in matrices_in_turn(comm, whole):
        R, p = linalg.qr(A, mode="r", pivoting=True)
        seen.append((p, R.allgather()))
    for p, r in seen:
        assert np.array_equal(p, seen[0][0])
        assert np.abs(r - seen[0][1]).max() <= 1e-12


def test_scales_and_bad_numbers(comm: Any) -> None:
    """The largest numbers overflow in no sketch, columns fall by 1e300, and NaN ends in NaN, not in a hang."""
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


@every_grid
@pytest.mark.parametrize("rest", [0, 20], indirect=True)
def test_plans(comm: Any, monkeypatch: pytest.MonkeyPatch, rest: int) -> None:
    """As much is counted as is planned, where the pivots are those that are planned: drawn ones; panels as they are."""

    def planned(X: np.ndarray) -> np.ndarray:
        return np.random.default_rng(X.shape[1]).permutation(X.shape[1])

    def as_they_are(X: np.ndarray, order: np.ndarray) -> np.ndarray:
        order[:] = range(X.shape[1])
        return reflect(X)

    def as_planned(X: np.ndarray, order: np.ndarray) -> np.ndarray:
        order[:] = planned(X)
        return reflect(X)

    monkeypatch.setattr("pdgemm.algorithms.pivoted.pivoted_panels.pivots_of", planned)
    monkeypatch.setattr("pdgemm.local.blas.compact_qr.reflect_in_turn", as_they_are)
    monkeypatch.setattr("pdgemm.linalg.factors.pivoted_qr.reflect_in_turn", as_planned)
    cases = ((31, 31, 8), (12, 29, None), (29, 12, (5, 9)))
    for number, shape in enumerate(grid_shapes(comm.size)):
        with ProcessGrid(comm, shape) as grid:
            for m, n, block in cases if everything() or comm.size == 1 else cases[number % 3 :][:1]:
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
    """Only the sketch, rows of R and small factors pass through the host, and no rank works alone."""
    whole, fake = rng_matrix(40, 30), AnyName("fake")
    with fake_device("late"), ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(whole, grid=grid, device=fake, block=8)
        Q, R, p = linalg.qr(A, pivoting=True)
        assert Q.device == R.device == "fake"
        assert max(ratios(whole, Q.allgather(), R.allgather(), p)) < THRESHOLD
        assert np.array_equal(linalg.qr(A.to_host(), mode="r", pivoting=True)[1], p)


def test_arguments(comm: Any) -> None:
    call: Any = linalg.qr
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(rng_matrix(12, 5), grid=grid)
        for method in ("tsqr", "cholesky"):
            with pytest.raises(ArgumentError, match='columns are pivoted by method="householder"'):
                call(A, pivoting=True, method=method)
            assert np.allclose(call(A, mode="r", method=method).allgather(), call(A)[1].allgather())
        assert np.allclose(call(A, mode="r", method="householder").allgather(), call(A, mode="economic")[1].allgather())
        assert len(call(A, pivoting=True, method="householder", mode="economic")) == 3
        with pytest.raises(ArgumentError, match="mode 'full' is not"):
            call(A, mode="full", pivoting=True)
        with pytest.raises(DTypeError, match="A has dtype float16"):
            call(A.astype("float16"), pivoting=True)
        if comm.size > 1:
            with pytest.raises(ArgumentError):
                call(A, pivoting=comm.rank == 0)
