"""PDGEMM, PDTRAN and PDGEMR2D with ScaLAPACK's arguments: descriptors, column-major local arrays, indices from 1.

A program written for ScaLAPACK finds every argument where it always was:

    ictxt = blacs_gridinit(comm, 2, 3)
    nprow, npcol, myrow, mycol = blacs_gridinfo(ictxt)
    desca = descinit(m, k, mb, kb, 0, 0, ictxt, lld)
    pdgemm("N", "T", m, n, k, 1.0, a, 1, 1, desca, b, 1, 1, descb, 0.0, c, 1, 1, descc)

Every routine is collective over the processes of the context, those outside its grid included.  Local arrays are
NumPy arrays with contiguous columns, or one-dimensional; nothing is copied, C is updated where it lies.  Unlike
ScaLAPACK's, sub(A), sub(B) and sub(C) may be aligned in any way, and lie in contexts of different shapes.

Blackford et al., ScaLAPACK Users' Guide, 1997, ch. 4; Choi et al., A proposal for a set of Parallel Basic Linear
Algebra Subprograms, LAPACK Working Note 100, 1995.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from operator import index
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.arguments import as_scalar, check_result
from pdgemm.errors import ArgumentError, GridError, PdgemmError, check_together
from pdgemm.gemm import pdgemm as gemm
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local import leading
from pdgemm.matrix import DistMatrix
from pdgemm.redistribution import redistribute

DTYPE_, CTXT_, M_, N_, MB_, NB_, RSRC_, CSRC_, LLD_ = range(9)
_FIELDS = ("DTYPE_", "CTXT_", "M_", "N_", "MB_", "NB_", "RSRC_", "CSRC_", "LLD_")
_BLOCK_CYCLIC_2D = 1
_LETTERS = (("s", "f"), ("d", "d"), ("c", "F"), ("z", "D"))
_contexts: dict[int, ProcessGrid] = {}
_numbers = count()


class IllegalArgument(ArgumentError):
    """An argument of a ScaLAPACK routine out of its range.

    info : -i for argument number i, -(100 i + j) for entry j of the descriptor that is argument number i, from 1.
    """

    info = 0


# ------------------------------------------------------------------ grids and descriptors
def blacs_gridinit(comm: MPI.Intracomm, nprow: int, npcol: int, order: str = "R") -> int:
    """A context: the first nprow x npcol ranks of comm, row by row ("R") or column by column ("C").  Collective."""
    if nprow * npcol > comm.size:  # on every process alike
        raise GridError(f"a {nprow} x {npcol} grid needs {nprow * npcol} processes, but there are {comm.size}")
    places = np.arange(nprow * npcol).reshape((nprow, npcol), order="F" if order[:1].upper() == "C" else "C")
    return context(ProcessGrid(comm, (nprow, npcol), ranks=places.ravel().tolist()))


def context(grid: ProcessGrid) -> int:
    """A context for a grid that exists."""
    number = next(_numbers)
    _contexts[number] = grid
    return number


def blacs_gridinfo(ictxt: int) -> tuple[int, int, int, int]:
    """(nprow, npcol, myrow, mycol); myrow = mycol = -1 outside the grid, all -1 where there is no such context."""
    grid = _contexts.get(ictxt)
    return (-1, -1, -1, -1) if grid is None else (*grid.shape, *grid.coords)


def blacs_gridexit(ictxt: int) -> None:
    """Give up a context and its communicators.  Collective."""
    if ictxt not in _contexts:
        raise GridError(f"{ictxt} is not a context")
    _contexts.pop(ictxt).free()


def numroc(n: int, nb: int, iproc: int, isrcproc: int, nprocs: int) -> int:
    """Number of rows or columns that process iproc holds."""
    return BlockCyclic(n, nb, nprocs, isrcproc).count(iproc)


def descinit(m: int, n: int, mb: int, nb: int, irsrc: int, icsrc: int, ictxt: int, lld: int) -> np.ndarray:
    """The descriptor of an m x n matrix in mb x nb blocks.  Local.

    lld : leading dimension of the local array, >= max(1, numroc(m, mb, myrow, irsrc, nprow)).
    Raises IllegalArgument with the argument numbers of DESCINIT: m is number 2, lld number 9.
    """
    desc = np.array([_BLOCK_CYCLIC_2D, ictxt, m, n, mb, nb, irsrc, icsrc, lld], np.int64)
    numbers = {CTXT_: 8, M_: 2, N_: 3, MB_: 4, NB_: 5, RSRC_: 6, CSRC_: 7, LLD_: 9}
    wrong = _wrong_entry(desc)
    if wrong is not None:
        raise _illegal("DESCINIT", numbers[wrong.entry], 0, f"{_FIELDS[wrong.entry]} is {wrong.value}, {wrong.rule}")
    return desc


class _Wrong(NamedTuple):
    entry: int
    value: int
    rule: str


def _wrong_entry(desc: np.ndarray) -> _Wrong | None:
    """The first entry of a descriptor that cannot be."""
    dtype, ictxt, m, n, mb, nb, rsrc, csrc, lld = map(int, desc)
    grid = _contexts.get(ictxt)
    pr, pc = (1, 1) if grid is None else grid.shape
    for entry, fine, rule in (
        (DTYPE_, dtype == _BLOCK_CYCLIC_2D, "must be 1 (dense, block-cyclic)"),
        (CTXT_, grid is not None, "is not a context"),
        (M_, m >= 0, "must be >= 0"),
        (N_, n >= 0, "must be >= 0"),
        (MB_, mb >= 1, "must be >= 1"),
        (NB_, nb >= 1, "must be >= 1"),
        (RSRC_, 0 <= rsrc < pr, f"must be a row of the {pr} x {pc} grid"),
        (CSRC_, 0 <= csrc < pc, f"must be a column of the {pr} x {pc} grid"),
    ):
        if not fine:
            return _Wrong(entry, int(desc[entry]), rule)
    assert grid is not None
    rows = numroc(m, mb, grid.coords[0], rsrc, pr)
    return None if lld >= max(1, rows) else _Wrong(LLD_, lld, f"must be at least {max(1, rows)}, the local rows")


def _illegal(routine: str, number: int, entry: int, text: str) -> IllegalArgument:
    """entry : of a descriptor, from 1; 0 for other arguments."""
    where = f"entry {entry} of parameter number {number}" if entry else f"parameter number {number}"
    error = IllegalArgument(f"{routine}: {where} had an illegal value: {text}")
    error.info = -(100 * number + entry) if entry else -number
    return error


# ------------------------------------------------------------------ arguments of all routines
@dataclass
class _Sub:
    """sub(A) = A(ia : ia + rows - 1, ja : ja + cols - 1) as it was handed over.

    number : of the local array among the arguments; ia, ja and the descriptor follow it.
    """

    name: str
    number: int
    array: np.ndarray
    i: int
    j: int
    desc: Any
    rows: int
    cols: int

    @property
    def grid(self) -> ProcessGrid | None:
        desc = np.asarray(self.desc)
        return _contexts.get(int(desc[CTXT_])) if desc.shape == (9,) else None

    def check(self, routine: str, dtype: np.dtype) -> None:
        """Raise IllegalArgument for the first argument that cannot be."""
        name, number = self.name, self.number
        desc = np.asarray(self.desc)
        if desc.shape != (9,) or desc.dtype.kind not in "iu":
            raise _illegal(routine, number + 3, 0, f"desc{name} is not 9 integers, but {self.desc!r}")
        wrong = _wrong_entry(desc)
        if wrong is not None:
            text = f"{_FIELDS[wrong.entry]} of desc{name} is {wrong.value}, {wrong.rule}"
            raise _illegal(routine, number + 3, wrong.entry + 1, text)
        for at, letter, first, extent, whole in (
            (number + 1, "i", self.i, self.rows, int(desc[M_])),
            (number + 2, "j", self.j, self.cols, int(desc[N_])),
        ):
            if _integer(routine, at, f"{letter}{name}", first) < 1 or first + extent - 1 > whole:
                axis = "row" if letter == "i" else "column"
                text = f"{letter}{name} is {first}: {axis}s {first} to {first + extent - 1} are not within 1 to {whole}"
                raise _illegal(routine, at, 0, text)
        if not isinstance(self.array, np.ndarray) or self.array.dtype != dtype:
            found = getattr(self.array, "dtype", type(self.array).__name__)
            raise _illegal(routine, number, 0, f"{name} is an array of {dtype}, got {found}")
        try:
            self.matrix()
        except ValueError as bad:
            raise _illegal(routine, number, 0, f"{name}: {bad}") from bad

    def matrix(self) -> DistMatrix:
        """sub(A), in the caller's memory.  Raises ValueError where the array is not what the descriptor says."""
        grid, (_, _, m, n, mb, nb, rsrc, csrc, lld) = self.grid, map(int, self.desc)
        assert grid is not None
        layout = Distribution(BlockCyclic(m, mb, grid.shape[0], rsrc), BlockCyclic(n, nb, grid.shape[1], csrc))
        rows, cols = layout.local_shape(grid.coords)
        array = self.array
        if array.ndim == 1 and array.flags.c_contiguous and array.size >= lld * (cols - 1) + rows:
            strides = array.itemsize, lld * array.itemsize
            array = np.lib.stride_tricks.as_strided(array, (rows, cols), strides)
        if array.ndim != 2 or array.shape[0] < rows or array.shape[1] < cols:
            raise ValueError(
                f"the local array has shape {self.array.shape}, {rows} x {cols} with LLD_ {lld} are needed"
            )
        local = array[:rows, :cols]
        if local.size and (leading(local)[0] != b"N" or (cols > 1 and local.strides[1] != lld * local.itemsize)):
            raise ValueError(
                f"a column-major array with leading dimension LLD_ = {lld} is needed, got strides {array.strides}; "
                "row-major arrays: pdgemm.DistMatrix.from_local"
            )
        first = self.i - 1, self.j - 1
        whole = DistMatrix(local, grid, layout, "F")
        return whole[first[0] : first[0] + self.rows, first[1] : first[1] + self.cols]


def _checked(
    routine: str, dtype: np.dtype, subs: Sequence[_Sub], check: Callable[[], None], scalars: dict[int, Any]
) -> tuple[list[DistMatrix], list[Any]]:
    """The submatrices and scalars, or the same exception on all processes.

    scalars : alpha and beta by their number.
    """
    grid = next((sub.grid for sub in subs if sub.grid is not None), None)
    error, matrices, numbers = None, list[DistMatrix](), list[Any]()
    try:
        check()
        for sub in subs:
            sub.check(routine, dtype)
        matrices = [sub.matrix() for sub in subs]
        *operands, result = subs
        try:
            check_result(result.name, matrices[-1], {x.name: y for x, y in zip(operands, matrices)})
        except ArgumentError as bad:
            raise _illegal(routine, result.number, 0, str(bad)) from bad
        for number, value in scalars.items():
            try:
                numbers.append(as_scalar(value, dtype, "it"))
            except PdgemmError as bad:
                raise _illegal(routine, number, 0, str(bad)) from bad
    except Exception as bad:
        error = bad
    if error is not None and grid is not None:
        check_together(grid.comm, error, routine)  # the others meet it in the check of what they go on with
    if error is not None or grid is None:  # without a context there is no communicator to agree on
        raise error or GridError(f"{routine}: no context")
    return matrices, numbers


def _integer(routine: str, number: int, name: str, value: object) -> int:
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _illegal(routine, number, 0, f"{name} is an integer, got {value!r}") from None


def _at_least_0(routine: str, **extents: tuple[int, int]) -> None:
    """extents : name = (argument number, value)."""
    for name, (number, value) in extents.items():
        if _integer(routine, number, name, value) < 0:
            raise _illegal(routine, number, 0, f"{name} is {value}, must be >= 0")


# ------------------------------------------------------------------ the routines
def _gemm(routine: str, dtype: np.dtype, transa: str, transb: str, m: int, n: int, k: int, alpha: complex,
          a: np.ndarray, ia: int, ja: int, desca: Sequence[int] | np.ndarray,
          b: np.ndarray, ib: int, jb: int, descb: Sequence[int] | np.ndarray, beta: complex,
          c: np.ndarray, ic: int, jc: int, descc: Sequence[int] | np.ndarray) -> None:  # fmt: skip
    """sub(C) := alpha op(sub(A)) op(sub(B)) + beta sub(C).  Collective over the context.

    transa, transb : "N", "T" or "C".
    m, n, k : op(sub(A)) is m x k, op(sub(B)) k x n, sub(C) m x n.
    a, b, c : local arrays, column-major with the leading dimension that the descriptor says, or one-dimensional.
              c is updated in place where it belongs to sub(C), not read where beta is 0, and nowhere else.
    ia, ja  : first row and column of sub(A) in A, from 1; any.  Likewise ib, jb, ic, jc.
    desca, descb, descc : descriptors of nine integers, as `descinit` makes them.

    Cost, algorithm and error as for `pdgemm.pdgemm`.
    Raises IllegalArgument on every process, before anything is sent; its `info` is ScaLAPACK's INFO.
    """
    ops = [str(trans)[:1].upper() for trans in (transa, transb)]
    subs = [
        _Sub("a", 7, a, ia, ja, desca, *((m, k) if ops[0] == "N" else (k, m))),
        _Sub("b", 11, b, ib, jb, descb, *((k, n) if ops[1] == "N" else (n, k))),
        _Sub("c", 16, c, ic, jc, descc, m, n),
    ]

    def check() -> None:
        for number, (name, letter, given) in enumerate((("transa", ops[0], transa), ("transb", ops[1], transb)), 1):
            if not isinstance(given, str) or letter not in ("N", "T", "C"):
                raise _illegal(routine, number, 0, f'{name} is "N", "T" or "C", got {given!r}')
        _at_least_0(routine, m=(3, m), n=(4, n), k=(5, k))

    (A, B, C), (alpha, beta) = _checked(routine, dtype, subs, check, {6: alpha, 15: beta})
    gemm(alpha, A, B, beta, C, transa=ops[0], transb=ops[1])


def _tran(routine: str, dtype: np.dtype, m: int, n: int, alpha: complex,
          a: np.ndarray, ia: int, ja: int, desca: Sequence[int] | np.ndarray, beta: complex,
          c: np.ndarray, ic: int, jc: int, descc: Sequence[int] | np.ndarray) -> None:  # fmt: skip
    """sub(C) := beta sub(C) + alpha sub(A)^T, or ^H for p?tranc; sub(C) is m x n.  Collective over the context.

    Each element that changes its process is sent once.  Arguments and errors as for p?gemm.
    """
    subs = [_Sub("a", 4, a, ia, ja, desca, n, m), _Sub("c", 9, c, ic, jc, descc, m, n)]
    scalars = {3: alpha, 8: beta}
    (A, C), (alpha, beta) = _checked(routine, dtype, subs, lambda: _at_least_0(routine, m=(1, m), n=(2, n)), scalars)
    redistribute(A.H if routine.endswith("C") else A.T, C, alpha=alpha, beta=beta)


def _gemr2d(routine: str, dtype: np.dtype, m: int, n: int,
            a: np.ndarray, ia: int, ja: int, desca: Sequence[int] | np.ndarray,
            b: np.ndarray, ib: int, jb: int, descb: Sequence[int] | np.ndarray, ictxt: int) -> None:  # fmt: skip
    """sub(B) := sub(A), m x n, from any context to any other over the same processes.  Collective.

    ictxt : a context over all processes of A's and B's.
    Each element that changes its process is sent once.  Arguments and errors as for p?gemm.
    """
    subs = [_Sub("a", 3, a, ia, ja, desca, m, n), _Sub("b", 7, b, ib, jb, descb, m, n)]

    def check() -> None:
        _at_least_0(routine, m=(1, m), n=(2, n))
        if ictxt not in _contexts:
            raise _illegal(routine, 11, 0, f"ictxt is {ictxt}, which is not a context")

    (A, B), _ = _checked(routine, dtype, subs, check, {})
    redistribute(A, B)


def _routine(name: str, char: str, general: Callable[..., None]) -> partial[None]:
    """A routine for one element type, with the arguments and docstring of the general one."""
    routine = partial(general, name.upper(), np.dtype(char))
    routine.__doc__ = f"{name.upper()}, {np.dtype(char)}: {general.__doc__}"
    return routine


psgemm, pdgemm, pcgemm, pzgemm = (_routine(f"p{letter}gemm", char, _gemm) for letter, char in _LETTERS)
psgemr2d, pdgemr2d, pcgemr2d, pzgemr2d = (_routine(f"p{letter}gemr2d", char, _gemr2d) for letter, char in _LETTERS)
pstran, pdtran = _routine("pstran", "f", _tran), _routine("pdtran", "d", _tran)
pctranu, pztranu = _routine("pctranu", "F", _tran), _routine("pztranu", "D", _tran)
pctranc, pztranc = _routine("pctranc", "F", _tran), _routine("pztranc", "D", _tran)
