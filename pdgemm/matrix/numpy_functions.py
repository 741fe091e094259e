"""NumPyFunctions: NumPy's operators and functions of a DistMatrix, and the errors of functions that are not available.

A function that is not known here is rejected, because NumPy would compute it from the local arrays, or from an object
that is not an array: the result would be a wrong number more often than an error.  The rejection depends only on the
function, the types and the scalars, so all ranks reject the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import numpy as np

import pdgemm
from pdgemm.errors import ArgumentError
from pdgemm.grids.layout import Order
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.alignment import aligned
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.local.arrays.elementwise import evaluated, is_extension
from pdgemm.matrix.array_functions import ABOVE, FUNCTIONS, as_number, check_one_device, fitted, type_of
from pdgemm.matrix.matrix_base import MatrixBase
from pdgemm.support.agreement import check_not_freed, together

WHOLE = "use .local, .to_global(root) or .allgather()"

# functions that NumPy computes only from shape, dtype and elementwise functions
_ALLOWED = {f"numpy.{name}" for name in ("shape", "ndim", "size", "result_type", "can_cast", "common_type")}
_ALLOWED |= {f"numpy.{name}" for name in ("iscomplexobj", "isrealobj", "fix", "isneginf", "isposinf")}
_ALLOWED |= {f"numpy.{name}_indices_from" for name in ("diag", "tril", "triu")} | {"numpy.linalg.matmul"}

# functions that a method computes; the parameters of the method have NumPy's names
_METHODS = {f"numpy.{name}": name for name in ("sum", "mean", "prod", "min", "max", "any", "all", "std", "var")}
_METHODS |= {f"numpy.{name}": name for name in ("argmin", "argmax", "trace", "diagonal", "copy", "transpose")}
_METHODS |= {f"numpy.linalg.{name}": name for name in ("trace", "diagonal", "vector_norm")}
_METHODS |= {f"numpy.{name}": "transpose" for name in ("matrix_transpose", "linalg.matrix_transpose")}
_METHODS |= {"numpy.amin": "min", "numpy.amax": "max"}

_INSTEAD = {
    **{name: f"A.local.{name}" for name in ("strides", "flags", "data", "base", "ctypes")},  # of the local array
    "numpy.where": "A.allgather().nonzero()",
    "numpy.array_equiv": "A.allclose(B, rtol=0, atol=0)",
    "numpy.copyto": "A[...] = B",
    "numpy.permute_dims": "A.T",
    "numpy.linalg.multi_dot": "A @ B @ C",
    "numpy.argsort": "A[numpy.argsort(A[:, j])], the rows in the order of a column",
    "numpy.unique": "numpy.unique of numpy.sort(A, axis=None).local on each rank",
    "numpy.diff": "A[1:] - A[:-1]",
    "numpy.put": "A[rows, cols] = x",
    "numpy.split": "A[i0:i1], a view for each part",
    "numpy.array_split": "A[i0:i1], a view for each part",
    "sort": "numpy.sort(A, axis)",
    "argsort": "A[numpy.argsort(A[:, j])], the rows in the order of a column",
    "item": "A[i, j]",
    "squeeze": "A[0] or A[:, 0]",
    "add.reduce": "A.sum(axis=0)",
    "multiply.reduce": "A.prod(axis=0)",
    "maximum.reduce": "A.max(axis=0)",
    "minimum.reduce": "A.min(axis=0)",
    "logical_and.reduce": "A.all(axis=0)",
    "logical_or.reduce": "A.any(axis=0)",
    "add.accumulate": "numpy.cumsum(A, axis=0)",
    "numpy.average": "A.mean(axis), or w @ A / w.sum() with weights of the rows",
    "numpy.cov": "X.T @ X / (len(X) - 1) with X = A - A.mean(axis=0), for variables in columns",
    "numpy.corrcoef": "X.T @ X / len(X) with X = (A - A.mean(axis=0)) / A.std(axis=0), for variables in columns",
    "numpy.fill_diagonal": "numpy.where(DistMatrix.eye(A.shape, grid=A.grid) > 0, value, A)",
    "numpy.stack": "numpy.vstack or numpy.hstack",
    "divmod": "A // B and A % B",
    "numpy.linalg.eig": "pdgemm.linalg.eigh for Hermitian matrices",
    "numpy.linalg.eigvals": "pdgemm.linalg.eigvalsh for Hermitian matrices",
    "numpy.linalg.tensorsolve": "pdgemm.linalg.solve",
    "numpy.linalg.tensorinv": "pdgemm.linalg.inv",
    "numpy.save": "pdgemm.io.npy.save or hdf5.save",
    "matvec": "A.matvec(x) or A @ x with a vector x",
    "vecmat": "x.conj() @ A with a vector x",
    "vecdot": "A.H @ B with matrices of one column",
}


if TYPE_CHECKING:
    M = TypeVar("M")

    class _Operator:
        """The type of an operator of a matrix and another operand: the result is a matrix of the same class."""

        def __get__(self, matrix: M, kind: type[M]) -> Callable[[Any], M]: ...


class NumPyFunctions(MatrixBase, np.lib.mixins.NDArrayOperatorsMixin):
    """NumPy's protocols for DistMatrix: operators, ufuncs and other functions."""

    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]  # `==` is elementwise, as for arrays

    if TYPE_CHECKING:  # NumPy's mixin declares Any
        __add__ = __radd__ = __iadd__ = __sub__ = __rsub__ = __isub__ = __mul__ = __rmul__ = __imul__ = _Operator()
        __truediv__ = __rtruediv__ = __itruediv__ = __floordiv__ = __rfloordiv__ = __ifloordiv__ = _Operator()
        __mod__ = __rmod__ = __imod__ = __pow__ = __rpow__ = __ipow__ = _Operator()
        __and__ = __rand__ = __iand__ = __or__ = __ror__ = __ior__ = __xor__ = __rxor__ = __ixor__ = _Operator()
        __lshift__ = __rlshift__ = __ilshift__ = __rshift__ = __rrshift__ = __irshift__ = _Operator()
        __lt__ = __le__ = __gt__ = __ge__ = _Operator()

        def __neg__(self) -> Self: ...
        def __pos__(self) -> Self: ...
        def __abs__(self) -> Self: ...
        def __invert__(self) -> Self: ...
        def __eq__(self, other: Any) -> Self: ...  # type: ignore[override]
        def __ne__(self, other: Any) -> Self: ...  # type: ignore[override]
        @overload
        def __matmul__(self, other: NumPyFunctions) -> Self: ...
        @overload
        def __matmul__(self, other: Any) -> Any: ...
        def __matmul__(self, other: Any) -> Any: ...
        def __rmatmul__(self, other: Any) -> Any: ...
        def __imatmul__(self, other: Any) -> Self: ...  # type: ignore[misc]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply an elementwise function to the local arrays, or numpy.matmul as a distributed product."""
        if any(_decides(x) for x in (*inputs, *options.get("out", ()))):
            return NotImplemented
        out = options.pop("out", (None,))[0]
        _check_ufunc(ufunc, method, options)
        matrices = [x for x in (*inputs, out) if isinstance(x, NumPyFunctions)]
        if not isinstance(out, NumPyFunctions | None):
            raise TypeError(f"{ufunc.__name__} of a DistMatrix: out is a {type(out).__name__}, and not a DistMatrix")
        if ufunc is np.matmul:
            return _product(inputs[0], inputs[1], out, options)
        for other in matrices:
            check_not_freed(other.grid.comm)
        check_one_device(ufunc.__name__, [self, *matrices])
        if out is not None and out.conjugated:
            raise ArgumentError("out is the conjugate of another matrix, and cannot be written to")
        operands = [type_of(x) for x in inputs]
        dtype, by_value = _check_elements(ufunc, operands, None if out is None else out.dtype, options)
        like: MatrixBase = matrices[0]
        report = None
        if any(isinstance(x, np.dtype) and not isinstance(y, NumPyFunctions) for x, y in zip(operands, inputs)) or any(
            not like.same_layout(x) for x in matrices
        ):
            parts, like, report = fitted(ufunc.__name__, inputs, out)
        else:
            parts = [x.local if isinstance(x, NumPyFunctions) else as_number(x) for x in inputs]
        order: Order = "F" if all(x.order == "F" for x in matrices) and self.device == devices.HOST else "C"
        # on the host only value-dependent errors differ between ranks; on a device one rank may lack memory
        with together(self.grid.comm, by_value or self.device != devices.HOST):
            if self.device != devices.HOST:
                local = _on_device(ufunc, parts, like, None if out is None else out.local, dtype, options)
            elif out is None:
                local = ufunc(*parts, **options, order=order)
            else:
                ufunc(*parts, out=out.local, **options)
        result = type(self)(local, like.grid, like.distribution, order) if out is None else out
        if report:
            result.report = report
        return result

    def __array_function__(
        self, function: Callable[..., Any], types: Any, arguments: Sequence[Any], options: dict[str, Any]
    ) -> Any:
        """Call the distributed function, or NumPy's where shape and dtype suffice; otherwise raise TypeError."""
        if any(map(_decides, types)):
            return NotImplemented
        name = f"{function.__module__}.{function.__name__}"
        if name in _METHODS:
            return _as_method(name, function, arguments, options)
        if name in FUNCTIONS:
            return _called(name, FUNCTIONS[name], arguments, options)
        if name in ABOVE:
            bound = signature(function).bind(*arguments, **options)
            return _called(name, attrgetter(ABOVE[name])(pdgemm), bound.args, bound.kwargs)
        if name not in _ALLOWED:
            raise TypeError(not_available(name))
        return function.__wrapped__(*arguments, **options)  # type: ignore[attr-defined]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError(f"a DistMatrix is not one array: {WHOLE}")

    def __dlpack__(self, **options: Any) -> Any:
        raise TypeError(f"a DistMatrix is not one array, and cannot be exported by DLPack: {WHOLE}, which can be")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.__dlpack__()

    def __dask_tokenize__(self) -> Any:
        raise TypeError(f"a DistMatrix is not one array, and dask cannot divide it: {WHOLE}")

    def __iter__(self) -> Any:
        raise TypeError(f"a DistMatrix cannot be iterated over: {WHOLE}")

    def __bool__(self) -> bool:
        raise ValueError("a DistMatrix has no truth value: compare with allclose")


def _decides(x: Any) -> bool:
    """Return whether an operand, or a type, decides about functions of itself and of matrices, as a DistTensor does."""
    priority = getattr(x, "__array_priority__", 0)  # of the type numpy.ndarray, not a number
    return isinstance(priority, (int, float)) and priority > NumPyFunctions.__array_priority__


def _product(A: Any, B: Any, out: NumPyFunctions | None, options: dict[str, Any]) -> Any:
    """Return A B, where A or B may be an array that is on every rank: a vector, or a thin matrix.

    With a vector the result is a 1-D array on every rank, else a DistMatrix.
    """
    matrix: Any = A if isinstance(A, NumPyFunctions) else B
    arrays = [x for x in (A, B) if not isinstance(x, NumPyFunctions)]
    if arrays and np.ndim(arrays[0]) == 1 and out is None:
        if options:
            raise TypeError(not_available(f"matmul of a vector with {', '.join(sorted(options))}"))
        return matrix.matvec(B) if matrix is A else matrix.T.matvec(A)
    if arrays and np.ndim(arrays[0]) == 2:
        there = type(matrix).from_global(arrays[0], grid=matrix.grid, device=matrix.device)
        A, B = (A, there) if matrix is A else (there, B)
    if all(isinstance(x, NumPyFunctions) for x in (A, B)):
        kinds = A.dtype.kind + B.dtype.kind
        if set(kinds) & set("biu") and set(kinds) & set("fc"):
            wide = np.result_type(A.dtype, B.dtype)
            A, B = (x.astype(wide) if x.dtype.kind in "biu" and x.dtype != np.int8 else x for x in (A, B))
    return pdgemm.matmul(A, B, out, **options)  # type: ignore[arg-type]


def _as_method(name: str, function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """Call the method of the matrix that corresponds to a function of NumPy.

    Raises TypeError for parameters that the method does not take, unless their values are NumPy's defaults.
    """
    known = signature(function)
    bound = known.bind(*arguments, **options)
    (_, matrix), *parameters = bound.arguments.items()
    if not isinstance(matrix, NumPyFunctions):
        raise TypeError(f"{name}: the first argument must be a DistMatrix")
    method = getattr(matrix, _METHODS[name])
    takes = signature(method).parameters
    named = {key: value for key, value in parameters if value is not known.parameters[key].default}
    if other := named.keys() - takes.keys():
        raise TypeError(not_available(f"{name} with {', '.join(sorted(other))}"))
    return method(**named)


def _called(name: str, function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """Call a distributed function.  Raises TypeError for parameters of NumPy's that the function does not take."""
    try:
        signature(function).bind(*arguments, **options)
    except TypeError as bad:
        raise TypeError(not_available(f"{name} with these arguments ({bad})", name)) from None
    return function(*arguments, **options)


def _on_device(
    ufunc: np.ufunc, parts: Sequence[Any], like: MatrixBase, out: Array | None, dtype: np.dtype, options: dict[str, Any]
) -> Array:
    """Return the result of an elementwise function on a device, row-major, of the dtype that it has on the host."""
    extended = any(np.ndim(x) and is_extension(x.dtype) for x in (*parts, out))
    try:
        if not extended:
            values = ufunc(*parts, **options) if out is None else ufunc(*parts, out=out, **options)
            return values if values.dtype == dtype else values.astype(dtype)
        if out is None:
            rows, cols = map(len, like.indices())
            out = aligned((rows, cols), dtype, "C", devices.of(like.stored))
        evaluated(partial(ufunc, **options), parts, out)
        return out
    except TypeError as bad:  # on all ranks: it depends only on the types
        instead = "copy the matrix first, A.to_host()"
        raise TypeError(
            f"numpy.{ufunc.__name__} is not available for this DistMatrix on a device ({bad}): {instead}"
        ) from None


def _check_ufunc(ufunc: np.ufunc, method: str, options: dict[str, Any]) -> None:
    """Raise TypeError where the function is neither elementwise with one result nor numpy.matmul."""
    name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
    product = ufunc is np.matmul
    if method != "__call__" or ufunc.nout != 1 or (ufunc.signature is not None and not product):
        raise TypeError(not_available(name))
    if other := options.keys() - (set() if product else {"casting", "dtype"}):
        raise TypeError(not_available(f"{name} with {', '.join(sorted(other))}"))


def _check_elements(
    ufunc: np.ufunc, operands: Sequence[Any], out: np.dtype | None, options: dict[str, Any]
) -> tuple[np.dtype, bool]:
    """Raise where NumPy cannot combine these operands, or the result is of a type that no matrix can have.

    operands : the dtype of each matrix, or a scalar.

    The function is called with no element, and then with one, so that a rank whose local array is empty raises, too.
    Returns the type of the result, and whether the values of some elements may still be rejected on their ranks.
    """
    for count in (0, 1):
        parts = [np.ones(count, x) if isinstance(x, np.dtype) else x for x in operands]
        target = None if out is None else np.empty(count, out)
        try:
            with np.errstate(all="ignore"):
                result = ufunc(*parts, out=target, **options)
        except OverflowError as bad:  # an integer too large for the type of the matrix
            raise ArgumentError(f"{ufunc.__name__}: {bad}") from None
        dtype = element_type(result.dtype)
    return dtype, (ufunc is np.power and dtype.kind == "i") or "raise" in np.geterr().values()


def not_available(what: str, name: str = "") -> str:
    """Return the message that a function is not available, with its replacement.

    what : the call, as the message names it.   name : the function; by default `what`.
    """
    name = name or what
    instead = f"use {_INSTEAD[name]}, or" if name in _INSTEAD else "its elements are distributed over many ranks:"
    return f"{what} is not available for a DistMatrix; {instead} gather it first, A.to_global() or A.allgather()"
