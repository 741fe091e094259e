"""Each synchronisation of the device's streams removed in turn: the fake device tells, or this test fails."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from random import Random
from typing import Any

import pytest
from fake_device import SCHEDULES, fake_device
from problems import TOLERANCE, accepted, gemm_error
from test_device import WAYS

pytestmark = pytest.mark.mpi

REMOVED: dict[str, Any] = {  # what a synchronisation returns that does nothing
    "settle": lambda recorder: None,
    "packed": lambda recorder: (),
    "multiplied": lambda recorder, poll: (),
    "hold_products": lambda recorder: None,
    "hold_copies": lambda recorder: None,
    "copied": lambda recorder: _Done(),
    "finish": lambda recorder: recorder._spans.clear(),
    "begin": lambda recorder: None,
}
FOR_OTHERS = ("settle", "redistribution.py")  # who changes a matrix that this rank still reads
Site = tuple[str, str, int]  # which of them, in what file, on what line


class _Done:
    def Test(self) -> bool:
        return True

    def Wait(self) -> None:
        pass


@contextmanager
def without(removed: Site | None, seen: set[Site]) -> Iterator[None]:
    """Synchronisations called from one place do nothing; those called are added to `seen`."""
    from pdgemm.devices.streams import DeviceRecorder

    def planted(name: str, kept: Any) -> Any:
        def method(recorder: Any, *args: Any) -> Any:
            caller = sys._getframe(1)
            site = name, caller.f_code.co_filename.rpartition("/")[2], caller.f_lineno
            seen.add(site)
            return REMOVED[name](recorder, *args) if site == removed else kept(recorder, *args)

        return method

    with pytest.MonkeyPatch.context() as patch:
        for name in REMOVED:
            patch.setattr(DeviceRecorder, name, planted(name, getattr(DeviceRecorder, name)))
        yield


def outcome(comm: Any, way: str, schedule: str, case: Any, number: int) -> tuple[bool, bool]:
    """Of a product of matrices that the device has only begun to fill: was a race told, was the result wrong?"""
    from pdgemm import DistMatrix, ProcessGrid, pdgemm
    from pdgemm.arrays.elementwise import CONVERT

    (reach, mover), (name, shape, layers) = WAYS[way], case
    with (
        fake_device(schedule, reach=reach) as device,
        ProcessGrid(comm, shape if prod(shape) == comm.size else None) as grid,
    ):
        draw = Random(number).choice
        orders, block, dtype = draw(["CCC", "FCF", "CFF"]), draw([None, 3]), draw(["float64", "float32"])  # of C
        made: dict[str, Any] = {"grid": grid, "block": block, "kind": "normal", "device": "fake"}
        more = draw([0, 1, 2])  # rows above A
        if name == "cannon":  # a first block that has to be packed
            orders, block, more = "FCF", None, 1
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
        pdgemm(1, A, B, beta, C, lookahead=draw([0, 1, 2]), **options)
        # as it is now, not when it is ready
        result = DistMatrix(C.stored.x.copy(C.order), grid, C.distribution, C.order).allgather()
        wrong = not gemm_error(result, 1, a, b, beta, c) <= TOLERANCE
        told, wrong = (any(comm.allgather(x)) for x in (bool(device.races), wrong))
    return told, wrong


@pytest.mark.mpi(min_size=4)
def test_each_synchronisation_is_needed(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdgemm.planning import planner
    from pdgemm.schedules import exchange

    if comm.size > 4:
        pytest.skip("4 ranks need all of them")
    monkeypatch.setattr(exchange, "MESSAGE_BYTES", 64)  # several messages
    for plans in (exchange.plan_exchange, planner.plan_product):
        plans.cache_clear()

    problems = list(itertools.product(accepted(comm.size), WAYS))
    needed_by: dict[Site, list[int]] = {}  # problems that come by each
    for number, (case, way) in enumerate(problems):
        seen = set[Site]()
        with without(None, seen):
            assert {outcome(comm, way, schedule, case, number) for schedule in SCHEDULES} == {(False, False)}
        for site in set().union(*comm.allgather(seen)):
            needed_by.setdefault(site, []).append(number)

    assert {site[0] for site in needed_by} == set(REMOVED)
    for site, numbers in sorted(needed_by.items()):
        told = wrong = False
        for number, schedule in itertools.product(numbers, SCHEDULES):
            (case, way) = problems[number]
            with without(site, set()):
                race, error = outcome(comm, way, schedule, case, number)
            told, wrong = told or race, wrong or error
            if told and wrong:
                break
        assert told, f"{site} is not missed"
        assert wrong or site[:2] == FOR_OTHERS, f"{site} changes no result"
    for plans in (exchange.plan_exchange, planner.plan_product):
        plans.cache_clear()
