"""Reduction of a Hermitian band to tridiagonal form, and its back-transformation: Lang, A parallel algorithm for
reducing symmetric banded matrices to tridiagonal form, SIAM J. Sci. Comput. 14(6), 1993; Auckenthaler et al., 2011.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pdgemm.algorithms.panels.panel_run import PanelAlgorithm
from pdgemm.local.blas.band import Bulges
from pdgemm.local.blas.local_lapack import call_lapack, fortran_letter
from pdgemm.local.blas.local_qr import reflect_rows
from pdgemm.schedules.panels.chase_schedule import BackChaseSchedule, ChaseSchedule
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.movers.ring import receive, send
from pdgemm.transport.panels.task import Task


class BulgeChase(PanelAlgorithm[ChaseSchedule]):
    """Reduces a Hermitian band matrix to tridiagonal form by chasing bulges.

    bulges : on entry the band matrix, the same on every rank; overwritten.  On return the first rank has the
        tridiagonal matrix.
    reflections : overwritten with the reflections of this rank's tasks; a task is one reflection of b rows (`Chase`).

    Cost: 6 n^2 b flops in all; about 6 n b^2 words between two neighbours.
    """

    def __init__(self, task: Task[ChaseSchedule], bulges: Bulges, reflections: np.ndarray) -> None:
        super().__init__(task)
        self._chase, self._bulges = task.schedule.chase, bulges
        self._reflections = reflections.reshape(-1, task.schedule.width + 1)
        self._ranks, self._slots = task.schedule.A.rank_map, (Slot(0, None, None), Slot(1, None, None))
        # the last reflection of each sweep of a group, and a copy that is being sent
        self._last, self._leaving = task.workspace["last reflections"].reshape(2, self._chase.group, -1)

    def __call__(self) -> None:
        me, chase, at = self._ranks.index(self._task.grid.comm.rank), self._chase, 0
        for G, x in chase.tiles(me):
            before, behind = chase.neighbours(me, x)
            if before is not None:
                self._receive(0, before, self._columns(chase.down(G, x)), self._last)
            if behind is not None and chase.count(G - 1, x + 1):
                self._receive(1, behind, self._columns(chase.up(G - 1, x + 1)))
            stop = at + chase.count(G, x)
            with self._task.computing():
                self._carry_out(G, x, self._reflections[at:stop])
            at = stop
            if before is not None and chase.count(G + 1, x - 1):
                self._send(0, before, self._columns(chase.up(G, x)))
            if behind is not None and chase.count(G, x + 1):
                self._task.free(self._slots[1])
                self._leaving[:] = self._last
                self._send(1, behind, self._columns(chase.down(G, x + 1)), self._leaving)
        for slot in self._slots:
            self._task.free(slot)

    def _carry_out(self, G: int, x: int, reflections: np.ndarray) -> None:
        """Carry out the tasks of tile (G, x) of `Chase`, and store their reflections."""
        at = 0
        for s, tasks in self._chase.part(G, x):
            last, own = self._last[s - G * self._chase.group], reflections[at : at + len(tasks)]
            self._bulges.carry_out(s, tasks, last, own)
            last[:], at = own[-1], at + len(tasks)

    def _columns(self, columns: slice) -> np.ndarray:
        """Return columns of the band as a flat array."""
        return self._bulges.AB[:, columns].reshape(-1, order="F")

    def _send(self, side: int, rank: int, *arrays: np.ndarray) -> None:
        """Start to send arrays to the previous (side 0) or next (side 1) rank of the chase."""
        task, slot = self._task, self._slots[side]
        for tag, x in enumerate(arrays):
            slot.users += send(task.grid.comm, x.reshape(-1), self._ranks[rank], task.recorder, tag)

    def _receive(self, side: int, rank: int, *arrays: np.ndarray) -> None:
        """Wait until the last send to a neighbour is complete; then receive the arrays that the neighbour changed."""
        task = self._task
        slot = task.free(self._slots[side])
        for tag, x in enumerate(arrays):
            slot.arrivals += receive(task.grid.comm, x.reshape(-1), self._ranks[rank], task.recorder, tag)
        self._task.wait(slot)


class BackChase(PanelAlgorithm[BackChaseSchedule]):
    """Computes X := Q X, where Q is the product of all reflections of a `BulgeChase`, in blocks of 32 sweeps.

    reflections : the reflections of this rank's tasks, as `BulgeChase` stored them.
    X : (n, k); each column is on one rank.

    Cost: about 3 n^2 k flops on all ranks together; n^2/2 words in for each rank.
    """

    def __init__(self, task: Task[BackChaseSchedule], reflections: np.ndarray) -> None:
        super().__init__(task)
        self._own = reflections

    def __call__(self) -> None:
        plan, task = self._plan, self._task
        me, counts, length = plan.chased.A.rank_map.index(task.grid.comm.rank), plan.chased.task_counts, plan.width + 1
        end = int(counts[:, me].sum()) * length
        for section in plan.sections:
            gathering = plan.gathering(section)
            parts, (lo, hi) = task.workspace["gathered"][: gathering.words], gathering.offsets[me : me + 2].tolist()
            parts[lo:hi] = self._own[end - (hi - lo) : end]
            end -= hi - lo
            task.carry_out(gathering, parts)
            with task.computing():
                for first, V, tau in self._blocks(section, parts.reshape(-1, length)):
                    self._reflect(first, V, tau)

    def _blocks(self, section: range, reflections: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield the first row, V and tau of each block of reflections, in the order in which they are applied.

        Block t has the reflections of task t of each sweep; each begins one row below that of the previous sweep.
        """
        chase, b, n = self._plan.chased.chase, self._plan.width, self._plan.chased.n
        first = section.start * chase.group
        sweeps = min(len(section) * chase.group, n - 1 - first)
        V = self._task.workspace["blocks"].reshape(-1, self._plan.sweeps, b + self._plan.sweeps)
        tau = np.zeros((chase.tasks(first), sweeps), V.dtype)
        V[:] = 0
        at = 0
        for rank in range(chase.ranks):
            for G in section:
                for x in range(*chase.cuts[rank : rank + 2]):
                    for s, tasks in chase.part(G, x):
                        r, stop = s - first, at + len(tasks)
                        V[tasks.start : tasks.stop, r, r : r + b] = reflections[at:stop, :b]
                        tau[tasks.start : tasks.stop, r] = reflections[at:stop, b]
                        at = stop
        for t in range(len(tau)):
            start = first + 1 + t * b
            height, width = min(n - start, b + sweeps - 1), min(n - start, sweeps)
            yield start, V[t, :width, :height].T, tau[t, :width]

    def _reflect(self, first: int, V: np.ndarray, tau: np.ndarray) -> None:
        """X := (I - V T V^H) X in the rows from `first` on."""
        (height, width), T = V.shape, np.zeros((len(tau), len(tau)), V.dtype, "F")
        call_lapack("larft", V.dtype, fortran_letter("F"), fortran_letter("C"), height, width, V, tau, T)
        reflect_rows(V, T, self._A[first : first + height], self._task.workspace["products"])
