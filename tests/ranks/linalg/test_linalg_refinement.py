"""`solve` by factors in single precision: classical refinement, GMRES, and factors in double precision after all."""

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np
import pytest
import scipy.linalg
from factored import EPS, hilbert, norm, relative, rng_matrix
from problems import grid_shapes
from tiers import in_turn, square_grid

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, LinAlgError

pytestmark = pytest.mark.mpi
SINGLE = {"float64": "float32", "complex128": "complex64"}


def conditioned(values: Any, dtype: str = "float64") -> np.ndarray:
    """Return a matrix with these singular values, and random singular vectors."""
    U, V = (np.linalg.qr(rng_matrix(len(values), len(values), dtype, seed=seed))[0] for seed in (1, 2))
    return (U * values) @ V


def small(number: int, least: float, n: int = 40) -> np.ndarray:
    """Return n singular values: `number` of them from `least` to 10 least, the others from 1/2 to 1."""
    return np.append(np.linspace(1, 0.5, n - number), np.geomspace(10 * least, least, number))


def within(op: np.ndarray, x: np.ndarray, b: np.ndarray) -> bool:
    """Whether |b - op x| <= sqrt(n) eps |op||x| in each column, but for the rounding errors of this check."""
    x, b = (y if y.ndim == 2 else y[:, None] for y in (x, b))
    size = abs(op).sum(axis=1).max() * abs(x).max(axis=0)
    return bool((abs(b - op @ x).max(axis=0) <= 2 * len(op) ** 0.5 * np.finfo(float).eps * size).all())


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_refinement(comm: Any, dtype: str) -> None:
    """In each column |b - A x| <= sqrt(n) eps |A||x| in infinity norms, as LAPACK's dsgesv requires."""
    given, b = rng_matrix(60, 60, dtype), rng_matrix(60, 6, dtype, seed=1)
    with ProcessGrid(comm) as grid:
        A, B = DistMatrix.from_global(given, grid=grid, block=16), DistMatrix.from_global(b, grid=grid, block=(7, 2))
        for transposed in (False, True):
            op = given.T if transposed else given
            X = linalg.solve(A, B, refine=True, transposed=transposed)
            assert f"by factors in {SINGLE[dtype]}, refined " in cast("Any", X.report).what
            assert " times" in cast("Any", X.report).what and within(op, X.allgather(), b)
            assert within(op, linalg.solve(A, b[:, 0], refine=True, transposed=transposed), b[:, 0])
        assert np.array_equal(A.allgather(), given) and np.array_equal(B.allgather(), b)


SPECTRA = {
    "one of 1e-12": small(1, 1e-12), "two of 1e-9": small(2, 1e-9), "all, 1 to 1e-8": np.geomspace(1, 1e-8, 40),
    "1e-10 to 1e-11": small(6, 1e-11),
}  # fmt: skip


@square_grid
@pytest.mark.parametrize(("kind", "dtype"), in_turn([*SPECTRA, "singular in single"], [*SINGLE]))
def test_gmres(comm: Any, kind: str, dtype: str) -> None:
    """Ill-conditioned matrices, on which classical refinement fails: the backward error is that of double precision."""
    b = rng_matrix(40, 3, dtype, seed=3)
    if kind in SPECTRA:
        given = conditioned(SPECTRA[kind], dtype)
    else:  # two pivots are zero in single precision
        blocks = [[1, 1], [1, 1 + 1e-10]], rng_matrix(36, 36, dtype), [[1, 1], [1, 1 - 1e-9]]
        given = scipy.linalg.block_diag(*blocks).astype(dtype)
    b[:, 1] = 0
    for shape in grid_shapes(comm.size)[-1:]:
        with ProcessGrid(comm, shape) as grid:
            A, B = (
                DistMatrix.from_global(given, grid=grid, block=16),
                DistMatrix.from_global(b, grid=grid, block=(7, 2)),
            )
            X = linalg.solve(A, B, refine=True)
            x, report = X.allgather(), cast("Any", X.report)
            start, end = f"by factors in {SINGLE[dtype]}, refined by ", " iterations of GMRES"
            assert start in report.what and report.what.endswith(end)
            assert 1 <= int(report.what.removesuffix(end).split()[-1]) <= 50
            assert within(given, x, b) and not x[:, 1].any() and X.same_layout(B)
            exact = cast("Any", linalg.solve(A, B).report).rcond  # by factors in double precision
            rtol = 0.1 if comm.size > 1 else 1.0  # on one rank LAPACK estimates `exact`, from fewer vectors
            assert np.isclose(report.rcond, exact, rtol=rtol, atol=0)
            assert report.counted == report.predicted and report.as_predicted, str(report)
            y = linalg.solve(A, b[:, 0] * (1 + 1j), refine=True, transposed=True)
            assert within(given.T, y, b[:, 0] * (1 + 1j))
            assert len({*comm.allgather((x.tobytes(), y.tobytes(), report.what, report.rcond))}) == 1
            assert np.array_equal(A.allgather(), given) and np.array_equal(B.allgather(), b)


def test_gmres_from_the_start(comm: Any) -> None:
    """Of more columns than run at once; symmetric; words and flops as planned for this number of iterations."""
    given, b = rng_matrix(60, 60, "float64"), rng_matrix(60, 19, "float64", seed=1)
    with ProcessGrid(comm, (1, comm.size)) as grid:  # no words depend on pivots
        A, B = (DistMatrix.from_global(x, grid=grid, block=8) for x in (given, b))
        X = linalg.solve(A, B, refine="gmres")
        assert within(given, X.allgather(), b) and "GMRES" in cast("Any", X.report).what
        symmetric = linalg.solve(A, B[:, :2], refine="gmres", assume_a="sym", lower=True)
        assert within(np.tril(given) + np.tril(given, -1).T, symmetric.allgather(), b[:, :2])
        X, Y = (linalg.solve(A, B[:, :columns], refine="gmres") for columns in (8, 1))
        for result in (X, Y):
            report: Any = result.report
            number = int(report.what.split("refined by ")[1].split()[0])
            plan = linalg.plan(linalg.solve, A, B[:, : result.shape[1]], refine="gmres", iterations=number)
            assert plan.traffic(comm.rank) == report.counted == report.predicted and plan.flops == report.flops
        with pytest.raises(ArgumentError, match="refine 'qmr' is not one of auto, gmres"):
            linalg.solve(A, B, refine=cast("Any", "qmr"))
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="different arguments"):
                linalg.solve(A, B, refine="gmres" if comm.rank else True)


@pytest.mark.parametrize("kind", ["hilbert", "large", "many small", "many columns", "nearly"])
def test_refinement_that_does_not_converge(comm: Any, kind: str) -> None:
    given = {
        "hilbert": hilbert(60, "float64"), "large": 1e60 * rng_matrix(60, 60, "float64"),
        "many small": conditioned(small(70, 1e-11, 90)), "many columns": conditioned(small(1, 1e-10, 60)),
        "nearly": conditioned(small(1, 1e-15, 60)),
    }[kind]  # fmt: skip
    b = rng_matrix(len(given), 9 if kind == "many columns" else 2, "float64")
    with ProcessGrid(comm) as grid, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        X = linalg.solve(*(DistMatrix.from_global(x, grid=grid, block=32) for x in (given, b)), refine=True)
        report: Any = X.report
        assert "by factors in float32, which did not converge" in report.what
        assert "so by factors in float64" in report.what
        assert (" iterations of GMRES, so" in report.what) == (kind in ("hilbert", "many small", "nearly"))
        assert relative(b - given @ X.allgather(), norm(given) * norm(X.allgather()), "float64", len(b)) <= EPS


def test_singular_matrices(comm: Any) -> None:
    """A zero pivot raises an error on all ranks; where rounding hides that A is singular, all ranks warn."""
    zero, b = np.ones((30, 30)), rng_matrix(30, 1, "float64")
    few = rng_matrix(30, 29, "float64") @ rng_matrix(29, 30, "float64", seed=1)
    with ProcessGrid(comm) as grid:
        for how in (True, "gmres"):
            options: Any = {"refine": how}
            with pytest.raises(LinAlgError, match="is singular: pivot 2 of 30 is zero"):
                linalg.solve(DistMatrix.from_global(zero, grid=grid), b[:, 0], **options)
            with pytest.warns(scipy.linalg.LinAlgWarning, match="ill-conditioned"):
                linalg.solve(DistMatrix.from_global(few, grid=grid, block=8), b[:, 0], **options)
