"""Where a panel lies: in its owner's matrix as it is, or packed in a buffer.

`order` is the memory order of the matrix that the panel is cut from, the same on all ranks: a rank
whose own part is empty still has to know in which order the panels of the others arrive.
"""

from __future__ import annotations

import numpy as np

from pdgemm.schedule import Runs


def column_panel(local: np.ndarray, order: str, runs: Runs, buffer: np.ndarray, travels: bool) -> np.ndarray:
    """local[:, runs]: a view where that will do, else packed into `buffer`.

    A panel that travels has to be contiguous; one that stays needs only to be a single run.
    """
    if runs.single:
        start, width = int(runs.starts[0]), int(runs.lengths[0])
        view = local[:, start : start + width]
        if not travels or view.flags.forc:
            return view
    panel = column_room(local.shape[0], order, runs.size, buffer)
    if order == "F":
        _gather_rows(local.T, runs, panel.T)
    else:
        _gather_rows(local, runs, panel, axis=1)
    return panel


def column_room(rows: int, order: str, width: int, buffer: np.ndarray) -> np.ndarray:
    """Room in `buffer` for a panel of `width` columns."""
    words = buffer[: rows * width]
    return words.reshape(width, rows).T if order == "F" else words.reshape(rows, width)


def row_panel(local: np.ndarray, order: str, runs: Runs, buffer: np.ndarray, travels: bool) -> np.ndarray:
    """local[runs, :], as `column_panel` of the transpose."""
    return column_panel(local.T, flipped(order), runs, buffer, travels).T


def row_room(cols: int, order: str, width: int, buffer: np.ndarray) -> np.ndarray:
    """Room in `buffer` for a panel of `width` rows."""
    return column_room(cols, flipped(order), width, buffer).T


def flipped(order: str) -> str:
    """The memory order of the transpose."""
    return "C" if order == "F" else "F"


def _gather_rows(local: np.ndarray, runs: Runs, panel: np.ndarray, axis: int = 0) -> None:
    """panel := local[runs] along `axis`: by slices where runs are long, else by one indexed copy."""
    if len(runs.starts) * 16 > runs.size and local.flags.forc:  # else take would copy the whole array first
        np.take(local, runs.indices(), axis=axis, out=panel, mode="clip")  # "clip": straight into `out`
        return
    at = 0
    for start, length in zip(runs.starts.tolist(), runs.lengths.tolist(), strict=True):
        here, there = slice(at, at + length), slice(start, start + length)
        if axis == 0:
            panel[here] = local[there]
        else:
            panel[:, here] = local[:, there]
        at += length
