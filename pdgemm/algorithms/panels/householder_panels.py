"""QR factorisation by blocked Householder reflections with look-ahead: Schreiber & Van Loan, A storage-efficient WY
representation for products of Householder transformations, SIAM J. Sci. Stat. Comput. 10(1), 1989.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from pdgemm.algorithms.panels.panel_run import PanelAlgorithm
from pdgemm.local.arrays.device import Array, empty, of, to_host
from pdgemm.local.arrays.elementwise import CONVERT, scale, set_elements
from pdgemm.local.blas.compact_qr import compact_qr, reflect_rows
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.local.blas.local_lapack import keep_triangle, multiply_triangular
from pdgemm.schedules.panels.householder_schedule import HouseholderSchedule, ReflectorsSchedule
from pdgemm.transport.panels.gathered_panel import gathered_window
from pdgemm.transport.panels.reflectors import ColumnSum, Reflectors
from pdgemm.transport.panels.task import Task


class Householder(PanelAlgorithm[HouseholderSchedule]):
    """Overwrites A (m, n) with R, and Q (m, k) with the orthonormal factor: A = Q R, k = min(m, n).

    On entry Q holds the first k columns of the identity.  Each panel of A is (I - V T V^H) R, where V is unit lower
    trapezoidal and T upper triangular.  V and T are kept; Q is formed from the last panel to the first.

    tau : if not None, V, without its unit diagonal, stays below the diagonal of A, and the owner of the diagonal block
        of each panel writes the diagonal of T to tau.
    order : if not None, the columns of each panel are exchanged such that |r_jj| falls, and the owner writes the order
        to this array, counted from the panel's first column on.

    Cost per rank on Pr x Pc, m >= n: (2 m n^2 - 2/3 n^3)/(Pr Pc) flops for R, and as many for Q.
    Error: columnwise |A - Q R| <= gamma_{mn} |A|, for any A (Higham, Accuracy and Stability, 2002, 19.4).
    """

    def __init__(
        self, task: Task[HouseholderSchedule], tau: np.ndarray | None = None, order: np.ndarray | None = None
    ) -> None:
        super().__init__(task)
        self._order, self._tau = order, tau
        self._reflectors, self._sum = Reflectors(task, stay=tau is not None), ColumnSum(task)

    def __call__(self) -> None:
        steps = self._plan.steps
        if not steps:
            return
        self._factor(0)
        for number in range(len(steps)):
            self._reflectors.wait(number)
            columns = self._plan.updates(number)
            self._reflect(number, self._A, columns[0], "C")
            if len(columns) > 1:
                self._factor(number + 1)  # travels during the next reflection
                self._reflect(number, self._A, columns[1], "C")
        if self._plan.wants_q:
            self._form_q()
        self._sum.finish()
        self._reflectors.finish()

    def _form_q(self) -> None:
        """Q := (I - V_1 T_1 V_1^H) (I - V_2 T_2 V_2^H) ... Q, from the last panel to the first."""
        steps, k = self._plan.steps, min(self._plan.A.distribution.shape)
        self._reflectors.travel(len(steps) - 1, again=True)
        for number in reversed(range(len(steps))):
            if number:
                self._reflectors.travel(number - 1, again=True)
            self._reflectors.wait(number)
            self._reflect(number, self._task.arrays["Q"], (steps[number].start, k), "N")

    def _factor(self, number: int) -> None:
        """Gather a panel on the owner of its diagonal block, factor it there, and start the transfers of V and T."""
        panel, reflectors, i = self._plan.steps[number], self._reflectors, self._task.grid.coords[0]
        reflectors.free(number)
        if self._task.grid.coords == (panel.row, panel.col):
            V, T = reflectors.gather(number)
            A = self._A[self._plan.window(panel, i)]
            with self._task.computing():
                R = empty(T.shape, T.dtype, "F", of(T))
                compact_qr(V, R, T, None if self._order is None else self._order[panel.start : panel.stop])
                CONVERT(A[: panel.width], R)
                scale(0, A[panel.width :])
                if self._tau is not None:
                    self._tau[panel.start : panel.stop] = to_host(T).diagonal()
                    both = np.tril(to_host(V[: len(A)]), -1)
                    both[: panel.width] += to_host(R)
                    set_elements(A, both)
            reflectors.give_back(number)
        reflectors.travel(number)

    def _reflect(self, number: int, C: Array, columns: tuple[int, int], trans: str) -> None:
        """C := (I - V op(T) V^H) C, in columns columns[0] to columns[1], and in rows from the panel's start on."""
        panel, task, (i, j) = self._plan.steps[number], self._task, self._task.grid.coords
        C = C[self._rows.below(panel.start, i) :, self._cols.local_window(*columns, j)]
        if not C.size:
            return
        V, T = self._reflectors.get(number)
        W = self._sum.buffer(panel.width, C.shape[1])
        with task.computing():
            gemm_accumulate(1, V.T, C, 0, W, conjugate_a=C.dtype.kind == "c")
        self._sum(W, self._plan.members(panel), partial(multiply_triangular, T, lower=False, trans=trans))
        task.update(V, W, C)


class AppliedReflectors(PanelAlgorithm[ReflectorsSchedule]):
    """Computes X := H_1 H_2 ... H_k X, with the reflectors below the diagonal of F, and their numbers tau.

    X (m, n), in columns that are not divided among ranks; F (m, k), in any layout, of the same ranks.

    Cost: 2 n k (2 m - k) flops of all ranks in products, and m k^2 of each; m k - k^2/2 words in for each rank.
    """

    def __init__(self, task: Task[ReflectorsSchedule], tau: np.ndarray) -> None:
        super().__init__(task)
        self._tau = tau

    def __call__(self) -> None:
        task, plan = self._task, self._plan
        for columns in plan.columns:
            V = gathered_window(task, "F", plan.F, plan.gathering(columns), *plan.factor(columns))
            with task.computing():
                keep_triangle(V[: V.shape[1]], unit=True)
                self._reflect(V, self._tau[columns], self._A[columns.start :])

    def _reflect(self, V: Array, tau: np.ndarray, X: Array) -> None:
        """X := (I - V T V^H) X, where T^-1 = D^-1 + the upper triangle of V^H V: see `compact_qr`."""
        if not X.size:
            return
        G = np.empty((len(tau), len(tau)), V.dtype, "F")
        gemm_accumulate(1, V.T, V, 0, G, conjugate_a=V.dtype.kind == "c")
        T = np.linalg.solve(np.eye(len(tau)) + tau[:, None] * np.triu(G, 1), np.diag(tau)).astype(V.dtype)
        reflect_rows(V, np.asfortranarray(T), X, self._task.workspace["products"])
