"""SUMMA: van de Geijn & Watts, Concurrency: Pract. Exper. 9(4), 1997; with C stationary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdgemm.errors import Shield
from pdgemm.local import gemm_accumulate, scale
from pdgemm.matrix import DistMatrix
from pdgemm.movers import MOVERS
from pdgemm.panels import column_panel, column_room, row_panel, row_room
from pdgemm.pipeline import PanelRing, Slot, prefetch
from pdgemm.planner import Plan
from pdgemm.schedule import PanelStep
from pdgemm.timing import Recorder


def summa(
    alpha: Any,
    A: DistMatrix,
    B: DistMatrix,
    beta: Any,
    C: DistMatrix,
    plan: Plan,
    ring: PanelRing,
    recorder: Recorder,
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """C := alpha A B + beta C by SUMMA with C stationary.  Collective over C.grid.

    A : DistMatrix (m, k);  B : DistMatrix (k, n);  C : DistMatrix (m, n), overwritten, not read where
        beta is 0.  Same grid and dtype; C has A's row map and B's column map; the blocks of the inner
        dimension may differ in A and B.
    plan : panels, lookahead, mover.   ring : buffers for `plan.slots` panels of `plan.panel_words`.
    recorder : takes seconds, words and messages.

    Cost per rank on q x q: 2mnk/q^2 flops; (mk + kn)(q - 1)/q^2 words in; 2 ceil(k/w) broadcasts;
    extra memory (lookahead + 1) w (m + n)/q words.
    Error: |C - C^| <= gamma_k |A||B| (Higham 2002, 3.5).
    """
    grid = C.grid
    i, j = grid.coords
    m_loc, n_loc = C.local.shape
    broadcast, traffic = MOVERS[plan.mover], recorder.traffic
    a_travels, b_travels = grid.row.size > 1, grid.col.size > 1

    def post(step: PanelStep) -> Slot:
        slot = ring.take()
        with recorder.phase("pack"):
            if j == step.col:
                slot.A = column_panel(A.local, A.order, step.a, slot.buffer_a, a_travels)
            else:
                slot.A = column_room(m_loc, A.order, step.width, slot.buffer_a)
            if i == step.row:
                slot.B = row_panel(B.local, B.order, step.b, slot.buffer_b, b_travels)
            else:
                slot.B = row_room(n_loc, B.order, step.width, slot.buffer_b)
        with recorder.phase("post"):
            if a_travels and m_loc:
                broadcast(grid.row, slot.A, step.col, slot, traffic)  # A_ik along my grid row
            if b_travels and n_loc:
                broadcast(grid.col, slot.B, step.row, slot, traffic)  # B_kj along my grid column
        return slot

    notify = Shield(progress)
    # every rank walks every step, because every rank takes part in the broadcasts
    with ring:
        for done, slot in enumerate(prefetch(plan.steps, post, plan.lookahead, recorder), 1):
            with recorder.phase("compute"):
                gemm_accumulate(alpha, slot.A, slot.B, beta, C.local)  # C_ij += A_ik B_kj
            beta = 1
            notify(done, len(plan.steps))
    if not plan.steps:
        scale(beta, C.local)
    if notify.error is not None:
        raise notify.error
