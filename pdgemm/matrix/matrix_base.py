"""MatrixBase: the elements, the layout and the views of a matrix.  Nothing here communicates."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from pdgemm.errors import GridError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout, Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.ownership import Ownership, as_html
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.alignment import aligned
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONJUGATE, on_host
from pdgemm.local.arrays.keys import picked
from pdgemm.names import DeviceName
from pdgemm.support.agreement import check_not_freed
from pdgemm.support.members import attribute_at
from pdgemm.support.text import in_bytes

if TYPE_CHECKING:
    from pdgemm.instrument.report import Report

_Class = TypeVar("_Class", bound=type)


def public(cls: _Class) -> _Class:
    """Rename the methods that a class inherits from its bases in pdgemm: their qualified names begin with the class.

    Python's error messages and the reports of the watchdog use these names, and users know only this class.
    """
    for base in cls.__mro__[1:]:
        for member in vars(base).values() if base.__module__.startswith("pdgemm.") else ():
            method = getattr(member, "fget", getattr(member, "__func__", member))
            if isinstance(method, FunctionType) and method.__qualname__.startswith(f"{base.__name__}."):
                method.__qualname__ = f"{cls.__name__}{method.__qualname__.removeprefix(base.__name__)}"
                method.__code__ = method.__code__.replace(co_qualname=method.__qualname__)
    return cls


class MatrixBase:
    """The part of a block-cyclic matrix on one rank; `DistMatrix` adds the collective methods.

    stored : the local elements as they are in memory; in a conjugated view they are not conjugated.
    device : the name of the memory that the local arrays are in: "host", "cuda".
    itemsize : the bytes of an element.
    later_report : the report, or the function that makes the report when it is first read.
    """

    stored: Array = attribute_at("_stored")
    dtype: np.dtype = attribute_at("_dtype")
    device: DeviceName = attribute_at("_device")
    shape: tuple[int, int] = attribute_at("_shape")

    def __init__(
        self,
        stored: Array,
        grid: ProcessGrid = None,  # type: ignore[assignment]  # required: the error below names the arguments
        distribution: Distribution = None,  # type: ignore[assignment]
        order: Order = "C",
        conjugated: bool = False,
        shared: bool = False,
        mpi_addressable: bool = True,
    ) -> None:
        """Make a matrix of a local array without checking that it fits the layout.  Local; `from_local` checks."""
        if not isinstance(distribution, Distribution):
            raise TypeError(
                "DistMatrix() takes a local array, a grid and a distribution: DistMatrix.from_global(array) "
                "distributes a whole array, DistMatrix.from_local takes a part on each rank"
            )
        check_not_freed(grid.comm)
        self._stored, self._dtype, self._device = stored, stored.dtype, devices.name_of(stored)
        self._shape = distribution.shape
        self.grid = grid
        self.distribution = distribution
        self.order: Order = order
        self.conjugated = conjugated
        self.shared = shared
        self.mpi_addressable = mpi_addressable  # whether MPI accepts addresses of the local arrays, on all ranks
        self._report: Any = None
        self.last_run: Any = None  # the executor of a small product, for the next product of the same matrices
        self._layout: tuple[Any, Layout] | None = None

    # ------------------------------------------------------------------ elements
    @property
    def local(self) -> Array:
        """The elements of this rank, which may be changed in place; `from_local` makes a matrix of another array.

        Where the matrix is the conjugate of a complex matrix, `local` is a copy, read-only on the host.
        """
        if not self.conjugated:
            return self.stored
        where = devices.of(self.stored)
        local = aligned(self.stored.shape, self.dtype, self.order, where)
        CONJUGATE(local, self.stored)
        if where is None:
            local.flags.writeable = False
        return local

    @property
    def report(self) -> Report:  # for type checkers; a load or a redistribution has a RunReport
        """The report on how this matrix was computed: by a product, a redistribution, a load; or None."""
        if callable(self._report):
            self._report = self._report()
        return self._report

    @report.setter
    def report(self, report: Any) -> None:
        """Set the report, or a function that makes the report when it is first read."""
        self._report = report

    later_report: Any = attribute_at("_report")

    def __repr__(self) -> str:
        rows, cols = self.stored.shape
        return (
            f"DistMatrix({self.distribution}, {self.dtype}, on a {self.grid} grid; rank {self.grid.rank} "
            f"at {self.grid.coords} holds {rows} x {cols}, {in_bytes(self.stored.nbytes)}"
            f"{'' if self.device == devices.HOST else f' on {self.device}'})"
        )

    def __str__(self) -> str:
        """Return the elements of this rank as NumPy shows them, and the layout.  Local, so a single rank may print."""
        held = np.array2string(on_host(self.local))
        if self.stored.shape == self.shape:
            return f"{held}\n{self!r}"
        return f"{self!r}, its part:\n{held}\nA.preview(), called on all ranks, shows the corners of the whole matrix"

    def _repr_html_(self) -> str:
        """Return the matrix for a notebook: its layout, the owners of blocks, and the elements of this rank.  Local."""
        return as_html(str(self), self.draw())

    def draw(self) -> Ownership:
        """Return a picture of the owner of each block; `print` shows text, a notebook shows SVG (`.svg`).  Local.

        The blocks of this rank have a frame in SVG, and brackets around the rank in text.
        """
        return Ownership(self.layout_in(self.grid), self.grid.comm.rank)

    # ------------------------------------------------------------------ layout
    block: tuple[int, int] = attribute_at("distribution.block")
    ndim = 2

    @property
    def size(self) -> int:
        """The number of elements of the whole matrix."""
        return self.shape[0] * self.shape[1]

    itemsize: int = attribute_at("dtype.itemsize")

    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the global row and column indices of the local array."""
        i, j = self.grid.coords
        return self.distribution.rows.indices(i), self.distribution.cols.indices(j)

    def same_layout(self, other: MatrixBase) -> bool:
        """Return whether every rank holds the same elements of both matrices.  Local."""
        return self.distribution.canonical == other.distribution.canonical and self.grid.same_as(other.grid)

    def layout_in(self, grid: ProcessGrid) -> Layout:
        """Return the layout of the matrix, as a plan needs it, with the ranks numbered as in `grid.comm`.  Local.

        Raises GridError where the two grids are not over the same ranks.
        """
        check_not_freed(self.grid.comm)
        if self._layout is not None and self._layout[0] is grid.comm:
            return self._layout[1]
        place = self.grid.rank_map if grid.comm is self.grid.comm else self.grid.rank_map_in(grid)
        if place is None:
            raise GridError(f"grids over different ranks: {self.grid!r} and {grid!r}; use ProcessGrid(comm, ranks=...)")
        layout = Layout(self.distribution, place, self.dtype, self.order, self.conjugated)
        self._layout = grid.comm, layout
        return layout

    # ------------------------------------------------------------------ views
    @property
    def T(self) -> Self:
        """The transpose, as a view, on the transposed view of the grid, `grid.T`.  Local."""
        order: Order = "C" if self.order == "F" else "F"
        return self._view(self.stored.T, self.grid.T, self.distribution.transposed, order)

    @property
    def H(self) -> Self:
        """The conjugate transpose, as a view.  Local."""
        view = self.T
        view.conjugated = (self.dtype.kind == "c") != self.conjugated
        return view

    @property
    def mT(self) -> Self:
        """The same as `T`, by NumPy's name for the transpose of matrices.  Local."""
        return self.T

    def __getitem__(self, key: Any) -> Self:
        """Return the submatrix A[i0:i1, j0:j1] or A[...] as a view, at any offset, with slices as in NumPy.  Local."""
        rows, cols = picked(key, self.shape)
        return self._window(rows.indices, cols.indices)

    def _window(self, rows: Any, cols: Any) -> Self:
        """Return the submatrix of two ranges of step 1, as a view.  Local."""
        ends = (rows.start, rows.stop), (cols.start, cols.stop)
        part = self.stored[self.distribution.local_window(*ends, self.grid.coords)]
        return self._view(part, self.grid, self.distribution.window(*ends), self.order)

    def _view(self, stored: Array, grid: ProcessGrid, distribution: Distribution, order: Order) -> Self:
        return type(self)(stored, grid, distribution, order, self.conjugated, self.shared, self.mpi_addressable)


def on_diagonal(A: MatrixBase, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the local row and column indices of this rank's elements on a diagonal."""
    rows, cols = A.indices()
    j = cols.searchsorted(rows + offset)  # both ascend
    i = np.flatnonzero((j < len(cols)) & (np.append(cols, 0)[j] == rows + offset))
    return i, j[i]
