"""Panels that are read in place in the memory of the node, after a signal: a message without words from the owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from mpi4py import MPI

from pdgemm.grids.index_map import identity
from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.movers.ring import signal, signal_from
from pdgemm.transport.panels.task import READY, Copies, Line, Part, Parts, Planned, Read, Store, Swap, Task


@dataclass
class InPlace(Task[Planned]):
    """Reads panels in place, in `peers`: the matrices and buffers of the ranks of the node."""

    peers: NodeArrays

    def bring(
        self, line: Line, root: int, name: str, part: Part, buffer: Array, slot: Slot, tag: int, ready: bool = False
    ) -> Array:  # fmt: skip
        comm, x = self.comm(line), self._array(line, root, name)[part]
        if x.size and not ready:
            if comm.rank != root:
                self.follow(comm, root, slot)
            elif comm.size > 1:
                self.announce(comm, [rank for rank in range(comm.size) if rank != root], slot)
        self.recorder.traffic.read(x.size * (comm.rank != root))
        return x

    def bring_transposed(self, panel: Panel, rows: Array, name: str, into: Array, buffer: Array, slot: Slot) -> Copies:
        A, (i, j), copies = self.schedule.A.distribution, self.grid.coords, Copies()
        of_rows, of_cols, maps = self.transposition(panel)
        others, cols = [r for r in range(of_rows.parts) if r != i], range(of_cols.parts)
        for r in others:
            if of_rows.count(r):
                self.follow(self.grid.comm, self.grid.rank_of(r, panel.col), slot)
        if j == panel.col and rows.size:
            self.announce(self.grid.comm, [self.grid.rank_of(r, c) for r in others for c in cols], slot)
        for r, to_cols in maps.items():
            there = rows
            if r != i:
                self.recorder.traffic.read(to_cols.size * panel.width)
                behind = A.rows.local_window(panel.stop, A.rows.n, r)
                window = behind, A.cols.local_window(panel.start, panel.stop, panel.col)
                there = self.peers(name, self.grid.rank_of(r, panel.col))[window]
            copies.append(partial(copy_blocks, there, into, to_cols, identity(panel.width)))
        return copies

    def publish(self, readers: Sequence[int], packed: Callable[[int, Array], Array], slot: Slot, tag: int) -> None:
        self.announce(self.grid.col, readers, slot)

    def fetch(
        self, name: str, targets: Parts, read: Read, slot: Slot, tag: int, buffer: Array = None, store: Store = CONVERT
    ) -> Copies:  # fmt: skip
        for owner, x in targets.items():
            self.follow(self.grid.col, owner, slot)
            self.recorder.traffic.read(x.size)
        return [partial(self._read, name, owner, read, x) for owner, x in targets.items() if x.size]

    def _read(self, name: str, owner: int, read: Read, target: Array) -> None:
        self.peers.memory.fence()
        read(owner, self._array("col", owner, name), target)

    def swap(self, name: str, out: Mapping[int, slice], into: Mapping[int, slice], tag: int) -> Swap:
        arrays = {rank: self.peers(name, rank)[part] for rank, part in into.items()}
        words = Traffic(
            words_received=(read := sum(x.size for x in arrays.values())), words_read=read,
            messages_sent=len(out), messages_received=len(into),
        )  # fmt: skip
        signals = {rank: np.empty(0, np.uint8) for rank in {*out, *into}}
        return Swap(self.grid.comm, signals, signals, tag, arrays, words, self.recorder, self.peers.memory.fence)

    def release(self, owners: Sequence[int], slot: Slot) -> None:
        self.announce(self.grid.col, owners, slot)
        for owner in owners:
            self.follow(self.grid.col, owner, slot)

    def finish(self) -> None:
        with self.recorder.phase("sync"):
            self.recorder.finish()  # this rank's reads are complete, too
            self.peers.sync()

    def wait(self, slot: Slot) -> None:
        super().wait(slot)
        self.peers.memory.fence()

    def slabs(self, length: int, flops: float) -> Iterator[slice]:
        yield from [slice(0, length)] * (length > 0)  # reads in place need no progress of messages

    def announce(self, comm: MPI.Comm, readers: Sequence[int], slot: Slot) -> None:
        """Signal readers on this node: this rank has written their data, and has read the data that they overwrite."""
        self.finish_products()
        self.recorder.synchronize_copies()
        self.peers.memory.fence()
        for reader in readers:
            slot.users.append(signal(comm, reader, self.recorder, READY))

    def follow(self, comm: MPI.Comm, owner: int, slot: Slot) -> None:
        """Make a slot wait for the signal of an owner on this node that its panel may be read."""
        slot.arrivals.append(signal_from(comm, owner, self.recorder, READY))

    def _array(self, line: Line, at: int, name: str) -> Array:
        """Return the array of the rank at a position of this rank's grid row or column."""
        i, j = self.grid.coords
        return self.peers(name, self.grid.rank_of(i, at) if line == "row" else self.grid.rank_of(at, j))
