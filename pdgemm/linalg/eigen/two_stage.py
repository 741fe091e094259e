"""The reduction of a Hermitian matrix to tridiagonal form in two stages: to a band by products, and from the band.

Bischof, Lang & Sun, ACM Trans. Math. Softw. 26(4), 2000; Auckenthaler et al., Parallel Comput. 37(12), 2011; Haidar,
Ltaief & Dongarra, SC 2011.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from pdgemm.algorithms.panels.band_panels import BandReduction
from pdgemm.algorithms.panels.bulge_chase import BackChase, BulgeChase
from pdgemm.algorithms.panels.panel_run import run_panels, working_copy
from pdgemm.linalg.factors.householder import reflect_columns
from pdgemm.linalg.factors.operands import in_whole_columns
from pdgemm.linalg.work import Work
from pdgemm.local.blas.band import Bulges
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.band_schedule import BandSchedule
from pdgemm.schedules.panels.chase_schedule import BackChaseSchedule, ChaseSchedule
from pdgemm.support.agreement import together

BAND = 64  # diagonals below the main one that the first stage leaves


@dataclass(frozen=True)
class Band:
    """A = Q B Q^H, where B is a Hermitian band.

    elements : (b + 1, n), b >= 1, the same on every rank: row k has the elements b_{j+k,j}.
    F, tau   : the reflectors of Q, in rows b and below: Q is diag(I, H_1 H_2 ...) of `apply_reflectors`.
    """

    elements: np.ndarray
    F: DistMatrix
    tau: np.ndarray

    @property
    def b(self) -> int:
        return len(self.elements) - 1

    @classmethod
    def of(cls, work: Work, A: DistMatrix) -> Band:
        """Reduce A, Hermitian and on the host, of which the lower triangle is read.  Collective over the grid of A."""
        n, rows, cols = len(A), A.distribution.rows, A.distribution.cols
        b = min(BAND, max(1, n - 1))
        W, moves = working_copy(A, b, A.distribution.block == (b, b) and rows.skip == cols.skip == 0, False)
        with together(A.grid.comm):  # memory may lack on one rank
            tau, elements = np.zeros(max(0, n - b), A.dtype), np.zeros((b + 1, n), A.dtype)
        what = f"Reduction of a matrix ({shape_of(A)}) to a band"
        schedule = BandSchedule(W.layout_in(W.grid), b, RING.name)
        _, W.report = run_panels(schedule, partial(BandReduction, tau=tau), {"A": W}, what, moves)
        work.did(W)
        for k in range(b + 1):
            elements[k, : n - k] = W.diagonal(-k)
        return cls(elements, W, tau)


@dataclass(frozen=True)
class TwoStages:
    """A = Q T Q^H, where T is real and tridiagonal, and Q the product of the reflections of both stages.

    d, e : the diagonal and the subdiagonal of T, the same on every rank.
    reflections : those of the second stage that this rank carried out, as `schedule` says.
    """

    d: np.ndarray
    e: np.ndarray
    band: Band
    reflections: np.ndarray
    schedule: ChaseSchedule

    @classmethod
    def of(cls, work: Work, A: DistMatrix) -> TwoStages:
        """Reduce A, Hermitian and on the host, of which the lower triangle is read.  Collective over the grid of A."""
        band = Band.of(work, A)
        F, schedule = band.F, ChaseSchedule(band.F.layout_in(band.F.grid), band.b, RING.name)
        with together(F.grid.comm):  # memory may lack on one rank
            bulges, reflections = Bulges(band.elements), np.empty(schedule.kept(F.grid.comm.rank), A.dtype)
        chase = partial(BulgeChase, bulges=bulges, reflections=reflections)
        _, F.report = run_panels(schedule, chase, {"A": F}, f"Chase of the bulges of a band ({shape_of(A)})")
        work.did(F)
        d, e = F.grid.comm.bcast(bulges.tridiagonal(), root=schedule.A.rank_map[0])
        return cls(d, e, band, reflections, schedule)

    def apply(self, work: Work, Y: DistMatrix) -> DistMatrix:
        """Return Q Y.  Collective.   Y : DistMatrix (n, k), real or of A's type.

        Cost: about 5 n^2 k flops in all, in products; n^2 words in for each rank, and two redistributions of Y.
        """
        F, b, tau = self.band.F, self.band.b, self.band.tau
        X = work.did(in_whole_columns(Y, F))
        schedule = BackChaseSchedule(X.layout_in(X.grid), b, RING.name, chased=self.schedule)
        what, own = f"Reflections of a matrix ({shape_of(X)})", self.reflections
        _, X.report = run_panels(schedule, partial(BackChase, reflections=own), {"A": X}, what)
        work.did(X)
        if len(tau):
            reflect_columns(F[b:, : len(tau)], tau, X[b:], work.did)
        return X
