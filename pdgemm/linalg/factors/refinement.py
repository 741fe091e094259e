"""Linear systems by LU factors in single precision, with the backward error of double precision.

Factors of A in single precision take half of the time, and their product M differs from A by about 1e-7 |A|.  Three
ways follow, until one of them reaches the backward error of double precision:

1. Classical refinement adds corrections that the factors compute in single precision.  It converges where the
   condition number of A is below about 1e6.
2. GMRES computes each correction, with M as its preconditioner, in double precision.  It needs a few iterations, and
   about one more for each singular value of A below 1e-7 |A|.
3. A is factored in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pdgemm.gemm import pdgemm
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.condition import reciprocal_condition, regular
from pdgemm.linalg.factors.lu import LU, lu_factor, lu_solve, own_copy, rcond_by_lu, regular_factors
from pdgemm.linalg.factors.operands import column, common_dtype, in_type, solution
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.elementwise import set_elements
from pdgemm.matrix.argument_checks import op
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.names import Refinement
from pdgemm.support.agreement import together

LOWER = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.complex128): np.dtype(np.complex64)}
STEPS = 30  # the most steps of classical refinement, as in LAPACK's dsgesv
CYCLES, ITERATIONS = 5, 50  # the most cycles of GMRES, and the most iterations in each
COLUMNS = 8  # the most columns for which GMRES runs at once; it is not chosen for more columns
TOLERANCE = 2.0**-26  # decrease of the residual in a cycle of GMRES: the square root of double precision's eps
_CLEAR = 10  # rcond of at least this multiple of eps is that of A, and not only that of its rounding errors

Solve = Callable[[DistMatrix], DistMatrix]


def solved_by_lower_factors(
    steps: Steps, A: DistMatrix, B: Any, method: Refinement, transposed: bool, overwrite_a: bool, overwrite_b: bool
) -> Any:
    """Return X as `solve` does with refine.  Collective over the grid of A.

    method : "auto", or "gmres" to begin with GMRES.   steps : records the reports of all steps.
    """
    trans: Any = "T" if transposed else "N"
    norm = A.norm(1)  # before factors are stored in A
    vector, dtype = not isinstance(B, DistMatrix), common_dtype(A, B)
    B = column(B, A, dtype) if vector else B
    single, limit = LOWER[dtype], np.sqrt(len(A)) * dtypes.eps(dtype) * op(A, trans).norm(np.inf)
    X, corrections, iterations, how = None, 0, 0, ""

    def by_factors(R: DistMatrix) -> DistMatrix:
        """Return op(A)^-1 R, computed with factors in single precision and stored in double precision."""
        return in_type(steps.did(lu_solve(factors, in_type(R, single), trans=trans, overwrite_b=R is not B)), dtype)

    with np.errstate(all="ignore"):
        factors = lu_factor(in_type(A, LOWER[A.dtype]), overwrite_a=True)
        steps.did(factors.LU)
        rcond = 0.0 if factors.zero_pivot else rcond_by_lu(steps, factors, norm)
        # small residuals do not show that X is accurate where A is nearly singular in single precision, or where an
        # element of X depends only on an element of B that is zero in single precision
        kept = A.grid.expected(in_type(B, single).vector_norm(0) == B.vector_norm(0), True)
        if method == "auto" and kept and rcond >= _CLEAR * dtypes.eps(single):
            usual = A.grid.iterations(STEPS, 2)
            X, corrections = _refined(steps, op(A, trans), by_factors(B), B, limit, by_factors, STEPS, usual)
            how = f"refined {corrections} times"
        if X is None and (rcond > 0 or factors.zero_pivot) and (method == "gmres" or B.shape[1] <= COLUMNS):
            X, rcond, iterations = _by_gmres(steps, A, B, factors, trans, limit, norm, rcond)
            how = f"refined by {iterations} iterations of GMRES"
    if X is None:
        factors = regular_factors(steps, A, overwrite_a)
        rcond = rcond_by_lu(steps, factors, norm)
        X = steps.did(lu_solve(factors, B, trans=trans, overwrite_b=overwrite_b or vector))
        how = f"which did not converge in {corrections} steps"
        how += f" and {iterations} iterations of GMRES" * (iterations > 0) + f", so by factors in {A.dtype}"
    what = f"{solution(A, B)}, by factors in {LOWER[A.dtype]}, {how}"
    regular(A, rcond)
    return X.allgather()[:, 0] if vector else steps.reported(X, what=what, rcond=rcond)


def _refined(
    steps: Steps, A: DistMatrix, X: DistMatrix, B: DistMatrix, limit: float, correct: Solve, most: int, usual: int
) -> tuple[DistMatrix | None, int]:
    """Correct X until |b - A x| <= limit |x| in each column; return X, or None, and the number of corrections.

    X is None where a correction does not halve the residual, or where `most` corrections do not suffice.
    correct : returns an approximation of A^-1 R.   usual : the number of corrections that is planned.   Collective.
    """
    before, number = np.inf, 0
    while True:
        R = steps.did(pdgemm(-1, A, X, 1, own_copy(B, A, False)))
        left, size = (x.vector_norm(np.inf, axis=0) for x in (R, X))
        ratio = float(np.where(left > 0, left / (limit * size), left).max(initial=0))  # a NaN stays NaN
        ratio = A.grid.expected(ratio, np.inf if number < usual else 0.0)
        if ratio <= 1:
            return X, number
        if not ratio <= before / 2 or number == most:
            return None, number
        X += correct(R)
        before, number = ratio, number + 1


def _by_gmres(
    steps: Steps, A: DistMatrix, B: DistMatrix, factors: LU, trans: Any, limit: float, norm: float, rcond: float
) -> tuple[DistMatrix | None, float, int]:
    """Return X, or None, with the reciprocal condition number of A and the number of iterations for X.  Collective.

    X is None where GMRES does not converge, or A is nearly singular in double precision.
    rcond : that of the factors.   norm : |A|_1.   Other arguments are those of `_refined`.
    """
    M = in_type(factors.LU, A.dtype)
    if factors.zero_pivot:  # a pivot that is not zero, within rounding errors of single precision
        pivots = np.where(M.diagonal() == 0, norm * dtypes.eps(factors.LU.dtype), 0)
        steps.did(DistMatrix.diag(pivots, grid=M.grid, device=M.device).redistribute(M, beta=1))
    krylov = _Krylov(steps, A, replace(factors, LU=M, zero_pivot=0))
    start = krylov.by_factors(own_copy(B, A, False), trans)
    X, _ = _refined(steps, op(A, trans), start, B, limit, lambda R: krylov.solved(R, trans), CYCLES, 1)
    iterations = krylov.iterations
    if X is not None and rcond < _CLEAR * dtypes.eps(factors.LU.dtype):  # that of rounding errors of the factors
        rcond = reciprocal_condition(steps, krylov.factors.LU, norm, krylov.solved)
        if rcond < _CLEAR * dtypes.eps(A.dtype) or krylov.left > np.sqrt(TOLERANCE):
            X = None
    return X, rcond, iterations


class _Krylov:
    """Solves with op(A) by GMRES, preconditioned by the LU factors of A in lower precision.

    iterations : the number of iterations so far.   left : the largest relative residual that a solve has left.
    """

    def __init__(self, steps: Steps, A: DistMatrix, factors: LU) -> None:
        self.steps, self.A, self.factors, self.iterations, self.left = steps, A, factors, 0, 0.0

    def by_factors(self, R: DistMatrix, trans: Any) -> DistMatrix:
        """Return op(M)^-1 R, where M is the product of the factors; R is overwritten.  Collective."""
        return self.steps.did(lu_solve(self.factors, R, trans=trans, overwrite_b=True))

    def solved(self, R: DistMatrix, trans: Any) -> DistMatrix:
        """Return op(A)^-1 R but for residuals, of which `left` is an upper bound; R is overwritten.  Collective."""
        for at in range(0, R.shape[1], COLUMNS):
            part = R[:, at : at + COLUMNS]
            set_elements(part.stored, self._minimised(part, trans)[np.ix_(*part.indices())])
        return R

    def _minimised(self, R: DistMatrix, trans: Any) -> np.ndarray:
        """Return D on every rank.  Its columns d minimise |M^-1 (r - op(A) d)|_2 over a Krylov space.  Collective.

        All columns make the same number of steps, which multiply and solve for all of them at once.  The basis of each
        column, on every rank, is made orthogonal by modified Gram-Schmidt, with which GMRES is backward stable: Paige,
        Rozloznik & Strakos, SIAM J. Matrix Anal. Appl. 28(1), 2006.
        """
        A, w = op(self.A, trans), self.by_factors(R, trans).allgather()
        lengths = sizes = np.linalg.norm(w, axis=0)
        with together(R.grid.comm):  # memory may be short on one rank
            H, V = (np.zeros(x, w.dtype) for x in ((len(sizes), ITERATIONS + 1, ITERATIONS), (ITERATIONS, *w.shape)))
        for k in range(R.grid.iterations(ITERATIONS, 4)):
            V[k] = w * np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
            X = column(V[k], self.A, w.dtype)
            w = self.by_factors(self.steps.did(pdgemm(1, A, X, 0, empty_like(X))), trans).allgather()
            for i, v in enumerate(V[: k + 1]):
                H[:, i, k] = (v.conj() * w).sum(axis=0)
                w = w - v * H[:, i, k]
            H[:, k + 1, k] = lengths = np.linalg.norm(w, axis=0)
            with together(R.grid.comm):
                result = _least_squares(H[:, : k + 2, : k + 1], sizes)
            Y, left = R.grid.comm.bcast(result, root=0)  # the ranks may round differently
            if R.grid.expected(not TOLERANCE < left < np.inf, False):
                break
        self.iterations, self.left = self.iterations + k + 1, max(self.left, left)
        return sum((v * (sizes * y) for v, y in zip(V, Y.T)), np.zeros_like(w))


def _least_squares(H: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the y that minimises |e_1 - H y|_2 for each matrix of a stack, and the largest minimum.

    H : (m, k + 1, k).   sizes : a matrix whose size is 0 does not count.   A minimum is infinite where H is not finite.
    """
    if not np.isfinite(H).all():
        return np.zeros(H.shape[::2], H.dtype), np.inf
    Y = np.linalg.pinv(H)[:, :, 0]
    residuals = np.eye(1, H.shape[1]) - (H @ Y[:, :, None])[:, :, 0]
    return Y, float(np.linalg.norm(residuals, axis=1)[sizes > 0].max(initial=0))
