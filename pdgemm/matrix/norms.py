"""Matrix norms, the same on every rank; no intermediate result overflows."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from pdgemm.arrays.device import Array, to_host
from pdgemm.arrays.element_functions import slabs
from pdgemm.arrays.integers import shown
from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.support.agreement import together


def norm(local: Array, layout: Distribution, grid: ProcessGrid, kind: str | int | float) -> float:
    """Return the norm of a matrix of this layout, of which this rank holds `local`.  Collective over the grid.

    kind : "fro" sqrt(sum |a|^2), 1 max column sum, numpy.inf max row sum, "max" max |a|.  A NaN anywhere gives NaN.
    """
    with together(grid.comm) as arguments:
        if not isinstance(kind, (str, int, float)) or kind not in ("fro", 1, np.inf, "max"):
            raise ArgumentError(f'norm {shown(kind)} is not one of "fro", 1, numpy.inf, "max"')
        arguments += ["norm", kind, layout, local.dtype]
    if kind == "fro":
        return _hypot(grid.comm.allgather(_frobenius(local)))
    axis = 0 if kind == 1 else 1
    totals = np.zeros(local.shape[1 - axis])  # of columns or rows
    for slab in slabs(*local.shape) if local.size else ():
        sizes = np.abs(to_host(local[slab]).astype(np.result_type(local.dtype, np.float32), copy=False))
        if kind == 1:
            totals += sizes.sum(axis=0, dtype=np.float64)
        else:
            totals[slab] = sizes.max(axis=1) if kind == "max" else sizes.sum(axis=1, dtype=np.float64)
    if kind != "max" and not grid.idle:
        (grid.col if kind == 1 else grid.row).Allreduce(MPI.IN_PLACE, totals, MPI.SUM)
    # not MPI.MAX, which may drop a NaN
    return float(np.max(grid.comm.allgather(float(totals.max(initial=0.0)))))


def _frobenius(local: Array) -> float:
    """Return sqrt(sum |a|^2) in double precision, without overflow (BLAS nrm2 scales)."""
    from scipy.linalg import norm as nrm2

    wide = np.result_type(local.dtype, np.float64)
    parts = (
        nrm2(to_host(local[slab]).astype(wide, copy=False).ravel(), check_finite=False)
        for slab in slabs(*local.shape)
        if local.size
    )
    return _hypot(list(parts))


def _hypot(parts: list[float]) -> float:
    """Return sqrt(sum of squares) without overflow; NaN wins over infinity, unlike in numpy.hypot."""
    return float("nan") if np.isnan(parts).any() else float(np.hypot.reduce(parts, initial=0.0))
