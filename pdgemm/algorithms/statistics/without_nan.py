"""Sums, means, extrema and variances of the elements that are not NaN.

Each function is a reduction of a `DistMatrix` in which another number replaces NaN: 0 for a sum, infinity for the least
element.  Collective over the grid; cost: two reductions and a copy of the matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.local.arrays.arguments import as_count
from pdgemm.matrix.distmatrix import DistMatrix


def nansum(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the sum of the elements that are not NaN, as `A.sum`; 0 if there are none.  Collective."""
    return _filled(a, 0).sum(axis)


def nanprod(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the product of the elements that are not NaN, as `A.prod`; 1 if there are none.  Collective."""
    return _filled(a, 1).prod(axis)


def nanmin(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the least element that is not NaN, as `A.min`; NaN if there are none.  Collective."""
    return _extreme(a, axis, "min", np.inf)


def nanmax(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the largest element that is not NaN, as `A.max`; NaN if there are none.  Collective."""
    return _extreme(a, axis, "max", -np.inf)


def nanmean(a: DistMatrix, axis: int | None = None) -> Any:
    """Return the mean of the elements that are not NaN; NaN if there are none.  Collective."""
    return a.mean(axis) if _whole(a) else _divided(nansum(a, axis), _count(a, axis))


def nanvar(a: DistMatrix, axis: int | None = None, ddof: int = 0) -> Any:
    """Return the variance sum |a - mean|^2 / (N - ddof) of the N elements that are not NaN.  Collective."""
    if _whole(a):
        return a.var(axis, ddof)
    mean = np.asarray(nanmean(a, axis))
    apart: Any = np.where(np.isnan(a), a.dtype.type(0), a - (mean[:, None] if axis in (1, -1) else mean))
    squares = (abs(apart) ** 2).sum(axis)
    return _divided(squares, np.maximum(_count(a, axis) - as_count(ddof, "ddof", 0), 0))


def nanstd(a: DistMatrix, axis: int | None = None, ddof: int = 0) -> Any:
    """Return the standard deviation of the elements that are not NaN, the root of `nanvar`.  Collective."""
    deviation = np.sqrt(nanvar(a, axis, ddof))
    return deviation if isinstance(deviation, np.ndarray) else deviation[()]


def _whole(a: DistMatrix) -> bool:
    """Are the elements whole numbers, which cannot be NaN?"""
    return a.dtype.kind in "biu"


def _filled(a: DistMatrix, number: float) -> DistMatrix:
    """Return the matrix with a number in place of NaN."""
    filled: Any = a if _whole(a) else np.where(np.isnan(a), a.dtype.type(number), a)
    return filled


def _count(a: DistMatrix, axis: int | None) -> Any:
    """Return the number of elements that are not NaN."""
    present: Any = ~np.isnan(a)
    return present.sum(axis)


def _extreme(a: DistMatrix, axis: int | None, name: str, worst: float) -> Any:
    if _whole(a):
        return getattr(a, name)(axis)
    extreme = getattr(_filled(a, worst), name)(axis)
    return np.where(_count(a, axis) > 0, extreme, extreme.dtype.type(np.nan))[()]


def _divided(sums: Any, counts: Any) -> Any:
    """Return sums divided by counts, of the type of the sums; NaN where a count is 0."""
    with np.errstate(all="ignore"):
        return (sums / np.asarray(counts)).astype(sums.dtype)[()]
