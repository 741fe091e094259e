"""Reductions of the partial sums that the ranks of a group hold to C, one window of rows at a time."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.executor import Room
from pdgemm.algorithms.store import store
from pdgemm.arrays.device import Array, of
from pdgemm.arrays.element_functions import slabs
from pdgemm.arrays.elementwise import Combine
from pdgemm.instrument.recorder import Recorder
from pdgemm.movers.block_copy import copy_blocks
from pdgemm.movers.node_arrays import NodeArrays
from pdgemm.movers.reduce import reduce_scatter
from pdgemm.schedules.reduction import Reduction


def own_and_exposed(
    name: str, sums: Array, reduction: Reduction, rank: int, peers: NodeArrays | None, recorder: Recorder
) -> list[Array]:
    """Return the partial sums of a block: this rank's or, where they are read in place, those of its whole group."""
    if not peers:
        return [sums]
    with recorder.phase("sync"):
        recorder.finish()
        peers.sync()  # they are complete
    at = reduction.at(rank)
    assert at is not None
    return [peers(name, other)[: sums.size].reshape(sums.shape) for other in reduction.group(*at)]


def add_up(
    parts: list[Array],
    to_c: Combine,
    C: Array,
    window: tuple[int, int],
    reduction: Reduction,
    comm: MPI.Comm,
    rank: int,
    workspace: Room,
    recorder: Recorder,
) -> None:
    """Reduce partial sums over comm and assign C := to_c(total, C), for the rows `window` of a block.

    parts : the partial sums of all ranks where they are read in place, else those of this rank.
    """
    at = reduction.at(rank)
    assert at is not None
    counts = reduction.counts(*at, window)
    mine = workspace["own part of C"][: counts[comm.rank]]
    if reduction.read:
        with recorder.phase("compute"):
            _read(parts, mine, window, reduction, at, rank, workspace["part of C of another rank"])
        recorder.traffic.read(mine.size * (comm.size - 1))
    else:
        recorder.order_copies_after_products()
        with recorder.phase("pack"):
            packed = workspace["packed C"][: parts[0].size]
            _by_owner(parts[0], packed, window, reduction, at, counts)
        staged = (workspace["staged C"], workspace["staged part of C"]) if "staged C" in workspace else None
        reduce_scatter(comm, packed, mine, counts.tolist(), recorder, workspace["part of C of another rank"], staged)
        _count(counts, comm.rank, recorder)
    with recorder.phase("compute"):
        rows = reduction.rows_to(at[0]).get(reduction.C.coords(rank)[0])
        if rows is not None and mine.size:
            part = C[rows.count_below(window[0]) : rows.count_below(window[1])]
            store(part, mine.reshape(part.shape), to_c)


def _read(
    parts: list[Array],
    mine: Array,
    window: tuple[int, int],
    reduction: Reduction,
    at: tuple[int, int],
    rank: int,
    another: Array,
) -> None:
    """Assign mine := the sum over all parts of this rank's elements of C, a few rows at a time."""
    if not mine.size:
        return
    i, j = reduction.C.coords(rank)
    all_rows, cols = reduction.rows_to(at[0])[i], reduction.cols_to(at[1])[j].pack()
    rows = all_rows.cut(*(all_rows.count_below(row) for row in window)).shifted(window[0], 0).pack()
    total = mine.reshape(rows.size, cols.size)
    if of(total):  # one kernel reads and adds
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
    """Pack the partial sums by the ranks that own them in C, in the order of ranks."""
    group = reduction.group(*at)
    starts = dict(zip(group, np.cumsum(counts) - counts))
    columns = [(to_j, index_map.pack()) for to_j, index_map in reduction.cols_to(at[1]).items()]
    for to_i, rows in reduction.rows_to(at[0]).items():
        lo, hi = (rows.count_below(row) for row in window)
        for to_j, cols in columns if lo < hi else ():
            start = starts[reduction.C.rank(to_i, to_j)]
            part = packed[start : start + (hi - lo) * cols.size].reshape(hi - lo, cols.size)
            copy_blocks(sums, part, rows.cut(lo, hi).shifted(window[0], 0).pack(), cols)


def _count(counts: np.ndarray, me: int, recorder: Recorder) -> None:
    """Count the words of the reduction as if every rank sent every other rank its part."""
    for rank, words in enumerate(counts.tolist()):
        if rank != me and words:
            recorder.traffic.sent(words)
        if rank != me and counts[me]:
            recorder.traffic.received(int(counts[me]))
