"""Functions for loading and saving in all file formats: element types, parts of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdgemm.errors import DTypeError
from pdgemm.grids.rectangles import Rectangle
from pdgemm.local.arrays.dtypes import kind_rank, names
from pdgemm.local.arrays.integers import as_range

Progress = Callable[[int, int], object]
Transfer = Callable[[int, int, np.ndarray], object]  # (first row, first column, elements); the array may be empty


def check_dtypes(what: str, stored: np.dtype, wanted: np.dtype, possible: tuple[np.dtype, ...]) -> None:
    """Raise DTypeError if a matrix cannot have the wanted type, or if the stored type cannot be converted to it."""
    if wanted not in possible:
        request = "" if wanted == stored else f", and dtype={wanted} was asked for"
        raise DTypeError(f"{what} holds {stored}{request}; a matrix can be of {names(possible)}: convert with dtype=")
    safe = kind_rank(stored) <= kind_rank(wanted) if kind_rank(wanted) else np.can_cast(stored, wanted)
    if stored.kind not in "biufc" or not safe:
        raise DTypeError(f"{what} holds {stored}, which cannot become {wanted}")


def part_of(shape: tuple[int, int], rows: Any, cols: Any) -> Rectangle:
    """Return the part of a matrix of this shape that `rows` and `cols` select.  Raises ArgumentError."""
    return Rectangle(as_range(rows, "rows", shape[0]), as_range(cols, "cols", shape[1]))


def within(transfer: Transfer, part: Rectangle) -> Transfer:
    """Return a transfer whose row and column numbers begin with 0 at the first element of a part."""
    return lambda row, col, elements: transfer(row + part.rows[0], col + part.cols[0], elements)
