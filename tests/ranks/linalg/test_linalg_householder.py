"""QR by Householder reflections: SLATE's errors, any shapes and layouts, matrices without full rank, words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import EPS, graded, hilbert, kahan, nearly_singular, norm, relative, rng_matrix, wide
from problems import DTYPES, grid_shapes
from tiers import pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import NodeMemoryError
from pdgemm.grids.node_memory import NodeMemory

pytestmark = [pytest.mark.mpi, square_grid]

LAYOUTS = [  # rows, columns and blocks
    (1, 1, 1), (9, 3, 2), (3, 9, 2), (50, 50, 7), (200, 70, 32), (70, 200, (32, 48)), (150, 150, (64, 50)),
    (300, 40, None), (0, 3, 2), (3, 0, 2),
]  # fmt: skip


def errors(A: np.ndarray, Q: np.ndarray, R: np.ndarray) -> tuple[float, float]:
    """|A - Q R|_1 / (m |A|_1 u) and |I - Q^H Q|_1 / (m u), as in SLATE's test of geqrf."""
    q, (m, k) = wide(Q), Q.shape
    return relative(wide(A) - q @ wide(R), norm(A), A.dtype, m), relative(np.eye(k) - q.conj().T @ q, 1, A.dtype, m)


def small(A: np.ndarray, Q: np.ndarray, R: np.ndarray) -> bool:
    return max(errors(A, Q, R)) <= EPS * (1 if A.dtype.kind == "f" else np.sqrt(8))  # complex: Higham 2002, 3.6


@pytest.mark.parametrize(("layout", "dtype", "order", "way"), third(pairs(LAYOUTS, DTYPES, "CF", ("read", "sent"))))
def test_factors(comm: Any, layout: Any, dtype: str, order: Any, way: str, monkeypatch: Any) -> None:
    """R has the moduli of LAPACK's, and zeros; A is unchanged; words and messages are as predicted."""
    m, n, block = layout
    given = rng_matrix(m, n, dtype)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            monkeypatch.setattr(type(grid), "shares_memory", way == "read" and grid.shares_memory)
            A = DistMatrix.from_global(given, grid=grid, block=block, order=order)
            Q, R = linalg.householder_qr(A)
            none, alone = linalg.householder_qr(A, want_q=False)
            monkeypatch.undo()
            for report in (R.report, alone.report):
                assert report.as_predicted, str(report)
                assert report.algorithm == "householder"
                assert report.mover == ("shared" if way == "read" and grid.shares_memory and comm.size > 1 else "ring")
            q, r = Q.allgather(), R.allgather()
            assert q.shape == (m, min(m, n)) and r.shape == (min(m, n), n) and none is None
            assert (np.tril(r, -1) == 0).all() and np.array_equal(r, alone.allgather())
            if given.size:
                assert small(given, q, r)
                reference = scipy.linalg.qr(given, mode="r")[0][: min(m, n)]
                assert norm(abs(r) - abs(reference)) <= 100 * m * np.finfo(dtype).eps * norm(reference)
            assert np.array_equal(A.allgather(), given)


def low_rank(n: int, dtype: str) -> np.ndarray:
    return rng_matrix(n, 3, dtype) @ rng_matrix(3, n, dtype, seed=1)


def some_zeros(n: int, dtype: str) -> np.ndarray:
    """Zero columns, zero rows and equal columns."""
    x = rng_matrix(n, n, dtype)
    x[:, : n // 4], x[n // 2 :: 2], x[:, n // 2] = 0, 0, x[:, -1]
    return x


def tiny_and_huge(n: int, dtype: str) -> np.ndarray:
    """Columns whose squares underflow, and some whose squares overflow."""
    least = float(np.finfo(dtype).tiny) ** 0.75
    return (rng_matrix(n, n, dtype) * np.where(np.arange(n) % 2, least, 1 / least)).astype(dtype)


BAD = [low_rank, some_zeros, tiny_and_huge, graded, hilbert, kahan, nearly_singular, lambda n, t: np.zeros((n, n), t)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("made", BAD)
def test_any_rank(comm: Any, made: Any, dtype: str) -> None:
    """Q is orthonormal for any matrix, and each column of Q R has an error of its own size (Higham 2002, 19.4)."""
    given = made(130, dtype)
    for columns in (slice(None), slice(0, 40)):
        with ProcessGrid(comm) as grid:
            A = DistMatrix.from_global(given[:, columns], grid=grid, block=16)
            q, r = (x.allgather() for x in linalg.householder_qr(A))
        of_q = errors(given[:, columns], q, np.zeros_like(r))[1]
        assert of_q <= EPS * np.sqrt(8)
        residual = abs(wide(given[:, columns]) - wide(q) @ wide(r)).max(axis=0)
        sizes = abs(wide(given[:, columns])).max(axis=0)  # no squares, which overflow
        assert (residual <= 10 * 130 * np.finfo(dtype).eps * sizes).all()


def test_views_and_overwriting(comm: Any) -> None:
    large = rng_matrix(200, 220, "complex128")
    given = large[30:150, 50:130]
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(large, grid=grid, block=(16, 24))
        window = A[30:150, 50:130]
        for view, seen in ((window, given), (window.T, given.T), (window.H, given.conj().T)):
            assert small(seen, *(x.allgather() for x in linalg.householder_qr(view)))
        assert np.array_equal(A.allgather(), large)
        Q, R = linalg.householder_qr(window, overwrite_a=True)
        assert small(given, Q.allgather(), R.allgather())
        found, around = A.allgather(), large.copy()
        found[30:150, 50:130] = around[30:150, 50:130] = 0
        assert np.array_equal(found, around)  # nothing around it was written to


def test_full_node_memory(comm: Any, monkeypatch: Any) -> None:
    """Where the buffers that others read do not fit in node-shared memory, all ranks send panels."""
    given = rng_matrix(60, 50, "float64")

    def full(*_: Any) -> None:
        raise NodeMemoryError("no room")

    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(given, grid=grid, block=8)
        if comm.size > 1 and comm.rank == comm.size - 1:
            monkeypatch.setattr(NodeMemory, "empty", full)
        Q, R = linalg.householder_qr(A, overwrite_a=True, want_q=True)
        monkeypatch.undo()
        assert small(given, Q.allgather(), R.allgather())
        report: Any = R.report
        assert report.mover == "ring" and report.as_predicted


@pytest.mark.parametrize("dtype", DTYPES)
def test_method_of_qr(comm: Any, dtype: str) -> None:
    """`qr` has a diagonal that is not negative, as with its other methods."""
    for m, n, block in ((60, 45, 8), (45, 60, None), (0, 3, 8), (140, 130, None)):
        given = rng_matrix(m, n, dtype)
        with ProcessGrid(comm) as grid:
            A = DistMatrix.from_global(given, grid=grid, block=block)
            Q, R = linalg.qr(A, method="auto" if m == 140 else "householder")
            assert Q.same_layout(A[:, : min(m, n)]) and R.grid is Q.grid and Q.report.as_predicted
            q, r = Q.allgather(), R.allgather()
        if m:
            assert small(given, q, r)
        assert (r.diagonal().real >= 0).all() and (r.diagonal().imag == 0).all()


def test_arguments(comm: Any) -> None:
    from pdgemm import DistMatrix, ProcessGrid, errors, linalg

    with ProcessGrid(comm) as grid:
        with pytest.raises(errors.DTypeError, match="float64"):
            linalg.householder_qr(DistMatrix.zeros((4, 4), grid=grid, dtype=np.float16))
        with pytest.raises(errors.DTypeError, match="DistMatrix"):
            linalg.householder_qr(np.eye(3))  # type: ignore[arg-type]
        if comm.size > 1:
            with pytest.raises(errors.ArgumentError):
                linalg.householder_qr(DistMatrix.zeros((4, 4), grid=grid), want_q=comm.rank == 0)
