"""Elements by their position in the sorted order of all elements, by counting: no element is sent.

A real number of b bits is mapped to a key, an integer of b bits: larger numbers have larger keys, and NaN has the
largest.  The key at a position of the sorted order is determined byte by byte: each rank counts in its own sorted keys
how many keys are less than each of the 255 next guesses, and the counts are summed over the ranks.  After b/8 steps the
key is known exactly, and so is its element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import DTypeError
from pdgemm.local.arrays.device import to_host
from pdgemm.local.arrays.folds import widened


def check_ordered(dtype: np.dtype, name: str) -> None:
    """Raise DTypeError for complex numbers, which have no order."""
    if dtype.kind == "c":
        raise DTypeError(f"{name} of complex numbers: they have no order; take that of abs(A), A.real or A.imag")


def keys_of(A: Any) -> np.ndarray:
    """Return the sorted keys of the elements of this rank, in the order of the elements, NaN last.  Local."""
    x = widened(to_host(A.local)).ravel()
    if x.dtype == bool:
        return np.sort(x.view(np.uint8))
    keys = x.view(np.dtype(f"u{x.itemsize}")).copy()
    top = keys.dtype.type(1 << (8 * x.itemsize - 1))
    if x.dtype.kind == "i":
        keys ^= top
    elif x.dtype.kind == "f":
        negative = keys >= top
        keys[negative] = ~keys[negative]
        keys[~negative] |= top
        keys[np.isnan(x)] = ~keys.dtype.type(0)
    keys.sort()
    return keys


def elements_of(keys: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the elements that have these keys.   dtype : of the elements: bool, integer or floating-point."""
    wide = widened(np.zeros(0, dtype)).dtype
    if dtype.kind == "b":
        return keys.astype(bool)
    bits = keys.astype(np.dtype(f"u{wide.itemsize}"))
    top = bits.dtype.type(1 << (8 * wide.itemsize - 1))
    if wide.kind == "i":
        bits ^= top
    elif wide.kind == "f":
        none = ~bits == 0  # NaN
        bits = np.where(bits >= top, bits ^ top, ~bits)
        floats = bits.view(wide).copy()
        floats[none] = np.nan
        return floats.astype(dtype)
    return bits.view(wide).astype(dtype)


def at_places(keys: np.ndarray, places: np.ndarray, comm: MPI.Intracomm) -> np.ndarray:
    """Return the keys at some positions, counted from 0, of the sorted keys of all ranks.  Collective.

    Cost: one allreduce for each byte of a key, of 255 counts for each position.
    """
    low = np.zeros((len(places), 1), keys.dtype)  # the known bytes of each key, the highest first
    digits = np.arange(1, 256).astype(keys.dtype)
    for shift in range(8 * keys.itemsize - 8, -1, -8):
        less = sum_over_ranks(keys.searchsorted(low + (digits << keys.dtype.type(shift)), "left"), comm)
        byte = (less <= places[:, None]).sum(axis=1, keepdims=True)
        low += byte.astype(keys.dtype) << keys.dtype.type(shift)
    return low[:, 0]


def sum_over_ranks(counts: Any, comm: MPI.Intracomm) -> np.ndarray:
    """Return the sums of integers over the ranks.  Collective."""
    summed = np.array(counts, np.int64)
    comm.Allreduce(MPI.IN_PLACE, summed, MPI.SUM)
    return summed
