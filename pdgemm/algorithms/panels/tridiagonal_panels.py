"""The direct reduction of a Hermitian matrix to tridiagonal form, A = Q T Q^H, by panels of Householder reflections.

Dongarra, Sorensen & Hammarling, Block reduction of matrices to condensed forms, J. Comput. Appl. Math. 27, 1989; on
distributed matrices: Choi, Dongarra & Walker, The design of a parallel dense linear algebra software library, Numer.
Algorithms 10, 1995.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from math import copysign, hypot, sqrt
from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.algorithms.panels.hermitian_tiles import HermitianTiles, PairedColumns
from pdgemm.algorithms.panels.panel_run import PanelAlgorithm
from pdgemm.schedules.panels.householder_schedule import cuts
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.schedules.panels.tridiagonal_schedule import NOTES, TridiagonalSchedule, as_slices
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.panels.task import Task

_COLUMNS, _SUMS, _SLICES = 0, 1, 2  # message tags


class Tridiagonal(PanelAlgorithm[TridiagonalSchedule]):
    """Overwrites A with the reflectors v of Q = H_1 H_2 ..., H_k = I - tau_k v v^H; v[k + 1] = 1 is below the diagonal.

    d (n,), e (n - 1,), tau (n - 1,) : overwritten with the real diagonal and subdiagonal of T, and with tau; equal on
    all ranks to the last bit.

    V and W hold v and w of a panel's columns so far: w = tau y - (tau/2) (w^H v) v, where y = A v - V W^H v - W V^H v.

    Cost per rank: 4/3 n^3 / P flops, half of them in products A v, which read the lower triangle once for each column.
    Error: |A - Q T Q^H| <= c n eps |A| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.3).
    """

    def __init__(self, task: Task[TridiagonalSchedule], d: np.ndarray, e: np.ndarray, tau: np.ndarray) -> None:
        super().__init__(task)
        self._d, self._e, self._tau = d, e, tau
        self._ranks, self._complex = task.schedule.ranks, self._A.dtype.kind == "c"
        self._least, self._eps = (float(x) for x in (np.finfo(self._A.dtype).tiny, np.finfo(self._A.dtype).eps))

    def __call__(self) -> None:
        if not self._plan.reduced:
            return
        self._me = self._ranks.index(self._task.grid.comm.rank)
        with self._task.packing():
            self._tiles = HermitianTiles(self._plan, self._A, self._task.grid.coords)
        for panel in self._plan.steps:
            with self._all_but_waits():
                VW = self._reduce(panel)
            with self._task.computing():
                self._update(panel, VW)
        with self._task.packing():
            self._tiles.reorder(back=True)

    def _reduce(self, panel: Panel) -> PairedColumns:
        """Reduce the columns of a panel; return V and W, their rows in the order of vectors (`TridiagonalSchedule`)."""
        task, plan, m, parts = self._task, self._plan, self._plan.n - panel.start, len(self._ranks)
        VW = PairedColumns(column_buffer(m, "F", 2 * panel.width, task.workspace["panel"]))
        mine, columns = plan.slices(panel)[self._me], self._own_columns(panel)
        a, v, y = (x[:m] for x in task.workspace["vectors"].reshape(3, -1))  # a and y are workspace, too
        sums, slices = _Sums(task, panel, self._me, y), _Slices(task, panel, self._me, a)
        multiply, own_v = self._tiles.product(panel, v, y), v[mine]
        for j, one in enumerate(self._unit_places(panel)):
            k = panel.start + j
            slices.column[:] = columns[:, j]
            if j:  # a := column j of A - V W^H - W V^H
                slices.column -= VW.column(j, mine, out=y[mine])
            norm = self._norm_of_rest(slices.column, j + 1 - mine.start, one - mine.start)
            norm = slices.gather(VW.w(j - 1) if j else None, norm)
            self._d[k] = a[j].real
            if k == plan.n - 1:
                break
            a[: j + 1] = 0
            self._e[k], tau = self._reflector(a, one, norm, v)
            self._tau[k] = tau
            VW.v(j)[:] = v
            multiply()  # y := A v
            if j:  # y := A v - V W^H v - W V^H v: each rank subtracts the terms of some columns of V and W
                y -= VW.times(v, slice(*cuts(j, parts)[self._me :][:2]), out=a)
            notes = np.vdot(v, y), y[one]
            total, norm_of_v, y_next = sums.scatter(notes)
            shift, w = -tau * (tau * norm_of_v).conjugate() / 2, VW.w(j)
            np.multiply(total, tau, out=slices.w)  # w := tau y + shift v
            slices.w += np.multiply(own_v, shift, out=a[mine])
            w[mine], w[one] = slices.w, tau * y_next + shift
        else:
            slices.gather(VW.w(panel.width - 1), 0)
        sums.free()
        slices.free()
        return VW

    @contextmanager
    def _all_but_waits(self) -> Iterator[None]:
        """Count the seconds of a `with` block, except waits, as computation: one column is too short to be timed."""
        seconds, start = self._task.recorder.seconds, perf_counter()
        before = seconds.get("wait", 0.0)
        yield
        waited = seconds.get("wait", 0.0) - before
        seconds["compute"] = seconds.get("compute", 0.0) + perf_counter() - start - waited

    def _unit_places(self, panel: Panel) -> list[int]:
        """Return, for each column of a panel, the index in vectors of the row below the diagonal, where v is 1."""
        return [*range(1, panel.width), self._plan.place(panel, min(panel.stop, self._plan.n - 1))]

    def _norm_of_rest(self, column: np.ndarray, start: int, one: int) -> float:
        """Return the norm of a slice of a column from `start` on.   one : an index to leave out; it may be outside."""
        inside = 0 <= one < len(column)
        if inside:
            column[one], first = 0, column[one]
        norm = self._norm(column[max(0, start) :])
        if inside:
            column[one] = first
        return norm

    def _own_columns(self, panel: Panel) -> np.ndarray:
        """Receive this rank's slice of the rows of a panel from the ranks of the panel's grid column."""
        task, plan, w, buffer = self._task, self._plan, panel.width, self._task.workspace["columns"]
        slices, pr, me = plan.slices(panel), plan.grid.shape[0], self._ranks[self._me]
        mine, chunks = slices[self._me], [plan.chunks(panel, i) for i in range(pr)]
        out, into = ({rank: slice(0, 0) for rank in self._ranks if rank != me} for _ in range(2))
        owners = {task.grid.rank_of(i, panel.col): i for i in range(pr)}
        for rank in {*owners} - {me}:
            into[rank] = chunks[owners[rank]][self._me]
        own = column_buffer(mine.stop - mine.start, "F", w, task.workspace["own columns"])
        if me in owners:
            cols = self._panel_columns(panel)
            for rank, part, chunk in zip(self._ranks, slices, chunks[owners[me]]):
                pieces = plan.pieces(panel, owners[me], part)
                if rank == me:
                    _copy([(x, _behind(place, mine)) for x, place in pieces], cols, own)
                else:
                    out[rank] = chunk
                    packed = column_buffer((chunk.stop - chunk.start) // w, "F", w, buffer[chunk])
                    _copy([(x, y) for (x, _), y in zip(pieces, _in_turn(pieces))], cols, packed)
        swap = task.swap("columns", out, into, _COLUMNS)
        swap()
        for rank in {*owners} - {me}:
            pieces = plan.pieces(panel, owners[rank], mine)
            packed = column_buffer(swap.arrays[rank].size // w, "F", w, swap.arrays[rank])
            _copy([(x, _behind(place, mine)) for x, (_, place) in zip(_in_turn(pieces), pieces)], packed, own)
        swap.free()
        return own

    def _panel_columns(self, panel: Panel) -> np.ndarray:
        """Return a view of this rank's rows of a panel of A; only for ranks of the panel's grid column."""
        plan, c = self._plan, int(self._plan.by_class.owner(panel.start))
        start = plan.local_classes(panel.col, plan.grid.shape[1])[c].start + plan.by_class.below(panel.start, c)
        return self._A[:, start : start + panel.width]

    def _update(self, panel: Panel, VW: PairedColumns) -> None:
        """A := A - V W^H - W V^H in the trailing matrix, without messages; store V in the columns of the panel."""
        task, (i, j) = self._task, self._task.grid.coords
        if j == panel.col:
            pieces = self._plan.pieces(panel, i, slice(0, len(VW.V)))
            _copy([(place, x) for x, place in pieces], VW.V, self._panel_columns(panel))
        self._tiles.update(panel, VW, VW.exchanged(task.workspace["exchanged panel"]))

    def _reflector(self, a: np.ndarray, one: int, norm: float, v: np.ndarray) -> tuple[float, Any]:
        """Return beta, real, and tau, where (I - tau v v^H)^H a = beta e, as LAPACK's larfg.  Local.

        e : the unit vector with e[one] = 1.   norm : the 2-norm of a without a[one].   v : overwritten; v[one] = 1.
        """
        alpha = complex(a[one])
        if norm == 0 and alpha.imag == 0:
            v[:] = 0
            v[one] = 1
            return alpha.real, self._number(0)
        beta = -copysign(hypot(alpha.real, alpha.imag, norm), alpha.real)
        if abs(beta) < self._least / self._eps:  # its reciprocal may overflow, and the norm has lost digits
            larger = a / self._least
            rest = larger.copy()
            rest[one] = 0
            beta, tau = self._reflector(larger, one, self._norm(rest), v)
            return beta * self._least, tau
        np.multiply(a, self._number(1 / (alpha - beta)), out=v)
        v[one] = 1
        return beta, self._number(complex((beta - alpha.real) / beta, -alpha.imag / beta))

    def _number(self, x: complex) -> Any:
        """Return a number in the type of A."""
        return self._A.dtype.type(x if self._complex else x.real)

    def _norm(self, x: np.ndarray) -> float:
        """Return |x|_2, also where squares of elements overflow or underflow."""
        least, square = self._least / self._eps, float(np.vdot(x, x).real)
        if least < square < 1 / least or not x.size:
            return sqrt(square)
        largest = float(abs(x).max())
        if not 0 < largest < np.inf:
            return largest
        parts = (x.real, x.imag) if self._complex else (x,)  # 1 / largest, which NumPy uses for complex x, may be inf
        return largest * hypot(*(np.linalg.norm(part / largest) for part in parts))


class _Sums:
    """The reduce-scatter of a vector y over all ranks; its messages also sum two scalars, the notes."""

    def __init__(self, task: Task[TridiagonalSchedule], panel: Panel, me: int, y: np.ndarray) -> None:
        plan, buffer = task.schedule, task.workspace["sums"]
        notes = plan.notes(panel)
        others = {rank: part for rank, part in zip(plan.ranks, notes) if rank != plan.ranks[me]}
        self._parts = [(buffer[x][:-NOTES], buffer[x][-NOTES:], y[part]) for part, x in zip(plan.slices(panel), notes)]
        self._swap = task.swap("sums", others, dict.fromkeys(others, notes[me]), _SUMS)
        first, *self._addends = [self._swap.arrays.get(rank, buffer[notes[me]]) for rank in plan.ranks]
        self._first, self._total = first, task.workspace["sum"][: first.size]
        self._sum = self._total[:-NOTES]
        self.free = self._swap.free

    def scatter(self, notes: tuple[Any, Any]) -> tuple[np.ndarray, Any, Any]:
        """Return this rank's slice of the sum of y over the ranks, and the sums of the notes."""
        for part, noted, own in self._parts:
            part[:] = own
            noted[0], noted[1] = notes
        self._swap()
        self._total[:] = self._first
        for x in self._addends:
            self._total += x
        return self._sum, self._total[-2], self._total[-1]


class _Slices:
    """The slices of w and of the next column a that this rank computes, and their all-gather."""

    def __init__(self, task: Task[TridiagonalSchedule], panel: Panel, me: int, a: np.ndarray) -> None:
        plan = task.schedule
        parts = plan.slices(panel)
        sizes = [x.stop - x.start for x in parts]
        own = task.workspace["slices"][: 2 * sizes[me] + 1]
        self.w, self.column, self._note = np.split(own, [sizes[me], 2 * sizes[me]])
        others = {rank: slice(0, 2 * size + 1) for rank, size in zip(plan.ranks, sizes) if rank != plan.ranks[me]}
        self._swap = task.swap("slices", dict.fromkeys(others, slice(0, own.size)), others, _SLICES)
        arrays = [self._swap.arrays.get(rank, own) for rank in plan.ranks]
        of_w, of_a, self._norms = zip(*(np.split(x, [size, 2 * size]) for x, size in zip(arrays, sizes)))
        self._to_a = [(a[part], x) for part, x in zip(parts, of_a)]
        self._to_w = [(part, x) for part, x, rank in zip(parts, of_w, plan.ranks) if rank in others]
        self.free = self._swap.free

    def gather(self, w: np.ndarray | None, norm: float) -> float:
        """Set a, and w if it is not None, to the slices of all ranks; return the root of the sum of all norm^2."""
        self._note[0] = norm
        self._swap()
        for part, x in self._to_a:
            part[:] = x
        if w is not None:
            for at, x in self._to_w:
                w[at] = x
        return hypot(*(x[0].real for x in self._norms))


Pieces = list[tuple[slice, slice]]


def _copy(pieces: Pieces, source: np.ndarray, target: np.ndarray) -> None:
    """Copy rows: for each pair of slices, the first slice of `source` to the second slice of `target`."""
    for x, y in pieces:
        target[y] = source[x]


def _behind(place: slice, start: slice) -> slice:
    return slice(place.start - start.start, place.stop - start.start)


def _in_turn(pieces: Pieces) -> list[slice]:
    """Return the slice of each piece in a buffer in which the pieces are packed one after another."""
    return as_slices([*accumulate((x.stop - x.start for x, _ in pieces), initial=0)])
