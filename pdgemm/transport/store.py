"""The function by which all algorithms write their results."""

from __future__ import annotations

import numpy as np

from pdgemm.grids.index_map import IndexMap, identity
from pdgemm.local.arrays.device import Array, of
from pdgemm.local.arrays.elementwise import CONVERT, Combine, scale
from pdgemm.schedules.staircase import Staircase
from pdgemm.transport.block_copy import copy_blocks


def store(
    C: Array,
    sums: Array | None,
    op: Combine,
    rows: IndexMap | None = None,
    cols: IndexMap | None = None,
    within: Staircase | None = None,
) -> None:
    """Assign C := op(sums, C), which is alpha sums + beta C, in pieces that fit the workspace of `op`.  Local.

    sums : None: C := beta C.
    rows, cols : maps of the rows and columns of `sums` to those of C; by default the identity.
    within : the elements of C that are assigned; None: all of them.

    A result is written only by this function or, where products are accumulated in C, by BLAS with the same beta.
    """
    if within is not None:
        _store_within(within, C, sums, op, rows, cols)
    elif sums is None:
        scale(op.beta, C)
    elif rows is None or cols is None:
        if C.strides[0] < C.strides[1]:
            sums, C = sums.T, C.T
        for piece in op.pieces(*C.shape) if C.size else ():
            op(C[piece], sums[piece])
    elif op.workspace is None:
        copy_blocks(sums, C, rows, cols, op)
    else:
        for r, c in op.pieces(rows.size, cols.size):
            copy_blocks(sums, C, rows.cut(r.start, r.stop), cols.cut(c.start, c.stop), op)


def _store_within(
    within: Staircase, C: Array, sums: Array | None, op: Combine, rows: IndexMap | None, cols: IndexMap | None
) -> None:
    """Assign the elements of C in a triangle as `store` does: in rectangles, and in tiles that the diagonal crosses.

    A device does so in one launch where rows and columns are contiguous.
    """
    if not C.size:
        return
    if rows is None or cols is None:
        rows, cols = map(identity, C.shape)
        steps = within
    else:
        steps = within.part(rows.indices()[1], cols.indices()[1])
    in_place = rows.contiguous and cols.contiguous
    if in_place and (device := of(C)):
        old = C[_range(rows.target, rows.size), _range(cols.target, cols.size)]
        if sums is None:
            device.combine_within(Combine(0, op.beta), old, old, steps)
        else:
            device.combine_within(op, old, sums[_range(rows.source, rows.size), _range(cols.source, cols.size)], steps)
        return
    for r, c, inside, _ in steps.tiles() if in_place else steps.tiles(0):
        here = rows.cut(r.start, r.stop), cols.cut(c.start, c.stop)
        if not in_place:
            assert sums is not None
            store(C, sums, op, *here)
            continue
        old = C[tuple(_range(x.target, x.size) for x in here)]
        new = sums if sums is None else sums[tuple(_range(x.source, x.size) for x in here)]
        if inside:
            store(old, new, op)
        else:
            value = old.copy(order="K")
            store(value, new, op)
            store_corner(old, value, steps.window(r, c))


def _range(first: np.ndarray, size: int) -> slice:
    """Return the indices of a map that has one run, as a slice."""
    return slice(int(first[0]), int(first[0]) + size)


def store_corner(C: Array, value: Array, within: Staircase) -> None:
    """Assign C := value for the elements of C in the triangle `within`; both have the same type.  Local."""
    if device := of(C):
        device.combine_within(CONVERT, C, value, within)
    else:
        np.copyto(C, value, where=within.mask(C.shape[0 if within.flipped else 1]))
