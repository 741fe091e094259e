"""Linear systems and inverses: backward errors, structures, refinement, equal errors on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import EPS, kahan, norm, positive_definite, relative, rng_matrix, wide
from problems import DTYPES, grid_shapes
from tiers import in_turn, pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LinAlgError
from pdgemm.linalg.ranges import EQUILIBRATED
from pdgemm.local.blas.threads import NodeCores

pytestmark = pytest.mark.mpi

LAYOUTS = [(0, 2, 3, 1), (1, 1, 1, 1), (40, 5, 7, (4, 2)), (60, 20, (44, 23), 16), (70, 1, None, None)]
KINDS = ("gen", "pos", "sym", "her", "diagonal", "lower triangular", "upper triangular")


def system(kind: str, n: int, dtype: str) -> np.ndarray:
    """Return a well-conditioned matrix of the structure `kind`, a value of `assume_a`."""
    A = rng_matrix(n, n, dtype)
    if kind == "pos":
        return positive_definite(n, dtype)
    if kind in ("sym", "her"):
        return A + (A.T if kind == "sym" else A.conj().T)
    if kind == "gen":
        return A
    A = A / (4 * max(1, n) ** 0.5) + 2 * np.eye(n)
    parts = {"diagonal": np.eye(n), "lower triangular": np.tri(n), "upper triangular": np.tri(n).T}
    return (A * parts[kind]).astype(dtype)


def backward(A: np.ndarray, x: np.ndarray, b: np.ndarray, dtype: str) -> float:
    """Return |b - A x|_1 / (n |A|_1 |x|_1 u), as in SLATE's tests; Higham 2002, 7.1."""
    x, b = (y if y.ndim == 2 else y[:, None] for y in (x, b))
    return relative(wide(b) - wide(A) @ wide(x), norm(A) * norm(x), dtype, len(A))


@pytest.mark.parametrize(
    ("layout", "kind", "dtype", "orders", "transposed", "lower"),
    third(pairs(LAYOUTS, KINDS, DTYPES, ("CC", "CF", "FF"), (False, True), (False, True))),
)
def test_solves_and_inverts(
    comm: Any, layout: Any, kind: str, dtype: str, orders: Any, transposed: bool, lower: bool
) -> None:
    """B is unchanged, or may be overwritten; of symmetric matrices one triangle is read; words are as predicted."""
    (n, m, block_a, block_b), how = layout, {"assume_a": kind, "lower": lower}
    whole, b = system(kind, n, dtype), rng_matrix(n, m, dtype, seed=1)
    op, half, given = whole.T if transposed else whole, np.tri(n, dtype=bool), whole
    if kind in ("pos", "sym", "her"):
        given = np.where(half if lower else half.T, whole, np.nan).astype(dtype)
    for shape in grid_shapes(comm.size)[-1 if transposed else 0 :][:1]:
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(given, grid=grid, block=block_a, order=orders[0])
            B = DistMatrix.from_global(b, grid=grid, block=block_b, order=orders[1])
            solve = partial(linalg.solve, A, transposed=transposed, **how)
            X = solve(B)
            assert X.same_layout(B) and X.dtype == np.dtype(dtype)
            assert X.report.counted == X.report.predicted and 0 < X.report.rcond <= 1.001, str(X.report)
            assert backward(op, X.allgather(), b, dtype) <= EPS
            assert backward(op, solve(b[:, 0]), b[:, 0], dtype) <= EPS
            inverse = linalg.inv(A, **how)
            assert inverse.same_layout(A)
            right = wide(whole) @ wide(inverse.allgather()) - np.eye(n)
            assert relative(right, norm(whole) * norm(inverse.allgather()), dtype, n) <= EPS
            assert np.array_equal(A.allgather(), given, equal_nan=True) and np.array_equal(B.allgather(), b)
            assert np.array_equal(solve(B, overwrite_b=True).allgather(), X.allgather())


@square_grid
@pytest.mark.parametrize("kind", ["sym", "her", "pos"])
def test_triangles_of_views(comm: Any, kind: str) -> None:
    """Triangles of windows, transposes and conjugates, also on a grid of one rank; the matrix is unchanged."""
    given, large = system(kind, 30, "complex128"), rng_matrix(50, 60, "complex128")
    large[7:37, 20:50], b = given, rng_matrix(30, 2, "complex128", seed=1)
    for ranks in (None, [comm.size - 1]):
        with ProcessGrid(comm, (1, 1) if ranks else None, ranks=ranks) as grid:
            A, B = (DistMatrix.from_global(x, grid=grid, block=(8, 12)) for x in (large, b))
            window = A[7:37, 20:50]
            for view, whole in ((window, given), (window.T, given.T), (window.H, given.conj().T)):
                for lower in (True, False):
                    X = linalg.solve(view, B, assume_a=kind, lower=lower)
                    assert backward(whole, X.allgather(), b, "complex128") <= EPS, (lower, whole is given)
                    inverse = linalg.inv(view, assume_a=kind, lower=lower).allgather()
                    assert relative(whole @ inverse - np.eye(30), norm(whole) * norm(inverse), "D", 30) <= EPS
            assert np.array_equal(A.allgather(), large)


FACTORS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gen": (linalg.lu_factor, linalg.lu_solve, {}),
    "pos": (linalg.cholesky, linalg.cho_solve, {"lower": True}),
    "pos, upper": (partial(linalg.cholesky, lower=False), linalg.cho_solve, {"lower": False}),
}


@square_grid
@pytest.mark.parametrize(("kind", "dtype"), in_turn(FACTORS, DTYPES[::-1]))
def test_factors_solve_again_and_again(comm: Any, kind: str, dtype: str) -> None:
    """Right-hand sides in any layout, unchanged or overwritten, and vectors; words as predicted."""
    n, (factor, solve, how) = 45, FACTORS[kind]
    given, b = system(kind[:3], n, dtype), rng_matrix(n, 9, dtype, seed=1)
    ops = {"N": given, "T": given.T, "C": given.conj().T}
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            factors = factor(DistMatrix.from_global(given, grid=grid, block=8))
            for trans, block in ((None, (5, 2)),) if "lower" in how else zip("NTC", (8, (5, 2), (11, 3))):
                op, options = ops[trans or "N"], how | ({"trans": trans} if trans else {})
                B = DistMatrix.from_global(b, grid=grid, block=block, order="F" if trans == "T" else "C")
                X = solve(factors, B, **options)
                assert X.report.as_predicted and X.same_layout(B), str(X.report)
                assert np.array_equal(B.allgather(), b)
                assert backward(op, X.allgather(), b, dtype) <= EPS
                assert backward(op, solve(factors, b[:, 1], **options), b[:, 1], dtype) <= EPS
                assert backward(op, solve(factors, B, overwrite_b=True, **options).allgather(), b, dtype) <= EPS


def test_systems_that_cannot_be_solved(comm: Any) -> None:
    triangle = np.tri(9)
    triangle[4, 4] = 0
    with ProcessGrid(comm) as grid:
        A, one = DistMatrix.from_global(triangle, grid=grid, block=2), DistMatrix.eye(9, grid=grid, block=2)
        for kind in ("lower triangular", "diagonal"):
            for call in (linalg.inv, lambda A, assume_a: linalg.solve(A, one, assume_a=assume_a)):
                with pytest.raises(LinAlgError, match="element 5 of its diagonal, counted from 1, is zero"):
                    call(A, assume_a=kind)
        with pytest.raises(LinAlgError, match="leading minor of order 1 is not"):
            linalg.solve(-1 * one, one, assume_a="positive definite")


@contextmanager
def recorded() -> Iterator[list[Any]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield warned


def read(x: np.ndarray, kind: str) -> np.ndarray:
    """Return the matrix that the part of x represents which `solve` reads."""
    parts: dict[str, Any] = {
        "upper triangular": np.triu, "lower triangular": np.tril, "diagonal": lambda y: np.diag(np.diag(y)),
        "sym": lambda y: np.tril(y) + np.tril(y, -1).T, "her": lambda y: np.tril(y) + np.tril(y, -1).conj().T,
    }  # fmt: skip
    return parts.get(kind, lambda y: y)(x)


def scaled(x: np.ndarray, grid: Any, kind: str = "gen") -> np.ndarray:
    """Return the matrix that `solve` factors: rows and columns of a general matrix may be scaled."""
    A, by_lu = DistMatrix.from_global(x, grid=grid), kind in ("gen", "sym", "her")
    scale, _ = EQUILIBRATED.exponent(grid.comm, A, {"kind": "gen" if by_lu else kind}, {})
    assert by_lu or not scale
    return x * 2.0 ** -np.add.outer(np.atleast_1d(scale.rows), np.atleast_1d(scale.cols))


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_estimates_are_near(comm: Any, dtype: str) -> None:
    """rcond is between the true value, up to rounding, and three times the true value; no rank warns."""
    rng = np.random.default_rng(1)
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        for turn, n in enumerate((1, 3, 24)):
            g = rng.standard_normal((n, n)) + (1j * rng.standard_normal((n, n)) if dtype[0] == "c" else 0)
            x = (g @ g.conj().T + np.diag(np.logspace(0, 2, n))).astype(dtype)
            B = DistMatrix.from_global(x[:, :1].copy(), grid=grid, block=4)
            for kind in KINDS[turn % 2 :: 2] if comm.size > 1 else KINDS:
                how: Any = {"assume_a": kind, "lower": True, "transposed": kind != "pos" and turn % 2 == 0}
                A = DistMatrix.from_global(x + np.triu(x, 1) if kind == "gen" else x, grid=grid, block=4)
                with recorded() as warned:
                    X = linalg.solve(A, B, **how)
                report: Any = X.report
                exact = 1 / np.linalg.cond(scaled(read(A.allgather(), kind), grid, kind).astype("c16"), 1)
                assert 0.999 * exact <= report.rcond <= 3 * exact and not warned, (kind, n)
                assert len({*comm.allgather(report.rcond)}) == 1
                plan = linalg.plan(linalg.solve, A, B, **how)
                assert report.counted == report.predicted and plan.flops == report.flops
                assert kind in ("gen", "sym", "her") or plan.traffic(comm.rank) == report.counted
            A = DistMatrix.from_global(x, grid=grid, block=4)
            inverse: Any = linalg.inv(A).report
            assert np.isclose(inverse.rcond, 1 / np.linalg.cond(scaled(x, grid).astype("c16"), 1), rtol=1e-3)
        empty = DistMatrix.zeros((0, 0), grid=grid)
        with recorded() as warned:
            assert linalg.solve(empty, empty).report.rcond == linalg.inv(empty).report.rcond == 1 and not warned
            assert linalg.solve(empty, np.zeros(0)).shape == (0,)


def test_nearly_singular_matrices_are_warned_of(comm: Any) -> None:
    """The Hilbert matrix of order 12 and others, by every solution method: each rank issues one warning."""
    h, b = scipy.linalg.hilbert(12), np.ones(12)
    ones = np.eye(60) - np.triu(np.ones((60, 60)), 1)  # a condition number of 2^60
    graded = np.diag(10.0 ** -np.arange(18))
    h32 = scipy.linalg.hilbert(6).astype("f4") * np.float32(1e30)
    with ProcessGrid(comm) as grid:
        calls: list[tuple[np.ndarray, dict[str, Any]]] = [
            *((h, how) for how in ({}, {"assume_a": "pos"}, {"refine": True})),
            (ones, {"assume_a": "upper triangular"}),
            (ones.T, {"assume_a": "lower triangular", "transposed": True}),
            (graded, {"assume_a": "diagonal"}),
            (h32, {}),
        ]
        for x, how in calls:
            A = DistMatrix.from_global(np.ascontiguousarray(x), grid=grid, block=3)
            B = DistMatrix.from_global(np.ones((len(x), 1), x.dtype), grid=grid, block=3)
            for right in (B, np.ones(len(x), x.dtype)):
                with recorded() as warned:
                    X = linalg.solve(A, right, **how)
                assert [(w.category, w.filename) for w in warned] == [(scipy.linalg.LinAlgWarning, __file__)], how
                assert f"A ({len(x)} x {len(x)} on a {grid} grid) is ill-conditioned" in str(warned[0].message)
                exact = 1 / np.linalg.cond(x.astype(float), 1)
                if right is B:
                    assert X.report.rcond <= max(30 * exact, 1e-16 if x.dtype == "d" else 1e-7)
        A = DistMatrix.from_global(h, grid=grid, block=5)
        with recorded() as warned:
            linalg.inv(A)
            linalg.inv(A, assume_a="pos")
        assert len(warned) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(scipy.linalg.LinAlgWarning, match="about"):
                linalg.solve(A, b)
            well = DistMatrix.from_global(h + np.eye(12), grid=grid, block=5)
            refined: Any = linalg.solve(well, b[:, None] * well[:, :1], refine=True).report
        assert "refined" in refined.what and 0.01 < refined.rcond < 1


TRIANGLES = [  # (n, m, blocks of A, blocks of B)
    (1, 1, 1, 1), (50, 20, 7, 5), (90, 40, 64, 64), (90, 1, (48, 32), None), (70, 31, None, (50, 30)), (20, 0, 4, 4),
]  # fmt: skip


def triangle(n: int, dtype: str, lower: bool, unit: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return a well-conditioned triangular matrix, and a copy with NaN in elements that must not be read."""
    T = rng_matrix(n, n, dtype) / (4 * max(1, n) ** 0.5)
    T[np.arange(n), np.arange(n)] += 1.5
    kept = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
    if unit:
        T[np.arange(n), np.arange(n)] = 1
        kept = kept & ~np.eye(n, dtype=bool)
    given = np.where(kept, T, np.nan).astype(dtype)
    return np.where(kept | np.eye(n, dtype=bool), T, 0).astype(dtype), given


@square_grid
@pytest.mark.parametrize(
    ("layout", "dtype", "orders", "lower", "trans", "unit", "side", "way"),
    third(pairs(TRIANGLES, DTYPES, ("CC", "CF", "FC", "FF"), (0, 1), "NTC", (0, 1), "LR", ("read", "sent"))),
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


@square_grid
@pytest.mark.parametrize(("dtype", "order", "lower", "unit"), third(pairs(DTYPES, "CF", (0, 1), (0, 1))))
def test_inverses(comm: Any, dtype: str, order: Any, lower: bool, unit: bool) -> None:
    """|A X - I|_1 / (n |A|_1 |X|_1 u) is bounded; the inverse has A's layout, and its other triangle is zero."""
    T, given = triangle(70, dtype, bool(lower), bool(unit))
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(given, grid=grid, block=(16, 20), order=order)
            X = linalg.inv_triangular(A, lower=bool(lower), unit_diagonal=bool(unit))
            assert X.same_layout(A)
            x = X.allgather()
            assert relative(wide(T) @ wide(x) - np.eye(70), norm(T) * norm(x), dtype, 70) <= EPS
            assert not np.any(np.triu(x, 1) if lower else np.tril(x, -1))


def test_kahan(comm: Any) -> None:
    """The backward error of each column of X does not depend on the condition number, here 1e13."""
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
        for block in (8, (7, 5)):  # B's rows are distributed like A's, or not
            B = DistMatrix.from_global(b, grid=grid, block=block)
            X = linalg.solve_triangular(A, B, lower=True, overwrite_b=True)
            assert np.shares_memory(X.local, B.local) or not X.local.size
            assert relative(wide(b) - wide(T) @ wide(B.allgather()), norm(T) * norm(b), "float32", 60) <= EPS
        x = linalg.solve_triangular(A, b[:, 0].astype("float64"), lower=True)
        assert x.dtype == np.float64
        assert relative((b[:, 0] - wide(T) @ x)[:, None], norm(T) * abs(x).sum(), "float64", 60) <= EPS
        assert len(set(comm.allgather(x.tobytes()))) == 1


@pytest.mark.on_ranks(1, 2, 4)
def test_lu_uses_the_cores_of_the_node(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK factors and solves on one rank with the threads of the node; all ranks factor for an inverse."""
    monkeypatch.setattr("pdgemm.linalg.factors.operands.SMALL", 10)
    monkeypatch.setattr("pdgemm.linalg.factors.operands.ON_NODE", 4)
    monkeypatch.setattr("pdgemm.algorithms.panels.panel_run._LONG", 0)
    used, counts = NodeCores.used, [0]

    def counted(self: NodeCores) -> Any:
        counts[0] += 1
        return used(self)

    monkeypatch.setattr(NodeCores, "used", counted)
    grid = ProcessGrid(comm)
    lent = comm.size > 1 and grid.rank == grid.rank_map[0]
    for turn, dtype in enumerate(DTYPES):
        whole, b = system("gen", 40, dtype), rng_matrix(40, 3, dtype, seed=1)
        A, B = (DistMatrix.from_global(x, grid=grid, block=16 if turn % 2 else None) for x in (whole, b))
        counts[0] = 0
        factors = linalg.lu_factor(A)
        assert factors.LU.distribution.grid_shape == (1, 1) or comm.size == 1
        assert all(comm.allgather(counts[0] == lent))
        assert backward(whole, linalg.lu_solve(factors, B).allgather(), b, dtype) <= EPS
        assert all(comm.allgather(counts[0] == 2 * lent))
        plan, X = linalg.plan(linalg.solve, A, B), linalg.solve(A, B)
        assert X.same_layout(B) and X.report.counted == plan.traffic(comm.rank)
        assert backward(whole, X.allgather(), b, dtype) <= EPS
        counts[0] = 0
        inverse = linalg.inv(A)
        assert not any(comm.allgather(counts[0]))
        assert np.abs(whole @ inverse.allgather() - np.eye(40)).max() <= 1e4 * np.finfo(dtype).eps
        for shape in ((40, 12), (12, 40)):
            P = DistMatrix.from_global(rng_matrix(*shape, dtype), grid=grid, block=5)
            p, L, U = linalg.lu(P)
            assert np.allclose((L.allgather() @ U.allgather())[p], P.allgather(), atol=1e-5)
    with pytest.raises(LinAlgError, match="singular"):
        linalg.solve(DistMatrix.ones((40, 40), grid=grid), np.ones(40))
    grid.free()
    with ProcessGrid(comm, (1, 1), ranks=[comm.size - 1]) as one:  # other ranks have no position
        for block in (None, 16, (8, 24)):  # several panels: the ranks without a position wait once
            A = DistMatrix.from_global(whole.real, grid=one, block=block, order="F")
            assert np.allclose(whole.real @ linalg.lu_solve(linalg.lu_factor(A), np.ones(40)), 1, atol=1e-2)


@pytest.mark.parametrize(("block", "dtype", "transposed"), third(pairs((None, 16), DTYPES, (False, True))))
def test_small_orders_are_solved_by_lapack_on_one_rank(
    comm: Any, monkeypatch: pytest.MonkeyPatch, block: Any, dtype: str, transposed: bool
) -> None:
    """Factors of all ranks' matrices are on one rank, solutions in the layout of B; counted words are as planned."""
    monkeypatch.setattr("pdgemm.linalg.factors.operands.SMALL", 40)
    monkeypatch.setattr("pdgemm.grids.process_grid.WORK_GRIDS", 1)
    n, m = 40, 3
    grid = ProcessGrid(comm)
    for kind in ("gen", "pos"):
        whole, b = system(kind, n, dtype), rng_matrix(n, m, dtype, seed=1)
        A, B = (DistMatrix.from_global(x.T.copy() if transposed else x, grid=grid, block=block) for x in (whole, b))
        A, B = (A.T, B.T) if transposed else (A, B)
        plan, X = linalg.plan(linalg.solve, A, B, assume_a=kind), linalg.solve(A, B, assume_a=kind)
        assert X.same_layout(B) and X.report.counted == plan.traffic(comm.rank)
        assert backward(whole, X.allgather(), b, dtype) <= EPS
        assert 0.3 < X.report.rcond * np.linalg.cond(whole, 1) < 3
        if kind == "pos":
            for lower in (False, True):
                factor = linalg.cho_factor(A, lower=lower)
                assert factor[0].distribution.grid_shape == (1, 1)
                assert backward(whole, linalg.cho_solve(factor, B).allgather(), b, dtype) <= EPS
                assert backward(whole, linalg.cho_solve(factor, b[:, 0]), b[:, 0], dtype) <= EPS
            continue
        factors = linalg.lu_factor(A)
        assert factors.LU.distribution.grid_shape == (1, 1) and factors.LU.order == "F"
        for shape in ((1, comm.size), (comm.size, 1)):  # products on other grids free the communicators of older ones
            grid.work_grid(shape, 1, tuple(reversed(range(comm.size))))
        both = factors.LU @ factors.LU.T
        assert np.allclose(both.allgather(), factors.LU.allgather() @ factors.LU.allgather().T, rtol=1e-3, atol=1e-3)
        for trans, op in (("N", whole), ("T", whole.T), ("C", whole.conj().T)):
            how: Any = {"trans": trans}
            assert backward(op, linalg.lu_solve(factors, B, **how).allgather(), b, dtype) <= EPS
            assert backward(op, linalg.lu_solve(factors, b[:, 0], **how), b[:, 0], dtype) <= EPS
        singular = DistMatrix.from_global(np.ones((n, n), dtype), grid=grid, block=block)
        with pytest.raises(LinAlgError, match="singular"):
            linalg.solve(singular, B)
    grid.free()
