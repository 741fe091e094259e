"""The factorisation of a Hermitian or symmetric matrix that need not be definite, solves with it, and inertia."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import scipy  # whose packages, which take long to load, are loaded when they are first used

from pdgemm.algorithms.panels.panel_run import run_panels
from pdgemm.algorithms.pivoted.aasen_panels import AasenPanels
from pdgemm.algorithms.redistribution import redistribute
from pdgemm.errors import DTypeError, LinAlgError
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.lu import own_copy, permuted
from pdgemm.linalg.factors.operands import (
    check_right_side,
    check_square,
    column,
    common_dtype,
    operand_description,
    solution,
)
from pdgemm.linalg.factors.rank_k import both_triangles
from pdgemm.linalg.factors.triangular import BLOCK, solve_triangular
from pdgemm.linalg.ranges import ELEMENTS, in_range, times
from pdgemm.local.arrays import dtypes
from pdgemm.matrix.argument_checks import check_result, communicator, op_letter, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import Transpose
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.pivoted.aasen_schedule import INDEX, AasenSchedule
from pdgemm.support.agreement import together

BAND = 64  # bandwidth of T: wide enough for BLAS; one rank factors panels of this width, and every rank holds T


@dataclass(frozen=True, eq=False)
class LDL:
    """The factors of A[perm][:, perm] = L T L^H, or L T L^T, as `ldl` returns them.

    L    : DistMatrix (n, n), unit lower triangular; its first nb columns are those of the identity.
    T    : the lower triangle of the Hermitian or symmetric band matrix T, (nb + 1, n), the same on all ranks, as
        scipy.linalg.solveh_banded takes it: T[i, j] is T[i - j, j] of this array.  nb is at most 64.
    perm : the row numbers of A in the order of the factors, the same on all ranks.
    hermitian : A is Hermitian, otherwise symmetric.
    """

    L: DistMatrix
    T: np.ndarray
    perm: np.ndarray
    hermitian: bool

    def __iter__(self) -> Iterator[Any]:
        """Yield L, T and perm."""
        return iter((self.L, self.T, self.perm))

    @property
    def report(self) -> Any:
        """The words, messages and seconds of the factorisation."""
        return self.L.report

    @cached_property
    def lu_of_band(self) -> tuple[np.ndarray, np.ndarray, int]:
        """LAPACK's gbtrf of T, which this rank computes when it is first used: the factors, the pivots, and info."""
        lower, (bands, n) = self.T, self.T.shape
        nb, transposed = bands - 1, self.T.conj() if self.hermitian else self.T
        whole = np.zeros((3 * nb + 1, n), lower.dtype, order="F")
        for d in range(bands):
            whole[2 * nb + d, : n - d] = lower[d, : n - d]
            whole[2 * nb - d, d:] = transposed[d, : n - d]
        gbtrf: Any = scipy.linalg.get_lapack_funcs("gbtrf", (whole,))
        return gbtrf(whole, nb, nb, overwrite_ab=True) if n else (whole, np.zeros(0, np.intc), 0)


class Inertia(NamedTuple):
    """The numbers of negative, zero and positive eigenvalues of a Hermitian matrix."""

    negative: int
    zero: int
    positive: int


@in_range(lambda factors, a: replace(factors, T=times(factors.T, a)), A=ELEMENTS)
def ldl(A: DistMatrix, *, lower: bool = True, hermitian: bool = True) -> LDL:
    """Return L, T and perm, where A[perm][:, perm] = L T L^H, by Aasen's method in blocks.  Collective over the grid.

    A     : DistMatrix (n, n) of any layout, Hermitian, not necessarily definite; float32, float64, complex64 or
        complex128; A is not changed.
    lower : the lower triangle of A is read, otherwise the upper; the result is the same.
    hermitian : A is Hermitian, and imaginary parts of its diagonal are taken for zero; otherwise A is symmetric, and
        A[perm][:, perm] = L T L^T.

    L is unit lower triangular, row-major, in square blocks on the grid of A.  T is a band matrix with at most 64
    diagonals on each side, where scipy.linalg.ldl has blocks of orders 1 and 2; the `lu` of SciPy is L[argsort(perm)].
    `report` has the words, which depend on the pivots.  A singular A has factors, too; then T is singular, and
    `ldl_solve` raises LinAlgError.  All ranks of the grid work, also idle ones.  A matrix on a device is factored on
    the host, and L returns to the device.

    Cost per rank on P ranks, with nb = 64: n^3/(3P) flops, half of those of `lu_factor`, 3 n^2 nb/P for L T, and
    3 n^2 nb/2 on one rank, which factors the panels; n^2/2 words in for L, on this rank as many for panels, and
    4 n^2/P to move A and L; memory 3 n^2/P words, and n (nb + 1) for T.
    Raises LayoutError, DTypeError, DeviceError, ArgumentError or GridError on all ranks.
    Error: |P A P^T - L T L^H| <= gamma_n |L||T||L^H| to first order (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, 11.2).
    Ballard, Becker, Demmel, Dongarra, Druinsky, Peled, Schwartz, Toledo & Yamazaki, Implementing a blocked Aasen's
    algorithm with a dynamic scheduler on multicore architectures, IPDPS 2013; Aasen, BIT 11, 1971.
    """
    with together(communicator(A=A)) as arguments:
        check_square(A)
        arguments += ["ldl", bool(lower), bool(hermitian), *operand_description(A)]
    what, base, ranks = f"LDL factors of a matrix ({shape_of(A)})", A.grid.base, tuple(range(A.grid.size))
    steps = Steps(what=what)
    rows = partial(redistribute, A.to_host(), grid=base.work_grid((len(ranks), 1), 1, ranks), block=BAND)
    W = steps.did(both_triangles(steps.did(rows()), "L" if lower else "U", bool(hermitian)))
    schedule, n = AasenSchedule(W.layout_in(W.grid), BAND, RING.name), len(A)
    with together(W.grid.comm):  # where one rank lacks memory, all ranks raise
        band, order = np.zeros((min(BAND, max(n - 1, 0)) + 1, n), A.dtype), np.zeros(n, INDEX)
    executor = partial(AasenPanels, hermitian=bool(hermitian), band=band, order=order)
    _, W.report = run_panels(
        schedule, executor, {"A": W}, what, as_run=lambda plan: replace(plan, order=tuple(order.tolist()))
    )
    band[0] = W.grid.expected(band[0], 1)
    order = W.grid.expected(order, schedule.chosen)
    W = steps.did(permuted(steps.did(W), order))
    L = steps.did(redistribute(W, grid=base, block=BLOCK)).to_device(A.device)
    return LDL(steps.reported(L), band, order, bool(hermitian))


def ldl_solve(factors: LDL, B: Any, *, trans: Transpose = "N", overwrite_b: bool = False) -> Any:
    """Return X, where op(A) X = B, given the factors of A that `ldl` returns.  Collective over the grid of the factors.

    B     : DistMatrix (n, m) of any layout, or an array or list, the same on every rank; X of a vector is an array.
    trans : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H.
    overwrite_b : X may be stored in B.

    X has the layout of B.  Each rank factors T, and solves with it for some columns of B, by LAPACK on the host.
    Cost per rank on P ranks, with nb = 64: 2 n^2 m/P flops, in two triangular solves, 8 n nb m/P and 4 n nb^2 with T;
    3 n m/P words for the exchange of rows, and for the moves to whole columns and back.
    Raises LinAlgError on all ranks where T is singular; LayoutError, DTypeError, ArgumentError or GridError.
    Error: (A + E) x = b with |E| <= gamma_3n |L||T||L^H|, for each column, to first order (Higham 2002, theorem 11.8).
    """
    known = isinstance(factors, LDL)
    wrong = DTypeError(f"factors must be an LDL, as ldl returns it, got {type(factors).__name__}")
    if not known and not isinstance(B, DistMatrix):  # there is no communicator over which ranks could agree
        raise wrong
    with together(communicator(factors=factors.L if known else None, B=B)) as arguments:
        if not known:
            raise wrong
        letter = op_letter(trans, "trans")
        check_right_side(factors.L, B)
        if overwrite_b and isinstance(B, DistMatrix):
            check_result("B", B, {"factors.L": factors.L})
        arguments += ["ldl_solve", letter, bool(overwrite_b), factors.hermitian]
        arguments += operand_description(factors.L, factors.T, factors.perm, B)
        check_band(factors)
    L, steps, vector = factors.L, Steps(what=solution(factors.L, B)), not isinstance(B, DistMatrix)
    conjugated = letter == ("T" if factors.hermitian else "C") and L.dtype.kind == "c"  # op(A) is then conj(A)
    by: Any = partial(solve_triangular, L, lower=True, unit_diagonal=True, overwrite_b=True)
    X = column(B, L, common_dtype(L, B)) if vector else own_copy(B, L, overwrite_b)
    X = steps.did(permuted(X.conj() if conjugated else X, factors.perm))
    X = _with_band(steps, factors, steps.did(by(X)))
    X = steps.did(by(X, trans="C" if factors.hermitian else "T"))
    X = steps.did(permuted(X, np.argsort(factors.perm)))
    X = X.conj() if conjugated else X
    return X.allgather()[:, 0] if vector else steps.reported(X)


def check_band(factors: LDL) -> None:
    """Raise LinAlgError where T is singular.  Local."""
    at = factors.L.grid.expected(factors.lu_of_band[2], 0)
    if at:
        A = factors.L
        raise LinAlgError(f"A ({shape_of(A)} on a {A.grid} grid) is singular: pivot {at} of {len(A)} of T is zero")


@in_range(lambda counts, a: counts, A=ELEMENTS)
def inertia(A: DistMatrix, *, lower: bool = True) -> Inertia:
    """Return the numbers of negative, zero and positive eigenvalues of a Hermitian matrix.  Collective over the grid.

    A, lower : as for `ldl`.

    The eigenvalues of T, where P A P^T = L T L^H, have the signs of those of A, by Sylvester's law.  One rank computes
    them, and an eigenvalue of T counts as zero up to n eps |T|_2.  The result is the same on all ranks.
    Cost: that of `ldl`, and about 6 n^2 nb flops on one rank, with nb = 64.
    Raises LinAlgError on all ranks where A has NaN or infinite elements, and the errors of `ldl`.
    """
    factors = ldl(A, lower=lower)
    grid, T, n = factors.L.grid, factors.T, len(A)
    with together(grid.comm):
        if not np.isfinite(T).all():
            raise LinAlgError(f"A ({shape_of(A)} on a {A.grid} grid) has no inertia: T has NaN or infinite elements")
        counts = (0, 0, n)
        if grid.rank == 0 and n:
            values = scipy.linalg.eigvals_banded(T, lower=True)
            least = n * dtypes.eps(A.dtype) * np.abs(values).max()
            negative, zero = np.count_nonzero(values < -least), np.count_nonzero(np.abs(values) <= least)
            counts = int(negative), int(zero), n - int(negative) - int(zero)
    return Inertia(*grid.expected(grid.comm.bcast(counts, root=0), (0, 0, n)))


def _with_band(steps: Steps, factors: LDL, B: DistMatrix) -> DistMatrix:
    """Return T^-1 B; B is overwritten.  Collective over the grid of the factors."""
    (n, m), ranks, base = B.shape, tuple(range(B.grid.size)), B.grid.base
    columns = base.work_grid((1, len(ranks)), 1, ranks)
    X = steps.did(redistribute(B, grid=columns, block=(max(1, n), max(1, -(-m // len(ranks)))), order="F")).to_host()
    lu, pivots, _ = factors.lu_of_band
    if X.stored.size:
        gbtrs: Any = scipy.linalg.get_lapack_funcs("gbtrs", (lu, X.stored))
        nb = len(factors.T) - 1
        X.stored[...] = gbtrs(lu, nb, nb, X.stored, pivots, overwrite_b=True)[0]
    return steps.did(X.to_device(B.device).redistribute(B))
