"""SUMMA with A stationary: van de Geijn & Watts, Concurrency: Pract. Exper. 9(4), 1997; for thin B and C."""

from __future__ import annotations

from functools import partial
from typing import Any

from pdgemm.algorithms.products.accumulator import Accumulator
from pdgemm.algorithms.products.executor import Call, Notify
from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.elementwise import Combine, paired
from pdgemm.schedules.products import Stationary
from pdgemm.schedules.steps import PanelStep
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers import BROADCASTS
from pdgemm.transport.movers.nccl import nccl_reduce
from pdgemm.transport.movers.panel_views import column_panel, column_room
from pdgemm.transport.movers.pipeline import PanelRing, Slot
from pdgemm.transport.movers.reduce import reduce
from pdgemm.transport.movers.staged import Staged
from pdgemm.transport.store import store


class StationaryExecutor:
    """Computes C := alpha A B + beta C with A stationary.

    A and C have the same row map; B is on the transposed grid, and its row map is the column map of A.

    Cost per rank on q x q: 2mnk/q^2 flops; (kn + mn)(q - 1)/q^2 words in; ceil(n/w) broadcasts and reductions;
    extra memory (2 lookahead + 1) w (k + 2m)/q words.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """

    def __init__(self, call: Call[Stationary]) -> None:
        self._call = call

    def __call__(self, beta: Any, recorder: Recorder, notify: Notify) -> None:
        call = self._call
        A, B, C, plan, grid = call.A, call.B, call.C, call.product, call.grid
        workspace, peers = call.workspace, call.peers
        to_c = Combine(1, beta, paired(workspace["update"]))
        if grid.idle:
            return
        if not plan.mnk[2]:
            with recorder.phase("compute"):
                store(C, None, to_c)
            return
        i, j = grid.coords
        (m_loc, k_loc), order = A.shape, plan.C.order
        in_col = {i: B}  # the local arrays of B that this rank can read
        if peers:
            in_col |= {q: peers("B", plan.B.rank(j, q)) for q in range(grid.col.size) if q != i}
        b_comes, c_travels = grid.col.size > 1 and k_loc > 0, grid.row.size > 1 and m_loc > 0
        b_travels = b_comes and not peers
        ring = PanelRing(plan.slots, workspace["panels of C"], workspace["panels of B"], call.transfers)
        poll = call.transfers.poll if grid.ranks_per_node and not plan.device else None
        totals = workspace["sums"].reshape(plan.slots, -1)
        staged_b, staged_c = (
            (x.shared_out(plan.slots) if (x := workspace.get(f"staged {name}")) else None) for name in "BC"
        )

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
                    mover = Staged(staged_b[slot.number].cut(0, flat.size)) if staged_b else BROADCASTS[plan.mover]
                    mover(grid.col, flat if staged_b else wire(flat), step.row, slot, recorder)
                elif b_comes and step.row != i:
                    recorder.traffic.read(slot.B.size)
            return slot

        def add_up(step: PanelStep, slot: Slot, panel: Array) -> None:
            """Start the reduction of C_ip along my grid row; its owner stores it in C when the slot is needed again."""
            if c_travels and plan.nccl:
                nccl_reduce(grid.row, panel, step.col, slot, recorder)
            elif c_travels:
                arriving = totals[slot.number][: panel.size]
                staged = staged_c[slot.number].cut(0, panel.size) if staged_c else None
                poll = call.transfers.poll
                call.transfers.expect(reduce(grid.row, panel, arriving, step.col, slot, recorder, staged, poll))
            if j == step.col and m_loc:
                slot.when_free.append(partial(add, panel, step.a.inverse))

        def add(total: Array, cols: IndexMap) -> None:
            """Assign C_ip := total + beta C_ip."""
            with recorder.phase("compute"):
                store(C, total, to_c, identity(m_loc), cols)

        steps = plan.order(grid.comm.rank)
        with ring.used(recorder):
            for done, (step, slot) in enumerate(ring.prefetch(steps, post, plan.ahead), 1):
                panel = column_room(m_loc, order, step.width, slot.buffer_a)
                with recorder.phase("compute"):
                    products = Accumulator(call.alpha, 0, panel, plan, workspace, poll)
                    products.add_wide(A, slot.B)  # my partial sum A_ij B_jp of C_ip
                with recorder.phase("post"):
                    add_up(step, slot, panel)
                notify(done, len(steps))
