"""Products on a device: every algorithm and mover, in three schedules of delayed work (fake_device.py)."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import numpy as np
import pytest
from checked_product import MIXED, check
from device_ways import WAYS
from fake_device import SCHEDULES, FakeDevice, fake_device
from mpi4py import MPI
from problems import DTYPES, NAMES, NARROW_ON_DEVICES, accepted
from tiers import every_grid, everything, in_turn, square_grid

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm, plan
from pdgemm.instrument.run_report import vectors_so_far
from pdgemm.local.arrays import alignment
from pdgemm.planning import planner
from pdgemm.schedules.products import summa_product
from pdgemm.transport.movers import reduce

pytestmark = pytest.mark.mpi

RUNS = list(itertools.product(WAYS, SCHEDULES))
READ = ("shared", "ipc")
SHAPES = [*MIXED, (13, 19, 22), (9, 14, 41)]
SCALARS = [(1, 0), (2, 1), (-0.5, 3), (1, -1)]


def on_device(comm: Any, run: tuple[str, str], *args: Any, **options: Any) -> Any:
    """Run `check` on a simulated device; check that there is no race, and that with NCCL MPI sends no panels."""
    (reach, mover), schedule = WAYS[run[0]], run[1]
    with fake_device(schedule, reach=reach) as device, ProcessGrid(comm) as grid:
        before = vectors_so_far()
        report = check(grid, *args, device="fake", **{"mover": mover} | options)
        assert comm.allgather(device.races) == [[]] * comm.size
        gathered = (vectors_so_far() - before).counted  # messages of the comparison
        if run[0] == "nccl":  # NCCL also redistributes matrices and reduces partial sums
            assert device.messages == gathered.messages_sent + gathered.messages_received
    return report


@every_grid
@pytest.mark.parametrize("algorithm", NAMES)
def test_every_way_of_moving(comm: Any, algorithm: str) -> None:
    """All schedules and grids in turn; shapes, operations, types, orders, widths and lookahead are drawn."""
    cases = [x for x in accepted(comm.size) if x[0] == algorithm]
    if not cases:
        pytest.skip("one rank has no layers")
    draw = Random(f"{algorithm} {comm.size}").choice
    runs = RUNS if everything() or comm.size % 3 else RUNS[::2]
    for number, run in enumerate(runs * (12 if everything() else 1 + (algorithm == "cannon"))):
        name, shape, layers = cases[number % len(cases)]
        mnk, dtype, (alpha, beta) = draw(SHAPES), draw(DTYPES), draw(SCALARS)
        if dtype.startswith("complex"):
            alpha, beta = alpha + 1j, beta * 1j
        options: dict[str, Any] = {"ops": draw("NTC") + draw("NTC"), "orders": "".join(draw("CF") for _ in "ABC")}
        options |= {"block": draw([None, 3, 4, (2, 3)]), "panel_width": draw([None, 1, 5]), "dtype": dtype}
        options |= {"alpha": alpha, "beta": beta, "lookahead": draw([0, 1, 2, 3])}
        report = on_device(comm, run, mnk, name, shape, layers, **options)
        if comm.size == 1 or not all(mnk):
            continue
        way, shifted = run[0], "cannon" in (report.algorithm, report.inside)
        if shifted and way in READ:  # Cannon copies blocks from the neighbours' memory
            assert report.mover == way and report.counted.words_sent == 0
            assert report.counted.words_read == report.counted.words_received
            assert report.counted.messages_sent == 0 or max(shape) > 2  # small grids need no signals
        elif report.algorithm in ("summa", "cannon", "stationary_a", "stationary_b", "2.5d"):
            assert report.mover == ({"ring": "shift", "ibcast": "shift"}.get(way, way) if shifted else way)
        elif way == "nccl":
            assert report.mover == "nccl"


@square_grid
@pytest.mark.parametrize("way", WAYS)
def test_the_host_makes_few_calls_for_a_panel(comm: Any, way: str) -> None:
    """At most four launches or copies and two events for a panel of A or of B, including its product."""

    def calls(width: int) -> np.ndarray:
        device.launches.clear()
        sides = (12, 60), (60, 12), (12, 12)
        A, B, C = (DistMatrix.random(x, grid=grid, seed=s, device="fake") for s, x in enumerate(sides))
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
    """After a failed product, redistribution or factorisation the operands may be overwritten or freed immediately."""

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


def test_sums_that_arrive_do_not_wait_for_products(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that MPI delivers is added to its panel while a later product is still in its stream."""
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


@pytest.mark.parametrize("way", WAYS)
def test_panels_are_aligned(comm: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all operands and sums are multiples of 16 bytes apart, also in ragged panels that were sent.

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
    for ((name, shape, layers), (way, schedule)), (dtype, into) in in_turn(cases, NARROW_ON_DEVICES):
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
