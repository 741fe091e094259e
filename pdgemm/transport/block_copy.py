"""Copy selected rows and columns of one array to rows and columns of another array: packing, unpacking, local copies.

Strided runs of equal length are copied by one NumPy copy of a four-dimensional view, at memory bandwidth; runs
without a common stride are copied by index, about 2^16 elements at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pdgemm.grids.index_map import IndexMap, StridedRuns
from pdgemm.local.arrays.device import Array, of
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.elementwise import CONVERT, Combine

Copy = Callable[[Any, Any], object]  # copy(target, source)
_TILE = 64  # rows and columns of a tile of a transposing copy: source and target stay in cache
_WORTHWHILE = 256  # mean number of elements per view from which views are faster than copies by index


def copy_blocks(source: Array, target: Array, rows: IndexMap, cols: IndexMap, copy: Copy = np.copyto) -> None:
    """Assign target[rows.target, cols.target] := source[rows.source, cols.source], or apply `copy` to the blocks.

    On a device this is one kernel launch; there `copy` is a `Combine`, or the default.
    """
    if type(target) is not np.ndarray and (device := of(target)):
        device.combine_blocks(copy if isinstance(copy, Combine) else CONVERT, target, source, rows, cols)
        return
    pieces = len(rows.strided_runs) * len(cols.strided_runs)
    if not pieces or (pieces > 1 and rows.size * cols.size < _WORTHWHILE * pieces):
        _by_index(source, target, rows, cols, copy)
        return
    across = _down(source) != _down(target)  # row-major to column-major or back
    for r in rows.strided_runs:
        for c in cols.strided_runs:
            there = _view(source, r.source, c.source, r.source_stride, c.source_stride, r, c)
            here = _view(target, r.target, c.target, r.target_stride, c.target_stride, r, c)
            if across and r.length * c.length >= _WORTHWHILE:
                for i, j in product(range(r.repeats), range(c.repeats)):
                    _tiled(there[i, :, j], here[i, :, j], copy)
            else:
                copy(here, there)


def _view(x: np.ndarray, row: int, col: int, down: int, right: int, r: StridedRuns, c: StridedRuns) -> np.ndarray:
    """Return a view of x with the axes (row runs, rows in a run, column runs, columns in a run)."""
    ds, rs = x.strides
    shape, strides = (r.repeats, r.length, c.repeats, c.length), (down * ds, ds, right * rs, rs)
    memory = x if x.flags.c_contiguous else x.T
    if memory.flags.c_contiguous:  # the constructor is five times as fast as as_strided
        return np.ndarray(shape, x.dtype, memory, row * ds + col * rs, strides)
    return as_strided(wire(x[row:, col:]), shape, strides).view(x.dtype)  # as_strided accepts NumPy's own types only


def _tiled(source: np.ndarray, target: np.ndarray, copy: Copy) -> None:
    """Copy one block between row-major and column-major order, tile by tile."""
    rows, cols = source.shape
    if max(rows, cols) <= _TILE:
        copy(target, source)
        return
    for i, j in product(range(0, rows, _TILE), range(0, cols, _TILE)):
        copy(target[i : i + _TILE, j : j + _TILE], source[i : i + _TILE, j : j + _TILE])


def _down(x: np.ndarray) -> bool:
    return x.strides[0] < x.strides[1]


def _by_index(source: np.ndarray, target: np.ndarray, rows: IndexMap, cols: IndexMap, copy: Copy) -> None:
    """Copy run by run along the dimension with the longer runs, and by index along the other dimension."""
    if len(rows.lengths) * cols.size > len(cols.lengths) * rows.size:
        source, target, rows, cols = source.T, target.T, cols, rows
    there, here = cols.indices()
    side_by_side = bool((np.diff(here) == 1).all())
    by_lines = _down(source) and _down(target)  # an index chooses a line that is contiguous, or nearly so
    for r, t, m in zip(rows.source.tolist(), rows.target.tolist(), rows.lengths.tolist()):
        if by_lines:
            _lines(source[r : r + m].T, target[t : t + m].T, there, here, copy)
            continue
        for slab in slabs(m, cols.size):
            x, y = source[r : r + m][slab], target[t : t + m][slab]
            if cols.contiguous:
                copy(y[:, here[0] : here[-1] + 1], x[:, there[0] : there[-1] + 1])
                continue
            # numpy.take is faster than indexing, but first copies an array that is not row-major
            packed = np.take(x, there, axis=1, mode="clip") if x.flags.c_contiguous else x[:, there]
            if side_by_side:
                copy(y[:, here[0] : here[-1] + 1], packed)
            else:
                kept = y[:, here]
                copy(kept, packed)
                y[:, here] = kept


def _lines(x: np.ndarray, y: np.ndarray, there: np.ndarray, here: np.ndarray, copy: Copy) -> None:
    """Copy whole lines by index, y[here] := x[there]; temporary arrays stay in cache."""
    plain = x.dtype == y.dtype and (copy is np.copyto or (isinstance(copy, Combine) and copy.copies))
    sources, targets = _as_slice(there), _as_slice(here)
    if plain and isinstance(targets, slice) and x.flags.c_contiguous and y.flags.c_contiguous:
        np.take(x, there, axis=0, out=y[targets], mode="clip")  # take copies arrays that are not contiguous
        return
    if plain and isinstance(sources, slice):
        y[here] = x[sources]
        return
    for some in slabs(len(there), x.shape[1]):
        lines = x[there[some]]
        if isinstance(targets, slice):
            copy(y[targets][some], lines)
        elif plain:
            y[here[some]] = lines
        else:
            kept = y[here[some]]
            copy(kept, lines)
            y[here[some]] = kept


def _as_slice(indices: np.ndarray) -> slice | np.ndarray:
    """Return indices as a slice where they are consecutive."""
    consecutive = (np.diff(indices) == 1).all()
    return slice(int(indices[0]), int(indices[-1]) + 1) if consecutive else indices
