"""Copies of submatrices from any context to any other: p?gemr2d."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.errors import ArgumentError, GridError
from pdgemm.grids.layout import Layout
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.interop.scalapack.argument_lists import Extent, Kind, RoutineCall, Submatrix
from pdgemm.interop.scalapack.blacs import grid_of_context, meeting
from pdgemm.interop.scalapack.descriptors import CTXT_
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import agree
from pdgemm.support.text import ranks_text


def p_gemr2d(
    m: Extent, n: Extent, A: Annotated[DistMatrix, Submatrix("m", "n")],
    B: Annotated[DistMatrix, Submatrix("m", "n", updated=True)], ictxt: Annotated[int, Kind()],
) -> None:  # fmt: skip
    """Copy sub(A) to sub(B), m x n, from any context to any other.  Collective over the processes of ictxt.

    desca, descb : on processes outside the context of A (of B), CTXT_ is -1, and the other arguments of A (of B) are
              ignored; these processes receive the layout from processes of the context.
    m, n  : if one is 0, nothing is copied, and all other arguments but ictxt are ignored.
    ictxt : a context that includes all processes of A's and B's contexts.
    Each element that moves to another process is sent once.  Other arguments and errors are those of p?gemm.
    """
    if m and n:
        redistribute(A, B)


def check_copy(call: RoutineCall) -> None:
    """Check the arguments, and put sub(A) and sub(B) on one communicator.  Collective over the processes of ictxt."""
    subs, error, ictxt = call.submatrices, None, call.passed["ictxt"]
    grid, layouts = grid_of_context(ictxt), dict[str, Layout]()
    common = meeting([grid] if grid else [sub.grid for sub in subs.values()])
    try:
        call.check("m", "n")
        nothing = 0 in call.values.values()
        call.submatrices = {name: sub for name, sub in subs.items() if not (nothing or sub.absent)}
        call.check(*call.submatrices)
        if grid is None or common is None:
            raise call.illegal("ictxt", f"ictxt is {ictxt!r}, which is not a context")
        call.check_updated()
        layouts = {name: _layout(call, name, common) for name in call.submatrices}
    except Exception as bad:
        error = bad
    if common is None:
        raise error or GridError(f"{call.routine}: no argument has a valid context")
    agree(common.comm, error, call.routine + call.text)
    if not nothing:
        everywhere = common.comm.allgather(layouts)
        call.values |= {name: _joined(call, name, [x.get(name) for x in everywhere], common) for name in subs}
        A, B = call.values["A"], call.values["B"]
        if A.dtype != B.dtype:
            raise call.illegal("b", f"type mismatch: b is an array of {B.dtype}, a of {A.dtype}")


def _layout(call: RoutineCall, name: str, common: ProcessGrid) -> Layout:
    """Return the layout of a submatrix on this process, to be sent to processes outside the submatrix's context."""
    X: DistMatrix = call.values[name]
    place = X.grid.rank_map_in(common, part=True)
    if place is None:
        raise call.illegal("ictxt", f"ictxt must include all processes of the context of {name.lower()}")
    return Layout(X.distribution, place, X.dtype)


def _joined(call: RoutineCall, name: str, views: list[Layout | None], common: ProcessGrid) -> DistMatrix:
    """Return sub(A) over the common communicator.  Collective.

    views : the layout of sub(A) from each process; None from processes outside its context.
    """
    known = next((view for view in views if view), None)
    silent = [rank for rank in known.rank_map if not views[rank]] if known else list(range(len(views)))
    a = name.lower()
    if known is None or silent:
        text = f"CTXT_ of desc{a} is -1 on {ranks_text(silent)}, which must pass the context of the matrix"
        raise call.illegal(f"desc{a}", text, CTXT_ + 1)
    for rank, view in enumerate(views):
        if view and view != known:
            first, other = (f"{x.distribution} on {x.distribution.grid_shape}" for x in (known, view))
            raise ArgumentError(
                f"{call.routine}: the ranks were called with different arguments: sub({a}) is {first} processes for "
                f"rank {views.index(known)}, {other} for rank {rank}"
            )
    grid = common.work_grid(known.distribution.grid_shape, 1, known.rank_map)
    local = call.values[name].stored if name in call.values else np.empty((0, 0), known.dtype)
    return DistMatrix(local, grid, known.distribution, "F")
