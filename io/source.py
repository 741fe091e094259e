"""A dataset that is read as a matrix, whole or in parts, of which op is a factor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdgemm.arrays.dtypes import STORED
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io import hdf5, hyperslabs, mpi_io
from pdgemm.io.atomic import on_root
from pdgemm.io.matrix_files import Transfer
from pdgemm.io.stored import Stored, check_unchanged


class Source(NamedTuple):
    """A dataset that is to be read as a matrix.

    what   : the name of the matrix, for people.
    dataset : its file and its name in there.
    stored : what `hdf5.look` found.
    dtype  : type of the matrix.
    """

    what: str
    dataset: tuple[str, str]
    stored: Stored
    dtype: np.dtype
    op: str = "N"

    @property
    def transposed(self) -> bool:
        return self.op != "N"

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of op(matrix)."""
        rows, cols = self.stored.shape
        return (cols, rows) if self.transposed else (rows, cols)

    @property
    def nbytes(self) -> int:
        """The bytes of the dataset in its file."""
        return self.stored.shape[0] * self.stored.shape[1] * self.stored.dtype.itemsize

    @property
    def unit(self) -> tuple[int, int]:
        """Rows and columns of op(matrix) that are read together."""
        rows, cols = self.stored.unit
        return (cols, rows) if self.transposed else (rows, cols)

    def is_same(self, other: Source) -> bool:
        """Are both the same elements, whatever their names?"""
        return self.stored.object == other.stored.object

    @contextmanager
    def opened_alone(self, grid: ProcessGrid) -> Iterator[Transfer]:
        """Open the dataset for reads that each rank makes when it wants, in a thread of its own too.

        Collective; raises FileError if the file has changed since it was looked at, now or at the end.
        """
        stored, comm = self.stored, grid.comm
        path, name = Path(self.dataset[0]), self.dataset[1]
        if stored.offset is not None and stored.dtype in STORED:
            way = mpi_io.opened(stored.file, stored.offset, stored.shape[1], stored.dtype, comm)
        else:
            way = hyperslabs.opened(path, name, comm, False)
        on_root(comm, path, lambda: check_unchanged(f"{path}:{name}", stored))
        with way as transfer:
            yield transfer
        on_root(comm, path, lambda: check_unchanged(f"{path}:{name}", stored))


def source(
    grid: ProcessGrid, what: str, dataset: tuple[str, str], dtype: str | np.dtype | None = None, op: str = "N"
) -> Source:
    """Look at a dataset.  Collective over the grid; raises the errors of `hdf5.load` that need no element."""
    stored, found = hdf5.look(*dataset, grid, dtype)
    return Source(what, dataset, stored, found, op.upper())
