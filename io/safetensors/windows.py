"""Reads and writes some elements of a window of a tensor in a file, by MPI-IO.  Local.

The elements of a window are numbered row by row; a range of these numbers is read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from pdgemm.io.pieces import ELEMENTS, Transfer
from pdgemm.io.safetensors.header import Tensor


class Place(NamedTuple):
    """A window of a tensor as a rectangle of a matrix: columns [col, col + width) from row `row` on.

    cols : columns of the matrix.   transposed : the file has the transposed matrix.
    """

    row: int
    col: int
    width: int
    cols: int
    transposed: bool = False

    def blocks(self, start: int, values: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (row, column, view): `values` as rectangles of the window, of at most 2^19 elements each.

        values : the elements of the window from number `start` on.   row, column : where the rectangle begins in the
        window.  Each rectangle is as long as possible along the rows of the file.
        """
        at = 0
        while at < len(values):
            row, col = divmod(start + at, self.width)
            cols = min(self.width - col, len(values) - at)
            rows = (len(values) - at) // self.width if cols == self.width else 1
            whole = values[at : at + rows * cols].reshape(rows, cols)
            at += rows * cols
            along = min(rows if self.transposed else cols, ELEMENTS)  # a row of the file
            steps = ELEMENTS // along, along
            row_step, col_step = steps[::-1] if self.transposed else steps
            for i, j in product(range(0, rows, row_step), range(0, cols, col_step)):
                yield row + i, col + j, whole[i : i + row_step, j : j + col_step]

    def transfer(self, transfer: Transfer, row: int, col: int, block: np.ndarray) -> None:
        """Write or read a rectangle of the window.  Local."""
        at = self.row + row, self.col + col
        transfer(*(at[::-1] if self.transposed else at), block.T if self.transposed else block)


def place_of_window(shape: Sequence[int], window: Sequence[slice], transposed: bool = False) -> Place:
    """Return the place of a window of a tensor.

    window : a range of the indices of one dimension, and all indices of each other dimension.
    shape : the shape of the parameter; it has two dimensions where the file has the transpose.
    """
    shape, window = (1,) * (2 - len(shape)) + tuple(shape), (slice(0, 1),) * (2 - len(shape)) + tuple(window)
    divided = next((at for at, (n, x) in enumerate(zip(shape, window)) if (x.start, x.stop) != (0, n)), 0)
    at = max(divided, 1)  # dimensions from here on are columns
    inner, own = prod(shape[at + 1 :]), window[at]
    row = window[0].start if at == 1 else 0
    return Place(row, own.start * inner, (own.stop - own.start) * inner, prod(shape[at:]), transposed)


def transfer_to(transfer_of: Callable[..., Transfer], tensor: Tensor, shape: Sequence[int], place: Place) -> Transfer:
    """Return the transfer that reads or writes a tensor of an open file.   shape : the shape of the parameter."""
    return transfer_of(tensor.offset, shape[0] if place.transposed else place.cols, tensor.dtype)


def write_range(transfer: Transfer, place: Place, start: int, values: np.ndarray) -> None:
    """Write `values` to a window, from element `start` on.  Local; at most 2^19 elements are copied at a time."""
    for row, col, block in place.blocks(start, values):
        place.transfer(transfer, row, col, block)


def has_range(transfer: Transfer, place: Place, start: int, values: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether the window in the file equals `values` bit by bit.  Local.   dtype : the type in the file."""
    for row, col, own in place.blocks(start, values):
        block, expected = np.empty(own.shape, dtype), own.astype(dtype, "C")
        place.transfer(transfer, row, col, block)
        if not np.array_equal(block.view(np.uint8), expected.view(np.uint8)):
            return False
    return True


def read_range(transfer: Transfer, place: Place, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
    """Return elements [start, stop) of a window in the type of the file.  Local."""
    values = np.empty(stop - start, dtype)
    for row, col, block in place.blocks(start, values):
        place.transfer(transfer, row, col, block)
    return values
