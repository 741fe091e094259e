"""Remove each synchronisation of the device's streams in turn: the fake device has to report a race."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
from device_ways import WAYS
from fake_device import fake_device
from mpi4py import MPI
from problems import TOLERANCE, accepted, gemm_error
from removed_synchronisations import REMOVED, Search, Site
from tiers import everything, square_grid

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.planning import planner, problem
from pdgemm.schedules.exchanges import exchange
from pdgemm.schedules.products import reduction

pytestmark = [pytest.mark.mpi, square_grid]

FOR_OTHERS = {  # they protect accesses by other ranks: whether results are wrong without them depends on timing
    ("synchronize_copies", "packed_exchange.py"),
    ("synchronize_copies", "prepared.py"),
    ("finish", "layer_sums.py"),
}


def outcome(comm: Any, way: str, schedule: str, case: Any, seed: str) -> tuple[bool, bool]:
    """Multiply matrices that the device is still filling; return whether a race was reported, and the result wrong."""
    (reach, mover), (name, shape, layers) = WAYS[way], case
    with (
        fake_device(schedule, reach=reach) as device,
        ProcessGrid(comm, shape if prod(shape) == comm.size else None) as grid,
    ):
        draw = Random(seed).choice
        orders, block, dtype = draw(["CCC", "FCF", "CFF"]), draw([None, 3]), draw(["float64", "float32"])  # dtype: of C
        more = draw([0, 1, 2])  # A is a view without this many first rows
        if name == "cannon":  # a first block that has to be packed
            orders, block, more, dtype = "FCF", None, 1, "float64"
        made: dict[str, Any] = {"grid": grid, "block": block, "kind": "normal", "device": "fake"}
        sides = ((9 + more, 41), (41, 14), (9, 14))
        first, A, B, C = (
            DistMatrix.random(x, seed=s, order=order, dtype=kind, **made)
            for s, (x, order, kind) in enumerate(zip((sides[0], *sides), orders[0] + orders, ["float64"] * 3 + [dtype]))
        )
        a, b, c = first.allgather()[more:], B.allgather(), C.allgather()
        CONVERT(A.stored, first.stored)  # without waiting for the copy
        if draw([True, False, False]):
            A = DistMatrix(A.stored, grid, A.distribution, A.order, shared=False)
        A, beta = A[more:], draw([0, 1])
        options = {"algorithm": name, "shape": shape, "layers": layers, "mover": mover, "panel_width": 5}
        lookahead = 1 if name == "inner" else draw([0, 1, 2])  # 1: a window is reduced while the next is multiplied
        pdgemm(1, A, B, beta, C, lookahead=lookahead, **options)
        # C as it is now, without waiting for the device
        result = DistMatrix(C.stored.x.copy(C.order), grid, C.distribution, C.order).allgather()
        wrong = not gemm_error(result, 1, a, b, beta, c) <= TOLERANCE
        told, wrong = (any(comm.allgather(x)) for x in (bool(device.races), wrong))
    return told, wrong


def problems(size: int) -> dict[str, tuple[Any, str]]:
    """Return (algorithm on a grid, way of moving panels) by name, for all that run on `size` ranks."""
    return {
        f"{name} {pr}x{pc}x{layers} {way}": ((name, (pr, pc), layers), way)
        for (name, (pr, pc), layers), way in itertools.product(accepted(size), WAYS)
    }


class OfProducts(Search):
    """Search among the products of all algorithms and grids on these ranks, with each way of moving panels."""

    stored = Path(__file__).with_name("races.json")

    def __init__(self, comm: Any, every: bool) -> None:
        self.problems = problems(comm.size)
        super().__init__(comm, self.problems, every)

    def outcome(self, name: str, schedule: str) -> tuple[bool, bool]:
        case, way = self.problems[name]
        return outcome(self.comm, way, schedule, case, name)

    def enough(self, site: Site, told: bool, wrong: bool) -> bool:
        return told and (wrong or tuple(site.split()[:2]) in FOR_OTHERS)


@contextmanager
def several_messages() -> Iterator[None]:
    """Set small limits, so that redistributions and partial sums are sent in several messages."""
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
    """Without a synchronisation, some problem has a race.

    By default, a synchronisation is tried on the problems that `store` recorded for it; with --all, and for new source
    lines, on all problems.
    """
    if comm.size > 4:
        pytest.skip("4 ranks already need every synchronisation")
    with several_messages():
        search = OfProducts(comm, everything())
        assert {site.split()[0] for site in search.needed_by} == set(REMOVED)
        search.check()


if __name__ == "__main__":  # PYTHONPATH=tests/helpers mpiexec -n 4 python -m mpi4py tests/device/test_planted_races.py
    with several_messages():
        OfProducts(MPI.COMM_WORLD, every=True).store()
