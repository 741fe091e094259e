"""The largest singular values: the bound of each result holds, and says no more than ten times the error, or warns."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import rng_matrix
from problems import grid_shapes
from tiers import square_grid

from pdgemm import DistMatrix, ProcessGrid, linalg

pytestmark = [pytest.mark.mpi, square_grid]
TYPES = ("float32", "float64", "complex64", "complex128")
SIZES = [(60, 50, 3), (45, 80, 2), (110, 100, 1), (14, 30, 4)]  # rows, columns, k; the last one has all values


def spectra(p: int, k: int) -> dict[str, np.ndarray]:
    """Singular values of all kinds, p of them."""
    i = np.arange(p)
    return {
        "flat": np.linspace(1, 0.3, p),
        "all the same": np.ones(p),
        "1/i": 1 / (1 + i),
        "geometric": 0.7**i,
        "to 1e-14": 10.0 ** (-14 * i / p),
        "a step after k": np.r_[np.ones(k), np.linspace(0.5, 0.4, p - k)],
        "a step before k": np.r_[1, np.linspace(1e-9, 0.9e-9, p - 1)],
        "a cluster over k": np.r_[np.linspace(2, 1.5, k), np.full(4, 1.5), np.linspace(0.9, 0.1, p)][:p],
        "neighbours": np.r_[np.linspace(2, 1.5, k), 1.5 - 1e-7, np.linspace(1.4, 0.1, p)][:p],
        "low rank": np.r_[1, np.zeros(p - 1)],
        "zero": np.zeros(p),
        "tiny": 0.8**i * 1e-30,
        "huge": 0.8**i * 1e30,
        "nearly flat": 1 - 1e-3 * i / p,
    }


def with_values(m: int, n: int, values: np.ndarray, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(m + n)
    draw = [rng.standard_normal((2, rows, len(values))) for rows in (m, n)]
    U, V = (np.linalg.qr(x[0] + (1j * x[1] if dtype.startswith("c") else 0))[0] for x in draw)
    return ((U * values) @ V.conj().T).astype(dtype)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.result_type(x.dtype, np.float64))


@pytest.mark.parametrize("dtype", TYPES)
def test_bounds_hold_and_are_near(comm: Any, dtype: str) -> None:
    """Against LAPACK in double precision, on twelve kinds of spectra and more; sizes and grids take turns."""
    shapes = grid_shapes(comm.size)
    for turn in range(0 if comm.size == 1 else TYPES.index(dtype), 14, 1 if comm.size == 1 else 4):
        size = (turn + TYPES.index(dtype)) % len(SIZES)
        m, n, k = SIZES[size]
        name, values = list(spectra(min(m, n), k).items())[turn]
        x = with_values(m, n, values, dtype)
        exact = scipy.linalg.svd(wide(x), compute_uv=False)
        with ProcessGrid(comm, shapes[size % len(shapes)]) as grid, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            A = DistMatrix.from_global(x, grid=grid, block=(None, 7, (4, 3), 8)[size])
            U, s, Vh = linalg.svd(A, k, oversample=5, seed=turn)
            u, v = wide(U.allgather()), wide(Vh.allgather()).conj().T
        facts: Any = U.report.facts
        unit, first = float(np.finfo(x.dtype).eps), float(exact[0]) or 1.0
        error = np.abs(s.astype(float) - exact[:k]).max() / first
        assert len(set(comm.allgather(s.tobytes()))) == 1
        assert error <= facts["bound"], (name, dtype, error, facts)
        near = max(10 * error, (100 + 10 * np.sqrt(max(m, n))) * unit)  # the steps end at 100 eps; rounding errors
        assert warned or facts["bound"] <= near, (name, dtype, error, facts)
        assert np.linalg.norm(wide(x) @ v - u * s) <= 100 * unit * first
        assert np.linalg.norm(wide(x).conj().T @ u - v * s, axis=0).max() <= (facts["residual"] + 100 * unit) * first
        assert max(np.linalg.norm(y.conj().T @ y - np.eye(k)) for y in (u, v)) <= 50 * unit
        if values.any():
            share = (exact[:k] ** 2).sum() / (exact**2).sum()
            assert abs(facts["share"] - share) <= 2 * k * facts["bound"] + 100 * unit
        assert U.report.counted == U.report.predicted and (U.report.steps > 0) == (6 * (k + 5) < min(m, n))


def test_bases_that_nearly_fill_the_space(comm: Any) -> None:
    """Where a full basis leaves less room than a block needs, all values are computed."""
    with ProcessGrid(comm) as grid:
        for n in (35, 36, 41, 42, 43):
            x = with_values(50, n, spectra(n, 2)["flat"], "float64")
            U, s, _ = linalg.svd(DistMatrix.from_global(x, grid=grid), 2, oversample=5)
            facts: Any = U.report.facts
            assert np.abs(s - np.linalg.svd(x)[1][:2]).max() <= facts["bound"] <= 1e-13
            assert (U.report.steps > 0) == (n > 42)


def test_any_seed(comm: Any) -> None:
    """The seeds at the ends of their range, from which three others are derived."""
    x = rng_matrix(64, 40, "float64")
    with ProcessGrid(comm) as grid:
        A, exact = DistMatrix.from_global(x, grid=grid), np.linalg.svd(x, compute_uv=False)[:2]
        for seed in (-(2**63), -1, 2**63 - 1, 2**64 - 1):
            assert np.allclose(linalg.svd(A, 2, oversample=2, seed=seed, tolerance=1e-6)[1], exact, rtol=1e-6)


def test_fewer_steps_have_larger_bounds_that_hold(comm: Any) -> None:
    """After any number of steps the bound holds, and all ranks are warned; a tolerance ends the steps earlier."""
    with ProcessGrid(comm) as grid:
        for name in ("flat", "a cluster over k", "nearly flat")[: 3 if comm.size == 1 else 1]:
            x = with_values(70, 64, spectra(64, 2)[name], "float64")
            A, exact = DistMatrix.from_global(x, grid=grid, block=9), np.linalg.svd(x, compute_uv=False)[:2]
            for steps in (1, 2, 3, 5)[:: 1 if comm.size == 1 else 3]:
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    U, s, _ = linalg.svd(A, 2, oversample=4, steps=steps)
                facts: Any = U.report.facts
                assert np.abs(s - exact).max() / exact[0] <= facts["bound"] and U.report.steps == steps
                assert [f"after {steps} step" in str(x.message) for x in warned] == [True] * (facts["bound"] > 1e-13)
                assert steps > 1 or warned
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                loose: Any = linalg.svd(A, 2, oversample=4, tolerance=0.3)[0].report
                assert loose.facts["bound"] <= 0.3 and 1 <= loose.steps <= 12


def test_a_warning_that_is_an_error_is_one_on_all_ranks(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(with_values(70, 64, spectra(64, 2)["flat"], "float64"), grid=grid)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if comm.rank == comm.size - 1 else "ignore")  # of one rank alone
            with pytest.raises(scipy.linalg.LinAlgWarning, match="svd of 70 x 64"):
                linalg.svd(A, 2, oversample=4, steps=1)
        assert np.isfinite(A.norm())  # no rank is ahead of another
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            linalg.svd(A, 2, oversample=4, steps=1)
        assert [str(x.message)[:15] for x in warned] == ["svd of 70 x 64:"] and warned[0].filename == __file__


def test_plans_of_the_largest_values(comm: Any) -> None:
    """The number of steps is what the elements decide; words, messages and flops follow from it, restarts included."""
    cases = [(70, 64, 2, False, 0), (60, 90, 1, True, 1), (20, 33, 3, False, 0)]
    for m, n, k, transposed, at in cases:
        with ProcessGrid(comm, (grid_shapes(comm.size) * 2)[at]) as grid, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = with_values(m, n, spectra(min(m, n), k)["flat"], "float64")
            A = DistMatrix.from_global(x.T if transposed else x, grid=grid, block=8)
            A = A.T if transposed else A
            report: Any = linalg.svd(A, k, oversample=4, steps=6)[0].report
            assert report.steps == 6 * (6 * (k + 4) < min(m, n))  # which is a restart
            plan = linalg.plan(linalg.svd, A, k=k, oversample=4, iterations=report.steps or 1)
            assert report.counted == report.predicted == plan.traffic(comm.rank), str(report)
            assert plan.flops == report.flops
