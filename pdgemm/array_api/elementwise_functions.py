"""Functions of each element: those that are no universal functions of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.array_api.array import Array


def where(condition: Array, x1: Any = None, x2: Any = None, /) -> Any:
    """Return x1 where the condition holds, else x2, arrays or numbers that are broadcast.  Collective.

    With the condition only: the indices where it holds, as `nonzero`; so scikit-learn calls it.
    """
    return np.nonzero(condition) if x1 is None and x2 is None else np.where(condition, x1, x2)


def clip(x: Array, /, min: Any = None, max: Any = None) -> Array:
    """Return min(max(x, `min`), `max`) in the type of x, for bounds that are broadcast, or None.  Collective."""
    result = x if min is None else np.maximum(x, min)
    result = result if max is None else np.minimum(result, max)
    return result.astype(x.dtype) if result is x or result.dtype != x.dtype else result
