"""The scales of operands of low precision: each rank multiplies the panels that it has received by their scales."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pdgemm.local.arrays.device import Array
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.schedules.products.scales import blocks_of, strip_name


class Strip(NamedTuple):
    """The scales of all elements of A, or of B, that a rank multiplies.

    scales   : a row for each row of A (column of B), and a column for each block of inner indices.
    block_of : for each inner index that the rank multiplies, the column of `scales` that has its scales.
    """

    scales: np.ndarray
    block_of: np.ndarray

    def of(self, rows: Any) -> Strip:
        """Return the scales of some rows of A (columns of B)."""
        return self._replace(scales=self.scales[rows])

    def apply(self, panel: Array, inner: np.ndarray, by: np.ufunc = np.multiply) -> None:
        """Multiply the columns of a panel by the scales of these inner indices.  A panel of B is passed transposed.

        by : numpy.multiply, or numpy.divide to divide.
        """
        blocks, rows = self.block_of[inner], slice(len(panel))
        starts = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(inner)]
        for start, stop in pairwise(starts) if len(inner) else ():
            part = panel[:, start:stop]
            by(part, self.scales[rows, blocks[start], None], out=part)


Strips = tuple[Strip | None, Strip | None]  # of A and of B
NO_STRIPS: Strips = None, None


def strips_of(plan: ProductPlan, rank: int, buffers: Mapping[str, Array]) -> Strips:
    """Return the strips of `plan.product.A` and `plan.product.B` on a rank.   buffers : memory, by `strip_name`."""
    if not any(plan.problem.scales):
        return NO_STRIPS
    strips = list[Strip | None]()
    for name, scales in zip("AB", plan.problem.scales):
        here = "AB"[(name == "B") != plan.transposed]
        i, j = getattr(plan.product, here).coords(rank)
        if scales is None or i < 0:
            strips.append(None)
            continue
        rows, cols = plan.product.reach(here)
        inner = cols[j] if here == "A" else rows[i]
        stored, block = buffers[strip_name(name)], scales.block[name == "A"]
        block_of = np.searchsorted(blocks_of(inner, block), inner // block)
        strips.append(Strip(stored if name == "A" else stored.T, block_of))
    a, b = strips
    return (b, a) if plan.transposed else (a, b)
