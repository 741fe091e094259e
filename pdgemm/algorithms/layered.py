"""Algorithms that share out the inner dimension: 2.5D and 3D in layers, and the inner product of single ranks.

Solomonik & Demmel, Euro-Par 2011; Agarwal et al., IBM J. Res. Dev. 39(5), 1995.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.accumulator import Accumulator, Room, add_sums
from pdgemm.algorithms.cannon import cannon
from pdgemm.algorithms.summa import SummaRun
from pdgemm.arrays.device import Array, of
from pdgemm.arrays.element_functions import slabs
from pdgemm.arrays.elementwise import Combine, scale
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.movers.block_copy import copy_blocks
from pdgemm.movers.node_arrays import Neighbours
from pdgemm.movers.reduce import reduce_scatter
from pdgemm.schedules import Cannon, Inner, Layered
from pdgemm.schedules.reduction import Reduction

Notify = Callable[[int, int], object]


def layered(
    alpha: Any,
    A: Array,
    B: Array,
    beta: Any,
    C: Array,
    plan: Layered,
    grid: ProcessGrid,
    room: Room,
    recorder: Recorder,
    notify: Notify,
    near: Neighbours | None,
) -> None:
    """C := alpha A B + beta C on a Pr x Pc x c grid: every layer its share of k, then a sum over the layers.

    A, B : this rank's elements of A (m, k) and B (k, n), dealt over the ranks of all layers as `plan` says: a layer
        needs 1/c of each, so they are not replicated.
    C    : this rank's elements of C (m, n), any part of block (i, j); overwritten, not read where beta is 0.
    room : the buffers of the plan.   recorder : takes seconds, words and messages.   notify : hears of each panel;
        must not raise.   near : where panels are read in place, A and B of the other ranks, and their sums.

    Cost per rank on q x q x c, P = q^2 c: 2mnk/P flops; (mk + kn)(q - 1)/P + mn (c - 1)/P words in; extra memory
    that of the layer's product, and mn/q^2 words and a little.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """
    if not plan.mnk[2]:
        scale(beta, C)
        return
    lent = near if plan.reduction.read else None
    if grid.idle:
        if lent:
            lent.sync()  # as all ranks of the node do
        return
    rank = grid.comm.rank
    layer = plan.layer(rank)
    sums = room["partial C"].reshape(layer.C.local_shape(rank))
    if isinstance(layer, Cannon):
        cannon(alpha, A, B, 0, sums, layer, grid, room, recorder, notify)
    else:
        SummaRun(alpha, A, B, sums, layer, grid, room, near)(0, recorder, notify)
    parts = _parts("partial C", sums, plan.reduction, rank, lent, recorder)
    for window in plan.reduction.windows(rank):
        here = [x[slice(*window)] for x in parts]
        _add_up(here, beta, C, window, plan.reduction, grid.depth, rank, room, recorder)


def inner(
    alpha: Any,
    A: Array,
    B: Array,
    beta: Any,
    C: Array,
    plan: Inner,
    grid: ProcessGrid,
    room: Room,
    recorder: Recorder,
    notify: Notify,
    near: Neighbours | None,
) -> None:
    """C := alpha A B + beta C where each rank holds columns of A and the same rows of B.  Collective over grid.comm.

    A : this rank's columns of A, (m, k_loc);  B : the same rows of B, (k_loc, n);  C : this rank's part of
        C (m, n), of any layout, overwritten, not read where beta is 0.
    room : the buffers of the plan.   recorder : takes seconds, words and messages.   notify : hears of each
        reduction; must not raise.   near : where parts of sums are read in place, `sums` of the other ranks.

    Cost per rank: 2mnk/P flops; mn(P - 1)/P words in and out, independent of k, read in place or by one
    reduce-scatter, for every `plan.rows` rows of C; extra memory 2 n plan.rows words and a little.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """
    n, comm = plan.mnk[1], grid.comm
    if not plan.windows:
        scale(beta, C)
    for done, (lo, hi) in enumerate(plan.windows, 1):
        if near and done > 1:
            with recorder.phase("sync"):
                recorder.finish()
                near.sync()  # the last sums have been read
        sums = room["sums"][: (hi - lo) * n].reshape(hi - lo, n)
        with recorder.phase("compute"):
            if A.shape[1]:
                Accumulator(alpha, 0, sums, plan, room).add_wide(A[lo:hi], B)
            else:
                scale(0, sums)
        parts = _parts("sums", sums, plan.reduction, comm.rank, near, recorder)
        _add_up(parts, beta, C, (lo, hi), plan.reduction, comm, comm.rank, room, recorder)
        notify(done, len(plan.windows))


def _parts(
    name: str, sums: Array, reduction: Reduction, rank: int, near: Neighbours | None, recorder: Recorder
) -> list[Array]:
    """The parts of the sum of a rank's block: its own or, where they can be read in place, those of all its group."""
    if not near:
        return [sums]
    with recorder.phase("sync"):
        recorder.finish()
        near.sync()  # they are complete
    at = reduction.at(rank)
    assert at is not None
    return [near(name, other)[: sums.size].reshape(sums.shape) for other in reduction.group(*at)]


def _add_up(
    parts: list[Array],
    beta: Any,
    C: Array,
    window: tuple[int, int],
    reduction: Reduction,
    comm: MPI.Comm,
    rank: int,
    room: Room,
    recorder: Recorder,
) -> None:
    """C := sum over comm of their parts + beta C, for these rows of a block.

    parts : where they are read in place, those of all ranks; else this rank's.
    """
    at = reduction.at(rank)
    assert at is not None
    counts = reduction.counts(*at, window)
    mine = room["mine"][: counts[comm.rank]]
    if reduction.read:
        with recorder.phase("compute"):
            _read(parts, mine, window, reduction, at, rank, room["another's"])
        recorder.traffic.read(mine.size * (comm.size - 1))
    else:
        recorder.hold_copies()
        with recorder.phase("pack"):
            packed = room["in the order of ranks"][: parts[0].size]
            _by_owner(parts[0], packed, window, reduction, at, counts)
        staged = (room["staged C"], room["staged part of C"]) if "staged C" in room else None
        reduce_scatter(comm, packed, mine, counts.tolist(), recorder, room["another's"], staged)
        _count(counts, comm.rank, recorder)
    with recorder.phase("compute"):
        rows = reduction.rows_to(at[0]).get(reduction.C.coords(rank)[0])
        if rows is not None and mine.size:
            part = C[rows.count_below(window[0]) : rows.count_below(window[1])]
            add_sums(mine.reshape(part.shape), beta, part, room["update"])


def _read(
    parts: list[Array],
    mine: Array,
    window: tuple[int, int],
    reduction: Reduction,
    at: tuple[int, int],
    rank: int,
    another: Array,
) -> None:
    """mine := the sum of what all parts have of this rank's elements of C, a few rows at a time."""
    if not mine.size:
        return
    i, j = reduction.C.coords(rank)
    all_rows, cols = reduction.rows_to(at[0])[i], reduction.cols_to(at[1])[j].pack()
    rows = all_rows.cut(*(all_rows.count_below(row) for row in window)).shifted(window[0], 0).pack()
    total = mine.reshape(rows.size, cols.size)
    if of(total):  # which adds what it reads
        for number, part in enumerate(parts):
            copy_blocks(part, total, rows, cols, Combine(1, number > 0))
        return
    for few in slabs(rows.size, cols.size, another.size):
        here = rows.cut(few.start, few.stop).pack()
        copy_blocks(parts[0], total[few], here, cols)
        for part in parts[1:]:
            packed = another[: here.size * cols.size].reshape(here.size, cols.size)
            copy_blocks(part, packed, here, cols)
            total[few] += packed


def _by_owner(
    sums: Array,
    packed: Array,
    window: tuple[int, int],
    reduction: Reduction,
    at: tuple[int, int],
    counts: np.ndarray,
) -> None:
    """packed := sums, the part of each rank's C after that of the rank before."""
    group = reduction.group(*at)
    starts = dict(zip(group, np.cumsum(counts) - counts))
    columns = [(to_j, index_map.pack()) for to_j, index_map in reduction.cols_to(at[1]).items()]
    for to_i, rows in reduction.rows_to(at[0]).items():
        lo, hi = (rows.count_below(row) for row in window)
        for to_j, wide in columns if lo < hi else ():
            start = starts[reduction.C.rank(to_i, to_j)]
            part = packed[start : start + (hi - lo) * wide.size].reshape(hi - lo, wide.size)
            copy_blocks(sums, part, rows.cut(lo, hi).shifted(window[0], 0).pack(), wide)


def _count(counts: np.ndarray, me: int, recorder: Recorder) -> None:
    """As if every rank had sent every other one its part."""
    for rank, words in enumerate(counts.tolist()):
        if rank != me and words:
            recorder.traffic.sent(words)
        if rank != me and counts[me]:
            recorder.traffic.received(int(counts[me]))
