"""Rows of activations that are divided along a line of a mesh."""

from __future__ import annotations

from pdgemm.schedules.training.mesh_shape import block_of


def rows_by_rank(rows: int, ranks: int) -> tuple[int, ...]:
    """Return how many of the rows each rank of a line has: blocks of ceil(rows/ranks)."""
    blocks = [block_of(rows, ranks, index) for index in range(ranks)]
    return tuple(block.stop - block.start for block in blocks)
