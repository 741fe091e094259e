"""The function by which all algorithms write their results."""

from __future__ import annotations

from pdgemm.arrays.device import Array
from pdgemm.arrays.elementwise import Combine, scale
from pdgemm.grids.index_map import IndexMap
from pdgemm.movers.block_copy import copy_blocks


def store(
    C: Array, sums: Array | None, op: Combine, rows: IndexMap | None = None, cols: IndexMap | None = None
) -> None:
    """Assign C := op(sums, C), which is alpha sums + beta C, in pieces that fit the workspace of `op`.  Local.

    sums : None: there is nothing to add, and C := beta C.
    rows, cols : maps of the rows and columns of `sums` to those of C; by default the identity.

    Apart from this function only BLAS writes to a result, with the same beta, where products are accumulated in C.
    """
    if sums is None:
        scale(op.beta, C)
    elif rows is None or cols is None:
        if C.strides[0] < C.strides[1]:
            sums, C = sums.T, C.T
        for piece in op.pieces(*C.shape) if C.size else ():
            op(C[piece], sums[piece])
    elif op.room is None:
        copy_blocks(sums, C, rows, cols, op)
    else:
        for r, c in op.pieces(rows.size, cols.size):
            copy_blocks(sums, C, rows.cut(r.start, r.stop), cols.cut(c.start, c.stop), op)
