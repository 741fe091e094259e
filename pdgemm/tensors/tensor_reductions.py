"""Reductions of tensors over any axes: sums, products, extrema and their places, truth values, moments and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, cast

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.linalg.work import Work
from pdgemm.local.arrays import device as devices, folds
from pdgemm.local.arrays.device import Array, to_host
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.reductions import reduction
from pdgemm.planning.tensors.tensor_layouts import partial_layout, undivided
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import Axis, TensorBase, in_layout
from pdgemm.transport.block_copy import copy_permuted


class TensorReductions(TensorBase):
    """The reductions of a tensor over some axes, all by default.  Collective.

    A result without axes is a number, one of a single axis an array, both on every rank; any other is a tensor.
    Types, NaN and the errors of sums are as for a DistMatrix.  Cost: each rank's elements are read once, and those
    that are not contiguous copied in pieces; where a divided axis is reduced, the partial results of each rank are sent
    once.
    """

    def _reduced(self, reduction: folds.Fold | Callable[[], folds.Fold], axis: Axis, keepdims: bool) -> Any:
        """Reduce some axes by a Fold, or by the Fold that a function returns, whose errors are raised on all ranks.

        Each rank reduces its elements.  Partial results of an axis that is divided are then moved so that a rank has
        all those of some results, which it joins.  All elements, without their indices, are reduced as a matrix.
        """
        if axis is None and self.size and not (isinstance(reduction, folds.Fold) and reduction.indexed):
            return self._of_matrix(self.unfolding._reduced(reduction, None, True), keepdims)
        with together(self.grid.comm) as arguments, np.errstate(all="ignore"):
            fold = reduction() if callable(reduction) else reduction
            gone = self.axes_of(axis)
            arguments += [fold.name, gone, keepdims, str(self.layout), self.dtype]
            count = prod(self.shape[x] for x in gone)
            if not count and fold.empty is None:
                raise ArgumentError(f"{fold.name} of no elements: axis={axis} of a tensor of shape {self.shape}")
            dtype, nothing = folds.result_type(fold, self.dtype), folds.of_one_element(fold, self.dtype)
        work, layout, mine = Work(fold.name), partial_layout(self.layout, gone), list[folds.Parts]()

        def part(at: int) -> Array:
            if not mine:
                mine.append(_parts_of(self, fold, gone, nothing))
            return mine[0][at]

        def result() -> np.ndarray:
            if not count:
                return np.full((), fold.empty, dtype)
            return fold.result(_joined(fold, [x.local for x in parts], gone, self), count).astype(dtype)

        kinds = [x.dtype for x in nothing] if count else []
        with np.errstate(all="ignore"):
            parts = [self.with_elements(layout, kind, partial(part, at)) for at, kind in enumerate(kinds)]
        if layout.divided_among(gone):
            layout = undivided(layout, gone, self.grid.members)
            parts = [work.did(in_layout(x, layout, name=fold.name)) for x in parts]
        with np.errstate(all="ignore"):
            whole = parts[0] if parts else self
            whole = whole.with_elements(partial_layout(layout, gone), dtype, result)
        whole = whole if keepdims else type(self)(whole.unfolding, whole.layout.without(gone))
        work.reported(whole.unfolding, 1)
        return whole if keepdims else whole._result()

    def _of_matrix(self, whole: DistMatrix, keepdims: bool) -> Any:
        """Return the tensor of a 1 x 1 matrix on the grid of this tensor's matrix, on the first rank."""
        one = TensorLayout.even((), (), (), (1, 1), self.layout.rank_map[:1])
        there = self.grid.base.reshaped(one.grid_shape, one.rank_map)
        local = whole.stored[:0, :0] if there.idle else whole.stored
        matrix = DistMatrix(local, there, one.matrix, "C")
        matrix.report = whole.report
        result = type(self)(matrix, one)
        return result.expanded(range(self.ndim)) if keepdims else result._result()

    def sum(self, axis: Axis = None, keepdims: bool = False, *, dtype: Any = None) -> Any:
        """Return sums over some axes, all by default, of `dtype`; 16-bit numbers are added in float32.  Collective."""
        return self._typed("sum", axis, keepdims, dtype)

    def prod(self, axis: Axis = None, keepdims: bool = False, *, dtype: Any = None) -> Any:
        """Return products over some axes, all by default, of `dtype`.  Collective."""
        return self._typed("prod", axis, keepdims, dtype)

    def _typed(self, name: str, axis: Axis, keepdims: bool, dtype: Any) -> Any:
        """Return a reduction of elements that are first converted to `dtype`, in this type; None: NumPy's type."""
        terms = self if dtype is None or self.dtype == dtype else self.astype(dtype)
        result = terms._reduced(folds.FOLDS[name], axis, keepdims)
        return result if dtype is None or result.dtype == dtype else result.astype(dtype)

    min = reduction("TensorReductions.min", "least elements over some axes, all by default")
    max = reduction("TensorReductions.max", "largest elements over some axes, all by default")
    argmin = reduction(
        "TensorReductions.argmin", "the indices of the first least elements along an axis, or among all by default"
    )
    argmax = reduction(
        "TensorReductions.argmax", "the indices of the first largest elements along an axis, or among all by default"
    )
    any = reduction("TensorReductions.any", "whether any element over some axes, all by default, is not 0")
    all = reduction("TensorReductions.all", "whether all elements over some axes, all by default, are not 0")
    mean = reduction("TensorReductions.mean", "means over some axes, all by default")

    def count_nonzero(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return the number of elements that are not 0 over some axes, all by default.  Collective."""
        return cast(Any, np.not_equal)(self, 0).sum(axis, keepdims)

    def var(self, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
        """Return variances over some axes, all by default: sums of |x - mean|^2 / (n - ddof).  Collective."""
        return self._reduced(lambda: folds.variance("var", ddof, folds.same), axis, keepdims)

    def std(self, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
        """Return standard deviations over some axes, the square roots of `var`.  Collective."""
        return self._reduced(lambda: folds.variance("std", ddof, np.sqrt), axis, keepdims)

    def vector_norm(self, ord: float = 2, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return norms of the vectors along some axes, all by default; `ord` as for a DistMatrix.  Collective."""
        return self._reduced(lambda: folds.vector_norm(ord), axis, keepdims)


def _parts_of(T: TensorBase, fold: folds.Fold, gone: Sequence[int], nothing: folds.Parts) -> folds.Parts:
    """Return the partial results of this rank's elements, on the host, with an extent of 1 along the axes `gone`.

    Axes are ordered as in memory, so that elements of contiguous axes are not copied.  A fold that finds indices
    reduces the longest axis first, and joins the indices of the others.
    """
    x, indices = T.local, T.indices()
    small = [1 if axis in gone else n for axis, n in enumerate(x.shape)]
    if not x.size:  # another rank has elements
        return tuple(np.zeros(small, part.dtype) for part in nothing)
    inner = sorted(gone, key=lambda axis: -x.shape[axis])[:1] if fold.indexed else [*gone]
    outer = [axis for axis in range(x.ndim) if axis not in inner]
    for axes in (inner, outer):
        axes.sort(key=lambda axis: -abs(x.strides[axis]))
    line = indices[inner[0]] if fold.indexed and inner else np.zeros(1, np.int64)
    pieces = [folds.parts_along(y, 1, fold, line) for y in _matrices(x.transpose(outer + inner), len(outer))]
    back = sorted(range(len(outer)), key=outer.__getitem__)
    parts = tuple(np.concatenate(x).reshape([T.local.shape[a] for a in outer]).transpose(back) for x in zip(*pieces))
    parts = tuple(np.expand_dims(part, tuple(inner)) for part in parts)
    if not fold.indexed or len(gone) == len(inner):
        return tuple(part.reshape(small) for part in parts)
    lines = np.ix_(*(np.zeros(1, np.int64) if axis in inner else each for axis, each in enumerate(indices)))
    along = [parts[1] if axis in inner else lines[axis] for axis in sorted(gone)]
    parts = parts[0], np.ravel_multi_index(np.broadcast_arrays(*along), [T.shape[axis] for axis in sorted(gone)])
    return tuple(x.reshape(small) for x in folds.halved(_lines(parts, gone), fold))


def _joined(fold: folds.Fold, parts: Sequence[Array], gone: Sequence[int], T: TensorBase) -> folds.Parts:
    """Return the joins of partial results along the axes `gone`, which have an index for each part of an axis of T."""
    small = [1 if axis in gone else n for axis, n in enumerate(parts[0].shape)]
    present = [
        [part for part in range(n) if axis not in gone or n == 1 or T.layout.dim(axis).count(part)]
        for axis, n in enumerate(parts[0].shape)
    ]
    return tuple(
        x.reshape(small) for x in folds.halved(_lines([to_host(x)[np.ix_(*present)] for x in parts], gone), fold)
    )


def _lines(parts: Sequence[np.ndarray], gone: Sequence[int]) -> folds.Parts:
    """Return arrays with the axes `gone` as the first axis, and the others as the second one."""
    order = [*gone, *(axis for axis in range(parts[0].ndim) if axis not in gone)]
    return tuple(x.transpose(order).reshape(prod(x.shape[axis] for axis in gone), -1) for x in parts)


def _matrices(x: Array, n: int) -> Iterator[Array]:
    """Yield the elements as matrices whose rows enumerate the first n axes, without a copy if strides allow it."""
    x = x if n else x[None]
    n = max(n, 1)
    cols = prod(x.shape[n:])
    if all(_merges(x.shape[some], x.strides[some]) for some in (slice(n), slice(n, None))):
        yield x.reshape(-1, cols)
        return
    step = max(1, folds.READ * len(x) // x.size)
    for start in range(0, len(x), step):
        piece = x[start : start + step]
        copy = devices.empty(piece.shape, x.dtype, device=devices.of(x))
        copy_permuted(piece, copy)
        yield copy.reshape(-1, cols)


def _merges(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether axes are one axis of equal strides."""
    long = [(n, stride) for n, stride in zip(shape, strides) if n > 1]
    return all(stride == m * each for (_, stride), (m, each) in pairwise(long))
