"""Descriptors of ScaLAPACK's matrices, of type 1 (9 entries) and 2 (11 entries), and their checks.

    type 1   DTYPE_  CTXT_  M_  N_              MB_  NB_  RSRC_  CSRC_  LLD_
    type 2   DTYPE_  CTXT_  M_  N_  IMB_  INB_  MB_  NB_  RSRC_  CSRC_  LLD_      the first block is IMB_ x INB_

The rules are those of the PBLAS (version 2, PB_Cchkmat), except that replicated matrices, RSRC_ or CSRC_ = -1, are
rejected.
"""

from __future__ import annotations

from operator import index
from typing import Literal, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.interop.scalapack.blacs import grid_of_context

__all__ = [
    "CSRC_", "CTXT_", "DTYPE_", "LLD_", "MB_", "M_", "NB_", "N_", "RSRC_", "IllegalArgument", "descinit", "descinit2",
    "numroc",
]  # fmt: skip
DTYPE_, CTXT_, M_, N_, MB_, NB_, RSRC_, CSRC_, LLD_ = range(9)  # positions in type 1
BLOCK_CYCLIC_2D, BLOCK_CYCLIC_2D_INB = 1, 2  # the types


class IllegalArgument(ArgumentError):
    """Raised for an illegal argument of a ScaLAPACK routine.

    info : -i for argument number i, -(100 i + j) for entry j of the descriptor that is argument number i, from 1.
    """

    info = 0


def illegal(routine: str, number: int, entry: int, text: str) -> IllegalArgument:
    """Return the exception for an argument.   entry : the entry of a descriptor, from 1; 0 for other arguments."""
    where = f"entry {entry} of parameter number {number}" if entry else f"parameter number {number}"
    error = IllegalArgument(f"{routine}: {where} had an illegal value: {text}")
    error.info = -(100 * number + entry) if entry else -number
    return error


def whole_number(value: object) -> int | None:
    """Return an integer, or the integer in a 0-dimensional array, as an int; None for any other value."""
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


class Descriptor(NamedTuple):
    """The entries of a descriptor of either type; for type 1, IMB_ = MB_ and INB_ = NB_."""

    DTYPE_: int
    CTXT_: int
    M_: int
    N_: int
    IMB_: int
    INB_: int
    MB_: int
    NB_: int
    RSRC_: int
    CSRC_: int
    LLD_: int

    @classmethod
    def of(cls, entries: list[int]) -> Descriptor | None:
        """Return the descriptor; None if its type is unknown or entries are missing.  Surplus entries are ignored."""
        names = _ENTRIES.get(entries[0], ()) if entries else ()
        if not names or len(entries) < len(names):
            return None
        named = dict(zip(names, entries))
        return cls(**{"IMB_": named["MB_"], "INB_": named["NB_"]} | named)

    @property
    def layout(self) -> Distribution:
        """The distribution of the matrix; all entries but LLD_ must be legal."""
        grid = grid_of_context(self.CTXT_)
        assert grid is not None
        pr, pc = grid.shape
        return Distribution(
            _dimension(self.M_, self.IMB_, self.MB_, pr, self.RSRC_),
            _dimension(self.N_, self.INB_, self.NB_, pc, self.CSRC_),
        )

    def wrong(self, least: int, lld: Literal["any", "held", "rows"]) -> tuple[str, int, str] | None:
        """Return the name, the number from 1, and the rule of the first illegal entry; None if all entries are legal.

        least : the minimum of M_ and N_.
        lld   : the minimum of LLD_.  "any": 1; "rows": the number of local rows; "held": the number of local rows on
            processes that have local columns, and 1 on other processes.
        """
        grid = grid_of_context(self.CTXT_)
        pr, pc = (1, 1) if grid is None else grid.shape
        for name, legal, rule in (
            ("CTXT_", grid is not None, "is not a context"),
            *((x, getattr(self, x) >= least, f"must be >= {least}") for x in ("M_", "N_")),
            *((x, getattr(self, x) >= 1, "must be >= 1") for x in ("IMB_", "INB_", "MB_", "NB_")),
            ("RSRC_", 0 <= self.RSRC_ < pr, f"must be a row of the {pr} x {pc} grid"),
            ("CSRC_", 0 <= self.CSRC_ < pc, f"must be a column of the {pr} x {pc} grid"),
        ):
            if not legal:
                return self._wrong(name, rule)
        assert grid is not None
        rows, cols = self.layout.local_shape(grid.coords)
        needed = max(1, rows) if lld == "rows" or (lld == "held" and cols) else 1
        rule = f"must be at least {needed}, the number of local rows"
        return None if needed <= self.LLD_ else self._wrong("LLD_", rule)

    def _wrong(self, name: str, rule: str) -> tuple[str, int, str]:
        names = _ENTRIES[self.DTYPE_]
        if name not in names:  # type 1 has MB_ and NB_ for IMB_ and INB_
            name = name[1:]
        return name, names.index(name) + 1, f"is {getattr(self, name)}, {rule}"


_ENTRIES = {
    BLOCK_CYCLIC_2D: tuple(x for x in Descriptor._fields if x not in ("IMB_", "INB_")),
    BLOCK_CYCLIC_2D_INB: Descriptor._fields,
}


def _dimension(n: int, first: int, block: int, parts: int, source: int) -> BlockCyclic:
    """Return the distribution of a dimension, with block sizes limited to its extent."""
    first, block = (min(x, max(1, n)) for x in (first, block))
    return BlockCyclic(n, block, parts, source, block - first)


def numroc(n: int, nb: int, iproc: int, isrcproc: int, nprocs: int) -> int:
    """Return the number of rows or columns that process iproc holds."""
    return BlockCyclic(n, nb, nprocs, isrcproc).count(iproc)


def descinit(m: int, n: int, mb: int, nb: int, irsrc: int, icsrc: int, ictxt: int, lld: int) -> np.ndarray:
    """Return the descriptor of an m x n matrix in mb x nb blocks.  Local.

    lld : leading dimension of the local array, >= max(1, numroc(m, mb, myrow, irsrc, nprow)).
    Raises IllegalArgument with the argument numbers of DESCINIT: m is number 2, lld number 9.
    """
    return _descriptor("DESCINIT", BLOCK_CYCLIC_2D, m, n, mb, nb, irsrc, icsrc, ictxt, lld)


def descinit2(
    m: int, n: int, imb: int, inb: int, mb: int, nb: int, irsrc: int, icsrc: int, ictxt: int, lld: int
) -> np.ndarray:
    """Return the type 2 descriptor of an m x n matrix in mb x nb blocks; the first block is imb x inb.  Local.

    lld : leading dimension of the local array, at least 1; on processes with local columns, at least the local rows.
    Raises IllegalArgument with the argument numbers of PB_DESCINIT2: m is number 2, lld number 11.
    """
    return _descriptor("PB_DESCINIT2", BLOCK_CYCLIC_2D_INB, m, n, imb, inb, mb, nb, irsrc, icsrc, ictxt, lld)


def _descriptor(routine: str, dtype: int, *values: int) -> np.ndarray:
    """Return a checked descriptor.   values : the arguments from number 2 on, in which CTXT_ is last but one."""
    entries = dict(zip((*_ENTRIES[dtype][2:-1], "CTXT_", "LLD_"), values))
    numbers = dict(zip(entries, range(2, 12)))
    for name, value in entries.items():
        if (number := whole_number(value)) is None or not -(2**63) <= number < 2**63:
            raise illegal(routine, numbers[name], 0, f"{name} is {value!r}, must be a 64-bit integer")
    desc = [dtype, *(index(entries[name]) for name in _ENTRIES[dtype][1:])]
    descriptor = Descriptor.of(desc)
    assert descriptor is not None
    wrong = descriptor.wrong(0, "rows" if dtype == BLOCK_CYCLIC_2D else "held")
    if wrong is not None:
        name, _, rule = wrong
        raise illegal(routine, numbers[name], 0, f"{name} {rule}")
    return np.array(desc, np.int64)
