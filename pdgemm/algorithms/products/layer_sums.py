"""Reductions of partial sums over the ranks of a group, scattered to C, one window of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, product, starmap
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.products.executor import Call
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array, of
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.schedules.products.reduction import Reduction, Window
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers.arrivals import Arrival
from pdgemm.transport.movers.nccl import nccl_reduce_scatter
from pdgemm.transport.movers.reduce import Sum, reduce_scatter
from pdgemm.transport.store import store


class LayerSums:
    """Reduces the partial sums of a group of ranks, and assigns C := to_c(total, C), one window of rows at a time.

    If partial sums are sent, the next window may be multiplied while one window is in flight.

    comm : the ranks of the group, in the order of the group.
    name : the name of the buffer of partial sums, if ranks read partial sums in place in each other's memory.
    """

    def __init__(self, call: Call[Any], reduction: Reduction, comm: MPI.Comm, name: str = "") -> None:
        self._call, self._reduction, self._comm, self._name = call, reduction, comm, name
        self._rank, self._arrivals = call.grid.comm.rank, list[Arrival]()
        self._pending: Callable[[], object] | None = None  # stores in C the window that is in flight
        self.done = 0  # number of windows added in this run

    def begin(self, to_c: Combine, recorder: Recorder) -> None:
        """Begin a run."""
        self._to_c, self._recorder, self._pending, self.done = to_c, recorder, None, 0
        self._call.transfers.used(recorder)

    def add(self, sums: Array, window: Window, places: Sequence[slice] = ()) -> None:
        """Reduce the rows `window` of a block; `sums` may be overwritten afterwards, unless it is read in place.

        sums   : this rank's partial sums; the partial sums of the other ranks are in arrays of the same shape.
        places : the rows of `sums` that hold each range of the window; by default `sums` has all rows of the block.
        """
        at, places = self._reduction.at(self._rank), places or [*starmap(slice, window)]
        assert at is not None
        self.finish()
        counts = self._reduction.counts(*at, window)
        mine = self._call.workspace["own part of C"][: counts[self._comm.rank]]
        if self._reduction.read:
            self._read(sums, places, at, mine, window)
        else:
            self._send([sums[here] for here in places], at, mine, window, counts)
        self._pending, self.done = partial(self._store, at, mine, window), self.done + 1
        if not self._call.product.lookahead:
            self.finish()

    def add_by_owner(
        self,
        form: Callable[[list[int]], object],
        sums: Array,
        window: Window,
        places: Sequence[slice],
        owners: list[int],
    ) -> None:
        """Form the sums of a window owner by owner, this rank's own last; each part is sent before the next is formed.

        form   : forms `sums` in the ranges of these numbers.
        owners : the rank in `comm` that owns each range.   The total is formed in fixed order: own sums are added last.
        """
        comm, recorder, workspace = self._comm, self._recorder, self._call.workspace
        at = self._reduction.at(self._rank)
        assert at is not None
        counts = self._reduction.counts(*at, window)
        starts, me = np.cumsum([0, *counts]).tolist(), comm.rank
        mine, packed = workspace["own part of C"][: counts[me]], workspace["packed C"][: starts[-1]]
        for distance in (*range(1, comm.size), 0):
            to = (me + distance) % comm.size
            ranges = [number for number, owner in enumerate(owners) if owner == to]
            form(ranges)
            if distance == 1:
                self.finish()
                self._arrivals = self._coming_sums(mine)
            with recorder.phase("pack"):
                part = [window[number] for number in ranges]
                _by_owner([sums[places[x]] for x in ranges], packed, tuple(part), self._reduction, at, counts)
            if distance and counts[to]:
                with recorder.phase("post"):
                    self._arrivals.append(comm.Isend(packed[starts[to] : starts[to + 1]], dest=to))
        _count(counts, me, recorder)
        own = packed[starts[me] : starts[me + 1]]
        self._pending, self.done = partial(self._store, at, mine, window, own), self.done + 1
        if not self._call.product.lookahead:
            self.finish()

    def _coming_sums(self, mine: Array) -> list[Arrival]:
        """Start receiving the sums of the other ranks, and adding them up in `mine`; return what to wait for."""
        me, size, arriving = self._comm.rank, self._comm.size, self._call.workspace["part of C of another rank"]
        arrivals = list[Arrival]()
        if mine.size:
            sources = [(me - distance) % size for distance in range(1, size)]
            arrivals += [Sum(self._comm, sources, mine, arriving[: mine.size], None, 0, self._recorder, empty=True)]
        self._call.transfers.expect(arrivals)
        return arrivals

    def finish(self) -> None:
        """Wait for the window that is in flight, and store it in C."""
        if self._pending:
            self._call.transfers.wait(self._arrivals)
            with self._recorder.phase("compute"):
                self._pending()
            self._pending = None

    def sync(self) -> None:
        """Wait for all ranks of the node, if partial sums are read in place."""
        if self._reduction.read and self._call.peers:
            with self._recorder.phase("sync"):
                self._recorder.finish()
                self._call.peers.sync()

    def _read(self, sums: Array, places: Sequence[slice], at: tuple[int, int], mine: Array, window: Window) -> None:
        peers, recorder, (rows,) = self._call.peers, self._recorder, places
        assert peers is not None
        group = self._reduction.group(*at)
        parts = [peers(self._name, other)[: sums.size].reshape(sums.shape)[rows] for other in group]
        another = self._call.workspace["part of C of another rank"]
        with recorder.phase("compute"):
            _read(parts, mine, window[0], self._reduction, at, self._rank, another)
        recorder.traffic.read(mine.size * (self._comm.size - 1))

    def _send(self, sums: list[Array], at: tuple[int, int], mine: Array, window: Window, counts: np.ndarray) -> None:
        workspace, recorder = self._call.workspace, self._recorder
        recorder.order_copies_after_products()
        with recorder.phase("pack"):
            packed = workspace["packed C"][: int(counts.sum())]
            _by_owner(sums, packed, window, self._reduction, at, counts)
        self._arrivals = self._reduced(packed, mine, counts.tolist(), recorder)
        self._call.transfers.expect(self._arrivals)
        _count(counts, self._comm.rank, recorder)

    def _reduced(self, packed: Array, mine: Array, counts: list[int], recorder: Recorder) -> list[Arrival]:
        """Start the reduce-scatter of partial sums, `mine` being this rank's result, and return its arrivals."""
        if self._call.product.nccl:
            return nccl_reduce_scatter(self._comm, packed, mine, counts, recorder)
        workspace = self._call.workspace
        staged = (workspace["staged C"], workspace["staged part of C"]) if "staged C" in workspace else None
        another = workspace["part of C of another rank"]
        return reduce_scatter(self._comm, packed, mine, counts, recorder, another, staged)

    def _store(self, at: tuple[int, int], mine: Array, window: Window, own: Array | None = None) -> None:
        """Store a window of this rank's part of C.   own : this rank's sums, where `mine` has those of the others."""
        if own is not None:
            mine += own
        (own_i, own_j), done = self._reduction.C.coords(self._rank), 0
        rows, kept = self._reduction.rows_to(at[0]).get(own_i), self._call.product.kept(self._rank)
        if rows is None or not mine.size:
            return
        cols = self._reduction.cols_to(at[1])[own_j]
        for ends in window:
            here = tuple(
                slice(*map(x.count_below, of_block))
                for x, of_block in ((rows, ends), (cols, self._reduction.columns(at, *ends)))
            )
            part = self._call.C[here]
            sums = mine[done : done + part.size].reshape(part.shape)
            store(part, sums, self._to_c, within=kept and kept.window(*here))
            done += part.size


def one_behind_the_other(window: Window) -> list[slice]:
    """Return the rows of each range of a window in an array that holds only the rows of the window."""
    ends = [*accumulate(hi - lo for lo, hi in window)]
    return [*map(slice, [0, *ends], ends)]


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
    all_rows, all_cols = reduction.rows_to(at[0])[i], reduction.cols_to(at[1])[j]
    cols = all_cols.cut(*map(all_cols.count_below, reduction.columns(at, *window))).pack()
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
    sums: list[Array],
    packed: Array,
    window: Window,
    reduction: Reduction,
    at: tuple[int, int],
    counts: np.ndarray,
) -> None:
    """Pack partial sums by the owners of their elements of C, in the order of the group.   sums : per range of rows."""
    group = reduction.group(*at)
    starts = dict(zip(group, (np.cumsum(counts) - counts).tolist()))
    spans = {ends: reduction.columns(at, *ends) for ends in window}  # columns to reduce in each range of rows
    columns = {
        span: [
            (to_j, x.cut(lo, hi).pack())
            for to_j, x in reduction.cols_to(at[1]).items()
            for lo, hi in [[*map(x.count_below, span)]]
            if lo < hi
        ]
        for span in {*spans.values()}
    }
    for (to_i, rows), (part_of_sums, ends) in product(reduction.rows_to(at[0]).items(), zip(sums, window)):
        lo, hi = map(rows.count_below, ends)
        for to_j, cols in columns[spans[ends]] if lo < hi else ():
            owner, words = reduction.C.rank(to_i, to_j), (hi - lo) * cols.size
            part = packed[starts[owner] : starts[owner] + words].reshape(hi - lo, cols.size)
            copy_blocks(part_of_sums, part, rows.cut(lo, hi).shifted(ends[0], 0).pack(), cols)
            starts[owner] += words


def _count(counts: np.ndarray, me: int, recorder: Recorder) -> None:
    """Count the words of the reduction as if every rank sent each of the other ranks its part."""
    for rank, words in enumerate(counts.tolist()):
        if rank != me and words:
            recorder.traffic.sent(words)
        if rank != me and counts[me]:
            recorder.traffic.received(int(counts[me]))
