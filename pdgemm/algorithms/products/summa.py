"""SUMMA: van de Geijn & Watts, Concurrency: Pract. Exper. 9(4), 1997; with C stationary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

from pdgemm.algorithms.products.accumulator import Accumulator, Inner
from pdgemm.algorithms.products.broadcast_panels import BroadcastPanels, Part, post
from pdgemm.algorithms.products.executor import Call, Notify
from pdgemm.instrument.recorder import Recorder, nothing
from pdgemm.local.arrays.device import Array
from pdgemm.schedules.products import Summa
from pdgemm.transport.movers.panel_views import held_panel
from pdgemm.transport.movers.pipeline import PanelRing, Slot
from pdgemm.transport.store import store


class SummaExecutor:
    """Computes C := alpha A B + beta C by SUMMA with C stationary; panels, buffers and BLAS calls are set up once.

    C has A's row map and B's column map; A and B may have different blocks of the inner dimension.

    Cost per rank on q x q: 2mnk/q^2 flops; (mk + kn)(q - 1)/q^2 words in; 2 ceil(k/w) broadcasts;
    extra memory (lookahead + 1) w (m + n)/q words.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
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
        together = (1 if plan.device or plan.nodes else plan.slots) if call.windows else 0
        for turn, bundle in enumerate(bundles):
            left = along_row.panel([(x.col, x.a) for x in bundle.steps], bundle.a, turn)
            right = along_col.panel([(x.row, x.b) for x in bundle.steps], bundle.b, turn)
            a, b, held = left.panel, right.panel.T, turn + together >= len(bundles)  # C_ij += A_ik B_kj
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

    parts: list[Part]
    multiply: Callable[[], object]
    local: bool
