"""A panel is a view of its owner's local array where possible, else it is packed into a buffer.

`order` is the memory order of the matrix of the panel and is the same on all ranks: a rank whose local array is empty
still has to know the memory order of the panels that arrive from other ranks.
"""

from __future__ import annotations

import numpy as np

from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.local.arrays.alignment import apart
from pdgemm.local.arrays.device import Array, of
from pdgemm.transport.block_copy import copy_blocks


def column_panel(local: np.ndarray, order: str, runs: IndexMap, buffer: np.ndarray, travels: bool) -> np.ndarray:
    """Return local[:, runs] as a view where possible, else packed into `buffer`."""
    view = in_place(local, runs, travels)
    if view is not None:
        return view
    rows = local.shape[0]
    panel = column_buffer(rows, order, runs.size, buffer)
    if rows:
        copy_blocks(local, panel, identity(rows), runs)
    return panel


def in_place(local: np.ndarray, runs: IndexMap, travels: bool) -> np.ndarray | None:
    """Return local[:, runs] as a view, or None where that is not possible.

    The columns must be a single run; a panel that is sent must also be contiguous in memory.
    """
    if not runs.contiguous:
        return None
    start = int(runs.source[0])
    view = local[:, start : start + runs.size]
    return view if not travels or view.flags.forc else None


def column_buffer(rows: int, order: str, width: int, buffer: np.ndarray) -> np.ndarray:
    """Return a view of the start of `buffer` as a panel of `width` columns."""
    words = buffer[: rows * width]
    return words.reshape(width, rows).T if order == "F" else words.reshape(rows, width)


def held_panel(rows: int, order: str, width: int, buffer: Array) -> Array:
    """Return a view of the start of `buffer` as a panel that is not sent.

    On a device its rows (columns, if order is "F") are aligned for fast products, with gaps between them if necessary.
    """
    if of(buffer) is None:
        return column_buffer(rows, order, width, buffer)
    if order == "F":
        return held_panel(width, "C", rows, buffer).T
    distance = apart(width, buffer.dtype.itemsize)
    return buffer[: rows * distance].reshape(rows, distance)[:, :width]


def flipped(order: str) -> str:
    """Return the memory order of the transpose."""
    return "C" if order == "F" else "F"
