"""Symmetric tridiagonal matrices by distributed divide and conquer: residuals, orthogonality, deflation, words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from factored import EPS, relative
from problems import grid_shapes
from scipy.linalg import eigvalsh_tridiagonal
from tiers import every_grid

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LinAlgError
from pdgemm.linalg.eigen.tridiagonal import tridiagonal_eigh
from pdgemm.linalg.work import Work
from pdgemm.local.blas import secular

pytestmark = pytest.mark.mpi

Tridiagonal = tuple[np.ndarray, np.ndarray]


def normal(n: int) -> Tridiagonal:
    rng = np.random.default_rng(n)
    return rng.standard_normal(n), rng.standard_normal(max(0, n - 1))


def gaussian(n: int) -> Tridiagonal:
    """Return the tridiagonal form of a symmetric matrix of normal numbers: almost no eigenvalue is deflated."""
    rng = np.random.default_rng(n)
    return rng.standard_normal(n) * np.sqrt(2), -np.sqrt(rng.chisquare(np.arange(n - 1, 0, -1)))


def wilkinson(n: int) -> Tridiagonal:
    """Return W_n^+, whose large eigenvalues are pairs that agree to almost all digits."""
    return np.abs(np.arange(n) - (n - 1) / 2), np.ones(n - 1)


def glued(n: int) -> Tridiagonal:
    """Return copies of W_21^+, coupled by small elements: clusters of eigenvalues."""
    return np.tile(wilkinson(21)[0], -(-n // 21))[:n], np.where(np.arange(1, n) % 21, 1, 1e-8)


def graded(n: int) -> Tridiagonal:
    d = np.logspace(0, -16, n)
    return d, np.sqrt(d[:-1] * d[1:]) / 2


def split(n: int) -> Tridiagonal:
    """Return a matrix with zero or negligible off-diagonal elements where it is divided in halves, and elsewhere."""
    d, e = gaussian(n)
    e[n // 2 - 1], e[n // 4 - 1], e[n // 3] = 1e-17, 0, 0
    return d, e


KINDS: dict[str, Callable[[int], Tridiagonal]] = {
    "normal": normal, "gaussian": gaussian, "wilkinson": wilkinson, "glued": glued, "graded": graded, "split": split,
    "second differences": lambda n: (np.full(n, 2.0), np.full(n - 1, -1.0)),
    "clustered": lambda n: (np.where(np.arange(n) % 3, -0.5, 1) + 1e-12 * normal(n)[0], 1e-11 * normal(n)[1]),
    "reversed": lambda n: (graded(n)[0][::-1].copy(), graded(n)[1][::-1].copy()),
    "diagonal": lambda n: (normal(n)[0], np.zeros(n - 1)),
    "equal": lambda n: (np.full(n, 0.3), np.full(n - 1, 1e-3) * (-1) ** np.arange(n - 1)),
    "zero": lambda n: (np.zeros(n), np.zeros(n - 1)),
}  # fmt: skip


def check(pair: Tridiagonal, w: np.ndarray, V: Any, part: slice = slice(None)) -> None:
    """Check residuals, orthogonality and eigenvalues to c n eps |T|, as LAPACK's dstt21 and the tests of dsterf."""
    d, e = (x.astype(float) for x in pair)
    n, X, dtype = len(d), V.allgather(), V.dtype
    assert X.shape == (n, len(w)) and w.dtype == dtype == pair[0].dtype
    assert len({x.tobytes() for x in V.grid.comm.allgather(w)}) == 1
    T = np.diag(d) + np.diag(e, 1) + np.diag(e, -1) if n else np.zeros((0, 0))
    size = float(np.abs(T).sum(axis=0).max(initial=0))
    X = X.astype(float)
    assert relative(T @ X - X * w, size, dtype, n) <= EPS
    assert relative(X.T @ X - np.eye(len(w)), 1, dtype, n) <= EPS
    assert (np.diff(w) >= 0).all()
    if n:
        exact = eigvalsh_tridiagonal(d, e)[part] if n > 1 else d[part]
        assert np.abs(w - exact).max(initial=0) <= EPS * n * np.finfo(dtype).eps * size


def solve(pair: Tridiagonal, grid: Any, dtype: Any = "d", wanted: Any = None) -> tuple[np.ndarray, Any, Any]:
    """Return eigenvalues, vectors, and the report; check that counts are as predicted."""
    work, like = Work("tridiagonal"), DistMatrix.zeros((3, 5), grid=grid, dtype=dtype)
    before = [x.copy() for x in pair]
    w, V = tridiagonal_eigh(work, *pair, like, wanted)
    assert all(map(np.array_equal, pair, before))
    report: Any = work.reported(V, 1).report
    assert report.counted == report.predicted
    return w, V, report


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use leaves of order 8: three levels of merges at order 50."""
    monkeypatch.setattr("pdgemm.linalg.eigen.tridiagonal.LEAF", 8)


@pytest.mark.on_ranks(1, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_matrices(comm: Any, kind: Any) -> None:
    shapes = grid_shapes(comm.size)
    with ProcessGrid(comm, shapes[list(KINDS).index(kind) % len(shapes)]) as grid:
        for n, dtype in ((50, "float64"), (33, "float32"))[: 2 if comm.size == 1 else 1]:
            pair = tuple(x.astype(dtype) for x in KINDS[kind](n))
            check(pair, *solve(pair, grid, dtype)[:2])


@every_grid
def test_orders(comm: Any) -> None:
    """Orders around that of a leaf, and orders for which some ranks or leaves are empty."""
    orders, shapes = (0, 1, 2, 3, 7, 8, 9, 16, 17, 18, 25), grid_shapes(comm.size)
    for at, shape in enumerate(shapes):
        with ProcessGrid(comm, shape) as grid:
            for n in orders[at :: len(shapes)]:
                w, V, _ = solve(normal(n), grid, "D")
                check(normal(n), w, V)
                assert V.order == "F" and V.distribution.rows.parts == comm.size


@pytest.mark.on_ranks(1)
@pytest.mark.parametrize("leaf", [1, 2, 3])
def test_tiny_leaves(comm: Any, monkeypatch: pytest.MonkeyPatch, leaf: int) -> None:
    """Systems of one and of two eigenvalues, which LAPACK's laed4 treats separately."""
    monkeypatch.setattr("pdgemm.linalg.eigen.tridiagonal.LEAF", leaf)
    with ProcessGrid(comm) as grid:
        for kind in (gaussian, wilkinson, graded):
            check(kind(11), *solve(kind(11), grid)[:2])


def test_parts_of_the_vectors(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        for kind, n in ((gaussian, 50), (glued, 42), (normal, 5), (KINDS["diagonal"], 20)):
            pair, (_, _, whole) = kind(n), solve(kind(n), grid)
            for part in (slice(3, n // 2), slice(n - 2, n) if n > 20 else slice(4, 4)):
                seen: list[np.ndarray] = []

                def wanted(w: np.ndarray, part: slice = part, seen: list[np.ndarray] = seen) -> slice:
                    seen.append(w)
                    return part

                w, V, report = solve(pair, grid, wanted=wanted)
                check(pair, w, V, part)
                assert len(seen) == 1 and np.array_equal(w, seen[0][part])
                assert report.flops < whole.flops or kind is not gaussian


def test_deflated_columns_are_not_multiplied(comm: Any) -> None:
    """If halves are decoupled, there is no product; if eigenvalues are close to each other, products are smaller."""

    with ProcessGrid(comm) as grid:
        of = {kind: solve(made(64), grid)[2] for kind, made in KINDS.items()}
        full = 2 * (32 * 32 * 64 * 2 + 16 * 16 * 32 * 4 + 8 * 8 * 16 * 8)
        assert of["gaussian"].flops == full
        assert of["diagonal"].flops == of["zero"].products == 0
        assert of["gaussian"].products == 14 and of["split"].products == 10
        assert max(of["second differences"].flops, of["clustered"].flops) < 0.7 * full


@every_grid
def test_plans(comm: Any) -> None:
    """Words, messages and flops are as planned if no eigenvalue is deflated."""
    pair = gaussian(50)
    for shape, wanted in ((grid_shapes(comm.size)[0], None), (grid_shapes(comm.size)[-1], lambda w: slice(0, 20))):
        with ProcessGrid(comm, shape) as grid:
            like = DistMatrix.zeros((50, 50), grid=grid)
            plan = linalg.plan(lambda A, wanted=wanted: tridiagonal_eigh(Work(""), *pair, A, wanted)[1], like)
            report = solve(pair, grid, wanted=wanted)[2]
            assert plan.traffic(comm.rank) == report.counted
            assert plan.flops == report.flops > 0


def test_nan_and_infinity(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        for bad, which in ((np.nan, 0), (np.inf, 1)):
            pair = normal(20)
            pair[which][7] = bad
            with pytest.raises(LinAlgError, match="of order 20 has NaN or infinite elements"):
                solve(pair, grid)


@pytest.mark.parametrize("step", ["eigenpairs", "deflate", "secular_roots", "vector_lengths"])
def test_an_error_of_one_rank_is_raised_on_all(comm: Any, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    inner = getattr(secular, step)

    def fails(*arguments: Any) -> Any:
        if comm.rank == 0:
            raise LinAlgError(f"{step} does not converge")
        return inner(*arguments)

    monkeypatch.setattr(secular, step, fails)
    with ProcessGrid(comm) as grid, pytest.raises(LinAlgError, match=f"{step} does not converge"):
        solve(normal(20), grid)
