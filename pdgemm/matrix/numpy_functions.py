"""NumPy's protocols: what its functions may do with a DistMatrix, and what is said of all others.

A function that is not known here is refused, for what NumPy makes of the parts of a matrix, or of an object that is no
array, is a wrong number more often than an error.  What is refused is known from the function, the types and the
scalars alone, so all ranks refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdgemm.arrays.dtypes import element_type
from pdgemm.errors import ArgumentError

WHOLE = "use .local, .to_global(root) or .allgather()"

# NumPy forms these of shape, dtype and elementwise functions alone
_ALLOWED = {f"numpy.{name}" for name in ("shape", "ndim", "size", "result_type", "can_cast", "common_type")}
_ALLOWED |= {f"numpy.{name}" for name in ("iscomplexobj", "isrealobj", "fix", "isneginf", "isposinf")}
_ALLOWED |= {f"numpy.{name}_indices_from" for name in ("diag", "tril", "triu")} | {"numpy.linalg.matmul"}

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
    "numpy.linalg.norm": "A.norm(kind)",
    "numpy.linalg.matrix_norm": "A.norm(kind)",
    "numpy.empty_like": "DistMatrix.empty(A.shape, grid=A.grid)",
    "numpy.zeros_like": "DistMatrix.zeros(A.shape, grid=A.grid)",
    "numpy.save": "pdgemm.io.hdf5.save",
    "matvec": "A @ B with a B of one column",
    "vecmat": "A.H @ B with an A of one column",
    "vecdot": "A.H @ B with matrices of one column",
}


def call(function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """What `numpy.FUNCTION` gives for a DistMatrix.  Raises TypeError where that is nothing."""
    name = f"{function.__module__}.{function.__name__}"
    if name not in _ALLOWED:
        raise TypeError(_not_available(name))
    return function.__wrapped__(*arguments, **options)  # type: ignore[attr-defined]


def check_ufunc(ufunc: np.ufunc, method: str, options: dict[str, Any]) -> None:
    """Is it elementwise with one result, or a product of matrices?  Raises TypeError."""
    name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
    product = ufunc is np.matmul
    if method != "__call__" or ufunc.nout != 1 or (ufunc.signature is not None and not product):
        raise TypeError(_not_available(name))
    if other := options.keys() - (set() if product else {"casting", "dtype"}):
        raise TypeError(_not_available(f"{name} with {', '.join(sorted(other))}"))


def check_elements(ufunc: np.ufunc, operands: Sequence[Any], out: np.dtype | None, options: dict[str, Any]) -> bool:
    """Can these be combined, and is the result of a type that a matrix can have?  Of matrices the dtype is given.

    Tried on no element, and then on one, so that a rank whose parts are empty hears of it as well.
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
    instead = f"use {_INSTEAD[name]}, or" if name in _INSTEAD else "its elements are dealt out to many ranks:"
    return f"{name} is not available for a DistMatrix; {instead} gather it first, A.to_global() or A.allgather()"
