"""Panels that are gathered and factored on one rank: the order of rows in the buffer of the panel, and the messages."""

from __future__ import annotations

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule
from pdgemm.schedules.rounds import COLS, Messages, grid_of, messages, signals
from pdgemm.schedules.schedule import Buffers

EXPOSED = ("gathered",)  # buffers that other ranks read


def panel_slabs(rows: BlockCyclic, panel: Panel) -> dict[int, slice]:
    """Return the slice of the owner's buffer for the rows of each grid row, from the panel's first row on.

    The owner's own rows come first, so that the diagonal block is on top; the rows of a grid row keep their order.
    """
    slabs, at = dict[int, slice](), 0
    for distance in range(rows.parts):
        part = (panel.row + distance) % rows.parts
        rest = rows.count(part) - rows.below(panel.start, part)
        slabs[part] = slice(at, at + rest)
        at += rest
    return slabs


def gathered_rows(rows: BlockCyclic, panel: Panel) -> np.ndarray:
    """Return the global row index of each row in the buffer of the panel's owner."""
    parts = panel_slabs(rows, panel)
    return np.concatenate(
        [rows.to_global(rows.below(panel.start, i) + np.arange(x.stop - x.start), i) for i, x in parts.items()]
    )


def gathered(schedule: PanelSchedule, panel: Panel, back: bool = False) -> list[Messages]:
    """Return the messages, or signals and reads, of a panel in its grid column: to its owner, or back."""
    grid, size, parts = grid_of(schedule.A), schedule.A.dtype.itemsize, panel_slabs(schedule.A.distribution.rows, panel)
    owner, others = grid[panel.row, panel.col], np.array([i for i in parts if i != panel.row], int)
    ranks, words = grid[others, panel.col], np.array([parts[i].stop - parts[i].start for i in others]) * panel.width
    ends = np.full(len(others), owner), ranks
    source, target = ends if back else ends[::-1]
    moves = messages(schedule.mover, source, target, words, size, COLS)
    return [*moves, signals(source, target[:, None], size, COLS)] if schedule.shared else moves


def gathering_buffers(schedule: PanelSchedule, rank: int | None) -> Buffers:
    """Return the buffer in which a rank gathers panels, and the buffer for the parts that it sends and receives."""
    m, (m_loc, _), w = schedule.A.distribution.rows.n, schedule.A.local_shape(rank), schedule.widest
    sent = not schedule.shared and schedule.grid.shape[0] > 1
    least = 0 if rank is None else m_loc
    return {
        "gathered": (m * w, schedule.A.dtype),
        "parts of panels": (max(2 * m_loc, m - least) * w * sent, schedule.A.dtype),
    }
