"""Windows of tensors in a file, of which a rank has a range of elements, row by row: local, and by MPI-IO alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield rectangles of the window that have elements [start, stop) of it, of at most 2^19 elements each.

        Each is a row and a column of the window, and its numbers of rows and of columns.
        """
        while start < stop:
            row, col = divmod(start, self.width)
            rows, cols = 1, min(self.width - col, stop - start, ELEMENTS)
            if cols == self.width:
                rows = min((stop - start) // self.width, ELEMENTS // self.width)
            yield row, col, rows, cols
            start += rows * cols

    def transfer(self, transfer: Transfer, row: int, col: int, block: np.ndarray) -> None:
        """Write or read a rectangle of the window.  Local."""
        at = self.row + row, self.col + col
        transfer(*(at[::-1] if self.transposed else at), block.T if self.transposed else block)


def place_of_window(shape: Sequence[int], window: Sequence[slice], transposed: bool = False) -> Place:
    """Return the place of a window, which is a part of one dimension of a tensor, as a rectangle of a matrix.

    shape : of the parameter; where the file has it transposed, of two dimensions.
    """
    shape, window = (1,) * (2 - len(shape)) + tuple(shape), (slice(0, 1),) * (2 - len(shape)) + tuple(window)
    divided = next((at for at, (n, x) in enumerate(zip(shape, window)) if (x.start, x.stop) != (0, n)), 0)
    at = max(divided, 1)  # dimensions from here on are columns
    inner, own = prod(shape[at + 1 :]), window[at]
    row = window[0].start if at == 1 else 0
    return Place(row, own.start * inner, (own.stop - own.start) * inner, prod(shape[at:]), transposed)


def transfer_to(transfer_of: Callable[..., Transfer], tensor: Tensor, shape: Sequence[int], place: Place) -> Transfer:
    """Return the transfer of a tensor of an open file.   shape : of the parameter."""
    return transfer_of(tensor.offset, shape[0] if place.transposed else place.cols, tensor.dtype)


def write_range(transfer: Transfer, place: Place, start: int, values: np.ndarray) -> None:
    """Write elements of a window from `start` on.  Local; it copies at most 2^19 of them at a time."""
    at = 0
    for row, col, rows, cols in place.blocks(start, start + len(values)):
        place.transfer(transfer, row, col, values[at : at + rows * cols].reshape(rows, cols))
        at += rows * cols


def has_range(transfer: Transfer, place: Place, start: int, values: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether a file has these elements, to the bit, in its type.  Local."""
    at = 0
    for row, col, rows, cols in place.blocks(start, start + len(values)):
        block, own = np.empty((rows, cols), dtype), values[at : at + rows * cols].astype(dtype)
        place.transfer(transfer, row, col, block)
        if not np.array_equal(block.reshape(-1).view(np.uint8), own.view(np.uint8)):
            return False
        at += rows * cols
    return True


def read_range(transfer: Transfer, place: Place, start: int, stop: int, dtype: np.dtype) -> np.ndarray:
    """Return elements [start, stop) of a window in the type of the file.  Local."""
    values, at = np.empty(stop - start, dtype), 0
    for row, col, rows, cols in place.blocks(start, stop):
        place.transfer(transfer, row, col, values[at : at + rows * cols].reshape(rows, cols))
        at += rows * cols
    return values
