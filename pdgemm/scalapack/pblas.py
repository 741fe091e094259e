"""The routines: arguments are checked on all processes, then passed to `gemm` and `redistribute`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import index
from typing import Any, NamedTuple

import numpy as np

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.arrays.dtypes import names
from pdgemm.blas.local_gemm import leading
from pdgemm.errors import ArgumentError, GridError, PdgemmError
from pdgemm.gemm import pdgemm as gemm
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.matrix.argument_checks import as_scalar, check_result
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.scalapack.blacs import grid_of, meeting
from pdgemm.scalapack.descriptors import CTXT_, DTYPE_, LLD_, Descriptor, illegal, whole_number
from pdgemm.support.agreement import agree
from pdgemm.support.text import ranks_text

__all__ = [
    "pcgemm", "pcgemr2d", "pctranc", "pctranu", "pdgemm", "pdgemr2d", "pdtran", "pigemr2d", "psgemm", "psgemr2d",
    "pstran", "pzgemm", "pzgemr2d", "pztranc", "pztranu",
]  # fmt: skip
_TYPES = {"i": ("i4", "i8"), "s": ("f",), "d": ("d",), "c": ("F",), "z": ("D",)}  # both integer sizes of ScaLAPACK
Dtypes = tuple[np.dtype, ...]


# ------------------------------------------------------------------ arguments of all routines
@dataclass
class _Scalar:
    """The argument alpha or beta."""

    number: int
    value: Any

    def check(self, routine: str, dtypes: Dtypes) -> None:
        value = self.value
        if isinstance(value, np.ndarray) and value.size == 1:  # by reference, as in Fortran
            value = value.item()
        try:
            self.value = as_scalar(value, dtypes[0], "it")
        except (PdgemmError, OverflowError) as bad:
            raise illegal(routine, self.number, 0, str(bad)) from None


@dataclass(eq=False)
class _Sub:
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
        return grid_of(self.entries[CTXT_]) if len(self.entries) > CTXT_ else None

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
            found = getattr(self.array, "dtype", type(self.array).__name__)
            raise illegal(routine, number, 0, f"{name} must be an array of {names(dtypes)}, got {found}")
        self.rows, self.cols = index(self.rows), index(self.cols)  # NumPy's would overflow
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
            raise illegal(routine, number + 3, wrong.entry, f"{wrong.name} of desc{name} {wrong.rule}")
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
        """Return these rows and columns of the local array, which may end behind the last of them."""
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


def _check_result(routine: str, result: _Sub, operands: Sequence[_Sub]) -> None:
    try:
        check_result(result.name, result.matrix, {x.name: x.matrix for x in operands})
    except ArgumentError as bad:
        raise illegal(routine, result.number, 0, str(bad)) from None


def _checked(
    routine: str, dtypes: Dtypes, check: Callable[[], None], arguments: Sequence[_Sub | _Scalar]
) -> tuple[list[DistMatrix], list[Any]]:
    """Return the submatrices and scalars, or raise IllegalArgument for the first illegal one, on all processes.

    arguments : in order, the result last; `check` checks the arguments before them.
    """
    subs = [x for x in arguments if isinstance(x, _Sub)]
    common, error = meeting(sub.grid for sub in subs), None
    try:
        check()
        for argument in arguments:
            argument.check(routine, dtypes)
        for sub in subs:
            if common and sub.matrix.grid.rank_map_in(common) is None:
                text = f"CTXT_ of desc{sub.name} is a context of other processes than the other contexts"
                raise illegal(routine, sub.number + 3, CTXT_ + 1, text)
        _check_result(routine, subs[-1], subs[:-1])
    except Exception as bad:
        error = bad
    if common is None:  # there is no communicator to agree on
        raise error or GridError(f"{routine}: no context")
    if error is not None or subs[0].matrix.grid.comm is not common.comm:
        agree(common.comm, error, routine)  # else the check of the call that follows raises the error on all
    return [sub.matrix for sub in subs], [x.value for x in arguments if isinstance(x, _Scalar)]


def _at_least_0(routine: str, **extents: tuple[int, int]) -> None:
    """Raise IllegalArgument for a negative extent.   extents : name = (argument number, value)."""
    for name, (number, value) in extents.items():
        if (found := whole_number(value)) is None:
            raise illegal(routine, number, 0, f"{name} must be an integer, got {value!r}")
        if found < 0:
            raise illegal(routine, number, 0, f"{name} is {found}, must be >= 0")


# ------------------------------------------------------------------ the routines
def _gemm(routine: str, dtypes: Dtypes, transa: str, transb: str, m: int, n: int, k: int, alpha: complex,
          a: np.ndarray, ia: int, ja: int, desca: Sequence[int] | np.ndarray,
          b: np.ndarray, ib: int, jb: int, descb: Sequence[int] | np.ndarray, beta: complex,
          c: np.ndarray, ic: int, jc: int, descc: Sequence[int] | np.ndarray) -> None:  # fmt: skip
    """Compute sub(C) := alpha op(sub(A)) op(sub(B)) + beta sub(C).  Collective over the context.

    transa, transb : "N", "T" or "C".
    m, n, k : op(sub(A)) is m x k, op(sub(B)) k x n, sub(C) m x n.
    a, b, c : local arrays, column-major with the leading dimension of the descriptor, or one-dimensional.
              The elements of sub(C) are updated in place, and not read where beta is 0; no others are written.
    ia, ja  : first row and column of sub(A) in A, from 1, without restrictions.  Likewise ib, jb, ic, jc.
    desca, descb, descc : descriptors, as returned by `descinit` or `descinit2`.  An empty submatrix (m, n or k = 0)
              may begin anywhere, and its matrix may be empty.

    Cost, algorithm and error are those of `pdgemm.pdgemm`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.
    """
    ops: list[Any] = [str(trans)[:1].upper() for trans in (transa, transb)]
    sub_a = _Sub("a", 7, a, ia, ja, desca, *((m, k) if ops[0] == "N" else (k, m)))
    sub_b = _Sub("b", 11, b, ib, jb, descb, *((k, n) if ops[1] == "N" else (n, k)))
    sub_c = _Sub("c", 16, c, ic, jc, descc, m, n)

    def check() -> None:
        for number, (name, letter, given) in enumerate((("transa", ops[0], transa), ("transb", ops[1], transb)), 1):
            if not isinstance(given, str) or letter not in ("N", "T", "C"):
                raise illegal(routine, number, 0, f'{name} must be "N", "T" or "C", got {given!r}')
        _at_least_0(routine, m=(3, m), n=(4, n), k=(5, k))

    arguments: list[_Sub | _Scalar] = [_Scalar(6, alpha), sub_a, sub_b, _Scalar(15, beta), sub_c]
    (A, B, C), (alpha, beta) = _checked(routine, dtypes, check, arguments)
    gemm(alpha, A, B, beta, C, transa=ops[0], transb=ops[1])


def _tran(routine: str, dtypes: Dtypes, m: int, n: int, alpha: complex,
          a: np.ndarray, ia: int, ja: int, desca: Sequence[int] | np.ndarray, beta: complex,
          c: np.ndarray, ic: int, jc: int, descc: Sequence[int] | np.ndarray) -> None:  # fmt: skip
    """Compute sub(C) := beta sub(C) + alpha sub(A)^T, or ^H for p?tranc, m x n.  Collective over the context.

    Each element that changes its process is sent once.  Arguments and errors are those of p?gemm.
    """
    sub_a, sub_c = _Sub("a", 4, a, ia, ja, desca, n, m), _Sub("c", 9, c, ic, jc, descc, m, n)
    check = partial(_at_least_0, routine, m=(1, m), n=(2, n))
    arguments: list[_Sub | _Scalar] = [_Scalar(3, alpha), sub_a, _Scalar(8, beta), sub_c]
    (A, C), (alpha, beta) = _checked(routine, dtypes, check, arguments)
    redistribute(A.H if routine.endswith("C") else A.T, C, alpha=alpha, beta=beta)


def _gemr2d(routine: str, dtypes: Dtypes, m: int, n: int,
            a: np.ndarray, ia: int, ja: int, desca: Sequence[int] | np.ndarray,
            b: np.ndarray, ib: int, jb: int, descb: Sequence[int] | np.ndarray, ictxt: int) -> None:  # fmt: skip
    """Copy sub(A) to sub(B), m x n, from any context to any other.  Collective over the processes of ictxt.

    desca, descb : on processes outside the context of A (of B), CTXT_ is -1, and the other arguments of A are ignored;
              the other processes send them.
    m, n  : if one is 0, nothing is copied, and all other arguments but ictxt are ignored.
    ictxt : a context that includes all processes of A's and B's contexts.
    Each element that changes its process is sent once.  Other arguments and errors are those of p?gemm.
    """
    sub_a, sub_b = subs = _Sub("a", 3, a, ia, ja, desca, m, n), _Sub("b", 7, b, ib, jb, descb, m, n)
    grid, error, known = grid_of(ictxt), None, list[_Known | None]()
    common = meeting([grid] if grid else [sub.grid for sub in subs])
    try:
        _at_least_0(routine, m=(1, m), n=(2, n))
        here = [sub for sub in subs if m and n and not sub.absent]
        for sub in here:
            sub.check(routine, dtypes)
        if grid is None or common is None:
            raise illegal(routine, 11, 0, f"ictxt is {ictxt!r}, which is not a context")
        if sub_b in here:
            _check_result(routine, sub_b, [sub_a] if sub_a in here else [])
        known = [_known(routine, sub, common) if sub in here else None for sub in subs]
    except Exception as bad:
        error = bad
    if common is None:
        raise error or GridError(f"{routine}: no context")
    agree(common.comm, error, f"{routine}, m={m}, n={n}")
    if not (m and n):
        return
    views_a, views_b = zip(*common.comm.allgather(known))
    A, B = _joined(routine, sub_a, views_a, common), _joined(routine, sub_b, views_b, common)
    if A.dtype != B.dtype:
        raise illegal(routine, sub_b.number, 0, f"type mismatch: b is an array of {B.dtype}, a of {A.dtype}")
    redistribute(A, B)


class _Known(NamedTuple):
    """The description of a submatrix that a process of its context sends to the others."""

    shape: tuple[int, int]  # of the grid
    place: tuple[int, ...]  # ranks in the common communicator
    layout: Distribution
    dtype: np.dtype


def _known(routine: str, sub: _Sub, common: ProcessGrid) -> _Known:
    X = sub.matrix
    place = X.grid.rank_map_in(common, part=True)
    if place is None:
        raise illegal(routine, 11, 0, f"ictxt lacks processes of the context of {sub.name}")
    return _Known(X.grid.shape, place, X.distribution, X.dtype)


def _joined(routine: str, sub: _Sub, views: Sequence[_Known | None], common: ProcessGrid) -> DistMatrix:
    """Return sub(A) over the common communicator.  Collective.

    views : the description of sub(A) from each process; None from those outside its context.
    """
    known = next((view for view in views if view), None)
    silent = [rank for rank in known.place if not views[rank]] if known else range(len(views))
    if known is None or silent:
        text = f"CTXT_ of desc{sub.name} is -1 on {ranks_text(list(silent))}, which must pass the context of the matrix"
        raise illegal(routine, sub.number + 3, CTXT_ + 1, text)
    for rank, view in enumerate(views):
        if view and view != known:
            raise ArgumentError(
                f"{routine}: the ranks were called with different arguments: sub({sub.name}) is {known.layout} on "
                f"{known.shape} processes for rank {views.index(known)}, {view.layout} on {view.shape} for rank {rank}"
            )
    local = np.empty((0, 0), known.dtype) if sub.absent else sub.matrix.stored
    return DistMatrix(local, common.work_grid(known.shape, 1, known.place), known.layout, "F")


def _routine(name: str, general: Callable[..., None]) -> partial[None]:
    """Return a routine for one element type, with the arguments and docstring of the general one."""
    dtypes = tuple(map(np.dtype, _TYPES[name[1]]))
    routine = partial(general, name.upper(), dtypes)
    routine.__doc__ = f"{name.upper()}, {names(dtypes)}: {general.__doc__}"
    return routine


psgemm, pdgemm, pcgemm, pzgemm = (_routine(f"p{letter}gemm", _gemm) for letter in "sdcz")
pigemr2d, psgemr2d, pdgemr2d, pcgemr2d, pzgemr2d = (_routine(f"p{letter}gemr2d", _gemr2d) for letter in "isdcz")
pstran, pdtran = _routine("pstran", _tran), _routine("pdtran", _tran)
pctranu, pztranu = _routine("pctranu", _tran), _routine("pztranu", _tran)
pctranc, pztranc = _routine("pctranc", _tran), _routine("pztranc", _tran)
