"""The buffers of an exchange on one rank, and the operations on its tiles: pack, send in place, unpack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdgemm.grids.index_map import IndexMap
from pdgemm.grids.node_memory import NodeMemory
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder, nothing
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array, Device
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.schedules.exchanges.block_messages import Block, Redistribution
from pdgemm.schedules.staircase import Staircase
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.store import store


class ExchangeBuffers:
    """The message buffers of an exchange on one rank, in device memory or, for staged messages, on the host.

    shared : the memory that the ranks of a node share, for an exchange between nodes.
    Raises NodeMemoryError if too little of it is free.
    """

    def __init__(
        self, plan: Redistribution, rank: int, device: Device | None = None, shared: NodeMemory | None = None
    ) -> None:
        (self.receiving, sending), words = plan.slots(rank), plan.words
        own: Any = devices.own_memory(device)
        memory = own
        if plan.nodes:  # one array for all messages in a direction
            memory, words, self.receiving, sending = shared, words * self.receiving, 1, 1
        self.of_node: NodeArrays | None = None  # the buffers of all ranks of the node, since the first exchange
        self.messages: list[tuple[Array, Array]] = []  # per buffer: the array for MPI, the array to pack and unpack
        for _ in range(self.receiving + sending):
            if device and plan.staged:
                self.messages.append(tuple(device.pinned(words, plan.wire)))
            else:
                self.messages.append((memory.empty((words,), plan.wire),) * 2)
        self.scratch = None if plan.copies_only or device else own.empty((2, plan.words), plan.wide)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x, _ in self.messages) + (0 if self.scratch is None else self.scratch.nbytes)

    def shaped(self, slot: int, rows: int, cols: int, order: str) -> tuple[Array, Array]:
        """Return a message buffer as two rows x cols arrays: the array for MPI, and the array to pack and unpack."""
        sent, packed = (column_buffer(rows, order, cols, x) for x in self.messages[slot])
        return sent, packed


@dataclass(frozen=True)
class TileTransfer:
    """The arguments and tile operations of one exchange on one rank: Y := combine(X), tile by tile."""

    X: Array | Sequence[Array]
    Y: Array | Sequence[Array]
    plan: Redistribution
    buffers: ExchangeBuffers
    grid: ProcessGrid
    recorder: Recorder
    combine: Combine
    within: Staircase | None

    def assign(self, y: Array, x: Array, rows: IndexMap, cols: IndexMap) -> None:
        store(y, x, self.combine, rows, cols, within=self.within)

    def outgoing(
        self, slot: int, block: Block, rows: IndexMap, cols: IndexMap, packed: Callable[[], object] = nothing
    ) -> Array:
        """Return the array of a tile to send: a view of X, or a buffer into which the tile is packed.

        packed : is called after the tile was packed.
        """
        x = part_of(self.X, block)
        place = _contiguous(x, rows.source, cols.source, rows, cols, self.plan)
        if place is None:
            place, buffer = self.buffers.shaped(slot, rows.size, cols.size, self.plan.order)
            with self.recorder.phase("pack"):
                copy_blocks(x, buffer, rows.shifted(0, rows.target[0]), cols.shifted(0, cols.target[0]))
            packed()
        return place

    def incoming(self, slot: int, block: Block, rows: IndexMap, cols: IndexMap) -> tuple[Array, Callable[[], object]]:
        """Return the array in which a tile is received, a view of Y or a buffer, and the function that unpacks it."""
        y = part_of(self.Y, block)
        if self.plan.copies_only:
            place = _contiguous(y, rows.target, cols.target, rows, cols, self.plan)
            if place is not None:
                return place, nothing
        place, buffer = self.buffers.shaped(slot, rows.size, cols.size, self.plan.order)

        def unpack() -> None:
            with self.recorder.phase("pack"):
                self.assign(y, buffer, rows.shifted(rows.source[0], 0), cols.shifted(cols.source[0], 0))

        return place, unpack


def part_of(x: Array | Sequence[Array], block: Block) -> Array:
    """Return the array of this rank that contains a block."""
    return x[block.part] if isinstance(x, Sequence) else x


def _contiguous(
    x: Array, row_starts: np.ndarray, col_starts: np.ndarray, rows: IndexMap, cols: IndexMap, plan: Redistribution
) -> Array | None:
    """Return the tile as a view of a local array if the tile can be sent or received in place, else None."""
    if plan.staged or not rows.contiguous or not cols.contiguous or x.dtype != plan.wire:
        return None
    r, c = int(row_starts[0]), int(col_starts[0])
    view = x[r : r + rows.size, c : c + cols.size]
    contiguous = view.flags.c_contiguous if plan.order == "C" else view.flags.f_contiguous
    return view if contiguous else None
