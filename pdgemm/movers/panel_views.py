"""Where a panel lies: in its owner's matrix as it is, or packed in a buffer.

`order` is the memory order of the matrix that the panel is cut from, the same on all ranks: a rank
whose own part is empty still has to know in which order the panels of the others arrive.
"""

from __future__ import annotations

import numpy as np

from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.movers.block_copy import copy_blocks


def column_panel(local: np.ndarray, order: str, runs: IndexMap, buffer: np.ndarray, travels: bool) -> np.ndarray:
    """local[:, runs]: a view where that will do, else packed into `buffer`."""
    view = in_place(local, runs, travels)
    if view is not None:
        return view
    rows = local.shape[0]
    panel = column_room(rows, order, runs.size, buffer)
    if rows:
        copy_blocks(local, panel, identity(rows), runs)
    return panel


def in_place(local: np.ndarray, runs: IndexMap, travels: bool) -> np.ndarray | None:
    """local[:, runs] as a view, if that will do.

    A panel that travels has to be contiguous; one that stays needs only to be a single run.
    """
    if not runs.contiguous:
        return None
    start = int(runs.source[0])
    view = local[:, start : start + runs.size]
    return view if not travels or view.flags.forc else None


def column_room(rows: int, order: str, width: int, buffer: np.ndarray) -> np.ndarray:
    """Room in `buffer` for a panel of `width` columns."""
    words = buffer[: rows * width]
    return words.reshape(width, rows).T if order == "F" else words.reshape(rows, width)


def flipped(order: str) -> str:
    """The memory order of the transpose."""
    return "C" if order == "F" else "F"
