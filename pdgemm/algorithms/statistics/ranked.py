"""Elements by their position in the sorted order of all elements, by counting: no element is sent.

A real number of b bits is mapped to a key, an integer of b bits: larger numbers have larger keys, and NaN has the
largest.  The key at a position of the sorted order is determined byte by byte: each rank counts in its own sorted keys
how many keys are less than each of the 255 next guesses, and the counts are summed over the ranks.  After b/8 steps the
key is known exactly, and so is its element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from pdgemm.errors import DTypeError
from pdgemm.local.arrays.device import Array, beside, empty, of, to_host
from pdgemm.local.arrays.evaluation import evaluated
from pdgemm.local.arrays.folds import widened


def check_ordered(dtype: np.dtype, name: str) -> None:
    """Raise DTypeError for complex numbers, which have no order."""
    if dtype.kind == "c":
        raise DTypeError(f"{name} of complex numbers: they have no order; take that of abs(A), A.real or A.imag")


def keys_of(A: Any) -> Array:
    """Return the sorted keys of the elements of this rank, in the order of the elements, NaN last.  Local.

    The keys of a matrix on a device are made, sorted and kept there.
    """
    x = A.local
    return in_order(_keys, x, np.dtype(f"u{widened(x[:0]).itemsize}"))


def in_order(act: Callable[[Array], Array], x: Array, dtype: np.dtype) -> Array:
    """Return a function of elements, in a type, sorted, as an array of one dimension where x is.  Local."""
    values = empty((x.size,), dtype, device=of(x))
    evaluated(act, [x], values.reshape(x.shape))
    values.sort()
    return values


def _keys(x: Array) -> Array:
    """Return the keys of elements, unsorted."""
    x = widened(x)
    bits = x.view(np.dtype(f"u{x.itemsize}"))
    top = bits.dtype.type(1 << (8 * x.itemsize - 1))
    if x.dtype.kind == "i":
        return bits ^ top
    if x.dtype.kind == "f":
        return np.where(np.isnan(x), ~top | top, np.where(bits >= top, ~bits, bits | top))
    return bits


def places_in(keys: Array, values: np.ndarray, side: Literal["left", "right"] = "left") -> np.ndarray:
    """Return, as numpy.searchsorted, the places of values in sorted keys, or elements, of the host or of a device."""
    places: np.ndarray = to_host(np.searchsorted(keys, beside(values, keys), side))
    return places


def elements_of(keys: Array, dtype: np.dtype) -> Array:
    """Return the elements that have these keys.   dtype : of the elements: bool, integer or floating-point."""
    wide = widened(np.zeros(0, dtype)).dtype
    if dtype.kind == "b":
        return keys.astype(bool)
    bits = keys.astype(np.dtype(f"u{wide.itemsize}"))
    top = bits.dtype.type(1 << (8 * wide.itemsize - 1))
    if wide.kind == "i":
        bits = bits ^ top
    elif wide.kind == "f":
        bits = np.where(bits >= top, bits ^ top, ~bits)
    return bits.view(wide).astype(dtype)


def at_places(keys: Array, places: np.ndarray, comm: MPI.Intracomm) -> np.ndarray:
    """Return the keys at some positions, counted from 0, of the sorted keys of all ranks.  Collective.

    Cost: one allreduce for each byte of a key, of 255 counts for each position.
    """
    low = np.zeros((len(places), 1), keys.dtype)  # the known bytes of each key, the highest first
    digits = np.arange(1, 256).astype(keys.dtype)
    for shift in range(8 * keys.itemsize - 8, -1, -8):
        less = sum_over_ranks(places_in(keys, low + (digits << keys.dtype.type(shift))), comm)
        byte = (less <= places[:, None]).sum(axis=1, keepdims=True)
        low += byte.astype(keys.dtype) << keys.dtype.type(shift)
    return low[:, 0]


def sum_over_ranks(counts: Any, comm: MPI.Intracomm) -> np.ndarray:
    """Return the sums of integers over the ranks.  Collective."""
    summed = np.array(counts, np.int64)
    comm.Allreduce(MPI.IN_PLACE, summed, MPI.SUM)
    return summed
