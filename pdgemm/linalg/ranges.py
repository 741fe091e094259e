"""Scaling of operands whose elements are near the limits of their type, in one place for all functions of matrices.

Below the smallest normal number a pivot has no reciprocal, and products lose digits; near the largest number sums
overflow.  `in_range` scales such operands by powers of two, calls the function, and scales its results back.  This
scaling is exact, unless a result itself overflows, or is below the smallest normal number.

For a badly scaled matrix, one power for all elements does not suffice: a small row is lost as soon as its
multiplier underflows, and elements of large rows are chosen as pivots.  An `Equilibrated` operand has a power for each
row and each column.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pdgemm.algorithms.panels.panel_run import working_copy
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.device import beside, of, to_host
from pdgemm.local.arrays.elementwise import evaluated
from pdgemm.matrix.argument_checks import communicator
from pdgemm.matrix.array_functions import part_of_broadcast, tril, triu
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.reductions import own_diagonal
from pdgemm.support.agreement import agree, together

F = TypeVar("F", bound=Callable[..., Any])
_NONE = -(1 << 20)  # the exponent of zero
_UNEVEN = 0.1  # a general matrix is badly scaled if the largest elements of two rows have a smaller ratio: see gesvx
_SETTLED = 1e-8  # conjugate gradients end when the squared residual has decreased by this factor
_PASSES = 16  # the most passes over a matrix to scale it; each pass halves the remaining exponents
_inside: ContextVar[bool] = ContextVar("pdgemm_inside", default=False)  # whether an outer function has scaled operands


class Scale(NamedTuple):
    """Exponents of powers of two that scale a matrix: the factor of element (i, j) is 2^(rows_i + cols_j).

    rows, cols : integers, or vectors of integers, the same on every rank.
    """

    rows: Any = 0
    cols: Any = 0

    def __bool__(self) -> bool:
        return bool(np.any(self.rows) or np.any(self.cols))

    def __neg__(self) -> Scale:
        return Scale(-self.rows, -self.cols)

    @property
    def T(self) -> Scale:
        """The exponents for the transposed matrix."""
        return Scale(self.cols, self.rows)


class Measured:
    """An operand that is a matrix or a vector: how it is measured and multiplied by a power of two.

    diagonal : only the diagonal is measured, and stands for all elements that the function reads.
    unless   : the name of an argument of the function; if that argument is true, the operand is not scaled.
    """

    def __init__(self, diagonal: bool = False, unless: str = "") -> None:
        self.diagonal, self.unless = diagonal, unless

    def array(self, x: Any) -> Any:
        """Return the matrix or the vector that is measured."""
        return x

    def limits(self, kind: np.finfo[Any], values: dict[str, Any]) -> tuple[int, int]:
        """Return the least and greatest exponent that the largest element may have.   values : all arguments."""
        return int(kind.minexp) + int(kind.nmant), int(kind.maxexp) - int(kind.nmant)

    def read(self, x: Any) -> Any:
        """Return the part of x, such as a triangle, that the function reads; by default all of x.  Collective."""
        return x

    def exponent(self, comm: Any, x: Any, values: dict[str, Any], known: dict[str, Any]) -> tuple[Any, bool]:
        """Return the even e for which 2^-e x is in range, and whether x is out of range.  Collective.

        The change is as small as possible, so that small elements of a large operand do not underflow.
        known : the exponents of the operands before this one.
        """
        exponent, (low, high) = _exponent(comm, self.read(x)), self.limits(np.finfo(x.dtype), values)
        return _power(exponent, high), exponent != _NONE and not low <= exponent <= high

    def multiplied(self, x: Any, exponent: Any) -> Any:
        """Return 2^exponent x, a copy.  Collective."""
        return times(working_copy(x, 0, True, False)[0] if isinstance(x, DistMatrix) else x, exponent)


class Equilibrated(Measured):
    """A square matrix whose rows and columns are scaled if it is badly scaled; its exponent is a Scale.

    The function's argument `kind` is the structure of the matrix, as `assume_a` of `solve`, and so says which elements
    are read.  Rows and columns of a definite matrix have the same powers, which are computed from its diagonal.

    A general matrix is badly scaled if the largest elements of two rows, or columns, have a ratio below 1/10, as in
    LAPACK's gesvx, because scaling decides which elements are pivots.  With other kinds the limit is eps, or for
    "diagonal" about the square root of the smallest normal number.  Below this limit the condition number of A may
    exceed 1/eps although that of the scaled matrix is small.
    Cost: a reduction of all rows and one of all columns, or a gather of the diagonal.  For a badly scaled matrix, as
    many reductions in each of up to 16 passes over the exponents of the elements.
    Ruiz, A scaling algorithm to equilibrate both rows and columns norms in matrices, RAL-TR-2001-034, 2001.
    """

    def exponent(self, comm: Any, x: Any, values: dict[str, Any], known: dict[str, Any]) -> tuple[Any, bool]:
        kind, (low, high) = values.get("kind", "gen"), self.limits(np.finfo(x.dtype), values)
        by_diagonal = kind in ("pos", "diagonal")
        with np.errstate(all="ignore"):
            if by_diagonal:
                sizes = [size_of(x.diagonal())]
            else:
                if kind != "gen":
                    x = tril(x) if kind == "lower triangular" else triu(x)
                sizes = [x.vector_norm(np.inf, axis=axis) for axis in (1, 0)]
            ratio = _UNEVEN if kind == "gen" else 2.0 ** -(high // 2) if kind == "diagonal" else dtypes.eps(x.dtype)
            if not any(_lie_far_apart(y[y > 0], ratio, low, high) for y in sizes):
                return Scale(), False
            if by_diagonal:
                powers = _rounded(np.log2(sizes[0]) / 2)
                return Scale(powers, powers), True
            return _equilibrated(x), True


class RightSide(Measured):
    """The right-hand side of a system.  The operand before it is the system's matrix, which is `Equilibrated`.

    Each row is scaled by the power of its equation: that of a row of the matrix or, if the function's argument
    `transposed` is true, of a column.  Each column has a power of its own.   Cost: a reduction of all columns.
    """

    def exponent(self, comm: Any, x: Any, values: dict[str, Any], known: dict[str, Any]) -> tuple[Any, bool]:
        (matrix,), (low, high) = known.values(), self.limits(np.finfo(x.dtype), values)
        rows = matrix.cols if values.get("transposed") else matrix.rows
        with np.errstate(all="ignore"):
            logs = np.log2(size_of(x))
            if matrix:
                powers = rows.astype(logs.dtype)
                logs -= powers[:, None] if logs.ndim == 2 else powers
            largest = _rounded(logs.max(axis=0) if x.size else np.zeros(x.shape[1:])) + 1
        cols = np.where(largest < 0, largest, np.maximum(0, largest - high))
        return Scale(rows, cols), bool(matrix or np.any((largest < low) | (largest > high)))


def in_range(back: Callable[..., Any], **operands: Measured) -> Callable[[F], F]:
    """Return a decorator: the function gets operands that are in range, and `back` scales its results.

    operands : the operands by the function's parameter names.
    back : takes the result and, for each operand, the even number e, or the Scale, for which the function got 2^-e
        times the operand; returns the result for the operands without scaling.

    A decorated function that is called by another one does not scale, because its operands are in range, unless it has
    an equilibrated operand.  A function with an equilibrated operand must compare its other arguments among the ranks
    before the call.
    Cost: one pass over the elements, or the diagonal, of each operand, and one allreduce of 4 words, in which the ranks
    agree whether an operand is out of range; and the cost of `Equilibrated`.
    """
    always = any(isinstance(x, Equilibrated) for x in operands.values())

    def decorated(function: F) -> F:
        parameters = signature(function)
        names = tuple(parameters.parameters)

        @wraps(function)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            values = dict(zip(names, arguments)) | options
            known = {name: x.array(values[name]) for name, x in operands.items() if name in values}
            if (_inside.get() and not always) or not any(isinstance(x, DistMatrix) for x in known.values()):
                return function(*arguments, **options)
            comm = communicator(**known)
            with (agreed := together(comm)) as described:
                described.append(function.__name__)
                measured = {
                    name: x for name, x in known.items() if _is_measured(x) and not values.get(operands[name].unless)
                }
                agreed.flag = always or any(not _fits(operands[name], x, values) for name, x in measured.items())
            exponents = dict.fromkeys(operands, 0)
            if agreed.flag:
                exponents |= _exponents(comm, operands, measured, values)
            scaled = {name: operands[name].multiplied(values[name], -e) for name, e in exponents.items() if e}
            outer = _inside.set(True)
            try:
                if not scaled:
                    return function(*arguments, **options)
                result = function(**parameters.bind(*arguments, **options).arguments | scaled)
            finally:
                _inside.reset(outer)
            return back(result, *exponents.values())

        named: Any = wrapper
        named.__code__ = named.__code__.replace(co_qualname=function.__qualname__)  # shown by the watchdog
        return named

    return decorated


class RangeOfPanels:
    """The range of a matrix that is read panel by panel: 2^-exponent brings the largest panel so far in range."""

    def __init__(self, dtype: np.dtype) -> None:
        self.exponent, self._largest, self._limits = 0, _NONE, ELEMENTS.limits(np.finfo(dtype), {})

    def bring(self, X: DistMatrix, kept: list[DistMatrix]) -> tuple[float, int]:
        """Multiply the next panel, X, by 2^-exponent; return its norm, and the change of the exponent.  Collective.

        kept : matrices that were computed from earlier panels; they are multiplied by 2^-change.
        A panel in range costs only its norm, and is not multiplied.
        """
        (low, high), norm, before = self._limits, X.norm(), self.exponent
        exponent = int(np.frexp(norm)[1]) if norm else _NONE
        if before == 0 and norm < np.inf and exponent <= high and (low <= max(exponent, self._largest) or not norm):
            self._largest = max(self._largest, exponent)
            return norm, 0
        self._largest = max(self._largest, _exponent(X.grid.comm, X))
        self.exponent = 0 if low <= self._largest <= high else _power(self._largest, high)
        for x in kept if self.exponent != before else ():
            times(x, before - self.exponent)
        return times(X, -self.exponent).norm(), self.exponent - before


def times(x: Any, exponent: Any) -> Any:
    """Return 2^exponent x: a matrix is overwritten, an array or a number is not.  Collective for a matrix.

    exponent : an integer, or a Scale; its `rows` belong to the rows of x.
    Multiplies in steps, because one power may be out of range; only the last step rounds, if |x| is near 1.
    """
    rows, cols = scale = exponent if isinstance(exponent, Scale) else Scale(exponent)
    most = sum(int(np.abs(e).max(initial=0)) for e in scale)
    steps = max(2, -(-most // dtypes.largest_power(x.dtype)))

    def scaled(x: Any, rows: Any, cols: Any) -> Any:
        total = rows + cols
        for step in range(steps):
            x = x * np.ldexp(x.real.dtype.type(1), total * (step + 1) // steps - total * step // steps)
        return x

    with np.errstate(all="ignore"):
        if not isinstance(x, DistMatrix):
            return scaled(x, rows, cols)
        device = of(x.stored)
        with together(x.grid.comm, device is not None):  # a device may lack memory on one rank
            powers = (part_of_broadcast(e, *x.indices()) for e in (np.atleast_2d(rows).T, np.atleast_2d(cols)))
            evaluated(scaled, [x.stored, *(beside(e, x.stored) for e in powers)], x.stored)
    return x


def times_upper(W: DistMatrix, exponent: int) -> DistMatrix:
    """Multiply the upper triangle of W, with its diagonal, by 2^exponent, and return W.  Collective."""
    W[:, :] = tril(W, -1) + times(triu(W), exponent)
    return W


def _is_measured(x: Any) -> bool:
    return isinstance(x, (DistMatrix, np.ndarray)) and x.dtype in dtypes.BLAS


def _fits(operand: Measured, x: Any, values: dict[str, Any]) -> bool:
    """Is the largest of this rank's elements in range, or zero, infinite or NaN?  Local.

    If only the diagonal counts, but the matrix is on a device, all elements are measured instead, so that the diagonal
    is not copied to the host.  If one of these elements is infinite or NaN, the answer is no, and `exponent` then
    measures the finite elements that the function reads.
    """
    part = x.stored if isinstance(x, DistMatrix) else x
    on_diagonal = isinstance(x, DistMatrix) and operand.diagonal
    if on_diagonal and not of(part):
        part = own_diagonal(x, 0)
    most = _largest(part)
    if on_diagonal and of(part) and not np.isfinite(most):
        return False
    low, high = operand.limits(np.finfo(x.dtype), values)
    return not 0 < most < np.inf or low <= np.frexp(most)[1] <= high


def _exponents(comm: Any, operands: dict[str, Measured], measured: dict[str, Any], values: Any) -> dict[str, Any]:
    """Return exponents of powers of two that bring operands into range; {} if all are in range.  Collective."""
    exponents, outside = dict[str, Any](), False
    for name, x in measured.items():
        exponents[name], is_outside = operands[name].exponent(comm, x, values, exponents)
        outside |= is_outside
    return exponents if outside else {}


def _equilibrated(x: DistMatrix) -> Scale:
    """Return the exponents that scale the largest element of each row and column to about 1.  Collective.

    Nothing is scaled if an element would fall below the smallest normal number.  Such an element, for example on the
    diagonal of a triangular matrix, may matter where larger elements of its row cancel.
    """
    logs = np.log2(size_of(x))
    if not logs.max() < np.inf:
        return Scale()  # an element is infinite or NaN
    powers = _nearest(logs)
    logs -= powers[0][:, None]
    logs -= powers[1]
    for _ in range(_PASSES):
        left = [np.where(e == -np.inf, 0, e) for e in (logs.max(axis=1), logs.max(axis=0))]  # a row may be zero
        if max(np.abs(e).max() for e in left) <= 1 / 2:
            break
        powers = [e + more / 2 for e, more in zip(powers, left)]
        logs -= left[0][:, None] / 2
        logs -= left[1] / 2
    if np.where(logs > -np.inf, logs, 0).min() < np.finfo(x.dtype).minexp + 2:
        return Scale()
    return Scale(*map(_rounded, powers))


def _nearest(logs: DistMatrix) -> list[np.ndarray]:
    """Return the vectors r and c for which r_i + c_j is nearest, in least squares, to the finite `logs`.  Collective.

    So if the rows and columns of a matrix with few nonzero elements have been scaled, 2^-r and 2^-c undo the scaling.
    By conjugate gradients:
    Curtis & Reid, On the automatic scaling of matrices for Gaussian elimination, J. Inst. Maths Applics 10, 1972.
    """
    m, finite = len(logs), logs > -np.inf
    pattern = np.where(finite, *np.array([1, 0], logs.dtype))

    def both(rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        return np.concatenate([rows, cols]).astype(float)

    known = np.where(finite, logs, 0)
    residual, degrees = (both(y.sum(axis=1), y.sum(axis=0)) for y in (known, pattern))
    inverse, x = 1 / np.maximum(degrees, 1), np.zeros(len(degrees))
    step, size = inverse * residual, residual @ (inverse * residual)
    least = _SETTLED * size
    # ranks may round differently, so all ranks make all steps; after convergence a step changes nothing
    for _ in range(_PASSES):
        image = degrees * step + both(pattern.matvec(step[m:]), pattern.T.matvec(step[:m]))
        alpha = size / (step @ image) if size > least else 0.0
        x, residual, before = x + alpha * step, residual - alpha * image, size
        size = residual @ (inverse * residual)
        step = inverse * residual + (size / before * step if alpha else 0)
    x = logs.grid.comm.bcast(x, root=0).astype(logs.dtype)
    return [x[:m], x[m:]]


def _lie_far_apart(sizes: np.ndarray, ratio: float, low: int, high: int) -> bool:
    """Is the ratio of two of `sizes` less than `ratio`, or the exponent of one less than `low` or above `high`?"""
    if not sizes.size:
        return False
    least, most = sizes.min(), sizes.max()
    return not (low <= np.frexp(least)[1] and np.frexp(most)[1] <= high and least >= ratio * most)


def _rounded(logs: Any) -> Any:
    """Return the integers nearest to logarithms; 0 for a logarithm that is infinite or NaN."""
    return np.where(np.isfinite(logs), np.rint(logs), 0).astype(int)


def size_of(x: Any) -> Any:
    """Return |x|; for a complex x max(|re x|, |im x|), which does not overflow."""
    return np.maximum(np.abs(x.real), np.abs(x.imag)) if x.dtype.kind == "c" else np.abs(x)


def _exponent(comm: Any, x: Any) -> int:
    """Return the exponent of the largest finite element of a matrix or a vector; _NONE for zero.  Collective."""
    part = x.stored if isinstance(x, DistMatrix) else x
    most = _largest(part, finite=True)
    return agree(comm, flag=int(np.frexp(most)[1]) if most else _NONE)


def _power(exponent: int, high: int) -> int:
    """Return the even e for which 2^-e brings elements up to 2^exponent in range, with the least change."""
    e = 0 if exponent == _NONE else exponent if exponent < 0 else max(0, exponent - high)
    return e + e % 2


def _largest(x: Any, finite: bool = False) -> float:
    """Return the largest |real or imaginary part|; 0 without elements, NaN if an element is NaN.  Local.

    finite : consider only finite elements.
    """
    parts = [x.real, x.imag] if x.dtype.kind == "c" else [x]
    parts = [np.where(np.isfinite(y), y, 0) for y in parts] if finite else parts
    ends = [float(to_host(end(y))) for y in parts if y.size for end in (np.max, np.min)]
    return float(np.max(np.abs(ends), initial=0))


ELEMENTS, DIAGONAL, EQUILIBRATED = Measured(), Measured(diagonal=True), Equilibrated()
