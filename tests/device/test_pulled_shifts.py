"""Cannon's algorithm where ranks copy blocks from each other's device memory; each signal left out is a race."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiers
from checked_product import MIXED, check
from fake_device import SCHEDULES, fake_device
from mpi4py import MPI
from problems import DTYPES, NARROW_ON_DEVICES, accepted

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.local.arrays.device import Reach
from pdgemm.planning import algorithm_registry as registry
from pdgemm.planning import planner
from pdgemm.transport.movers import pull

pytestmark = [pytest.mark.mpi, tiers.every_grid]

READERS = ("shared", "ipc")
MESSAGES = {"mpi": "shift", "ring": "shift", "ibcast": "shift", "staged": "staged", "nccl": "nccl"}  # asked, reported


def grids(size: int) -> list[tuple[int, int]]:
    """Those that Cannon's algorithm takes, also with idle ranks."""
    return [shape for name, shape, _ in accepted(size) if name == "cannon"]


def pulled(
    comm: Any, run: tuple[str, str], *args: Any, mover: str = "auto", staged: bool = True, **options: Any
) -> Any:
    """The report of a product without a race, where ranks can read each other's memory."""
    way, schedule = run
    with fake_device(schedule, reach=Reach(way, staged=staged)) as device, ProcessGrid(comm) as grid:
        report = check(grid, *args, device="fake", **options)
        assert comm.allgather(device.races) == [[]] * comm.size
    return report


def test_blocks_are_copied_from_the_neighbour(comm: Any) -> None:
    """On every grid, of ragged and empty blocks, with every lookahead, of C that is NaN where beta is 0."""
    ways = itertools.cycle(itertools.product(READERS, SCHEDULES, ("auto", None), (True, False)))
    some = MIXED[comm.size > 4 :: 1 + 2 * (comm.size > 4)]
    for shape, mnk, lookahead, block in tiers.pairs(grids(comm.size), some, range(4), [None, 3, (2, 3)]):
        way, schedule, mover, staged = next(ways)
        options = {"mover": mover or way, "staged": staged, "lookahead": lookahead, "block": block, "panel_width": 5}
        report = pulled(comm, (way, schedule), mnk, "cannon", shape, 1, **options)
        if comm.size > 1 and mnk[2]:
            assert report.mover == way
            assert report.counted.words_sent == 0
            assert report.counted.words_read == report.counted.words_received
            assert report.counted.messages_sent == 0 or max(shape) > 2  # initial blocks are read without signals


@pytest.mark.on_ranks(2, 4, 6)
def test_operations_types_and_orders(comm: Any) -> None:
    ops, orders = ([a + b for a in "NTC" for b in "NTC"], ["".join(x) for x in itertools.product("CF", repeat=3)])
    shapes, runs = itertools.cycle(grids(comm.size)), itertools.cycle(itertools.product(READERS, SCHEDULES))
    for number, (op, dtype) in enumerate(tiers.in_turn(ops, DTYPES)):
        options: dict[str, Any] = {"ops": op, "dtype": dtype, "orders": orders[number % 8], "lookahead": number % 4}
        options |= {"alpha": (1, -0.5)[number % 2], "beta": (0, 2, 1)[number % 3], "panel_width": 4}
        pulled(comm, next(runs), (13, 19, 22), "cannon", next(shapes), 1, **options)


@pytest.mark.on_ranks(2, 4, 6)
@pytest.mark.parametrize("way", READERS)
def test_sixteen_bit_and_whole_numbers(comm: Any, way: str) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(-100, 100, (12, 40)), rng.integers(-100, 100, (40, 10))
    for (dtype, into), shape in zip(NARROW_ON_DEVICES, itertools.cycle(grids(comm.size))):
        with fake_device("late", reach=Reach(way)) as device, ProcessGrid(comm) as grid:
            A, B = (DistMatrix.from_global(x.astype(dtype), grid=grid, block=3, device="fake") for x in (a, b))
            C = DistMatrix.empty((12, 10), grid=grid, dtype=into, device="fake")
            pdgemm(1, A, B, 0, C, algorithm="cannon", shape=shape)
            assert np.array_equal(C.allgather(), a @ b)  # all exact: below 2^24
            assert (C.report.mover, C.report.counted) == (way, C.report.predicted)
            assert not device.races


def test_messages_are_sent_where_they_are_asked_for(comm: Any) -> None:
    for (asked, sent), shape in itertools.product(MESSAGES.items(), grids(comm.size)[:2]):
        with fake_device(reach=Reach("ipc", staged=False, nccl=True)) as device, ProcessGrid(comm) as grid:
            report = check(grid, (9, 14, 41), "cannon", shape, 1, device="fake", mover=asked)
            assert comm.size == 1 or report.mover == sent
            assert not device.races


@contextmanager
def cannon_in_layers() -> Iterator[None]:
    """2.5D products whose layers multiply by Cannon's algorithm."""
    entry = registry.ALGORITHMS["2.5d"]
    assert entry.grids is not None
    of_all = entry.grids

    def some(search: Any) -> Any:
        return (x for x in of_all(search) if x.inside == "cannon")

    only = replace(entry, grids=some, here=lambda problem: iter(()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.ALGORITHMS, "2.5d", only)
        planner.best_plan.cache_clear()
        yield
    planner.best_plan.cache_clear()


@pytest.mark.on_ranks(2, 3, 4, 6)
def test_layers_copy_blocks_too(comm: Any) -> None:
    """And read each other's sums in place, as the layers of SUMMA do."""
    cases = [x for x in accepted(comm.size) if x[0] == "2.5d" and not max(x[1]) % min(x[1])]
    runs = itertools.cycle(itertools.product(READERS, SCHEDULES))
    with cannon_in_layers():
        for (name, shape, layers), lookahead, mnk in tiers.pairs(cases, range(4), MIXED[::2]):
            run = next(runs)
            options: dict[str, Any] = {"lookahead": lookahead, "panel_width": 5, "block": (None, 3)[lookahead % 2]}
            report = pulled(comm, run, mnk, name, shape, layers, **options)
            if mnk[2]:
                assert (report.mover, report.inside) == (run[0], "cannon")
                assert report.counted.words_sent == 0


@pytest.mark.on_ranks(4, 6)
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_blocks_are_copied_beside_products(comm: Any, lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy after a signal is started, and waited for, while a product is still in its stream."""
    beside, wait = list[bool](), pull._Copied.Wait

    def watched(self: Any) -> None:
        compute = self._copy.func.__self__._recorder.compute
        wait(self)
        beside.append(compute.finished < compute.begun)

    monkeypatch.setattr(pull._Copied, "Wait", watched)
    options = {"panel_width": 3, "lookahead": lookahead}
    pulled(comm, ("ipc", "late"), (36, 36, 36), "cannon", (1, comm.size), 1, **options)
    assert beside
    assert all(beside)


# ------------------------------------------------------------------ planted mistakes
def outcome(comm: Any, shape: tuple[int, int], lookahead: int) -> list[str]:
    """The races of all ranks in two products."""
    with fake_device(reach=Reach("ipc")) as device, ProcessGrid(comm) as grid:
        A, B, C = (DistMatrix.random((36, 36), grid=grid, seed=s, device="fake") for s in range(3))
        for _ in range(2):
            pdgemm(1, A, B, 0, C, algorithm="cannon", shape=shape, lookahead=lookahead, panel_width=3)
        return [race for races in comm.allgather(device.races) for race in races]


@pytest.mark.on_ranks(6)
@pytest.mark.parametrize("lookahead", [1, 2])
def test_both_signals_are_needed(comm: Any, lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not wait for one of them reads what is being written, or writes what is being read."""
    if comm.size < 6:
        pytest.skip("fewer blocks than buffers and two")

    assert outcome(comm, (1, comm.size), lookahead) == []
    wait_for, kept = pull.signal_from, list[Any]()
    for left_out in (pull._ready, pull._copied):
        tags = [left_out(number) for number in range(20)]

        def unheeded(comm: Any, source: int, recorder: Any, tag: int, tags: list[int] = tags) -> Any:
            kept.append(wait_for(comm, source, recorder, tag))
            return MPI.REQUEST_NULL if tag in tags else kept[-1]

        monkeypatch.setattr(pull, "signal_from", unheeded)
        assert outcome(comm, (1, comm.size), lookahead), left_out
