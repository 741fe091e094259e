"""Where the rows of an array on a device begin: at multiples of the bytes that a GPU loads at a time."""

from __future__ import annotations

ALIGNED = 16  # bytes that GPUs load at a time
LONG = 64  # elements of the shortest row whose place is worth unused memory


def apart(length: int, itemsize: int) -> int:
    """Return how many elements apart rows of this length (columns, in Fortran order) begin on a device."""
    unit = max(1, ALIGNED // itemsize)
    return -(-length // unit) * unit if length >= LONG else length


def aligned_words(rows: int, cols: int, order: str, itemsize: int) -> int:
    """Return the elements of the memory that an array with such rows (columns, in Fortran order) takes."""
    return rows * apart(cols, itemsize) if order == "C" else apart(rows, itemsize) * cols
