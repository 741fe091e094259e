"""Dropout by random numbers that depend on the place of an element alone."""

from __future__ import annotations

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_real, as_seed
from pdgemm.local.arrays.element_functions import hashed, numbered, slabs
from pdgemm.parallel.layers.array_checks import check_array
from pdgemm.parallel.mesh import Mesh

Array = np.ndarray


class Dropout:
    """`dropout` at one rate and of one seed, on which the ranks of a mesh agree once.  Collective over dp, cp and tp.

    ::

        layer = Dropout(mesh, 0.1, seed)
        y = layer(x, stream, rows)              # and the gradient: layer(dy, stream, rows)

    rate, seed : as of `dropout`.   Raises ArgumentError on all ranks, also where they have another rate or seed.
    """

    def __init__(self, mesh: Mesh, rate: float, seed: int) -> None:
        with mesh.checks(mesh.line("dp+cp+tp")).checked(set()) as arguments:
            self.rate, self.seed = _as_rate(rate), as_seed(seed)
            arguments += ["Dropout", f"rate {self.rate}", f"seed {self.seed}"]

    def __call__(self, x: Array, stream: int, rows: Array, columns: Array | None = None) -> Array:
        """Return `dropout` of x, or of its gradient.  Local."""
        return dropout(x, self.rate, self.seed, stream, rows, columns)


def dropout(x: Array, rate: float, seed: int, stream: int, rows: Array, columns: Array | None = None) -> Array:
    """Return x / (1 - rate) with a share `rate` of its elements set to 0, the same on any mesh.  Local.

    x : (r, c).   rate : from 0 to less than 1.   seed, stream : integers; another stream for each step and place.
    rows, columns : the numbers of the rows, (r,), and columns, (c,), in the whole array: of tokens of the whole batch,
        and of features; None: columns from 0.

    The same function of dx is the gradient.  Raises ArgumentError, DTypeError or LayoutError on this rank; ranks do not
    compare rates and seeds, see `Dropout`.   Srivastava et al., J. Mach. Learn. Res. 15, 2014.
    """
    rate = _as_rate(rate)
    check_array("x", x, (None, None), "of a dropout")
    columns = np.arange(x.shape[1]) if columns is None else columns
    if (len(rows), len(columns)) != x.shape:
        raise ArgumentError(f"numbers of {len(rows)} rows and {len(columns)} columns of an array {x.shape}")
    if not rate:
        return x
    y, least = np.empty_like(x), np.uint64(rate * 2.0**64)
    for slab in slabs(*x.shape) if x.size else ():
        kept = hashed(np.asarray(rows)[slab, None], columns[None, :], seed, numbered(stream)) >= least
        np.multiply(x[slab], kept, out=y[slab])
    y *= x.dtype.type(1 / (1 - rate))
    return y


def _as_rate(rate: float) -> float:
    if not 0 <= (rate := as_real(rate, "rate")) < 1:
        raise ArgumentError(f"rate is from 0 to less than 1, got {rate}")
    return rate
