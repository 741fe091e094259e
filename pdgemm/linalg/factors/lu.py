"""The LU factorisation with partial pivoting, solves with the factors, and determinants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np

from pdgemm.algorithms.panels.lu_panels import LUPanels
from pdgemm.algorithms.panels.panel_run import can_read, device_of, run_panels, working_copy
from pdgemm.errors import ArgumentError, DTypeError, LinAlgError
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.condition import reciprocal_condition, regular
from pdgemm.linalg.factors.operands import (
    check_operand,
    check_right_side,
    common_dtype,
    has_one_rank,
    identity_like,
    operand_description,
    solution,
    solved_on_one_rank,
    to_factor,
)
from pdgemm.linalg.factors.triangular import solve_triangular
from pdgemm.linalg.ranges import ELEMENTS, EQUILIBRATED, Measured, in_range, size_of, times, times_upper
from pdgemm.local.arrays.arguments import op_letter, shown
from pdgemm.local.blas import local_lapack
from pdgemm.matrix.argument_checks import check_result, communicator, shape_of
from pdgemm.matrix.array_functions import tril, triu
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import Transpose
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.factor_schedules import LUSchedule
from pdgemm.schedules.panels.row_moves import PermutationSchedule, permutation
from pdgemm.support.agreement import together, warn_together
from pdgemm.transport.panels.row_exchange import exchange_rows

# block size of working copies; width of the widest panel: one rank factors a panel, more slowly than a product runs
BLOCK, PANEL = 128, 256


@dataclass(frozen=True, eq=False)
class LU:
    """The factors and the pivots of P A = L U, as `lu_factor` returns them.

    LU     : DistMatrix (m, n): U and, below the diagonal, L, whose diagonal of ones is not stored.
    pivots : row t was exchanged with row pivots[t], for t = 0, 1, ..., min(m, n) - 1 in turn; the same on all ranks.
    zero_pivot : 0, or the number, counted from 1, of the first element on U's diagonal that is zero: LAPACK's info.
    """

    LU: DistMatrix
    pivots: np.ndarray
    zero_pivot: int

    def __iter__(self) -> Iterator[Any]:
        """Yield the factors and the pivots, as SciPy's pair: `lu, piv = lu_factor(A)`."""
        return iter((self.LU, self.pivots))

    @cached_property
    def perm(self) -> np.ndarray:
        """The row numbers of A in the order of the factors: A[perm] = L U."""
        return permutation(self.pivots, self.LU.shape[0])

    @property
    def report(self) -> Any:
        """The words, messages and seconds of the factorisation."""
        return self.LU.report


class SlogDet(NamedTuple):
    """The determinant, which is sign * exp(logabsdet)."""

    sign: Any
    logabsdet: Any


def _unscaled(factors: LU, exponent: int) -> LU:
    """Return the LU factors of 2^exponent A, given those of A; pivots that underflow become zero.  Collective."""
    W = times_upper(factors.LU, exponent)
    return LU(W, factors.pivots, _first_zero(W.diagonal()))


def lu_factor(A: DistMatrix, *, overwrite_a: bool = False) -> LU:
    """Return L and U, where P A = L U, with the pivots that LAPACK chooses.  Collective over the grid of A.

    A : DistMatrix (m, n) of any layout; float32, float64, complex64 or complex128.
    overwrite_a : the factors may be stored in A, which saves a copy where A is row-major (on one rank: column-major)
        and its layout shares the work evenly.

    The factors are row-major, in the layout of A, or in square blocks where this layout does not share the work evenly;
    `report` has the words, which depend on the pivots.  On one rank they are column-major, by LAPACK's getrf; up to
    order 512, on the host, A is moved to one rank, and the factors stay there; up to 2048 where all ranks are on one
    node, whose cores LAPACK uses.  A singular A has factors, too: then `zero_pivot` is not 0, and `lu_solve` raises
    LinAlgError.
    Rows and columns are not scaled, unlike in `solve`, `inv`, `det` and `cond`: where they are badly scaled and
    multipliers underflow, L cannot hold the multipliers, and small rows are lost.
    On a device, everything runs there, panels by cuSOLVER; only pivots are copied to the host.  DeviceError where
    cuSOLVER is missing, or where MPI takes no device pointers and ranks cannot read in place.

    Cost per rank on Pr x Pc = P: 2n^3/(3P) flops for m = n; n^2/2 (1/Pr + 1/Pc) words in for L and U.  On all ranks
    together at most n^2 words for panels (one rank factors a panel), and 3 n^2/2 for rows that pivoting exchanges.
    Raises LayoutError, DTypeError, DeviceError, ArgumentError or GridError on all ranks.
    Error: |P A - L U| <= gamma_n |L||U| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 9.3).
    """
    return factors_of(A, overwrite_a)


@in_range(_unscaled, A=ELEMENTS)
def factors_of(A: DistMatrix, overwrite_a: bool, small: Literal["rank", "node"] = "node") -> LU:
    """Return the factors of `lu_factor`; with "rank", matrices above order SMALL stay on all ranks.  Collective."""
    start = perf_counter()
    # row-major, except on one rank: the rows that pivots move are contiguous
    W, moves = to_factor("lu_factor", A, BLOCK, overwrite_a, order="C", small=small)
    layout = W.layout_in(W.grid)
    idle = tuple(sorted({*range(W.grid.size)} - {*layout.rank_map}))
    schedule = LUSchedule(layout, PANEL, can_read(W), idle=idle, device=device_of(W))
    pivots = np.array(schedule.exchanged, np.int64) if W.grid.draft else np.zeros(min(A.shape), np.int64)
    what = f"LU factors of a matrix ({shape_of(A)})"
    zero, report = run_panels(
        schedule, partial(LUPanels, exchanged=pivots), {"A": W}, what, moves, start,
        lambda plan: replace(plan, pivots=tuple(pivots.tolist())),
    )  # fmt: skip
    W.report = report
    return LU(W, pivots, zero)


class _Factors(Measured):
    """An operand that is LU factors: the diagonal of U is measured, and U is multiplied by a power of two."""

    def array(self, x: Any) -> Any:
        return x.LU if isinstance(x, LU) else x[0] if isinstance(x, tuple) and x else x

    def read(self, x: Any) -> Any:
        return triu(x)

    def multiplied(self, x: Any, exponent: int) -> Any:
        W = times_upper(self.array(x).copy(), exponent)
        return replace(x, LU=W) if isinstance(x, LU) else (W, *x[1:])


@in_range(lambda X, a, b: times(X, b - a), factors=_Factors(diagonal=True), B=ELEMENTS)
def lu_solve(
    factors: LU | tuple[DistMatrix, np.ndarray], B: Any, *, trans: Transpose = "N", overwrite_b: bool = False
) -> Any:
    """Return X, where op(A) X = B, given the LU factors of A.  Collective over the grid of the factors.

    factors : the factors of a square A, as `lu_factor` returns them, or SciPy's pair of factors and pivots.
    B     : DistMatrix (n, m) of any layout, or an array or list, the same on every rank; X of a vector is an array.
    trans : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H.
    overwrite_b : X may be stored in B.

    X has the layout of B.  Cost per rank on P ranks: 2 n^2 m/P flops, in two triangular solves, and at most n m/P words
    for the exchange of rows.
    Raises LinAlgError on all ranks where a pivot is zero; LayoutError, DTypeError, DeviceError, ArgumentError or
    GridError.
    Error: (A + E) x = b with |E| <= gamma_3n P^T |L||U|, for each column (Higham 2002, theorem 9.4).
    """
    if isinstance(factors, tuple) and len(factors) == 2 and isinstance(factors[0], DistMatrix):
        factors = _of_pair(*factors)
    known = isinstance(factors, LU)
    wrong = DTypeError(f"factors must be an LU, as lu_factor returns it, got {type(factors).__name__}")
    if not known and not isinstance(B, DistMatrix):  # there is no communicator over which ranks could agree
        raise wrong
    with together(communicator(factors=factors.LU if known else None, B=B)) as arguments:
        if not known:
            raise wrong
        check_operand("factors.LU", factors.LU, square=True, panels=True)
        letter = op_letter(trans, "trans")
        check_right_side(factors.LU, B)
        check_regular(factors)
        if overwrite_b and isinstance(B, DistMatrix):
            check_result("B", B, {"factors.LU": factors.LU})
        arguments += ["lu_solve", letter, bool(overwrite_b), *operand_description(factors.LU, factors.pivots, B)]
    if has_one_rank(factors.LU) and factors.LU.order == "F":
        by_lapack = partial(local_lapack.solve_factored, pivots=factors.pivots, trans=letter)
        return solved_on_one_rank(factors.LU, B, overwrite_b, by_lapack)
    both = {"lower": True, "unit_diagonal": True, "trans": letter}, {"lower": False, "trans": letter}
    steps, X = Steps(what=solution(factors.LU, B)), own_copy(B, factors.LU, overwrite_b)
    if letter == "N":
        X = steps.did(permuted(X, factors.perm))
    for triangle in both if letter == "N" else both[::-1]:
        X = steps.did(solve_triangular(factors.LU, X, **triangle, overwrite_b=True))  # type: ignore[arg-type]
    if letter != "N":
        X = steps.did(permuted(X, np.argsort(factors.perm)))
    return steps.reported(X)


def _of_pair(factors: DistMatrix, pivots: Any) -> LU:
    """Return SciPy's pair of factors and pivots as an `LU`.  Collective over the grid of the factors."""
    with together(factors.grid.comm) as arguments:
        numbers, (m, n) = np.asarray(pivots), factors.shape
        if numbers.shape != (min(m, n),) or numbers.dtype.kind not in "iu" or ((numbers < 0) | (numbers >= m)).any():
            raise ArgumentError(f"pivots must be {min(m, n)} row numbers below {m}, got {shown(pivots)}")
        arguments += ["the pair of LU factors", *operand_description(factors, numbers)]
    return LU(factors, numbers.astype(np.int64), _first_zero(factors.diagonal()))


def _first_zero(diagonal: np.ndarray) -> int:
    """Return the number, counted from 1, of the first zero on a diagonal; 0 if no element is zero."""
    zeros = np.flatnonzero(diagonal == 0)
    return int(zeros[0]) + 1 if zeros.size else 0


@in_range(lambda factors, a: (*factors[:2], times(factors[2], a)), A=ELEMENTS)
def lu(A: DistMatrix) -> tuple[np.ndarray, DistMatrix, DistMatrix]:
    """Return (p, L, U), where A = L[p] U, as scipy.linalg.lu with p_indices=True.  Collective over the grid of A.

    A : DistMatrix (m, n).

    Returns p (m,), the same on all ranks; L (m, k), with ones on its diagonal; and U (k, n), where k = min(m, n).
    Cost, errors and types are those of `lu_factor`; L and U have the layout of its factors.
    """
    factors = lu_factor(A)
    k = min(A.shape)
    L, U = tril(factors.LU[:, :k], -1), triu(factors.LU[:k])
    identity_like(L).redistribute(L, beta=1)
    L.report = U.report = factors.report
    return np.argsort(factors.perm), L, U


def slogdet(A: DistMatrix) -> SlogDet:
    """Return the sign (complex: the phase) of the determinant, and the logarithm of its absolute value.  Collective.

    A : DistMatrix (n, n); the result is the same on all ranks, (0, -inf) where a pivot is zero.
    Cost, exceptions, warnings and error are those of `det`.
    """
    mantissa, exponent = _determinant(A)
    with np.errstate(all="ignore"):
        size = np.abs(mantissa)
        sign, logarithm = mantissa / size if size != 0 else mantissa, np.log(size) + exponent * np.log(2)
    return SlogDet(A.dtype.type(sign), A.dtype.type(logarithm).real)


def det(A: DistMatrix) -> Any:
    """Return the determinant, the same on all ranks; 0 where a pivot is zero.  Collective over the grid of A.

    A : DistMatrix (n, n).  Exceptions are those of `lu_factor`.
    Badly scaled rows and columns are scaled by powers of two before A is factored: see `solve`.  No intermediate
    result overflows or underflows; a determinant that is out of range is infinite or 0, and `slogdet` has its
    logarithm.  All ranks warn with scipy.linalg.LinAlgWarning where possibly all digits are wrong: the reciprocal
    condition number of the scaled matrix is less than eps, or a pivot is zero and products of elements may have
    underflowed.
    Cost: that of `lu_factor`; a search for the largest element of each row and of each column; and, for the condition
    number, three solves with 4 columns, 24 n^2/P flops.
    Error: the result is within n eps of det(A + E), relatively, where |E| <= gamma_n |L||U| for the factors of the
    scaled matrix (Higham, Accuracy and Stability of Numerical Algorithms, 2002, lemma 3.1 and theorem 9.3).
    """
    mantissa, exponent = _determinant(A)
    with np.errstate(all="ignore"):
        return A.dtype.type(times(mantissa, exponent))


def permuted(X: Any, order: np.ndarray) -> Any:
    """Return X[order]; a DistMatrix X is overwritten.  Collective over its grid."""
    if not isinstance(X, DistMatrix):
        return X[order]
    what = f"Permutation of the rows of a matrix ({shape_of(X)})"
    layout, device = X.layout_in(X.grid), device_of(X)
    schedule = PermutationSchedule(layout, 0, RING.name, order=tuple(order.tolist()), device=device)
    _, X.report = run_panels(schedule, lambda task: partial(exchange_rows, task, schedule.moves), {"A": X}, what)
    return X


def regular_factors(steps: Steps, A: DistMatrix, overwrite_a: bool, small: Literal["rank", "node"] = "node") -> LU:
    """Return the LU factors of A.  Raises LinAlgError on all ranks where A is singular.  Collective.

    steps : records the report of the factorisation.   overwrite_a, small : as for `factors_of`.
    """
    factors = factors_of(A, overwrite_a, small)
    steps.did(factors.LU)
    with together(A.grid.comm):
        check_regular(factors)
    return factors


def check_regular(factors: LU) -> None:
    """Raise LinAlgError where a pivot is zero.  Local."""
    if factors.zero_pivot:
        A, at = factors.LU, factors.zero_pivot
        raise LinAlgError(f"A ({shape_of(A)} on a {A.grid} grid) is singular: pivot {at} of {len(A)} is zero")


def own_copy(B: Any, A: DistMatrix, overwrite: bool) -> Any:
    """Return a copy of B, in the common type of A and B, that may be overwritten.  Collective if B is a DistMatrix.

    overwrite : the result may be B itself.
    """
    dtype = common_dtype(A, B)
    if not isinstance(B, DistMatrix):
        return B.astype(dtype)
    return working_copy(B, BLOCK, True, overwrite, dtype=dtype)[0]


def _determinant(A: DistMatrix) -> tuple[Any, int]:
    """Return a number x and an exponent: det A = x 2^exponent, and x is near 1, or 0, infinity or NaN.  Collective."""
    with together(communicator(A=A)) as arguments:
        check_operand("A", A, square=True, panels=True)
        arguments += ["a determinant", A.distribution, A.dtype]
    mantissas, exponents = _eliminated(A)
    exponent = int(exponents.sum())
    with np.errstate(all="ignore"):
        while len(mantissas) > 1:  # in pairs, whose products can be neither too large nor too small
            even = np.append(mantissas, np.ones(len(mantissas) % 2, mantissas.dtype))
            mantissas, more = _split(even[::2] * even[1::2])
            exponent += int(more.sum())
    return mantissas[0], exponent


@in_range(lambda split, a: (split[0], np.append(split[1], np.sum(a.rows) + np.sum(a.cols))), A=EQUILIBRATED)
def _eliminated(A: DistMatrix) -> tuple[np.ndarray, np.ndarray]:
    """Return mantissas and exponents of the factors of det A: U's diagonal and P's sign in P A = L U.  Collective.

    Warns on all ranks if possibly all digits of the product are wrong.
    """
    norm, factors = A.norm(1), lu_factor(A)
    sign = 1 - 2 * (np.count_nonzero(factors.pivots != np.arange(A.shape[0])) % 2)
    diagonal = factors.LU.diagonal()
    if factors.zero_pivot:
        least = min(_least(A), _least(triu(factors.LU)))
        multiplier = min(_least(tril(factors.LU, -1)), least / (A.norm("max") or 1))
        if multiplier * least < np.finfo(A.dtype).smallest_normal:
            warn_together(
                A.grid.comm,
                f"pivot {factors.zero_pivot} of A ({shape_of(A)} on a {A.grid} grid) is zero, but elements of A are so "
                "small compared with others that their products underflow: the determinant, given as 0, may not be 0",
            )
        return np.zeros(1), np.zeros(1, int)
    if np.isfinite(diagonal).all():
        regular(A, rcond_by_lu(Steps(), factors, norm))
    return _split(np.append(diagonal, A.dtype.type(sign)).astype(np.result_type(A.dtype, float)))


def _least(X: DistMatrix) -> float:
    """Return the least |x| of the elements that are not zero; at most 1.  Collective."""
    sizes = np.abs(X)
    return float(np.where(sizes > 0, sizes, 1).min())


def rcond_by_lu(steps: Steps, factors: LU, norm: float) -> float:
    """Return an estimate of 1 / (|A|_1 |A^-1|_1) by solves with the factors of A.  Collective.   norm : |A|_1."""
    by: Any = partial(lu_solve, factors, overwrite_b=True)
    solve = lambda X, op: by(X, trans=op)  # noqa: E731
    return reciprocal_condition(steps, factors.LU, norm, solve, local_lapack.reciprocal_condition_of)


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return y and integers e, where x = y 2^e, and the larger one of |re y| and |im y| is between 1/2 and 1."""
    exponents = np.frexp(size_of(x))[1]
    return times(x, -exponents), exponents
