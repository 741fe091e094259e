"""Singular values and vectors: the k largest, with bounds that hold and are tight, or warnings; or all."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import EPS, rng_matrix, wide, with_singular_values
from problems import DTYPES, grid_shapes
from tiers import every_grid, everything

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.linalg.singular.singular_values import by_reduction
from pdgemm.linalg.work import Work
from pdgemm.schedules.panels.panel_schedule import OneRankSchedule

pytestmark = pytest.mark.mpi
SIZES = [(60, 50, 3), (45, 80, 2), (110, 100, 1), (14, 30, 4)]  # m, n, k; in the last, k + oversampling is m


def spectra(p: int, k: int) -> dict[str, np.ndarray]:
    """Return spectra of p singular values by name."""
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


@pytest.mark.on_ranks(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_hold_and_are_near(comm: Any, dtype: str) -> None:
    """Errors, from LAPACK in double precision, are within the bounds, and bounds are tight, for all spectra."""
    shapes = grid_shapes(comm.size)
    for turn in range(0 if everything() else DTYPES.index(dtype) % 2, 14, 1 if everything() else 2):
        size = (turn + DTYPES.index(dtype)) % len(SIZES)
        m, n, k = SIZES[size]
        name, values = list(spectra(min(m, n), k).items())[turn]
        x = with_singular_values(m, n, values, dtype)
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
        near = max(10 * error, (100 + 10 * np.sqrt(max(m, n))) * unit)  # tolerance 100 eps; rounding errors
        assert warned or facts["bound"] <= near, (name, dtype, error, facts)
        assert np.linalg.norm(wide(x) @ v - u * s) <= 100 * unit * first
        assert np.linalg.norm(wide(x).conj().T @ u - v * s, axis=0).max() <= (facts["residual"] + 100 * unit) * first
        assert max(np.linalg.norm(y.conj().T @ y - np.eye(k)) for y in (u, v)) <= 50 * unit
        if values.any():
            share = (exact[:k] ** 2).sum() / (exact**2).sum()
            assert abs(facts["share"] - share) <= 2 * k * facts["bound"] + 100 * unit
        assert U.report.counted == U.report.predicted and (U.report.steps > 0) == (6 * (k + 5) < min(m, n))


def test_fewer_steps_have_larger_bounds_that_hold(comm: Any) -> None:
    """The bound holds after any number of steps, and all ranks warn; a tolerance needs fewer steps."""
    with ProcessGrid(comm) as grid:
        for name in ("flat", "a cluster over k", "nearly flat")[: 3 if everything() else 1]:
            x = with_singular_values(70, 64, spectra(64, 2)[name], "float64")
            A, exact = DistMatrix.from_global(x, grid=grid, block=9), np.linalg.svd(x, compute_uv=False)[:2]
            ends = (1, -(2**63)), (2, -1), (3, 2**63 - 1), (5, 2**64 - 1)  # first and last seeds
            for steps, seed in ends[:: 1 if everything() else 3]:
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    U, s, _ = linalg.svd(A, 2, oversample=4, steps=steps, seed=seed)
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
        A = DistMatrix.from_global(with_singular_values(70, 64, spectra(64, 2)["flat"], "float64"), grid=grid)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if comm.rank == comm.size - 1 else "ignore")  # on one rank only
            with pytest.raises(scipy.linalg.LinAlgWarning, match="svd of 70 x 64"):
                linalg.svd(A, 2, oversample=4, steps=1)
        assert np.isfinite(A.norm())  # the ranks can still communicate
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            linalg.svd(A, 2, oversample=4, steps=1)
        assert [str(x.message)[:15] for x in warned] == ["svd of 70 x 64:"] and warned[0].filename == __file__


def test_plans_of_the_largest_values(comm: Any) -> None:
    """Given the number of steps, words, messages and flops are as planned, restarts included."""
    cases = [(70, 64, 2, False, 0), (60, 90, 1, True, 1), (20, 33, 3, False, 0)]
    for m, n, k, transposed, at in cases:
        with ProcessGrid(comm, (grid_shapes(comm.size) * 2)[at]) as grid, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = with_singular_values(m, n, spectra(min(m, n), k)["flat"], "float64")
            A = DistMatrix.from_global(x.T if transposed else x, grid=grid, block=8)
            A = A.T if transposed else A
            report: Any = linalg.svd(A, k, oversample=4, steps=6)[0].report
            assert report.steps == 6 * (6 * (k + 4) < min(m, n))  # including a restart
            plan = linalg.plan(linalg.svd, A, k=k, oversample=4, iterations=report.steps or 1)
            assert report.counted == report.predicted == plan.traffic(comm.rank), str(report)
            assert plan.flops == report.flops


def with_values(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return a square matrix with these singular values, up to rounding, and random singular vectors."""
    n = len(values)
    return with_singular_values(n, n, values, dtype) @ np.linalg.qr(rng_matrix(n, n, dtype))[0]


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float64", marks=pytest.mark.on_ranks(1, 2)),
        pytest.param("complex64", marks=pytest.mark.on_ranks(1, 2, 4)),
    ],
)
def test_all_triplets_by_products(comm: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """|A - U S V^H|, |U^H U - I| and |V^H V - I| <= c n eps for square, tall, wide and singular A, also full_matrices.

    On several ranks each type has a third of the matrices.
    """
    monkeypatch.setattr("pdgemm.linalg.singular.svd.ON_ONE_RANK", 6)
    cases = {
        "square": rng_matrix(21, 21, dtype), "tall": rng_matrix(40, 17, dtype), "oblong": rng_matrix(20, 15, dtype),
        "wide": rng_matrix(14, 25, dtype), "rank 4": rng_matrix(22, 4, dtype) @ rng_matrix(4, 18, dtype),
        "zero": np.zeros((9, 9), dtype), "small": rng_matrix(12, 5, dtype),
        "ill": with_values(np.logspace(0, -15, 24), dtype), "graded": np.diag(np.logspace(0, -30, 16)).astype(dtype),
        "one large": with_values(np.r_[1.0, np.full(19, 1e-3)], dtype), "unitary": with_values(np.ones(20), dtype),
        "huge": rng_matrix(16, 16, dtype) * np.sqrt(np.finfo(dtype).max), "tiny": rng_matrix(16, 16, dtype) * 1e-30,
    }  # fmt: skip
    few = slice("df".index(np.finfo(dtype).dtype.char), None, 1 if comm.size == 1 or everything() else 3)
    for number, (name, a) in [*enumerate(cases.items())][few]:
        (m, n), shapes = a.shape, grid_shapes(comm.size)
        with ProcessGrid(comm, shapes[number % len(shapes)]) as grid:
            A = DistMatrix.from_global(a, grid=grid, block=[(4, 3), None, 5][number % 3])
            # for a square matrix `full_matrices` does not matter: True or False in turn
            for full in (False, True) if m != n or everything() else (number % 2 == 0,):
                U, s, Vh = linalg.svd(A, full_matrices=full)
                report: Any = U.report
                assert report.counted == report.predicted, name
                u, vh, k = U.allgather().astype("D"), Vh.allgather().astype("D"), min(m, n)
                assert (u.shape, vh.shape) == (((m, m), (n, n)) if full else ((m, k), (k, n)))
                bound = EPS * max(m, n) * np.finfo(dtype).eps
                size = np.linalg.norm(a, 2)
                assert np.linalg.norm((u[:, :k] * s) @ vh[:k] - a, 2) <= 2 * bound * size, name
                for x in (u.conj().T @ u, vh @ vh.conj().T):
                    assert np.linalg.norm(x - np.eye(len(x)), 2) <= bound, name
                exact = np.linalg.svd(a.astype("D"), compute_uv=False)
                assert np.abs(s - exact).max() <= bound * size and (np.diff(s) <= 0).all() and (s >= 0).all(), name
                assert len(set(comm.allgather(s.tobytes()))) == 1 and s.dtype == np.finfo(dtype).dtype


@pytest.mark.on_ranks(1, 2, 4)
def test_lapack_computes_few_large_values(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK, on the cores of the node, decomposes matrices with few large singular values, and products the others."""
    monkeypatch.setattr("pdgemm.linalg.singular.svd.ON_ONE_RANK", 6)
    monkeypatch.setattr("pdgemm.linalg.factors.operands.ON_NODE", 5)
    svd, calls = scipy.linalg.svd, []

    def counted(x: np.ndarray, **options: Any) -> Any:
        calls.append(x.shape)
        return svd(x, **options)

    monkeypatch.setattr(scipy.linalg, "svd", counted)
    for number, m in enumerate((24, 30, 24, 30, 26)):
        dtype, flat = DTYPES[(number + comm.size) % 4], number % 2 == 0
        values = np.zeros(24) if m == 26 else np.linspace(1, 0.5, 24) if flat else np.r_[1.0, np.full(23, 1e-3)]
        a = with_singular_values(m, 24, values, dtype)
        with ProcessGrid(comm, grid_shapes(comm.size)[number % len(grid_shapes(comm.size))]) as grid:
            A = DistMatrix.from_global(a, grid=grid, block=5, order="CF"[number // 2 % 2])
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                U, s, Vh = linalg.svd(A)
            expected = [(m, 24)] * ((comm.size == 1 or not flat) and grid.rank == grid.rank_map[0])
            assert all(comm.allgather(calls == expected))
            report: Any = U.report
            assert report.counted == report.predicted and np.array_equal(A.allgather(), a)
            u, vh, bound = U.allgather().astype("D"), Vh.allgather().astype("D"), EPS * m * np.finfo(dtype).eps
            errors = ((u * s) @ vh - a, u.conj().T @ u - np.eye(24), vh @ vh.conj().T - np.eye(24))
            assert max(np.linalg.norm(x, 2) for x in errors) <= bound
            assert np.abs(s - values).max() <= bound and np.abs(linalg.svdvals(A) - values).max() <= bound
            of_view = [x.allgather() if isinstance(x, DistMatrix) else x for x in linalg.svd(A.H)]
            assert np.abs((of_view[0] * of_view[1]) @ of_view[2] - a.conj().T).max() <= bound
            calls.clear()
            if comm.size > 1:
                plan = linalg.plan(linalg.svdvals, A)
                assert [x.algorithm for x in plan.schedules if isinstance(x, OneRankSchedule)] == ["svdvals"]


@every_grid
def test_values_through_a_band(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All singular values within n eps s_1 of LAPACK's; words and messages as planned."""
    monkeypatch.setattr("pdgemm.linalg.eigen.tridiagonal_form.BAND", 5)
    monkeypatch.setattr("pdgemm.linalg.singular.singular_values.SMALL", 10)
    shapes = grid_shapes(comm.size)
    for number, (m, n) in enumerate(((31, 31), (36, 30), (50, 14), (11, 10), (3, 3), (1, 1))):
        dtype = DTYPES[(number + comm.size) % 4]
        a = rng_matrix(m, n, dtype)
        with ProcessGrid(comm, shapes[number % len(shapes)]) as grid:
            A = DistMatrix.from_global(a, grid=grid, block=[4, None, 5][number % 3], order="CF"[number % 2])
            work = Work("values")
            s = by_reduction(work, A)
            report: Any = work.reported(A.copy(), 0).report
            assert report.counted == report.predicted and np.array_equal(A.allgather(), a)
        exact = np.linalg.svd(a.astype("D"), compute_uv=False)
        assert np.abs(s - exact).max() <= EPS * n * np.finfo(dtype).eps * exact[0], (m, n)
        assert len(set(comm.allgather(s.tobytes()))) == 1 and s.dtype == np.finfo(dtype).dtype
