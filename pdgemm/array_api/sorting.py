"""Sorted arrays."""

from __future__ import annotations

from pdgemm.array_api.array import Array
from pdgemm.tensors import tensor_sorting


def sort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Return the elements sorted along an axis, as `pdgemm.tensors.tensor_sorting.sort`.  Collective."""
    return tensor_sorting.sort(x, axis, descending=descending)


def argsort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Return the indices that sort the elements along an axis; of equal ones, the first index first.  Collective."""
    return tensor_sorting.argsort(x, axis, descending=descending)
