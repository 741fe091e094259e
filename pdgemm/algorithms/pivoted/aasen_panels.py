"""Aasen's factorisation of a Hermitian or symmetric matrix in blocks, P A P^T = L T L^H.

Ballard, Becker, Demmel, Dongarra, Druinsky, Peled, Schwartz, Toledo & Yamazaki, Implementing a blocked Aasen's
algorithm with a dynamic scheduler on multicore architectures, IPDPS 2013.
"""

from __future__ import annotations

import numpy as np

from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.blas import local_lapack
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.schedules.panels.panel_schedule import Panel
from pdgemm.schedules.panels.row_moves import permutation
from pdgemm.schedules.pivoted.aasen_schedule import INDEX, AasenSchedule
from pdgemm.transport.movers.panel_views import column_buffer
from pdgemm.transport.movers.pipeline import Slot
from pdgemm.transport.panels.task import Parts, Task

# message tags; each has two, one per slot
_BLOCKS, _PIVOTS, _GATHER, _SPREAD, _ROWS = ((1 << 12) + tag for tag in (0, 2, 4, 6, 8))


class AasenPanels:
    """Overwrites A, both triangles of which are read, with the rows of L in the order of the rows of A: P^T L.

    hermitian : A is Hermitian, otherwise symmetric: then L^T stands for L^H here.
    band  : (nb + 1, n), overwritten with the lower triangle of T, as LAPACK stores a band: T[i, j] is band[i - j, j].
    order : overwritten: row t of P A is row order[t] of A.

    For each block column k: V := A_k - (L T) L_k^H in the rows that no panel has chosen yet, where L_k has row block k
    of L, and (L T) all that is known of it; the first rows of V give T_kk, and the others L_{k+1} T_{k+1,k} L_kk^H.
    Cost per rank on P ranks: n^3/(3P) + 3 n^2 nb/P flops, and 3 n^2 nb/2 on the first; at most n^2/2 words of L in; the
    first rank receives and sends n^2/2 words of panels.
    Error: |P A P^T - L T L^H| <= gamma_n |L||T||L^H| to first order (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, 11.2).
    """

    def __init__(self, task: Task[AasenSchedule], hermitian: bool, band: np.ndarray, order: np.ndarray) -> None:
        self._task, self._plan, self._A = task, task.schedule, task.arrays["A"]
        self._conjugates, self._band, self._order = hermitian and self._A.dtype.kind == "c", band, order
        self._rows, self._i, n = self._plan.A.distribution.rows, task.grid.coords[0], self._plan.n
        self._L, self._G = (task.workspace[name].reshape(self._A.shape) for name in ("L", "L T"))
        # each rank knows the order of the rows on all ranks; the first `done` rows belong to earlier panels
        self._lying = [self._rows.indices(part).copy() for part in range(self._rows.parts)]
        self._place, self._done = self._rows.to_local(np.arange(n)), np.zeros(self._rows.parts, int)
        self._left = np.arange(n)  # on the first rank: the rows of the panel that was factored last
        self._panel = self._A[:0]  # on the first rank: the panel of L that was factored last, in these rows
        self._slot = Slot(0, None, task.workspace["panel"])

    def __call__(self) -> int:
        steps, here = self._plan.steps, np.zeros(0, int)
        with np.errstate(all="ignore"):
            if steps:
                first = np.arange(steps[0].stop)
                self._L[...], self._order[first] = 0, first
                here = self._choose(first)
                own = self._lying[self._i][: here[self._i]]
                self._L[np.arange(own.size), own] = 1
            for number in range(len(steps)):
                here = self._step(number, here)
        self._task.free(self._slot)
        self._A[self._rows.to_local(self._lying[self._i])] = self._L
        return 0

    def _step(self, number: int, here: np.ndarray) -> np.ndarray:
        """Eliminate a block column; return the number of rows on each rank that the next block has.

        here : the number of rows on each rank that this block has.
        """
        task, slot, (panel, following) = self._task, self._slot, self._plan.ends(number)
        w, then = panel.width, following - panel.stop
        self._gather(panel, self._updated(panel))
        T = column_buffer(w + then, "C", w, task.workspace["blocks of T"])
        left = [x[done:] for x, done in zip(self._lying, self._done + here)]
        if self._i == 0:
            with task.computing():
                self._factor(panel, T)
        L = self._spread(panel, left)
        for x, tag in ((T.reshape(-1), _BLOCKS), (self._order[panel.stop : following], _PIVOTS)):
            if x.size:
                task.send("col", x, 0, slot, tag)
        task.wait(slot)
        self._done += here
        with task.computing():
            self._keep(panel, T)
            self._extend(panel, L, T)
        task.free(slot)
        return self._choose(self._order[panel.stop : following])

    def _updated(self, panel: Panel) -> np.ndarray:
        """Return V := A_k - (L T) L_k^H in the rows that earlier panels have left on this rank."""
        done, first = self._done[self._i], self._plan.width
        A = self._A[done:]
        V = column_buffer(len(A), "C", panel.width, self._task.workspace["panel"])
        with self._task.packing():
            np.take(A, self._order[panel.start : panel.stop], axis=1, out=V, mode="clip")
        if panel.start:
            L = self._rows_of_L(panel)
            self._task.update(self._G[done:, first : panel.stop], L.T, V, conjugate_b=self._conjugates)
        return V

    def _rows_of_L(self, panel: Panel) -> np.ndarray:
        """Return row block k of L on all ranks, without the columns of the first block, which are zero."""
        task, first, done = self._task, self._plan.width, self._done[self._i]
        owners, n = self._rows.owner(self._order[panel.start : panel.stop]), panel.stop - first
        buffer, parts = task.workspace["arriving rows"], Parts()
        for part, height in enumerate(np.bincount(owners).tolist()):
            if height:
                x, buffer = column_buffer(height, "C", n, buffer), buffer[height * n :]
                if part == self._i:
                    CONVERT(x, self._L[done : done + height, first : panel.stop])
                task.send("col", x, part, self._slot, _ROWS + 2 * part)
                parts[part] = x
        task.wait(self._slot)
        L = column_buffer(panel.width, "C", n, task.workspace["rows of L"])
        for part, x in parts.items():
            L[owners == part] = x
        task.free(self._slot)
        return L

    def _gather(self, panel: Panel, V: np.ndarray) -> None:
        """Gather V from all ranks in the buffer of the first rank."""
        task, slot = self._task, self._slot
        if self._i:
            task.publish([0], lambda r, buffer: V, slot, _GATHER)
        else:
            X = self._slabs(panel.width, [x[done:] for x, done in zip(self._lying, self._done)])
            CONVERT(X[0], V)
            others = {part: x for part, x in enumerate(X) if part}
            task.fetch("gathered", others, _never, slot, _GATHER)
            task.wait(slot)
        task.free(slot)

    def _slabs(self, width: int, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Return, in the buffer of the first rank, the arrays of the ranks, whose rows are these."""
        X = column_buffer(sum(map(len, rows)), "C", width, self._task.workspace["gathered"])
        return np.split(X, np.cumsum([len(x) for x in rows[:-1]]))

    def _factor(self, panel: Panel, T: np.ndarray) -> None:
        """Compute T_kk and L_{k+1} T_{k+1,k} L_kk^H from V; choose the rows of block k + 1.  On the first rank.

        T : overwritten with T_kk, and T_{k+1,k} below it.
        """
        w, then, trans = panel.width, len(T) - panel.width, "C" if self._conjugates else "T"
        rows, before, n = self._left, self._panel, self._plan.n
        buffer = self._task.workspace["factored"].reshape(2, -1)[panel.start // self._plan.width % 2]
        V = column_buffer(len(rows), "F", w, buffer)
        X = column_buffer(len(rows), "C", w, self._task.workspace["gathered"])
        top, rest, L = V[:w], V[w:], before[:w]
        # where memory lacks from here on, all ranks continue, with these rows and any elements
        self._left, self._panel = rows[w:], rest[:, :then]
        self._order[panel.stop : panel.stop + then] = self._left[:then]
        place = np.empty(n, INDEX)
        place[np.concatenate([x[done:] for x, done in zip(self._lying, self._done)])] = np.arange(len(rows))
        np.take(X.T, place[rows], axis=1, out=V.T, mode="clip")
        if panel.start:
            local_lapack.trsm(L, top, unit=True)
            local_lapack.trsm(L, top, side="R", trans=trans, unit=True)
        T[:w] = top / 2 + self._transposed(top) / 2
        if panel.start and len(rest):
            gemm_accumulate(-1, before[w:], np.asfortranarray(T[:w] @ self._transposed(L)), 1, rest)
        pivots = np.arange(1, then + 1, dtype=np.intc)
        local_lapack.getrf(rest, pivots)
        U = np.asfortranarray(np.triu(rest[:then]))
        if panel.start:
            local_lapack.trsm(L, U, side="R", trans=trans, unit=True)
        T[w:] = U
        self._left = self._left[permutation(pivots - 1, len(rest))]
        self._order[panel.stop : panel.stop + then] = self._left[:then]
        local_lapack.keep_triangle(self._panel[:then], lower=True, unit=True)

    def _spread(self, panel: Panel, rows: list[np.ndarray]) -> np.ndarray:
        """Start to send each rank its rows of the panel of L; return the array for those of this rank."""
        task, slot, then = self._task, self._slot, self._plan.ends(panel.start // self._plan.width)[1] - panel.stop
        own = column_buffer(len(rows[self._i]), "C", then, task.workspace["panel"])
        if self._i:
            task.fetch("gathered", {0: own}, _never, slot, _SPREAD)
            return own
        X, place = self._slabs(then, rows), np.empty(self._plan.n, INDEX)
        place[self._left] = np.arange(len(self._left))
        for x, which in zip(X, rows):
            x[...] = self._panel[place[which]]
        CONVERT(own, X[0])
        task.publish(range(1, len(X)), lambda r, buffer: X[r], slot, _SPREAD)
        return own

    def _keep(self, panel: Panel, T: np.ndarray) -> None:
        """Store T_kk and T_{k+1,k} in the band."""
        below = np.arange(len(T))[:, None] - np.arange(panel.width)
        inside = (below >= 0) & (below < len(self._band))  # T_{k+1,k} is upper triangular
        self._band[below[inside], panel.start + np.nonzero(inside)[1]] = T[inside]

    def _extend(self, panel: Panel, L: np.ndarray, T: np.ndarray) -> None:
        """Add block column k + 1 to L, and what it and T_kk say of block columns k and k + 1 to L T."""
        done, (start, stop, *_), following = self._done[self._i], panel, panel.start + len(T)
        before, G = self._L[done:, start:stop], self._G[done:]
        G[:, stop:following], self._L[done:, stop:following] = 0, L
        if panel.start:
            for factor, block in ((before, T[: panel.width]), (L, T[panel.width :])):
                gemm_accumulate(1, factor, block, 1, G[:, start:stop])
            gemm_accumulate(1, before, T[panel.width :].T, 1, G[:, stop:following], conjugate_b=self._conjugates)

    def _choose(self, rows: np.ndarray) -> np.ndarray:
        """Exchange rows on each rank such that those of the next block come first; return their number on each rank."""
        owners, known = self._rows.owner(rows), int(self._done.sum()) + len(rows)  # columns of L so far
        for part, lying in enumerate(self._lying):
            chosen, done = self._place[rows[owners == part]], self._done[part]
            front, far, leaves = np.arange(done, end := done + len(chosen)), chosen >= end, np.ones(len(chosen), bool)
            leaves[chosen[~far] - done] = False  # the other rows at the front go where chosen rows were
            targets, sources = np.concatenate([front, chosen[far]]), np.concatenate([chosen, front[leaves]])
            lying[targets] = lying[sources]
            self._place[lying[targets]] = targets
            if part == self._i:
                for x in (self._A, self._L[:, :known], self._G[:, :known]):
                    x[targets] = x[sources]
        return np.bincount(owners, minlength=self._rows.parts)

    def _transposed(self, x: np.ndarray) -> np.ndarray:
        return x.conj().T if self._conjugates else x.T


def _never(owner: int, array: np.ndarray, target: np.ndarray) -> None:
    """Panels are sent here, and never read in place."""
    raise AssertionError
