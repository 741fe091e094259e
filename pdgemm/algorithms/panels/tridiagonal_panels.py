"""The direct reduction of a Hermitian matrix to tridiagonal form, A = Q T Q^H, by panels of Householder reflections.

Dongarra, Sorensen & Hammarling, Block reduction of matrices to condensed forms, J. Comput. Appl. Math. 27, 1989; on
distributed matrices: Choi, Dongarra & Walker, The design of a parallel dense linear algebra software library, Numer.
Algorithms 10, 1995.
"""

from __future__ import annotations

from math import copysign, hypot, sqrt
from typing import Any

import numpy as np

from pdgemm.algorithms.panels.hermitian_tiles import HermitianTiles
from pdgemm.schedules.panels.householder_schedule import cuts
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.schedules.panels.tridiagonal_schedule import NOTES, TridiagonalSchedule
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.panels.task import Task

_COLUMNS, _SUMS, _SLICES = 0, 1, 2  # message tags


class Tridiagonal:
    """Overwrites A with the reflectors v of Q = H_1 H_2 ..., H_k = I - tau_k v v^H; v[k + 1] = 1 is below the diagonal.

    d (n,), e (n - 1,), tau (n - 1,) : overwritten with the diagonal and the subdiagonal of T, real, and with tau, the
    same on every rank to the last bit.

    In a panel w is A v less the panel so far: w = tau y - (tau/2) (w^H v) v, where y = A v - V W^H v - W V^H v.

    Cost per rank: 4/3 n^3 / P flops, half of them in products A v, which read the lower triangle once for each column.
    Error: |A - Q T Q^H| <= c n eps |A| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.3).
    """

    def __init__(self, task: Task[TridiagonalSchedule], d: np.ndarray, e: np.ndarray, tau: np.ndarray) -> None:
        self._task, self._plan, self._A = task, task.schedule, task.arrays["A"]
        self._d, self._e, self._tau = d, e, tau
        self._ranks = task.schedule.ranks

    def __call__(self) -> int:
        if self._task.grid.idle or not self._plan.n:
            return 0
        self._me = self._ranks.index(self._task.grid.comm.rank)
        with np.errstate(all="ignore"):
            with self._task.computing():
                local = self._task.workspace["vectors"][2 * self._plan.n :]
                self._tiles = HermitianTiles(self._plan, self._A, local, self._task.grid.coords)
            for panel in self._plan.steps:
                X = self._reduce(panel)
                with self._task.computing():
                    self._update(panel, X)
        return 0

    def _reduce(self, panel: Panel) -> np.ndarray:
        """Reduce the columns of a panel; return X, whose columns are v_1, w_1, v_2, w_2, ... from the panel's start on."""
        task, n, m = self._task, self._plan.n, self._plan.n - panel.start
        X = column_buffer(m, "F", 2 * panel.width, task.workspace["panel"])
        mine, columns = self._plan.slices(panel)[self._me], self._own_columns(panel)
        a, y = (x[:m] for x in task.workspace["vectors"][: 2 * n].reshape(2, n))
        sums, slices = _Sums(task, panel, self._me), _Slices(task, panel, self._me)
        multiply = self._tiles.product(panel.start)
        for j in range(panel.width):
            k, before = panel.start + j, X[:, : 2 * j]
            with task.recorder.phase("compute"):
                slices.column[:] = columns[:, j]
                if j:
                    slices.column -= before[mine] @ _exchanged(before[j]).conj()
            norm = slices.gather(a, X[:, 2 * j - 1] if j else None, _norm(slices.column[max(0, j + 2 - mine.start) :]))
            self._d[k] = a[j].real
            if k == n - 1:
                break
            with task.recorder.phase("compute"):
                v, w = X[:, 2 * j], X[:, 2 * j + 1]
                v[: j + 1] = 0
                self._e[k], tau = reflector(a[j + 1 :], norm, v[j + 1 :])
                self._tau[k] = tau
                multiply(v, y)
                if j:
                    lo, hi = (2 * x for x in cuts(j, len(self._ranks))[self._me : self._me + 2])
                    share = before[:, lo:hi]  # each rank subtracts some columns of the panel so far
                    y -= share @ _exchanged((v.conj() @ share).conj())
            total, norm_of_v, y_next = sums.scatter(y, np.vdot(v, y), y[j + 1])
            with task.recorder.phase("compute"):
                shift = -tau * (tau * norm_of_v).conjugate() / 2
                w[mine] = slices.w[:] = tau * total + shift * v[mine]
                w[j + 1] = tau * y_next + shift
        else:
            slices.gather(a, X[:, -1], 0)
        sums.free()
        slices.free()
        return X

    def _own_columns(self, panel: Panel) -> np.ndarray:
        """Return this rank's slice of the rows of a panel, which the ranks of the panel's grid column have."""
        task, plan, A, (i, j), w = self._task, self._plan, self._A, self._task.grid.coords, panel.width
        slices, buffer = plan.slices(panel), task.workspace["columns"]
        here, cols = plan.rows(panel, i), plan.A.distribution.cols.local_window(panel.start, panel.stop, panel.col)
        mine, A = slices[self._me], A[A.shape[0] - len(here) :]
        own = column_buffer(mine.stop - mine.start, "F", w, task.workspace["own columns"])
        out, into = ({rank: slice(0, 0) for rank in self._ranks if rank != task.grid.comm.rank} for _ in range(2))
        if j == panel.col:
            for rank, chunk in zip(self._ranks, plan.chunks(panel, i)):
                if rank == task.grid.comm.rank:
                    own[here[chunk] - mine.start] = A[chunk, cols]
                else:
                    out[rank] = slice(w * chunk.start, w * chunk.stop)
                    column_buffer(chunk.stop - chunk.start, "F", w, buffer[out[rank]])[...] = A[chunk, cols]
        owners = {task.grid.rank_of(r, panel.col): r for r in range(task.grid.shape[0])}
        for rank in {*owners} & {*into}:
            chunk = plan.chunks(panel, owners[rank])[self._me]
            into[rank] = slice(w * chunk.start, w * chunk.stop)
        swap = task.swap("columns", out, into, _COLUMNS)
        swap()
        for rank in {*owners} & {*into}:
            rows = plan.rows(panel, owners[rank])[plan.chunks(panel, owners[rank])[self._me]] - mine.start
            own[rows] = column_buffer(len(rows), "F", w, swap.arrays[rank])
        swap.free()
        return own

    def _update(self, panel: Panel, X: np.ndarray) -> None:
        """A := A - V W^H - W V^H behind a panel, without messages; V stays in the columns of the panel."""
        task, plan, A, (i, j), w = self._task, self._plan, self._A, self._task.grid.coords, panel.width
        rows = plan.rows(panel, i)
        if j == panel.col:
            cols = plan.A.distribution.cols.local_window(panel.start, panel.stop, j)
            A[A.shape[0] - len(rows) :, cols] = X[rows, ::2]
        cols = plan.A.distribution.cols.window(panel.start, plan.n).indices(j)
        sides = []
        for name, indices, order in (("rows", rows, 0), ("columns", cols, 1)):
            indices = indices[np.searchsorted(indices, w) :]
            side = column_buffer(len(indices), "F", 2 * w, task.workspace[f"panel by {name}"])
            for column in range(2 * w):  # the columns of V beside those of W, and the other way round
                np.take(X[:, column ^ order], indices, out=side[:, column], mode="clip")
            sides.append(side)
        self._tiles.update(panel, *sides)


class _Sums:
    """Sums of vectors over all ranks, of which each rank gets its slice; two numbers are summed up beside them."""

    def __init__(self, task: Task[TridiagonalSchedule], panel: Panel, me: int) -> None:
        plan, buffer = task.schedule, task.workspace["sums"]
        notes = plan.notes(panel)
        others = {rank: part for rank, part in zip(plan.ranks, notes) if rank != plan.ranks[me]}
        self._parts = [(part, buffer[x]) for part, x in zip(plan.slices(panel), notes)]
        self._swap = task.swap("sums", others, dict.fromkeys(others, notes[me]), _SUMS)
        self._addends = [self._swap.arrays.get(rank, self._parts[me][1]) for rank in plan.ranks]
        self.free = self._swap.free

    def scatter(self, y: np.ndarray, *notes: Any) -> tuple[np.ndarray, Any, Any]:
        """Return this rank's slice of the sum of y over the ranks, and the sums of the notes."""
        for part, x in self._parts:
            x[:-NOTES], x[-NOTES:] = y[part], notes
        self._swap()
        total = sum(self._addends[1:], self._addends[0])
        return total[:-NOTES], *total[-NOTES:]


class _Slices:
    """The slices of w and of the next column of A that this rank computes, and the vectors gathered of all slices."""

    def __init__(self, task: Task[TridiagonalSchedule], panel: Panel, me: int) -> None:
        plan, buffer, sizes = task.schedule, task.workspace["slices"], [x.stop - x.start for x in task.schedule.slices(panel)]
        own = buffer[: 2 * sizes[me] + 1]
        self.w, self.column, self._note = np.split(own, [sizes[me], 2 * sizes[me]])
        others = {rank: slice(0, 2 * size + 1) for rank, size in zip(plan.ranks, sizes) if rank != plan.ranks[me]}
        self._swap = task.swap("slices", dict.fromkeys(others, slice(0, own.size)), others, _SLICES)
        arrays = [self._swap.arrays.get(rank, own) for rank in plan.ranks]
        self._parts = [(x, *np.split(array, [size, 2 * size])) for x, array, size in zip(plan.slices(panel), arrays, sizes)]
        self.free = self._swap.free

    def gather(self, a: np.ndarray, w: np.ndarray | None, norm: float) -> float:
        """Set a, and w if it is not None, to their slices of all ranks; return the norm of which each rank has a part."""
        self._note[0] = norm
        self._swap()
        for part, of_w, of_a, _ in self._parts:
            a[part] = of_a
            if w is not None:
                w[part] = of_w
        return hypot(*(float(x[0].real) for *_, x in self._parts))


def _exchanged(row: np.ndarray) -> np.ndarray:
    """Return a vector with neighbours exchanged: the coefficients of V beside those of W, and the other way round."""
    return row.reshape(-1, 2)[:, ::-1].ravel()


def _norm(x: np.ndarray) -> float:
    """Return |x|_2, also where squares of elements overflow or underflow."""
    least = float(np.finfo(x.dtype).tiny) / np.finfo(x.dtype).eps
    square = float(np.vdot(x, x).real)
    if least < square < 1 / least or not x.size:
        return sqrt(square)
    largest = float(abs(x).max())
    return largest * sqrt(float(np.vdot(x / largest, x / largest).real)) if 0 < largest < np.inf else largest


def reflector(x: np.ndarray, norm: float, v: np.ndarray) -> tuple[float, Any]:
    """Return beta, real, and tau, where (I - tau v v^H)^H x = beta e_1 and v[0] = 1, as LAPACK's larfg.  Local.

    norm : of x[1:].   v : overwritten.
    """
    alpha = complex(x[0])
    v[0] = 1
    if norm == 0 and alpha.imag == 0:
        v[1:] = 0
        return alpha.real, 0.0
    beta, least = -copysign(hypot(alpha.real, alpha.imag, norm), alpha.real), np.finfo(x.dtype).tiny
    if abs(beta) < least / np.finfo(x.dtype).eps:  # its reciprocal may overflow, and the norm has lost digits
        larger = x / least
        beta, tau = reflector(larger, _norm(larger[1:]), v)
        return beta * float(least), tau
    np.multiply(x[1:], x.dtype.type(1 / (alpha - beta) if x.dtype.kind == "c" else 1 / (alpha.real - beta)), out=v[1:])
    tau = complex((beta - alpha.real) / beta, -alpha.imag / beta)
    return beta, tau if x.dtype.kind == "c" else tau.real
