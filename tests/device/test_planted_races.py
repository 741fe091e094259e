"""Each synchronisation of the device's streams removed in turn: the fake device tells, or this test fails."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
from device_ways import WAYS
from fake_device import SCHEDULES, fake_device
from mpi4py import MPI
from problems import TOLERANCE, accepted, gemm_error
from removed_synchronisations import REMOVED, Site, without
from tiers import everything, square_grid

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.planning import planner, problem
from pdgemm.schedules.exchanges import exchange
from pdgemm.schedules.products import reduction

pytestmark = [pytest.mark.mpi, square_grid]

FOR_OTHERS = {  # before another rank reads this memory, or writes it: the clock decides whether that is too early
    ("synchronize_copies", "packed_exchange.py"),
    ("synchronize_copies", "prepared.py"),
    ("finish", "layer_sums.py"),
}
STORED = Path(__file__).with_name("races.json")  # by site, the runs that show that it is needed
Run = tuple[str, str]  # problem and schedule


def for_others(site: Site) -> bool:
    return tuple(site.split()[:2]) in FOR_OTHERS


def outcome(comm: Any, way: str, schedule: str, case: Any, seed: str) -> tuple[bool, bool]:
    """Of a product of matrices that the device has only begun to fill: was a race told, was the result wrong?"""
    (reach, mover), (name, shape, layers) = WAYS[way], case
    with (
        fake_device(schedule, reach=reach) as device,
        ProcessGrid(comm, shape if prod(shape) == comm.size else None) as grid,
    ):
        draw = Random(seed).choice
        orders, block, dtype = draw(["CCC", "FCF", "CFF"]), draw([None, 3]), draw(["float64", "float32"])  # of C
        more = draw([0, 1, 2])  # rows above A
        if name == "cannon":  # a first block that has to be packed
            orders, block, more, dtype = "FCF", None, 1, "float64"
        made: dict[str, Any] = {"grid": grid, "block": block, "kind": "normal", "device": "fake"}
        sides = ((9 + more, 41), (41, 14), (9, 14))
        first, A, B, C = (
            DistMatrix.random(x, seed=s, order=order, dtype=kind, **made)
            for s, (x, order, kind) in enumerate(zip((sides[0], *sides), orders[0] + orders, ["float64"] * 3 + [dtype]))
        )
        a, b, c = first.allgather()[more:], B.allgather(), C.allgather()
        CONVERT(A.stored, first.stored)  # not waited for
        if draw([True, False, False]):
            A = DistMatrix(A.stored, grid, A.distribution, A.order, shared=False)
        A, beta = A[more:], draw([0, 1])
        options = {"algorithm": name, "shape": shape, "layers": layers, "mover": mover, "panel_width": 5}
        lookahead = 1 if name == "inner" else draw([0, 1, 2])  # one window is reduced while the next is multiplied
        pdgemm(1, A, B, beta, C, lookahead=lookahead, **options)
        # as it is now, not when it is ready
        result = DistMatrix(C.stored.x.copy(C.order), grid, C.distribution, C.order).allgather()
        wrong = not gemm_error(result, 1, a, b, beta, c) <= TOLERANCE
        told, wrong = (any(comm.allgather(x)) for x in (bool(device.races), wrong))
    return told, wrong


def problems(size: int) -> dict[str, tuple[Any, str]]:
    """What can be forced on so many ranks, in each way of moving panels; by name."""
    return {
        f"{name} {pr}x{pc}x{layers} {way}": ((name, (pr, pc), layers), way)
        for (name, (pr, pc), layers), way in itertools.product(accepted(size), WAYS)
    }


class Search:
    """The sites that some problems come by, and for each the runs that show that it is needed."""

    def __init__(self, comm: Any, names: Sequence[str]) -> None:
        self.comm, self.problems = comm, problems(comm.size)
        self.needed_by: dict[Site, list[str]] = {}  # problems that come by each
        for name in names:
            seen = set[Site]()
            with without(None, seen):
                for schedule in SCHEDULES:
                    assert self.outcome(name, schedule) == (False, False), f"{name}, {schedule}"
            for site in sorted(set().union(*comm.allgather(seen))):
                self.needed_by.setdefault(site, []).append(name)

    def outcome(self, name: str, schedule: str) -> tuple[bool, bool]:
        case, way = self.problems[name]
        return outcome(self.comm, way, schedule, case, name)

    def shown(self, site: Site, first: Iterable[Run]) -> list[Run]:
        """Runs in which it is missed: a race is told, and a result is wrong.   first : runs to begin with."""
        others = itertools.product(self.needed_by[site], SCHEDULES)
        told = wrong = False
        runs = list[Run]()
        for name, schedule in dict.fromkeys([*first, *others]):
            with without(site, set()):
                race, error = self.outcome(name, schedule)
            if (race and not told) or (error and not wrong):
                runs.append((name, schedule))
            told, wrong = told or race, wrong or error
            if told and (wrong or for_others(site)):
                break
        assert told, f"{site} is not missed"
        assert wrong or for_others(site), f"{site} changes no result"
        return runs


@contextmanager
def several_messages() -> Iterator[None]:
    """Where large matrices are sent in several: those that are redistributed, and the windows of partial sums."""
    plans = exchange.plan_exchange, planner.best_plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "DEVICE_BYTES", 64)
        patch.setattr(problem, "REDUCED_BYTES", 64), patch.setattr(problem, "REDUCED_ROWS", 4)
        patch.setattr(reduction, "LEAST_ROWS", 1)
        for known in plans:
            known.cache_clear()
        yield
    for known in plans:
        known.cache_clear()


@pytest.mark.mpi(min_size=4)
@pytest.mark.timeout(600)
def test_each_synchronisation_is_needed(comm: Any) -> None:
    """By default in the problems that showed it last; with --all, and for lines that are new, in all of them."""
    if comm.size > 4:
        pytest.skip("4 ranks need all of them")
    shown = {site: [(name, how) for name, how in runs] for site, runs in json.loads(STORED.read_text()).items()}
    known = problems(comm.size)
    names = dict.fromkeys(name for runs in shown.values() for name, _ in runs if name in known)
    with several_messages():
        search = Search(comm, list(known if everything() else names))
        assert {site.split()[0] for site in search.needed_by} == set(REMOVED)
        for site in sorted(search.needed_by):
            search.shown(site, [run for run in shown.get(site, []) if run[0] in search.needed_by[site]])


def store() -> None:
    """Search all problems, and store few that show all.

    PYTHONPATH=tests/helpers mpiexec -n 4 python -m mpi4py tests/device/test_planted_races.py
    """
    comm, found = MPI.COMM_WORLD, dict[Site, list[Run]]()
    with several_messages():
        search = Search(comm, list(problems(comm.size)))
        for site in sorted(search.needed_by, key=lambda site: len(search.needed_by[site])):
            chosen = {run for runs in found.values() for run in runs if run[0] in search.needed_by[site]}
            found[site] = search.shown(site, sorted(chosen))
    if comm.rank == 0:
        lines = (f"{json.dumps(site)}: {json.dumps(found[site])}" for site in sorted(found))
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    store()
