"""Reductions to tridiagonal form, directly and through a band: errors, layouts, words, equal T on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factored import rng_matrix
from problems import DTYPES, grid_shapes
from tiers import every_grid, in_turn, pairs, third

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.linalg.eigen.tridiagonal_form import OneStage, TwoStages
from pdgemm.linalg.work import Work
from pdgemm.schedules.panels.panel_schedule import OneRankSchedule

pytestmark = pytest.mark.mpi

RATIO = 30  # LAPACK's tests of sytrd pass below 30, in units of n eps
SIZES = [0, 1, 2, 33, 64, 65, 100]
LAYOUTS = [16, 64, None, (24, 40)]


@pytest.fixture(autouse=True)
def reduced_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small limits, so that small matrices have several panels, and several tasks in a sweep of the band."""
    monkeypatch.setattr("pdgemm.linalg.eigen.tridiagonal_form.REST", 0)
    monkeypatch.setattr("pdgemm.linalg.eigen.tridiagonal_form.BAND", 8)


def hermitian(n: int, dtype: str) -> np.ndarray:
    x = rng_matrix(n, n, dtype)
    return (x + x.conj().T).astype(dtype)


def uncoupled(n: int, dtype: str) -> np.ndarray:
    """Return a matrix with 1 on the first diagonal elements, and tiny norms below, whose reciprocals overflow."""
    x, few = hermitian(n, dtype), np.arange(n) < 5
    x[few[:, None] | few] *= float(np.finfo(dtype).tiny) / 256
    x[few, few] = 1
    return x


def scaled(n: int, dtype: str, scales: Any) -> np.ndarray:
    return (hermitian(n, dtype) * scales).astype(dtype)


MATRICES: dict[str, Any] = {
    # after three reflections only rounding errors remain: v must be equal on all ranks nevertheless
    "low rank": lambda n, t: rng_matrix(n, 3, t) @ rng_matrix(n, 3, t).conj().T,
    "diagonal": lambda n, t: np.diag(np.arange(n)).astype(t), "zero": lambda n, t: np.zeros((n, n), t),
    # tiny: squares underflow, reciprocals of norms overflow; huge: squares overflow
    "tiny": lambda n, t: scaled(n, t, np.finfo(t).tiny),
    "huge": lambda n, t: scaled(n, t, float(np.finfo(t).max) ** 0.75),
    "graded": lambda n, t: scaled(n, t, np.sqrt(np.outer(np.logspace(0, -12, n), np.logspace(0, -12, n)))),
    "uncoupled": uncoupled,
}  # fmt: skip


def checked(
    given: np.ndarray, comm: Any, shape: Any, block: Any, order: Any, stages: Any = OneStage, mover: str = ""
) -> None:
    """Check |A - Q T Q^H| and |Q^H Q - I| in units of n eps, eigenvalues, and counted words."""
    n, dtype = len(given), given.dtype
    lower = np.where(np.tri(n, dtype=bool), given, np.nan).astype(dtype)  # only this triangle is read
    with ProcessGrid(comm, shape) as grid:
        H = DistMatrix.from_global(lower, grid=grid, block=block, order=order)
        work = Work("reduction")
        reduction = stages.of(work, H)
        d, e = reduction.d, reduction.e
        assert np.array_equal(H.allgather(), lower, equal_nan=True)
        assert len({x.tobytes() for x in comm.allgather(np.concatenate([d, e]))}) == 1
        if stages is OneStage:
            report: Any = reduction.F.report
            assert report.as_predicted and report.algorithm == "tridiagonal" and mover in ("", report.mover)
            assert len({x.tobytes() for x in comm.allgather(reduction.tau)}) == 1 and reduction.tau.shape == e.shape
        X = reduction.apply(work, DistMatrix.eye(n, grid=grid, block=9, dtype=np.finfo(dtype).dtype))
        report = work.reported(X, 0).report
        assert report.counted == report.predicted, str(report)
        q = X.allgather()
    assert d.dtype == e.dtype == np.finfo(dtype).dtype and d.shape == (n,) and e.shape == (max(0, n - 1),)
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
        checked(hermitian(n, dtype), comm, shape, block, order, mover="shared" if shares and way == "read" else "ring")


@every_grid
def test_many_blocks(comm: Any, monkeypatch: Any) -> None:
    """Blocks of 8 and panels of 3: panels end inside blocks or with them, and the last block is ragged."""
    monkeypatch.setattr("pdgemm.linalg.eigen.tridiagonal_form.BLOCK", 8)
    monkeypatch.setattr("pdgemm.linalg.eigen.tridiagonal_form.WIDTH", 3)
    for n, dtype in ((61, "float64"), (56, "complex128")):
        for shape in grid_shapes(comm.size):
            checked(hermitian(n, dtype), comm, shape, 8, "F")


@every_grid
def test_last_columns_on_one_rank(comm: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("pdgemm.linalg.eigen.tridiagonal_form.BLOCK", 8)
    monkeypatch.setattr("pdgemm.linalg.eigen.tridiagonal_form.REST", 40)
    for n, dtype in ((1, "float64"), (40, "float32"), (41, "complex128"), (69, "complex64")):
        for shape in grid_shapes(comm.size):
            checked(hermitian(n, dtype), comm, shape, (5, 12), "C")


@pytest.mark.on_ranks(1, 2)
@pytest.mark.parametrize(("kind", "dtype"), in_turn(MATRICES, DTYPES))
def test_any_elements(comm: Any, kind: str, dtype: str) -> None:
    checked(MATRICES[kind](100, dtype), comm, grid_shapes(comm.size)[-1], 64, "F")


@every_grid
@pytest.mark.parametrize(("rest", "left"), [(0, 0), (50, 22), (150, 150)])
def test_plan(comm: Any, rest: int, left: int, monkeypatch: Any) -> None:
    """The plan has the words and flops of the run, and its simulation has the messages of the run."""
    monkeypatch.setattr("pdgemm.linalg.eigen.tridiagonal_form.REST", rest)

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
            last = next((x for x in plan.schedules if isinstance(x, OneRankSchedule)), None)
            if last is not None:  # the part of LAPACK on one rank
                assert last.A.distribution.shape == (left, left) and last.flops == 4 * left**3 // 3
                assert report.as_predicted and plan.seconds > 0
            assert (last is None) == (not left)


@every_grid
@pytest.mark.parametrize("n", [1, 7, 8, 9, 17, 59])
def test_two_stages(comm: Any, n: int) -> None:
    for turn, shape in enumerate(grid_shapes(comm.size)):
        checked(
            hermitian(n, DTYPES[(turn + n) % 4]), comm, shape, [8, (5, 3), None][turn % 3], "CF"[turn % 2], TwoStages
        )
