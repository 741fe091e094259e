"""Arithmetic on the elements of one rank: Y := alpha op(X) + beta Y."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pdgemm.local.arrays.device import Array, of
from pdgemm.local.arrays.dtypes import arithmetic
from pdgemm.local.arrays.element_functions import ElementFunction, fill, slabs, tiles

_UPLOAD = 1 << 24  # elements that are copied to a device at a time


class Combine:
    """The operation Y := alpha op(X) + beta Y between any types, where op(X) is X or its conjugate.  Local.

    through : a type to which each number is rounded first; only without workspace.
    workspace : (2, numbers), in the type of the arithmetic, for as many elements as are combined at a time.
        None: the host only converts op(X); a device computes in registers.
    """

    __slots__ = ("alpha", "beta", "conjugated", "through", "workspace")

    def __init__(
        self,
        alpha: Any = 1,
        beta: Any = 0,
        workspace: np.ndarray | None = None,
        conjugated: bool = False,
        through: np.dtype | None = None,
    ) -> None:
        self.alpha, self.beta, self.workspace, self.conjugated, self.through = (
            alpha,
            beta,
            workspace,
            conjugated,
            through,
        )

    def __call__(self, Y: Array, X: Array) -> None:
        if type(Y) is not np.ndarray and (device := of(Y)):
            device.combine(self, Y, X)
            return
        if self.workspace is None:
            if self.through is None:
                np.copyto(Y, X, casting="unsafe")
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

    def pieces(self, rows: int, cols: int) -> Iterator[tuple[slice, slice]]:
        """Yield rows x cols in tiles that fit the workspace."""
        return tiles(rows, cols, max(1, rows * cols) if self.workspace is None else self.workspace.shape[1])


CONVERT, CONJUGATE = Combine(), Combine(conjugated=True)


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


def set_elements(target: Array, source: np.ndarray) -> None:
    """Copy an array of the host to target, complete on return."""
    device = of(target)
    if device is None:
        target[...] = source
        return
    if target.strides[0] < target.strides[1]:  # whole rows are uploaded
        target, source = target.T, source.T
    rows, cols = source.shape
    for slab in slabs(rows, cols, _UPLOAD) if source.size else ():
        CONVERT(target[slab], device.to_device(source[slab], "C"))
    device.current_stream().synchronize()


def set_by_function(target: Array, rows: np.ndarray, cols: np.ndarray, f: ElementFunction) -> None:
    """Set target[l, h] := f(rows[l], cols[h]): on a device if it computes f, else on the host.  Complete on return."""
    device = of(target)
    if device is None:
        fill(target, rows, cols, f)
    elif device.generate(target, rows, cols, f):
        device.current_stream().synchronize()
    else:
        fill(host := np.empty(target.shape, target.dtype), rows, cols, f)
        set_elements(target, host)
