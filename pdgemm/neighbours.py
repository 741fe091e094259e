"""Local arrays of the ranks of a node, read where they lie."""

from __future__ import annotations

import numpy as np

from pdgemm.grids.layout import Layout
from pdgemm.grids.node_memory import NodeMemory


class Neighbours:
    """The local arrays of some matrices on every rank of the node, until `leave`.  Collective over the node.

    lent : by name, this rank's local array, in the memory that the node shares, and the layout of its matrix.
    Between the two synchronisations nobody writes to them, and everybody reads them without asking.
    """

    def __init__(self, memory: NodeMemory, **lent: tuple[np.ndarray, Layout]) -> None:
        self._memory = memory
        self._at = {name: (3 * number, layout) for number, (name, (_, layout)) in enumerate(lent.items())}
        words = [word for x, _ in lent.values() for word in (memory.offset(x), *x.strides)]
        self._lying = memory.gather(np.array(words, np.int64)).tolist()

    def __call__(self, name: str, rank: int) -> np.ndarray:
        """The local array of a rank."""
        at, layout = self._at[name]
        offset, down, right = self._lying[rank][at : at + 3]
        shape = layout.local_shape(rank)
        if 0 in shape:
            return np.empty(shape, layout.dtype)
        return self._memory.array(rank, shape, layout.dtype, offset, (down, right))

    def meet(self) -> None:
        """Once more, after `leave`: A rank may read what the others wrote before."""
        self._memory.sync()

    def leave(self) -> None:
        """All ranks of the node have read what they need."""
        self._memory.sync()
