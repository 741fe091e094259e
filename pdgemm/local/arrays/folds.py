"""Kinds of reductions: the partial result of several elements, the join of two partial results, and the result.

All functions here are NumPy on one rank; reductions of matrices and tensors join the partial results of the ranks.
Arrays of a device implement the same functions by NumPy's protocols, `__array_ufunc__` and `__array_function__`.  So a
reduction calls only functions that CuPy has as well: `numpy.sum`, and not `numpy.add.reduce`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.device import Array, beside, to_host
from pdgemm.local.arrays.dtypes import NARROW
from pdgemm.local.arrays.element_functions import slabs

RUN = 128  # rows that are added one after the other
COPIED, READ = 1 << 15, 1 << 19  # elements to take at a time, where they are copied, and where they are only read
ON_DEVICE = 1 << 24  # elements to take at a time on a device, where each function is a launch of some microseconds

Parts = tuple[Array, ...]  # the partial result of several elements, for each column (or each row) of a matrix


class Fold(NamedTuple):
    """A reduction.  The parts of elements are their partial result, see `Parts`.

    name  : the name of NumPy's function.
    local : a function that takes elements, an axis and the global indices along that axis, and returns their parts.
    join  : a function that takes the parts of some elements and of other elements, and returns the parts of all.
    result : a function that takes the parts of all elements and their number, and returns their reduction, on the host.
    empty : the reduction of no elements; None if it is undefined.
    words : the number of elements in the parts of one column.
    indexed : the result is an index.
    most : elements to take at a time on the host; few if they are copied, so that the copies stay in cache.
    """

    name: str
    local: Callable[[Array, int, np.ndarray], Parts]
    join: Callable[[Parts, Parts], Parts]
    result: Callable[[Parts, int], np.ndarray]
    empty: Any = None
    words: int = 1
    most: int = COPIED
    indexed: bool = False


def at_a_time(x: Array, most: int) -> int:
    """Return the number of elements of an array to take at a time: `most` on the host, more on a device."""
    return most if isinstance(x, np.ndarray) else ON_DEVICE


def same(x: Any, n: int = 0) -> Any:
    return x


def number_like(n: int, like: np.ndarray) -> Any:
    return like.dtype.type(n)


def widened(x: Array) -> Array:
    """Return the elements, converted to a type in which NumPy computes: float32 for 16-bit numbers."""
    return x.astype(np.float32) if x.dtype in NARROW else x


def added(x: Array) -> Array:
    """Return the elements, converted to the type of their sum."""
    return x.astype(np.uint64 if x.dtype.kind == "u" else np.int64) if x.dtype.kind in "biu" else widened(x)


def floating(x: Array) -> Array:
    return x.astype(np.float64) if x.dtype.kind in "biu" else widened(x)


def _pairwise(reduce: Callable[..., Array], x: Array, axis: int) -> Array:
    """Reduce rows (axis 0), or columns, in runs, and then the results of the runs.

    The host reduces a run of rows in order, and columns as NumPy does.  A device reduces in any order, so both its rows
    and its columns are reduced in runs, which bounds the error.
    """
    if axis == 1 and not isinstance(x, np.ndarray):
        x, axis = x.T, 0
    while axis == 0 and len(x) > RUN:
        runs = len(x) // RUN
        whole = reduce(x[: runs * RUN].reshape(runs, RUN, -1), axis=1)
        x = np.concatenate([whole, reduce(x[runs * RUN :], axis=0)[None]]) if len(x) % RUN else whole
    return reduce(x, axis=axis)


def _extreme(best: Callable[..., Array], x: Array, axis: int) -> Array:
    """Return the least or largest elements.  A device reduces runs, because few threads would read a whole long row."""
    return best(x, axis=axis) if isinstance(x, np.ndarray) else _pairwise(best, x, axis)


def by_ufunc(
    name: str, ufunc: np.ufunc, reduce: Callable[..., Array], widen: Callable[[Array], Array], empty: Any = None
) -> Fold:
    """Return a reduction by a NumPy function of two arguments, pair by pair.

    reduce : NumPy's name for the reduction of an array by this function, such as numpy.sum for numpy.add.
    """

    def local(x: Array, axis: int, _: np.ndarray) -> Parts:
        return (_pairwise(reduce, widen(x), axis),)

    return Fold(name, local, lambda a, b: (ufunc(a[0], b[0]),), lambda parts, n: parts[0], empty, most=READ)


def add(name: str, result: Callable[..., Any], empty: Any = 0, widen: Callable[[Array], Array] = added) -> Fold:
    return by_ufunc(name, np.add, np.sum, widen, empty)._replace(result=lambda parts, n: result(parts[0], n))


def first(name: str, find: Callable[..., Array], best: Callable[..., Array], better: np.ufunc) -> Fold:
    """Return the reduction to the index of the first of the best elements; a NaN is better than all other elements.

    find, best, better : numpy.argmin, numpy.min and numpy.less, or numpy.argmax, numpy.max and numpy.greater.
    """

    def local(x: Array, axis: int, indices: np.ndarray) -> Parts:
        x = widened(x)
        if isinstance(x, np.ndarray):
            where = find(x, axis=axis)
            values = np.take_along_axis(x, np.expand_dims(where, axis), axis).squeeze(axis)
        else:  # CuPy's argmin and argmax find any of several NaN
            values = _extreme(best, x, axis)
            where = np.argmax((x == np.expand_dims(values, axis)) | (x != x), axis=axis)
        return values, np.take(beside(indices, x), where)

    def join(a: Parts, b: Parts) -> Parts:
        (x, at_x), (y, at_y) = a, b
        if x.dtype == bool:
            x, y = x.astype(np.int8), y.astype(np.int8)
        nan_x, nan_y = x != x, y != y
        same = (x == y) | (nan_x & nan_y)
        second = np.where(same, at_y < at_x, ~nan_x & (nan_y | better(y, x)))
        return np.where(second, b[0], a[0]), np.where(second, at_y, at_x)

    return Fold(name, local, join, lambda parts, n: parts[1], words=2, most=READ, indexed=True)


def variance(name: str, ddof: float, last: Callable[[np.ndarray], np.ndarray]) -> Fold:
    """Return the reduction to a variance, joined as by Chan, Golub & LeVeque (1979)."""

    def local(x: Array, axis: int, _: np.ndarray) -> Parts:
        x = floating(x)
        count = x.shape[axis]
        mean = _pairwise(np.sum, x, axis) / x.dtype.type(count)
        apart = x - np.expand_dims(mean, axis)
        squares = np.square(apart.real) + np.square(apart.imag) if x.dtype.kind == "c" else apart * apart
        return np.full_like(mean, count, np.int64), mean, _pairwise(np.sum, squares, axis)

    def join(a: Parts, b: Parts) -> Parts:
        (n, mean, squares), (k, other, more) = a, b
        apart, real = other - mean, squares.dtype
        share = (k / (n + k)).astype(real)
        between = np.abs(apart) ** 2 * n.astype(real) * share
        return n + k, mean + apart * share, squares + more + between

    def result(parts: Parts, n: int) -> np.ndarray:
        value: np.ndarray = last(parts[2] / parts[2].dtype.type(max(n - ddof, 0)))
        return value

    return Fold(name, local, join, result, np.nan, words=3)


def weighted_sums(vector: np.ndarray) -> Fold:
    """Return the reduction of each row (or column) x to its product with a vector, the sum of all x_i vector_i."""
    vector = widened(vector)

    def local(x: Array, axis: int, indices: np.ndarray) -> Parts:
        factors, x = beside(vector[indices], x), widened(x)
        return (x @ factors if axis == 1 else factors @ x,)

    return Fold("matvec", local, lambda a, b: (a[0] + b[0],), lambda parts, n: parts[0], 0, most=READ)


def vector_norm(kind: Any) -> Fold:
    """Return the reduction to a norm of vectors.   kind : `ord` of numpy.linalg.norm.   Raises ArgumentError."""

    def sizes(x: Array) -> Array:
        return np.abs(floating(x)).astype(np.float64, copy=False)

    if isinstance(kind, (int, float)):
        if kind == 1:
            return add("vector_norm 1", same, 0, sizes)
        if kind == 0:
            return add("vector_norm 0", same, 0, lambda x: (widened(x) != 0).astype(np.float64))
        if kind == np.inf:
            return by_ufunc("vector_norm inf", np.maximum, np.max, sizes, 0)
        if kind == -np.inf:
            return by_ufunc("vector_norm -inf", np.minimum, np.min, sizes)
        if kind == 2:
            return _euclidean(sizes)
    raise ArgumentError(f"norm {shown(kind)} of vectors is not one of 0, 1, 2, numpy.inf, -numpy.inf")


def _euclidean(sizes: Callable[[Array], Array]) -> Fold:
    """Return the reduction to a 2-norm; its parts are the largest |x|, and the sum of (|x| / the largest |x|)^2."""

    def scaled(largest: Array) -> Array:
        return np.where((largest > 0) & np.isfinite(largest), largest, 1).astype(largest.dtype)

    def local(x: Array, axis: int, _: np.ndarray) -> Parts:
        x = sizes(x)
        largest = _extreme(np.max, x, axis)
        scale = scaled(largest)
        x = x / np.expand_dims(scale, axis)
        return np.where(largest > 0, scale, largest * 0), _pairwise(np.sum, x * x, axis)

    def join(a: Parts, b: Parts) -> Parts:
        scale = np.maximum(a[0], b[0])
        divisor = scaled(scale)
        return scale, a[1] * (a[0] / divisor) ** 2 + b[1] * (b[0] / divisor) ** 2

    return Fold("vector_norm 2", local, join, lambda parts, n: parts[0] * np.sqrt(parts[1]), 0, words=2)


FOLDS = {
    x.name: x
    for x in (
        add("sum", same),
        add("mean", lambda sums, n: sums / number_like(n, sums), np.nan, floating),
        by_ufunc("prod", np.multiply, np.prod, added, 1),
        by_ufunc("min", np.minimum, np.min, widened),
        by_ufunc("max", np.maximum, np.max, widened),
        by_ufunc("any", np.logical_or, np.any, widened, False),
        by_ufunc("all", np.logical_and, np.all, widened, True),
        first("argmin", np.argmin, np.min, np.less),
        first("argmax", np.argmax, np.max, np.greater),
    )
}


def parts_along(x: Array, axis: int, fold: Fold, indices: np.ndarray) -> Parts:
    """Return the accumulators of a non-empty array along an axis, on the host.

    indices : the global indices along the axis.
    """
    most = at_a_time(x, fold.most)
    if abs(x.strides[0]) < abs(x.strides[1]):
        x, axis = x.T, 1 - axis
    rows, cols = x.shape
    if axis == 1:  # along rows, which are contiguous
        cuts = [slice(at, at + most) for at in range(0, cols, most)]
        pieces = ([fold.local(x[slab, cut], 1, indices[cut]) for cut in cuts] for slab in slabs(rows, cols, most))
        results = [_joined(parts, fold) for parts in pieces]
    else:
        wide = min(cols, most // RUN)
        stripes = (x[:, start : start + wide] for start in range(0, cols, wide))
        cuts = [*slabs(rows, wide, most)]
        results = [_joined([fold.local(stripe[slab], 0, indices[slab]) for slab in cuts], fold) for stripe in stripes]
    return tuple(map(to_host, results[0] if len(results) == 1 else map(np.concatenate, zip(*results))))


def _joined(parts: list[Parts], fold: Fold) -> Parts:
    """Join accumulators pairwise, in a binary tree."""
    while len(parts) > 1:
        pairs = [fold.join(a, b) for a, b in zip(parts[::2], parts[1::2])]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def halved(parts: Parts, fold: Fold) -> Parts:
    """Join the accumulators of all columns into one, by halving."""
    while (n := len(parts[0])) > 1:
        half = n // 2
        pairs = fold.join(tuple(x[:half] for x in parts), tuple(x[half : 2 * half] for x in parts))
        parts = tuple(np.concatenate([x, y[2 * half :]]) for x, y in zip(pairs, parts))
    return parts


def of_one_element(fold: Fold, dtype: np.dtype) -> Parts:
    """Return the accumulator of one element; it fixes the number and types of all accumulators."""
    return fold.local(np.ones((1, 1), dtype), 0, np.zeros(1, np.int64))


def result_type(fold: Fold, dtype: np.dtype) -> np.dtype:
    """Return the type of the result; sums, means and extrema of 16-bit numbers have the type of the numbers."""
    computed = fold.result(of_one_element(fold, dtype), 1).dtype
    return dtype if dtype in NARROW and computed == np.float32 else computed
