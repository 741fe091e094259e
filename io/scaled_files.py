"""Matrices of 8-bit values with scales, in files of `save_all`: two datasets and an attribute for each matrix.

For W, `W/values` has the bits of the values as int8, `W/scales` the scales (the bits of powers of two as int8), and the
attribute `scaled/W` of the file is a string: both types, and the rows and columns of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.run_report import RunReport
from pdgemm.io.generations import Saved
from pdgemm.io.hdf5 import load_all, save_all
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.scaled.scaled_matrix import Scaled

_KEY = "scaled/"


def save_scaled(
    path: str | Path,
    matrices: Mapping[str, Scaled | DistMatrix],
    *,
    attrs: Mapping[str, Any] | None = None,
    keep: int = 1,
    overwrite: bool = False,
) -> RunReport:
    """Write matrices, some of them with 8-bit values and scales, to one file, as `hdf5.save_all` does.  Collective.

        save_scaled("weights.h5", {"w": W, "bias": b})

    matrices : Scaled or DistMatrix, by name.   attrs, keep, overwrite : as in `save_all`.

    Returns the report of `save_all`, and raises its errors.
    """
    stored, attributes = dict[str, DistMatrix](), dict(attrs or {})
    for name, x in matrices.items():
        if isinstance(x, Scaled):
            stored |= {f"{name}/values": _of_type(x.values, "int8"), f"{name}/scales": _storable(x.scales)}
            attributes[f"{_KEY}{name}"] = " ".join(map(str, (x.dtype, x.scales.dtype, *x.block)))
        else:
            stored[name] = x
    return save_all(path, stored, attrs=attributes, keep=keep, overwrite=overwrite)


def load_scaled(
    path: str | Path, grid: ProcessGrid | None = None, layouts: Mapping[str, Mapping[str, Any]] | None = None
) -> Saved:
    """Load a file of `save_scaled` on any number of ranks, as `hdf5.load_all` does.  Collective over the grid.

    layouts : options of `load`, except dtype and transpose, by the name of the dataset: `W/values` for the values of W.

    Returns `matrices` (a Scaled is loaded as a Scaled), `attrs` and `generation`.
    Raises the errors of `load_all`.
    """
    matrices, attrs, generation = load_all(path, grid, layouts)
    known: dict[str, Scaled | DistMatrix] = dict(matrices)
    for key in [key for key in attrs if key.startswith(_KEY)]:
        name, (values, scales, *block) = key.removeprefix(_KEY), attrs.pop(key).split()
        V, S = _of_type(known.pop(f"{name}/values"), values), _of_type(known.pop(f"{name}/scales"), scales)
        mb, nb = map(int, block)
        known[name] = Scaled(V, S, (mb, nb))
    return Saved(known, attrs, generation)  # type: ignore[arg-type]  # some are Scaled


def _storable(x: DistMatrix) -> DistMatrix:
    """Return scales in a type that HDF5 has: scales of one byte as int8."""
    return _of_type(x, "int8") if x.itemsize == 1 else x


def _of_type(x: Any, dtype: str) -> DistMatrix:
    """Return a view of the same bits as numbers of another type of equal size.  Local."""
    same_bits: np.ndarray = x.stored.view(element_type(dtype))
    return DistMatrix(same_bits, x.grid, x.distribution, x.order)
