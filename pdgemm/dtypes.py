"""Element types: which there are, what they are multiplied in, how they travel."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

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


def names(dtypes: tuple[np.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def rank(dtype: np.dtype) -> int:
    """0 for integers, 1 for real and 2 for complex numbers."""
    return {"b": 0, "i": 0, "u": 0, "c": 2}.get(dtype.kind, 1)


def common(*dtypes: np.dtype) -> np.dtype:
    """The type that holds all of them.  Raises DTypeError where there is none."""
    try:
        return np.result_type(*dtypes)
    except TypeError:
        raise DTypeError(f"{names(tuple(dict.fromkeys(dtypes)))} have no common type") from None


def arithmetic(*dtypes: np.dtype) -> np.dtype:
    """The type in which elements of these types are multiplied and added: 16-bit numbers in float32, int8 in int32."""
    wide = common(*(np.dtype("f4") if dtype in HALVES else dtype for dtype in dtypes))
    return _INT32 if wide == _INT8 else wide


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
