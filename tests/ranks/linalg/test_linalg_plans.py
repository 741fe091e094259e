"""Plans of factorisations and solves: planned figures equal counted ones, for each step and in total."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from factored import positive_definite, rng_matrix
from problems import grid_shapes
from tiers import everything

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm
from pdgemm.errors import ArgumentError, DTypeError, GridError
from pdgemm.instrument.recorder import Traffic
from pdgemm.instrument.run_report import vectors_so_far
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.published.published_factorisations import factorisation_plan
from pdgemm.schedules.collectives.vectors import ToAllRanks
from pdgemm.schedules.mover_registry import RING

pytestmark = pytest.mark.mpi


def same(plan: Any, report: Any, rank: int) -> None:
    """Check a plan against a report: words and messages of this rank, flops of all ranks, memory."""
    assert report.counted == report.predicted, str(report)
    assert plan.traffic(rank) == report.counted, f"{plan}\n{report}"
    run, counted = plan.simulate(), report.counted
    assert run.computed.max() <= run.seconds * (1 + 1e-9)
    sent = replace(counted, words_received=counted.words_received - counted.words_read, words_read=0)
    assert run.traffic(rank) == sent
    assert plan.flops == report.flops, f"{plan}\n{report}"
    if hasattr(report, "extra_bytes"):
        assert report.as_predicted and plan.extra_bytes(rank) == report.extra_bytes


@pytest.mark.parametrize(
    ("at", "block", "dtype"),
    [(0, None, "complex64"), pytest.param(1, (16, 24), "d", marks=pytest.mark.on_ranks(2, 4))],
)
def test_planned_figures_equal_counted_ones(comm: Any, at: int, block: Any, dtype: str) -> None:
    S, b, t = positive_definite(80, dtype), rng_matrix(80, 31, dtype), rng_matrix(90, 30, dtype)
    for shape in grid_shapes(comm.size)[at : at + 1]:
        with ProcessGrid(comm, shape) as grid:
            A, B, T = (DistMatrix.from_global(x, grid=grid, block=block) for x in (S, b, t))
            plan, L = linalg.plan(linalg.cholesky, A), linalg.cholesky(A)
            same(plan, L.report, comm.rank)
            assert plan.seconds > 0 and "cholesky" in str(plan) and plan == linalg.plan("cholesky", A)
            assert len(set(comm.allgather(str(plan)))) == 1
            ways: list[dict[str, Any]] = [{"lower": True}, {"lower": True, "trans": "C"}, {"lower": True, "side": "R"}]
            for how in ways:
                X = B.T if "side" in how else B
                for solve in (linalg.solve_triangular, linalg.trmm):
                    solved: Any = solve(L, X, **how)
                    same(linalg.plan(solve, L, X, **how), solved.report, comm.rank)
            factors = linalg.lu_factor(A)
            for function, *operands, how in (
                (linalg.cho_solve, L, B, {}),
                (linalg.lu_solve, factors, B, {}),
                (linalg.lu_solve, factors, B, {"trans": "T"}),
                (linalg.solve, A, B, {"assume_a": "pos"}),
                (linalg.solve, A, B, {"assume_a": "diagonal"}),
                (linalg.solve, A, B, {"assume_a": "upper triangular", "transposed": True}),
                (linalg.inv, A, {"assume_a": "pos"}),
                (linalg.inv_triangular, L, {"lower": True}),
                (linalg.householder_qr, T, {}),
                (linalg.householder_qr, A, {"want_q": False}),
                (linalg.qr, T, {"method": "tsqr"}),
                (linalg.qr, T, {}),
                (linalg.qr, T.T, {"method": "cholesky"}),
                (linalg.qr, A, {}),
                (linalg.qr, A[:50], {"method": "householder"}),
                (linalg.lstsq, T, DistMatrix.from_global(t[:, :3].copy(), grid=grid), {}),
                (linalg.lstsq, T.H, B[:30], {}),
                (linalg.svd, T, {}),
                (linalg.svd, T.T, {}),
                (linalg.svd, T, {"k": 5}),
            ):  # fmt: skip
                planned, made = linalg.plan(function, *operands, **how), function(*operands, **how)
                result = made if isinstance(made, DistMatrix) else [x for x in made if isinstance(x, DistMatrix)][-1]
                same(planned, result.report or made[0].report, comm.rank)
            of_vector = [stage.algorithm for _, stage in linalg.plan(linalg.cho_solve, L, b[:, 0]).stages]
            assert of_vector[-2:] == ["trsm", "to all ranks"] or (comm.size == 1 and of_vector[-1] == "trsm")


def test_counts_that_depend_on_elements(comm: Any) -> None:
    """Corrections of `solve` and row exchanges of LU depend on elements; all other counts are as planned."""
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(np.triu(rng_matrix(80, 80, "float64")) + 9 * np.eye(80), grid=grid, block=16)
        B = DistMatrix.random((80, 4), grid=grid, seed=3)
        for solve in (linalg.solve(A, B), linalg.solve(A, B, refine=True), linalg.inv(A)):
            report: Any = solve.report
            parts = [x.counted - x.vectors.counted for x in report.steps]
            assert report.as_predicted and report.counted - report.vectors.counted == sum(parts, Traffic())
            assert next(x.algorithm for x in report.steps if hasattr(x, "algorithm")) == "lu"
        plans = linalg.plan(linalg.solve, A, B), linalg.plan(linalg.solve, A, B, refine=True), linalg.plan("inv", A)
        assert all(plan.stages[0][1].algorithm == "lu" or comm.size > 1 for plan in plans)
        assert plans[0].flops == linalg.solve(A, B).report.flops
        corrected: Any = linalg.solve(A, B, refine=True).report
        number = int(corrected.what.split("refined ")[1].split()[0])
        assert number in (1, 2, 3)
        assert linalg.plan(linalg.solve, A, B, refine=True, iterations=number).flops == corrected.flops


SIZE = 48
_FUNCTIONS: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
    ("eigh", ("halves",), {}),
    ("eigh", ("halves",), {"k": 2, "lower": False, "tolerance": 0.05}),
    ("expm", ("general.T",), {}),
    ("sqrtm", ("definite",), {"assume_a": "pos"}),
    ("matrix_sign", ("halves",), {"assume_a": "her"}),
    ("polar", ("halves",), {}),
    ("newton_schulz", ("wide",), {"steps": 3}),
    ("matrix_power", ("general", 5), {}),
    ("svd", ("general",), {"k": 2, "oversample": 2, "tolerance": 0.1}),
    ("pinv", ("tall",), {}),
    ("herk", (1.0, "general"), {}),
    ("her2k", (1.0, "wide", "wide"), {"uplo": "U"}),
    ("gram", ("tall",), {}),
    ("kron", ("wide", "tall"), {}),
)


def test_functions_of_matrices(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the plan has the number of steps of the run, words, messages and flops equal the planned ones."""
    monkeypatch.setattr("pdgemm.linalg.eigen.division.SMALL", SIZE // 2)
    monkeypatch.setattr("pdgemm.linalg.eigen.eigh._method", lambda *_: "division")
    q, noise = np.linalg.qr(rng_matrix(SIZE, SIZE, "d"))[0], np.linspace(2, 2.1, SIZE)
    halves = noise * np.where(np.arange(SIZE) < SIZE // 2, -1, 1)
    elements: dict[str, Any] = {
        "halves": (q * halves) @ q.T,
        "definite": (q * noise) @ q.T,
        "general": rng_matrix(SIZE, SIZE, "d") / SIZE,
        "wide": rng_matrix(21, SIZE, "d"),
        "tall": rng_matrix(SIZE, 9, "d"),
    }
    elements["general.T"] = elements["general"].T
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            for name, operands, how in _FUNCTIONS if everything() or shape[0] == 1 else _FUNCTIONS[:1]:
                arguments = [
                    DistMatrix.from_global(elements[x], grid=grid, block=12) if isinstance(x, str) else x
                    for x in operands
                ]
                made: Any = getattr(linalg, name)(*arguments, **how)
                results = [made] if isinstance(made, DistMatrix) else [x for x in made if isinstance(x, DistMatrix)]
                report: Any = next(x.report for x in results if x.report)
                counted, plans = (report.counted, getattr(report, "flops", 0)), list[Any]()
                for steps in (None, *range(1, 13)):
                    plans.append(linalg.plan(name, *arguments, iterations=steps, **how))
                    if all(comm.allgather((plans[-1].traffic(comm.rank), plans[-1].flops) == counted)):
                        break
                else:
                    known = [(x.traffic(comm.rank), x.flops) for x in plans]
                    raise AssertionError(f"{name} {how} on {grid}: {report}, {counted}, not in {known}")
                assert report.counted == report.predicted
                products = sum(isinstance(stage, ProductPlan) for _, stage in plans[-1].stages)
                assert products == getattr(report, "products", products)


def test_functions_without_a_report(comm: Any) -> None:
    """Norms, condition numbers, determinants and functions of users are planned; their reductions are counted."""

    def of_vectors(plan: Any) -> Any:
        """Return the planned traffic of this rank in reductions."""
        stages = [stage for _, stage in plan.stages if isinstance(stage, ToAllRanks)]
        return sum((stage.traffic(comm.rank) for stage in stages), Traffic())

    with ProcessGrid(comm) as grid:
        A, x = DistMatrix.random((60, 60), grid=grid, seed=1), DistMatrix.random((60, 3), grid=grid, seed=2)
        factors, one = linalg.plan(linalg.lu_factor, A), linalg.plan(linalg.cond, A, 1)
        for name in ("det", "slogdet"):
            stages = linalg.plan(name, A).stages  # sizes of rows and columns, LU, condition
            first = stages.index(factors.stages[0])
            assert stages[first : first + len(factors.stages)] == factors.stages
        for function, *arguments in (
            *((linalg.norm, A, kind) for kind in ("fro", 1, np.inf, "max")),
            (linalg.cond, A, 1),
            (linalg.det, A),
            (linalg.svdvals, x),
            (lambda A: A.trace(), A),
            (lambda A: A.sum(axis=0) * A.T.diagonal(3).sum(), A),
            (lambda A: A.allgather(), A[3:50, 1:]),
            (lambda A: [linalg.norm(A, 2), A.argmax(axis=1)], A[:7]),
        ):
            before, _ = vectors_so_far(), function(*arguments)
            counted = vectors_so_far() - before
            plans = [linalg.plan(function, *arguments, iterations=steps) for steps in range(1, 8)]
            assert counted.counted == counted.predicted, f"{function}: {counted}"
            assert counted.counted in map(of_vectors, plans), f"{function}: {counted}\n{plans[-1]}"
            assert vectors_so_far() - before == counted  # a plan counts no messages
            assert counted.counted.words_received > 0 or comm.size == 1 or function is linalg.svdvals, function
        assert len(one.stages) > len(factors.stages) and one.flops > factors.flops
        two = [linalg.plan(linalg.cond, A, iterations=steps) for steps in (3, 4)]
        assert len(two[1].stages) > len(two[0].stages) > len(factors.stages)
        assert not linalg.plan(np.sin, A).stages
        values = linalg.plan(linalg.svdvals, x)
        rank = linalg.plan(linalg.matrix_rank, x)  # it also reduces the largest element
        assert len(rank.stages) == len(values.stages) + (comm.size > 1) and rank.stages[-1] == values.stages[-1]
        assert values.stages[-1][1].algorithm == "svd"
        assert len(linalg.plan(lambda A, x: pdgemm(2, A, pdgemm(1, A, x), -1, x.copy()), A, x).stages) == 2
        with pytest.raises(ArgumentError, match="or reads elements, cannot be planned"):
            linalg.plan(lambda A: A.grid.comm.Send(A.local, 0), A)
        for other in (lambda X: A @ X, lambda X: X.T @ A, lambda X: X.redistribute(A[:, :3]), lambda X: A[:, :3] + X):
            with pytest.raises(GridError, match="pass all of them to plan"):
                linalg.plan(other, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a plan does not warn of elements
            for planned in (
                linalg.plan("svd", A, k=2, oversample=2, tolerance=0.1),
                linalg.plan("solve", A, x),
                linalg.plan("inv", A),
            ):
                assert planned.stages
        assert linalg.plan(lambda X: X.allgather(), DistMatrix.zeros((0, 1 << 40), grid=grid)).stages == ()


def test_published_factorisations_are_compared_with_these_plans(comm: Any) -> None:
    """`pdgemm plan --check` makes the plans of `linalg.plan` without MPI, with messages in place of reads."""
    with ProcessGrid(comm) as grid:
        A = DistMatrix.eye(120, grid=grid, block=16)
        for kind, function in (("cholesky", linalg.cholesky), ("lu", linalg.lu_factor)):
            (_, stage), (_, other) = (
                linalg.plan(function, A).stages[-1],
                factorisation_plan(kind, 120, grid.shape, 16).stages[0],
            )
            assert [replace(x, width=16, mover=RING.name) for x in (stage, other)] == [other, other]


class Shifted:
    """A callable object, with another address on each rank."""

    def __call__(self, A: Any) -> Any:
        return self.of(A)

    def of(self, A: Any) -> Any:
        return linalg.cholesky(A)


def test_functions_with_addresses_and_arguments(comm: Any) -> None:
    """Ranks compare the planned function and its arguments, not their addresses in memory."""

    def applied(function: Any, A: Any) -> Any:
        return function(A)

    _ = [object() for _ in range(1000 * comm.rank)]
    with ProcessGrid(comm) as grid:
        A, B = DistMatrix.eye(40, grid=grid), DistMatrix.zeros((40, 3), grid=grid)
        plan, solved = linalg.plan("cholesky", A), linalg.plan("solve", A, B, assume_a="pos")
        assert plan.stages and solved.stages
        for function in (Shifted(), Shifted().of, lambda X: linalg.cholesky(X), partial(linalg.cholesky)):
            assert linalg.plan(function, A) == linalg.plan(applied, function, A) == plan
            assert linalg.plan(applied, function=function, A=A) == plan
        assert linalg.plan(partial(linalg.solve, assume_a="pos"), A, B) == solved
        assert linalg.plan(partial(partial(linalg.solve, A), assume_a="gen"), B, assume_a="pos") == solved
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="different arguments: .*linalg.plan, \\[\\('assume_a', 'gen'\\)"):
                linalg.plan(partial(linalg.solve, assume_a="pos" if comm.rank else "gen"), A, B)


def test_bad_arguments(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A, call = DistMatrix.eye(4, grid=grid), linalg.plan
        for wrong, message in (
            ((3, A), "plan takes a function of matrices, or one of .*; got 3"),
            (("cholesk", A), "or one of the names LU, cho_factor, .*; got 'cholesk'"),
            (("cholesky", A, A), "takes the arguments of cholesky, A, lower, overwrite_a: too many positional"),
            ((linalg.trmm, A), "missing a required argument: 'B'"),
            ((linalg.svd, A, 9), "k = 9 is more than the 4 singular values"),
        ):
            with pytest.raises(ArgumentError, match=message):
                call(*wrong)
        with pytest.raises(ArgumentError, match="unexpected keyword argument 'lowr'"):
            call(linalg.cholesky, A, lowr=True)
        with pytest.raises(DTypeError, match="factors must be an LU, as lu_factor returns it"):
            call(linalg.lu_solve, A, A)
