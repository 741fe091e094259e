"""NumPy's functions of the triangles of the matrices along the last two axes of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.errors import LayoutError
from pdgemm.local.arrays.device import Array, beside


def tril(m: Any, k: int = 0) -> Any:
    """Return a tensor with zeros above diagonal k of its matrices, as numpy.tril.  Collective; nothing is sent."""
    return _masked(m, lambda i, j: j - i <= k)


def triu(m: Any, k: int = 0) -> Any:
    """Return a tensor with zeros below diagonal k of its matrices, as numpy.triu.  Collective; nothing is sent."""
    return _masked(m, lambda i, j: j - i >= k)


def _masked(T: Any, kept: Any) -> Any:
    if T.ndim < 2:
        raise LayoutError(f"a triangle of matrices takes a tensor of at least two axes, not of shape {T.shape}")
    rows, cols = T.indices()[-2:]

    def elements() -> Array:
        mask = np.broadcast_to(kept(rows[:, None], cols), T.local.shape)
        return np.where(beside(mask, T.local), T.local, beside(np.zeros((), T.dtype), T.local))

    return T.with_elements(T.layout, T.dtype, elements)
