"""Functions of matrices whose elements lie near the ends of the range of their type: all are scaled in one place.

Below the smallest normal number a pivot has no reciprocal, and products lose digits; near the largest number sums
overflow.  `in_range` scales such operands by powers of two, calls the function, and scales its results back.  Both are
exact, unless a result itself overflows, or is below the smallest normal number.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import numpy as np

from pdgemm.algorithms.panels.panel_run import working_copy
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.device import of, to_host
from pdgemm.matrix.argument_checks import communicator
from pdgemm.matrix.array_functions import tril, triu
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.reductions import own_diagonal
from pdgemm.support.agreement import agree, together

F = TypeVar("F", bound=Callable[..., Any])
_NONE = -(1 << 20)  # the exponent of zero
_inside: ContextVar[bool] = ContextVar("pdgemm_inside", default=False)  # an outer function has operands in range


class Measured:
    """An operand that is a matrix or a vector: how it is measured and multiplied by a power of two.

    diagonal : takes the arguments of the function; True where the diagonal stands for all elements that it reads.
    skipped  : takes the arguments; True where the operand is not scaled.
    """

    def __init__(
        self,
        diagonal: Callable[[dict[str, Any]], bool] = lambda _: False,
        skipped: Callable[[dict[str, Any]], bool] = lambda _: False,
    ) -> None:
        self.diagonal, self.skipped = diagonal, skipped

    def array(self, x: Any) -> Any:
        """Return the matrix or the vector that is measured."""
        return x

    def limits(self, kind: np.finfo[Any], values: dict[str, Any]) -> tuple[int, int]:
        """Return the exponents between which the largest element is in range.   values : the function's arguments."""
        return int(kind.minexp) + int(kind.nmant), int(kind.maxexp) - int(kind.nmant)

    def read(self, x: Any) -> Any:
        """Return the elements of a measured matrix or vector that the function reads, or more.  Collective."""
        return x

    def multiplied(self, x: Any, exponent: int) -> Any:
        """Return 2^exponent x, a copy.  Collective."""
        return times(working_copy(x, 0, True, False)[0] if isinstance(x, DistMatrix) else x, exponent)


def in_range(back: Callable[..., Any], **operands: Measured) -> Callable[[F], F]:
    """Return a decorator of a function: it gets operands that are in range, and `back` scales its results.

    operands : by the names of the function's parameters.
    back : takes the result and, for each operand, the even number e for which the function got 2^-e times the operand;
        returns the result that belongs to the operands themselves.

    A function that such a function calls runs as it is, because its operands are in range.
    Cost: one pass over the elements, or the diagonal, of each operand, and one allreduce of 4 words, in which the ranks
    agree whether there is something to scale.
    """

    def decorated(function: F) -> F:
        parameters = signature(function)
        names = tuple(parameters.parameters)

        @wraps(function)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            values = dict(zip(names, arguments)) | options
            known = {name: x.array(values[name]) for name, x in operands.items() if name in values}
            if _inside.get() or not any(isinstance(x, DistMatrix) for x in known.values()):
                return function(*arguments, **options)
            comm = communicator(**known)
            with (agreed := together(comm)) as described:
                described.append(function.__name__)
                measured = {
                    name: x for name, x in known.items() if _is_measured(x) and not operands[name].skipped(values)
                }
                agreed.flag = any(not _fits(operands[name], x, values) for name, x in measured.items())
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
        named.__code__ = named.__code__.replace(co_qualname=function.__qualname__)  # which the watchdog shows
        return named

    return decorated


class RangeOfPanels:
    """The range of a matrix that is read panel by panel: 2^-exponent brings the largest panel so far in range."""

    def __init__(self, dtype: np.dtype) -> None:
        self.exponent, self._largest, self._limits = 0, _NONE, ELEMENTS.limits(np.finfo(dtype), {})

    def bring(self, X: DistMatrix, kept: list[DistMatrix]) -> tuple[float, int]:
        """Multiply the next panel by 2^-exponent; return its norm, and the change of the exponent.  Collective.

        kept : what was computed of earlier panels, and is multiplied by 2^-change.
        Panels in range cost the norm alone, and are not multiplied.
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


def times(x: Any, exponent: int) -> Any:
    """Return 2^exponent x: a matrix is overwritten, an array or a number is not.  Collective for a matrix.

    In two steps or more, because one power may be out of range; only the last one rounds, for |x| near 1.
    """
    steps = max(2, -(-abs(exponent) // dtypes.largest_power(x.dtype)))
    with np.errstate(all="ignore"):
        for step in range(steps):
            power = exponent * (step + 1) // steps - exponent * step // steps
            if isinstance(x, DistMatrix):
                x *= 2.0**power
            else:
                x = x * np.asarray(2.0**power, x.real.dtype)
    return x


def times_upper(W: DistMatrix, exponent: int) -> DistMatrix:
    """Multiply the upper triangle of W, with its diagonal, by 2^exponent, and return W.  Collective."""
    W[:, :] = tril(W, -1) + times(triu(W), exponent)
    return W


def _is_measured(x: Any) -> bool:
    return isinstance(x, (DistMatrix, np.ndarray)) and x.dtype in dtypes.BLAS


def _fits(operand: Measured, x: Any, values: dict[str, Any]) -> bool:
    """Is the largest of this rank's elements in range, or zero, infinite or NaN?  Local.

    On a device, where a diagonal would be copied to the host, all elements stand for it, unless one of them is NaN.
    """
    part = x.stored if isinstance(x, DistMatrix) else x
    on_diagonal = isinstance(x, DistMatrix) and operand.diagonal(values)
    if on_diagonal and not of(part):
        part = own_diagonal(x, 0)
    most = max((_largest(y) for y in _parts(part)), default=0.0)
    if on_diagonal and of(part) and not np.isfinite(most):
        return False
    low, high = operand.limits(np.finfo(x.dtype), values)
    return not 0 < most < np.inf or low <= np.frexp(most)[1] <= high


def _exponents(comm: Any, operands: dict[str, Measured], measured: dict[str, Any], values: Any) -> dict[str, int]:
    """Return even exponents of powers of two that bring operands into range; {} if all are in range.  Collective.

    Numbers grow as little as possible and shrink as little as possible: small elements of a large operand remain.
    """
    exponents, outside = dict[str, int](), False
    for name, x in measured.items():
        exponent = _exponent(comm, operands[name].read(x))
        low, high = operands[name].limits(np.finfo(x.dtype), values)
        outside |= exponent != _NONE and not low <= exponent <= high
        exponents[name] = _power(exponent, high)
    return exponents if outside else {}


def _exponent(comm: Any, x: Any) -> int:
    """Return the exponent of the largest finite element of a matrix or a vector; _NONE for zero.  Collective."""
    part = x.stored if isinstance(x, DistMatrix) else x
    most = max((_largest(np.where(np.isfinite(y), y, 0)) for y in _parts(part)), default=0.0)
    return agree(comm, flag=int(np.frexp(most)[1]) if most else _NONE)


def _power(exponent: int, high: int) -> int:
    """Return the even e for which 2^-e brings elements up to 2^exponent in range, with the least change."""
    e = 0 if exponent == _NONE else exponent if exponent < 0 else max(0, exponent - high)
    return e + e % 2


def _parts(x: Any) -> list[Any]:
    """Return the real and the imaginary parts of an array that has elements."""
    return ([x.real, x.imag] if x.dtype.kind == "c" else [x]) if x.size else []


def _largest(x: Any) -> float:
    """Return max |x| of real numbers, NaN where one is NaN.  Local."""
    return float(np.max(np.abs([float(to_host(np.max(x))), float(to_host(np.min(x)))])))


ELEMENTS, DIAGONAL = Measured(), Measured(diagonal=lambda _: True)
