"""The messages that send rows of a matrix to the ranks that own the rows' groups (`pdgemm.grouped`), and back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution, UnevenBlocks
from pdgemm.grids.index_map import IndexPairs
from pdgemm.grids.layout import Layout
from pdgemm.schedules.exchanges.exchange import Selection, fitted_messages
from pdgemm.schedules.schedule import Buffers


@dataclass(frozen=True)
class RoutedRows(Selection):
    """The exchange of rows between a matrix and buffers of rows on the ranks that own the rows' groups.

    inward : True: from the matrix to the groups; False: from the groups to the matrix.
    """

    inward: bool = field(kw_only=True)

    @property
    def groups(self) -> Layout:
        """The layout of the rows of all groups, one below the other."""
        return self.target if self.inward else self.source

    def buffers(self, rank: int | None) -> Buffers:
        rows, cols = self.groups.local_shape(rank)
        return super().buffers(rank) | {"rows of groups": (rows * cols, self.groups.dtype)}


def plan_routed(
    matrix: Layout,
    rows: IndexPairs,
    counts: tuple[int, ...],
    inward: bool,
    copies_only: bool,
    dtype: np.dtype,
    shared: bool = False,
    device: str = "",
    staged: bool = False,
    nccl: bool = False,
) -> RoutedRows:
    """Return an exchange of whole rows, whose messages fit in cache.

    matrix : layout of the matrix.   inward : as in `RoutedRows`.
    rows   : pairs of a row of the matrix and a row of the groups; if not `inward`, the row of the groups is first.
    counts : the number of rows in all groups of rank 0, of rank 1, and so on.   dtype : the type of these rows.
    """
    size, width = len(counts), matrix.distribution.shape[1]
    there = Distribution(UnevenBlocks.of(counts), BlockCyclic(width, max(1, width), 1))
    ends = [matrix, Layout(there, tuple(range(size)), dtype)]
    source, target = ends if inward else ends[::-1]
    every = np.arange(width)
    copies_only = copies_only and not matrix.conjugated
    one = RoutedRows(
        source, target, size, 1, copies_only, shared, device, staged, nccl,
        rows=rows, cols=IndexPairs(every, every), inward=inward,
    )  # fmt: skip
    return fitted_messages(one)
