"""Arguments of the routines: submatrices and scalars, checked on all processes before any message is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import index
from typing import Any, Protocol, TypeVar

import numpy as np

from pdgemm.errors import ArgumentError, GridError, PdgemmError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.interop.scalapack.blacs import grid_of_context, meeting
from pdgemm.interop.scalapack.descriptors import CTXT_, DTYPE_, LLD_, Descriptor, illegal, whole_number
from pdgemm.local.arrays.dtypes import names
from pdgemm.local.blas.local_gemm import leading
from pdgemm.matrix.argument_checks import as_scalar, check_result
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import agree

_TYPES = {"i": ("i4", "i8"), "s": ("f",), "d": ("d",), "c": ("F",), "z": ("D",)}  # both integer sizes of ScaLAPACK
Dtypes = tuple[np.dtype, ...]
Desc = Sequence[int] | np.ndarray
Result = TypeVar("Result")


class Argument(Protocol):
    """An argument of a routine, with a check of its own."""

    def check(self, routine: str, dtypes: Dtypes) -> None: ...


@dataclass
class Scalar:
    """The argument alpha or beta."""

    number: int
    value: Any
    real: bool = False  # the scalar is real even where the matrices are complex

    def check(self, routine: str, dtypes: Dtypes) -> None:
        value = self.value
        if isinstance(value, np.ndarray) and value.size == 1:  # a scalar by reference, as in Fortran
            value = value.item()
        try:
            self.value = as_scalar(value, real_type(dtypes[0]) if self.real else dtypes[0], "it")
        except (PdgemmError, OverflowError) as bad:
            raise illegal(routine, self.number, 0, str(bad)) from None


@dataclass(eq=False)
class Sub:
    """The arguments of sub(A) = A(ia : ia + rows - 1, ja : ja + cols - 1).

    number : the argument number of the local array; ia, ja and the descriptor follow it.
    """

    name: str
    number: int
    array: np.ndarray
    i: int
    j: int
    desc: Any
    rows: int
    cols: int

    @cached_property
    def entries(self) -> list[int]:
        """The entries of the descriptor; empty if it is not a one-dimensional array of integers."""
        try:
            desc = np.asarray(self.desc)
        except Exception:  # any exception: this process must not raise alone
            return []
        entries: list[int] = desc.tolist() if desc.ndim == 1 and desc.dtype.kind in "iu" else []
        return entries

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
        name, number, desc = self.name, self.number, Descriptor.of(self.entries)
        if not isinstance(self.array, np.ndarray) or self.array.dtype not in dtypes:
            passed_type = getattr(self.array, "dtype", type(self.array).__name__)
            raise illegal(routine, number, 0, f"{name} must be an array of {names(dtypes)}, got {passed_type}")
        self.rows, self.cols = index(self.rows), index(self.cols)  # NumPy integers would overflow
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
        grid, desc = self.grid, Descriptor.of(self.entries)
        assert grid is not None and desc is not None
        if 0 in (self.rows, self.cols):
            layout = Distribution.over(grid.shape, (self.rows, self.cols))
            return DistMatrix(np.empty(layout.local_shape(grid.coords), self.array.dtype, "F"), grid, layout, "F")
        spans = (self.i - 1, self.i - 1 + self.rows), (self.j - 1, self.j - 1 + self.cols)
        local = self._local(*desc.layout.local_window(*spans, grid.coords), desc.LLD_)
        return DistMatrix(local, grid, desc.layout.window(*spans), "F")

    def _local(self, rows: slice, cols: slice, lld: int) -> np.ndarray:
        """Return these rows and columns of the local array, which may be larger."""
        array, shape = self.array, (rows.stop, cols.stop)
        if rows.start == rows.stop or cols.start == cols.stop:
            return np.empty((rows.stop - rows.start, cols.stop - cols.start), array.dtype, "F")
        if array.ndim == 1 and array.flags.c_contiguous and array.size >= lld * (cols.stop - 1) + rows.stop:
            array = np.lib.stride_tricks.as_strided(array, shape, (array.itemsize, lld * array.itemsize))
        if array.ndim != 2 or array.shape[0] < rows.stop or array.shape[1] < cols.stop:
            raise ValueError(
                f"the local array has shape {self.array.shape}, {shape[0]} x {shape[1]} with LLD_ {lld} is needed"
            )
        whole = array[: rows.stop, : cols.stop]
        if leading(whole)[0] != b"N" or (cols.stop > 1 and whole.strides[1] != lld * whole.itemsize):
            raise ValueError(
                f"a column-major array with leading dimension LLD_ = {lld} is needed, got strides {array.strides}; "
                "row-major arrays: pdgemm.DistMatrix.from_local"
            )
        return whole[rows, cols]


def check_written(routine: str, result: Sub, operands: Sequence[Sub]) -> None:
    """Raise IllegalArgument where a submatrix cannot be written to, or shares memory with an operand."""
    try:
        check_result(result.name, result.matrix, {x.name: x.matrix for x in operands})
    except ArgumentError as bad:
        raise illegal(routine, result.number, 0, str(bad)) from None


def checked(
    routine: str,
    dtypes: Dtypes,
    check: Callable[[], None],
    arguments: Sequence[Argument],
    *,
    updated: int = 1,
    same: str = "",
) -> tuple[list[DistMatrix], list[Any]]:
    """Return the submatrices and scalars, or raise IllegalArgument for the first illegal one, on all processes.

    arguments : submatrices and scalars in order; `check` checks the arguments before these.   updated : the number of
        submatrices that are written to, the last ones in the list.
    same : text of the arguments that must be equal on all processes, for a routine whose next call may not compare
        these.
    """
    subs = [x for x in arguments if isinstance(x, Sub)]
    common, error = meeting(sub.grid for sub in subs), None
    try:
        check()
        for argument in arguments:
            argument.check(routine, dtypes)
        for sub in subs:
            if common and sub.matrix.grid.rank_map_in(common) is None:
                text = f"CTXT_ of desc{sub.name} is a context of other processes than the other contexts"
                raise illegal(routine, sub.number + 3, CTXT_ + 1, text)
        for at in range(len(subs) - updated, len(subs)):
            check_written(routine, subs[at], subs[:at])
    except Exception as bad:
        error = bad
    if common is None:  # no communicator to agree over
        raise error or GridError(f"{routine}: no context")
    if error is not None or same or subs[0].matrix.grid.comm is not common.comm:
        # a process that skips `agree` joins the same allreduce in the check of its next call, and raises the error
        agree(common.comm, error, routine + same)
    return [sub.matrix for sub in subs], [x.value for x in arguments if isinstance(x, Scalar)]


def real_type(dtype: np.dtype) -> np.dtype:
    """Return the type of the real part of a number."""
    return np.zeros(0, dtype).real.dtype


def letter(value: object) -> str:
    """Return the first character of an option, in upper case."""
    return str(value)[:1].upper()


def check_letter(routine: str, number: int, name: str, value: object, letters: str) -> None:
    """Raise IllegalArgument for an option that is none of `letters`."""
    if not isinstance(value, str) or letter(value) not in tuple(letters):
        *most, last = (f'"{x}"' for x in letters)
        raise illegal(routine, number, 0, f"{name} must be {', '.join(most)} or {last}, got {value!r}")


def at_least_0(routine: str, **extents: tuple[int, int]) -> None:
    """Raise IllegalArgument for a negative extent.   extents : name = (argument number, value)."""
    for name, (number, value) in extents.items():
        if (extent := whole_number(value)) is None:
            raise illegal(routine, number, 0, f"{name} must be an integer, got {value!r}")
        if extent < 0:
            raise illegal(routine, number, 0, f"{name} is {extent}, must be >= 0")


def of_type(name: str, general: Callable[..., Result]) -> partial[Result]:
    """Return a routine for one element type, with the arguments and docstring of the general routine."""
    dtypes = tuple(map(np.dtype, _TYPES[name[1]]))
    routine = partial(general, name.upper(), dtypes)
    routine.__doc__ = f"{name.upper()}, {names(dtypes)}: {general.__doc__}"
    return routine
