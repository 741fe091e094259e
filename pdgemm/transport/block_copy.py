"""Copy selected rows and columns of one array to rows and columns of another array: packing, unpacking, local copies.

Strided runs of equal length are copied by one NumPy copy of a four-dimensional view, at memory bandwidth; runs
without a common stride are copied by index, about 2^16 elements at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pdgemm.grids.index_map import IndexMap, StridedRuns
from pdgemm.local.arrays.device import Array, of
from pdgemm.local.arrays.dtypes import wire
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.elementwise import CONVERT, Combine, set_broadcast

Copy = Callable[[Any, Any], object]  # copy(target, source)
_TILE = 64  # rows and columns of a tile of a transposing copy: source and target stay in cache
_LINES = (512, 4096)  # cache lines of parts of a permuting copy: the first level of cache, or the second one
_NEARBY = 128  # bytes from element to element at which processors fetch the next ones in time
_PART = 8192  # mean number of elements of such a part from which Python's loop costs little
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


def copy_permuted(source: Array, target: Array) -> None:
    """Assign target := source, of any number of axes, where the target is row-major and the source is not.

    NumPy copies in the order of the target, whose last axis varies fastest.  If neighbours in the source are along an
    axis that varies slowly, each cache line of the source is read again for each of its elements.  So the array is
    copied in parts whose lines stay in cache.
    """
    if type(target) is not np.ndarray or target.size < _PART or source.strides[-1] <= _NEARBY:
        set_broadcast(target, source)
        return
    for key in next(filter(None, (_parts(source, lines) for lines in _LINES)), [()]):
        target[key] = source[key]


def _parts(source: np.ndarray, lines: int) -> list[tuple[Any, ...]]:
    """Return the keys of parts that read at most so many cache lines at a time; no key if there are too many parts.

    A part has all indices of the axis along which elements of the source are neighbours, and of slower axes, one index
    of each of the next axes, and some indices of the fastest axes.
    """
    shape, axis, held = source.shape, source.ndim - 1, 1
    near = min(range(source.ndim), key=lambda x: (shape[x] < 2, source.strides[x]))
    while axis > near + 1 and held * shape[axis] <= lines:
        held *= shape[axis]
        axis -= 1
    if axis <= near:
        return [()]
    step = max(1, lines // held)
    if prod(shape[near + 1 : axis]) * -(-shape[axis] // step) * _PART > source.size:
        return []
    whole = (slice(None),) * (near + 1)
    return [
        (*whole, *index, slice(start, start + step))
        for index in np.ndindex(shape[near + 1 : axis])
        for start in range(0, shape[axis], step)
    ]


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
