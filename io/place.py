"""One rank's share of a dataset, as file systems and HDF5 describe it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pdgemm.grids.distribution import Distribution, Stripe
from pdgemm.matrix import DistMatrix

TILE_BYTES = 1 << 28  # one transfer: far below every 2 GiB limit, and the bound on staging memory


class Place(NamedTuple):
    """The share of rank `coords` of a matrix that lies in a file as `distribution` says."""

    distribution: Distribution
    coords: tuple[int, int]

    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column numbers in the file."""
        i, j = self.coords
        return self.distribution.rows.indices(i), self.distribution.cols.indices(j)

    def runs(self) -> list[tuple[list[int], list[int]]]:
        """Rows and columns in the file as runs of consecutive ones: first numbers, and lengths."""
        found = []
        for dimension, part in zip((self.distribution.rows, self.distribution.cols), self.coords, strict=True):
            blocks = [
                (s.start + at * s.stride, s.block) for s in dimension.canonical.stripes(part) for at in range(s.count)
            ]
            found.append(([start for start, _ in blocks], [length for _, length in blocks]))
        return found

    def tiles(self, itemsize: int) -> Iterator[tuple[Stripe, Stripe]]:
        """Row and column stripes, each pair one regular hyperslab of at most about TILE_BYTES."""
        i, j = self.coords
        columns = list(self.distribution.cols.stripes(j))
        width = max((stripe.size for stripe in columns), default=1) * itemsize
        for rows in self.distribution.rows.stripes(i, max(1, TILE_BYTES // width)):
            for cols in columns:
                yield rows, cols


def as_stored(matrix: DistMatrix, transposed: bool = False) -> tuple[np.ndarray, Place]:
    """The local array in the file's orientation, and its place there.

    transposed : the file holds the transpose of the matrix.
    """
    if transposed:
        return matrix.local.T, Place(matrix.distribution.transposed, matrix.grid.coords[::-1])
    return matrix.local, Place(matrix.distribution, matrix.grid.coords)


def check_equal(found: np.ndarray, written: np.ndarray) -> None:
    """Raise if a file gave back other bits than were written."""
    bits = np.dtype(f"u{min(8, written.itemsize)}")
    if not np.array_equal(found.view(bits), np.ascontiguousarray(written).view(bits)):
        raise OSError("what was written is not what the file holds (disk full, quota, or a failing file system)")
