"""The scales of an operand of low precision: their layout, and the exchange that sends them to the ranks.

Element (i, j) of the operand is V[i, j] S[i // mb, j // nb], for a matrix V of 8-bit values and a matrix S of scales.
The values are sent as they are, panel by panel.  Before that, in one exchange, each rank receives its strip: the scales
of all rows of A (columns of B) and all inner indices that it multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.index_map import IndexPairs
from pdgemm.grids.layout import Layout
from pdgemm.schedules.exchanges.exchange import Selection, fitted_messages
from pdgemm.schedules.products.product import Product

STRIP = np.dtype(np.float32)  # the type of the scales in strips


@dataclass(frozen=True)
class Scales:
    """The scales of one operand.

    layout : layout of the matrix of scales.
    block  : (mb, nb): each scale multiplies mb x nb values; mb >= m stands for all rows, nb >= n for all columns.
    """

    layout: Layout
    block: tuple[int, int]

    @property
    def T(self) -> Scales:
        """The scales of the transpose."""
        return Scales(self.layout.T, self.block[::-1])


def strip_name(operand: str) -> str:
    """Return the name of the strip of an operand among the moves and buffers of a plan."""
    return f"scales of {operand}"


def plan_strips(
    scales: Scales, product: Product, operand: str, transposed: bool, size: int, spare: int | None
) -> Selection:
    """Return the exchange from a matrix of scales to the strip of each rank.

    operand    : "A" or "B", as the user calls it.   transposed : the product is C^T = B^T A^T.
    spare      : bytes for messages in addition to messages of one element; None: no limit.
    The strip of A has a row for each row that its rank multiplies, and a column for each block of inner indices, in
    ascending order; the strip of B is the transpose of that.  All strips are as large as the largest.
    """
    here = ("B" if operand == "A" else "A") if transposed else operand
    x, reach = getattr(product, here), product.reach(here)
    if transposed:
        x, reach = x.T, reach[::-1]
    inner = 1 if operand == "A" else 0
    distribution, (rows, cols) = strips_of_parts(scales.block, reach, inner)
    target = replace(x, distribution=distribution, dtype=STRIP, conjugated=False)
    one = Selection(scales.layout, target, size, 1, True, rows=rows, cols=cols)
    return fitted_messages(one, None if spare is None else one.extra_bytes(None) + spare)


def strips_of_parts(
    blocks: tuple[int, int], reach: tuple[list[np.ndarray], list[np.ndarray]], inner: int
) -> tuple[Distribution, list[IndexPairs]]:
    """Return the distribution of strips, and two `IndexPairs`: rows (columns) of the scales and of the strips.

    blocks : (mb, nb), as `Scales.block`.
    reach : as `Product.reach` returns it: the rows that each part of the rows multiplies, and likewise the columns.
    inner : the axis of the inner indices.  Along it a strip has one scale for each block; along the other axis it has
        one for each row or column.
    """
    sides, pairs = list[BlockCyclic](), list[IndexPairs]()
    for axis, (of_parts, block) in enumerate(zip(reach, blocks)):
        wanted = [blocks_of(x, block) if axis == inner else x // block for x in of_parts]
        most = max(1, *map(len, wanted))
        sides.append(BlockCyclic(most * len(wanted), most, len(wanted)))
        targets = [part * most + np.arange(len(some)) for part, some in enumerate(wanted)]
        pairs.append(IndexPairs(np.concatenate(wanted), np.concatenate(targets)))
    return Distribution(*sides), pairs


def blocks_of(indices: np.ndarray, block: int) -> np.ndarray:
    """Return the numbers of the blocks that contain these indices, ascending."""
    return np.unique(indices // block)
