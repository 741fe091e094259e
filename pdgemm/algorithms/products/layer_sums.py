"""Reduce-scatter of partial sums of C over a group of ranks, one window of rows at a time."""

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
from pdgemm.transport.movers.reduce import reduce_scatter, sums_of_others
from pdgemm.transport.store import store


class LayerSums:
    """Reduces the partial sums of a group of ranks, and assigns C := to_c(total, C), one window of rows at a time.

    If partial sums are sent, the next window may be multiplied while one window is in flight.

    comm : the ranks of the group, in the order of the group.
    name : the name of the buffer of partial sums, if ranks read partial sums in place in each other's memory.
    """

    def __init__(self, call: Call[Any], reduction: Reduction, comm: MPI.Comm, name: str = "") -> None:
        self._call, self._reduction, self._comm, self._name = call, reduction, comm, name
        rank = call.grid.comm.rank
        at = reduction.at(rank)
        assert at is not None
        self._at, self._part, self._kept = at, reduction.part(rank), call.product.kept(rank)
        self._mine, self._another = call.workspace["own part of C"], call.workspace["part of C of another rank"]
        self._arrivals = list[Arrival]()
        self._pending: Callable[[], object] | None = None  # stores in C the window that is in flight
        self.done = 0  # number of windows added in this run

    def begin(self, to_c: Combine, recorder: Recorder) -> None:
        """Begin a run: `to_c` stores sums in C, and `recorder` counts words and seconds."""
        self._to_c, self._recorder, self._pending, self.done = to_c, recorder, None, 0
        self._call.transfers.used(recorder)

    def add(self, sums: Array, window: Window, places: Sequence[slice] = ()) -> None:
        """Reduce the rows `window` of a block; `sums` may be overwritten afterwards, unless it is read in place.

        sums   : this rank's partial sums; the partial sums of the other ranks are in arrays of the same shape.
        places : the rows of `sums` that hold each range of the window; by default `sums` has all rows of the block.
        """
        places = places or [*starmap(slice, window)]
        self.finish()
        counts = self._reduction.counts(*self._at, window)
        mine = self._mine[: counts[self._comm.rank]]
        if self._reduction.read:
            self._read(sums, places, mine, window)
        else:
            self._send([sums[here] for here in places], mine, window, counts)
        self._store_later(mine, window)

    def add_by_owner(
        self,
        form: Callable[[list[int]], object],
        sums: Array,
        window: Window,
        places: Sequence[slice],
        owners: list[int],
    ) -> None:
        """Reduce a window whose partial sums are formed owner by owner, those that this rank owns in C last.

        The partial sums for one owner are sent before those for the next one are formed.  Each owner adds its own
        partial sums last, so the order of addition is fixed.
        form   : gets the numbers of some ranges, and computes their partial sums in `sums`.
        owners : the rank in `comm` that owns each range.
        """
        comm, recorder, counts = self._comm, self._recorder, self._reduction.counts(*self._at, window)
        starts, me = np.cumsum([0, *counts]).tolist(), comm.rank
        mine, packed = self._mine[: counts[me]], self._call.workspace["packed C"][: starts[-1]]
        for distance in (*range(1, comm.size), 0):
            to = (me + distance) % comm.size
            ranges = [number for number, owner in enumerate(owners) if owner == to]
            form(ranges)
            if distance == 1:
                self.finish()
                self._arrivals = sums_of_others(comm, mine, recorder, self._another, None, empty=True)
                self._call.transfers.expect(self._arrivals)
            with recorder.phase("pack"):
                part = tuple(window[number] for number in ranges)
                self._pack([sums[places[x]] for x in ranges], packed, part, counts)
            if distance and counts[to]:
                with recorder.phase("post"):
                    self._arrivals.append(comm.Isend(packed[starts[to] : starts[to + 1]], dest=to))
        self._count(counts)
        self._store_later(mine, window, packed[starts[me] : starts[me + 1]])

    def _store_later(self, mine: Array, window: Window, own: Array | None = None) -> None:
        """Store a window in C when the next window is added; if the product has no lookahead, store it at once."""
        self._pending, self.done = partial(self._store, mine, window, own), self.done + 1
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
        """Wait for all ranks of the node, if partial sums are read in place."""
        if self._reduction.read and self._call.peers:
            with self._recorder.phase("sync"):
                self._recorder.finish()
                self._call.peers.sync()

    def _read(self, sums: Array, places: Sequence[slice], mine: Array, window: Window) -> None:
        """Assign mine := the sum of this rank's elements of C over the arrays of all ranks, a few rows at a time."""
        peers, recorder, (place,), (ends,) = self._call.peers, self._recorder, places, window
        assert peers is not None
        group = self._reduction.group(*self._at)
        parts = [peers(self._name, other)[: sums.size].reshape(sums.shape)[place] for other in group]
        recorder.traffic.read(mine.size * (self._comm.size - 1))
        if not mine.size:
            return
        assert self._part is not None
        rows, cols = self._part
        cols = cols.cut(*map(cols.count_below, self._reduction.columns(self._at, *ends))).pack()
        rows = rows.cut(*map(rows.count_below, ends)).shifted(ends[0], 0).pack()
        total = mine.reshape(rows.size, cols.size)
        with recorder.phase("compute"):
            if of(total):  # one kernel reads and adds
                for number, part in enumerate(parts):
                    copy_blocks(part, total, rows, cols, Combine(1, number > 0))
                return
            for few in slabs(rows.size, cols.size, self._another.size):
                here = rows.cut(few.start, few.stop).pack()
                copy_blocks(parts[0], total[few], here, cols)
                for part in parts[1:]:
                    packed = self._another[: here.size * cols.size].reshape(here.size, cols.size)
                    copy_blocks(part, packed, here, cols)
                    total[few] += packed

    def _send(self, sums: list[Array], mine: Array, window: Window, counts: np.ndarray) -> None:
        """Start the reduce-scatter of a window; `mine` will hold this rank's result."""
        workspace, recorder = self._call.workspace, self._recorder
        recorder.order_copies_after_products()
        packed = workspace["packed C"][: int(counts.sum())]
        with recorder.phase("pack"):
            self._pack(sums, packed, window, counts)
        arguments = self._comm, packed, mine, counts.tolist(), recorder
        if self._call.product.nccl:
            self._arrivals = nccl_reduce_scatter(*arguments)
        else:
            staged = (workspace["staged C"], workspace["staged part of C"]) if "staged C" in workspace else None
            self._arrivals = reduce_scatter(*arguments, self._another, staged)
        self._call.transfers.expect(self._arrivals)
        self._count(counts)

    def _pack(self, sums: list[Array], packed: Array, window: Window, counts: np.ndarray) -> None:
        """Pack the partial sums for each rank of the group one behind the other, in the order of the group.

        Each rank gets those for the elements of C that it owns.

        sums : the partial sums of each range of rows.
        """
        reduction, at = self._reduction, self._at
        starts = dict(zip(reduction.group(*at), (np.cumsum(counts) - counts).tolist()))
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

    def _count(self, counts: np.ndarray) -> None:
        """Count the words of a window as if every rank sent each of the other ranks its part."""
        me, traffic = self._comm.rank, self._recorder.traffic
        for rank, words in enumerate(counts.tolist()):
            if rank != me and words:
                traffic.sent(words)
            if rank != me and counts[me]:
                traffic.received(int(counts[me]))

    def _store(self, mine: Array, window: Window, own: Array | None) -> None:
        """Store a window of this rank's part of C.   own : this rank's partial sums, if `mine` lacks them."""
        if own is not None:
            mine += own
        if self._part is None or not mine.size:
            return
        (rows, cols), kept, done = self._part, self._kept, 0
        for ends in window:
            of_block = self._reduction.columns(self._at, *ends)
            here = slice(*map(rows.count_below, ends)), slice(*map(cols.count_below, of_block))
            part = self._call.C[here]
            sums = mine[done : done + part.size].reshape(part.shape)
            store(part, sums, self._to_c, within=kept and kept.window(*here))
            done += part.size


def one_behind_the_other(window: Window) -> list[slice]:
    """Return the rows of each range of a window in an array that holds only the rows of the window."""
    ends = [*accumulate(hi - lo for lo, hi in window)]
    return [*map(slice, [0, *ends], ends)]
