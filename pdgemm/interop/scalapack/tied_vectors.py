"""Vectors of a submatrix: ipiv and tau, distributed like its rows and columns, and w and s, whole everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from pdgemm.interop.scalapack.arguments import Dtypes, Sub, real_type
from pdgemm.interop.scalapack.descriptors import Descriptor, illegal
from pdgemm.local.arrays.dtypes import names


@dataclass(eq=False)
class Vector:
    """A one-dimensional array that belongs to a submatrix.

    sub : sub(A).   written : the vector is a result.
    name, needed : the name of the argument, and the number of its entries as the documentation of ScaLAPACK states it.
    """

    number: int
    array: Any
    sub: Sub
    written: bool
    name: ClassVar[str]
    needed: ClassVar[str]

    def check(self, routine: str, dtypes: Dtypes) -> None:
        array, (kind, suits) = self.array, self._kind(dtypes)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or not suits(array.dtype):
            passed_type = f"{array.ndim}-D of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            raise illegal(routine, self.number, 0, f"{self.name} must be a 1-D array of {kind}, got {passed_type}")
        if len(array) < self._least:
            text = f"{self.name} has {len(array)} entries, {self.needed} are needed"
            raise illegal(routine, self.number, 0, text)
        if self.written and not array.flags.writeable:
            raise illegal(routine, self.number, 0, f"{self.name} is read-only")

    def _kind(self, dtypes: Dtypes) -> tuple[str, Callable[[np.dtype], bool]]:
        """Return the name of the legal element types, and a function that tests whether a type is legal."""
        raise NotImplementedError

    @property
    def _least(self) -> int:
        """The number of entries that this process reads or writes, from the first one on."""
        raise NotImplementedError


class Values(Vector):
    """The argument w: all eigenvalues of sub(A), on every process."""

    name, needed = "w", "N"

    def _kind(self, dtypes: Dtypes) -> tuple[str, Callable[[np.dtype], bool]]:
        reals = tuple(map(real_type, dtypes))
        return names(reals), reals.__contains__

    @property
    def _least(self) -> int:
        return self.sub.rows

    def put(self, values: np.ndarray) -> None:
        """Write values to the first entries; the other entries stay as they are."""
        self.array[: len(values)] = values


class SingularValues(Values):
    """The argument s: all singular values of sub(A), on every process."""

    name, needed = "s", "min(M, N)"

    @property
    def _least(self) -> int:
        return min(self.sub.rows, self.sub.cols)


class TiedVector(Vector):
    """A vector distributed like the rows of A or its columns: entry l belongs to local row or column l.

    It belongs to the first `count` rows or columns of sub(A).   axis : 0 for rows, 1 for columns.
    """

    axis: ClassVar[int]

    @property
    def _least(self) -> int:
        return self._here[0].stop

    @property
    def count(self) -> int:
        """The number of entries of all processes."""
        return min(self.sub.rows, self.sub.cols)

    @cached_property
    def _here(self) -> tuple[slice, np.ndarray]:
        """The entries of this process, and the rows or columns of sub(A) to which they belong, from 0."""
        desc, grid, start = Descriptor.of(self.sub.entries), self.sub.grid, (self.sub.i, self.sub.j)[self.axis] - 1
        assert desc is not None and grid is not None
        if not self.count:  # an empty sub(A) may begin anywhere
            return slice(0, 0), np.zeros(0, int)
        lines, part = (desc.layout.rows, desc.layout.cols)[self.axis], grid.coords[self.axis]
        span = start, start + self.count
        return lines.local_window(*span, part), lines.window(*span).indices(part)

    def _put(self, whole: np.ndarray) -> None:
        """Write this process's entries of a vector that all processes have."""
        entries, lines = self._here
        self.array[entries] = whole[lines]

    def _gathered(self, dtype: Any) -> np.ndarray:
        """Return all entries on every process.  Collective over the context."""
        comm, (entries, lines) = self.sub.matrix.grid.comm, self._here
        whole = np.zeros(self.count, dtype)
        for where, values in comm.allgather((lines, self.array[entries])):
            whole[where] = values
        return whole


class Pivots(TiedVector):
    """The argument ipiv: the row of A, from 1, with which local row l was exchanged."""

    name, axis, needed = "ipiv", 0, "LOCr(M_A) + MB_A"

    def _kind(self, dtypes: Dtypes) -> tuple[str, Callable[[np.dtype], bool]]:
        return "integers", lambda dtype: dtype.kind == "i"

    def put(self, pivots: np.ndarray) -> None:
        """Write this process's part of the pivots, which are rows of sub(A) from 0."""
        self._put(pivots + self.sub.i)

    def gathered(self, routine: str) -> np.ndarray:
        """Return all pivots, as rows of sub(A) from 0.  Collective over the context."""
        pivots = self._gathered(np.int64) - self.sub.i
        if wrong := np.flatnonzero((pivots < 0) | (pivots >= self.count)).tolist():  # the same on all processes
            at = wrong[0]
            text = f"ipiv says that row {self.sub.i + at} was exchanged with row {self.sub.i + pivots[at]}"
            raise illegal(routine, self.number, 0, text)
        return pivots


class ColumnOrder(TiedVector):
    """The argument ipiv of p?geqpf: the column of A, from 1, that is local column l of sub(A) P."""

    name, axis, needed = "ipiv", 1, "LOCc(JA + N - 1)"

    @property
    def count(self) -> int:
        return self.sub.cols if self.sub.rows else 0

    def _kind(self, dtypes: Dtypes) -> tuple[str, Callable[[np.dtype], bool]]:
        return "integers", lambda dtype: dtype.kind == "i"

    def put(self, order: np.ndarray) -> None:
        """Write this process's part of the column numbers of sub(A) from 0, in the order of sub(A) P."""
        self._put(order + self.sub.j)


class Tau(TiedVector):
    """The argument tau: the factor of the reflector of local column l."""

    name, axis, needed = "tau", 1, "LOCc(JA + min(M, N) - 1)"

    def _kind(self, dtypes: Dtypes) -> tuple[str, Callable[[np.dtype], bool]]:
        return names(dtypes), dtypes.__contains__

    def put(self, tau: np.ndarray) -> None:
        """Write this process's part of tau."""
        self._put(tau)

    def gathered(self) -> np.ndarray:
        """Return the whole of tau on every process.  Collective over the context."""
        return self._gathered(self.array.dtype)
