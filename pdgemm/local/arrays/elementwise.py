"""Arithmetic on the elements of one rank: Y := alpha op(X) + beta Y, and NumPy's functions of them.

CuPy's arrays implement NumPy's functions by NumPy's protocols; functions that CuPy lacks, or that differ, are here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from pdgemm.local.arrays.device import Array, Event, Pinned, beside, of, to_host
from pdgemm.local.arrays.dtypes import BLAS, NARROW, arithmetic
from pdgemm.local.arrays.element_functions import ElementFunction, fill, slabs, tiles
from pdgemm.local.arrays.folds import at_a_time

_PIECE = 1 << 22  # bytes that are copied between the host and a device at a time, a power of two


@dataclass(slots=True, eq=False)
class Combine:
    """The operation Y := alpha op(X) + beta Y between any types, where op(X) is X or its conjugate.  Local.

    through : a type to which each number is rounded first; only without workspace.
    workspace : (2, numbers), in the type of the arithmetic, for as many elements as are combined at a time.
        A device needs none.  On the host, without workspace, Y becomes op(X), whatever alpha and beta are.
    """

    alpha: Any = 1
    beta: Any = 0
    workspace: np.ndarray | None = None
    conjugated: bool = False
    through: np.dtype | None = None

    def __call__(self, Y: Array, X: Array) -> None:
        if type(Y) is not np.ndarray and (device := of(Y)):
            device.combine(self, Y, X)
            return
        if self.workspace is None:
            if self.through is None:
                _convert(Y, X)
            for slab in slabs(*X.shape) if self.through and X.size else ():
                Y[slab] = X[slab].astype(self.through)
            if self.conjugated:
                np.conjugate(Y, out=Y)
            return
        value, old = self.workspace[:, : X.size].reshape(2, *X.shape)
        np.copyto(value, X, casting="unsafe")
        if self.conjugated:
            np.conjugate(value, out=value)
        if self.alpha != 1:
            value *= self.alpha
        if self.beta != 0:
            np.copyto(old, Y, casting="unsafe")
            if self.beta != 1:
                old *= self.beta
            value += old
        np.copyto(Y, value, casting="unsafe")

    @property
    def copies(self) -> bool:
        """Whether the operation on the host is Y := X, without arithmetic or rounding to another type."""
        return self.workspace is None and self.through is None and not self.conjugated

    def pieces(self, rows: int, cols: int) -> Iterator[tuple[slice, slice]]:
        """Yield rows x cols in tiles that fit the workspace."""
        return tiles(rows, cols, max(1, rows * cols) if self.workspace is None else self.workspace.shape[1])


CONVERT, CONJUGATE = Combine(), Combine(conjugated=True)


def _convert(Y: np.ndarray, X: np.ndarray) -> None:
    """Compute Y := X; 8-bit floats are converted by a table, in an eighth of the time of ml_dtypes."""
    table = _numbers(X.dtype, Y.dtype) if X.itemsize == 1 and X.ndim == 2 else None
    if table is None:
        np.copyto(Y, X, casting="unsafe")
        return
    if X.strides[0] < X.strides[1]:
        X, Y = X.T, Y.T
    for slab in slabs(*X.shape) if X.size else ():
        np.take(table, X[slab].view(np.uint8), out=Y[slab], mode="wrap")


@lru_cache(maxsize=16)
def _numbers(dtype: np.dtype, to: np.dtype) -> np.ndarray | None:
    """Return all 256 numbers of an 8-bit float type in a wider type of BLAS; None for any other types."""
    if dtype not in NARROW or to not in BLAS:
        return None
    return np.arange(256, dtype=np.uint8).view(dtype).astype(to)


def paired(workspace: Array) -> Array | None:
    """Return workspace in the shape that a Combine takes; None if it is empty, because a device needs none."""
    return workspace.reshape(2, -1) if workspace.size else None


def scale(beta: Any, C: Array) -> None:
    """Compute C := beta C in place; C is not read where beta is 0."""
    if type(C) is not np.ndarray and (device := of(C)):
        if beta != 1 and C.size:
            device.combine(Combine(0, beta), C, C)
        return
    if beta == 0:
        C[...] = 0
    elif beta != 1:
        np.multiply(C, beta, out=C, dtype=arithmetic(C.dtype), casting="unsafe")


def add_elements(Y: Array, X: Array) -> None:
    """Compute Y := Y + X for arrays of the same type.  Local."""
    if type(Y) is not np.ndarray and (device := of(Y)):
        device.combine(Combine(1, 1), Y, X)
    else:
        Y += X


def set_elements(target: Array, source: Array) -> None:
    """Copy `source` to `target`, of the same shape, on the host, or between host and device.  Complete on return.

    Between host and device, pieces are copied through two buffers of pinned memory: while the device copies one, the
    host copies the other.  Neither side needs memory for a second copy of all elements, for any strides.
    """
    device, upward = of(target) or of(source), of(target) is not None
    if device is None:
        target[...] = source
    if device is None or not source.size:
        return
    host, there = (source, target) if upward else (target, source)
    if there.strides[0] < there.strides[1]:  # whole rows are copied
        host, there = host.T, there.T
    dtype = source.dtype if upward and source.dtype.isnative else there.dtype
    words = 1 << (min(there.size, _PIECE // dtype.itemsize) - 1).bit_length()  # few sizes, so that memory is used again
    buffers, stream = device.pinned(2 * words, dtype).shared_out(2), device.current_stream()
    copies = deque[tuple[Event, Any, np.ndarray]]()  # at most one for each buffer

    def complete() -> None:
        event, tile, piece = copies.popleft()
        event.synchronize()
        if not upward:
            host[tile] = piece

    try:
        for number, tile in enumerate(tiles(there.shape[0], there.shape[1], words)):
            if len(copies) == 2:
                complete()
            part = there[tile]
            piece = Pinned(*(x[: part.size].reshape(part.shape) for x in buffers[number % 2]))
            if upward:
                piece.host[...] = host[tile]
                CONVERT(part, piece.device)
            else:
                CONVERT(piece.device, part)
            copies.append((stream.record(), tile, piece.host))
        while copies:
            complete()
    except BaseException:
        stream.synchronize()  # before the pinned memory is reused
        raise


def set_broadcast(target: Array, source: Array) -> None:
    """Set an array of any number of dimensions to another one that is broadcast to it.  Local.

    source : on the host, or on the device of `target`, which starts the work in its current stream.
    """
    device = of(target)
    if device is None:
        target[...] = source
    elif target.size:
        source = beside(np.broadcast_to(source, target.shape), target)
        same = source.dtype == target.dtype or is_extension(target.dtype)
        CONVERT(target, source if same else source.astype(target.dtype))


def on_host(x: Array) -> np.ndarray:
    """Return the elements in memory of the host: the array itself, or a copy that `set_elements` makes."""
    if of(x) is None:
        return x
    host: np.ndarray = np.empty(x.shape, x.dtype, "F" if x.strides[0] < x.strides[1] else "C")
    set_elements(host, x)
    return host


def set_by_function(target: Array, rows: np.ndarray, cols: np.ndarray, f: ElementFunction) -> None:
    """Set target[l, h] := f(rows[l], cols[h]): on a device if it computes f, else on the host.  Complete on return.

    Elements that the host computes for a device are computed and copied some rows at a time.
    """
    device = of(target)
    if device is None:
        fill(target, rows, cols, f)
    elif device.generate(target, rows, cols, f):
        device.current_stream().synchronize()
    else:
        for slab in slabs(target.shape[0], target.shape[1], _PIECE):
            host = np.empty(target[slab].shape, target.dtype)
            fill(host, rows[slab], cols, f)
            set_elements(target[slab], host)


def evaluated(act: Callable[..., Array], parts: Sequence[Any], into: Array) -> None:
    """Set `into` to the value of a NumPy function.

    The function's arguments are numbers, and arrays on the same device, which are broadcast to the shape of `into`.

    A device works in slabs, so that temporaries stay small; the work is started in the current stream.
    """
    rows, cols = into.shape
    for slab in slabs(rows, cols, at_a_time(into, into.size)) if into.size else ():
        pieces = [x[slab] if np.ndim(x) and len(x) > 1 else x for x in parts]
        values = act(*map(supported, pieces))
        same = values.dtype == into.dtype or is_extension(into.dtype)
        CONVERT(into[slab], values if same else values.astype(into.dtype))


def is_extension(dtype: Any) -> bool:
    """Return whether a type of elements is one of ml_dtypes, such as bfloat16, and not of NumPy."""
    return getattr(dtype, "kind", "") == "V"


def supported(x: Any) -> Any:
    """Return elements in a type that all functions of a device take: float32 for bfloat16."""
    return x if np.ndim(x) == 0 or isinstance(x, np.ndarray) or not is_extension(x.dtype) else x.astype(np.float32)


def close(x: Any, y: Any, rtol: float, atol: float, equal_nan: bool) -> Array:
    """Return numpy.isclose of two arrays on the host, of two on a device, or of an array and a number."""
    if hasattr(y, "dtype") and y.dtype != (real := np.result_type(y.dtype, 1.0)):  # |y| of the least integer overflows
        y = y.astype(real)
    y = float(y) if isinstance(y, int) else y
    with np.errstate(invalid="ignore"):
        near = (np.abs(x - y) <= atol + rtol * np.abs(y)) & np.isfinite(y) | (x == y)
        return near | (np.isnan(x) & np.isnan(y)) if equal_nan else near


def all_close(x: Any, y: Any, rtol: float, atol: float, equal_nan: bool) -> bool:
    """Return numpy.allclose of arrays that are broadcast, or of numbers, on the device if an array is on one.  Local.

    At least one of them has the shape of the result.
    """
    if np.ndim(x) and np.ndim(y):
        x, y = beside(x, y), beside(y, x)
    rows, cols = np.broadcast_shapes(np.shape(x), np.shape(y))
    most = at_a_time(x if np.ndim(x) else y, rows * cols)
    for slab in slabs(rows, cols, most) if rows * cols else ():
        a, b = (supported(z[slab] if np.ndim(z) and len(z) > 1 else z) for z in (x, y))
        if not to_host(np.all(close(a, b, rtol, atol, equal_nan))):
            return False
    return True
