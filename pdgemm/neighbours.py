"""A and B of the ranks of a node, read where they lie."""

from __future__ import annotations

import numpy as np

from pdgemm.grids.layout import Layout
from pdgemm.grids.node_memory import NodeMemory
from pdgemm.products import Product


class Neighbours:
    """The local arrays of A and B on every rank of the node, until `leave`.  Collective over the node.

    A, B : this rank's, in the memory that the node shares.
    Nobody writes to them before all have left: a rank reads the others' without asking.
    """

    def __init__(self, memory: NodeMemory, A: np.ndarray, B: np.ndarray, product: Product) -> None:
        self._memory = memory
        self._layouts = product.A, product.B
        words = [memory.offset(A), *A.strides, memory.offset(B), *B.strides]
        self._lying = memory.gather(np.array(words, np.int64)).tolist()

    def A(self, rank: int) -> np.ndarray:
        return self._array(self._layouts[0], rank, 0)

    def B(self, rank: int) -> np.ndarray:
        return self._array(self._layouts[1], rank, 3)

    def _array(self, layout: Layout, rank: int, at: int) -> np.ndarray:
        offset, down, right = self._lying[rank][at : at + 3]
        shape = layout.local_shape(rank)
        if 0 in shape:
            return np.empty(shape, layout.dtype)
        return self._memory.array(rank, shape, layout.dtype, offset, (down, right))

    def leave(self) -> None:
        """All ranks of the node have read what they need."""
        self._memory.sync()
