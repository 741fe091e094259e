"""Panels that are broadcast along a grid row or column: the arrays to multiply, and the actions that fill them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mpi4py import MPI

from pdgemm.algorithms.products.executor import Call
from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import wire
from pdgemm.schedules.node_relay import NodeLine
from pdgemm.transport.block_copy import copy_blocks
from pdgemm.transport.movers import BROADCASTS
from pdgemm.transport.movers.panel_views import column_buffer, column_panel, flipped, held_panel, in_place
from pdgemm.transport.movers.pipeline import PanelRing, Slot
from pdgemm.transport.movers.ring import announce, follow, forward
from pdgemm.transport.movers.staged import Staged


class PanelPart(NamedTuple):
    """The actions of a rank for one owner's part of a panel: pack the part, transfer it, both or neither."""

    pack: Callable[[], object] | None
    bring: Callable[[Slot, Recorder], object] | None
    tag: int  # message tag, which no other part in flight has


class PreparedPanel(NamedTuple):
    panel: Array
    parts: list[PanelPart]


class BroadcastPanels:
    """The panels of one operand along a grid row or a grid column: read in place, relayed between nodes, or sent.

    name    : "A" or "B".   line : the communicator of the grid row or grid column.
    rank_of : returns the rank in the grid of a rank in `line`.
    transposed : panels are rows of the operand, which are prepared as the columns of its transpose.
    held    : the panel buffers are never sent, so that their rows need not be contiguous.
    """

    def __init__(
        self,
        call: Call[Any],
        name: str,
        line: MPI.Comm,
        rank_of: Callable[[int], int],
        transposed: bool = False,
        held: bool = False,
    ) -> None:
        plan, peers, buffer, me = call.product, call.peers, f"panels of {name}", line.rank
        self._comm = line
        self._line = NodeLine(tuple(plan.nodes[rank_of(q)] if plan.nodes else 0 for q in range(line.size)))
        # local arrays and panel buffers that this rank can read, by the owner's rank in `line`
        parts, buffers = {me: getattr(call, name)}, {me: call.workspace[buffer]}
        if peers:
            for q in set(self._line.near(me)) - {me}:
                parts[q] = peers(name, rank_of(q))
                buffers |= {q: peers(buffer, rank_of(q))} if self._line.several else {}
        order = getattr(plan, name).order
        self._parts = {q: x.T for q, x in parts.items()} if transposed else parts
        self._order = flipped(order) if transposed else order
        self._buffers, self._peers = {q: x.reshape(plan.slots, -1) for q, x in buffers.items()}, peers
        staged = call.workspace.get(f"staged {name}")  # host buffers of the same size, if MPI is not GPU-aware
        self._staged, self._slots = staged.shared_out(plan.slots) if staged else None, plan.slots
        self._fetched, self._mover = plan.transport.fetched, plan.mover
        self._rows = self._parts[me].shape[0]
        self._comes = self._comm.size > 1 and self._rows > 0
        self._travels, self._holds = self._comes and not plan.transport.shared, held

    def panel(self, steps: list[tuple[int, IndexMap]], runs: IndexMap, turn: int) -> PreparedPanel:
        """Return the array that will hold the columns `runs` of the operand, and the actions that fill this array.

        steps : the owners, and the columns of each owner.  Columns of several owners are stored side by side, in
        column-major order if they are sent, so that the columns of each owner are contiguous.
        """
        if self._comes and self._peers and self._line.several:
            return self._relayed(steps, runs, turn, self._peers.memory.fence)
        slot = turn % self._slots
        if not self._rows:
            return PreparedPanel(self._buffer(self._comm.rank, runs.size, slot, by_columns=False), [])
        me, bundled = self._comm.rank, len(steps) > 1 and self._comes
        if not bundled:
            steps = [(steps[0][0] if self._comes else me, runs)]
            owner = steps[0][0]
            if owner in self._parts and not (self._fetched and owner != me):
                view = in_place(self._parts[owner], runs, self._travels)
                if view is not None:
                    return PreparedPanel(view, [PanelPart(None, self._bring(view, owner, slot, 0), slot)])
        panel = self._buffer(me, runs.size, slot, by_columns=bundled and self._travels)
        parts, at = [], 0
        for number, (owner, cols) in enumerate(steps):
            there = panel[:, at : (at := at + cols.size)]
            pack = self._pack(owner, there, cols) if owner in self._parts and self._rows else None
            bring = self._bring(there, owner, slot, self._rows * (at - cols.size))
            parts.append(PanelPart(pack, bring, slot + number * self._slots))
        return PreparedPanel(panel, parts)

    def _relayed(
        self, steps: list[tuple[int, IndexMap]], runs: IndexMap, turn: int, fence: Callable[[], object]
    ) -> PreparedPanel:
        """Return a view of a panel on this node, if possible, else the panel that one rank of the node assembles."""
        me, slot, alone = self._comm.rank, turn % self._slots, len(steps) == 1
        role = self._line.role(me, [owner for owner, _ in steps], runs.contiguous, turn)
        mine, panel = (self._buffer(q, runs.size, slot, by_columns=not alone) for q in (me, role.receiver))
        if role.in_place:
            panel = column_panel(self._parts[steps[0][0]], self._order, runs, panel, travels=False)
        parts, at = list[PanelPart](), 0
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
            parts.append(PanelPart(pack, bring, slot + number * self._slots))
        if role.readers:
            notify_readers = partial(announce, self._comm, role.readers, fence)
            wait_until_ready = partial(follow, self._comm, role.receiver, fence)
            parts.append(PanelPart(None, notify_readers if role.receiver == me else wait_until_ready, slot))
        return PreparedPanel(panel, parts)

    def _buffer(self, owner: int, width: int, slot: int, by_columns: bool) -> Array:
        buffer = held_panel if self._holds else column_buffer
        return buffer(self._rows, "F" if by_columns else self._order, width, self._buffers[owner][slot])

    def _pack(self, owner: int, there: Array, cols: IndexMap) -> Callable[[], object]:
        return partial(copy_blocks, self._parts[owner], there, identity(self._rows), cols)

    def _bring(self, panel: Array, owner: int, slot: int, at: int) -> Callable[[Slot, Recorder], object] | None:
        """Return the action that transfers a panel; None if this rank does not need it, or has it.

        at : the panel's offset in the slot's host buffer.
        """
        if self._travels and self._staged:
            workspace = self._staged[slot].cut(at, at + panel.size)
            return partial(Staged(workspace), self._comm, panel.ravel(order="K"), owner)
        if self._travels:
            return partial(BROADCASTS[self._mover], self._comm, wire(panel), owner)
        return partial(_read, panel.size) if self._comes and owner != self._comm.rank else None


def post(ring: PanelRing, parts: list[PanelPart], recorder: Recorder) -> Slot:
    """Start filling the panels of a step, in the next slot of the ring."""
    slot = ring.take()
    for part in parts:
        if part.pack:
            with recorder.phase("pack"):
                part.pack()
        if part.bring:
            with recorder.phase("post"):
                slot.tag = part.tag
                part.bring(slot, recorder)
    return slot


def _read(words: int, slot: Slot, recorder: Recorder) -> None:
    recorder.traffic.read(words)
