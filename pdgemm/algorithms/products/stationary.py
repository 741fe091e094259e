"""SUMMA with A stationary: van de Geijn & Watts, Concurrency: Pract. Exper. 9(4), 1997; for thin B and C."""

from __future__ import annotations

from functools import partial
from typing import Any

from pdgemm.algorithms.products.accumulator import Accumulator
from pdgemm.algorithms.products.broadcast_panels import BroadcastPanels, post
from pdgemm.algorithms.products.executor import Call, Notify
from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.schedules.products import Stationary
from pdgemm.schedules.steps import PanelStep
from pdgemm.transport.movers.nccl import nccl_reduce
from pdgemm.transport.movers.panel_views import column_buffer, column_panel
from pdgemm.transport.movers.pipeline import PanelRing, Slot
from pdgemm.transport.movers.reduce import start_reduction
from pdgemm.transport.store import store


class StationaryExecutor:
    """Computes C := alpha A B + beta C with A stationary.

    A and C have the same row map; B is on the transposed grid, and its row map is the column map of A.

    Cost per rank on q x q: 2mnk/q^2 flops; (kn + mn)(q - 1)/q^2 words in; ceil(n/w) broadcasts and reductions;
    extra memory (2 lookahead + 1) w (k + 2m)/q words; on P x 1 only (lookahead + 1) w k, because sums are formed in C.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """

    def __init__(self, call: Call[Stationary]) -> None:
        plan, grid, self._call = call.product, call.grid, call
        if grid.idle or not plan.mnk[2]:
            return
        j = grid.coords[1]
        panels = BroadcastPanels(call, "B", grid.col, lambda q: plan.B.rank(j, q))
        order = enumerate(plan.order(grid.comm.rank))
        self._steps = [(step, panels.panel([(step.row, step.b)], step.b, turn)) for turn, step in order]
        self._ring = PanelRing(plan.slots, call.workspace["panels of C"], call.workspace["panels of B"], call.transfers)

    def __call__(self, beta: Any, recorder: Recorder, notify: Notify) -> None:
        call, plan, grid = self._call, self._call.product, self._call.grid
        if grid.idle:
            return
        if not plan.mnk[2]:
            call.multiply_c(beta, recorder)
            return
        ring, sums, in_c = self._ring, _SumsOfC(call, call.to_c(beta), recorder), plan.in_c
        early = in_c and not plan.transport.shared  # where sums are sent, all ranks of a grid row keep one order
        prefetched = ring.prefetch(
            self._steps,
            lambda x: post(ring, x[1].parts, recorder),
            plan.ahead,
            lambda x: early and x[0].row == grid.coords[0],
        )
        with ring.used(recorder):
            for done, ((step, of_b), slot) in enumerate(prefetched, 1):
                if in_c:
                    panel = column_panel(call.C, plan.C.order, step.a, slot.buffer_a, travels=False)
                else:
                    panel = column_buffer(call.A.shape[0], plan.C.order, step.width, slot.buffer_a)
                with recorder.phase("compute"):
                    left, right = call.scales
                    strips = left, right and right.of(plan.columns(step))
                    products = Accumulator(call, beta if in_c else 0, panel, scales=strips)
                    products.add_wide(call.A, of_b.panel)  # this rank's partial sum A_ij B_jp of C_ip
                if not in_c:
                    with recorder.phase("post"):
                        sums.add_up(step, slot, panel)
                notify(done, len(self._steps))


class _SumsOfC:
    """The panels C_ip, whose partial sums are reduced along this rank's grid row."""

    def __init__(self, call: Call[Stationary], to_c: Combine, recorder: Recorder) -> None:
        self._call, self._to_c, self._recorder = call, to_c, recorder
        self._arriving = call.workspace["sums"].reshape(call.product.slots, -1)
        staged = call.workspace.get("staged C")  # host buffers, where MPI cannot read the memory of the sums
        self._staged = staged.shared_out(call.product.slots) if staged else None
        self._rows = call.A.shape[0]

    def add_up(self, step: PanelStep, slot: Slot, panel: Array) -> None:
        """Start the reduction of C_ip along the grid row; its owner stores C_ip in C when the slot is needed again."""
        row, transfers = self._call.grid.row, self._call.transfers
        travels = row.size > 1 and self._rows > 0
        if travels and self._call.product.nccl:
            nccl_reduce(row, panel, step.col, slot, self._recorder)
        elif travels:
            arriving = self._arriving[slot.number][: panel.size]
            staged = self._staged[slot.number].cut(0, panel.size) if self._staged else None
            transfers.expect(
                start_reduction(row, panel, arriving, step.col, slot, self._recorder, staged, transfers.poll)
            )
        if self._call.grid.coords[1] == step.col and self._rows:
            slot.when_free.append(partial(self._store, panel, step.a.inverse))

    def _store(self, total: Array, cols: IndexMap) -> None:
        """Assign C_ip := total + beta C_ip."""
        with self._recorder.phase("compute"):
            store(self._call.C, total, self._to_c, identity(self._rows), cols)
