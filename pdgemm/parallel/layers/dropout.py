"""Dropout by random numbers that depend on the place of an element alone."""

from __future__ import annotations

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.element_functions import hashed, slabs
from pdgemm.matrix.argument_checks import as_real

Array = np.ndarray


def dropout(x: Array, rate: float, seed: int, stream: int, rows: Array, columns: Array | None = None) -> Array:
    """Return x / (1 - rate) with a share `rate` of its elements set to 0, the same on any mesh.  Local.

    x : (r, c).   rate : from 0 to less than 1.   seed, stream : integers; another stream for each step and place.
    rows, columns : the numbers of the rows, (r,), and columns, (c,), in the whole array: of tokens of the whole batch,
        and of features; None: columns from 0.

    The same function of dx is the gradient.   Srivastava et al., J. Mach. Learn. Res. 15, 2014.
    """
    if not 0 <= (rate := as_real(rate, "rate")) < 1:
        raise ArgumentError(f"rate is from 0 to less than 1, got {rate}")
    columns = np.arange(x.shape[1]) if columns is None else columns
    if (len(rows), len(columns)) != x.shape:
        raise ArgumentError(f"numbers of {len(rows)} rows and {len(columns)} columns of an array {x.shape}")
    if not rate:
        return x
    y, least = np.empty_like(x), np.uint64(rate * 2.0**64)
    for slab in slabs(*x.shape) if x.size else ():
        kept = hashed(np.asarray(rows)[slab, None], columns[None, :], seed, stream) >= least
        np.multiply(x[slab], kept, out=y[slab])
    y *= x.dtype.type(1 / (1 - rate))
    return y
