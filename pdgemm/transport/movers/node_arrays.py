"""Local arrays of all ranks of a node, which the other ranks of the node read in place."""

from __future__ import annotations

import numpy as np

from pdgemm.grids.layout import Layout
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays.device import Array, empty, of, shared_memory


class NodeArrays:
    """Exposes arrays of every rank of the node for reading until `sync`.  Collective over the node.

    exposed : by name, an array of this rank in node-shared memory, and the layout of its matrix.  The layout is None if
        the array has the same shape on all ranks that are read from.
    The constructor and `sync` synchronise the node.  Between them no rank writes to an exposed matrix, and every rank
    reads it without messages; a buffer that is written meanwhile, such as one of partial sums, may be read after a
    further `sync`.
    """

    def __init__(self, grid: ProcessGrid, /, **exposed: tuple[Array, Layout | None]) -> None:
        self.memory = shared_memory(of(next(iter(exposed.values()))[0]), grid)
        self._exposed = {name: (x, at, layout) for at, (name, (x, layout)) in enumerate(exposed.items())}
        words = [[*x.strides[:1], *x.strides[-1:], *self.memory.where(x)] for x, _ in exposed.values()]
        lying = self.memory.gather(np.array(words, np.int64).ravel()).reshape(-1, *np.shape(words)).tolist()
        self.memory.map_all([[array[2:] for array in arrays] for arrays in lying])
        here = [rank for rank, node in enumerate(grid.nodes) if node == grid.nodes[grid.comm.rank]]
        self.lying = dict(zip(here, enumerate(lying)))  # rank -> (node rank, strides and offsets of its arrays)

    def __call__(self, name: str, rank: int) -> Array:
        """Return the array that a rank of the node has exposed under this name."""
        own, at, layout = self._exposed[name]
        number, lying = self.lying[rank]
        if number == self.memory.node.rank:
            return own
        strides, where = lying[at][:2], lying[at][2:]
        shape = own.shape if layout is None else layout.local_shape(rank)
        if 0 in shape:
            return empty(shape, own.dtype, device=of(own))
        return self.memory.array(number, shape, own.dtype, where, strides[: len(shape)])

    def sync(self) -> None:
        """Wait for all ranks of the node; then their reads are complete, and their partial sums may be read."""
        self.memory.sync()
