"""deal() sends rows from each rank to each other rank, by numbers of rows that only the sender knows before."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from pdgemm.algorithms.indexing.selection import copy_pairs
from pdgemm.grids.distribution import BlockCyclic, Distribution, UnevenBlocks
from pdgemm.grids.index_map import DealtPairs, IndexPairs
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays.device import Array, of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import new_array
from pdgemm.support.agreement import together


class Dealt(NamedTuple):
    """The matrix of the rows that this rank received, from the first rank first, and how many came from each rank."""

    matrix: DistMatrix
    sizes: np.ndarray

    @property
    def rows(self) -> Array:
        return self.matrix.local


def deal(rows: Array, sizes: Sequence[int] | np.ndarray, grid: ProcessGrid, name: str) -> Dealt:
    """Send rows of an array to the ranks: the first sizes[0] to the lowest rank of the grid, and so on.  Collective.

    rows  : (sum of sizes, n), of one type and one n on all ranks.
    sizes : one number for each of `grid.members`, in ascending order.

    Cost per rank: an allgather of P^2 integers; each row for another rank is sent once, packed, in one exchange.
    """
    start, comm, members = perf_counter(), grid.comm, sorted(grid.members)
    every = np.empty((comm.size, len(members)), np.int64)
    comm.Allgather(np.array(sizes, np.int64), every)
    every, width = every[members], rows.shape[1]
    there = grid.base.reshaped((len(members), 1), tuple(members))
    cols = BlockCyclic(width, max(1, width), 1)
    source, target = (Distribution(UnevenBlocks.of(every.sum(axis).tolist()), cols) for axis in (1, 0))
    with together(comm):
        local = new_array(target.local_shape(there.coords), rows.dtype, "C", there, of(rows))
    received = DistMatrix(local, there, target, "C", shared=False)
    sent = DistMatrix(np.ascontiguousarray(rows), there, source, "C", shared=False)
    indices = np.arange(width)
    pairs = DealtPairs(tuple(map(tuple, every.tolist()))), IndexPairs(indices, indices)
    copy_pairs(name, sent, received, pairs, start)
    return Dealt(received, every[:, there.coords[0]] if min(there.coords) >= 0 else every[:, 0] * 0)
