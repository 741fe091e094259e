"""New arrays, on the default grid (`pdgemm.set_default_grid`) or the grid of another array."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np

from pdgemm.array_api.array import Array
from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import default_grid
from pdgemm.local.arrays.device import HOST
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together
from pdgemm.tensors.dist_tensor import DistTensor


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Array:
    """Return an object as an array.  Collective.

    obj : an array, a tensor or a matrix, in whose layout the result is; or numbers, nested sequences of numbers and
        arrays, or a NumPy array, the same on every rank, of which each rank copies its part.
    copy : False: share the elements with a tensor or a matrix, or raise ValueError on every rank.
    """
    if isinstance(obj, DistMatrix):
        obj = obj.tensor(obj.shape)
    if not isinstance(obj, DistTensor):
        if copy is False:
            raise ArgumentError("the elements are copied to the ranks of the grid: copy=True or None")
        if _has_arrays(obj):
            obj, copy = np.stack([asarray(x, device=device) for x in obj]), None
        else:
            return Array.from_global(obj, dtype=dtype, device=device or HOST)
    result = Array(obj.unfolding, obj.layout)
    moved = result if device is None else result.to_device(device)
    if dtype is not None and dtype != obj.dtype:
        moved = moved.astype(dtype)
    if copy is False and moved.unfolding is not obj.unfolding:
        raise ArgumentError(f"a copy is needed: the elements are of {obj.dtype} on {obj.device}")
    return moved.copy() if copy and moved.unfolding is obj.unfolding else moved


def _has_arrays(obj: Any) -> bool:
    """Return whether a nested sequence has a distributed array in it."""
    return isinstance(obj, (list, tuple)) and any(
        isinstance(x, (DistTensor, DistMatrix)) or _has_arrays(x) for x in obj
    )


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Array:
    """Return an array that every rank has in its memory, and that DLPack exports, as an array; see `asarray`."""
    if not isinstance(x, DistTensor):
        with together(default_grid().comm):
            x = np.from_dlpack(x, device="cpu")
    return asarray(x, device=device, copy=copy)


def _new(shape: Any, dtype: Any, device: Any, elements: Callable[..., Any]) -> Array:
    """Return a new array of the values that `elements` returns for the indices along each axis.  Collective."""
    return Array.from_function(elements, _shape(shape), dtype=dtype, device=device or HOST)


def _like(x: Array, dtype: Any, device: Any) -> dict[str, Any]:
    """Return the options of a new array in the layout of x."""
    dtype, device = x.dtype if dtype is None else dtype, device or x.device
    return {"grid": x.grid.base, "layout": x.layout, "dtype": dtype, "device": device}


def _shape(shape: Any) -> tuple[int, ...]:
    return (shape,) if np.ndim(shape) == 0 else tuple(shape)


def _number(value: Any) -> Any:
    """Return a number, also that of an array without axes."""
    return value.allgather()[()] if isinstance(value, DistTensor) else value


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """Return an array whose elements are not initialised, of float64 by default.  Collective."""
    return Array.empty(_shape(shape), dtype=float if dtype is None else dtype, device=device or HOST)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """Return an array of one number, of NumPy's type of the number by default.  Collective."""
    return Array.full(_shape(shape), _number(fill_value), dtype=dtype, device=device or HOST)


def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """Return an array of zeros, of float64 by default.  Collective."""
    return full(shape, 0, dtype=float if dtype is None else dtype, device=device)


def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """Return an array of ones, of float64 by default.  Collective."""
    return full(shape, 1, dtype=float if dtype is None else dtype, device=device)


def empty_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """Return an array in the layout of x whose elements are not initialised.  Collective."""
    return Array.empty(x.shape, **_like(x, dtype, device))


def full_like(x: Array, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """Return an array of one number in the layout of x.  Collective."""
    return Array.full(x.shape, _number(fill_value), **_like(x, dtype, device))


def zeros_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """Return an array of zeros in the layout of x.  Collective."""
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """Return an array of ones in the layout of x.  Collective."""
    return full_like(x, 1, dtype=dtype, device=device)


def arange(
    start: float, /, stop: float | None = None, step: float = 1, *, dtype: Any = None, device: Any = None
) -> Array:
    """Return start + i step for i = 0, 1, ..., before `stop`.  Collective.

    stop : None: from 0 to `start`.   dtype : by default int64 for integers, else float64.
    """
    first, last = (0, start) if stop is None else (start, stop)
    if all(isinstance(x, (int, np.integer)) for x in (first, last, step)):
        n, signed = len(range(int(first), int(last), int(step))), np.dtype(dtype or np.int64) != np.uint64
        begin, each = (np.uint64(int(x) % 2**64) for x in (first, step))  # modulo 2^64, so that no step overflows

        def elements(i: np.ndarray) -> np.ndarray:
            values = begin + i.astype(np.uint64) * each
            return values.view(np.int64) if signed else values

        return _new(n, np.int64 if dtype is None else dtype, device, elements)
    n = max(ceil((last - first) / step), 0)
    return _new(n, float if dtype is None else dtype, device, lambda i: first + i * step)


def linspace(
    start: complex, stop: complex, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: bool = True
) -> Array:
    """Return `num` numbers from `start` to `stop` at equal distances, or without `endpoint` the first of num + 1.

    dtype : by default float64, or complex128.  Collective.
    """
    parts = max(num - 1 if endpoint else num, 1)
    step = (stop - start) / parts

    def elements(i: np.ndarray) -> np.ndarray:
        between = start + (i * step if step else i / parts * (stop - start))  # a step may be too small for its type
        return np.where(i == num - 1, stop, between) if endpoint and num > 1 else between

    return _new(num, np.result_type(start, stop, float) if dtype is None else dtype, device, elements)


def eye(n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None) -> Array:
    """Return the matrix with ones where the column is the row plus k, else zeros.  Collective."""
    shape = n_rows, n_rows if n_cols is None else n_cols
    return _new(shape, float if dtype is None else dtype, device, lambda i, j: j - i == k)


def meshgrid(*arrays: Array, indexing: str = "xy") -> tuple[Array, ...]:
    """Return, for arrays of one axis, the coordinates of the points of a grid.  Collective.

    indexing : "ij": axis k is that of array k; "xy": the first two axes are exchanged.
    """
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f'indexing must be "xy" or "ij", got {indexing!r}')
    order = [*range(len(arrays))]
    if indexing == "xy" and len(arrays) > 1:
        order[:2] = 1, 0
    shape = tuple(arrays[k].size for k in order)
    return tuple(
        np.broadcast_to(x.reshape([-1 if order[at] == k else 1 for at in range(len(order))]), shape)  # type: ignore[misc]
        for k, x in enumerate(arrays)
    )
