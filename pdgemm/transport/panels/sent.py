"""Panels that are sent: packed by their owners, and received in buffers of the schedule by all other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.instrument.recorder import Then, Traffic
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.blas.local_gemm import SLAB_FLOPS
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import TRANSPOSED, Copies, Line, Part, Parts, Planned, Read, Store, Swap, Task


class Sent(Task[Planned]):
    """Sends panels along grid rows and grid columns, and parts of panels between two ranks of a grid column."""

    def bring(
        self, line: Line, root: int, name: str, part: Part, buffer: Array, slot: Slot, tag: int, ready: bool = False
    ) -> Array:  # fmt: skip
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

    def swap(self, name: str, out: Mapping[int, slice], into: Mapping[int, slice], tag: int) -> Swap:
        own, buffer, arrays = self.workspace[name], self.workspace[f"{name} of others"], dict[int, Array]()
        for rank, part in into.items():
            arrays[rank], buffer = np.split(buffer, [part.stop - part.start])
        leaving = {rank: own[part] for rank, part in out.items() if part.stop > part.start}
        coming = {rank: x for rank, x in arrays.items() if x.size}
        words = Traffic(
            sum(x.size for x in leaving.values()), sum(x.size for x in coming.values()), len(leaving), len(coming)
        )
        return Swap(self.grid.comm, leaving, coming, tag, arrays, words, self.recorder)

    def slabs(self, length: int, flops: float) -> Iterator[slice]:
        parts = 1 if self.schedule.device else max(1, round(flops / SLAB_FLOPS))  # the host does not wait for a device
        step = -(-length // parts) or 1
        for start in range(0, length, step):
            yield slice(start, start + step)
            self.transfers.poll()
