"""New arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.array_api.array import Array
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.tensors.dist_tensor import DistTensor


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Array:
    """Return a tensor, a matrix, or numbers that are the same on every rank, as an array.  Collective."""
    if isinstance(obj, DistMatrix):
        obj = obj.tensor(obj.shape)
    if not isinstance(obj, DistTensor):
        return Array.from_global(np.asarray(obj, dtype=dtype))
    result = Array(obj.unfolding, obj.layout)
    if dtype is not None and dtype != obj.dtype:
        return result.astype(dtype)
    return result.copy() if copy else result
