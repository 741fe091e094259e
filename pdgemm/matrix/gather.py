"""Whole matrices on one rank or on all ranks: scattered and gathered in messages of limited size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Traffic
from pdgemm.instrument.run_report import VectorTraffic, count_vectors
from pdgemm.local.arrays.device import own_memory
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.schedules.collectives.vectors import ToAllRanks, gathering, vector_to_all
from pdgemm.transport.collectives import carry_out

PIECE_BYTES = 1 << 28  # MPI counts are ints: larger arrays are sent in pieces


class _Piece(NamedTuple):
    """Rows of one rank's local array that one message carries."""

    rank: int  # the owner
    local: slice  # rows of the owner's local array
    at: tuple[Any, Any]  # index of these elements in the whole matrix
    shape: tuple[int, int]


def scatter(whole: np.ndarray, local: np.ndarray, layout: Distribution, grid: ProcessGrid, root: int) -> None:
    """Set `local` on every rank to the rank's part of `whole` on the root.  Collective."""
    for piece in _pieces(layout, grid, local.itemsize):
        if grid.rank == root:
            part = np.ascontiguousarray(whole[piece.at])
            if piece.rank == root:
                local[piece.local] = part
            else:
                grid.comm.Send(wire(part), dest=piece.rank)
        elif grid.rank == piece.rank:
            grid.comm.Recv(wire(local[piece.local]), source=root)


def gather(local: np.ndarray, layout: Distribution, grid: ProcessGrid, whole: np.ndarray | None, root: int) -> None:
    """Set `whole` on the root to the parts of all ranks; `whole` is None on the other ranks.  Collective."""
    for piece in _pieces(layout, grid, local.itemsize):
        if piece.rank == grid.rank:
            part = np.ascontiguousarray(local[piece.local])
            if whole is None:
                grid.comm.Send(wire(part), dest=root)
        elif whole is not None:
            part = np.empty(piece.shape, local.dtype)
            grid.comm.Recv(wire(part), source=piece.rank)
        if whole is not None:
            whole[piece.at] = part


def gathering_buffer(layout: Layout, size: int) -> np.ndarray:
    """Return memory for the elements of the longest stage of `gathering`.  Local."""
    words = max(part.words for stage in gathering(layout, size)[0].stages for part in stage.parts)
    return own_memory(None).empty((words,), layout.dtype)


def allgather(local: np.ndarray, layout: Layout, grid: ProcessGrid, whole: np.ndarray, buffer: np.ndarray) -> None:
    """Set `whole` on every rank to the parts of all ranks, and count the words and messages.  Collective.

    buffer : the result of `gathering_buffer`.
    """
    schedule, height = gathering(layout, grid.size)
    rows, cols, counted = layout.distribution.rows, layout.distribution.cols, Traffic()
    indices = [(rows.indices(i), cols.indices(j)) for i, j in map(layout.coords, range(grid.size))]
    for number, stage in enumerate(schedule.stages):
        (collective,), slab = stage.parts, slice(number * height, (number + 1) * height)
        ends, parts = collective.offsets.tolist(), buffer[: collective.words]
        parts[ends[grid.rank] : ends[grid.rank + 1]] = local[slab].reshape(-1)
        carry_out(collective, grid.comm, [parts], counted)
        for (i, j), start, stop in zip(indices, ends, ends[1:]):
            if stop > start:
                whole[block_index(i[slab], j)] = parts[start:stop].reshape(-1, len(j))
    count_vectors(VectorTraffic(counted, schedule.traffic(grid.rank)))


def planned(grid: ProcessGrid, name: str, schedule: ToAllRanks) -> bool:
    """Return whether a program is planned on this grid; if so, add the schedule to it under this name."""
    if grid.draft and any(schedule.traffic(rank).words_received for rank in range(grid.size)):
        grid.draft.add(name, schedule)
    return grid.draft is not None


def to_all_ranks(grid: ProcessGrid, name: str, vector: np.ndarray, sums: bool = False) -> np.ndarray:
    """Return rank 0's vector on every rank, or with `sums` the sum of the vectors of all ranks.  Collective.

    The words and messages are counted.   name : the name of the vector in a planned program.
    """
    schedule = vector_to_all(grid.size, len(vector), vector.dtype, sums)
    if planned(grid, name, schedule):
        return vector
    vector, counted = vector.copy(), Traffic()
    for stage in schedule.stages:
        carry_out(stage.of(grid.rank), grid.comm, [vector], counted)
    count_vectors(VectorTraffic(counted, schedule.traffic(grid.rank)))
    return vector


def block_index(rows: np.ndarray, cols: np.ndarray) -> tuple[Any, Any]:
    """Return an index of these rows and columns: slices if both are contiguous, because NumPy copies slices fastest."""
    slices = [slice(int(x[0]), int(x[-1]) + 1) if len(x) and x[-1] - x[0] + 1 == len(x) else x for x in (rows, cols)]
    if all(isinstance(x, slice) for x in slices):
        return slices[0], slices[1]
    return np.ix_(rows, cols)  # type: ignore[return-value]


def _pieces(layout: Distribution, grid: ProcessGrid, itemsize: int) -> Iterator[_Piece]:
    """Yield pieces that fit one message, in the same order on every rank."""
    for rank in range(grid.size):
        i, j = grid.coords_of(rank)
        rows, cols = layout.rows.indices(i), layout.cols.indices(j)
        if len(cols):
            for slab in slabs(len(rows), len(cols), PIECE_BYTES // itemsize):
                yield _Piece(rank, slab, block_index(rows[slab], cols), (len(rows[slab]), len(cols)))
