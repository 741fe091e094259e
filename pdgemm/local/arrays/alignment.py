"""Alignment of the rows of an array on a device: they begin at multiples of the bytes that a GPU loads at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array, Device

ALIGNED = 16  # bytes that GPUs load at a time
LONG = 64  # elements of the shortest row whose alignment is worth unused memory


def apart(length: int, itemsize: int) -> int:
    """Return the distance, in elements, between the starts of rows of this length on a device.

    In Fortran order, it is the distance between the starts of columns.
    """
    unit = max(1, ALIGNED // itemsize)
    return -(-length // unit) * unit if length >= LONG else length


def aligned_words(rows: int, cols: int, order: str, itemsize: int) -> int:
    """Return the number of elements that an array with aligned rows (columns, in Fortran order) takes in memory."""
    return rows * apart(cols, itemsize) if order == "C" else apart(rows, itemsize) * cols


def aligned(
    shape: tuple[int, int],
    dtype: np.dtype,
    order: str,
    device: Device | None,
    empty: Callable[[tuple[int, int], Any, str], Array] | None = None,
) -> Array:
    """Allocate, without initialising it, an array whose rows (columns, if order is "F") are aligned for the device.

    On a device there may be a gap after each long row: products of 16-bit numbers take six times as long if rows are
    not aligned (docs/gpu-measured.md).  Local.   empty : allocates memory; None: private memory of this rank.
    """
    (rows, cols), empty = shape, empty or partial(devices.empty, device=device)
    length = cols if order == "C" else rows
    distance = apart(length, dtype.itemsize) if device and min(rows, cols) > 1 else length
    array = empty((rows, distance) if order == "C" else (distance, cols), dtype, order)
    return array if distance == length else array[:rows, :cols]
