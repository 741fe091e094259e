"""Triangular solves, products and inverses: any side, triangle and layout; backward errors; words as predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factored import EPS, kahan, norm, relative, rng_matrix, wide
from problems import DTYPES, grid_shapes
from tiers import pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, DTypeError, LayoutError

pytestmark = [pytest.mark.mpi, square_grid]

LAYOUTS = [  # n and m, blocks of A, blocks of B
    (1, 1, 1, 1), (9, 3, 2, 2), (50, 20, 7, 5), (150, 70, 64, 64), (150, 1, (48, 32), None), (100, 60, None, None),
    (170, 41, (50, 20), (50, 30)), (20, 0, 4, 4),
]  # fmt: skip


def triangle(n: int, dtype: str, lower: bool, unit: bool) -> tuple[np.ndarray, np.ndarray]:
    """A well-conditioned triangle, and the same with NaN where nothing may be read."""
    T = rng_matrix(n, n, dtype) / (4 * max(1, n) ** 0.5)
    T[np.arange(n), np.arange(n)] += 1.5
    kept = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
    if unit:
        T[np.arange(n), np.arange(n)] = 1
        kept = kept & ~np.eye(n, dtype=bool)
    given = np.where(kept, T, np.nan).astype(dtype)
    return np.where(kept | np.eye(n, dtype=bool), T, 0).astype(dtype), given


@pytest.mark.parametrize(
    ("layout", "dtype", "orders", "lower", "trans", "unit", "side", "way"),
    third(pairs(LAYOUTS, DTYPES, ("CC", "CF", "FC", "FF"), (0, 1), "NTC", (0, 1), "LR", ("read", "sent"))),
)
def test_solves_and_products(
    comm: Any, layout: Any, dtype: str, orders: Any, lower: bool, trans: Any, unit: bool, side: str, way: str,
    monkeypatch: Any,
) -> None:  # fmt: skip

    n, m, block_a, block_b = layout
    T, given = triangle(n, dtype, bool(lower), bool(unit))
    b = rng_matrix(*((n, m) if side == "L" else (m, n)), dtype, seed=1)
    op = wide({"N": T, "T": T.T, "C": T.conj().T}[trans])
    how: dict[str, Any] = {"lower": bool(lower), "trans": trans, "unit_diagonal": bool(unit), "side": side}
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            monkeypatch.setattr(type(grid), "shares_memory", way == "read" and grid.shares_memory)
            A = DistMatrix.from_global(given, grid=grid, block=block_a, order=orders[0])
            B = DistMatrix.from_global(b, grid=grid, block=block_b, order=orders[1])
            C = linalg.trmm(A, B, alpha=2, **how)
            X = linalg.solve_triangular(A, C, alpha=0.5, **how)
            monkeypatch.undo()
            for result in (C, X):
                report: Any = result.report
                assert report.as_predicted, str(report)
            assert C.shape == X.shape == B.shape
            c, x = C.allgather(), X.allgather()
            assert np.array_equal(B.allgather(), b)
            assert np.array_equal(A.allgather(), given, equal_nan=True)
            product, back = (2 * op @ b, 2 * op @ x) if side == "L" else (2 * b @ op, 2 * x @ op)
            scale = 2 * norm(op) * max(norm(b), norm(x), norm(b.T), norm(x.T))
            assert relative(c - product, scale, dtype, n) <= EPS
            assert relative(c - back, scale, dtype, n) <= EPS


@pytest.mark.parametrize(("dtype", "order", "lower", "unit"), pairs(DTYPES, "CF", (0, 1), (0, 1)))
def test_inverses(comm: Any, dtype: str, order: Any, lower: bool, unit: bool) -> None:
    """|A X - I|_1 / (n |A|_1 |X|_1 u); the inverse lies as A does, and its other triangle is zero."""
    T, given = triangle(130, dtype, bool(lower), bool(unit))
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(given, grid=grid, block=(16, 20), order=order)
            X = linalg.inv_triangular(A, lower=bool(lower), unit_diagonal=bool(unit))
            assert X.same_layout(A)
            x = X.allgather()
            assert relative(wide(T) @ wide(x) - np.eye(130), norm(T) * norm(x), dtype, 130) <= EPS
            assert not np.any(np.triu(x, 1) if lower else np.tril(x, -1))


def test_kahan(comm: Any) -> None:
    """The backward error does not depend on the condition, here 1e13; the columns of X are tested one by one."""
    n = 90
    T, b = kahan(n, "float64"), rng_matrix(n, 3, "float64")
    with ProcessGrid(comm) as grid:
        A, B = (DistMatrix.from_global(x, grid=grid, block=8) for x in (T, b))
        x = linalg.solve_triangular(A, B).allgather()
        bound = n * np.finfo(float).eps * abs(T) @ abs(x)  # Higham 2002, theorem 8.5
        assert (abs(b - T @ x) <= bound).all()


def test_overwriting_and_vectors(comm: Any) -> None:
    T, given = triangle(60, "float32", True, False)
    b = rng_matrix(60, 8, "float32")
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(given, grid=grid, block=8)
        for block in (8, (7, 5)):  # B's rows lie as A's, or not
            B = DistMatrix.from_global(b, grid=grid, block=block)
            X = linalg.solve_triangular(A, B, lower=True, overwrite_b=True)
            assert np.shares_memory(X.local, B.local) or not X.local.size
            assert relative(wide(b) - wide(T) @ wide(B.allgather()), norm(T) * norm(b), "float32", 60) <= EPS
        x = linalg.solve_triangular(A, b[:, 0].astype("float64"), lower=True)
        assert x.dtype == np.float64
        assert relative((b[:, 0] - wide(T) @ x)[:, None], norm(T) * abs(x).sum(), "float64", 60) <= EPS
        assert len(set(comm.allgather(x.tobytes()))) == 1


def test_bad_arguments(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A, B = DistMatrix.eye(4, grid=grid), DistMatrix.zeros((5, 2), grid=grid)
        with pytest.raises(LayoutError, match="A is 4 x 4, so B must have 4 rows, but it is 5 x 2"):
            linalg.solve_triangular(A, B)
        with pytest.raises(LayoutError, match="must have 4 elements, but it has 3"):
            linalg.solve_triangular(A, np.ones(3))
        with pytest.raises(DTypeError, match="B must be a DistMatrix, or an array"):
            linalg.solve_triangular(A, 3)
        with pytest.raises(ArgumentError, match='trans is "N", "T" or "C"'):
            linalg.solve_triangular(A, np.ones(4), trans="X")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="side 3 is not one of L, R"):
            linalg.solve_triangular(A, np.ones(4), side=3)  # type: ignore[arg-type]
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="different arguments"):
                linalg.solve_triangular(A, np.full(4, float(comm.rank)))
