"""Reciprocal condition numbers of `solve` and `inv`: near to the true ones, planned, and warned of on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from problems import grid_shapes

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.linalg.ranges import EQUILIBRATED

pytestmark = pytest.mark.mpi


@contextmanager
def recorded() -> Iterator[list[Any]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield warned


def read(x: np.ndarray, kind: str) -> np.ndarray:
    """The matrix of which `solve` reads a part."""
    parts: dict[str, Any] = {
        "upper triangular": np.triu, "lower triangular": np.tril, "diagonal": lambda y: np.diag(np.diag(y)),
        "sym": lambda y: np.tril(y) + np.tril(y, -1).T,
    }  # fmt: skip
    return parts.get(kind, lambda y: y)(x)


def scaled(x: np.ndarray, A: Any, kind: str = "gen") -> np.ndarray:
    """The matrix that `solve` factors: that of a general one, if its rows or columns lie far apart, is scaled."""
    scale, _ = EQUILIBRATED.exponent(A.grid.comm, A, {"kind": kind, "lower": True}, {})
    assert kind == "gen" or not scale
    return x * 2.0 ** -np.add.outer(np.atleast_1d(scale.rows), np.atleast_1d(scale.cols))


KINDS = ("gen", "pos", "sym", "her", "upper triangular", "lower triangular", "diagonal")


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_estimates_are_near(comm: Any, dtype: str) -> None:
    """Never above the true value but for rounding, and within a factor of three of it; nobody is warned."""
    rng = np.random.default_rng(1)
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        for turn, n in enumerate((1, 2, 3, 9, 40)):
            g = rng.standard_normal((n, n)) + (1j * rng.standard_normal((n, n)) if dtype[0] == "c" else 0)
            x = (g @ g.conj().T + np.diag(np.logspace(0, 2, n))).astype(dtype)
            B = DistMatrix.from_global(x[:, :1].copy(), grid=grid, block=4)
            for kind in KINDS[turn % 2 :: 2] if comm.size > 1 else KINDS:
                how: Any = {"assume_a": kind, "lower": True, "transposed": kind != "pos" and turn % 2 == 0}
                A = DistMatrix.from_global(x + np.triu(x, 1) if kind == "gen" else x, grid=grid, block=4)
                with recorded() as warned:
                    X = linalg.solve(A, B, **how)
                report: Any = X.report
                exact = 1 / np.linalg.cond(scaled(read(A.allgather().astype("c16"), kind), A, kind), 1)
                assert 0.999 * exact <= report.rcond <= 3 * exact and not warned, (kind, n)
                assert len({*comm.allgather(report.rcond)}) == 1
                plan = linalg.plan(linalg.solve, A, B, **how)
                assert report.counted == report.predicted and plan.flops == report.flops
                assert kind == "gen" or plan.traffic(comm.rank) == report.counted
            A = DistMatrix.from_global(x, grid=grid, block=4)
            inverse: Any = linalg.inv(A).report
            assert np.isclose(inverse.rcond, 1 / np.linalg.cond(scaled(x.astype("c16"), A), 1), rtol=1e-3)
        empty = DistMatrix.zeros((0, 0), grid=grid)
        with recorded() as warned:
            assert linalg.solve(empty, empty).report.rcond == linalg.inv(empty).report.rcond == 1 and not warned
            assert linalg.solve(empty, np.zeros(0)).shape == (0,)


def test_nearly_singular_matrices_are_warned_of(comm: Any) -> None:
    """The Hilbert matrix of order 12 and others, by every way to a solution, once on each rank."""
    h, b = scipy.linalg.hilbert(12), np.ones(12)
    ones = np.eye(60) - np.triu(np.ones((60, 60)), 1)  # whose condition number is 2^60
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
            assert linalg_rcond(X, A, B, how) <= max(30 * exact, 1e-16 if x.dtype == "d" else 1e-7)
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


def linalg_rcond(X: Any, A: Any, B: Any, how: dict[str, Any]) -> float:
    """The estimate, which the report of a matrix has, and an array has not."""
    assert isinstance(X, np.ndarray)
    with recorded():
        report: Any = linalg.solve(A, B, **how).report
    return float(report.rcond)
