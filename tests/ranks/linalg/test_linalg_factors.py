"""Cholesky, LU and Householder factors: within SLATE's bounds, LAPACK's pivots, any layouts, words as predicted."""

from __future__ import annotations

import random
import time
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import (
    DEFINITE,
    EPS,
    graded,
    hilbert,
    kahan,
    nearly_singular,
    norm,
    positive_definite,
    relative,
    rng_matrix,
    wide,
)
from problems import DTYPES, grid_shapes
from tiers import examples, in_turn, pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LinAlgError, NodeMemoryError
from pdgemm.grids.node_memory import NodeMemory
from pdgemm.transport.panels.in_place import InPlace
from pdgemm.transport.panels.task import Task

pytestmark = pytest.mark.mpi

RECTANGLES = [(50, 50, 7), (90, 90, (48, 32)), (80, 30, 16), (40, 90, (16, 9)), (80, 80, None), (9, 1, 2), (0, 3, 2)]
LAYOUTS: dict[str, list[tuple[int, int, Any]]] = {  # (m, n, blocks)
    "lower": [(1, 1, 1), (50, 50, 7), (110, 110, (48, 32))], "upper": [(90, 90, None), (130, 130, (100, 30))],
    "lu": RECTANGLES[:6], "householder": RECTANGLES,
}  # fmt: skip


def of_lower(A: Any, **how: Any) -> tuple[Any, np.ndarray]:
    """Return L, and L L^H."""
    L = linalg.cholesky(A, **how)
    return L, wide(L.allgather()) @ wide(L.allgather()).conj().T


def of_upper(A: Any) -> tuple[Any, np.ndarray]:
    U = linalg.cholesky(A, lower=False)
    return U, wide(U.allgather()).conj().T @ wide(U.allgather())


def of_lu(A: Any, **how: Any) -> tuple[Any, np.ndarray]:
    factors = linalg.lu_factor(A, **how)
    x, k = wide(factors.LU.allgather()), min(A.shape)
    product = (np.tril(x[:, :k], -1) + np.eye(len(x), k)) @ np.triu(x[:k])
    return factors, product[np.argsort(factors.perm)]


def of_householder(A: Any, **how: Any) -> tuple[Any, np.ndarray]:
    """Check that Q is orthonormal, and that R is triangular and equal without Q; return R, and Q R."""
    (m, n), k = A.shape, min(A.shape)
    alone: Any = None if how else linalg.householder_qr(A, want_q=False)[1]
    Q, R = linalg.householder_qr(A, **how)
    q, r = wide(Q.allgather()), R.allgather()  # type: ignore[union-attr]
    assert q.shape == (m, k) and r.shape == (k, n) and np.array_equal(r, np.triu(r))
    assert relative(np.eye(k) - q.conj().T @ q, 1, R.dtype, m) <= EPS * np.sqrt(8)
    assert how or (alone.report.as_predicted and np.array_equal(r, alone.allgather()))
    return R, q @ wide(r)


WAYS: dict[str, Any] = {"lower": of_lower, "upper": of_upper, "lu": of_lu, "householder": of_householder}


def error(A: np.ndarray, product: np.ndarray) -> float:
    """Return |A - product|_1 / (max(m, n) |A|_1 u); complex: divided by sqrt 8 (Higham 2002, 3.6)."""
    return relative(wide(A) - product, norm(A), A.dtype, max(A.shape)) / (np.sqrt(8) if A.dtype.kind == "c" else 1)


@square_grid
@pytest.mark.parametrize(
    ("kind", "layout", "dtype", "order", "way"),
    [(kind, *row) for kind in LAYOUTS for row in third(pairs(LAYOUTS[kind], DTYPES, "CF", ("read", "sent")))],
)
def test_factors(comm: Any, kind: str, layout: Any, dtype: str, order: Any, way: str, monkeypatch: Any) -> None:
    """The triangle of A that is not read holds NaN; A is unchanged; words and messages are as predicted."""
    m, n, block = layout
    whole = rng_matrix(m, n, dtype) if kind in ("lu", "householder") else positive_definite(n, dtype)
    kept = {"lower": np.tri(m, n), "upper": np.tri(n, m).T}.get(kind, np.ones((m, n))) > 0
    given = np.where(kept, whole, np.nan).astype(dtype)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            monkeypatch.setattr(type(grid), "shares_memory", way == "read" and grid.shares_memory)
            A = DistMatrix.from_global(given, grid=grid, block=block, order=order)
            factors, product = WAYS[kind](A)
            monkeypatch.undo()
            report = factors.report
            assert report.as_predicted, str(report)
            assert kind == "lu" or report.algorithm == ("householder" if kind == "householder" else "cholesky")
            assert report.mover == ("shared" if way == "read" and grid.shares_memory and comm.size > 1 else "ring")
            assert error(whole, product) <= EPS
            assert np.array_equal(A.allgather(), given, equal_nan=True)
            if kind == "lu":
                assert np.array_equal(factors.pivots, scipy.linalg.lu_factor(given)[1]) and factors.zero_pivot == 0
            elif kind != "householder":
                assert not factors.allgather()[~kept].any()
            elif given.size:  # moduli of R equal LAPACK's
                r, reference = abs(factors.allgather()), abs(scipy.linalg.qr(given, mode="r")[0][: min(m, n)])
                assert norm(r - reference) <= 100 * m * np.finfo(dtype).eps * norm(reference)


@square_grid
def test_not_positive_definite(comm: Any) -> None:
    """All ranks raise the same error, with LAPACK's index of the minor; NaN anywhere is not positive."""
    shapes, bad = grid_shapes(comm.size), [(0, 0, -1), (8, 8, -1), (59, 59, -1), (4, 4, np.nan), (9, 3, np.nan)]
    for number, (row, col, value) in enumerate(bad):
        S = positive_definite(60, "float64")
        S[row, col] = value
        with ProcessGrid(comm, shapes[number % len(shapes)]) as grid:
            A = DistMatrix.from_global(S, grid=grid, block=8)
            with pytest.raises(LinAlgError, match=rf"its leading minor of order {row + 1} is not") as caught:
                linalg.cholesky(A)
            assert len(set(comm.allgather(str(caught.value)))) == 1
            assert np.array_equal(A.allgather(), S, equal_nan=True)


def wilkinson(n: int, dtype: str) -> np.ndarray:
    """Return the matrix whose last column grows to 2^(n-1) (Higham 2002, 9.4)."""
    A = np.eye(n) - np.tri(n, k=-1)
    A[:, -1] = 1
    return A.astype(dtype)


def some_zeros(n: int, dtype: str) -> np.ndarray:
    """Return a matrix with zero columns, zero rows and equal columns."""
    x = rng_matrix(n, n, dtype)
    x[:, : n // 4], x[n // 2 :: 2], x[:, n // 2] = 0, 0, x[:, -1]
    return x


def tiny_and_huge(n: int, dtype: str) -> np.ndarray:
    """Return columns whose squares underflow, and some whose squares overflow."""
    least = float(np.finfo(dtype).tiny) ** 0.75
    return (rng_matrix(n, n, dtype) * np.where(np.arange(n) % 2, least, 1 / least)).astype(dtype)


BAD: dict[str, Any] = {
    "kahan": kahan, "hilbert": hilbert, "graded": lambda n, t: graded(n, t)[::-1], "nearly singular": nearly_singular,
    "low rank": lambda n, t: rng_matrix(n, 3, t) @ rng_matrix(3, n, t, seed=1), "some zeros": some_zeros,
    "tiny and huge": tiny_and_huge, "zero": lambda n, t: np.zeros((n, n), t), "wilkinson": wilkinson,
    "equal": lambda n, t: np.sign(rng_matrix(n, n)).astype(t),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "dtype"), in_turn(BAD, DTYPES))
def test_bad_matrices(comm: Any, kind: str, dtype: str) -> None:
    """LU's residual is within SLATE's bound, or 3 u |L||U| if elements grow (Higham 2002, 9.3).

    Q is orthonormal for any matrix, and each column of Q R has an error relative to its size (Higham 2002, 19.4).
    """
    given = np.ascontiguousarray(BAD[kind](60, dtype))
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(given, grid=grid, block=8)
        if kind in DEFINITE:
            S = DEFINITE[kind](60, dtype)
            product = of_lower(DistMatrix.from_global(S, grid=grid, block=8))[1]
            reference = wide(np.linalg.cholesky(S))  # compare residuals: factors differ by cond * u
            assert error(S, product) <= min(EPS, 3 * error(S, reference @ reference.conj().T) + 0.1)
        if kind not in ("tiny and huge", "zero"):
            factors, product = of_lu(A)
            upper = np.triu(factors.LU.allgather())
            assert error(given, product) <= EPS * max(1, abs(upper).max() / abs(given).max())
            assert kind != "wilkinson" or upper[-1, -1] == 2.0**59
        for columns in (slice(None), slice(0, 20)):
            part, product = wide(given[:, columns]), of_householder(A[:, columns])[1]
            sizes = abs(part).max(axis=0)  # no squares: they would overflow
            assert (abs(part - product).max(axis=0) <= 10 * 60 * np.finfo(dtype).eps * sizes).all()


@square_grid
def test_singular(comm: Any) -> None:
    """With a column of zeros, factors equal LAPACK's, determinants are 0, and in solves all ranks raise one error."""
    for at, shape in in_turn((1, 9, 30), grid_shapes(comm.size)):
        given = rng_matrix(30, 30, "float64")
        given[:, at - 1] = 0
        with ProcessGrid(comm, shape) as grid, warnings.catch_warnings():
            warnings.simplefilter("error")
            A = DistMatrix.from_global(given, grid=grid, block=(8, 7))
            factors, product = of_lu(A)
            assert factors.zero_pivot == at and error(given, product) <= EPS
            solve = partial(linalg.lu_solve, factors, given[0])
            for call in (solve, partial(linalg.solve, A, A), partial(linalg.inv, A)):
                with pytest.raises(LinAlgError, match=f"is singular: pivot {at} of .* is zero") as caught:
                    call()
                assert len(set(comm.allgather(str(caught.value)))) == 1
            assert linalg.det(A) == 0 and linalg.slogdet(A) == (0, -np.inf)


@pytest.mark.parametrize(("shape", "dtype"), in_turn([(0, 0), (1, 1), (5, 5), (40, 40), (60, 20), (20, 60)], DTYPES))
def test_factors_apart(comm: Any, shape: tuple[int, int], dtype: str) -> None:
    given = rng_matrix(*shape, dtype)
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(given, grid=grid, block=(9, 11))
        p, L, U = linalg.lu(A)
        lower, upper = L.allgather(), U.allgather()
        assert L.shape == (shape[0], min(shape)) and U.shape == (min(shape), shape[1])
        assert np.array_equal(lower, np.tril(lower)) and np.array_equal(upper, np.triu(upper))
        assert (np.diag(lower) == 1).all()
        assert relative(wide(given) - (wide(lower) @ wide(upper))[p], norm(given), dtype, max(shape)) <= EPS
        if given.size:
            assert np.array_equal(p, scipy.linalg.lu(given, p_indices=True)[0])
        else:
            assert linalg.cholesky(A).shape == (0, 0) and linalg.lu_factor(A).pivots.size == 0


@pytest.mark.on_ranks(3)
def test_idle_ranks(comm: Any) -> None:
    given = rng_matrix(40, 40, "float64")
    with ProcessGrid(comm, (1, comm.size - 1), ranks=range(1, comm.size)) as grid:
        factors, product = of_lu(DistMatrix.from_global(given, grid=grid, block=8))
        assert np.array_equal(factors.pivots, scipy.linalg.lu_factor(given)[1])
        assert factors.report.as_predicted and error(given, product) <= EPS
        x = linalg.lu_solve(factors, given[0])
        assert relative((given[0] - given @ x)[:, None], norm(given) * abs(x).sum(), "float64", 40) <= EPS


@pytest.mark.parametrize("kind", ["lower", "lu", "householder"])
def test_windows_and_overwriting(comm: Any, kind: str) -> None:
    """Windows, also transposed and conjugated, may be overwritten: elements around them are unchanged."""
    large, inner = rng_matrix(100, 120, "complex128"), positive_definite(60, "complex128")
    large[20:80, 50:110] = inner
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(large, grid=grid, block=(16, 24))
        window = A[20:80, 50:110]
        for view, given in ((window, inner), (window.T, inner.T), (window.H, inner.conj().T)):
            assert error(given, WAYS[kind](view)[1]) <= EPS
        assert np.array_equal(A.allgather(), large)
        factors, product = WAYS[kind](window, overwrite_a=True)
        assert error(inner, product) <= EPS
        after = A.allgather()
        if kind != "householder":
            place = factors.LU if kind == "lu" else factors
            assert np.shares_memory(place.local, A.local) or not place.local.size
            assert np.array_equal(after[20:80, 50:110], place.allgather())
        after[20:80, 50:110] = large[20:80, 50:110]
        assert np.array_equal(after, large)


def test_full_node_memory(comm: Any, monkeypatch: Any) -> None:
    """If shared buffers do not fit in the memory of a node, all ranks send panels."""
    given = rng_matrix(60, 50, "float64")

    def full(*_: Any) -> None:
        raise NodeMemoryError("no room")

    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(given, grid=grid, block=8)
        if comm.rank == comm.size - 1:
            monkeypatch.setattr(NodeMemory, "empty", full)
        R, product = of_householder(A, overwrite_a=True)
        monkeypatch.undo()
        assert error(given, product) <= EPS
        assert R.report.mover == "ring" and R.report.as_predicted


def test_method_of_qr(comm: Any) -> None:
    """`qr` by reflections: the diagonal of R is not negative, as by its other methods."""
    for (m, n, block), dtype in in_turn([(60, 45, 8), (45, 60, None), (0, 3, 8), (140, 130, None)], DTYPES):
        given = rng_matrix(m, n, dtype)
        with ProcessGrid(comm) as grid:
            A = DistMatrix.from_global(given, grid=grid, block=block)
            Q, R = linalg.qr(A, method="auto" if m == 140 else "householder")
            assert Q.same_layout(A[:, : min(m, n)]) and R.grid is Q.grid and Q.report.as_predicted
            q, r = Q.allgather(), R.allgather()
        assert error(given, wide(q) @ wide(r)) <= EPS
        assert (r.diagonal().real >= 0).all() and (r.diagonal().imag == 0).all()


@pytest.fixture
def late(comm: Any, monkeypatch: Any) -> None:
    """Pause after some waits for a panel and announcements of one (30%, drawn)."""
    draw, wait, announce = random.Random(comm.rank), Task.wait, InPlace.announce

    def pause() -> None:
        if draw.random() < 0.3:
            time.sleep(draw.random() * 4e-3)

    def waiting(task: Any, slot: Any) -> None:
        wait(task, slot)
        pause()

    def announcing(task: Any, *arguments: Any) -> None:
        announce(task, *arguments)
        pause()

    monkeypatch.setattr(Task, "wait", waiting)
    monkeypatch.setattr(InPlace, "announce", announcing)


@square_grid
@pytest.mark.parametrize(("block", "at"), in_turn([(7, 5), (16, 9), 8], range(3)))  # a rank has several panels
def test_late_ranks(comm: Any, late: None, block: Any, at: int) -> None:
    n, S, x, b = 60, positive_definite(60, "float64"), rng_matrix(60, 60, "float64"), rng_matrix(60, 9, "float64")
    _, pivots = scipy.linalg.lu_factor(x)
    with ProcessGrid(comm, grid_shapes(comm.size)[at]) as grid:
        A, X, B = (DistMatrix.from_global(y, grid=grid, block=block) for y in (S, x, b))
        for _ in range(examples(6)):
            L = linalg.cholesky(A)
            assert relative(S - L.allgather() @ L.allgather().T, norm(S), "float64", n) <= EPS
            y = linalg.cho_solve(L, B).allgather()
            assert relative(b - S @ y, norm(S) * norm(y), "float64", n) <= EPS
            factors = linalg.lu_factor(X)
            assert np.array_equal(factors.pivots, pivots)
            y = linalg.lu_solve(factors, B).allgather()
            assert relative(b - x @ y, norm(x) * norm(y), "float64", n) <= EPS
            Q, R = linalg.householder_qr(X)
            assert Q is not None
            assert relative(x - Q.allgather() @ R.allgather(), norm(x), "float64", n) <= EPS
