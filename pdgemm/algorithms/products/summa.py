"""SUMMA: van de Geijn & Watts, Concurrency: Pract. Exper. 9(4), 1997; with C stationary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from pdgemm.algorithms.products.accumulator import Accumulator, Inner
from pdgemm.algorithms.products.executor import Call, Notify
from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.instrument.recorder import Recorder, nothing
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.schedules.products import Summa
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers import BROADCASTS
from pdgemm.transport.movers.panel_views import column_buffer, column_panel, flipped, held_panel, in_place
from pdgemm.transport.movers.pipeline import PanelRing, Slot
from pdgemm.transport.movers.ring import announce, follow, forward
from pdgemm.transport.movers.staged import Staged
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
        along_row, along_col = _Side(call, "A"), _Side(call, "B")
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

        def post(update: _Update) -> Slot:
            slot = ring.take()
            for part in update.parts:
                if part.pack:
                    with recorder.phase("pack"):
                        part.pack()
                if part.bring:
                    with recorder.phase("post"):
                        slot.tag = part.tag
                        part.bring(slot, recorder)
            return slot

        ring, updates, in_c = self._ring, self._updates, self._sums is call.C
        self._products.beta = beta if in_c else 0
        # every rank iterates over every step, because every rank takes part in the broadcasts, if any panel is moved
        with ring.used(recorder) if self._moves else nullcontext():
            in_order: Iterable[tuple[_Update, Slot | None]] = ((update, None) for update in updates)
            if self._moves:
                in_order = ring.prefetch(updates, post, call.product.ahead, lambda update: update.local)
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


class _Part(NamedTuple):
    """Holds the actions of a rank for one owner's part of a panel: pack the part, transfer it, both or neither."""

    pack: Callable[[], object] | None
    bring: Callable[[Slot, Recorder], object] | None
    tag: int  # message tag, which no other part in flight has


class _Panel(NamedTuple):
    panel: Array
    parts: list[_Part]


class _Update(NamedTuple):
    """Multiplies one or several panels of A and of B at once, after the transfers of these panels.

    local : this rank owns all panels.
    """

    parts: list[_Part]
    multiply: Callable[[], object]
    local: bool


class _Side:
    """Prepares the panels of A along a grid row, or the transposed panels of B along a grid column."""

    def __init__(self, call: Call[Summa], name: str) -> None:
        plan, grid, peers, buffer = call.product, call.grid, call.peers, f"panels of {name}"
        (i, j), in_row = grid.coords, name == "A"
        me, self._comm = (j, grid.row) if in_row else (i, grid.col)
        self._line = plan.line(name, grid.comm.rank)
        # the local arrays and the panel buffers that this rank can read, by their owner's rank in `comm`
        parts, buffers = {me: getattr(call, name)}, {me: call.workspace[buffer]}
        if peers:
            for q in set(self._line.near(me)) - {me}:
                owner = plan.A.rank(i, q) if in_row else plan.B.rank(q, j)
                parts[q] = peers(name, owner)
                buffers |= {q: peers(buffer, owner)} if self._line.several else {}
        self._parts = parts if in_row else {q: x.T for q, x in parts.items()}
        self._order = plan.A.order if in_row else flipped(plan.B.order)
        self._buffers, self._peers = {q: x.reshape(plan.slots, -1) for q, x in buffers.items()}, peers
        staged = call.workspace.get(f"staged {name}")  # host buffers of the same size, if MPI is not GPU-aware
        self._staged, self._slots = staged.shared_out(plan.slots) if staged else None, plan.slots
        self._fetched, self._mover = plan.transport.fetched, plan.mover
        self._rows = self._parts[me].shape[0]
        self._comes = self._comm.size > 1 and self._rows > 0
        self._travels = self._comes and not plan.transport.shared
        self._holds = not self._travels and not plan.nodes  # `Summa.panels_held`

    def panel(self, steps: list[tuple[int, IndexMap]], runs: IndexMap, turn: int) -> _Panel:
        """Return the array with the columns `runs` that will be multiplied, and the actions that fill this array.

        steps : the owners, and the columns of each owner.  Columns of several owners are stored side by side, in
        column-major order if they are sent, so that the columns of each owner are contiguous.
        """
        if self._comes and self._peers and self._line.several:
            return self._relayed(steps, runs, turn, self._peers.memory.fence)
        slot = turn % self._slots
        me, bundled = self._comm.rank, len(steps) > 1 and self._comes
        if not bundled:
            steps = [(steps[0][0] if self._comes else me, runs)]
            owner = steps[0][0]
            if owner in self._parts and not (self._fetched and owner != me):
                view = in_place(self._parts[owner], runs, self._travels)
                if view is not None:
                    return _Panel(view, [_Part(None, self._bring(view, owner, slot, 0), slot)])
        panel = self._buffer(me, runs.size, slot, by_columns=bundled and self._travels)
        parts, at = [], 0
        for number, (owner, cols) in enumerate(steps):
            there = panel[:, at : (at := at + cols.size)]
            pack = self._pack(owner, there, cols) if owner in self._parts and self._rows else None
            bring = self._bring(there, owner, slot, self._rows * (at - cols.size))
            parts.append(_Part(pack, bring, slot + number * self._slots))
        return _Panel(panel, parts)

    def _relayed(
        self, steps: list[tuple[int, IndexMap]], runs: IndexMap, turn: int, fence: Callable[[], object]
    ) -> _Panel:
        """Return a view of a panel that is on this node, if possible, else the panel that one rank assembles here."""
        me, slot, alone = self._comm.rank, turn % self._slots, len(steps) == 1
        role = self._line.role(me, [owner for owner, _ in steps], runs.contiguous, turn)
        mine, panel = (self._buffer(q, runs.size, slot, by_columns=not alone) for q in (me, role.receiver))
        if role.in_place:
            panel = column_panel(self._parts[steps[0][0]], self._order, runs, panel, travels=False)
        parts, at = list[_Part](), 0
        for number, ((owner, cols), chain) in enumerate(zip(steps, role.chains)):
            there, at = mine[:, at : at + cols.size], at + cols.size
            leaves = owner == me and bool(chain)
            ready = in_place(self._parts[me], cols, travels=True) if leaves and alone else None
            gathers = not role.in_place and role.receiver == me and owner in self._parts
            pack = self._pack(owner, there, cols) if gathers or (leaves and ready is None) else None
            if chain:
                x = wire(there if ready is None else ready)
                bring: Callable[[Slot, Recorder], object] | None = partial(forward, self._comm, x, chain)
            else:
                bring = partial(_read, there.size) if owner != me else None
            parts.append(_Part(pack, bring, slot + number * self._slots))
        if role.readers:
            notify_readers = partial(announce, self._comm, role.readers, fence)
            wait_until_ready = partial(follow, self._comm, role.receiver, fence)
            parts.append(_Part(None, notify_readers if role.receiver == me else wait_until_ready, slot))
        return _Panel(panel, parts)

    def _buffer(self, owner: int, width: int, slot: int, by_columns: bool) -> Array:
        buffer = held_panel if self._holds else column_buffer
        return buffer(self._rows, "F" if by_columns else self._order, width, self._buffers[owner][slot])

    def _pack(self, owner: int, there: Array, cols: IndexMap) -> Callable[[], object]:
        return partial(copy_blocks, self._parts[owner], there, identity(self._rows), cols)

    def _bring(self, panel: Array, owner: int, slot: int, at: int) -> Callable[[Slot, Recorder], object] | None:
        """Return the action that transfers a panel, if any.   at : the panel's offset in the slot's host buffer."""
        if self._travels and self._staged:
            workspace = self._staged[slot].cut(at, at + panel.size)
            return partial(Staged(workspace), self._comm, panel.ravel(order="K"), owner)
        if self._travels:
            return partial(BROADCASTS[self._mover], self._comm, wire(panel), owner)
        return partial(_read, panel.size) if self._comes and owner != self._comm.rank else None


def _read(words: int, slot: Slot, recorder: Recorder) -> None:
    recorder.traffic.read(words)
