"""Every algorithm on every grid it accepts: results, counters, memory, inputs and what lies around them."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
from allgather_3d import ENTRY
from checked_product import MIXED, check
from problems import DTYPES, NAMES, NARROW, TOLERANCE, accepted, gemm_error
from tiers import every_grid, in_turn, pairs
from tree_mover import ON_HOST

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.planning import planner
from pdgemm.schedules.products import cannon_product as cannon
from pdgemm.schedules.products import summa_product as summa
from pdgemm.transport.movers import shift
from pdgemm.transport.store import store

pytestmark = [pytest.mark.mpi, every_grid, pytest.mark.usefixtures("allgather_3d")]

ALGORITHMS = [*NAMES, ENTRY.name]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_grid_and_shape(comm: Any, algorithm: str) -> None:
    with ProcessGrid(comm) as grid:
        grids = [x for x in accepted(comm.size) if x[0] == algorithm]
        shapes = MIXED if comm.size < 6 else MIXED[2::2]
        for (name, shape, layers), mnk, block, mover in pairs(grids, shapes, [None, (2, 3)], ["auto", "ibcast"]):
            check(grid, mnk, name, shape, layers, block=block, mover=mover)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_operations_types_and_orders(comm: Any, algorithm: str) -> None:
    ops = [a + b for a in "NTC" for b in "NTC"]
    orders = ["".join(x) for x in itertools.product("CF", repeat=3)]
    scalars = [(1, 0), (2, 1), (-0.5, 3), (1, -1)]
    cases = [x for x in accepted(comm.size) if x[0] == algorithm]
    if not cases:
        pytest.skip("one rank has no layers")
    with ProcessGrid(comm) as grid:
        for number, op in enumerate(ops * (1 if len(cases) > 4 else 2)):
            name, shape, layers = cases[number % len(cases)]
            alpha, beta = scalars[number % 4]
            dtype = DTYPES[(number + number // 4) % 4]
            if dtype.startswith("complex"):
                alpha, beta = alpha + 1j, beta * 1j
            options: dict[str, Any] = {"block": (None, 4, (2, 3))[number % 3], "orders": orders[number % 8]}
            check(grid, (13, 19, 22), name, shape, layers, dtype=dtype, ops=op, alpha=alpha, beta=beta, **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lookahead_width_and_mover(comm: Any, algorithm: str, tree_mover: None) -> None:
    cases = [x for x in accepted(comm.size) if x[0] == algorithm]
    options = pairs([0, 1, 3], [1, 5, None], ON_HOST)
    if not cases:
        pytest.skip("one rank has no layers")
    with ProcessGrid(comm) as grid:
        for number, (lookahead, width, mover) in enumerate(options):
            name, shape, layers = cases[number % len(cases)]
            asked: dict[str, Any] = {"lookahead": lookahead, "panel_width": width, "mover": mover}
            report = check(grid, (9, 14, 41), name, shape, layers, block=(None, 3)[number % 2], **asked)
            if report.algorithm in ("summa", "stationary_a", "stationary_b", "2.5d"):
                assert report.mover in (mover, "shift") or comm.size == 1


def test_nothing_but_store_writes_to_a_result(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where products are not accumulated in C itself: without what it does, C stays as it is."""
    calls: list[object] = []
    with ProcessGrid(comm) as grid:
        A, B, C = (DistMatrix.random((20, 20), grid=grid, block=3, seed=s, dtype="float32") for s in range(3))
        before = C.allgather()
        for name, shape, layers in accepted(comm.size):
            for beta, width in ((2, 20), (-1, 0)):  # with inner indices, and without
                asked: dict[str, Any] = {"algorithm": name, "shape": shape, "layers": layers}
                operands = A[:, :width], B[:width]
                pdgemm(1, *operands, beta, C, accumulate_dtype="float64", **asked)  # loads its executor
                changed = C.allgather()
                assert not np.array_equal(changed, before)
                calls.clear()
                with monkeypatch.context() as patched:
                    for module in [x for x in sys.modules.values() if vars(x).get("store") is store]:
                        patched.setattr(module, "store", lambda *args, **options: calls.append(args))
                    pdgemm(1, *operands, beta, C, accumulate_dtype="float64", **asked)
                assert np.array_equal(C.allgather(), changed), name
                assert comm.allreduce(len(calls)) >= 1
                before = changed


@pytest.mark.parametrize(("bundle", "cache"), [(1, 1 << 20), (6, 1 << 20), (4, 0)])
def test_thin_panels_alone_and_in_bundles(
    comm: Any, bundle: int, cache: int, monkeypatch: pytest.MonkeyPatch, tree_mover: None
) -> None:
    planner.best_plan.cache_clear()
    monkeypatch.setattr(summa, "BUNDLE", bundle)
    monkeypatch.setattr(summa, "CACHE_BYTES", cache)
    grids = [x for x in accepted(comm.size) if x[0] in ("summa", "2.5d")]
    ways = [("ibcast", "CCC"), ("ring", "FCF"), ("auto", "CFC"), ("tree", "FCC")]
    with ProcessGrid(comm) as grid:
        for (name, shape, layers), (mover, orders) in in_turn(grids, ways, start=bundle):
            check(grid, (11, 17, 23), name, shape, layers, block=2, mover=mover, orders=orders)
    planner.best_plan.cache_clear()


def test_a_large_block_is_shifted_in_pieces(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planner.best_plan.cache_clear()
    for module in (shift, cannon):
        monkeypatch.setattr(module, "LARGEST_MESSAGE_BYTES", 80)
    with ProcessGrid(comm) as grid:
        grids = [x for x in accepted(comm.size) if x[0] == "cannon"]
        for (name, shape, layers), dtype in zip(grids, itertools.cycle(["float64", "complex128"])):
            report = check(grid, (11, 17, 23), name, shape, layers, dtype=dtype)
            words = report.counted.words_sent - sum(x.counted.words_sent for x in report.moves)
            messages = report.counted.messages_sent - sum(x.counted.messages_sent for x in report.moves)
            assert messages >= words / 10
    planner.best_plan.cache_clear()


def test_matrices_on_one_layer_of_the_ranks(comm: Any) -> None:
    """A, B and C on the first ranks only: 2.5D deals the inner indices out to the layers, and adds C up there."""
    plane = max(1, comm.size // 2)
    shape = (1, plane)
    with ProcessGrid(comm, shape, ranks=range(plane)) as grid:
        A, B = (DistMatrix.random(x, grid=grid, block=3, seed=s) for x, s in (((14, 30), 1), ((30, 12), 2)))
        C = DistMatrix.empty((14, 12), grid=grid, block=(4, 5))
        for algorithm in ["auto"] + (["2.5d"] if comm.size > 1 else []):
            pdgemm(1, A, B, 0, C, algorithm=algorithm, shape=None if algorithm == "auto" else shape)
            assert gemm_error(C.allgather(), 1, A.allgather(), B.allgather()) <= TOLERANCE
            assert C.report.counted == C.report.predicted


def test_narrow_and_whole_numbers(comm: Any) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(-100, 100, (12, 40)), rng.integers(-100, 100, (40, 10))
    with ProcessGrid(comm) as grid:
        for (name, shape, layers), (dtype, into) in in_turn(accepted(comm.size), NARROW):
            x, y = a.astype(dtype), b.astype(dtype)  # some are rounded in 8 bits
            A, B = (DistMatrix.from_global(x, grid=grid, block=3) for x in (x, y))
            C = DistMatrix.empty((12, 10), grid=grid, dtype=into)
            pdgemm(1, A, B, 0, C, algorithm=name, shape=shape, layers=layers)
            assert np.array_equal(C.allgather(), x.astype(float) @ y.astype(float))  # all exact: below 2^24
            assert C.report.counted == C.report.predicted
            assert C.report.extra_bytes == C.report.predicted_extra_bytes
