"""SUMMA: van de Geijn & Watts, Concurrency: Pract. Exper. 9(4), 1997; C is stationary or, for thin B and C, A."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from pdgemm.algorithms.products.accumulator import Accumulator, Inner
from pdgemm.algorithms.products.broadcast_panels import BroadcastPanels, PanelPart, post
from pdgemm.algorithms.products.executor import Call, Notify
from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.instrument.recorder import Recorder, nothing
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.schedules.products import Stationary, Summa
from pdgemm.schedules.steps import PanelStep
from pdgemm.transport.movers.nccl import nccl_reduce
from pdgemm.transport.movers.panel_views import column_buffer, column_panel, held_panel
from pdgemm.transport.movers.pipeline import PanelRing, Slot
from pdgemm.transport.movers.reduce import start_reduction
from pdgemm.transport.store import store


class SummaExecutor:
    """Computes C := alpha A B + beta C by SUMMA with C stationary; panels, buffers and BLAS calls are set up once.

    C has A's row map and B's column map; A and B may have different blocks of the inner dimension.

    Cost per rank on q x q: 2mnk/q^2 flops; (mk + kn)(q - 1)/q^2 words in; 2 ceil(k/w) broadcasts;
    extra memory (lookahead + 1) w (m + n)/q words.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's type.
    """

    def __init__(self, call: Call[Summa]) -> None:
        plan, grid, workspace, C = call.product, call.grid, call.workspace, call.C
        self._call, self._updates, self._held = call, list[_Update](), list[tuple[Array, Array, Inner]]()
        if grid.idle:
            return
        (i, j), bundles = grid.coords, plan.order(grid.comm.rank)
        held_a, held_b = plan.panels_held
        along_row = BroadcastPanels(call, "A", grid.row, lambda q: plan.A.rank(i, q), held=held_a)
        along_col = BroadcastPanels(call, "B", grid.col, lambda q: plan.B.rank(q, j), transposed=True, held=held_b)
        in_c = plan.sums_in_c or not bundles
        self._sums = C if in_c else held_panel(C.shape[0], plan.C.order, C.shape[1], workspace["sums"])
        self._ring = PanelRing(plan.slots, workspace["panels of A"], workspace["panels of B"], call.transfers)
        self._products = Accumulator(call, 0, self._sums, plan.formed.of(grid.comm.rank))
        # the last panels that fit the slots are multiplied window by window of C; each window is then reduced
        last = (1 if plan.device or plan.nodes else plan.slots) if call.windows else 0
        for turn, bundle in enumerate(bundles):
            left = along_row.panel([(x.col, x.a) for x in bundle.steps], bundle.a, turn)
            right = along_col.panel([(x.row, x.b) for x in bundle.steps], bundle.b, turn)
            a, b, held = left.panel, right.panel.T, turn + last >= len(bundles)  # C_ij += A_ik B_kj
            inner = plan.inner(bundle) if any(call.scales) else None
            if held:
                self._held.append((a, b, inner))
            mine = not plan.transport.shared and not held
            mine &= all(grid.row.size == 1 or x.col == j for x in bundle.steps)
            mine &= all(grid.col.size == 1 or x.row == i for x in bundle.steps)
            multiply = nothing if held else self._products.prepared(a, b, inner)
            self._updates.append(_Update([*left.parts, *right.parts], multiply, mine))
        self._moves = any(part.pack or part.bring for update in self._updates for part in update.parts)

    def __call__(self, beta: Any, recorder: Recorder, notify: Notify) -> None:
        call = self._call
        if call.grid.idle:
            return
        ring, updates, in_c = self._ring, self._updates, self._sums is call.C
        self._products.beta = beta if in_c else 0
        # every rank iterates over every step, because every rank takes part in the broadcasts, if any panel is moved
        with ring.used(recorder) if self._moves else nullcontext():
            in_order: Iterable[tuple[_Update, Slot | None]] = ((update, None) for update in updates)
            if self._moves:
                in_order = ring.prefetch(
                    updates, lambda x: post(ring, x.parts, recorder), call.product.ahead, lambda x: x.local
                )
            for done, (update, _) in enumerate(in_order, 1):
                with recorder.phase("compute"):
                    update.multiply()
                if done == len(updates):
                    self._products.add_by_windows(self._held, call.windows, call.completed, recorder)
                notify(done, len(updates))
        if not updates:
            call.multiply_c(beta, recorder)
        elif not in_c:
            with recorder.phase("compute"):
                store(call.C, self._sums, call.to_c(beta), within=call.product.kept(call.grid.comm.rank))


class _Update(NamedTuple):
    """Multiplies one or several panels of A and of B at once, after the transfers of these panels.

    local : this rank owns all panels.
    """

    parts: list[PanelPart]
    multiply: Callable[[], object]
    local: bool


class StationaryExecutor:
    """Computes C := alpha A B + beta C with A stationary.

    A and C have the same row map; B is on the transposed grid, and its row map is the column map of A.

    Cost per rank on q x q: 2mnk/q^2 flops; (kn + mn)(q - 1)/q^2 words in; ceil(n/w) broadcasts and reductions;
    extra memory (2 lookahead + 1) w (k + 2m)/q words; on P x 1 only (lookahead + 1) w k, because sums are formed in C.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's type.
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
        early = in_c and not plan.transport.shared  # if sums are sent, all ranks of a grid row need the same order
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
