"""The context of one rank in a panel algorithm: local matrices, buffers, and the transport of panels between ranks.

Panels are packed by their owners, sent, and received in buffers of the schedule; `InPlace` reads them in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from mpi4py import MPI

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, identity, index_maps
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder, Then, Traffic, nothing
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.blas.local_gemm import SLAB_FLOPS, gemm_accumulate, prepare_square
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule, Window
from pdgemm.support.waits import Wait
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.collectives import carry_out
from pdgemm.transport.movers.arrivals import Transfers
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.movers.ring import ring

Planned = TypeVar("Planned", bound=PanelSchedule, covariant=True)
Line = Literal["row", "col"]
Part = Window | slice  # a window of a matrix, or a slice of a vector
Parts = dict[int, Array]  # arrays by the position of a rank in the grid column
Read = Callable[[int, Array, Array], object]  # called with an owner, its array, and a target
Store = Callable[[Array, Array], object]  # called with a target, and the message received for it
Copies = list[Callable[[], object]]  # functions to call when the arrivals of a slot are complete
# message tags: each kind of panel has two, one per slot, and TRANSPOSED two for each grid row
PANEL, DIAGONAL, TRANSPOSED = 0, 2, 4
ADDENDS, SUMS = 6, 7
GATHER, ROWS, SPREAD = 1 << 12, (1 << 12) + 2, (1 << 12) + 6
READY = 1 << 14  # tag of the signals that a panel may be read; all other tags are smaller


class Swap:
    """A repeated exchange: each call sends parts of this rank's buffer to the other ranks, and receives theirs.

    leaving, coming : by rank, the message to it, and from it; if arrays are read in place, empty messages: signals.
    arrays : by rank, the part of that rank's buffer that this rank receives, up to date after each call.  If it is read
        in place, its owner does not change it before this rank's next signal.
    traffic : the traffic of one call.   fence : orders reads and writes in place with signals.

    A call costs only about 2 us beyond the time of its messages, because it uses persistent requests of MPI.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        leaving: Mapping[int, Array],
        coming: Mapping[int, Array],
        tag: int,
        arrays: dict[int, Array],
        traffic: Traffic,
        recorder: Recorder,
        fence: Callable[[], object] = nothing,
    ) -> None:
        self.arrays, self._traffic, self._recorder, self._fence, self._calls = arrays, traffic, recorder, fence, 0
        self._requests = [comm.Recv_init(wire(x), source=rank, tag=tag) for rank, x in coming.items()]
        self._requests += [comm.Send_init(wire(x), dest=rank, tag=tag) for rank, x in leaving.items()]

    def __call__(self) -> None:
        if self._requests:
            with self._recorder.phase("wait"), Wait():
                self._fence()
                MPI.Prequest.Startall(self._requests)
                MPI.Request.Waitall(self._requests)
                self._fence()
            self._calls += 1

    def free(self) -> None:
        """Free the requests, and count the traffic of all calls; the exchange cannot be repeated after that."""
        self._recorder.traffic += Traffic(*(self._calls * number for number in vars(self._traffic).values()))
        for request in self._requests:
            request.Free()
        self._requests = []


@dataclass
class Task(Generic[Planned]):
    """The state of one rank in a panel algorithm, and the transport of its panels; `InPlace` is another transport.

    arrays    : this rank's local arrays by name, in the layouts of the schedule.
    grid      : the process grid; panels are sent along its rows and columns.
    workspace : the buffers of the schedule; no other large array is allocated.

    All ranks of a grid row or column call `bring` for a panel; in a grid column some ranks `publish` parts of their
    arrays, and others `fetch` these parts.  A target is complete after `wait`.  A source that is sent may be rewritten
    after `free`; a source that is read in place, after `finish`, or after a later signal from each of its readers.
    """

    schedule: Planned
    arrays: dict[str, Array]
    grid: ProcessGrid
    workspace: dict[str, Any]
    transfers: Transfers
    recorder: Recorder
    error: MemoryError | None = field(default=None, init=False)  # raised in a computation of this rank

    def bring(
        self, line: Line, root: int, name: str, part: Part, buffer: Array, slot: Slot, tag: int, ready: bool = False
    ) -> Array:  # fmt: skip
        """Start to broadcast a window of root's matrix, or a part of its vector, along a grid row or column.

        ready : the source is not written to while the algorithm runs, so readers need no signal before they read.
        Returns the array that holds the window or part when the slot's arrivals are complete: a view of the source,
        or a part of `buffer`.
        """
        comm, own = self.comm(line), (self.workspace | self.arrays)[name]
        if comm.size == 1:
            return own[part]
        if isinstance(part, slice):  # a slice of a vector is contiguous
            x = own[part] if comm.rank == root else buffer[: part.stop - part.start]
        else:
            rows, cols = (x.stop - x.start for x in part)
            x = column_buffer(rows, self.schedule.orders[name], cols, buffer)
            if comm.rank == root:
                with self.packing():
                    CONVERT(x, own[part])
        if x.size:
            self.send(line, x, root, slot, tag)
        return x

    def bring_transposed(self, panel: Panel, rows: Array, name: str, into: Array, buffer: Array, slot: Slot) -> Copies:
        """Start to send each rank the rows of a panel whose indices are those of the rank's columns after the panel.

        rows : this rank's rows of the panel, which may be in flight.
        into : receives one row of the panel for each column of this rank after the panel.
        Returns the copies of the rows to `into`.
        """
        (of_rows, _, maps), copies = self.transposition(panel), Copies()
        for r, to_cols in maps.items():
            there = rows
            if of_rows.parts > 1:
                x = column_buffer(to_cols.size, self.schedule.A.order, panel.width, buffer)
                buffer = buffer[x.size :]
                if r == self.grid.coords[0]:
                    act = partial(self._pack_and_send, rows, x, to_cols, slot, r)
                    slot.arrivals.append(Then(MPI.REQUEST_NULL, act))
                else:
                    self.send("col", x, r, slot, TRANSPOSED + 2 * r)
                    there, to_cols = x, to_cols.unpack()
            copies.append(partial(copy_blocks, there, into, to_cols, identity(panel.width)))
        return copies

    def _pack_and_send(self, rows: Array, x: Array, to_cols: IndexMap, slot: Slot, root: int) -> None:
        with self.packing():
            copy_blocks(rows, x, to_cols.pack(), identity(x.shape[1]))
        self.send("col", x, root, slot, TRANSPOSED + 2 * root)

    def publish(self, readers: Sequence[int], packed: Callable[[int, Array], Array], slot: Slot, tag: int) -> None:
        """Publish parts of an array to `readers`, by their positions in the grid column, which `fetch` these parts.

        packed : called with a reader and free memory of `slot.buffer_b`, where it may pack; returns the reader's part,
            contiguous.
        """
        buffer = slot.buffer_b
        for reader in readers:
            x = packed(reader, buffer)
            buffer = buffer[x.size :]
            if x.size:
                self.recorder.traffic.sent(x.size)
                slot.users.append(self.grid.col.Isend(wire(x), dest=reader, tag=tag + slot.number))

    def fetch(
        self, name: str, targets: Parts, read: Read, slot: Slot, tag: int, buffer: Array = None, store: Store = CONVERT
    ) -> Copies:  # fmt: skip
        """Start to fetch the parts of arrays that owners, by their positions in the grid column, publish to this rank.

        read : called with an owner, its whole array and its target, where arrays are read in place.
        buffer : messages are received here, and `store` is called with a target and its message; None: each message is
            received in its target, which is contiguous.
        Returns the copies to the targets that remain to be made.
        """
        copies = Copies()
        for owner, target in targets.items():
            if not target.size:
                continue
            x = target
            if buffer is not None:
                x = column_buffer(target.shape[0], "F", target.shape[1], buffer)
                buffer = buffer[x.size :]
                copies.append(partial(store, target, x))
            request = self.grid.col.Irecv(wire(x), source=owner, tag=tag + slot.number)
            slot.arrivals.append(self.recorder.coming(RING.name, x, request))
        return copies

    def slabs(self, length: int, flops: float) -> Iterator[slice]:
        """Yield slices of 0 to length - 1: the caller multiplies them one by one, and messages progress after each.

        flops : the flops of the whole product, by which the number of slices is chosen.
        """
        parts = 1 if self.schedule.device else max(1, round(flops / SLAB_FLOPS))  # the host does not wait for a device
        step = -(-length // parts) or 1
        for start in range(0, length, step):
            yield slice(start, start + step)
            self.transfers.poll()

    def swap(self, name: str, out: Mapping[int, slice], into: Mapping[int, slice], tag: int) -> Swap:
        """Prepare an exchange among all ranks of the grid, between their buffers of this name, which are vectors.

        out  : by receiver, the part of this rank's buffer that is sent.   into : by sender, the part of the sender's
            buffer that this rank receives.  Both contain all other ranks.
        If parts are sent, they are received in the buffer "{name} of others".
        """
        own, buffer, arrays = self.workspace[name], self.workspace[f"{name} of others"], dict[int, Array]()
        for rank, part in into.items():
            arrays[rank], buffer = np.split(buffer, [part.stop - part.start])
        leaving = {rank: own[part] for rank, part in out.items() if part.stop > part.start}
        coming = {rank: x for rank, x in arrays.items() if x.size}
        words = Traffic(
            sum(x.size for x in leaving.values()), sum(x.size for x in coming.values()), len(leaving), len(coming)
        )
        return Swap(self.grid.comm, leaving, coming, tag, arrays, words, self.recorder)

    def carry_out(self, collective: Collective | None, vector: Array) -> None:
        """Carry out a collective among ranks of the grid, which overwrites a vector."""
        with self.recorder.phase("wait"):
            carry_out(collective, self.grid.comm, [vector], self.recorder.traffic)

    def release(self, owners: Sequence[int], slot: Slot) -> None:
        """Signal owners in the grid column that their arrays were read; the slot waits for their signals in return."""

    def finish(self) -> None:
        """Wait until no rank reads the arrays of another rank.  Collective over the grid."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Enter the phase of computations; store a MemoryError, which all ranks raise at the end.

        Until then the algorithm continues, with undefined elements: other ranks wait for messages of this rank.
        """
        try:
            with self.recorder.phase("compute"):
                yield
        except MemoryError as lacking:
            self.error = self.error or lacking

    def update(self, A: Array, B: Array, C: Array, alpha: float = -1, conjugate_b: bool = False) -> None:
        """Compute C := C + alpha A B, in slabs of rows or columns; messages may make progress after each slab."""
        m, n = C.shape
        with self.computing():
            for slab in self.slabs(max(m, n), 2 * m * n * A.shape[1]):
                a, b, c = (A[slab], B, C[slab]) if m >= n else (A, B[:, slab], C[:, slab])
                gemm_accumulate(alpha, a, b, 1, c, conjugate_b=conjugate_b)

    def update_square(self, A: Array, C: Array) -> None:
        """Compute C := C - A A^H on and below the diagonal of a square C on the host.

        A and C have the same memory order.
        """
        with self.computing():
            prepare_square(-1, A, C)(1)

    def slots(self, *names: str) -> list[Slot]:
        """Return two slots, each with one half of two buffers of the workspace."""
        halves = (self.workspace[name].reshape(2, -1) for name in names)
        return [Slot(number, *buffers) for number, buffers in enumerate(zip(*halves))]

    def wait(self, slot: Slot) -> None:
        """Wait until all arrivals of a slot are complete."""
        self.transfers.wait(slot.arrivals)

    def free(self, slot: Slot) -> Slot:
        """Return a slot after waiting until its buffers may be rewritten."""
        self.transfers.wait(slot.users)
        self.finish_products()
        return slot

    def packing(self) -> Any:
        """Return the phase in which panels are copied; on a device, the copies wait for all products so far."""
        self.recorder.order_copies_after_products()
        return self.recorder.phase("pack")

    def copied(self) -> None:
        """Make all later products on a device wait for all copies so far."""
        for copies in self.recorder.record_copies():
            copies.Wait()

    def finish_products(self) -> None:
        """Wait, on a device, for all products so far.

        After that, other ranks may read the results, and the operands may be overwritten.
        """
        for wait in self.recorder.record_products(self.transfers.poll):
            wait()

    def comm(self, line: Line) -> MPI.Comm:
        return self.grid.row if line == "row" else self.grid.col

    def send(self, line: Line, x: Array, root: int, slot: Slot, tag: int) -> None:
        """Start a ring broadcast of a contiguous x from root along a grid row or column; each slot has its own tag."""
        slot.tag = tag + slot.number
        ring(self.comm(line), wire(x), root, slot, self.recorder)

    def transposition(self, panel: Panel) -> tuple[BlockCyclic, BlockCyclic, dict[int, IndexMap]]:
        """Return the distributions of the rows and of the columns after a panel, and a map for each grid row.

        The map of a grid row maps its local rows to the local columns of this rank that have the same indices.
        """
        A, (i, j) = self.schedule.A.distribution, self.grid.coords
        rows, cols = (x.window(panel.stop, x.n) for x in (A.rows, A.cols))
        maps = _maps(rows, cols, j)
        return rows, cols, {r: maps[r] for r in sorted(maps, key=lambda r: r != i)}  # i first: others wait for it


@lru_cache(maxsize=1 << 10)
def _maps(rows: BlockCyclic, cols: BlockCyclic, part: int) -> dict[int, IndexMap]:
    """Return, for each part of the rows, the map of its local rows to local columns with the same indices.

    part : the part of the columns.
    """
    return dict(index_maps(rows, cols, part, by_target=True))
