"""SUMMA with A stationary: van de Geijn & Watts, Concurrency: Pract. Exper. 9(4), 1997; for thin B and C."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.accumulator import Accumulator, Room
from pdgemm.blockcopy import copy_blocks
from pdgemm.dtypes import wire
from pdgemm.elements import tiles
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.runs import Pairing, whole
from pdgemm.local import scale, update
from pdgemm.movers import MOVERS
from pdgemm.neighbours import Neighbours
from pdgemm.panels import column_panel, column_room
from pdgemm.pipeline import PanelRing, Slot
from pdgemm.products import Stationary
from pdgemm.schedule import PanelStep
from pdgemm.timing import Recorder


def stationary(
    alpha: Any,
    A: np.ndarray,
    B: np.ndarray,
    beta: Any,
    C: np.ndarray,
    plan: Stationary,
    grid: ProcessGrid,
    room: Room,
    recorder: Recorder,
    notify: Callable[[int, int], object],
    near: Neighbours | None,
) -> None:
    """C := alpha A B + beta C with A stationary.  Collective over the grid.

    A, C : this rank's elements of A (m, k) and C (m, n), which have one row map; C is overwritten, not read where
        beta is 0.
    B    : the elements of B (k, n) of the rank across the diagonal, as `plan` says: A's column map is B's row map.
    room : the buffers of the plan.   recorder : takes seconds, words and messages.   notify : hears of each panel;
        must not raise.   near : where panels are read in place, A and B of the other ranks.

    Cost per rank on q x q: 2mnk/q^2 flops; (kn + mn)(q - 1)/q^2 words in; ceil(n/w) broadcasts and reductions;
    extra memory (lookahead + 2) w (k + 2m)/q words.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """
    if grid.idle:
        return
    if not plan.mnk[2]:
        scale(beta, C)
        return
    i, j = grid.coords
    (m_loc, k_loc), order = A.shape, plan.C.order
    traffic, in_col = recorder.traffic, {i: B}  # the parts of B that can be read from here
    if near:
        in_col |= {q: near("B", plan.B.rank(j, q)) for q in range(grid.col.size) if q != i}
    b_comes, c_travels = grid.col.size > 1 and k_loc > 0, grid.row.size > 1 and m_loc > 0
    b_travels = b_comes and not near
    ring = PanelRing(plan.slots, room["panels of C"], room["panels of B"])
    poll = ring.poll if grid.ranks_per_node else None
    totals = room["sums"].reshape(plan.slots, -1)

    def post(step: PanelStep) -> Slot:
        slot = ring.take()
        with recorder.phase("pack"):
            if step.row in in_col:
                slot.B = column_panel(in_col[step.row], plan.B.order, step.b, slot.buffer_b, b_travels)
            else:
                slot.B = column_room(k_loc, plan.B.order, step.width, slot.buffer_b)
        with recorder.phase("post"):
            if b_travels:
                MOVERS[plan.mover](grid.col, wire(slot.B), step.row, slot, traffic)  # B_jp along my grid column
            elif b_comes and step.row != i:
                traffic.read(slot.B.size)
        return slot

    def add_up(step: PanelStep, slot: Slot, panel: np.ndarray) -> None:
        """Start adding up C_ip along my grid row; its owner adds it to C when the slot is needed again."""
        total = column_room(m_loc, order, step.width, totals[slot.number]) if c_travels else panel
        if c_travels:
            mine = j == step.col
            slot.users.append(grid.row.Ireduce(panel, total if mine else None, MPI.SUM, root=step.col).Wait)
            if mine:
                traffic.words_received += panel.size * (grid.row.size - 1)
                traffic.messages_received += grid.row.size - 1
            else:
                traffic.sent(panel.size)
        if j == step.col and m_loc:
            slot.users.append(partial(add, total, step.a.inverse))

    def add(total: np.ndarray, cols: Pairing) -> None:
        """C_ip := total + beta C_ip, as much at a time as there is room for."""
        pair, rows = room["update"].reshape(2, -1), whole(m_loc)
        for high, wide in tiles(m_loc, cols.size, pair.shape[1]):
            part = rows.cut(high.start, high.stop), cols.cut(wide.start, wide.stop)
            copy_blocks(total, C, *part, lambda target, source: update(1, source, beta, target, pair))

    steps = plan.steps
    with ring.used(recorder):
        for done, (step, slot) in enumerate(ring.prefetch(steps, post, plan.lookahead), 1):
            panel = column_room(m_loc, order, step.width, slot.buffer_a)
            with recorder.phase("compute"):
                Accumulator(alpha, 0, panel, plan, room, poll).add_wide(A, slot.B)  # C_ip = A_ij B_jp, my part of it
            with recorder.phase("post"):
                add_up(step, slot, panel)
            notify(done, len(steps))
