"""Vectors of a submatrix: ipiv and tau, distributed as its rows or columns, and w and s, the same on all processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from pdgemm.interop.scalapack.argument_lists import Kind, RoutineCall, real_type
from pdgemm.interop.scalapack.submatrices import SubmatrixArguments
from pdgemm.local.arrays.dtypes import names


@dataclass(frozen=True)
class Vector(Kind):
    """A one-dimensional array that belongs to a submatrix.

    of       : the name of sub(A).
    elements : "index": numbers of rows or columns of A, from 1; "number": of A's type; "real": of the type of its real
               part.
    axis     : 0: entry l belongs to local row l of A, from the first row of sub(A) on; 1: entry l belongs to local
               column l, from its first column on; None: all processes have all entries.
    length   : the name of the argument that is the global number of entries; "": the smaller extent of sub(A).
    updated  : the routine writes to it.
    """

    passed = np.ndarray
    of: str
    elements: Literal["index", "number", "real"]
    axis: int | None = None
    length: str = ""
    updated: bool = False

    def check(self, call: RoutineCall, name: str) -> VectorArgument:
        array, vector = call.passed[name], VectorArgument(self, call, name)
        types = call.dtypes if self.elements == "number" else tuple(map(real_type, call.dtypes))
        described = "integers" if self.elements == "index" else names(types)
        element = getattr(array, "dtype", np.dtype(object))
        legal = element.kind == "i" if self.elements == "index" else element in types
        if not isinstance(array, np.ndarray) or array.ndim != 1 or not legal:
            passed_type = f"{array.ndim}-D of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            raise call.illegal(name, f"{name} must be a 1-D array of {described}, got {passed_type}")
        if len(array) < vector.here[0].stop:
            extent = self.length.upper() or "min(M, N)"
            needed = {None: extent, 0: "LOCr(M_A) + MB_A", 1: f"LOCc(JA + {extent} - 1)"}[self.axis]
            raise call.illegal(name, f"{name} has {len(array)} entries, {needed} are needed")
        if self.updated and not array.flags.writeable:
            raise call.illegal(name, f"{name} is read-only")
        return vector


class VectorArgument:
    """A vector argument of one call, with `count` entries on all processes together.

    first : for elements that are indices, the first row or column of sub(A) in A, from 1; 0 for other elements.
    """

    def __init__(self, kind: Vector, call: RoutineCall, name: str) -> None:
        self.call, self.name, self.axis = call, name, kind.axis
        self.array: Any = call.passed[name]
        self.sub: SubmatrixArguments = call.submatrices[kind.of]
        self.count = call.extent(kind.length) if kind.length else min(self.sub.rows, self.sub.cols)
        self.first = (self.sub.i, self.sub.j)[kind.axis or 0] if kind.elements == "index" else 0

    @cached_property
    def here(self) -> tuple[slice, Any]:
        """The slice of this process's entries, and the rows or columns of sub(A) to which they belong, from 0."""
        if self.axis is None:
            return slice(0, self.count), slice(0, self.count)
        desc, grid = self.sub.descriptor, self.sub.grid
        assert desc is not None and grid is not None
        if 0 in (self.sub.rows, self.sub.cols, self.count):  # an empty sub(A) may begin anywhere
            return slice(0, 0), np.zeros(0, int)
        start, lines = (self.sub.i, self.sub.j)[self.axis] - 1, (desc.layout.rows, desc.layout.cols)[self.axis]
        span, part = (start, start + self.count), grid.coords[self.axis]
        return lines.local_window(*span, part), lines.window(*span).indices(part)

    def put(self, values: np.ndarray) -> None:
        """Store this process's entries of `values`, which all processes hold; indices in it count from 0 in sub(A).

        If all processes have all entries, there may be fewer values; the last entries are then not changed.
        """
        entries, lines = self.here
        if self.axis is None:
            entries = slice(0, len(values))
        self.array[entries] = values[lines] + self.first

    def gathered(self) -> np.ndarray:
        """Return all entries on every process; indices count from 0 in sub(A).  Collective over the context.

        Raises IllegalArgument for an index outside of sub(A).
        """
        entries, lines = self.here
        whole = np.zeros(self.count, np.int64 if self.first else self.array.dtype)
        for where, values in self.sub.matrix.grid.comm.allgather((lines, self.array[entries])):
            whole[where] = values - self.first
        if self.first and (wrong := np.flatnonzero((whole < 0) | (whole >= self.count)).tolist()):  # all raise
            at = wrong[0]
            rows = f"row {self.first + at} was exchanged with row {self.first + whole[at]}"
            text = f"{self.name} says that {rows}, which is outside sub(A)"
            raise self.call.illegal(self.name, text)
        return whole
