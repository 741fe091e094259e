"""SUMMA with A stationary: van de Geijn & Watts, Concurrency: Pract. Exper. 9(4), 1997; for thin B and C."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pdgemm.algorithms.accumulator import Accumulator, Room
from pdgemm.arrays.device import Array
from pdgemm.arrays.dtypes import wire
from pdgemm.arrays.elementwise import Combine, paired, scale
from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.movers import MOVERS
from pdgemm.movers.block_copy import copy_blocks
from pdgemm.movers.node_arrays import Neighbours
from pdgemm.movers.panel_views import column_panel, column_room
from pdgemm.movers.pipeline import PanelRing, Slot
from pdgemm.movers.reduce import reduce
from pdgemm.movers.staged import Staged
from pdgemm.schedules import Stationary
from pdgemm.schedules.steps import PanelStep


def stationary(
    alpha: Any,
    A: Array,
    B: Array,
    beta: Any,
    C: Array,
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
    in_col = {i: B}  # the parts of B that can be read from here
    if near:
        in_col |= {q: near("B", plan.B.rank(j, q)) for q in range(grid.col.size) if q != i}
    b_comes, c_travels = grid.col.size > 1 and k_loc > 0, grid.row.size > 1 and m_loc > 0
    b_travels = b_comes and not near
    ring = PanelRing(plan.slots, room["panels of C"], room["panels of B"])
    poll = ring.poll if grid.ranks_per_node and not plan.device else None
    totals = room["sums"].reshape(plan.slots, -1)
    staged_b, staged_c = ((x.shared_out(plan.slots) if (x := room.get(f"staged {name}")) else None) for name in "BC")

    def post(step: PanelStep) -> Slot:
        slot = ring.take()
        with recorder.phase("pack"):
            if step.row == i or (step.row in in_col and not plan.fetched):
                slot.B = column_panel(in_col[step.row], plan.B.order, step.b, slot.buffer_b, b_travels)
            else:
                slot.B = column_room(k_loc, plan.B.order, step.width, slot.buffer_b)
                if step.row in in_col and k_loc:
                    copy_blocks(in_col[step.row], slot.B, identity(k_loc), step.b)
        with recorder.phase("post"):
            if b_travels:  # B_jp along my grid column
                flat = slot.B.ravel(order="K")
                mover = Staged(staged_b[slot.number].cut(0, flat.size)) if staged_b else MOVERS[plan.mover]
                mover(grid.col, flat if staged_b else wire(flat), step.row, slot, recorder)
            elif b_comes and step.row != i:
                recorder.traffic.read(slot.B.size)
        return slot

    def add_up(step: PanelStep, slot: Slot, panel: Array) -> None:
        """Start adding up C_ip along my grid row; its owner adds it to C when the slot is needed again."""
        total = panel
        if c_travels:
            total = column_room(m_loc, order, step.width, totals[slot.number])
            staged = staged_c[slot.number].cut(0, panel.size) if staged_c else None
            total = reduce(grid.row, panel, total, step.col, slot, recorder, staged, ring.poll)
        if j == step.col and m_loc:
            slot.when_free.append(partial(add, total, step.a.inverse))

    def add(total: Array, cols: IndexMap) -> None:
        """C_ip := total + beta C_ip, as much at a time as there is room for."""
        combine, rows = Combine(1, beta, paired(room["update"])), identity(m_loc)
        with recorder.phase("compute"):
            for high, wide in combine.pieces(m_loc, cols.size):
                copy_blocks(total, C, rows.cut(high.start, high.stop), cols.cut(wide.start, wide.stop), combine)

    steps = plan.steps
    with ring.used(recorder):
        for done, (step, slot) in enumerate(ring.prefetch(steps, post, plan.ahead), 1):
            panel = column_room(m_loc, order, step.width, slot.buffer_a)
            with recorder.phase("compute"):
                Accumulator(alpha, 0, panel, plan, room, poll).add_wide(A, slot.B)  # C_ip = A_ij B_jp, my part of it
            with recorder.phase("post"):
                add_up(step, slot, panel)
            notify(done, len(steps))
