"""Collectives of rows of activations on a line of a mesh, in memory that all layers use in turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod

import numpy as np

from pdgemm.errors import NodeMemoryError
from pdgemm.local.arrays.folds import Parts
from pdgemm.matrix.local_arrays import allocated
from pdgemm.parallel.mesh import Mesh
from pdgemm.schedules.mover_registry import RING, SHARED
from pdgemm.schedules.training.row_collectives import row_collective
from pdgemm.support.agreement import together
from pdgemm.transport.collectives import Join, prepared_collective
from pdgemm.transport.movers.arrivals import Arrival
from pdgemm.transport.movers.node_arrays import NodeArrays

_TAGS = {"tensor": 1, "context": 2}  # message tags by kind of traffic
Array = np.ndarray


class LineCollectives:
    """Collectives of arrays whose first dimension, the rows, is divided along an axis of a mesh.

    kind : of `mesh.traffic`, as which words count.

    in_place : all ranks of the line share memory, and read rows of others where they lie, in one buffer of each rank,
        which grows to the largest array; otherwise rows are sent.  One collective is in progress at a time.
    """

    def __init__(self, mesh: Mesh, axis: str, kind: str) -> None:
        self.line, self._mesh, self._axis, self._kind = mesh.line(axis), mesh, axis, kind
        self.index, self.size = self.line.rank, self.line.size
        self.in_place = self.size > 1 and self.line.shares_memory and self.line.ranks_per_node is None
        self._buffer, self.checks = np.empty(0, np.uint8), mesh.checks(self.line)
        self.checked = self.checks.checked
        self._peers: NodeArrays

    @cached_property
    def where(self) -> str:
        """This rank of the mesh, and its place in the line, as text."""
        mesh = self._mesh
        place = f"rank {self.index} of {self.size} along {self._axis}"
        return place if self.size == mesh.shape.size else f"{place}, rank {mesh.rank} of {mesh.shape.sizes}"

    def wait(self, coming: list[Arrival]) -> None:
        """Wait for collectives that were started."""
        self._mesh.wait(coming, self.line)

    def gather(self, x: Array, counts: tuple[int, ...]) -> Array:
        """Return the rows of all ranks, in the order of the line.   counts : the rows of each rank."""
        whole, coming = self.start_gather(x, counts)
        self.wait(coming)
        return whole

    def start_gather(self, x: Array, counts: tuple[int, ...]) -> tuple[Array, list[Arrival]]:
        """Return an array that has the own rows, and the arrivals to wait for before the others are read."""
        whole = np.empty((sum(counts), *x.shape[1:]), x.dtype)
        own = slice(first := sum(counts[: self.index]), first + len(x))
        whole[own] = x
        if self.in_place:
            self._exposed(whole.shape, whole.dtype)[own] = whole[own]
        return whole, self._started("all_gather", whole, counts)

    def addends(self, shape: Sequence[int], dtype: np.dtype) -> Array:
        """Return an array, not initialised, for the addends of this rank, of which `sums` or `own_sums` is next."""
        return self._exposed(shape, dtype) if self.in_place else np.empty(shape, dtype)

    def own_sums(self, addends: Array, counts: tuple[int, ...]) -> Array:
        """Return the sums over the line of the own rows of `addends`."""
        self.wait(self.start_own_sums(addends, counts))
        first = sum(counts[: self.index])
        return addends[first : first + counts[self.index]].copy()

    def start_own_sums(self, addends: Array, counts: tuple[int, ...]) -> list[Arrival]:
        """Return the arrivals to wait for before the own rows of `addends` are their sums."""
        return self._started("reduce_scatter", addends, counts)

    def sums(self, addends: Array, counts: tuple[int, ...]) -> Array:
        """Return the sums over the line of all rows of `addends`, the same on all ranks."""
        self.wait(self._started("all_reduce", addends, counts))
        return addends.copy() if self.in_place else addends

    def largest(self, x: Array, counts: tuple[int, ...]) -> Array:
        """Return the largest of the elements of all ranks at each place of x."""
        largest = x.copy()
        self.wait(self._started("all_reduce", largest, counts, _larger))
        return largest

    def _started(self, operation: str, x: Array, counts: tuple[int, ...], join: Join | None = None) -> list[Arrival]:
        """Start a collective of the rows of x, and return the arrivals to wait for."""
        in_place = self.in_place and join is None
        line, mover = tuple(range(self.size)), SHARED.name if in_place else RING.name
        width = prod(x.shape[1:])
        collective = row_collective(operation, counts, width, x.dtype, line, mover)

        def of(rank: int) -> Array:
            if not x.size:  # there may be no buffer yet
                return x.reshape(-1)
            vector: Array = self._peers("buffer", rank)[: x.nbytes].view(x.dtype)
            return vector

        comm, tag, fence = self.checks.messages, self.checks.tag(_TAGS[self._kind]), self.line.memory.fence
        start = prepared_collective(collective, comm, x.reshape(-1), tag, of, fence, join)
        group: list[Arrival] = [start(self._mesh.traffic[self._kind])]
        self.checks.started += 1
        self._mesh.transfers.expect(group)
        return group

    def _exposed(self, shape: Sequence[int], dtype: np.dtype) -> Array:
        """Return the beginning of the buffer as an array.  Collective over the line where the buffer grows."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes > self._buffer.nbytes:
            self.checks.meet()
            try:
                self._buffer = allocated(self.line.comm, lambda: self._grown(nbytes))
            except NodeMemoryError:  # raised on all ranks, so all ranks send rows from here on
                self.in_place = False
                return np.empty(shape, dtype)
            self._peers = NodeArrays(self.line, buffer=(self._buffer, None))
        return self._buffer[:nbytes].view(dtype).reshape(shape)

    def _grown(self, nbytes: int) -> Array:
        self._buffer = np.empty(0, np.uint8)
        with together(self.line.comm):
            return self.line.memory.empty((nbytes,), np.uint8)


def line_collectives(mesh: Mesh, axis: str, kind: str) -> LineCollectives:
    """Return the collectives of a line, which all layers of a mesh share."""
    if (key := (LineCollectives, axis, kind)) not in mesh.workspaces:
        mesh.workspaces[key] = LineCollectives(mesh, axis, kind)
    line: LineCollectives = mesh.workspaces[key]
    return line


def _larger(x: Parts, y: Parts) -> Parts:
    return tuple(map(np.maximum, x, y))
