"""What loading and saving have in common, whatever the format: element types, parts of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdgemm.errors import DTypeError
from pdgemm.grids.rectangles import Rectangle
from pdgemm.local.arrays.dtypes import kind_rank, names
from pdgemm.local.arrays.integers import as_range

Progress = Callable[[int, int], object]
Transfer = Callable[[int, int, np.ndarray], object]  # (first row, first column, elements), which may be empty


def check_dtypes(what: str, stored: np.dtype, wanted: np.dtype, possible: tuple[np.dtype, ...]) -> None:
    """Raise DTypeError where a matrix cannot be of the type that is wanted, or this not be made of what is stored."""
    if wanted not in possible:
        asked = "" if wanted == stored else f", and dtype={wanted} was asked for"
        raise DTypeError(f"{what} holds {stored}{asked}; a matrix can be of {names(possible)}: convert with dtype=")
    safe = kind_rank(stored) <= kind_rank(wanted) if kind_rank(wanted) else np.can_cast(stored, wanted)
    if stored.kind not in "biufc" or not safe:
        raise DTypeError(f"{what} holds {stored}, which cannot become {wanted}")


def part_of(shape: tuple[int, int], rows: Any, cols: Any) -> Rectangle:
    """Return the part of a matrix of this shape that was asked for.  Raises ArgumentError."""
    return Rectangle(as_range(rows, "rows", shape[0]), as_range(cols, "cols", shape[1]))


def within(transfer: Transfer, part: Rectangle) -> Transfer:
    """Return a transfer whose rows and columns are numbered from those of a part."""
    return lambda row, col, elements: transfer(row + part.rows[0], col + part.cols[0], elements)
