"""Local arrays of the ranks of a node, read where they lie."""

from __future__ import annotations

import numpy as np

from pdgemm.arrays.device import Array, empty, memory, of
from pdgemm.grids.layout import Layout
from pdgemm.grids.process_grid import ProcessGrid


class Neighbours:
    """Arrays of every rank of the node, to be read until `sync`.  Collective over the node.

    lent : by name, this rank's array, in the memory that the node shares, and the layout of the matrix whose local
        array it is; None: all ranks that are asked for have one of the same shape.
    Between the two synchronisations nobody writes to a matrix, and everybody reads it without asking; what is written
    in between, such as parts of sums, may be read after a further one.
    """

    def __init__(self, grid: ProcessGrid, **lent: tuple[Array, Layout | None]) -> None:
        self.memory = memory(of(next(iter(lent.values()))[0]), grid)
        self._lent = {name: (x, at, layout) for at, (name, (x, layout)) in enumerate(lent.items())}
        words = [[*x.strides[:1], *x.strides[-1:], *self.memory.where(x)] for x, _ in lent.values()]
        lying = self.memory.gather(np.array(words, np.int64).ravel()).reshape(-1, *np.shape(words)).tolist()
        here = [rank for rank, node in enumerate(grid.nodes) if node == grid.nodes[grid.comm.rank]]
        self.lying = dict(zip(here, enumerate(lying)))  # by rank: its number on the node, offsets and strides

    def __call__(self, name: str, rank: int) -> Array:
        """The array of a rank of the node."""
        own, at, layout = self._lent[name]
        number, lying = self.lying[rank]
        if number == self.memory.node.rank:
            return own
        strides, where = lying[at][:2], lying[at][2:]
        shape = own.shape if layout is None else layout.local_shape(rank)
        if 0 in shape:
            return empty(shape, own.dtype, device=of(own))
        return self.memory.array(number, shape, own.dtype, where, strides[: len(shape)])

    def sync(self) -> None:
        """All ranks of the node have read what they need; or, the next time, have written what is to be read."""
        self.memory.sync()
