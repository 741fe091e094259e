"""Norms and the condition number."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, Literal

import numpy as np

from pdgemm.errors import ArgumentError, LinAlgError
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.cholesky import cho_solve, cholesky
from pdgemm.linalg.factors.condition import inverse_norm
from pdgemm.linalg.factors.lu import lu_factor, lu_solve
from pdgemm.linalg.factors.operands import check_operand, is_reachable, to_one
from pdgemm.linalg.ranges import ELEMENTS, EQUILIBRATED, Scale, in_range, times
from pdgemm.linalg.singular.singular_values import singular_values
from pdgemm.linalg.work import largest_part, on_one_rank
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.arguments import as_name, as_real, shown
from pdgemm.local.arrays.element_functions import element_function
from pdgemm.matrix.argument_checks import communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import Norm
from pdgemm.support.agreement import together

Vectors = Callable[[np.ndarray], np.ndarray]
_MOST = 1000  # the most Lanczos steps; every rank holds all their vectors


def norm(A: DistMatrix, ord: Norm | None = None, *, tolerance: float | None = None) -> float:
    """Return a norm of A, the same on every rank to the bit.  Collective over the grid.

    A    : DistMatrix (m, n); for the 2-norm its type is real or complex floating point, for "nuc" and -2 s, d, c or z.
    ord  : None or "fro" sqrt(sum |a|^2); 1 max column sum; -1 min column sum; numpy.inf max row sum; -numpy.inf min row
           sum; "max" max |a|; 2 the largest singular value; -2 the smallest; "nuc" the sum of the singular values.
    tolerance : relative tolerance of the 2-norm; by default 1e-10, for 32-bit types 1e-6, for 16-bit types 1e-2.

    The 2-norm is computed by Golub-Kahan-Lanczos steps with full reorthogonalisation in double precision, from the same
    random vector in every call.  Up to rounding the result is a lower bound of the 2-norm, and some singular value of A
    is within the tolerance of the result, as its residual and gap show.  This value is the largest one unless the
    random vector lacks its direction: after k steps the probability of an error above t is below
    1.7 sqrt(n) e^(-sqrt(t) (2k - 1)); fewer steps suffice if the largest value is well separated.  A NaN gives NaN, and
    so does an infinite element with the norms 2, -2 and "nuc"; no intermediate result overflows.

    Cost of a step per rank for P ranks: 4 mn/P flops and m + n words to every rank; 20 to 100 steps are usual.
    Cost for "nuc" and -2: that of `svdvals`.
    Raises ArgumentError, also for a minimum of a matrix without elements, or DTypeError on all ranks; LinAlgError where
    1000 steps do not suffice.
    Golub & Kahan, SIAM J. Numer. Anal. 2(2), 1965; Kuczynski & Wozniakowski, SIAM J. Matrix Anal. Appl. 13(4), 1992;
    Parlett, The Symmetric Eigenvalue Problem, 1998, 11.7.
    """
    with together(communicator(A=A)) as arguments:
        arguments += ["norm", A.distribution, A.dtype, shown(ord), shown(tolerance)]
        ord = _plain(ord)
        if of_values := ord in (2, -2, "nuc"):
            check_operand("A", A, supported=dtypes.FLOATS if ord == 2 else dtypes.BLAS)
            bound = _tolerance(A, tolerance)
        if ord == -2 and 0 in A.shape:
            raise ArgumentError(f"norm -2 is the smallest singular value, and A has none: it is {shape_of(A)}")
    if not of_values:
        return A.norm("fro" if ord is None else ord)
    size = largest_part(A)
    if size == 0 or not np.isfinite(size):
        return 0.0 if size == 0 else float("nan")
    if ord != 2:
        values = singular_values(A).astype(float)
        with np.errstate(over="ignore"):
            return float(values.sum() if ord == "nuc" else values[-1])
    near, far = to_one(size, np.dtype(float))
    value = largest_singular_value(A, lambda x: A.matvec(near * x) * far, lambda x: _adjoint(A, near * x) * far, bound)
    return value / near / far


def _plain(ord: Any) -> Any:
    """Return `ord`: a number of any type becomes a Python number, an unsupported object becomes text.  Local."""
    if isinstance(ord, Real) and not isinstance(ord, bool):
        return next((x for x in (1, 2, -1, -2) if x == ord), float(ord))
    return ord if ord is None or isinstance(ord, str) else shown(ord)


def _tolerance(A: DistMatrix, tolerance: float | None) -> float:
    usual = {2: 1e-2, 4: 1e-6, 8: 1e-10}[A.dtype.itemsize // (2 if A.dtype.kind == "c" else 1)]
    return usual if tolerance is None else as_real(tolerance, "tolerance", above=0)


def _adjoint(A: DistMatrix, x: np.ndarray) -> np.ndarray:
    """Return A^H x, without a copy of A.  Collective."""
    return A.T.matvec(x.conj()).conj()


def largest_singular_value(A: DistMatrix, apply: Vectors, adjoint: Vectors, tolerance: float) -> float:
    """Return a lower bound of |M|_2, to a relative tolerance, for a linear map M with the shape of A.  Collective.

    apply, adjoint : return M x and M^H x for a vector x, the same on every rank.
    """
    if A.shape[0] < A.shape[1]:  # so that V spans the whole space after min(m, n) steps
        apply, adjoint = adjoint, apply
    wide = np.dtype(complex if A.dtype.kind == "c" else float)
    start = element_function("normal", 1, wide)(np.arange(min(A.shape)), np.zeros(1))
    V, U, alphas, betas = [start / np.linalg.norm(start)], list[np.ndarray](), list[float](), list[float]()
    for k in range(1, min(*A.shape, _MOST) + 1):
        u, alpha = on_one_rank(A, _next, apply(V[-1]), U)  # on one rank, because ranks may round differently
        v, beta = on_one_rank(A, _next, adjoint(u), V)
        U, V, alphas, betas = [*U, u], [*V, v], [*alphas, alpha], [*betas, beta]
        last = k == min(A.shape)
        if last or k % (1 + k // 20) == 0:
            value, error = on_one_rank(A, _largest, alphas, betas)
            error = A.grid.expected(error, 0.0 if k >= A.grid.iterations(_MOST, 40) else np.inf)
            if last or error <= tolerance * value:
                return value
    raise LinAlgError(
        f"the 2-norm of a matrix ({A.distribution}) did not converge to a relative tolerance of {tolerance} "
        f"in {_MOST} Lanczos steps"
    )


def _next(x: np.ndarray, basis: list[np.ndarray]) -> tuple[np.ndarray, float]:
    """Return x without its components along a basis, as a unit vector, and the length before scaling.  Local."""
    B = np.array(basis)
    for _ in range(2 if basis else 0):  # orthogonalise twice, which is enough (Parlett 1998, 6.9)
        x = x - B.T @ (B.conj() @ x)
    length = float(np.linalg.norm(x))
    return x / (length or 1), length


def _largest(alphas: list[float], betas: list[float]) -> tuple[float, float]:
    """Return the largest singular value of the bidiagonal matrix, and a bound of its error.  Local.

    alphas, betas : the diagonal, and the elements above it; the last beta belongs to the next column.
    The error is the distance to the nearest singular value of the linear map.
    """
    if not np.isfinite([*alphas, *betas]).all():  # LAPACK may not return for NaN or infinity
        return np.inf, 0.0
    left, s, _ = np.linalg.svd(np.diag(alphas) + np.diag(betas[:-1], 1))
    residual = betas[-1] * abs(left[-1, 0])  # |A^H u - s v|
    gap = s[0] - s[1] if len(s) > 1 else 0
    return float(s[0]), float(min(residual, residual**2 / gap) if gap > 0 else residual)


@in_range(lambda number, a: number, A=ELEMENTS)
def cond(
    A: DistMatrix, p: Norm | None = None, *, assume_a: Literal["gen", "pos"] = "gen", tolerance: float | None = None
) -> float:
    """Return the condition number |A| |A^-1| in a norm, as numpy.linalg.cond.  Collective over the grid.

    A : DistMatrix (n, n) of type s, d, c or z, and (m, n) for p = None, 2 or -2; A is not changed.
    p : None or 2: s_1 / s_k, with the largest and the smallest singular value.  If A is square, |A| and |A^-1| are
        computed by Lanczos steps, to the tolerance of `norm`; else from all values.
        -2: s_k / s_1, from all values.
        1 or numpy.inf: |A^-1| is the estimate of Higham and Tisseur, a lower bound that is rarely less than a third of
        |A^-1|.
        -1, -numpy.inf or "fro": from A^-1.
    assume_a : "pos": A is Hermitian and positive definite, and factored by `cholesky`; else by `lu_factor`.
    tolerance : as for `norm`.

    Returns inf where a pivot or A is zero or an element is infinite, and NaN where an element is NaN.
    Cost: that of `svdvals` if all singular values are computed.  Otherwise one factorisation, and solves: three with 4
    columns for the estimate, two with a vector for each Lanczos step, or one with n columns for A^-1.
    Raises LayoutError, DTypeError, ArgumentError or, with "pos", DeviceError on all ranks; LinAlgError where A is not
    positive definite with assume_a="pos", or 1000 steps do not suffice.
    Higham, Accuracy and Stability of Numerical Algorithms, 2002, algorithm 15.1; Higham & Tisseur, SIAM J. Matrix Anal.
    Appl. 21(4), 2000.
    """
    with together(communicator(A=A)) as arguments:
        p = _plain(p)
        check_operand("A", A, square=p not in (None, 2, -2))
        if p not in (None, 1, 2, -1, -2, np.inf, -np.inf, "fro"):
            raise ArgumentError(f'p must be None, 1, -1, 2, -2, numpy.inf, -numpy.inf or "fro" in cond, got {shown(p)}')
        as_name(assume_a, "assume_a", ("gen", "pos"))
        tolerance = _tolerance(A, tolerance)
        arguments += ["cond", A.distribution, A.dtype, shown(p), assume_a, tolerance]
    if 0 in A.shape:
        return 0.0
    size = A.norm("max")
    if size == 0 or not np.isfinite(size):
        return float("nan" if np.isnan(size) else "inf")
    if p == -2 or A.shape[0] != A.shape[1]:
        s = singular_values(A).astype(float)
        return float(s[-1] / s[0]) if p == -2 else float(s[0] / s[-1]) if s[-1] > 0 else np.inf
    exponent = int(np.frexp(size)[1])  # |2^-e A| and |(2^-e A)^-1| overflow less easily than |A| and |A^-1|
    size = float(np.ldexp(norm(A, 2 if p is None else p, tolerance=tolerance), -exponent))
    by, factor = _inverse(A if assume_a == "pos" or is_reachable(A) else A.to_host(), assume_a, exponent)
    if not np.abs(factor.diagonal()).min() > 0:
        return float("inf")
    if p is None or p == 2:
        return size * largest_singular_value(A, lambda x: by(x, "N"), lambda x: by(x, "C"), tolerance)
    if p not in (1, np.inf):
        inverse = by(DistMatrix.eye(len(A), grid=factor.grid, dtype=A.dtype, device=factor.device), "N")
        value = size * inverse.norm(p)
        return value if value == value else np.inf  # elements of the inverse overflow
    other = {"N": "C", "C": "N"}
    return size * inverse_norm(Steps(), factor, by if p == 1 else lambda X, trans: by(X, other[trans]))


def _inverse(A: DistMatrix, kind: str, exponent: int) -> tuple[Callable[[Any, str], Any], DistMatrix]:
    """Return a function that multiplies by (2^-exponent A)^-1, and the factors of the equilibrated A.  Collective.

    The function takes a vector or a matrix, which it may overwrite, and "N" or "C".
    """
    scale, _ = EQUILIBRATED.exponent(A.grid.comm, A, {"kind": kind}, {})
    W = EQUILIBRATED.multiplied(A, -scale)
    L = cholesky(W, overwrite_a=True) if kind == "pos" else W
    factors = None if kind == "pos" else lu_factor(W, overwrite_a=True)

    def solved(X: Any, trans: Any) -> Any:
        first, last = scale if trans == "N" else scale.T
        X = times(X, Scale(exponent - first))
        return times(lu_solve(factors, X, trans=trans) if factors else cho_solve(L, X), Scale(-last))

    return solved, factors.LU if factors else L
