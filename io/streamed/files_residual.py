"""Products of matrices in files with a few vectors, for `verify`: each element is read once."""

from __future__ import annotations

import numpy as np

from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io import pieces
from pdgemm.io.source import Source
from pdgemm.matrix.residual import Images, added_images
from pdgemm.support.agreement import together


def applied(grid: ProcessGrid, source: Source, X: np.ndarray, size: np.ndarray) -> Images:
    """Return op(M) X, |op(M)| size and the largest elements of rows of op(M), as `residual` applies a matrix.

    Whole on every rank, in double precision.  Collective over the grid.
    """
    comm, wide = grid.comm, np.result_type(source.dtype, X.dtype, np.float64)
    product = np.zeros((source.shape[0], X.shape[1]), wide)
    bound, most = np.zeros(product.shape), np.zeros(len(product))
    with source.opened_alone(grid) as transfer:
        for piece in pieces.cut(source.stored.shape, source.stored.unit, comm.size):
            row, col, (rows, cols) = piece.share(comm.rank)
            with together(comm):
                part = np.empty((rows, cols), source.dtype)
                transfer(row, col, part)
                part = part.astype(wide, copy=False)
                left, right = slice(row, row + rows), slice(col, col + cols)
                if source.transposed:
                    part, left, right = (part.conj() if source.op == "C" else part).T, right, left
                product[left] += part @ X[right]
                bound[left] += np.abs(part) @ size[right]
                np.maximum(most[left], np.abs(part).max(axis=1, initial=0), out=most[left])
    return added_images(comm, product, bound, most)
