"""The rows and columns that a key selects in A[key], as in NumPy.  No function here communicates."""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from pdgemm.errors import KeyIndexError
from pdgemm.local.arrays.arguments import shown


class Picked(NamedTuple):
    """The indices of one dimension that a key selects.

    indices : a range of step 1, or an array of indices in any order.
    dropped : whether the key is a single index, which removes the dimension in NumPy.
    """

    indices: range | np.ndarray
    dropped: bool = False

    def __str__(self) -> str:
        x = self.indices
        if isinstance(x, range):
            return f"{x.start}:{x.stop}" if not self.dropped else str(x.start)
        return f"{len(x)} indices of checksum {crc32(x.tobytes())}"


def is_view(key: Any) -> bool:
    """Return whether the key has only slices of step 1 and `...`, so that the submatrix is a view."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(x is ... or (isinstance(x, slice) and x.step in (None, 1)) for x in keys)


def picked(key: Any, shape: tuple[int, int]) -> tuple[Picked, Picked]:
    """Return the rows and the columns that a key selects.  Raises KeyIndexError."""
    keys = list(key) if isinstance(key, tuple) else [key]
    here = [at for at, x in enumerate(keys) if x is ...]
    if len(here) == 1:
        keys[here[0] : here[0] + 1] = [slice(None)] * (3 - len(keys))
    keys += [slice(None)] * (2 - len(keys))
    if len(here) > 1 or len(keys) != 2:
        raise KeyIndexError(_NOT_TWO.format(shown(key)))
    lists = [_as_list(x) for x in keys]
    if all(x is not None for x in lists):
        rows, cols = lists
        assert rows is not None and cols is not None
        if rows.ndim == cols.ndim == 2 and rows.shape[1] == cols.shape[0] == 1:  # the lists of numpy.ix_
            lists = [rows[:, 0], cols[0]]
        else:
            raise KeyIndexError(
                "two lists name single elements, one by one: A[numpy.ix_(rows, cols)] is the submatrix of these rows "
                "and columns, and A.allgather()[rows, cols] has the elements"
            )
    down, across = (_one(x, y, n, what) for x, y, n, what in zip(keys, lists, shape, ("rows", "columns")))
    return down, across


def picked_along(axis: int, key: Any, n: int) -> Picked:
    """Return the indices that one part of a key selects along an axis of a tensor.  Raises KeyIndexError."""
    try:
        return _one(key, _as_list(key), n, "indices")
    except KeyIndexError as bad:
        raise KeyIndexError(f"axis {axis} of a tensor: {bad}") from None


def last_of_each(indices: np.ndarray) -> np.ndarray:
    """Return, ascending, the position of the last occurrence of each index: NumPy assigns the element there."""
    _, from_end = np.unique(indices[::-1], return_index=True)
    return np.sort(len(indices) - 1 - from_end)


def _as_list(x: Any) -> np.ndarray | None:
    """Return a list or an array of indices, or a mask, as an array; None for any other key."""
    if isinstance(x, range):
        x = np.arange(x.start, x.stop, x.step)
    if isinstance(x, list):
        x = np.asarray(x) if len(x) else np.zeros(0, np.int64)
    return x if isinstance(x, np.ndarray) and x.ndim else None


def _one(key: Any, listed: np.ndarray | None, n: int, what: str) -> Picked:
    """Return the indices that one part of a key selects in a dimension of n.   what : rows, columns, or indices."""
    refusal = _NO_PART if what == "indices" else _NO_KEY
    if listed is not None:
        return Picked(_from_list(listed, n, what))
    if isinstance(key, slice):
        try:
            start, stop, step = key.indices(n)
        except (TypeError, ValueError):
            raise KeyIndexError(refusal.format(shown(key))) from None
        if step == 1:
            return Picked(range(start, max(start, stop)))
        return Picked(np.arange(start, stop, step, dtype=np.int64))
    if isinstance(key, np.ndarray) and key.dtype.kind in "iu":
        key = key[()]
    if not isinstance(key, (int, np.integer)) or isinstance(key, bool):
        raise KeyIndexError(refusal.format(shown(key)))
    if not -n <= key < n:
        raise KeyIndexError(f"index {shown(key)} is out of range for a dimension of {n}")
    start = int(key) % n
    return Picked(range(start, start + 1), dropped=True)


def _from_list(listed: np.ndarray, n: int, what: str) -> np.ndarray:
    """Return the indices of a list or of a mask of n rows or columns."""
    if listed.ndim != 1:
        dimensions = f"a list of {what} must have one dimension, got {listed.ndim}"
        raise KeyIndexError(_MASKED if listed.dtype == bool and what != "indices" else dimensions)
    if listed.dtype == bool:
        if len(listed) != n:
            raise KeyIndexError(f"a mask of {len(listed)} {what} for a dimension of {n}")
        return np.flatnonzero(listed)
    if listed.dtype.kind not in "iu":
        raise KeyIndexError(f"a list of {what} must have whole numbers or truth values, got {listed.dtype}")
    outside = (listed < -n) | (listed >= n)
    if outside.any():
        raise KeyIndexError(f"index {listed[outside][0]} is out of range for a dimension of {n}")
    return np.where(listed < 0, listed.astype(np.int64) + n, listed).astype(np.int64)


_NO_KEY = (
    "a submatrix is A[i0:i1, j0:j1], a row A[i], an element A[i, j]; rows are picked by a list, a step or a mask of "
    "them; got {}"
)
_NO_PART = "it is indexed by a number, a slice, or a list or mask of one dimension; got {}"
_NOT_TWO = "a submatrix is A[i0:i1, j0:j1]: a matrix has two dimensions; got {}"
MASK = np.ones((1, 1), bool)  # stands for a distributed mask, whose elements are not read
_MASKED = (
    "the elements under a mask are not a distributed matrix: use numpy.where(mask, A, 0) to keep them in place, "
    "A[mask] = 0 to set them, or A.allgather()[mask] for an array of them"
)
