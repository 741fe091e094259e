"""Products on a device: every algorithm and mover, in three schedules of a device that works late (fake_device.py)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from checked_product import MIXED, check
from device_ways import WAYS
from fake_device import SCHEDULES, FakeDevice, fake_device
from mpi4py import MPI
from problems import DTYPES, NAMES, NARROW_ON_DEVICES, accepted
from tiers import everything, in_turn, pairs

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm, plan
from pdgemm.instrument.run_report import vectors_so_far
from pdgemm.local.arrays import alignment
from pdgemm.planning import planner
from pdgemm.schedules.products import summa_product
from pdgemm.transport.movers import reduce

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(1, 2, 3, 4, 6)]  # a device does not change what a 3 x 3 grid does

RUNS = list(itertools.product(WAYS, SCHEDULES))
up_to_4 = pytest.mark.on_ranks(1, 2, 3, 4)  # for what does not depend on the shape of the grid


def some_of(asked: list[Any], size: int) -> list[tuple[Any, tuple[str, str]]]:
    """What is asked, in all runs; by default, and on many ranks, each in some, and all of them in turn."""
    step = (1 if size < 3 else 5 if size < 5 else 13) if everything() else (4 if size < 3 else 13)
    return [(x, run) for number, x in enumerate(asked) for run in RUNS[number % step :: step]]


def on_device(comm: Any, run: tuple[str, str], *args: Any, **options: Any) -> Any:
    """`check` on a device; no race, and no work in other words than the device's."""
    (reach, mover), schedule = WAYS[run[0]], run[1]
    with fake_device(schedule, reach=reach) as device, ProcessGrid(comm) as grid:
        before = vectors_so_far()
        report = check(grid, *args, device="fake", **{"mover": mover} | options)
        assert comm.allgather(device.races) == [[]] * comm.size
        gathered = (vectors_so_far() - before).counted  # for the comparison alone, through the host
        if run[0] == "nccl":  # which moves matrices to other layouts and adds up, too
            assert device.messages == gathered.messages_sent + gathered.messages_received
    return report


@pytest.mark.parametrize("algorithm", NAMES)
def test_every_grid_and_shape(comm: Any, algorithm: str) -> None:
    runs = itertools.cycle(RUNS)
    grids = [x for x in accepted(comm.size) if x[0] == algorithm]
    few = comm.size > 4  # there are more grids then
    times = range(2 if everything() and not few else 1)
    for (name, shape, layers), mnk, block, _ in pairs(grids, MIXED[few :: 1 + 2 * few], [None, (2, 3)], times):
        on_device(comm, next(runs), mnk, name, shape, layers, block=block)


@up_to_4
@pytest.mark.parametrize("algorithm", NAMES)
def test_operations_types_and_orders(comm: Any, algorithm: str) -> None:
    ops = [a + b for a in "NTC" for b in "NTC"]
    orders = ["".join(x) for x in itertools.product("CF", repeat=3)]
    scalars = [(1, 0), (2, 1), (-0.5, 3), (1, -1)]
    cases = [x for x in accepted(comm.size) if x[0] == algorithm]
    if not cases:
        pytest.skip("one rank has no layers")
    for number, (op, run) in enumerate(some_of(ops, comm.size)):
        name, shape, layers = cases[number % len(cases)]
        alpha, beta = scalars[number % 4]
        dtype = DTYPES[(number + number // 4) % 4]
        if dtype.startswith("complex"):
            alpha, beta = alpha + 1j, beta * 1j
        options: dict[str, Any] = {"block": (None, 4, (2, 3))[number % 3], "orders": orders[number % 8]}
        options |= {"alpha": alpha, "beta": beta, "ops": op, "dtype": dtype}
        on_device(comm, run, (13, 19, 22), name, shape, layers, **options)


@up_to_4
@pytest.mark.parametrize("algorithm", NAMES)
def test_lookahead_and_width(comm: Any, algorithm: str) -> None:
    cases = [x for x in accepted(comm.size) if x[0] == algorithm]
    if not cases:
        pytest.skip("one rank has no layers")
    widths = list(itertools.product([0, 1, 3], [1, 5]))
    for number, ((lookahead, width), run) in enumerate(some_of(widths, comm.size)):
        name, shape, layers = cases[number % len(cases)]
        asked: dict[str, Any] = {"lookahead": lookahead, "panel_width": width, "block": (None, 3)[number % 2]}
        report = on_device(comm, run, (9, 14, 41), name, shape, layers, **asked)
        if report.algorithm in ("summa", "stationary_a", "stationary_b", "2.5d"):
            shifted = report.inside == "cannon" and run[0] in ("ring", "ibcast", "staged")
            moved = {"shift", "staged"} if shifted else {run[0]}
            assert comm.size == 1 or report.mover in moved
        elif run[0] == "nccl":
            assert comm.size == 1 or report.mover == "nccl"


@pytest.mark.parametrize("way", WAYS)
def test_the_host_makes_few_calls_for_a_panel(comm: Any, way: str) -> None:
    """At most four launches or copies and two events for a panel of A or of B, its product included."""

    def calls(width: int) -> np.ndarray:
        device.launches.clear()
        A, B, C = (DistMatrix.random((60, 60), grid=grid, seed=s, device="fake") for s in range(3))
        product = plan(A, B, C, algorithm="summa", mover=mover, panel_width=width).prepare(A, B, C)
        product()
        before = np.array([len(device.launches), device.events, 0])
        product()
        return np.array([len(device.launches), device.events, 2 * C.report.panels]) - before

    reach, mover = WAYS[way]
    with fake_device(reach=reach) as device, ProcessGrid(comm) as grid:
        launches, events, panels = calls(2) - calls(10)
        assert panels >= 40
        assert launches <= 4 * panels
        assert events <= 2 * panels


@pytest.mark.on_ranks(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_after_an_exception_the_device_is_idle(comm: Any, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller overwrites, or frees, the operands next: of a product, a redistribution and a factorisation."""

    def failing(launch: Any) -> Any:
        def launched(*args: Any) -> None:
            launch(*args)
            raise RuntimeError("the next launch failed")

        return launched

    with fake_device(schedule) as device, ProcessGrid(MPI.COMM_SELF) as grid:
        A, B = (DistMatrix.random((40, 40), grid=grid, seed=x, device="fake") for x in (1, 2))
        S = DistMatrix.eye(40, grid=grid, device="fake")
        for call in (
            lambda: pdgemm(1, A, B, 0, S),
            lambda: A.redistribute(S),
            lambda: linalg.solve_triangular(A, S, overwrite_b=True),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(device, "_launch", failing(device._launch))
                with pytest.raises(RuntimeError, match="the next launch failed"):
                    call()
            S.local[...] = 1
            assert not device.races, call
        assert np.array_equal(S.allgather(), np.ones((40, 40)))


@pytest.mark.on_ranks(2, 4)
def test_sums_that_arrive_do_not_wait_for_products(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that arrives by MPI is added to its panel while a later product is still in its stream."""
    if comm.size == 1:
        pytest.skip("one rank receives nothing")
    held, add = list[bool](), reduce.Sum._add

    def watched(self: Any) -> None:
        add(self)
        compute = self._recorder.compute
        held.append(compute.finished < compute.begun)

    monkeypatch.setattr(reduce.Sum, "_add", watched)
    on_device(comm, ("ring", "late"), (33, 29, 41), "stationary_a", (1, comm.size), 1, panel_width=5, lookahead=2)
    assert any(comm.allgather(any(held)))


@up_to_4
@pytest.mark.parametrize("way", WAYS)
def test_panels_begin_where_they_are_multiplied_fast(comm: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all operands and sums are multiples of 16 bytes apart, also of ragged panels that have travelled.

    Words and memory are as predicted.  Panels of small products are multiplied as they arrive.
    """
    skewed, multiply, (reach, mover) = list[tuple[int, ...]](), FakeDevice.multiply, WAYS[way]

    def watched(self: Any, alpha: Any, *arrays: Any) -> Any:
        skewed.extend(x.strides for x in arrays[:3] if min(x.shape) > 1 and max(x.strides) % 16)
        return multiply(self, alpha, *arrays)

    def skews(least: int, dtype: str, into: str, orders: str, shape: tuple[int, int]) -> bool:
        monkeypatch.setattr(summa_product, "_WORTH_COPYING", least)
        planner.best_plan.cache_clear(), skewed.clear()
        with fake_device("late", reach=reach) as device, ProcessGrid(comm, shape) as grid:
            A, B, C = (
                DistMatrix.from_global(x.astype(kind), grid=grid, order=order, device="fake")
                for x, kind, order in zip((a, b, a @ b), (dtype, dtype, into), orders)
            )
            pdgemm(1, A, B, -1, C, algorithm="summa", mover=mover, panel_width=16)
            assert not C.allgather().any() and not device.races
            assert C.report.counted == C.report.predicted
            assert C.report.extra_bytes == C.report.predicted_extra_bytes
        return any(comm.allgather(bool(skewed)))

    monkeypatch.setattr(FakeDevice, "multiply", watched)
    monkeypatch.setattr(alignment, "LONG", 2)
    a, b = np.random.default_rng(3).integers(-9, 9, (2, 64 * comm.size, 64 * comm.size))
    a, b, copied = a[:37], b[:, :29], False
    types = ("bfloat16", "float32"), ("float64", "float64")
    shapes = [shape for name, shape, _ in accepted(comm.size) if name == "summa" and np.prod(shape) == comm.size]
    cases = itertools.product(types, ("CCC", "FFC", "CFF"))
    for ((dtype, into), orders), shape in zip(cases, itertools.cycle(shapes)):
        assert not skews(1, dtype, into, orders, shape)
        copied |= skews(1 << 32, dtype, into, orders, shape)
    assert copied == (comm.size > 1 and way in ("ring", "ibcast", "staged", "nccl"))
    planner.best_plan.cache_clear()


def test_sixteen_bit_and_whole_numbers(comm: Any) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(-100, 100, (12, 40)), rng.integers(-100, 100, (40, 10))
    cases = list(zip(accepted(comm.size), itertools.cycle(RUNS)))
    each = in_turn(cases, NARROW_ON_DEVICES) if comm.size < 5 else zip(cases, itertools.cycle(NARROW_ON_DEVICES))
    for ((name, shape, layers), (way, schedule)), (dtype, into) in each:
        reach, mover = WAYS[way]
        with fake_device(schedule, reach=reach) as device, ProcessGrid(comm) as grid:
            A, B = (DistMatrix.from_global(x.astype(dtype), grid=grid, block=3, device="fake") for x in (a, b))
            C = DistMatrix.empty((12, 10), grid=grid, dtype=into, device="fake")
            options = {"algorithm": name, "shape": shape, "layers": layers, "mover": mover}
            pdgemm(1, A, B, 0, C, **options)
            assert np.array_equal(C.allgather(), a @ b)  # all exact: below 2^24
            assert C.report.counted == C.report.predicted
            assert C.report.extra_bytes == C.report.predicted_extra_bytes
            assert not device.races
