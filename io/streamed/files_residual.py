"""Products of matrices in files with a few vectors, for `verify`: each element is read once."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io import pieces
from pdgemm.io.source import Source
from pdgemm.support.agreement import together


def applied(grid: ProcessGrid, source: Source, X: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return op(M) X and |op(M)| size, whole on every rank, in double precision.  Collective over the grid."""
    comm, wide = grid.comm, np.result_type(source.dtype, X.dtype, np.float64)
    product = np.zeros((source.shape[0], X.shape[1]), wide)
    bound = np.zeros(product.shape)
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
    comm.Allreduce(MPI.IN_PLACE, product, MPI.SUM)
    comm.Allreduce(MPI.IN_PLACE, bound, MPI.SUM)
    return product, bound
