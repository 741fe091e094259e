"""NumPyFunctions: NumPy's operators and functions of a DistMatrix, and what they say where they are not available.

A function that is not known here is refused, because NumPy would compute something of the local arrays, or of an object
that is no array, and that is a wrong number more often than an error.  Whether a function is refused depends on the
function, the types and the scalars alone, so all ranks refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any
from zlib import crc32

import numpy as np

import pdgemm
from pdgemm.arrays import device as devices
from pdgemm.arrays.device import to_host
from pdgemm.arrays.dtypes import element_type
from pdgemm.errors import ArgumentError, DeviceError, LayoutError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Order
from pdgemm.matrix.matrix_base import MatrixBase
from pdgemm.support.agreement import check_not_freed, together

WHOLE = "use .local, .to_global(root) or .allgather()"

# NumPy computes these from shape, dtype and elementwise functions alone
_ALLOWED = {f"numpy.{name}" for name in ("shape", "ndim", "size", "result_type", "can_cast", "common_type")}
_ALLOWED |= {f"numpy.{name}" for name in ("iscomplexobj", "isrealobj", "fix", "isneginf", "isposinf")}
_ALLOWED |= {f"numpy.{name}_indices_from" for name in ("diag", "tril", "triu")} | {"numpy.linalg.matmul"}

# methods that do what the functions do; the names of their parameters are NumPy's
_METHODS = {f"numpy.{name}": name for name in ("sum", "mean", "prod", "min", "max", "any", "all", "std", "var")}
_METHODS |= {f"numpy.{name}": name for name in ("argmin", "argmax", "trace", "diagonal")}
_METHODS |= {
    "numpy.amin": "min",
    "numpy.amax": "max",
    "numpy.linalg.trace": "trace",
    "numpy.linalg.diagonal": "diagonal",
}
_METHODS |= {"numpy.linalg.vector_norm": "vector_norm"}

_INSTEAD = {
    "numpy.array_equal": "A.allclose(B, rtol=0, atol=0)",
    "numpy.array_equiv": "A.allclose(B, rtol=0, atol=0)",
    "numpy.allclose": "A.allclose(B)",
    "numpy.isclose": "A.allclose(B)",
    "numpy.astype": "A.astype(dtype)",
    "numpy.copy": "A.copy()",
    "numpy.copyto": "A[...] = B",
    "numpy.transpose": "A.T",
    "numpy.matrix_transpose": "A.T",
    "numpy.linalg.matrix_transpose": "A.T",
    "numpy.permute_dims": "A.T",
    "numpy.dot": "A @ B",
    "numpy.linalg.multi_dot": "A @ B @ C",
    "numpy.linalg.matrix_norm": "A.norm(kind)",
    "numpy.empty_like": "DistMatrix.empty(A.shape, grid=A.grid)",
    "numpy.zeros_like": "DistMatrix.zeros(A.shape, grid=A.grid)",
    "numpy.save": "pdgemm.io.hdf5.save",
    "matvec": "A.matvec(x) or A @ x with a vector x",
    "vecmat": "x @ A with a vector x",
    "vecdot": "A.H @ B with matrices of one column",
}


class NumPyFunctions(MatrixBase, np.lib.mixins.NDArrayOperatorsMixin):
    """NumPy's protocols for DistMatrix: operators, ufuncs and other functions."""

    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]  # `==` is elementwise, as for arrays

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply an elementwise function to the local arrays, or numpy.matmul as a distributed product."""
        out = options.pop("out", (None,))[0]
        _check_ufunc(ufunc, method, options)
        matrices = [x for x in (*inputs, out) if isinstance(x, NumPyFunctions)]
        if not isinstance(out, NumPyFunctions | None):
            raise TypeError(f"{ufunc.__name__} of a DistMatrix: out is a {type(out).__name__}, and not a DistMatrix")
        if ufunc is np.matmul:
            return _product(inputs[0], inputs[1], out, options)
        for other in matrices:
            check_not_freed(other.grid.comm)
            if other.device != self.device:
                raise DeviceError(f"{ufunc.__name__} of matrices on {self.device} and {other.device}: use to_device")
        if out is not None and out.conjugated:
            raise ArgumentError("out is the conjugate of another matrix, and cannot be written to")
        operands = [_type(x) for x in inputs]
        by_value = _check_elements(ufunc, operands, None if out is None else out.dtype, options)
        like, reports = matrices[0], list[Any]()
        if any(isinstance(x, np.dtype) and not isinstance(y, NumPyFunctions) for x, y in zip(operands, inputs)) or any(
            not like.same_layout(x) for x in matrices
        ):
            parts, like, reports = _fitted(ufunc.__name__, inputs, out)
        else:
            parts = [x.local if isinstance(x, NumPyFunctions) else x for x in inputs]
        parts = [x[()] if isinstance(x, np.ndarray) and not x.ndim else x for x in parts]  # CuPy takes no 0-d arrays
        with together(self.grid.comm, by_value):  # else no rank fails alone, and nothing is sent
            if out is not None:
                ufunc(*parts, out=out.local, **options)
                made = out
            else:
                order: Order = "F" if all(x.order == "F" for x in matrices) else "C"
                if self.device == devices.HOST:
                    options["order"] = order
                else:  # CuPy's functions take no order
                    order = "C"
                made = type(self)(ufunc(*parts, **options), like.grid, like.distribution, order)
        if reports:
            made.report = reports[0] if len(reports) == 1 else tuple(reports)
        return made

    def __array_function__(
        self, function: Callable[..., Any], types: Any, arguments: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        """Call `numpy.FUNCTION` where it needs shape and dtype alone.  Otherwise raise TypeError."""
        name = f"{function.__module__}.{function.__name__}"
        if name in _METHODS:
            return _as_method(name, function, arguments, options)
        if name == "numpy.linalg.norm":
            return _norm(*arguments, **options)
        if name not in _ALLOWED:
            raise TypeError(_not_available(name))
        return function.__wrapped__(*arguments, **options)  # type: ignore[attr-defined]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError(f"a DistMatrix is not one array: {WHOLE}")

    def __iter__(self) -> Any:
        raise TypeError(f"a DistMatrix cannot be iterated over: {WHOLE}")

    def __bool__(self) -> bool:
        raise ValueError("a DistMatrix has no truth value: compare with allclose")


def _type(x: Any) -> Any:
    """Return the type of a matrix or of an array; a number is returned as it is."""
    if isinstance(x, NumPyFunctions) or (devices.of(x) and np.ndim(x)):
        return x.dtype
    if np.ndim(x) or isinstance(x, np.ma.MaskedArray):
        return devices.adopted(x).dtype
    return x


def _fitted(
    name: str, inputs: Sequence[Any], out: NumPyFunctions | None
) -> tuple[list[Any], NumPyFunctions, list[Any]]:
    """Return this rank's part of operands that differ in layout or shape, a matrix of the result's layout, and reports.

    Matrices are redistributed to the layout of `out`, or else of the first one of the shape of the result; rows,
    columns and arrays are given to every rank, which takes its part of them.  Collective.
    """
    matrices = [x for x in (*inputs, out) if isinstance(x, NumPyFunctions)]
    inputs = [x if isinstance(x, NumPyFunctions) or not np.ndim(x) else to_host(devices.adopted(x)) for x in inputs]
    shapes = [x.shape if isinstance(x, NumPyFunctions) else np.shape(x) for x in inputs]
    with together(matrices[0].grid.comm) as arguments:
        arguments += [name, *shapes, *(x.distribution for x in matrices)]
        arguments += [crc32(np.asarray(x).tobytes()) for x in inputs if not isinstance(x, NumPyFunctions)]
        told = " and ".join(str(getattr(x, "distribution", None) or f"an array of shape {np.shape(x)}") for x in inputs)
        try:
            shape = np.broadcast_shapes(*shapes)
        except ValueError:
            raise LayoutError(f"{name}: {told} cannot be broadcast to one shape") from None
        if len(shape) != 2 or (out is not None and out.shape != shape):
            there = "a matrix has two dimensions" if out is None else f"out is {out.distribution}"
            raise LayoutError(f"{name} of {told} has the shape {shape}, and {there}")
        if any(x.ndim > 1 and min(x.shape) > 1 for x in inputs if isinstance(x, np.ndarray)):
            raise TypeError(
                f"{name} of a DistMatrix and an array: distribute the array first, "
                "DistMatrix.from_global(array, grid=...)"
            )
        alike = [x for x in (out, *matrices) if x is not None and x.shape == shape]
        like = alike[0] if alike else _crossed(matrices, shape)
        for x in matrices:
            x.layout_in(like.grid)  # raises for grids over other ranks
    parts, reports = list[Any](), list[Any]()
    rows, cols = like.indices()
    for x in inputs:
        if isinstance(x, NumPyFunctions) and x.shape == shape:
            if not like.same_layout(x):
                x = pdgemm.redistribute(x, like=like)  # type: ignore[arg-type]
                reports.append(x.report)
            parts.append(x.local)
        elif not isinstance(x, NumPyFunctions) and not np.ndim(x):
            parts.append(x)
        else:
            whole = np.atleast_2d(x.allgather() if isinstance(x, NumPyFunctions) else x)  # type: ignore[attr-defined]
            mine = whole[rows if len(whole) > 1 else slice(None)][:, cols if whole.shape[1] > 1 else slice(None)]
            device = devices.of(like.stored)
            parts.append(device.to_device(mine, "C") if device else mine)
    return parts, like, reports


def _crossed(matrices: Sequence[NumPyFunctions], shape: tuple[int, int]) -> NumPyFunctions:
    """Return a matrix for the layout of a shape that no operand has: the rows of one, the columns of another."""
    grid = matrices[0].grid
    rows = next((x.distribution.rows for x in matrices if x.shape[0] == shape[0] and x.grid.same_as(grid)), None)
    cols = next((x.distribution.cols for x in matrices if x.shape[1] == shape[1] and x.grid.same_as(grid)), None)
    default = Distribution.over(grid.shape, shape, None, (0, 0))
    layout = Distribution(rows or default.rows, cols or default.cols)
    return type(matrices[0])(matrices[0].stored[:0, :0], grid, layout)


def _product(A: Any, B: Any, out: NumPyFunctions | None, options: dict[str, Any]) -> Any:
    """Return A B, of which one may be an array that is on every rank: a vector, or a thin matrix.

    With a vector the result is a 1-D array on every rank, else a DistMatrix.
    """
    matrix: Any = A if isinstance(A, NumPyFunctions) else B
    arrays = [x for x in (A, B) if not isinstance(x, NumPyFunctions)]
    if arrays and np.ndim(arrays[0]) == 1 and out is None:
        if options:
            raise TypeError(_not_available(f"matmul of a vector with {', '.join(sorted(options))}"))
        return matrix.matvec(B) if matrix is A else matrix.T.matvec(A)
    if arrays and np.ndim(arrays[0]) == 2:
        there = type(matrix).from_global(arrays[0], grid=matrix.grid, device=matrix.device)
        A, B = (A, there) if matrix is A else (there, B)
    return pdgemm.matmul(A, B, out, **options)  # type: ignore[arg-type]


def _as_method(name: str, function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """Call the method of the matrix that does what a function of NumPy does.

    Raises TypeError for parameters that it has not, unless they have NumPy's default.
    """
    known = signature(function)
    bound = known.bind(*arguments, **options)
    (_, matrix), *given = bound.arguments.items()
    if not isinstance(matrix, NumPyFunctions):
        raise TypeError(f"{name}: a DistMatrix is its first argument")
    method = getattr(matrix, _METHODS[name])
    takes = signature(method).parameters
    named = {key: value for key, value in given if value is not known.parameters[key].default}
    if other := named.keys() - takes.keys():
        raise TypeError(_not_available(f"{name} with {', '.join(sorted(other))}"))
    return method(**named)


def _norm(A: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Return `numpy.linalg.norm` of a matrix, whose default is the Frobenius norm."""
    if keepdims and axis is None:
        raise TypeError(_not_available("numpy.linalg.norm with keepdims and without axis"))
    return A.norm("fro" if ord is None else ord, axis, keepdims)


def _check_ufunc(ufunc: np.ufunc, method: str, options: dict[str, Any]) -> None:
    """Raise TypeError where the function is neither elementwise with one result nor numpy.matmul."""
    name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
    product = ufunc is np.matmul
    if method != "__call__" or ufunc.nout != 1 or (ufunc.signature is not None and not product):
        raise TypeError(_not_available(name))
    if other := options.keys() - (set() if product else {"casting", "dtype"}):
        raise TypeError(_not_available(f"{name} with {', '.join(sorted(other))}"))


def _check_elements(ufunc: np.ufunc, operands: Sequence[Any], out: np.dtype | None, options: dict[str, Any]) -> bool:
    """Raise where NumPy cannot combine these operands, or the result is of a type that no matrix can have.

    operands : the dtype of each matrix, or a scalar.

    The function is called with no element, and then with one, so that a rank whose local array is empty raises as well.
    Returns whether some values may still be refused, by the ranks that hold them.
    """
    for count in (0, 1):
        parts = [np.ones(count, x) if isinstance(x, np.dtype) else x for x in operands]
        target = None if out is None else np.empty(count, out)
        try:
            with np.errstate(all="ignore"):
                result = ufunc(*parts, out=target, **options)
        except OverflowError as bad:  # an integer that the type of the matrix does not hold
            raise ArgumentError(f"{ufunc.__name__}: {bad}") from None
        dtype = element_type(result.dtype)
    return (ufunc is np.power and dtype.kind == "i") or "raise" in np.geterr().values()


def _not_available(name: str) -> str:
    instead = f"use {_INSTEAD[name]}, or" if name in _INSTEAD else "its elements are distributed over many ranks:"
    return f"{name} is not available for a DistMatrix; {instead} gather it first, A.to_global() or A.allgather()"
