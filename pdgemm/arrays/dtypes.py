"""Element types: which there are, what they are multiplied in, how they travel."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pdgemm.arrays.integers import shown
from pdgemm.errors import DTypeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALF_NAMES = ("float16", "bfloat16")
COMPUTE = ("float32", "tf32", *HALF_NAMES)  # what operands may be rounded to
_INT8, _INT32 = np.dtype(np.int8), np.dtype(np.int32)
HALVES = (np.dtype(np.float16), BFLOAT16)
FLOATS: tuple[np.dtype, ...] = tuple(map(np.dtype, ("f2", BFLOAT16, "f4", "f8", "c8", "c16")))
OPERANDS: tuple[np.dtype, ...] = (*FLOATS, _INT8)
RESULTS: tuple[np.dtype, ...] = (*FLOATS, _INT32)
BLAS = tuple(map(np.dtype, "fdFD"))
_WHOLE = tuple(map(np.dtype, ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")))
_ELEMENTS = {dtype: dtype for dtype in (*_WHOLE, *FLOATS)}


def element_type(given: Any) -> np.dtype:
    """The type of a matrix's elements, of all that NumPy takes for one.

    Numbers of fixed size in native byte order, for these can be sent, saved and shared.  Raises DTypeError.
    """
    try:
        dtype = np.dtype(given)
    except (TypeError, ValueError) as bad:
        raise DTypeError(f"{shown(given)} is not a type of elements: {' '.join(str(bad).split())}") from None
    if dtype not in _ELEMENTS:
        kinds = names(tuple(_ELEMENTS))
        raise DTypeError(f"elements are numbers of native byte order, got {dtype!s:.60}; a matrix can be of {kinds}")
    return _ELEMENTS[dtype]


def names(dtypes: tuple[np.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def rank(dtype: np.dtype) -> int:
    """0 for integers, 1 for real and 2 for complex numbers."""
    return {"b": 0, "i": 0, "u": 0, "c": 2}.get(dtype.kind, 1)


def common(*dtypes: np.dtype) -> np.dtype:
    """The type that holds all of them: of the two of 16 bits float32.  Raises DTypeError where there is none."""
    if set(HALVES) <= set(dtypes):  # neither holds the other
        return common(np.dtype("f4"), *(dtype for dtype in dtypes if dtype not in HALVES))
    try:
        return np.result_type(*dtypes)
    except TypeError:
        raise DTypeError(f"{names(tuple(dict.fromkeys(dtypes)))} have no common type") from None


def arithmetic(*dtypes: np.dtype) -> np.dtype:
    """The type in which elements of these types are multiplied and added.

    16-bit numbers in float32; whole numbers modulo 2^32, or 2^64 where one has 64 bits, with or without a sign alike.
    """
    if all(dtype in _WHOLE for dtype in dtypes):
        return np.dtype(np.int64) if any(dtype.itemsize == 8 for dtype in dtypes) else _INT32
    return common(*(np.dtype("f4") if dtype in HALVES else dtype for dtype in dtypes))


def product(a: np.dtype, b: np.dtype) -> np.dtype:
    """The type of a product made where no C is given: int32 for int8, else the common type."""
    both = common(a, b)
    return _INT32 if both == _INT8 else both


def fits(source: np.dtype, target: np.dtype) -> bool:
    """May elements be converted?  To fewer bits, but neither complex to real nor real to integer."""
    return rank(source) <= rank(target)


def wire(x: np.ndarray) -> np.ndarray:
    """A contiguous array as MPI takes it: 16-bit floats as the integers of the same bits."""
    return x.view(np.uint16) if x.dtype in HALVES else x


def eps(dtype: Any) -> float:
    """Distance from 1 to the next number, 0 for integers."""
    dtype = np.dtype(dtype)
    return 0.0 if dtype.kind in "iu" else float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
