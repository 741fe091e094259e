"""Reductions of the partial sums that the ranks of a group hold to C, one window of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.executor import Call, Window
from pdgemm.algorithms.store import store
from pdgemm.arrays.device import Array, of
from pdgemm.arrays.element_functions import slabs
from pdgemm.arrays.elementwise import Combine
from pdgemm.instrument.recorder import Recorder
from pdgemm.movers.arrivals import Arrival
from pdgemm.movers.block_copy import copy_blocks
from pdgemm.movers.reduce import reduce_scatter
from pdgemm.schedules.reduction import Reduction


class LayerSums:
    """Reduces the partial sums of a group of ranks, and assigns C := to_c(total, C), one window of rows at a time.

    Where they are sent, the next window may be multiplied while one is in flight.

    comm : the ranks of the group, in its order.
    name : the name of the buffer of partial sums, where ranks read it in each other's memory.
    """

    def __init__(self, call: Call[Any], reduction: Reduction, comm: MPI.Comm, name: str = "") -> None:
        self._call, self._reduction, self._comm, self._name = call, reduction, comm, name
        self._rank, self._arrivals = call.grid.comm.rank, list[Arrival]()
        self._pending: Callable[[], object] | None = None  # stores the window that is in flight in C
        self.done = 0  # number of windows

    def begin(self, to_c: Combine, recorder: Recorder) -> None:
        """Begin a run."""
        self._to_c, self._recorder, self._pending, self.done = to_c, recorder, None, 0
        self._call.transfers.used(recorder)

    def add(self, sums: Array, window: Window, first: int = 0) -> None:
        """Reduce the rows `window` of a block; its partial sums may then be overwritten, unless they are read.

        sums : this rank's partial sums of the rows from `first` on; those of other ranks are in arrays of its shape.
        """
        at, rows = self._reduction.at(self._rank), slice(window[0] - first, window[1] - first)
        assert at is not None
        self.finish()
        counts = self._reduction.counts(*at, window)
        mine = self._call.workspace["own part of C"][: counts[self._comm.rank]]
        if self._reduction.read:
            self._read(sums, rows, at, mine, window)
        else:
            self._send(sums[rows], at, mine, window, counts)
        self._pending, self.done = partial(self._store, at, mine, window), self.done + 1
        if not self._call.product.lookahead:
            self.finish()

    def finish(self) -> None:
        """Wait for the window that is in flight, and store it in C."""
        if self._pending:
            self._call.transfers.wait(self._arrivals)
            with self._recorder.phase("compute"):
                self._pending()
            self._pending = None

    def sync(self) -> None:
        """Where partial sums are read, wait until all ranks of the node are here."""
        if self._reduction.read and self._call.peers:
            with self._recorder.phase("sync"):
                self._recorder.finish()
                self._call.peers.sync()

    def _read(self, sums: Array, rows: slice, at: tuple[int, int], mine: Array, window: Window) -> None:
        peers, recorder = self._call.peers, self._recorder
        assert peers is not None
        group = self._reduction.group(*at)
        parts = [peers(self._name, other)[: sums.size].reshape(sums.shape)[rows] for other in group]
        another = self._call.workspace["part of C of another rank"]
        with recorder.phase("compute"):
            _read(parts, mine, window, self._reduction, at, self._rank, another)
        recorder.traffic.read(mine.size * (self._comm.size - 1))

    def _send(self, sums: Array, at: tuple[int, int], mine: Array, window: Window, counts: np.ndarray) -> None:
        workspace, recorder = self._call.workspace, self._recorder
        recorder.order_copies_after_products()
        with recorder.phase("pack"):
            packed = workspace["packed C"][: sums.size]
            _by_owner(sums, packed, window, self._reduction, at, counts)
        staged = (workspace["staged C"], workspace["staged part of C"]) if "staged C" in workspace else None
        another = workspace["part of C of another rank"]
        self._arrivals = reduce_scatter(self._comm, packed, mine, counts.tolist(), recorder, another, staged)
        self._call.transfers.expect(self._arrivals)
        _count(counts, self._comm.rank, recorder)

    def _store(self, at: tuple[int, int], mine: Array, window: Window) -> None:
        rows = self._reduction.rows_to(at[0]).get(self._reduction.C.coords(self._rank)[0])
        if rows is not None and mine.size:
            part = self._call.C[rows.count_below(window[0]) : rows.count_below(window[1])]
            store(part, mine.reshape(part.shape), self._to_c)


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
