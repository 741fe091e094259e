"""QR factorisation by blocked Householder reflections with look-ahead: Schreiber & Van Loan, A storage-efficient WY
representation for products of Householder transformations, SIAM J. Sci. Stat. Comput. 10(1), 1989.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from pdgemm.arrays.device import Array
from pdgemm.arrays.dtypes import wire
from pdgemm.arrays.elementwise import CONVERT
from pdgemm.blas.local_gemm import gemm_accumulate
from pdgemm.blas.local_lapack import multiply_triangular
from pdgemm.blas.local_qr import compact_qr
from pdgemm.instrument.recorder import Then
from pdgemm.model.mover_registry import RING
from pdgemm.movers.panel_views import column_room
from pdgemm.movers.pipeline import Slot
from pdgemm.panel_algorithms.column_sum import ColumnSum
from pdgemm.panel_algorithms.task import PANEL, Task
from pdgemm.panel_schedules.householder_schedule import HouseholderSchedule
from pdgemm.panel_schedules.panel_schedule import Panel, below

_LENT, _RETURNED = 2, 4  # tags, for two slots each


class Householder:
    """Overwrites A (m, n) with R, and Q (m, k), the first k = min(m, n) columns of the identity, with Q: A = Q R.

    Each panel of A is (I - V T V^H) R, where V is unit lower trapezoidal and T upper triangular.  Both are kept: those
    of a grid column's panels lie in its "reflectors", first the rank's rows of V, beneath them T.

    Cost per rank on Pr x Pc, m >= n: (2 m n^2 - 2/3 n^3)/(Pr Pc) flops for R, and as many for Q.
    Error: columnwise |A - Q R| <= gamma_{mn} |A|, for any A (Higham, Accuracy and Stability, 2002, 19.4).
    """

    def __init__(self, task: Task[HouseholderSchedule]) -> None:
        self._task, self._plan, self._A = task, task.schedule, task.arrays["A"]
        self._rows, self._cols = self._plan.A.distribution.rows, self._plan.A.distribution.cols
        rooms = (task.workspace[name].reshape(2, -1) for name in ("panels", "parts"))
        self._slots = [Slot(number, *buffers) for number, buffers in enumerate(zip(*rooms))]
        self._reflectors: list[Array] = [None, None]
        self._sum = ColumnSum(task)

    def __call__(self) -> int:
        task, steps = self._task, self._plan.steps
        if task.grid.idle or not steps:
            return 0
        with np.errstate(all="ignore"):
            self._factor(0)
            for number in range(len(steps)):
                task.wait(self._slots[number % 2])
                columns = self._plan.updates(number)
                self._reflect(number, self._A, columns[0], "C")
                if number + 1 < len(steps):
                    self._factor(number + 1)  # it travels while the others are reflected
                    self._reflect(number, self._A, columns[1], "C")
            if self._plan.wants_q:
                self._form_q()
        self._sum.room(0, 0)
        for slot in self._slots:
            task.free(slot)
        return 0

    def _form_q(self) -> None:
        """Q := (I - V_1 T_1 V_1^H) (I - V_2 T_2 V_2^H) ... Q, from the last panel to the first."""
        steps, k = self._plan.steps, min(self._plan.A.distribution.shape)
        for number in reversed(range(-1, len(steps))):
            if number >= 0:
                self._task.free(self._slots[number % 2])
                self._bring(number, ready=True)
                self._task.transfers.expect(self._slots[number % 2].arrivals)
            if number + 1 < len(steps):
                self._task.wait(self._slots[(number + 1) % 2])
                self._reflect(number + 1, self._task.arrays["Q"], (steps[number + 1].start, k), "N")

    def _reflect(self, number: int, C: Array, columns: tuple[int, int], trans: str) -> None:
        """C := (I - V op(T) V^H) C, in columns from and to, and rows from the panel's start on."""
        panel, task = self._plan.steps[number], self._task
        i, j = task.grid.coords
        C = C[below(self._rows, i, panel.start) :, self._cols.local_window(*columns, j)]
        if not C.size:
            return
        V, T = self._parts(self._reflectors[number % 2], panel)
        W = self._sum.room(panel.width, C.shape[1])
        with task.recorder.phase("compute"):
            gemm_accumulate(1, V.T, C, 0, W, conjugate_a=C.dtype.kind == "c")
        self._sum(W, self._plan.members(panel), partial(multiply_triangular, T, lower=False, trans=trans))
        task.update(V, W, C)

    def _factor(self, number: int) -> None:
        """Factor a panel on the rank that has its diagonal block, and let V and T travel."""
        panel, (i, j), slot = self._plan.steps[number], self._task.grid.coords, self._slots[number % 2]
        self._task.free(slot)
        if j == panel.col and i == panel.row:
            self._form(panel, slot)
        if j == panel.col and i != panel.row and self._plan.heights[panel][i]:
            self._lend(number, slot)
        else:
            self._bring(number)
        self._task.transfers.expect(slot.arrivals)

    def _form(self, panel: Panel, slot: Slot) -> None:
        """Gather a panel from its grid column, factor it, and return the rows of V."""
        task, w, (row, *others) = self._task, panel.width, self._plan.members(panel)
        A, (V, T) = self._A[self._window(panel, row)], self._parts(self._own(panel), panel)
        P, R, at = V, np.empty((w, w), V.dtype, "F"), A.shape[0]
        if others:
            P = self._gathered(panel, task.workspace["gathered"])
            self._gather(panel, P, slot)
        CONVERT(P[:at], A)
        with task.recorder.phase("compute"):
            compact_qr(P, R, T)
        A[:w], A[w:] = R, 0
        if others:
            V[:] = P[:at]
            self._give_back(panel, P, T, slot)

    def _gather(self, panel: Panel, P: Array, slot: Slot) -> None:
        task, comm, room, parts = self._task, self._task.grid.col, slot.buffer_b, dict[int, Array]()
        for r, x in self._pieces(panel, P):
            if task.peers:
                task.follow(comm, r, slot)
                task.recorder.traffic.read(x.size)
                parts[r] = task.peers("A", task.rank_in("col", r))[self._window(panel, r)]
            else:
                parts[r], room = column_room(len(x), "F", panel.width, room), room[x.size :]
                request = comm.Irecv(wire(parts[r]), source=r, tag=_LENT + slot.number)
                slot.arrivals.append(task.recorder.coming(RING.name, parts[r], request))
        task.wait(slot)
        with task.recorder.phase("pack"):
            for r, x in self._pieces(panel, P):
                CONVERT(x, parts[r])

    def _give_back(self, panel: Panel, P: Array, T: Array, slot: Slot) -> None:
        task, comm, room = self._task, self._task.grid.col, slot.buffer_b
        if task.peers:
            task.announce(comm, [r for r, _ in self._pieces(panel, P)], slot)
            return
        for r, V in self._pieces(panel, P):
            x = column_room(len(V) + panel.width, "F", panel.width, room)
            room = room[x.size :]
            with task.recorder.phase("pack"):
                x[: len(V)], x[len(V) :] = V, T
            task.recorder.traffic.sent(x.size)
            slot.users.append(comm.Isend(wire(x), dest=r, tag=_RETURNED + slot.number))

    def _lend(self, number: int, slot: Slot) -> None:
        """Let the owner of a panel have this rank's rows, and take those of V; then these travel."""
        panel, task, comm, i = self._plan.steps[number], self._task, self._task.grid.col, self._task.grid.coords[0]
        A, own = self._A[self._window(panel, i)], self._own(panel)

        def returned() -> None:
            if task.peers:
                task.peers.memory.fence()
                V, T = self._parts(own, panel)
                owner = task.rank_in("col", panel.row)
                P = self._gathered(panel, task.peers("gathered", owner))
                with task.recorder.phase("pack"):
                    V[:] = dict(self._pieces(panel, P))[i]
                    T[:] = self._parts(self._of(panel, panel.row, task.peers("reflectors", owner)), panel)[1]
                task.recorder.traffic.read(own.size)
            A[:] = 0
            self._bring(number)

        if task.peers:
            task.announce(comm, [panel.row], slot)
            task.follow(comm, panel.row, slot, returned)
            return
        part = column_room(A.shape[0], "F", panel.width, slot.buffer_b)
        CONVERT(part, A)
        task.recorder.traffic.sent(part.size)
        slot.users.append(comm.Isend(wire(part), dest=panel.row, tag=_LENT + slot.number))
        request = comm.Irecv(wire(own), source=panel.row, tag=_RETURNED + slot.number)
        slot.arrivals.append(Then(task.recorder.coming(RING.name, own, request), returned))

    def _bring(self, number: int, ready: bool = False) -> None:
        """Let V and T travel along the grid row; where they are read, `ready` says that all know that they may be."""
        panel, task, slot = self._plan.steps[number], self._task, self._slots[number % 2]
        (i, j), row = task.grid.coords, task.grid.row
        if not self._plan.heights[panel][i]:
            return
        x = self._own(panel) if j == panel.col else None
        if task.peers and x is not None:
            if not ready and row.size > 1:
                task.announce(row, [c for c in range(row.size) if c != j], slot)
        elif task.peers:
            if not ready:
                task.follow(row, panel.col, slot)
            x = self._of(panel, i, task.peers("reflectors", task.rank_in("row", panel.col)))
            task.recorder.traffic.read(x.size)
        else:
            if x is None:
                x = column_room(self._plan.heights[panel][i] + panel.width, "F", panel.width, slot.buffer_a)
            task.send("row", x, panel.col, slot, PANEL)
        self._reflectors[slot.number] = x

    def _window(self, panel: Panel, i: int) -> tuple[slice, slice]:
        """Return the local indices of a panel, from its start on, in grid row i."""
        return slice(below(self._rows, i, panel.start), None), self._cols.local_window(*panel[:2], panel.col)

    def _own(self, panel: Panel) -> Array:
        return self._of(panel, self._task.grid.coords[0], self._task.workspace["reflectors"])

    def _of(self, panel: Panel, i: int, reflectors: Array) -> Array:
        """Return V and T of a panel among the reflectors of grid row i."""
        height = self._plan.heights[panel][i] + panel.width
        return column_room(height, "F", panel.width, reflectors[self._plan.places[panel][i]])

    def _parts(self, x: Array, panel: Panel) -> tuple[Array, Array]:
        return x[: -panel.width], x[-panel.width :]

    def _gathered(self, panel: Panel, room: Array) -> Array:
        return column_room(int(self._plan.heights[panel].sum()), "F", panel.width, room)

    def _pieces(self, panel: Panel, P: Array) -> list[tuple[int, Array]]:
        """Return the rows of a gathered panel that are those of each grid row but the owner's, which are the first."""
        members = self._plan.members(panel)
        ends = np.cumsum(self._plan.heights[panel][members]).tolist()
        return [(r, P[a:b]) for r, a, b in zip(members[1:], ends, ends[1:])]
