"""The reduction of a Hermitian matrix to real tridiagonal form, A = Q T Q^H, in one stage or two, and products with Q.

The two stages reduce A to a band, by products, and the band to T.
Bischof, Lang & Sun, ACM Trans. Math. Softw. 26(4), 2000; Auckenthaler et al., Parallel Comput. 37(12), 2011; Haidar,
Ltaief & Dongarra, SC 2011.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pdgemm.algorithms.panels.band_panels import BandReduction
from pdgemm.algorithms.panels.bulge_chase import BackChase, BulgeChase
from pdgemm.algorithms.panels.panel_run import can_read, run_on_one_rank, run_panels, working_copy
from pdgemm.algorithms.panels.tridiagonal_panels import Tridiagonal
from pdgemm.linalg.factors.householder import reflect_columns
from pdgemm.linalg.factors.operands import in_whole_columns, most_on_one_rank
from pdgemm.linalg.work import Work
from pdgemm.local.blas.band import Bulges
from pdgemm.local.blas.local_lapack import reduce_to_tridiagonal
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.band_schedule import BandSchedule
from pdgemm.schedules.panels.chase_schedule import BackChaseSchedule, ChaseSchedule
from pdgemm.schedules.panels.tridiagonal_schedule import TridiagonalSchedule
from pdgemm.support.agreement import together
from pdgemm.transport.panels.task import Task

BLOCK, WIDTH = 64, 64  # block size of the working copy; columns of a panel: 32 are as fast within a few percent
REST = 1024  # order of the last part, which LAPACK reduces faster on one rank than all ranks by two exchanges a column
BAND = 64  # diagonals below the main one that a reduction to a band leaves


@dataclass(frozen=True)
class OneStage:
    """The factors of A = Q T Q^H, where T is real and tridiagonal, from a reduction in one stage.

    d, e : (n,) and (n - 1,), the diagonal and the subdiagonal of T.   tau : (n - 1,).  All three are the same to the
        bit on every rank.
    F : DistMatrix (n, n) with the reflectors below its diagonal: Q = H_1 H_2 ..., H_k = I - tau_k v v^H, where v has
        zeros down to row k, 1 in row k + 1, and then the elements of column k of F.
    """

    d: np.ndarray
    e: np.ndarray
    F: DistMatrix
    tau: np.ndarray

    @classmethod
    def of(cls, work: Work, A: DistMatrix) -> OneStage:
        """Reduce a Hermitian A on the host.  Collective over the grid of A.

        The lower triangle and the real part of the diagonal are read; A is not changed.

        LAPACK reduces the last m = 1024 columns on one rank; where all ranks are on one node, 4096 columns with the
        cores of all of them, which sleep.  Other columns, per rank for P ranks: 4/3 (n^3 - m^3)/P
        flops, half of them in products of the matrix and a vector; about n^2/(2P) words in for panels, n^2/2 for
        sums, and n^2 for vectors, in 4 (n - m) (P - 1) messages.  Memory for n^2/P words, and on one rank for m^2.
        Error: |A - Q T Q^H| <= c n eps |A| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.3).
        Dongarra, Sorensen & Hammarling, J. Comput. Appl. Math. 27, 1989.
        """
        n, layout = len(A), A.distribution
        fits = layout.block == (BLOCK, BLOCK) and layout.source == (0, 0) and layout.rows.skip == layout.cols.skip == 0
        W, moves = working_copy(A, BLOCK, fits, False, "F")
        real = np.finfo(A.dtype).dtype
        d, e, tau = np.zeros(n, real), np.zeros(max(0, n - 1), real), np.zeros(max(0, n - 1), A.dtype)
        rest = most_on_one_rank(A, REST)
        reduced = min(n, -(-max(0, n - rest) // BLOCK) * BLOCK)  # in whole blocks, by all ranks; the rest on one rank
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

        Cost per rank for P ranks: 2 n^2 k / P flops, in products; n^2/2 words in, and a redistribution of Y.
        """
        X = work.did(in_whole_columns(Y, self.F))
        reflect_columns(self.F[1:, :-1], self.tau, X[1:], work.did)
        return X


def _reduce_rest(work: Work, A: DistMatrix, d: np.ndarray, e: np.ndarray, tau: np.ndarray) -> None:
    """Reduce A by LAPACK on the rank at grid position (0, 0), the only rank that sets d, e and tau.  Collective."""
    if not len(A):
        return
    grid = A.grid.base.reshaped((1, 1), A.grid.rank_map[:1])
    whole = DistMatrix.empty(A.shape, grid=grid, dtype=A.dtype, order="F")
    work.copy(A, whole)

    def reduce() -> None:
        d[:], e[:], tau[:] = reduce_to_tridiagonal(whole.stored)

    n, what = len(A), f"reduction of a Hermitian matrix ({shape_of(A)}) to tridiagonal form on one rank"
    _, whole.report = run_on_one_rank("tridiagonal", whole, (n, n, 2 * n / 3), reduce, None, what, passes=n // 6)
    work.copy(work.did(whole), A)


def reduced_to_band(
    work: Work, A: DistMatrix, schedule: type[Any], executor: Callable[[Task[Any]], Callable[[], None]], below: bool
) -> tuple[np.ndarray, DistMatrix]:
    """Return the band to which a panel algorithm reduces A, and the matrix with its reflectors.  Collective.

    A : on the host; unchanged.   below : the band is below the diagonal.
    The band is an array (b + 1, n), b >= 1, the same on every rank.  Its row k has the elements (j + k, j) of the band
    matrix if `below`, otherwise the elements (j, j + k).
    """
    n, rows, cols = A.shape[1], A.distribution.rows, A.distribution.cols
    b = min(BAND, max(1, n - 1))
    W, moves = working_copy(A, b, A.distribution.block == (b, b) and rows.skip == cols.skip == 0, False)
    what = f"Reduction of a matrix ({shape_of(A)}) to a band"
    _, W.report = run_panels(schedule(W.layout_in(W.grid), b, RING.name), executor, {"A": W}, what, moves)
    work.did(W)
    with together(A.grid.comm):  # a rank may lack memory
        elements = np.zeros((b + 1, n), A.dtype)
    for k in range(b + 1):
        elements[k, : n - k] = W.diagonal(-k if below else k)
    return elements, W


def hermitian_band(work: Work, A: DistMatrix) -> tuple[np.ndarray, DistMatrix, np.ndarray]:
    """Return the band B of A = Q B Q^H, (b + 1, n) as `reduced_to_band` does, and the reflectors of Q.  Collective.

    A : Hermitian and on the host; the lower triangle is read.
    Q = diag(I, H_1 H_2 ...), where I has order b, and rows b and below of F, with tau, hold the reflectors H_j as for
    `apply_reflectors`.
    """
    with together(A.grid.comm):  # a rank may lack memory
        tau = np.zeros(len(A), A.dtype)
    elements, F = reduced_to_band(work, A, BandSchedule, partial(BandReduction, tau=tau), below=True)
    return elements, F, tau[: max(0, len(A) + 1 - len(elements))]


@dataclass(frozen=True)
class TwoStages:
    """The factors of A = Q T Q^H from a reduction in two stages: T is real and tridiagonal, Q a product of reflections.

    d, e : the diagonal and the subdiagonal of T, the same on every rank.
    F, tau : the reflections of the first stage, as `hermitian_band` returns them.
    reflections : the reflections of the second stage that this rank carried out; `schedule` assigns them.
    """

    d: np.ndarray
    e: np.ndarray
    F: DistMatrix
    tau: np.ndarray
    reflections: np.ndarray
    schedule: ChaseSchedule

    @classmethod
    def of(cls, work: Work, A: DistMatrix) -> TwoStages:
        """Reduce a Hermitian A on the host, by its lower triangle.  Collective over the grid of A."""
        band, F, tau = hermitian_band(work, A)
        schedule = ChaseSchedule(F.layout_in(F.grid), len(band) - 1, RING.name)
        with together(F.grid.comm):  # a rank may lack memory
            bulges, reflections = Bulges(band), np.empty(schedule.kept(F.grid.comm.rank), A.dtype)
        chase = partial(BulgeChase, bulges=bulges, reflections=reflections)
        _, F.report = run_panels(schedule, chase, {"A": F}, f"Chase of the bulges of a band ({shape_of(A)})")
        work.did(F)
        d, e = F.grid.comm.bcast(bulges.tridiagonal(), root=schedule.A.rank_map[0])
        return cls(d, e, F, tau, reflections, schedule)

    def apply(self, work: Work, Y: DistMatrix) -> DistMatrix:
        """Return Q Y.  Collective.   Y : DistMatrix (n, k), real or of A's type.

        Cost: about 5 n^2 k flops in all, in products; n^2 words in for each rank, and two redistributions of Y.
        """
        F, tau, b = self.F, self.tau, self.schedule.width
        X = work.did(in_whole_columns(Y, F))
        schedule = BackChaseSchedule(X.layout_in(X.grid), b, RING.name, chased=self.schedule)
        what, own = f"Reflections of a matrix ({shape_of(X)})", self.reflections
        _, X.report = run_panels(schedule, partial(BackChase, reflections=own), {"A": X}, what)
        work.did(X)
        reflect_columns(F[b:, : len(tau)], tau, X[b:], work.did)
        return X
