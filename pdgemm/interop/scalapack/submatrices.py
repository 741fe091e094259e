"""The four arguments of a submatrix, local array, first row, first column and descriptor, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pdgemm.grids.distribution import Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.interop.scalapack.blacs import grid_of_context
from pdgemm.interop.scalapack.descriptors import CTXT_, DTYPE_, LLD_, Descriptor, illegal, whole_number
from pdgemm.local.arrays.dtypes import names
from pdgemm.local.blas.local_gemm import leading
from pdgemm.matrix.distmatrix import DistMatrix

Dtypes = tuple[np.dtype, ...]
Desc = Sequence[int] | np.ndarray


@dataclass(eq=False)
class SubmatrixArguments:
    """The arguments of sub(A) = A(ia : ia + rows - 1, ja : ja + cols - 1).

    number : the argument number of the local array; ia, ja and the descriptor follow it.
    rows, cols : the shape of sub(A), set before `check` is called.
    """

    name: str
    number: int
    array: Any
    i: Any
    j: Any
    desc: Any
    rows: int = 0
    cols: int = 0

    @cached_property
    def entries(self) -> list[int]:
        """The entries of the descriptor; empty if it is not a one-dimensional array of integers."""
        try:
            desc = np.asarray(self.desc)
        except Exception:  # any exception: `check` then reports the argument, and all processes raise
            return []
        entries: list[int] = desc.tolist() if desc.ndim == 1 and desc.dtype.kind in "iu" else []
        return entries

    @cached_property
    def descriptor(self) -> Descriptor | None:
        return Descriptor.of(self.entries)

    @property
    def grid(self) -> ProcessGrid | None:
        return grid_of_context(self.entries[CTXT_]) if len(self.entries) > CTXT_ else None

    @property
    def absent(self) -> bool:
        """Whether CTXT_ is -1, which says that this process is not in the context."""
        return len(self.entries) > CTXT_ and self.entries[CTXT_] == -1

    def check(self, routine: str, dtypes: Dtypes) -> None:
        """Raise IllegalArgument for the first illegal argument.

        An empty sub(A) may begin anywhere, and A may be empty too.
        """
        name, number, desc = self.name, self.number, self.descriptor
        if not isinstance(self.array, np.ndarray) or self.array.dtype not in dtypes:
            passed_type = getattr(self.array, "dtype", type(self.array).__name__)
            raise illegal(routine, number, 0, f"{name} must be an array of {names(dtypes)}, got {passed_type}")
        empty = 0 in (self.rows, self.cols)
        bounded = not empty and desc is not None and self.grid is not None and min(desc.M_, desc.N_) > 0
        for at, letter, axis, extent, whole in (
            (number + 1, "i", "row", self.rows, desc.M_ if desc else 0),
            (number + 2, "j", "column", self.cols, desc.N_ if desc else 0),
        ):
            first = whole_number(getattr(self, letter))
            if first is None:
                raise illegal(routine, at, 0, f"{letter}{name} must be an integer, got {getattr(self, letter)!r}")
            if first < 1 or (bounded and first + extent - 1 > whole):
                span = f"{axis}s {first} to {first + extent - 1} are not within 1 to {whole}"
                raise illegal(routine, at, 0, f"{letter}{name} is {first}: {span if bounded else 'must be >= 1'}")
            setattr(self, letter, first)
        if len(self.entries) < LLD_ + 1:
            raise illegal(routine, number + 3, 0, f"desc{name} must be 9 integers, or 11 of type 2, got {self.desc!r}")
        if desc is None:
            text = f"DTYPE_ of desc{name} is {self.entries[DTYPE_]}, must be 1, or 2 for 11 entries"
            raise illegal(routine, number + 3, DTYPE_ + 1, text)
        wrong = desc.wrong(least=0 if empty else 1, lld="any" if empty else "held")
        if wrong is not None:
            entry, at, rule = wrong
            raise illegal(routine, number + 3, at, f"{entry} of desc{name} {rule}")
        try:
            self.matrix  # noqa: B018
        except ValueError as bad:
            raise illegal(routine, number, 0, f"{name}: {bad}") from None

    @cached_property
    def matrix(self) -> DistMatrix:
        """sub(A), in the caller's memory.  Raises ValueError if the array does not match the descriptor."""
        grid, desc = self.grid, self.descriptor
        assert grid is not None and desc is not None
        if 0 in (self.rows, self.cols):
            layout = Distribution.over(grid.shape, (self.rows, self.cols))
            return DistMatrix(np.empty(layout.local_shape(grid.coords), self.array.dtype, "F"), grid, layout, "F")
        spans = (self.i - 1, self.i - 1 + self.rows), (self.j - 1, self.j - 1 + self.cols)
        local = self._local(*desc.layout.local_window(*spans, grid.coords), desc.LLD_)
        return DistMatrix(local, grid, desc.layout.window(*spans), "F")

    def _local(self, rows: slice, cols: slice, lld: int) -> np.ndarray:
        """Return a view of a range of rows and columns of the local array, which may be larger."""
        array, shape = self.array, (rows.stop, cols.stop)
        if rows.start == rows.stop or cols.start == cols.stop:
            return np.empty((rows.stop - rows.start, cols.stop - cols.start), array.dtype, "F")
        if array.ndim == 1 and array.flags.c_contiguous and array.size >= lld * (cols.stop - 1) + rows.stop:
            array = np.lib.stride_tricks.as_strided(array, shape, (array.itemsize, lld * array.itemsize))
        if array.ndim != 2 or array.shape[0] < rows.stop or array.shape[1] < cols.stop:
            raise ValueError(
                f"the local array has shape {self.array.shape}, but {shape[0]} x {shape[1]} with LLD_ {lld} is needed"
            )
        whole = array[: rows.stop, : cols.stop]
        if leading(whole)[0] != b"N" or (cols.stop > 1 and whole.strides[1] != lld * whole.itemsize):
            raise ValueError(
                f"a column-major array with leading dimension LLD_ = {lld} is needed, got strides {array.strides}; "
                "row-major arrays: pdgemm.DistMatrix.from_local"
            )
        return whole[rows, cols]
