"""What one rank has for a panel algorithm: its matrices, its buffers, and the ways of a panel to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, identity, index_maps
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder, Then
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.blas.local_gemm import SLAB_FLOPS, gemm_accumulate
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers.arrivals import Transfers
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.movers.panel_views import column_room
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.movers.ring import ring

Planned = TypeVar("Planned", bound=PanelSchedule, covariant=True)
Line = Literal["row", "col"]
Window = tuple[slice, slice]  # of a local array
_NOTHING = np.empty(0, np.uint8)
PANEL, DIAGONAL, _TRANSPOSED = 0, 2, 4  # tags of what travels, for two slots each
_READY = 1 << 14  # tag of the messages that say that a panel may be read; the others are smaller


class Task(NamedTuple, Generic[Planned]):
    """Holds all that one rank needs for a panel algorithm, and brings panels from their owners.

    arrays    : this rank's local arrays by name, in the layouts of the schedule.
    grid      : the process grid; messages are sent along its rows and columns.
    workspace : the buffers of the schedule; nothing large is allocated beyond them.
    peers     : the arrays of the other ranks of the node, where panels are read in place; None: panels are sent.
    """

    schedule: Planned
    arrays: dict[str, Array]
    grid: ProcessGrid
    workspace: dict[str, Any]
    peers: NodeArrays | None
    transfers: Transfers
    recorder: Recorder

    def bring(
        self, line: Line, root: int, name: str, window: Window, room: Array, slot: Slot, tag: int, ready: bool = False
    ) -> Array:
        """Start to bring a window of root's local array to all ranks of a grid row or column.

        ready : the window is not written to while the algorithm runs, so that nobody has to wait before reading it.
        Returns the array that holds it when the slot's arrivals are complete: the window itself where it can be read,
        else a part of `room`.
        """
        comm, (rows, cols) = self.comm(line), (part.stop - part.start for part in window)
        waits = comm.size > 1 and rows * cols > 0 and not ready
        if comm.rank == root and (comm.size == 1 or self.peers):
            if waits:
                self.announce(comm, [rank for rank in range(comm.size) if rank != root], slot)
            return self.arrays[name][window]
        if self.peers and rows * cols:
            if waits:
                self.follow(comm, root, slot)
            self.recorder.traffic.read(rows * cols)
            return self.peers(name, self.rank_in(line, root))[window]
        x = column_room(rows, self.schedule.orders[name], cols, room)
        if comm.rank == root:
            with self.packing():
                CONVERT(x, self.arrays[name][window])
        if x.size:
            self.send(line, x, root, slot, tag)
        return x

    def update(self, A: Array, B: Array, C: Array, alpha: float = -1, conjugate_b: bool = False) -> None:
        """C := C + alpha A B, in slabs between which messages make progress."""
        m, n = C.shape
        slabs = 1 if self.peers else max(1, round(2 * m * n * A.shape[1] / SLAB_FLOPS))
        step = -(-max(m, n) // slabs) or 1
        with self.recorder.phase("compute"):
            for start in range(0, max(m, n), step):
                slab = slice(start, start + step)
                a, b, c = (A[slab], B, C[slab]) if m >= n else (A, B[:, slab], C[:, slab])
                gemm_accumulate(alpha, a, b, 1, c, conjugate_b=conjugate_b)
                if not self.peers:  # what is read in place makes no progress
                    self.transfers.poll()

    def bring_transposed(
        self, panel: Panel, rows: Array, name: str, into: Array, room: Array, slot: Slot
    ) -> list[Callable[[], object]]:
        """Start to bring those rows of a panel to each rank whose indices are those of its columns behind the panel.

        rows : this rank's rows of the panel, which may be on their way.   into : their transpose is of these rows.
        Returns what is to be called when the slot's arrivals are complete: it copies the rows to `into`.
        """
        A, (i, j), owner = self.schedule.A, self.grid.coords, partial(self.grid.rank_of, j=panel.col)
        all_rows, all_cols = A.distribution.rows, A.distribution.cols
        of_rows, of_cols = (x.window(panel.stop, x.n) for x in (all_rows, all_cols))
        w, at, copies = panel.width, 0, list[Callable[[], object]]()
        if self.peers:
            for r in range(of_rows.parts):
                if r != i and of_rows.count(r):
                    self.follow(self.grid.comm, owner(r), slot)
            if j == panel.col and rows.size:
                others = [self.grid.rank_of(r, c) for r in range(of_rows.parts) if r != i for c in range(of_cols.parts)]
                self.announce(self.grid.comm, others, slot)
        maps = _maps(of_rows, of_cols, j)
        for r in sorted(maps, key=lambda r: r != i):  # what others wait for first
            there, to_cols = rows, maps[r]
            if r != i and self.peers:
                self.recorder.traffic.read(to_cols.size * w)
                behind = all_rows.local_window(panel.stop, all_rows.n, r)
                there = self.peers(name, owner(r))[behind, all_cols.local_window(panel.start, panel.stop, panel.col)]
            elif not self.peers and of_rows.parts > 1:
                part, at = room[at : at + to_cols.size * w], at + to_cols.size * w
                x = column_room(to_cols.size, A.order, w, part)
                if r == i:
                    act = partial(self._pack_and_send, rows, x, to_cols, slot, i)
                    slot.arrivals.append(Then(MPI.REQUEST_NULL, act))
                else:
                    self.send("col", x, r, slot, _TRANSPOSED + 2 * r)
                    there, to_cols = x, to_cols.unpack()
            copies.append(partial(copy_blocks, there, into, to_cols, identity(w)))
        return copies

    def _pack_and_send(self, rows: Array, x: Array, to_cols: IndexMap, slot: Slot, root: int) -> None:
        with self.packing():
            copy_blocks(rows, x, to_cols.pack(), identity(x.shape[1]))
        self.send("col", x, root, slot, _TRANSPOSED + 2 * root)

    def send(self, line: Line, x: Array, root: int, slot: Slot, tag: int) -> None:
        """Start to send a contiguous x from root around a line of the grid; slots use tags of their own."""
        slot.tag = tag + slot.number
        ring(self.comm(line), wire(x), root, slot, self.recorder)

    def announce(self, comm: MPI.Comm, readers: Iterable[int], slot: Slot) -> None:
        """Tell readers on this node that this rank has written what they may read, and has read what they may write."""
        assert self.peers
        self.finish_products()
        self.recorder.synchronize_copies()
        self.peers.memory.fence()
        for reader in readers:
            self.recorder.traffic.sent(0)
            slot.users.append(comm.Isend(_NOTHING, dest=reader, tag=_READY))

    def follow(self, comm: MPI.Comm, owner: int, slot: Slot, act: Callable[[], object] | None = None) -> None:
        """Let a slot wait until an owner on this node announces that its panel may be read, and then act."""
        self.recorder.traffic.received(0)
        request = comm.Irecv(np.empty(0, np.uint8), source=owner, tag=_READY)
        slot.arrivals.append(Then(request, act) if act else request)

    def wait(self, slot: Slot) -> None:
        """Wait until all that comes to a slot has arrived."""
        self.transfers.wait(slot.arrivals)
        if self.peers:
            self.peers.memory.fence()

    def free(self, slot: Slot) -> Slot:
        """Return a slot after waiting until its buffers may be rewritten."""
        self.transfers.wait(slot.users)
        self.finish_products()
        return slot

    def packing(self) -> Any:
        """Return the phase in which panels are copied; a device copies what its products have written before."""
        self.recorder.order_copies_after_products()
        return self.recorder.phase("pack")

    def copied(self) -> None:
        """Let the products that follow wait, on a device, for what was copied last."""
        for copies in self.recorder.record_copies():
            copies.Wait()

    def finish_products(self) -> None:
        """Wait, on a device, until all products so far are complete: others read them, or their operands change."""
        for wait in self.recorder.record_products(self.transfers.poll):
            wait()

    def comm(self, line: Line) -> MPI.Comm:
        return self.grid.row if line == "row" else self.grid.col

    def rank_in(self, line: Line, at: int) -> int:
        """Return the rank at a position of this rank's grid row or column."""
        i, j = self.grid.coords
        return self.grid.rank_of(i, at) if line == "row" else self.grid.rank_of(at, j)


@lru_cache(maxsize=1 << 10)
def _maps(rows: BlockCyclic, cols: BlockCyclic, part: int) -> dict[int, IndexMap]:
    """Return the map from the rows of each part that has some of a part's columns to these columns."""
    return dict(index_maps(rows, cols, part, by_target=True))
