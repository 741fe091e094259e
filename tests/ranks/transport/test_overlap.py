"""Messages progress while BLAS runs: polls between slabs of a product, and `hidden_seconds` of the report."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from problems import TOLERANCE, gemm_error, grid_shapes
from tiers import in_turn, square_grid

from pdgemm import DistMatrix, ProcessGrid, pdgemm, plan
from pdgemm.algorithms.products import layer_sums
from pdgemm.algorithms.products.accumulator import Accumulator
from pdgemm.instrument import recorder as timing
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.blas import local_gemm as local
from pdgemm.planning import planner, problem
from pdgemm.schedules.mover_registry import MOVERS
from pdgemm.schedules.products import reduction
from pdgemm.transport.movers import BROADCASTS, arrivals
from pdgemm.transport.movers.arrivals import Transfers
from pdgemm.transport.movers.pipeline import PanelRing, RingShift, Slot

pytestmark = square_grid


class Request:
    """A request that completes after `tests` calls of Test; Wait advances the clock by `seconds`."""

    def __init__(self, tests: int, seconds: float = 0, clock: list[float] | None = None) -> None:
        self.tests, self.seconds, self.clock, self.waited = tests, seconds, clock, 0

    def Test(self) -> bool:
        self.tests -= 1
        return self.tests < 0

    def Wait(self) -> None:
        self.waited += 1
        if self.clock:
            self.clock[0] += self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    for module in (arrivals, timing):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    return now


def test_transfers_complete_in_order_and_are_waited_for_once(clock: list[float]) -> None:
    transfers = Transfers(Recorder())
    first, second, third = Request(1), Request(0), Request(0)
    group, other = [first, second], [third]
    transfers.expect(group)
    transfers.expect(other)
    transfers.poll()
    assert (group, other) == ([first, second], [])  # the second completes only after the first
    transfers.poll()
    assert group == []
    transfers.wait(group)
    transfers.wait(other)
    transfers.poll()
    assert (first.waited, second.waited, third.waited) == (0, 0, 0)


def test_hidden_seconds_are_transfer_time_minus_waits(clock: list[float]) -> None:
    recorder = Recorder({"wait": 7.0})  # of earlier products
    transfers = Transfers(recorder)
    a, b = [Request(9, seconds=3.0, clock=clock)], [Request(0)]
    transfers.expect(a)  # a is in flight from 100
    clock[0] += 2
    transfers.expect(b)  # b from 102; the times of a and b count once
    clock[0] += 4
    transfers.wait(a)  # waits 3 s: until 109
    assert recorder.seconds == {"wait": 10.0}  # b is still in flight
    clock[0] += 1
    transfers.poll()  # b is complete at 110
    clock[0] += 50  # nothing is in flight
    assert recorder.seconds == {"wait": 10.0, "hidden": 7.0}
    transfers.expect([Request(0)])
    clock[0] += 5
    transfers.poll()
    assert recorder.seconds == {"wait": 10.0, "hidden": 12.0}


def test_senders_poll_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that only sends has to call MPI, too, so that its messages progress."""
    calls = list[str]()
    self_ = type("Comm", (), {"Iprobe": lambda _: calls.append("Iprobe")})()
    monkeypatch.setattr(arrivals, "MPI", type("MPI", (), {"COMM_SELF": self_}))
    arrivals.Transfers(Recorder()).poll()
    assert calls == ["Iprobe"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "summa", "mover": "shared"},
        {"algorithm": "summa", "mover": "ring", "lookahead": 2, "panel_width": 20},
        {"algorithm": "stationary_a"},
        {"algorithm": "2.5d", "layers": 2},
        {"algorithm": "inner"},
        {"algorithm": "summa", "mover": "ibcast", "panel_width": 15, "dtype": "int8"},
        {"algorithm": "cannon", "dtype": "float32"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_between_nodes_products_are_cut_to_progress_messages(
    comm: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slab of a product is formed once, with a poll after each; on one node products are not cut."""
    monkeypatch.setattr(local, "SLAB_ROWS", 2)
    work, poll, call = [0, 0, 0], Transfers.poll, local._Prepared.__call__

    def polled(self: Transfers) -> None:
        work[0] += 1
        poll(self)

    def multiplied(self: Any, beta: Any) -> None:
        A, _, C = self.arrays
        work[1] += 1
        work[2] += C.size * A.shape[1]
        call(self, beta)

    monkeypatch.setattr(Transfers, "poll", polled)
    monkeypatch.setattr(local._Prepared, "__call__", multiplied)
    mnk = m, n, k = 61, 53, 90
    orders = itertools.cycle("CFF")
    options = dict(options)
    dtype = options.pop("dtype", "float64")
    into = {"int8": "int32", "float32": "float64"}.get(dtype, dtype)  # panels are converted
    for per_node in (2 if options.get("mover") == "shared" else 1, comm.size):
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", str(per_node))
        own = comm.Dup()
        for shape in [None] if options["algorithm"] in ("cannon", "2.5d", "inner") else grid_shapes(comm.size)[1:2]:
            with ProcessGrid(own) as grid:
                made: dict[str, Any] = {"grid": grid, "block": 8, "order": next(orders)}
                A, B = (DistMatrix.random(x, seed=s, **made) * 9 for s, x in enumerate(((m, k), (k, n))))
                A, B = A.astype(dtype), B.astype(dtype)
                C = DistMatrix.empty((m, n), dtype=into, **made)
                a, b, calls = A.allgather().astype(into), B.allgather().astype(into), list[int]()
                for flops in (1e9, 500.0):
                    monkeypatch.setattr(local, "SLAB_FLOPS", flops)
                    C.local[...] = 99 if dtype == "int8" else np.nan
                    work[:] = [0, 0, 0]
                    pdgemm(1, A, B, 0, C, shape=shape, **options)
                    polls, products, multiplications = own.allreduce(np.array(work))
                    c = C.allgather()
                    assert np.array_equal(c, a @ b) if dtype == "int8" else gemm_error(c, 1, a, b) <= TOLERANCE
                    assert C.report.counted == C.report.predicted
                    assert multiplications == np.prod(mnk)
                    assert polls == (products if per_node < comm.size else 0)
                    calls.append(products)
                assert (calls[0] < calls[1]) == (per_node < comm.size)
                messages = C.report.counted.messages_received + C.report.counted.messages_sent
                messages -= sum(x.counted.messages_received + x.counted.messages_sent for x in C.report.moves)
                seen = own.allgather((C.report.overlap, messages))
                assert all((overlap is None) == (not messages) for overlap, messages in seen)
                assert all(overlap is None or 0 <= overlap <= 1 for overlap, _ in seen)
        own.Free()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("mover", ["ring", "tree"], indirect=True)
def test_a_panel_is_forwarded_in_the_middle_of_a_product(comm: Any, mover: str) -> None:
    """Ranks 1, 2, ... forward a panel when they poll, not when they need it."""
    panel, last = np.full(50_000, float(comm.rank == 0)), comm.size - 1
    slot, recorder = Slot(0, panel, panel), Recorder()
    transfers = Transfers(recorder)
    BROADCASTS[mover](comm, panel, 0, slot, recorder)
    transfers.expect(slot.arrivals)
    if comm.rank < last:
        while slot.arrivals:  # polls, as within a product
            transfers.poll()
        for sent in slot.users:
            sent.Wait()
        assert recorder.traffic.messages_sent == MOVERS[mover].senders(comm.size).tolist().count(comm.rank)
        comm.recv(source=last, tag=1)  # the last rank waits for a panel that the others forward by polls
    else:
        transfers.wait(slot.arrivals)
        for rank in range(last):
            comm.send(None, dest=rank, tag=1)
    assert panel.all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("algorithm", ["inner", "2.5d"])
def test_partial_sums_are_sent_while_the_next_are_formed(
    comm: Any, algorithm: str, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lookahead, a product is formed between start and end of each reduction but the last; without, of none."""
    seen = list[str]()

    def noted(event: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(event)
            return function(*args, **options)

        return call

    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "1")
    monkeypatch.setattr(problem, "REDUCED_ROWS", 3)
    monkeypatch.setattr(reduction, "LEAST_ROWS", 1)
    monkeypatch.setattr(layer_sums, "reduce_scatter", noted("s", layer_sums.reduce_scatter))
    monkeypatch.setattr(layer_sums, "store", noted("e", layer_sums.store))
    monkeypatch.setattr(Accumulator, "add", noted("m", Accumulator.add))
    planner.best_plan.cache_clear()
    own = comm.Dup()
    with ProcessGrid(own) as grid:
        A, B = (DistMatrix.random(shape, grid=grid, seed=seed) for seed, shape in enumerate(((61, 90), (90, 53))))
        c = pdgemm(1, A, B, algorithm=algorithm, layers=None if algorithm == "inner" else 2, lookahead=lookahead)
        assert gemm_error(c.allgather(), 1, A.allgather(), B.allgather()) <= TOLERANCE
        assert c.report.counted == c.report.predicted
    planner.best_plan.cache_clear()
    events = "".join(event for event, _ in itertools.groupby(seen))  # a window may have several products
    texts = own.allgather(events)  # m: product, s: start of a reduction, e: its end, on ranks with rows of C
    if lookahead:
        assert not any("se" in text[:-2] for text in texts)
        assert any("smes" in text for text in texts)
    else:
        assert not any("sme" in text for text in texts)
        assert any("mse" in text for text in texts)
    own.Free()


@pytest.mark.on_ranks(2, 3, 4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("algorithm", ["inner", "2.5d"])
def test_windows_of_partial_sums_take_rows_of_every_owner(
    comm: Any, algorithm: str, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If C is divided by rows, each window has a few rows of each block: all ranks receive some of its sums."""
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "1")
    monkeypatch.setattr(problem, "REDUCED_ROWS", 3)
    monkeypatch.setattr(reduction, "LEAST_ROWS", 1)
    planner.best_plan.cache_clear()
    own = comm.Dup()
    problems = (61, 53, 90), (high := 32 * comm.size + 1, 18, 2 * comm.size), (40, 7, 0)
    for (m, n, k), shape in in_turn(problems, grid_shapes(comm.size)):
        with ProcessGrid(own, shape) as grid:
            A, B, C = (DistMatrix.random(x, grid=grid, seed=seed) for seed, x in enumerate(((m, k), (k, n), (m, n))))
            c = C.allgather()
            options = {"algorithm": algorithm, "layers": None if algorithm == "inner" else comm.size}
            product = plan(A, B, C, beta=-1, lookahead=lookahead, **options).product
            pdgemm(2, A, B, -1, C, lookahead=lookahead, **options)
            assert gemm_error(C.allgather(), 2, A.allgather(), B.allgather(), -1, c) <= TOLERANCE
            assert C.report.counted == C.report.predicted
            if algorithm == "inner" and m == high:
                owned = [product.reduction.counts(0, 0, window) for window in product.windows]
                assert len(owned) > 8 and all(x.all() for x in owned), product
    planner.best_plan.cache_clear()
    own.Free()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("seen", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_panels_of_a_block_are_forwarded_in_any_order(comm: Any, seen: tuple[int, ...]) -> None:
    """Panels used in any order are right, and each is forwarded when it has arrived, before later ones arrive."""

    def block(rank: int) -> list[np.ndarray]:
        return [np.full((50, 300), 10.0 * rank + number) for number in range(len(seen))]

    room, recorder = np.empty(2 * 3 * 50 * 300), Recorder()
    to, source = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    with RingShift(comm, block(comm.rank), "C", room, 2, recorder, Transfers(recorder)) as shift:
        for step in range(comm.size):
            if step + 1 < comm.size:
                shift.start(to, source, [(50, 300)] * len(seen))
            sent = recorder.traffic.messages_sent
            for count, number in enumerate(seen, 1):
                assert (shift.panel(number) == 10 * ((comm.rank + step) % comm.size) + number).all()
                if 0 < step < comm.size - 1:
                    assert recorder.traffic.messages_sent - sent >= count - 1  # the arrived panels have been sent on
            shift.advance()
    assert recorder.traffic.messages_sent == recorder.traffic.messages_received == len(seen) * (comm.size - 1)


@pytest.mark.parametrize("lookahead", [0, 1, 4])
def test_panels_of_this_rank_are_multiplied_while_others_arrive(lookahead: int) -> None:
    """With several panels in flight, a local panel is multiplied before each panel of another rank."""
    steps, own, in_flight, most = range(8), {2, 3, 6, 7}, set[int](), 0
    ring = PanelRing(lookahead + 1, np.empty(lookahead + 1), np.empty(lookahead + 1), Transfers())

    def post(step: int) -> Slot:
        nonlocal most
        in_flight.add(step)
        most = max(most, len(in_flight))
        return ring.take()

    order = []
    with ring.used(Recorder()):
        for step, _ in ring.prefetch(steps, post, lookahead, own.__contains__):
            order.append(step)
            in_flight.remove(step)
    expected = {0: [*range(8)], 1: [*range(8)], 4: [2, 0, 3, 1, 6, 4, 7, 5]}
    assert (order, most) == (expected[lookahead], lookahead + 1)
