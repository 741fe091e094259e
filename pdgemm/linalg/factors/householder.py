"""The QR factorisation of a matrix of any shape by Householder reflections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.algorithms.panels.householder_panels import AppliedReflectors, Householder
from pdgemm.algorithms.panels.panel_run import can_read, device_of, run_panels, working_copy
from pdgemm.gemm import pdgemm
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.operands import empty_like, to_factor
from pdgemm.linalg.factors.rank_k import gram
from pdgemm.linalg.ranges import ELEMENTS, in_range, times, times_upper
from pdgemm.local.arrays.element_functions import element_function
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.array_functions import tril
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.gather import to_all_ranks
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.householder_schedule import HouseholderSchedule, ReflectorsSchedule

BLOCK, WIDEST = 64, 128  # columns of a panel: one rank factors a panel while the others update the trailing matrix
PANELS = 32  # least number of panels for panels wider than BLOCK


@in_range(lambda factors, a: (factors[0], times(factors[1], a)), A=ELEMENTS)
def householder_qr(
    A: DistMatrix, *, overwrite_a: bool = False, want_q: bool = True
) -> tuple[DistMatrix | None, DistMatrix]:
    """Return Q and R, where A = Q R, as scipy.linalg.qr(A, mode="economic").  Collective over the grid of A.

    A      : DistMatrix (m, n) of any shape, float32, float64, complex64 or complex128, of any layout.
    overwrite_a : A may be overwritten, which saves a copy where the layout of A shares the work evenly.
    want_q : False leaves Q out, and returns None in its place.

    Q (m, k) has orthonormal columns, k = min(m, n), for A of any rank;  R (k, n) is upper triangular, with LAPACK's
    signs: its diagonal is real, and may be negative.  Both have the layout of A, or are in square blocks where this
    layout does not share the work evenly; `report` has the words.
    On a device, everything runs there, panels by cuSOLVER, and nothing is copied to the host.  DeviceError where
    cuSOLVER is missing, or where MPI takes no device pointers and ranks cannot read in place.

    Cost per rank on Pr x Pc = P, m >= n: (2 m n^2 - 2/3 n^3)/P flops for R, and as many for Q; about
    n (m - n/2)/Pr + n^2/Pc + n (m - n/2)/P words in for R; extra memory for m n/P words of reflectors.
    Raises LayoutError, DTypeError, DeviceError, ArgumentError or GridError on all ranks.
    Error: columnwise |A - Q R| <= gamma_{mn} |A| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.4).
    Schreiber & Van Loan, SIAM J. Sci. Stat. Comput. 10(1), 1989.
    """
    start = perf_counter()
    W, moves = to_factor("householder_qr", A, BLOCK, overwrite_a, None, bool(want_q))
    (m, n), k = A.shape, min(A.shape)
    matrices = {"A": W}
    if want_q:
        like_q, _ = working_copy(W[:, :k], BLOCK, True, False)
        matrices["Q"] = like_q._filled("eye", element_function("eye", 0, np.dtype("d")))
    what = f"QR factors of a matrix ({m} x {n}) by Householder reflections"
    _, report = run_panels(householder_schedule(W, want_q), Householder, matrices, what, moves, start)
    Q, R = matrices.get("Q"), working_copy(W[:k], BLOCK, True, False)[0] if m > n else W
    for factor in (Q, R):
        if factor is not None:
            factor.report = report
    return Q, R


@in_range(lambda factors, a: (times_upper(factors[0], a), factors[1]), A=ELEMENTS)
def householder_factor(A: DistMatrix) -> tuple[DistMatrix, np.ndarray]:
    """Return R with reflectors below its diagonal, and tau, the same on every rank, as LAPACK's geqrf.  Collective.

    A : DistMatrix (m, n) as for `householder_qr`.  A = H_1 H_2 ... H_k R, where H_j = I - tau_j v v^H, and v has zeros
    above row j, 1 in row j, and then the elements of column j below the diagonal.  Up to rounding the numbers are those
    of one process.  Cost and errors are those of `householder_qr` without Q.
    """
    W, moves = to_factor("householder_factor", A, BLOCK, False)
    tau, what = np.zeros(min(A.shape), A.dtype), f"QR factors of a matrix ({shape_of(A)}) by Householder reflections"
    executor = partial(Householder, tau=tau)
    _, W.report = run_panels(householder_schedule(W, False), executor, {"A": W}, what, moves)
    return W, to_all_ranks(W.grid, "tau", tau, sums=True)  # each number is set on one rank, and 0 on the others


def apply_reflectors(
    F: DistMatrix, tau: np.ndarray, C: DistMatrix, adjoint: bool, did: Callable[[Any], Any] | None = None
) -> None:
    """Compute C := Q C, or C := Q^H C with `adjoint`, where Q = H_1 H_2 ... H_k of `householder_factor`.  Collective.

    F : DistMatrix (m, k), with the reflectors below its diagonal.   tau : k numbers, the same on every rank.
    C : DistMatrix (m, n) of any layout, overwritten.   did : called with each product, to keep its report.

    Cost per rank for P ranks: 4 m n k/P flops, in products alone, for 128 reflectors at a time.
    """
    starts, did = range(0, len(tau), 2 * BLOCK), did or Steps().did
    for start in starts if adjoint else reversed(starts):
        columns = slice(start, start + 2 * BLOCK)
        V: Any = tril(F[start:, columns], -1)
        V += empty_like(V)._filled("eye", element_function("eye", 0, np.dtype("d")))
        D, U = np.diag(tau[columns]), np.triu(did(gram(V)).allgather(), 1)  # T^-1 = D^-1 + U: see `blas.local_qr`
        T = np.linalg.solve(np.eye(len(D)) + D @ U, D).astype(F.dtype)
        T = T.conj().T if adjoint else T
        small = DistMatrix.from_global(T, grid=F.grid.base, device=F.device, check=False)
        did(pdgemm(-1, V, did(pdgemm(1, small, did(pdgemm(1, V.H, C[start:])))), 1, C[start:]))


def reflect_columns(F: DistMatrix, tau: np.ndarray, X: DistMatrix, did: Callable[[Any], Any] | None = None) -> None:
    """Compute X := H_1 H_2 ... H_k X as `apply_reflectors`, for a host X on a grid of one row.  Collective.

    X : DistMatrix (m, n), overwritten.   Cost per rank for P ranks: 4 m n k/P flops and m k^2; m k words in.
    """
    schedule = ReflectorsSchedule(X.layout_in(X.grid), 2 * BLOCK, RING.name, F=F.layout_in(F.grid))
    what, executor = f"Reflectors of a matrix ({shape_of(F)})", partial(AppliedReflectors, tau=tau)
    _, X.report = run_panels(schedule, executor, {"A": X, "F": F}, what)
    if did:
        did(X)


def householder_schedule(W: DistMatrix, want_q: bool) -> HouseholderSchedule:
    """Return the schedule of the QR factorisation of a matrix whose layout suits the algorithm.  Local."""
    width = max(BLOCK, min(WIDEST, min(W.shape) // PANELS))
    return HouseholderSchedule(W.layout_in(W.grid), width, can_read(W), wants_q=bool(want_q), device=device_of(W))
