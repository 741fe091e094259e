"""Measure the parameters of `model.machine.Machine` on the ranks of a communicator."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.accumulator import SLAB_ROWS
from pdgemm.algorithms.redistribution import redistribute
from pdgemm.arrays.dtypes import BLAS
from pdgemm.blas.local_gemm import gemm_accumulate
from pdgemm.gemm import pdgemm
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder, nothing
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.model.formulas import gemm_flops
from pdgemm.model.machine import Link, Machine, touched
from pdgemm.model.mover_registry import by_messages
from pdgemm.movers import BROADCASTS
from pdgemm.movers.arrivals import Arrival, Transfers
from pdgemm.movers.pipeline import PanelRing, Slot
from pdgemm.movers.reduce import reduce_scatter
from pdgemm.movers.shift import receive, send
from pdgemm.planning.planner import LOOKAHEAD_BETWEEN_NODES
from pdgemm.support.agreement import GuardedCallback

WIDTHS = (8, 32, 128, 256, 512)
_SIDE = 768  # rows and columns of C in local products
_SMALL, _LARGE = 1, 1 << 18  # words of a message
_REPEATS = 7
_ROUNDS = 4  # panels that each rank broadcasts, one after the other: the first ones fill the pipeline


def calibrate(comm: MPI.Intracomm, progress: Callable[[int, int], object] | None = None) -> Machine:
    """Measure the machine of these ranks, and return it as measured on rank 0.  Collective; takes seconds.

    All ranks compute and send at the same time, as they do in a product.  Links between nodes are measured by one
    rank of each node where there are several nodes; otherwise, and on a single rank, they keep their defaults.
    """
    default, done, notify = Machine(), iter(range(1, 9)), GuardedCallback(progress)

    def step() -> None:
        notify(next(done), 8)

    with ProcessGrid(comm, (1, comm.size)) as grid:
        copy, fresh = _copy(grid.comm), _fresh(grid.comm)
        step()
        gamma = {dtype: _rates(grid.comm, dtype, copy) for dtype in map(str, BLAS)}
        step()
        intra, inter = dict(default.intra), dict(default.inter)
        if grid.comm.allreduce(grid.node.size > 1, MPI.LAND):  # a rank alone on its node has no partner to measure
            intra.update(_links(grid.node, grid.comm, ahead=1))
        step()
        leaders = grid.comm.Split(0 if grid.node.rank == 0 else MPI.UNDEFINED)
        several = grid.ranks_per_node is not None
        found = _links(leaders, leaders, LOOKAHEAD_BETWEEN_NODES) if several and leaders != MPI.COMM_NULL else None
        if leaders != MPI.COMM_NULL:
            leaders.Free()
        if several:
            inter.update(grid.comm.bcast(found, root=0))
        step()
        if comm.size > 1:
            links = inter if several else intra
            links["exchange"] = Link(links["shift"].alpha, _exchange_beta(grid))
        step()
        overlap = _overlap(grid) if comm.size > 1 else default.overlap
        step()
        call = _call(grid)
        step()
        per_step = max(1e-6, _step(grid, call))
        step()
        machine = Machine(
            name=f"{platform.node()}, {comm.size} ranks, {date.today()}",
            ranks_per_node=grid.ranks_per_node,
            intra=intra,
            inter=inter,
            gamma=gamma,
            copy_bandwidth=copy,
            first_touch_bandwidth=fresh,
            overlap=overlap,
            panel_overhead=per_step,
            call_overhead=call,
        )
        machine = grid.comm.bcast(machine, root=0)  # names and sizes of nodes differ
    if notify.error is not None:
        raise notify.error
    return machine


def _timed(comm: MPI.Comm, work: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Return the seconds of the slowest rank, as the median over repeats."""
    return _in_turns(comm, [work], repeats)[0]


def _in_turns(comm: MPI.Comm, works: Sequence[Callable[[], object]], repeats: int = _REPEATS) -> list[float]:
    """Do the same for several, in turns: what disturbs the machine for a moment then falls on few repeats of each."""
    seconds = [list[float]() for _ in works]
    for turn in range(repeats + 1):
        for work, taken in zip(works, seconds):
            comm.Barrier()
            start = perf_counter()
            work()
            taken += [comm.allreduce(perf_counter() - start, MPI.MAX)] * (turn > 0)
    return [float(median(taken)) for taken in seconds]


def _rates(comm: MPI.Comm, dtype: str, copy: float) -> dict[int, float]:
    """Return the flops per second of a rank that adds a product of panels to a square block, without copies."""
    A, B = np.ones((_SIDE, WIDTHS[-1]), dtype), np.ones((WIDTHS[-1], _SIDE), dtype)
    C = np.zeros((_SIDE, _SIDE), dtype)

    def rate(width: int, seconds: float) -> float:
        work = _SIDE, _SIDE, width
        moving = touched(work, work) * C.itemsize / copy
        return gemm_flops(*work, C.dtype.kind == "c") / max(seconds - moving, 0.75 * seconds)  # part is in cache

    products = [partial(gemm_accumulate, 1, A[:, :width].copy(), B[:width], 1, C) for width in WIDTHS]
    return {width: rate(width, seconds) for width, seconds in zip(WIDTHS, _in_turns(comm, products))}


def _copy(comm: MPI.Comm) -> float:
    """Return the bytes per second at which rows are copied from a larger array."""
    x, y = np.ones((2048, 2048)), np.empty((2048, 1024))
    return y.nbytes / _timed(comm, lambda: np.copyto(y, x[:, :1024]))


def _fresh(comm: MPI.Comm) -> float:
    """Return the first-touch bandwidth: bytes per second when newly allocated pages are written."""
    words = 1 << 22
    return 8 * words / _timed(comm, lambda: np.empty(words).fill(0))


def _links(comm: MPI.Comm, all_: MPI.Comm, ahead: int) -> dict[str, Link]:
    """Return the links among the ranks of comm, measured while the other communicators of `all_` do the same.

    ahead : panels in flight behind the one that is waited for.
    """
    found = {}
    others = comm.size - 1
    received = _ROUNDS * others
    for name in by_messages():
        panels = _in_turns(all_, [_broadcaster(comm, name, words, ahead) for words in (_SMALL, _LARGE)])
        found[name] = _link(panels, words=_LARGE * received, messages=received)
    found["shift"] = _link(_in_turns(all_, [_shifter(comm, words) for words in (_SMALL, _LARGE)]))
    share = _LARGE // comm.size
    added = _in_turns(all_, [_reducer(comm, words) for words in (comm.size, _LARGE)])
    found["reduce"] = _link(added, words=share * others, messages=others)
    return found


def _link(seconds: list[float], words: int = _LARGE, messages: int = 1) -> Link:
    """Fit a link to the seconds of a small and a large transfer, in which `words` are received in `messages`."""
    small, large = seconds
    return Link(max(1e-8, small / messages), max(1e-13, (large - small) / (words * 8)))


def _broadcaster(comm: MPI.Comm, name: str, words: int, ahead: int) -> Callable[[], object]:
    """Return a function that broadcasts from all ranks in turn, with `ahead` more panels in flight, as in SUMMA."""
    buffers, recorder = np.empty((ahead + 1) * words), Recorder()
    transfers = Transfers(recorder, between_nodes=ahead > 1)

    def work() -> None:
        with PanelRing(ahead + 1, buffers, np.empty(0), transfers).used(recorder) as ring:

            def post(root: int) -> Slot:
                slot = ring.take()
                BROADCASTS[name](comm, slot.buffer_a, root, slot, recorder)
                return slot

            for _ in ring.prefetch([*range(comm.size)] * _ROUNDS, post, ahead):
                pass

    return work


def _shifter(comm: MPI.Comm, words: int) -> Callable[[], object]:
    held, coming = np.empty(words), np.empty(words)
    to, source = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

    def work() -> None:
        recorder = Recorder()
        MPI.Request.Waitall([*receive(comm, coming, source, recorder), *send(comm, held, to, recorder)])

    return work


def _reducer(comm: MPI.Comm, words: int) -> Callable[[], object]:
    share, recorder = words // comm.size, Recorder()
    whole, part, another = np.ones(share * comm.size), np.empty(share), np.empty(share)

    def work() -> None:
        for arrival in reduce_scatter(comm, whole, part, [share] * comm.size, recorder, another, None):
            arrival.Wait()

    return work


def _exchange_beta(grid: ProcessGrid) -> float:
    """Return the seconds per byte of a redistribution from columns to rows, with packing and unpacking."""
    seconds, words = [], 0
    with ProcessGrid(grid.comm, (grid.size, 1)) as rows:
        for n in (grid.size, 256 * grid.size):
            X, Y = DistMatrix.zeros((n, n), grid=grid), DistMatrix.zeros((n, n), grid=rows)
            seconds.append(_timed(grid.comm, partial(redistribute, X, Y, check=False)))
            words = Y.report.counted.words_received
    return _link(seconds, words=words).beta


def _overlap(grid: ProcessGrid) -> float:
    """Return the fraction of a shift that is hidden behind a product of the same duration.

    Between nodes the product is cut into slabs, and the shift into panels that are in flight together.
    """
    comm, between_nodes = grid.row, grid.ranks_per_node is not None
    side, width, panels = (2048, 256, 8) if between_nodes else (1024, 1024, 1)
    A, B, C = np.ones((side, width)), np.ones((width, side)), np.zeros((side, side))
    transfers = Transfers(Recorder(), between_nodes)
    slab = SLAB_ROWS if between_nodes else side

    def compute() -> None:
        for _ in range(panels):
            for row in range(0, side, slab):
                gemm_accumulate(1, A[row : row + slab], B, 1, C[row : row + slab])
                if between_nodes:
                    transfers.poll()

    product = _timed(comm, compute, 3)
    words = 1 << 14
    while (seconds := _timed(comm, _shifter(grid.row, words), 3)) < product and words < 1 << 24:
        words *= 2
    words = max(panels, int(words * min(1.0, product / seconds)))  # neither leaves the other room to recover
    held, coming = np.empty((panels, words // panels)), np.empty((panels, words // panels))
    to, source = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

    def shift(work: Callable[[], object]) -> None:
        recorder, arriving, leaving = Recorder(), list[list[Arrival]](), list[Arrival]()
        transfers.used(recorder)
        for tag in range(panels):
            arriving.append(receive(comm, coming[tag], source, recorder, tag))
            transfers.expect(arriving[-1])
            leaving += send(comm, held[tag], to, recorder, tag)
        work()
        for panel in (*arriving, leaving):
            transfers.wait(panel)

    moving = _timed(comm, partial(shift, nothing))
    overlapped = _timed(comm, partial(shift, compute))
    return float(np.clip((product + moving - overlapped) / min(product, moving), 0.0, 1.0))


def _call(grid: ProcessGrid) -> float:
    A, B = DistMatrix.zeros((grid.size, grid.size), grid=grid), DistMatrix.zeros((grid.size, grid.size), grid=grid)
    C, alphas = DistMatrix.zeros((grid.size, grid.size), grid=grid), cycle((1, 2))  # no executor is reused
    return _timed(grid.comm, lambda: pdgemm(next(alphas), A, B, 0, C, algorithm="summa"), 4 * _REPEATS)


def _step(grid: ProcessGrid, call: float) -> float:
    """Return the overhead of a panel, from products with panels of the least size."""
    panels = 64 * grid.size
    A = DistMatrix.zeros((1, panels), grid=grid, block=(1, 1))
    B = DistMatrix.zeros((panels, 1), grid=grid, block=(1, 1))
    C, alphas = DistMatrix.zeros((1, 1), grid=grid), cycle((1, 2))
    thin = partial(pdgemm, B=B, beta=0, C=C, algorithm="summa", shape=grid.shape, panel_width=1)
    return (_timed(grid.comm, lambda: thin(next(alphas), A)) - call) / panels
