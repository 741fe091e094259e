"""NumPy's functions of the elements of one rank, evaluated where the elements are: on the host or on a device.

CuPy's arrays answer NumPy's functions by its protocols.  What CuPy lacks, or does in another way, is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdgemm.local.arrays.device import Array, beside, to_host
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.arrays.folds import at_a_time


def evaluated(act: Callable[..., Array], parts: Sequence[Any], into: Array) -> None:
    """Set an array to a NumPy function of arrays beside it, of its shape or broadcast to it, and of numbers.

    A device works in slabs, so that temporaries stay small.  The work is in its current stream.
    """
    rows, cols = into.shape
    for slab in slabs(rows, cols, at_a_time(into, into.size)) if into.size else ():
        pieces = [x[slab] if np.ndim(x) and len(x) > 1 else x for x in parts]
        values = act(*map(supported, pieces))
        same = values.dtype == into.dtype or is_extension(into.dtype)
        CONVERT(into[slab], values if same else values.astype(into.dtype))


def is_extension(dtype: Any) -> bool:
    """Return whether a type of elements is one of ml_dtypes, such as bfloat16, and not of NumPy."""
    return getattr(dtype, "kind", "") == "V"


def supported(x: Any) -> Any:
    """Return elements in a type that all functions of a device take: float32 for bfloat16."""
    return x if np.ndim(x) == 0 or isinstance(x, np.ndarray) or not is_extension(x.dtype) else x.astype(np.float32)


def close(x: Any, y: Any, rtol: float, atol: float, equal_nan: bool) -> Array:
    """Return numpy.isclose of arrays of the host or of a device, and of numbers, at least one of which is an array."""
    if hasattr(y, "dtype") and y.dtype != (real := np.result_type(y.dtype, 1.0)):  # |y| of the least integer overflows
        y = y.astype(real)
    y = float(y) if isinstance(y, int) else y
    with np.errstate(invalid="ignore"):
        near = (np.abs(x - y) <= atol + rtol * np.abs(y)) & np.isfinite(y) | (x == y)
        return near | (np.isnan(x) & np.isnan(y)) if equal_nan else near


def all_close(x: Any, y: Any, rtol: float, atol: float, equal_nan: bool) -> bool:
    """Return numpy.allclose of arrays that are broadcast, or of numbers, on the device if an array is on one.  Local.

    At least one has the rows and columns of the result.
    """
    if np.ndim(x) and np.ndim(y):
        x, y = beside(x, y), beside(y, x)
    rows, cols = np.broadcast_shapes(np.shape(x), np.shape(y))
    most = at_a_time(x if np.ndim(x) else y, rows * cols)
    for slab in slabs(rows, cols, most) if rows * cols else ():
        a, b = (supported(z[slab] if np.ndim(z) and len(z) > 1 else z) for z in (x, y))
        if not to_host(np.all(close(a, b, rtol, atol, equal_nan))):
            return False
    return True
