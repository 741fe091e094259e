"""Linear systems and inverses: backward errors, structures, refinement, one error on all ranks."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from factored import EPS, hilbert, kahan, norm, positive_definite, relative, rng_matrix, wide
from problems import DTYPES, grid_shapes
from tiers import pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, LinAlgError

pytestmark = pytest.mark.mpi

LAYOUTS = [(0, 2, 3, 1), (1, 1, 1, 1), (50, 5, 7, (4, 2)), (90, 20, (64, 33), 16), (130, 1, None, None)]
KINDS = ("gen", "pos", "sym", "diagonal", "lower triangular", "upper triangular")


def system(kind: str, n: int, dtype: str) -> np.ndarray:
    """A well-conditioned matrix of a kind."""
    A = rng_matrix(n, n, dtype)
    if kind == "pos":
        return positive_definite(n, dtype)
    if kind == "sym":
        return A + A.T
    if kind == "gen":
        return A
    A = A / (4 * max(1, n) ** 0.5) + 2 * np.eye(n)
    parts = {"diagonal": np.eye(n), "lower triangular": np.tri(n), "upper triangular": np.tri(n).T}
    return (A * parts[kind]).astype(dtype)


def backward(A: np.ndarray, x: np.ndarray, b: np.ndarray, dtype: str) -> float:
    """|b - A x|_1 / (n |A|_1 |x|_1 u), as in SLATE's tests; Higham 2002, 7.1."""
    x, b = (y if y.ndim == 2 else y[:, None] for y in (x, b))
    return relative(wide(b) - wide(A) @ wide(x), norm(A) * norm(x), dtype, len(A))


@square_grid
@pytest.mark.parametrize(
    ("layout", "kind", "dtype", "orders", "transposed"),
    third(pairs(LAYOUTS, KINDS, DTYPES, ("CC", "CF", "FF"), (0, 1))),
)
def test_solves_and_inverts(comm: Any, layout: Any, kind: str, dtype: str, orders: Any, transposed: int) -> None:
    n, m, block_a, block_b = layout
    given, b = system(kind, n, dtype), rng_matrix(n, m, dtype, seed=1)
    op = given.T if transposed else given
    for shape in grid_shapes(comm.size)[:: 1 if n < 90 else 2]:
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(given, grid=grid, block=block_a, order=orders[0])
            B = DistMatrix.from_global(b, grid=grid, block=block_b, order=orders[1])
            X = linalg.solve(A, B, assume_a=kind, transposed=bool(transposed))
            assert X.same_layout(B) and X.dtype == np.dtype(dtype)
            assert backward(op, X.allgather(), b, dtype) <= EPS
            vector = b[:, 0]
            assert (
                backward(op, linalg.solve(A, vector, assume_a=kind, transposed=bool(transposed)), vector, dtype) <= EPS
            )
            inverse = linalg.inv(A, assume_a=kind)
            assert inverse.same_layout(A)
            right = wide(given) @ wide(inverse.allgather()) - np.eye(n)
            assert relative(right, norm(given) * norm(inverse.allgather()), dtype, n) <= EPS
            assert np.array_equal(A.allgather(), given) and np.array_equal(B.allgather(), b)


@square_grid
@pytest.mark.parametrize(("trans", "dtype", "order"), third(pairs("NTC", DTYPES, "CF")))
def test_factors_solve_again_and_again(comm: Any, trans: Any, dtype: str, order: Any) -> None:
    given, b = rng_matrix(70, 70, dtype), rng_matrix(70, 9, dtype, seed=1)
    op = {"N": given, "T": given.T, "C": given.conj().T}[trans]
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            factors = linalg.lu_factor(DistMatrix.from_global(given, grid=grid, block=16))
            for block in (16, (5, 2)):
                B = DistMatrix.from_global(b, grid=grid, block=block, order=order)
                X = linalg.lu_solve(factors, B, trans=trans)
                report: Any = X.report
                assert report.as_predicted, str(report)
                assert np.array_equal(B.allgather(), b)
                assert backward(op, X.allgather(), b, dtype) <= EPS
                X = linalg.lu_solve(factors, B, trans=trans, overwrite_b=True)
                assert backward(op, X.allgather(), b, dtype) <= EPS


def test_types_that_differ(comm: Any) -> None:
    given, b = rng_matrix(40, 40, "float64"), rng_matrix(40, 3, "complex64")
    with ProcessGrid(comm) as grid:
        A, B = (DistMatrix.from_global(x, grid=grid, block=8) for x in (given, b))
        X = linalg.solve(A, B)
        assert X.dtype == np.complex128
        assert backward(given, X.allgather(), b, "complex128") <= EPS
        assert backward(given, linalg.solve(A, np.arange(40)), np.arange(40), "float64") <= EPS
        assert linalg.solve(A.astype("float32"), A.astype("float32")).dtype == np.float32
        assert backward(given.T, linalg.solve(A.T, B).allgather(), b, "complex128") <= EPS


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_refinement(comm: Any, dtype: str) -> None:
    """In each column |b - A x| <= sqrt(n) eps |A||x| in infinity norms, as LAPACK's dsgesv wants it."""
    given, b = rng_matrix(100, 100, dtype), rng_matrix(100, 6, dtype, seed=1)
    single = {"float64": "float32", "complex128": "complex64"}[dtype]
    with ProcessGrid(comm) as grid:
        A, B = DistMatrix.from_global(given, grid=grid, block=16), DistMatrix.from_global(b, grid=grid, block=(7, 2))
        for transposed in (False, True):
            op = given.T if transposed else given
            X = linalg.solve(A, B, refine=True, transposed=transposed)
            x, report = X.allgather(), cast("Any", X.report)
            assert f"by factors in {single}, refined" in report.what  # and not by others
            bound = 10 * abs(op).sum(axis=1).max() * abs(x).max(axis=0) * np.finfo(dtype).eps
            assert (abs(b - op @ x).max(axis=0) <= bound).all()
            y = linalg.solve(A, b[:, 0], refine=True, transposed=transposed)
            assert (abs(b[:, 0] - op @ y).max() <= bound[0]).all()
        assert np.array_equal(A.allgather(), given) and np.array_equal(B.allgather(), b)
        with pytest.raises(DTypeError, match="refine=True is for general matrices of float64 or complex128"):
            linalg.solve(A.astype(single), B.astype(single), refine=True)
        with pytest.raises(DTypeError, match="refine=True is for general"):
            linalg.solve(A, B, refine=True, assume_a="pos")


@pytest.mark.parametrize("kind", ["hilbert", "large", "singular in single"])
def test_refinement_that_does_not_converge(comm: Any, kind: str) -> None:
    given = {"hilbert": hilbert(60, "float64"), "large": 1e60 * rng_matrix(60, 60, "float64")}.get(kind)
    if given is None:
        given = np.eye(60) + 0.0
        given[1, :2], given[0, :2] = (1, 1 + 1e-12), (1, 1)
    b = rng_matrix(60, 2, "float64")
    with ProcessGrid(comm) as grid:
        X = linalg.solve(*(DistMatrix.from_global(x, grid=grid, block=8) for x in (given, b)), refine=True)
        report: Any = X.report
        assert "by factors in float32, which did not converge" in report.what
        assert "so by factors in float64" in report.what
        assert backward(given, X.allgather(), b, "float64") <= EPS


def test_hard_matrices(comm: Any) -> None:
    """Small backward errors whatever the condition."""
    b = rng_matrix(60, 3, "float64")
    d = np.logspace(0, -12, 60)
    with ProcessGrid(comm) as grid:
        for given in (hilbert(60, "float64"), kahan(60, "float64"), rng_matrix(60, 60, "float64") * d * d[::-1, None]):
            A, B = (DistMatrix.from_global(x, grid=grid, block=8) for x in (given, b))
            assert backward(given, linalg.solve(A, B).allgather(), b, "float64") <= EPS


def test_what_cannot_be_solved(comm: Any) -> None:
    triangle = np.tri(9)
    triangle[4, 4] = 0
    with ProcessGrid(comm) as grid:
        A, one = DistMatrix.from_global(triangle, grid=grid, block=2), DistMatrix.eye(9, grid=grid, block=2)
        for kind in ("lower triangular", "diagonal"):
            for call in (linalg.inv, lambda A, assume_a: linalg.solve(A, one, assume_a=assume_a)):
                with pytest.raises(LinAlgError, match="element number 5 of its diagonal, from 1, is zero"):
                    call(A, assume_a=kind)
        with pytest.raises(LinAlgError, match="leading minor of order 1 is not"):
            linalg.solve(-1 * one, one, assume_a="positive definite")
        with pytest.raises(ArgumentError, match="is not one of gen, pos"):
            linalg.solve(one, one, assume_a="banded")
        with pytest.raises(LayoutError, match="A must be square"):
            linalg.inv(DistMatrix.zeros((2, 3), grid=grid))
        with pytest.raises(LayoutError, match="A is 9 x 9, so B must have 9 rows, but it is 3 x 3"):
            linalg.solve(one, DistMatrix.zeros((3, 3), grid=grid))
        with pytest.raises(DTypeError, match="B must be a DistMatrix, or an array"):
            linalg.solve(one, None)
        with pytest.raises(ArgumentError, match="B shares memory with A"):
            linalg.solve(one, one, overwrite_b=True)
