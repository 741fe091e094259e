"""Collectives of rows of activations that are divided along a line of a mesh, as values."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.training.mesh_shape import block_of


def rows_by_rank(rows: int, ranks: int) -> tuple[int, ...]:
    """Return how many of the rows each rank of a line has: blocks of ceil(rows/ranks)."""
    blocks = [block_of(rows, ranks, index) for index in range(ranks)]
    return tuple(block.stop - block.start for block in blocks)


@lru_cache(1024)
def row_collective(
    operation: str, counts: tuple[int, ...], width: int, dtype: np.dtype, line: tuple[int, ...], mover: str = RING.name
) -> Collective:
    """Return a collective on rows of `width` words, of which each rank of the line has some.

    operation : "all_gather" brings all rows to all ranks; "reduce_scatter" brings to each rank the sums of its rows;
        "all_reduce" brings the sums of all rows to all ranks.
    counts : the rows of each rank.   mover : as of `Collective`.

    A rank receives, of R rows, r of them its own, on t ranks: (R - r) width words, (t - 1) r width words, and with
    "all_reduce" as many as with both: with equal parts Megatron's (t - 1)/t, and twice that.
    """
    return Collective(operation, "pairwise", line, tuple(rows * width for rows in counts), dtype, mover=mover)
