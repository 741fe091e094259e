"""Vectors that the ranks of a grid combine in a binary tree, always in the same order, and that all of them get.

MPI's own reductions may differ among ranks in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from pdgemm.arrays.folds import Parts
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Traffic

_PIECE_BYTES = 1 << 30  # of a message


def members(dimension: BlockCyclic) -> list[int]:
    """Return the owners of any index."""
    return [part for part in range(dimension.parts) if dimension.count(part)]


def combine(
    comm: MPI.Comm, ranks: Sequence[int], mine: Parts, join: Callable[[Parts, Parts], Parts], counted: Traffic
) -> Parts:
    """Return on the first of some ranks the parts of all of them, joined in pairs; the others' are of no use then."""
    if comm.rank not in ranks:
        return mine
    me, step = ranks.index(comm.rank), 1
    while step < len(ranks):
        if me & step:
            for x in mine:
                for piece in _pieces(x):
                    comm.Send(piece, dest=ranks[me - step])
                counted.sent(x.size)
            break
        if me + step < len(ranks):
            other = tuple(np.empty_like(x) for x in mine)
            for x in other:
                for piece in _pieces(x):
                    comm.Recv(piece, source=ranks[me + step])
                counted.received(x.size)
            mine = join(mine, other)
        step *= 2
    return mine


def broadcast(comm: MPI.Comm, root: int, mine: Parts, length: int, like: Parts, counted: Traffic) -> Parts:
    found = tuple(np.ascontiguousarray(x) for x in mine)
    if comm.rank != root:
        found = tuple(np.empty(length, x.dtype) for x in like)
    for x in found if comm.size > 1 else ():
        for piece in _pieces(x):
            comm.Bcast(piece, root)
        if comm.rank == root:
            counted.sent(x.size, copies=comm.size - 1)
        else:
            counted.received(x.size)
    return found


def gathered(comm: MPI.Comm, layout: BlockCyclic, mine: np.ndarray, counted: Traffic) -> np.ndarray:
    """Return all of a vector, of which each rank of comm has its own indices."""
    whole = np.empty(layout.n, mine.dtype)
    for root in members(layout):
        (part,) = broadcast(comm, root, (mine,), layout.count(root), (mine,), counted)
        whole[layout.indices(root)] = part
    return whole


def to_idle(grid: ProcessGrid, found: Parts, length: int, like: Parts, counted: Traffic) -> Parts:
    """Return the parts on ranks that own no elements, too."""
    idle = [rank for rank in range(grid.comm.size) if rank not in grid.rank_map]
    owner = grid.rank_map[0]
    if grid.comm.rank == owner:
        for x in found:
            for rank in idle:
                for piece in _pieces(x):
                    grid.comm.Send(piece, dest=rank)
                counted.sent(x.size)
    elif grid.idle:
        found = tuple(np.empty(length, x.dtype) for x in like)
        for x in found:
            for piece in _pieces(x):
                grid.comm.Recv(piece, source=owner)
            counted.received(x.size)
    return found


def _pieces(x: np.ndarray) -> list[np.ndarray]:
    flat = x.view(np.uint8)
    return [flat[at : at + _PIECE_BYTES] for at in range(0, flat.size, _PIECE_BYTES)]


def predicted(layout: Distribution, grid: ProcessGrid, words: int, axis: int | None) -> Traffic:
    """Return the words and messages of this rank by formula, for parts of so many words for each column."""
    total, comm = Traffic(), grid.comm

    def sent(length: int, copies: int) -> None:
        for _ in range(words):
            total.sent(length, copies)

    def received(length: int, times: int = 1) -> None:
        for _ in range(words * times):
            total.received(length)

    def tree(place: int, of: int, length: int) -> None:
        steps = [1 << s for s in range(of.bit_length()) if 1 << s < of]
        own = [s for s in steps if place % (2 * s) == 0 and place + s < of]
        received(length, len(own))
        sent(length, int(place > 0))

    def from_root(root: bool, size: int, length: int) -> None:
        sent(length, size - 1) if root else received(length, int(size > 1))

    if axis is None:
        ranks = [grid.rank_map[i * grid.shape[1] + j] for i in members(layout.rows) for j in members(layout.cols)]
        if comm.rank in ranks:
            tree(ranks.index(comm.rank), len(ranks), 1)
        from_root(comm.rank == ranks[0], comm.size, 1)
        return total
    reduced, kept = (layout.rows, layout.cols) if axis == 0 else (layout.cols, layout.rows)
    i, j = grid.coords if axis == 0 else grid.coords[::-1]
    owners, idle = members(reduced), comm.size - len(grid.rank_map)
    if grid.idle:
        received(kept.n)
        return total
    if kept.count(j):
        if i in owners:
            tree(owners.index(i), len(owners), kept.count(j))
        from_root(i == owners[0], reduced.parts, kept.count(j))
    for root in members(kept):
        from_root(root == j, kept.parts, kept.count(root))
    if comm.rank == grid.rank_map[0]:
        sent(kept.n, idle)
    return total
