"""Each synchronisation of panel algorithms on a device removed in turn: the fake device tells, or this test fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_ways import WAYS_OF_PANELS
from factored import norm, positive_definite, rng_matrix
from fake_device import SCHEDULES, fake_device
from removed_synchronisations import Site, without
from tiers import everything, square_grid

import pdgemm
from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LinAlgError

pytestmark = [pytest.mark.mpi, square_grid]

FILES = {x.name for x in Path(pdgemm.__file__).parent.glob("*/panels/*.py")}
SHARED = {"gathered_panel.py"}  # by LU and reflections, each of which needs what is synchronised there
Problem = tuple[str, tuple[int, int], str, str]  # a function, a grid, a way of panels, an order
DEFINITE = ("lu without exchanges", "cholesky", "triangles")  # of such matrices; LU exchanges rows of others


def solved(linalg: Any, A: Any, B: Any) -> Any:
    return linalg.lu_solve(linalg.lu_factor(A), B)


def factored(linalg: Any, A: Any, B: Any) -> Any:
    return linalg.cho_solve(linalg.cholesky(A), B)


def reflected(linalg: Any, A: Any, B: Any) -> Any:
    Q, R = linalg.householder_qr(A)
    return linalg.solve_triangular(R, Q.H @ B)


def by_rows(linalg: Any, A: Any, B: Any) -> Any:
    Q, R = linalg.qr(A, method="cholesky")
    return linalg.solve_triangular(R, Q.H @ B)


def multiplied(linalg: Any, A: Any, B: Any) -> Any:
    """L^-1 of the conjugate of what L is, times what it was."""
    L = linalg.cholesky(A)
    return linalg.solve_triangular(L.H.T, linalg.trmm(L.H.T, B, lower=True), lower=True)


FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "lu": solved,
    "lu without exchanges": solved,
    "cholesky": factored,
    "reflections": reflected,
    "rows": by_rows,
    "triangles": multiplied,
}
FEW = [*itertools.product(FUNCTIONS, ((1, 1), (2, 2), (4, 1)), ("read", "sent"), "C")]
ALL = [*FEW, *itertools.product(FUNCTIONS, ((1, 1), (1, 4), (2, 2), (4, 1)), WAYS_OF_PANELS, "F")]


def outcome(comm: Any, problem: Problem, schedule: str) -> bool:
    """Was a race told, or the result wrong?"""
    function, shape, way, order = problem
    a, b = positive_definite(22, "complex64"), rng_matrix(22, 7, "complex64")
    a = a if function in DEFINITE else a[::-1].copy()
    with (
        fake_device(schedule, reach=WAYS_OF_PANELS[way]) as device,
        ProcessGrid(comm, shape, ranks=range(prod(shape))) as grid,
    ):
        A = DistMatrix.from_global(a, grid=grid, block=(3, 4), order=order, device="fake")
        B = DistMatrix.from_global(b, grid=grid, block=4, device="fake")
        try:
            x = FUNCTIONS[function](linalg, A, B).allgather()
        except LinAlgError:  # of what was factored too early
            wrong = True
        else:
            expected = b if function == "triangles" else np.linalg.solve(a.astype(complex), b)
            wrong = not norm(x - expected) <= 1e-3 * norm(expected)
        return any(comm.allgather(bool(device.races) or wrong))


@pytest.mark.mpi(min_size=4)
@pytest.mark.timeout(600)
def test_each_synchronisation_of_panels_is_needed(comm: Any) -> None:
    if comm.size > 4:
        pytest.skip("4 ranks need all of them")
    passed_by: dict[tuple[Site, str], list[Problem]] = {}
    for number, problem in enumerate(ALL if everything() else FEW):
        seen, schedules = set[Site](), [*SCHEDULES]
        with without(None, seen):
            for schedule in schedules if everything() else schedules[number % 3 :][:1]:
                assert not outcome(comm, problem, schedule), (problem, schedule)
        for site in set().union(*comm.allgather(seen)):
            if (file := site.split()[1]) in FILES:
                user = problem[0].split()[0] if file in SHARED else ""
                passed_by.setdefault((site, user), []).append(problem)
    assert len(passed_by) >= 25
    missed = list[str]()
    for site, user in sorted(passed_by):
        runs = itertools.product(passed_by[site, user], SCHEDULES)
        for problem, schedule in runs:
            with without(site, set()):
                if outcome(comm, problem, schedule):
                    break
        else:
            missed.append(f"{site} {user}")
    assert not missed, "\n".join(missed)
