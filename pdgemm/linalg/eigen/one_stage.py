"""The direct reduction of a Hermitian matrix to real tridiagonal form, A = Q T Q^H, and products with Q."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pdgemm.algorithms.panels.panel_run import can_read, run_panels, working_copy
from pdgemm.algorithms.panels.tridiagonal_panels import Tridiagonal
from pdgemm.linalg.factors.householder import reflect_columns
from pdgemm.linalg.factors.operands import in_whole_columns
from pdgemm.linalg.work import Work
from pdgemm.local.blas.local_lapack import reduce_to_tridiagonal
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.tridiagonal_schedule import LastPartSchedule, TridiagonalSchedule
from pdgemm.transport.panels.task import Task

BLOCK, WIDTH = 64, 64  # of the working copy, and columns of a panel: of 32 are as fast, within a few percent
REST = 1024  # order of the last part, which LAPACK reduces faster on one rank than all ranks by two exchanges a column


@dataclass(frozen=True)
class OneStage:
    """A = Q T Q^H, where T is real and tridiagonal.

    d, e : (n,) and (n - 1,), the diagonal and the subdiagonal of T.   tau : (n - 1,).  The same on every rank to the
        last bit.
    F : DistMatrix (n, n) with the reflectors below its diagonal: Q = H_1 H_2 ..., H_k = I - tau_k v v^H, where v has
        zeros down to row k, 1 in row k + 1, and then the elements of column k of F.
    """

    d: np.ndarray
    e: np.ndarray
    F: DistMatrix
    tau: np.ndarray

    @classmethod
    def of(cls, work: Work, A: DistMatrix) -> OneStage:
        """Reduce A, Hermitian and on the host, of which the lower triangle is read.  Collective over the grid of A.

        Of the diagonal the real part is read, and A is not changed.

        LAPACK reduces the last m = 1024 columns on one rank.  Cost of others per rank for P ranks: 4/3 (n^3 - m^3)/P
        flops, half of them in products of the matrix and a vector; at most n^2/2 words in for panels, P for sums,
        and n^2 for vectors, in 4 (n - m) (P - 1) messages.  Memory for n^2/P words, and on one rank for m^2.
        Error: |A - Q T Q^H| <= c n eps |A| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.3).
        Dongarra, Sorensen & Hammarling, J. Comput. Appl. Math. 27, 1989.
        """
        n, layout = len(A), A.distribution
        fits = layout.block == (BLOCK, BLOCK) and layout.source == (0, 0) and layout.rows.skip == layout.cols.skip == 0
        W, moves = working_copy(A, BLOCK, fits, False, "F")
        real = np.finfo(A.dtype).dtype
        d, e, tau = np.zeros(n, real), np.zeros(max(0, n - 1), real), np.zeros(max(0, n - 1), A.dtype)
        reduced = min(n, -(-max(0, n - REST) // BLOCK) * BLOCK)  # the last columns are on one rank
        schedule = TridiagonalSchedule(W.layout_in(W.grid), WIDTH, can_read(W), reduced=reduced)
        executor: Any = partial(Tridiagonal, d=d, e=e, tau=tau)
        what = f"reduction of a Hermitian matrix ({shape_of(A)}) to tridiagonal form"
        _, W.report = run_panels(schedule, executor, {"A": W}, what, moves)
        work.did(W)
        _reduce_rest(work, W[reduced:, reduced:], d[reduced:], e[reduced:], tau[reduced:])
        if W.grid.size > 1:  # ranks without a position in the grid have taken no part
            d, e, tau = W.grid.comm.bcast((d, e, tau), schedule.ranks[0])
        return cls(d, e, W, tau)

    def apply(self, work: Work, Y: DistMatrix) -> DistMatrix:
        """Return Q Y.  Collective.   Y : DistMatrix (n, k), real or of A's type.

        Cost per rank for P ranks: 2 n^2 k / P flops, in products; n^2/2 words in, and those of a redistribution of Y.
        """
        X = work.did(in_whole_columns(Y, self.F))
        if len(self.tau):
            reflect_columns(self.F[1:, :-1], self.tau, X[1:], work.did)
        return X


def _reduce_rest(work: Work, A: DistMatrix, d: np.ndarray, e: np.ndarray, tau: np.ndarray) -> None:
    """Reduce A by LAPACK on the rank at grid position (0, 0), which alone sets d, e and tau.  Collective."""
    if not len(A):
        return
    whole = DistMatrix.empty(A.shape, grid=A.grid.base, block=A.shape, dtype=A.dtype, order="F")
    work.copy(A, whole)

    def reduction(task: Task[LastPartSchedule]) -> Callable[[], int]:
        def run() -> int:
            if (whole := task.arrays["A"]).size:
                with task.computing():
                    d[:], e[:], tau[:] = reduce_to_tridiagonal(whole, task.workspace["work"])
            return 0

        return run

    what = f"reduction of a Hermitian matrix ({shape_of(A)}) to tridiagonal form on one rank"
    _, whole.report = run_panels(
        LastPartSchedule(whole.layout_in(whole.grid), WIDTH, RING.name), reduction, {"A": whole}, what
    )
    work.copy(work.did(whole), A)
