"""Matrices and vectors whose rows and columns are multiplied by powers of 2, each element rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

UNITS = 30  # the accepted error in units of n eps, or n eps cond, as in LAPACK's tests


def times(x: Any, rows: Any, cols: Any = 0) -> Any:
    """Return the matrix of 2^(rows_i + cols_j) x_ij, each rounded once."""
    x = np.asarray(x)
    powers = np.add.outer(rows, np.atleast_1d(cols)) if x.ndim == 2 else rows
    if x.dtype.kind != "c":
        return np.ldexp(x, powers).astype(x.dtype)
    result = np.empty_like(x)
    result.real, result.imag = np.ldexp(x.real, powers), np.ldexp(x.imag, powers)
    return result
