"""SUMMA: van de Geijn & Watts, Concurrency: Pract. Exper. 9(4), 1997; with C stationary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from pdgemm.algorithms.accumulator import Accumulator, Room, add_sums
from pdgemm.arrays.device import Array, Pinned
from pdgemm.arrays.dtypes import wire
from pdgemm.arrays.elementwise import scale
from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.movers import MOVERS
from pdgemm.movers.block_copy import copy_blocks
from pdgemm.movers.node_arrays import Neighbours
from pdgemm.movers.panel_views import column_panel, column_room, flipped, in_place
from pdgemm.movers.pipeline import PanelRing, Slot
from pdgemm.movers.ring import announce, follow, relay
from pdgemm.movers.staged import Staged
from pdgemm.schedules import Line, Summa


class SummaRun:
    """C := alpha A B + beta C by SUMMA with C stationary, with all panels, buffers and calls of BLAS made once.

    A, B, C : this rank's elements of A (m, k), B (k, n) and C (m, n), as `plan` says: C has A's row map and B's
        column map; the blocks of the inner dimension may differ.
    room : the buffers of the plan.   near : where panels are read in place, A and B of the other ranks.

    Cost per rank on q x q: 2mnk/q^2 flops; (mk + kn)(q - 1)/q^2 words in; 2 ceil(k/w) broadcasts;
    extra memory (lookahead + 1) w (m + n)/q words.
    Error: |C - C^| <= gamma_k |A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's.
    """

    def __init__(
        self,
        alpha: Any,
        A: Array,
        B: Array,
        C: Array,
        plan: Summa,
        grid: ProcessGrid,
        room: Room,
        near: Neighbours | None,
    ) -> None:
        self._C, self._plan, self._room, self._idle = C, plan, room, grid.idle
        if grid.idle:
            return
        i, j = grid.coords
        in_row, in_col = {j: A}, {i: B}  # the parts of A and of B that can be read from here
        rooms_a, rooms_b = {j: room["panels of A"]}, {i: room["panels of B"]}  # where the node's panels are put
        row, col = (plan.line(name, grid.comm.rank) for name in "AB")
        if near:
            for q in set(row.near(j)) - {j}:
                in_row[q] = near("A", plan.A.rank(i, q))
                rooms_a |= {q: near("panels of A", plan.A.rank(i, q))} if row.several else {}
            for q in set(col.near(i)) - {i}:
                in_col[q] = near("B", plan.B.rank(q, j))
                rooms_b |= {q: near("panels of B", plan.B.rank(q, j))} if col.several else {}
        in_col = {q: x.T for q, x in in_col.items()}
        staged_a, staged_b = room.get("staged A"), room.get("staged B")
        along_row = _Side(in_row, plan.A.order, grid.row, plan, row, rooms_a, near, staged_a)
        along_col = _Side(in_col, flipped(plan.B.order), grid.col, plan, col, rooms_b, near, staged_b)
        bundles = plan.bundles
        self._sums = C if plan.sums_in_c or not bundles else room["sums"].reshape(C.shape, order=plan.C.order)
        self._ring = PanelRing(plan.slots, room["panels of A"], room["panels of B"])
        self._products = Accumulator(
            alpha, 0, self._sums, plan, room, self._ring.poll if grid.ranks_per_node and not plan.device else None
        )
        self._updates = []
        for turn, bundle in enumerate(bundles):
            left = along_row.panel([(x.col, x.a) for x in bundle.steps], bundle.a, turn)
            right = along_col.panel([(x.row, x.b) for x in bundle.steps], bundle.b, turn)
            multiply = self._products.prepared(left.panel, right.panel.T)  # C_ij += A_ik B_kj
            self._updates.append(_Update([*left.parts, *right.parts], multiply))

    def __call__(self, beta: Any, recorder: Recorder, notify: Callable[[int, int], object]) -> None:
        """The product of what A and B now hold.  Collective over the grid.

        beta : C is not read where it is 0.   recorder : takes seconds, words and messages.   notify : hears of each
        panel; must not raise.
        """
        if self._idle:
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

        ring, updates, in_c = self._ring, self._updates, self._sums is self._C
        self._products.beta = beta if in_c else 0
        # every rank walks every step, because every rank takes part in the broadcasts
        with ring.used(recorder):
            for done, (update, _) in enumerate(ring.prefetch(updates, post, self._plan.ahead), 1):
                with recorder.phase("compute"):
                    update.multiply()
                notify(done, len(updates))
        if not updates:
            scale(beta, self._C)
        elif not in_c:
            with recorder.phase("compute"):
                add_sums(self._sums, beta, self._C, self._room["update"])


class _Part(NamedTuple):
    """What a rank does for one owner's part of a panel: pack it, bring it here, both or nothing."""

    pack: Callable[[], object] | None
    bring: Callable[[Slot, Recorder], object] | None
    tag: int  # of its messages: one that no other part in flight has


class _Panel(NamedTuple):
    panel: Array
    parts: list[_Part]


class _Update(NamedTuple):
    """One or several panels of A and of B, multiplied at once."""

    parts: list[_Part]
    multiply: Callable[[], object]


class _Side:
    """Panels of A along a grid row; or of B along a grid column, transposed.

    parts : the local arrays that can be read from here, by their place along `comm`.
    rooms : likewise the buffers of panels.   staged : as much room on the host, where they go through it.
    """

    def __init__(
        self,
        parts: dict[int, Array],
        order: str,
        comm: MPI.Comm,
        plan: Summa,
        line: Line,
        rooms: dict[int, Array],
        near: Neighbours | None,
        staged: Pinned | None,
    ) -> None:
        self._parts, self._order, self._comm, self._slots = parts, order, comm, plan.slots
        self._staged, self._fetched = staged.shared_out(plan.slots) if staged else None, plan.fetched
        self._line, self._rooms, self._near = line, {q: x.reshape(plan.slots, -1) for q, x in rooms.items()}, near
        self._rows = parts[comm.rank].shape[0]
        self._comes = comm.size > 1 and self._rows > 0
        self._travels = self._comes and not plan.shared
        self._mover = plan.mover

    def panel(self, steps: list[tuple[int, IndexMap]], runs: IndexMap, turn: int) -> _Panel:
        """Where the columns `runs` are when they are needed, and how they come there.

        steps : their owners, and the columns of each.  Those of several owners are put side by side; where they
        travel by columns, so that each owner's are contiguous.
        """
        if self._comes and self._near and self._line.several:
            return self._relayed(steps, runs, turn, self._near.memory.fence)
        slot = turn % self._slots
        me, together = self._comm.rank, len(steps) > 1 and self._comes
        if not together:
            steps = [(steps[0][0] if self._comes else me, runs)]
            owner = steps[0][0]
            if owner in self._parts and not (self._fetched and owner != me):
                view = in_place(self._parts[owner], runs, self._travels)
                if view is not None:
                    return _Panel(view, [_Part(None, self._bring(view, owner, slot, 0), slot)])
        panel = self._room(me, runs.size, slot, by_columns=together and self._travels)
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
        """Of this node where it lies, if that will do; else put together by one rank of the node for all of them."""
        me, slot, alone = self._comm.rank, turn % self._slots, len(steps) == 1
        way = self._line.passage(me, [owner for owner, _ in steps], runs.contiguous, turn)
        mine, panel = (self._room(place, runs.size, slot, by_columns=not alone) for place in (me, way.receiver))
        if way.in_place:
            panel = column_panel(self._parts[steps[0][0]], self._order, runs, panel, travels=False)
        parts, at = list[_Part](), 0
        for number, ((owner, cols), chain) in enumerate(zip(steps, way.chains)):
            there, at = mine[:, at : at + cols.size], at + cols.size
            leaves = owner == me and bool(chain)
            ready = in_place(self._parts[me], cols, travels=True) if leaves and alone else None
            gathers = not way.in_place and way.receiver == me and owner in self._parts
            pack = self._pack(owner, there, cols) if gathers or (leaves and ready is None) else None
            if chain:
                x = wire(there if ready is None else ready)
                bring: Callable[[Slot, Recorder], object] | None = partial(relay, self._comm, x, chain)
            else:
                bring = partial(_read, there.size) if owner != me else None
            parts.append(_Part(pack, bring, slot + number * self._slots))
        if way.readers:
            tells = partial(announce, self._comm, way.readers, fence)
            hears = partial(follow, self._comm, way.receiver, fence)
            parts.append(_Part(None, tells if way.receiver == me else hears, slot))
        return _Panel(panel, parts)

    def _room(self, place: int, width: int, slot: int, by_columns: bool) -> Array:
        return column_room(self._rows, "F" if by_columns else self._order, width, self._rooms[place][slot])

    def _pack(self, owner: int, there: Array, cols: IndexMap) -> Callable[[], object]:
        return partial(copy_blocks, self._parts[owner], there, identity(self._rows), cols)

    def _bring(self, panel: Array, owner: int, slot: int, at: int) -> Callable[[Slot, Recorder], object] | None:
        """at : where in its slot's room the panel begins."""
        if self._travels and self._staged:
            room = self._staged[slot].cut(at, at + panel.size)
            return partial(Staged(room), self._comm, panel.ravel(order="K"), owner)
        if self._travels:
            return partial(MOVERS[self._mover], self._comm, wire(panel), owner)
        return partial(_read, panel.size) if self._comes and owner != self._comm.rank else None


def _read(words: int, slot: Slot, recorder: Recorder) -> None:
    recorder.traffic.read(words)
