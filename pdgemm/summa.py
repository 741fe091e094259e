"""SUMMA: van de Geijn & Watts, Concurrency: Pract. Exper. 9(4), 1997; with C stationary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdgemm.accumulator import Accumulator, Room, add_sums
from pdgemm.blockcopy import copy_blocks
from pdgemm.dtypes import wire
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.runs import whole
from pdgemm.local import scale
from pdgemm.movers import MOVERS
from pdgemm.neighbours import Neighbours
from pdgemm.panels import column_panel, column_room, row_panel, row_room
from pdgemm.pipeline import PanelRing, Slot, prefetch
from pdgemm.products import Summa
from pdgemm.schedule import Bundle, PanelStep
from pdgemm.timing import Recorder


def summa(
    alpha: Any,
    A: np.ndarray,
    B: np.ndarray,
    beta: Any,
    C: np.ndarray,
    plan: Summa,
    grid: ProcessGrid,
    room: Room,
    recorder: Recorder,
    notify: Callable[[int, int], object],
    near: Neighbours | None,
) -> None:
    """C := alpha A B + beta C by SUMMA with C stationary.  Collective over the grid.

    A, B, C : this rank's elements of A (m, k), B (k, n) and C (m, n), as `plan` says: C has A's row map and B's
        column map; the blocks of the inner dimension may differ.  C is overwritten, not read where beta is 0.
    room : the buffers of the plan.   recorder : takes seconds, words and messages.   notify : hears of each panel;
        must not raise.   near : where panels are read in place, A and B of the other ranks.

    Cost per rank on q x q: 2mnk/q^2 flops; (mk + kn)(q - 1)/q^2 words in; 2 ceil(k/w) broadcasts;
    extra memory (lookahead + 1) w (m + n)/q words.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """
    if grid.idle:
        return
    i, j = grid.coords
    m_loc, n_loc = C.shape
    order_a, order_b = plan.A.order, plan.B.order
    traffic = recorder.traffic
    in_row, in_col = {j: A}, {i: B}  # the parts of A and of B that can be read from here
    if near:
        in_row |= {q: near("A", plan.A.rank(i, q)) for q in range(grid.row.size) if q != j}
        in_col |= {q: near("B", plan.B.rank(q, j)) for q in range(grid.col.size) if q != i}
    a_comes, b_comes = m_loc > 0 and grid.row.size > 1, n_loc > 0 and grid.col.size > 1
    a_travels, b_travels = a_comes and not near, b_comes and not near
    bundles = plan.bundles
    ring = PanelRing(plan.slots, room["panels of A"], room["panels of B"], recorder)

    def post(bundle: Bundle) -> Slot:
        slot = ring.take()
        if len(bundle.steps) > 1:
            post_together(bundle, slot)
            return slot
        step = bundle.steps[0]
        with recorder.phase("pack"):
            if step.col in in_row:
                slot.A = column_panel(in_row[step.col], order_a, step.a, slot.buffer_a, a_travels)
            else:
                slot.A = column_room(m_loc, order_a, step.width, slot.buffer_a)
            if step.row in in_col:
                slot.B = row_panel(in_col[step.row], order_b, step.b, slot.buffer_b, b_travels)
            else:
                slot.B = row_room(n_loc, order_b, step.width, slot.buffer_b)
        with recorder.phase("post"):
            slot.tag = slot.number
            bring_a(slot.A, step, slot)
            bring_b(slot.B, step, slot)
        return slot

    def post_together(bundle: Bundle, slot: Slot) -> None:
        """Thin panels side by side; where they travel of A by columns, of B by rows, so that each is contiguous."""
        with recorder.phase("pack"):
            if a_comes:
                slot.A = column_room(m_loc, "F" if a_travels else order_a, bundle.width, slot.buffer_a)
            else:
                slot.A = column_panel(A, order_a, bundle.a, slot.buffer_a, travels=False)
            if b_comes:
                slot.B = row_room(n_loc, "C" if b_travels else order_b, bundle.width, slot.buffer_b)
            else:
                slot.B = row_panel(B, order_b, bundle.b, slot.buffer_b, travels=False)
        at = 0
        for number, step in enumerate(bundle.steps):
            part = slice(at, at := at + step.width)
            slot.tag = slot.number + number * plan.slots
            if a_comes:
                if step.col in in_row:
                    with recorder.phase("pack"):
                        copy_blocks(in_row[step.col], slot.A[:, part], whole(m_loc), step.a)
                bring_a(slot.A[:, part], step, slot)
            if b_comes:
                if step.row in in_col:
                    with recorder.phase("pack"):
                        copy_blocks(in_col[step.row], slot.B[part], step.b, whole(n_loc))
                bring_b(slot.B[part], step, slot)

    def bring_a(panel: np.ndarray, step: PanelStep, slot: Slot) -> None:
        if a_travels:
            MOVERS[plan.mover](grid.row, wire(panel), step.col, slot, traffic)  # A_ik along my grid row
        elif a_comes and step.col != j:
            traffic.read(panel.size)

    def bring_b(panel: np.ndarray, step: PanelStep, slot: Slot) -> None:
        if b_travels:
            MOVERS[plan.mover](grid.col, wire(panel), step.row, slot, traffic)  # B_kj along my grid column
        elif b_comes and step.row != i:
            traffic.read(panel.size)

    sums = C if plan.sums_in_c or not bundles else room["sums"].reshape((m_loc, n_loc), order=plan.C.order)
    products = Accumulator(alpha, beta if sums is C else 0, sums, plan, room)
    # every rank walks every step, because every rank takes part in the broadcasts
    with ring:
        for done, (_, slot) in enumerate(prefetch(bundles, post, plan.slots - 1, recorder), 1):
            with recorder.phase("compute"):
                products.add(slot.A, slot.B)  # C_ij += A_ik B_kj
            notify(done, len(bundles))
    if not bundles:
        scale(beta, C)
    elif sums is not C:
        with recorder.phase("compute"):
            add_sums(sums, beta, C, room["update"])
