"""Factors of indefinite matrices: LAPACK's errors, hard matrices, any layouts, solves, inertia, words as predicted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import EPS, hilbert, norm, relative, rng_matrix, wide
from problems import DTYPES, grid_shapes
from tiers import every_grid, pairs, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LinAlgError
from pdgemm.instrument.recorder import Traffic

pytestmark = pytest.mark.mpi

LAPACK = 30  # the bound of LAPACK's tests, for errors divided by n |A| eps
LAYOUTS = [(0, 1), (1, 1), (2, 1), (50, (7, 9)), (80, (48, 32)), (70, None)]  # n and blocks


BANDS = (5, 16, 64)  # bandwidths: with narrow bands, small matrices have many panels


@pytest.fixture
def band(request: Any, monkeypatch: Any) -> int:
    """The bandwidth, 16 if the test has no parameter of this name."""
    wanted = getattr(request, "param", 16)
    monkeypatch.setattr("pdgemm.linalg.factors.ldl.BAND", wanted)
    return int(wanted)


def indefinite(n: int, dtype: str, hermitian: bool = True) -> np.ndarray:
    x = rng_matrix(n, n, dtype)
    return x + (x.conj().T if hermitian else x.T)


def of_triangle(A: np.ndarray, lower: bool) -> np.ndarray:
    """Return the triangle of A, and NaN in the other."""
    kept = np.tri(len(A), dtype=bool)
    return np.where(kept if lower else kept.T, A, np.nan).astype(A.dtype)


def banded(T: np.ndarray, hermitian: bool = True) -> np.ndarray:
    """Return the whole matrix of a lower triangle in LAPACK's form."""
    n = T.shape[1]
    lower = sum((np.diag(T[d, : n - d], -d) for d in range(len(T)) if d < n), np.zeros((n, n), T.dtype))
    upper = np.tril(lower, -1)
    return lower + (upper.conj().T if hermitian else upper.T)


def error(A: np.ndarray, factors: Any) -> float:
    """Return |P A P^T - L T L^H|_1 / (n |A|_1 u), of a matrix or of one scaled by a power of two."""
    scale = 2.0 ** -np.round(np.log2(abs(A).max(initial=0) or 1))
    L, T = wide(factors.L.allgather()), banded(wide(factors.T * scale), factors.hermitian)
    A, Lh = wide(A * scale), L.conj().T if factors.hermitian else L.T
    return relative(A[np.ix_(factors.perm, factors.perm)] - L @ T @ Lh, norm(A), factors.T.dtype, len(A))


def backward(A: np.ndarray, x: np.ndarray, b: np.ndarray, dtype: Any) -> float:
    """|b - A x|_1 / (n |A|_1 |x|_1 u)."""
    x, b = (y if y.ndim == 2 else y[:, None] for y in (x, b))
    return relative(wide(b) - wide(A) @ wide(x), norm(A) * norm(x), dtype, len(A))


@every_grid
@pytest.mark.parametrize(
    ("layout", "dtype", "order", "lower", "hermitian", "band"),
    third(pairs(LAYOUTS, DTYPES, "CF", (True, False), (True, False), BANDS)),
    indirect=["band"],
)
def test_factors(comm: Any, layout: Any, dtype: str, order: Any, lower: bool, hermitian: bool, band: int) -> None:
    """Of one triangle; unit triangles and bands, the same rows on every grid, and words as predicted."""
    (n, block), orders = layout, set[tuple[int, ...]]()
    S = indefinite(n, dtype, hermitian)
    given = of_triangle(S, lower)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(given, grid=grid, block=block, order=order)
            factors = linalg.ldl(A, lower=lower, hermitian=hermitian)
            report: Any = factors.report
            assert report.as_predicted, str(report)
            assert (
                report.algorithm == "aasen + permutation" and report.flops == (4 if dtype[0] == "c" else 1) * n**3 // 3
            )
            assert error(S, factors) <= EPS
            assert [x is y for x, y in zip(factors, (factors.L, factors.T, factors.perm))] == [True] * 3
            L, w = factors.L.allgather(), min(band, n)
            assert np.array_equal(L, np.tril(L)) and (L.diagonal() == 1).all() and abs(L).max(initial=1) < 1.5
            assert np.array_equal(L[:, :w], np.eye(n, w)) and factors.T.shape == (min(band, max(n - 1, 0)) + 1, n)
            assert sorted(factors.perm) == [*range(n)] and len({*comm.allgather(factors.T.tobytes())}) == 1
            assert np.array_equal(A.allgather(), given, equal_nan=True)
            orders.add((*factors.perm.tolist(),))
    assert len({*comm.allgather(tuple(orders))}) == len(orders) == 1


def kkt(n: int) -> np.ndarray:
    """A saddle point [[H, B^T], [B, 0]], of which a third of the eigenvalues are negative."""
    m = n // 3
    H, B = rng_matrix(n - m, n - m), rng_matrix(m, n - m, seed=1)
    return np.block([[H @ H.T + np.eye(n - m), B.T], [B, np.zeros((m, m))]])


def zero_diagonal(n: int) -> np.ndarray:
    A = indefinite(n, "float64")
    return A - np.diag(A.diagonal())


def graded(n: int) -> np.ndarray:
    """Elements from 1e-150 to 1e150."""
    d = np.logspace(-75, 75, n)
    return indefinite(n, "float64") * d * d[::-1, None] + (indefinite(n, "float64") * d * d[::-1, None]).T


def wilkinson(n: int) -> np.ndarray:
    """Wilkinson's W+, whose largest eigenvalues are nearly equal in pairs."""
    return np.diag(abs(np.arange(n) - n // 2).astype(float)) + np.eye(n, k=1) + np.eye(n, k=-1)


def low_rank(n: int) -> np.ndarray:
    x = rng_matrix(n, 5)
    return (x * [1, -1, 1, 1, -1]) @ x.T


HARD: dict[str, Callable[[int], np.ndarray]] = {
    "kkt": kkt, "zero diagonal": zero_diagonal, "graded": graded, "wilkinson": wilkinson, "low rank": low_rank,
    "zero": lambda n: np.zeros((n, n)), "ones": lambda n: np.ones((n, n)), "hilbert": lambda n: hilbert(n, "float64"),
    "exchange": lambda n: np.eye(n)[::-1].copy(), "falling": lambda n: np.diag(np.logspace(150, -150, n)),
    "growing": lambda n: np.eye(n) - np.tri(n, k=-1) - np.tri(n, k=-1).T, "tiny": lambda n: 1e-300 * kkt(n),
    "huge": lambda n: 1e290 * kkt(n),
}  # fmt: skip


@pytest.mark.on_ranks(1, 2)
def test_hard_matrices(comm: Any, band: int) -> None:
    b = rng_matrix(90, 3)
    with ProcessGrid(comm) as grid:
        B = DistMatrix.from_global(b, grid=grid)
        for kind, made in HARD.items():
            given = made(90)
            factors = linalg.ldl(DistMatrix.from_global(given, grid=grid, block=(11, 8)))
            assert error(given, factors) <= LAPACK, kind
            if kind not in ("low rank", "zero", "ones", "falling", "graded"):
                assert backward(given, linalg.ldl_solve(factors, B).allgather(), b, "d") <= EPS, kind


def test_views_and_idle_ranks(comm: Any, band: int) -> None:
    """Windows and transposes of a matrix, which is unchanged; on a grid of one rank the others work, too."""
    S, large = indefinite(70, "complex128"), rng_matrix(100, 120, "complex128")
    large[13:83, 30:100] = S
    for ranks in (None, [comm.size - 1]):
        with ProcessGrid(comm, (1, 1) if ranks else None, ranks=ranks) as grid:
            A = DistMatrix.from_global(large, grid=grid, block=(16, 24))
            window = A[13:83, 30:100]
            for view, given in ((window, S), (window.T, S.T), (window.H, S), (window[:0, :0], S[:0, :0])):
                factors = linalg.ldl(view)
                assert error(given, factors) <= EPS and factors.report.as_predicted
                assert sum(linalg.inertia(view)) == len(given)
            x = linalg.solve(window, np.ones(70), assume_a="her")
            assert backward(S, x, np.ones(70), "complex128") <= EPS
            assert np.array_equal(A.allgather(), large)


@pytest.mark.parametrize("kind", ["sym", "her"])
def test_singular(comm: Any, band: int, kind: str) -> None:
    """One error on all ranks where T has a zero pivot; a warning where A is singular but for rounding."""
    S, b = indefinite(40, "float64"), np.ones(40)
    S[:, 30] = S[30] = 0
    near = low_rank(40)
    with ProcessGrid(comm) as grid:
        A, N = (DistMatrix.from_global(x, grid=grid, block=8) for x in (S, near))
        for call in (lambda: linalg.solve(A, b, assume_a=kind), lambda: linalg.ldl_solve(linalg.ldl(A), b)):
            with pytest.raises(LinAlgError, match=r"A \(40 x 40 on a .* grid\) is singular: pivot \d+ of 40") as caught:
                call()
            assert len({*comm.allgather(str(caught.value))}) == 1
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                linalg.solve(N, b, assume_a=kind)
            except LinAlgError:  # rounding may leave a pivot that is zero
                warned.append(None)  # type: ignore[arg-type]
        assert {*comm.allgather(len(warned))} == {1}
        assert linalg.solve(A + DistMatrix.eye(40, grid=grid, block=8), b, assume_a=kind).shape == (40,)


@pytest.mark.on_ranks(1, 2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_inertia(comm: Any, band: int, dtype: str) -> None:
    """Of matrices whose inertia is known, by Sylvester's law; the same on all ranks."""
    n, signs = 60, np.repeat([-1, 0, 1], [21, 7, 32])
    q = scipy.linalg.qr(rng_matrix(n, n, dtype).astype("c16" if np.dtype(dtype).kind == "c" else "f8"))[0]
    cases: list[tuple[np.ndarray, tuple[int, ...]]] = [
        ((q * signs * np.linspace(1, 2, n)) @ q.conj().T, (21, 7, 32)),
        (kkt(n), (20, 0, 40)),
        (-np.eye(n), (n, 0, 0)),
        (zero_diagonal(2), (1, 0, 1)),
        (np.zeros((5, 5)), (0, 5, 0)),
        (np.eye(1), (0, 0, 1)),
        (np.zeros((0, 0)), (0, 0, 0)),
    ]
    with ProcessGrid(comm) as grid:
        for given, expected in cases:
            for lower in (True, False) if len(given) == n else (True,):
                x = of_triangle(given.astype(dtype), lower)
                counts = linalg.inertia(DistMatrix.from_global(x, grid=grid, block=(7, 4)), lower=lower)
                assert counts == expected and {*comm.allgather(counts)} == {expected}, (given.shape, band)
        assert counts.negative == counts.zero == counts.positive == 0
        bad = np.eye(30)
        bad[20, 3] = np.nan
        with pytest.raises(LinAlgError, match="has no inertia: T has NaN or infinite elements"):
            linalg.inertia(DistMatrix.from_global(bad, grid=grid, block=8))


@every_grid
def test_plans(comm: Any, band: int) -> None:
    """A plan has the words that are counted, but for the rows that panels choose; with these rows, all of them."""
    b, S = rng_matrix(50, 4), indefinite(50, "float64")
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A, B = (DistMatrix.from_global(x, grid=grid, block=(16, 9)) for x in (S, b))
            factors = linalg.ldl(A)
            report, perm = factors.report, (*factors.perm.tolist(),)
            plan = linalg.plan(linalg.ldl, A)
            assert plan.flops == report.flops and plan.simulate().seconds > 0 and plan == linalg.plan("ldl", A)
            assert len({*comm.allgather(str(plan))}) == 1
            known = [replace(x, order=perm) if x.algorithm in ("aasen", "permutation") else x for _, x in plan.stages]
            assert sum((x.traffic(comm.rank) for x in known), Traffic()) == report.counted
            solved: Any = linalg.ldl_solve(factors, B).report
            assert linalg.plan(linalg.ldl_solve, factors, B).traffic(comm.rank) == solved.counted == solved.predicted
            of_solve: Any = linalg.solve(A, B, assume_a="sym").report
            assert linalg.plan("solve", A, B, assume_a="sym").flops == of_solve.flops
            assert linalg.plan("inertia", A).stages == plan.stages
            few = A[:band, :band]  # one panel, which chooses no rows
            assert linalg.plan("ldl", few).traffic(comm.rank) == linalg.ldl(few).report.counted
            assert linalg.plan("ldl", few).extra_bytes(comm.rank) > 0


def test_memory_that_the_first_rank_lacks(comm: Any, band: int, monkeypatch: Any) -> None:
    """All ranks raise in the end: until then the others wait for messages of the first."""

    def lacks(*arguments: Any) -> int:
        raise MemoryError("no memory for a panel")

    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(indefinite(50, "float64"), grid=grid, block=8)
        with monkeypatch.context() as patched:
            patched.setattr("pdgemm.local.blas.local_lapack.getrf", lacks)
            with pytest.raises(MemoryError, match="no memory for a panel"):
                linalg.ldl(A)
        assert error(A.allgather(), linalg.ldl(A)) <= EPS
