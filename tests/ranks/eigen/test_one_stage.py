"""The direct reduction to tridiagonal form: its errors, any layouts, the same numbers on all ranks, words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factored import rng_matrix
from problems import DTYPES, grid_shapes
from tiers import every_grid, pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.linalg.eigen.one_stage import OneStage
from pdgemm.linalg.functions.iterations import Work
from pdgemm.schedules.panels.tridiagonal_schedule import LastPartSchedule

pytestmark = [pytest.mark.mpi, square_grid]

RATIO = 30  # LAPACK's tests of sytrd pass below 30, in units of n eps
SIZES = [0, 1, 2, 3, 33, 63, 64, 65, 128, 150]
LAYOUTS = [16, 64, None, (24, 40)]


@pytest.fixture(autouse=True)
def reduced_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdgemm.linalg.eigen.one_stage.REST", 0)


def hermitian(n: int, dtype: str) -> np.ndarray:
    x = rng_matrix(n, n, dtype)
    return (x + x.conj().T).astype(dtype)


def low_rank(n: int, dtype: str) -> np.ndarray:
    """Columns that are rounding errors after three reflections: ranks that round otherwise would not agree on v."""
    x = rng_matrix(n, 3, dtype)
    return (x @ x.conj().T).astype(dtype)


def diagonal(n: int, dtype: str) -> np.ndarray:
    return np.diag(np.arange(n)).astype(dtype)


def tiny(n: int, dtype: str) -> np.ndarray:
    """Elements whose squares underflow, and norms whose reciprocals overflow."""
    return (hermitian(n, dtype) * np.finfo(dtype).tiny).astype(dtype)


def uncoupled(n: int, dtype: str) -> np.ndarray:
    """Columns with elements near 1 on the diagonal, and elements below it whose norm has no reciprocal."""
    x, few = hermitian(n, dtype), np.arange(n) < 5
    x[few[:, None] | few] *= float(np.finfo(dtype).tiny) / 256
    x[few, few] = 1
    return x


def huge(n: int, dtype: str) -> np.ndarray:
    """Elements whose squares overflow."""
    return (hermitian(n, dtype) * float(np.finfo(dtype).max) ** 0.75).astype(dtype)


def graded(n: int, dtype: str) -> np.ndarray:
    scale = np.logspace(0, -12, n)
    return (hermitian(n, dtype) * np.sqrt(scale[:, None] * scale)).astype(dtype)


def checked(given: np.ndarray, comm: Any, shape: tuple[int, int], block: Any, order: Any, mover: str = "") -> None:
    """|A - Q T Q^H| and |Q^H Q - I| in units of n eps, eigenvalues, and the words of the report."""
    n, dtype = len(given), given.dtype
    lower = given.copy()
    lower[np.triu_indices(n, 1)] = np.nan  # only the lower triangle is read
    with ProcessGrid(comm, shape) as grid:
        H = DistMatrix.from_global(lower, grid=grid, block=block, order=order)
        reduction = OneStage.of(Work("reduction"), H)
        d, e, F, tau = reduction.d, reduction.e, reduction.F, reduction.tau
        assert np.array_equal(H.allgather(), lower, equal_nan=True)
        report: Any = F.report
        assert report.as_predicted and report.counted == report.predicted, str(report)
        assert report.algorithm == "tridiagonal" and (not mover or report.mover == mover)
        assert len({x.tobytes() for x in comm.allgather(np.concatenate([d, e, tau]))}) == 1
        work = Work("back")
        X = reduction.apply(work, DistMatrix.eye(n, grid=grid, block=9, dtype=np.finfo(dtype).dtype))
        report = work.reported(X, 0).report
        assert report.counted == report.predicted
        q = X.allgather()
    assert d.dtype == e.dtype == np.finfo(dtype).dtype and d.shape == (n,) and e.shape == tau.shape == (max(0, n - 1),)
    if n:
        wide = np.result_type(dtype, float)
        scale = float(abs(given).max()) or 1.0
        a, q, unit = given.astype(wide) / scale, q.astype(wide), n * np.finfo(dtype).eps
        t = (np.diag(d) + np.diag(e, -1) + np.diag(e, 1)).astype(float) / scale
        assert np.linalg.norm(q.conj().T @ q - np.eye(n), 1) <= RATIO * unit
        assert np.linalg.norm(a - q @ t @ q.conj().T, 1) <= RATIO * unit * np.linalg.norm(a, 1)
        assert abs(np.linalg.eigvalsh(t) - np.linalg.eigvalsh(a)).max() <= RATIO * unit * np.linalg.norm(a, 2)


@every_grid
@pytest.mark.parametrize(
    ("n", "dtype", "block", "order", "way"), third(pairs(SIZES, DTYPES, LAYOUTS, "CF", ("read", "sent")))
)
def test_reduction(comm: Any, n: int, dtype: str, block: Any, order: str, way: str, monkeypatch: Any) -> None:
    with ProcessGrid(comm) as grid:
        shares = grid.shares_memory
    monkeypatch.setattr(ProcessGrid, "shares_memory", shares and way == "read")
    for shape in grid_shapes(comm.size):
        checked(hermitian(n, dtype), comm, shape, block, order, "shared" if shares and way == "read" else "ring")


@every_grid
def test_many_blocks(comm: Any, monkeypatch: Any) -> None:
    """Blocks of 8 and panels of 3: many classes, panels that end inside and at the end of blocks, ragged ends."""
    monkeypatch.setattr("pdgemm.linalg.eigen.one_stage.BLOCK", 8)
    monkeypatch.setattr("pdgemm.linalg.eigen.one_stage.WIDTH", 3)
    for n, dtype in ((101, "float64"), (96, "complex128")):
        for shape in grid_shapes(comm.size):
            checked(hermitian(n, dtype), comm, shape, 8, "F")


@every_grid
def test_last_columns_on_one_rank(comm: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("pdgemm.linalg.eigen.one_stage.BLOCK", 8)
    monkeypatch.setattr("pdgemm.linalg.eigen.one_stage.REST", 40)
    for n, dtype in ((1, "float64"), (40, "float32"), (41, "complex128"), (49, "float64"), (101, "complex64")):
        for shape in grid_shapes(comm.size):
            checked(hermitian(n, dtype), comm, shape, (5, 12), "C")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("made", [low_rank, diagonal, tiny, uncoupled, huge, graded, lambda n, t: np.zeros((n, n), t)])
def test_any_elements(comm: Any, made: Any, dtype: str) -> None:
    for shape in grid_shapes(comm.size)[-1:]:
        checked(made(130, dtype), comm, shape, 64, "F")


@pytest.mark.on_ranks(4)
def test_idle_ranks(comm: Any) -> None:
    """Ranks that hold no elements have the same numbers."""
    given = hermitian(90, "float64")
    with ProcessGrid(comm, (1, 3), ranks=[3, 0, 2]) as grid:
        reduction = OneStage.of(Work("reduction"), DistMatrix.from_global(given, grid=grid, block=16))
        d, e, report = reduction.d, reduction.e, reduction.F.report
        assert report.as_predicted
        assert len({x.tobytes() for x in comm.allgather(np.concatenate([d, e, reduction.tau]))}) == 1
    t = np.diag(d) + np.diag(e, -1) + np.diag(e, 1)
    assert abs(np.linalg.eigvalsh(t) - np.linalg.eigvalsh(given)).max() <= 1e-11


def test_views(comm: Any) -> None:
    large = hermitian(200, "complex128")
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(large, grid=grid, block=64)
        for view, seen in (
            (A[30:150, 30:150], large[30:150, 30:150]),
            (A.T, large.T),
            (A.H, large),
            (A[64:, 64:], large[64:, 64:]),
        ):
            made = OneStage.of(Work("reduction"), view)
            t = np.diag(made.d) + np.diag(made.e, -1) + np.diag(made.e, 1)
            assert abs(np.linalg.eigvalsh(t) - np.linalg.eigvalsh(seen)).max() <= 1e-10
        assert np.array_equal(A.allgather(), large)


@every_grid
@pytest.mark.parametrize(("rest", "left"), [(0, 0), (50, 22), (150, 150)])
def test_plan(comm: Any, rest: int, left: int, monkeypatch: Any) -> None:
    """A planned program has the words of the run, and its simulation the messages."""
    monkeypatch.setattr("pdgemm.linalg.eigen.one_stage.REST", rest)

    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            H = DistMatrix.from_global(hermitian(150, "float64"), grid=grid, block=32)

            def factors(A: Any) -> Any:
                work = Work("reduction")
                return work.reported(OneStage.of(work, A).F, 0)

            plan, report = linalg.plan(factors, H), factors(H).report
            counted = report.counted
            assert plan.traffic(comm.rank) == counted, f"{plan}\n{report}"
            run = plan.simulate().traffic(comm.rank)
            assert run.messages_received == counted.messages_received and run.messages_sent == counted.messages_sent
            assert run.words_received == counted.words_received - counted.words_read
            assert plan.flops == report.flops and 0 <= 4 * 150**3 // 3 - plan.flops <= 1
            last = next((x for x in plan.schedules if isinstance(x, LastPartSchedule)), None)
            if last is not None:  # LAPACK's part is planned, and what it needs on one rank
                assert last.n == left and last.flops == 4 * left**3 // 3 and last.extra_bytes(None) == 8 * 64 * left
                assert sum(last.extra_bytes(rank) > 0 for rank in range(comm.size)) == 1
                assert report.as_predicted and plan.seconds > 0
            assert (last is None) == (not left)
