"""NumPy's operators and functions of a DistTensor: elementwise functions, reductions, shapes, slices, joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from math import gcd, prod
from typing import Any, Self

import numpy as np

import pdgemm
from pdgemm.errors import ArgumentError, KeyIndexError, LayoutError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexPairs
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.device import Array, to_host
from pdgemm.local.arrays.keys import picked
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import is_readable, new_array
from pdgemm.planning.tensor_layouts import default_layout, partial_layout, undivided
from pdgemm.support.agreement import described_elements, together
from pdgemm.tensors.tensor_moves import moved, spread

_Axis = int | tuple[int, ...] | None


class TensorFunctions(np.lib.mixins.NDArrayOperatorsMixin):
    """NumPy's protocols for DistTensor."""

    __array_priority__ = 1001
    __hash__ = None  # type: ignore[assignment]  # `==` is elementwise, as for arrays
    unfolding: DistMatrix
    layout: TensorLayout
    local: Array

    def __init__(self, unfolding: DistMatrix, layout: TensorLayout) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------ attributes
    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    @property
    def size(self) -> int:
        return prod(self.layout.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.unfolding.dtype

    @property
    def grid(self) -> ProcessGrid:
        return self.unfolding.grid

    @property
    def report(self) -> Any:
        """The report of the contraction, the load or the exchange that made this tensor, or None."""
        return self.unfolding.report

    @property
    def later_report(self) -> Any:
        """The report, or the function that makes the report when it is first read."""
        return self.unfolding.later_report

    def __len__(self) -> int:
        return self.shape[0]

    def _with(self, unfolding: DistMatrix) -> Self:
        """Return a tensor of other elements in the same layout.  Local."""
        if unfolding.order == "F":
            layout = self.layout
            return type(self)(unfolding.T, _swapped(layout))
        return type(self)(unfolding, self.layout)

    # ------------------------------------------------------------------ elementwise functions
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply an elementwise function to the unfoldings of tensors in one layout."""
        if ufunc is np.matmul and method == "__call__":
            return pdgemm.tensors.einsum.matmul(*inputs)
        out = options.pop("out", (None,))[0]
        shape = _common_shape(ufunc.__name__, inputs, out)
        tensors = [x for x in (out, *inputs) if isinstance(x, TensorFunctions)]
        like = next((x for x in tensors if x.shape == shape), None)
        grid = tensors[0].grid
        layout = like.layout if like is not None else default_layout(shape, len(grid.members), None, grid.members)
        operands = [_spread(x, layout, tensors[0]) for x in inputs]
        options |= {"out": (out.unfolding,)} if out is not None else {}
        result = getattr(ufunc, method)(*operands, **options) if method == "__call__" else NotImplemented
        if result is NotImplemented:
            raise TypeError(f"numpy.{ufunc.__name__}.{method} is not available for a DistTensor")
        return out if out is not None else type(self)(result, layout)._with(result)

    def __array_function__(self, function: Callable[..., Any], types: Any, arguments: Any, options: Any) -> Any:
        name = f"{function.__module__}.{function.__name__}"
        if name in _METHODS:
            first, *others = arguments
            return getattr(first, _METHODS[name])(*others, **options)
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*arguments, **options)
        raise TypeError(f"{name} is not available for a DistTensor: use .local, .to_global(root) or .allgather()")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("a DistTensor is not one array: use .local, .to_global(root) or .allgather()")

    def __iter__(self) -> Any:
        raise TypeError("a DistTensor cannot be iterated over: use .local, .to_global(root) or .allgather()")

    def __bool__(self) -> bool:
        raise ValueError("a DistTensor has no truth value: compare with numpy.allclose")

    def copy(self) -> Self:
        """Return a copy in the same layout.  Collective."""
        return self._with(self.unfolding.copy())

    def astype(self, dtype: Any) -> Self:
        """Return a copy with elements of another type.  Collective."""
        return self._with(self.unfolding.astype(dtype))

    def conj(self) -> Self:
        """Return the complex conjugate, a copy.  Local."""
        return self._with(self.unfolding.conj())

    # ------------------------------------------------------------------ axes and shapes
    def transpose(self, *axes: Any) -> Self:
        """Return the tensor with its axes in another order, as numpy.transpose: a view.  Local."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = range(self.ndim)[::-1] if order is None or (not axes and self.ndim) else order
        places = np.lib.array_utils.normalize_axis_tuple(order, self.ndim)
        if len(places) != self.ndim:
            raise ArgumentError(f"{self.ndim} axes are transposed, got {shown(axes)}")
        return type(self)(self.unfolding, self.layout.transposed(places))

    @property
    def T(self) -> Self:
        """The tensor with its axes in reversed order, a view.  Local."""
        return self.transpose()

    def reshape(self, *shape: Any) -> Self:
        """Return the tensor in another shape, its elements in the order of their indices (NumPy's "C").  Collective.

        This is a view if the layout is one of the new tensor, too; otherwise one exchange moves the tensor first.
        """
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape
        with together(self.grid.comm) as arguments:
            extents = _as_shape(wanted, self.shape)
            arguments += ["reshape", *extents, str(self.layout)]
            pieces = _pieces(self.shape, extents)
            layout = _reread(self.layout, extents, pieces)
        source = self
        if layout is None:
            source = moved(self, _readable(self, extents, pieces), name="reshape")
            layout = _reread(source.layout, extents, pieces)
            assert layout is not None
        return type(self)(source.unfolding, layout)

    def expanded(self, axes: Sequence[int]) -> Self:
        """Return the tensor with new axes of extent 1 at these places, ascending; a view.  Local."""
        return type(self)(self.unfolding, self.layout.expanded(axes))

    def ravel(self) -> Self:
        """Return the tensor as one axis; see `reshape`.  Collective."""
        return self.reshape(-1)

    def squeeze(self, axis: _Axis = None) -> Self:
        """Return the tensor without axes of extent 1, as numpy.squeeze.  Collective."""
        gone = [x for x, n in enumerate(self.shape) if n == 1] if axis is None else self._axes(axis)
        if any(self.shape[x] != 1 for x in gone):
            raise ArgumentError(f"only axes of extent 1 are dropped; axis={axis} of a tensor of shape {self.shape}")
        return self.reshape([n for x, n in enumerate(self.shape) if x not in gone])

    def _axes(self, axis: _Axis) -> tuple[int, ...]:
        try:
            return tuple(range(self.ndim)) if axis is None else tuple(np.lib.array_utils.normalize_axis_tuple(axis, self.ndim))
        except (ValueError, TypeError) as bad:
            raise ArgumentError(f"axis={shown(axis)} of a tensor of shape {self.shape}: {bad}") from None

    # ------------------------------------------------------------------ parts
    def __getitem__(self, key: Any) -> Any:
        """Return a part, as NumPy's basic indexing: slices of any step, indices, `...`, None; a list for an axis.

        A number or an array of one axis is on every rank, any other part a new tensor.  Nothing is sent, unless an
        axis that is divided is indexed by a number, a list or a slice whose step is not 1.  Collective.
        """
        with together(self.grid.comm) as arguments:
            picks, dropped, new = _parsed(key, self.shape)
            arguments += ["T[...]", str(self.layout), dropped, new, *picks.values()]
            apart = [x for x in self.layout.divided if x in dropped or not isinstance(picks.get(x, range(0)), range)]
        shape = [len(picks.get(axis, range(n))) for axis, n in enumerate(self.shape)]
        if apart:
            kept = [x for x in range(self.ndim) if x not in dropped]
            target = self._default([shape[x] for x in kept]).expanded(dropped)
            pairs = {x: IndexPairs(np.asarray(indices), np.arange(len(indices))) for x, indices in picks.items()}
            part = moved(self, target, pairs, name="T[...]")
        else:
            part = self._windowed(picks)
        part = type(self)(part.unfolding, part.layout.without(dropped))
        return whole_if_small(part.expanded(new), self.ndim > 1)

    def _default(self, shape: Sequence[int]) -> TensorLayout:
        """Return the default layout of a tensor of this shape on all ranks of this grid."""
        ranks = self.grid.members
        return default_layout(tuple(shape), len(ranks), None, ranks)

    def _windowed(self, picks: dict[int, Any]) -> Self:
        """Return a copy of some indices of each axis; those of an axis that is divided follow each other.  Local."""
        layout, shape, first, key = self.layout, [*self.shape], [*self.layout.first], [slice(None)] * self.ndim
        for axis, indices in picks.items():
            shape[axis] = len(indices)
            key[axis] = slice(indices.start, indices.stop) if isinstance(indices, range) else indices
        for at, axes in enumerate((layout.rows, layout.cols)):
            if axes and isinstance(window := picks.get(axes[0]), range):
                ends = window.start, window.stop
                key[axes[0]] = first[at].local_window(*ends, self.grid.coords[at])
                first[at] = first[at].window(*ends)
            elif axes and axes[0] in picks:
                first[at] = BlockCyclic(shape[axes[0]], max(1, shape[axes[0]]), 1)
        there = replace(layout, shape=tuple(shape), first=(first[0], first[1]))
        return self._new(there, self.dtype, lambda: reduce(lambda x, axis: x[_along(axis, key[axis])], picks, self.local))

    def _part(self, places: dict[int, int]) -> Self:
        """Return the part with these indices of some axes, none of which is divided.  Local."""
        key = tuple(places.get(axis, slice(None)) for axis in range(self.ndim))
        return self._new(self.layout.without([*places]), self.dtype, lambda: self.local[key])

    def _new(self, layout: TensorLayout, dtype: np.dtype, elements: Callable[[], Array]) -> Self:
        """Return a tensor on the grid of this one.  Collective.   elements : returns those of this rank."""
        with (agreement := together(self.grid.comm)):
            there = self.grid.base.reshaped(layout.grid_shape, layout.rank_map)
            shape, where = layout.matrix.local_shape(there.coords), devices.of(self.unfolding.stored)
            local = new_array(shape, dtype, "C", there, where)
            agreement.flag = not is_readable(local, there)
            result = type(self)(DistMatrix(local, there, layout.matrix, "C"), layout)
            if local.size:
                result.local[...] = elements()
        result.unfolding.shared = not agreement.flag
        return result

    # ------------------------------------------------------------------ reductions
    def _reduced(self, name: str, axis: _Axis, keepdims: bool) -> Any:
        """Return a reduction of some axes: a number or an array of one axis on every rank, otherwise a tensor.

        Each rank reduces its elements.  Partial results of an axis that is divided are then moved so that a rank has
        all those of some results, which it reduces.
        """
        act = getattr(np, name)
        with together(self.grid.comm) as arguments:
            gone = self._axes(axis)
            arguments += [name, gone, keepdims, str(self.layout), self.dtype]
            if name in ("min", "max") and not prod(self.shape[x] for x in gone):
                raise ArgumentError(f"{name} of no elements: axis={axis} of a tensor of shape {self.shape}")
            dtype = act(np.ones(1, self.dtype)).dtype
        part = self._partly(name, gone, dtype)
        if set(gone) & set(self.layout.divided):
            there = moved(part, undivided(part.layout, gone, self.grid.members), name=name)
            part = there._partly(name, gone, dtype)
            part.unfolding.report = there.unfolding.later_report
        if keepdims:
            return part
        return whole_if_small(type(self)(part.unfolding, part.layout.without(gone)), True)

    def _partly(self, name: str, gone: tuple[int, ...], dtype: np.dtype) -> Self:
        """Return the reductions of each rank's elements: an axis that is divided has one index for each part."""
        there = partial_layout(self.layout, gone)
        return self._new(there, dtype, lambda: _fold(name, self.local, gone, dtype))

    def sum(self, axis: _Axis = None, keepdims: bool = False) -> Any:
        """Return sums over some axes, all by default; of 16-bit numbers in float32.  Collective."""
        return self._reduced("sum", axis, keepdims)

    def prod(self, axis: _Axis = None, keepdims: bool = False) -> Any:
        """Return products over some axes, all by default.  Collective."""
        return self._reduced("prod", axis, keepdims)

    def min(self, axis: _Axis = None, keepdims: bool = False) -> Any:
        """Return least elements over some axes, all by default.  Collective."""
        return self._reduced("min", axis, keepdims)

    def max(self, axis: _Axis = None, keepdims: bool = False) -> Any:
        """Return largest elements over some axes, all by default.  Collective."""
        return self._reduced("max", axis, keepdims)

    def any(self, axis: _Axis = None, keepdims: bool = False) -> Any:
        """Return whether any element over some axes, all by default, is not 0.  Collective."""
        return self._reduced("any", axis, keepdims)

    def all(self, axis: _Axis = None, keepdims: bool = False) -> Any:
        """Return whether all elements over some axes, all by default, are not 0.  Collective."""
        return self._reduced("all", axis, keepdims)

    def mean(self, axis: _Axis = None, keepdims: bool = False) -> Any:
        """Return means over some axes, all by default.  Collective."""
        total = self.sum(axis, keepdims)
        with np.errstate(all="ignore"):
            return np.true_divide(total, prod(self.shape[x] for x in self._axes(axis)))

    def var(self, axis: _Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
        """Return variances over some axes, all by default: of |x - mean|^2, divided by the number less ddof.  Collective."""
        apart = np.abs(self - self.mean(axis, keepdims=True))
        with np.errstate(all="ignore"):
            return (apart * apart).sum(axis, keepdims) / max(prod(self.shape[x] for x in self._axes(axis)) - ddof, 0)

    def std(self, axis: _Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
        """Return standard deviations over some axes, the square roots of `var`.  Collective."""
        return np.sqrt(self.var(axis, ddof, keepdims))


def _fold(name: str, x: Array, axes: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return a reduction of an array with its axes kept; of no elements, the value that changes no other one."""
    if name in ("min", "max") and not x.size:
        shape = [1 if at in axes else n for at, n in enumerate(x.shape)]
        ends = (np.iinfo(dtype).max, np.iinfo(dtype).min) if dtype.kind in "iu" else (np.inf, -np.inf)
        return np.full(shape, dtype.kind == "b" and name == "min" if dtype.kind == "b" else ends[name == "max"])
    wide = {"dtype": np.float32} if name in ("sum", "prod") and dtype.itemsize == 2 and dtype.kind not in "iu" else {}
    return getattr(np, name)(x, axis=axes, keepdims=True, **wide)


def _along(axis: int, key: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * axis, key)


def whole_if_small(T: Any, allowed: bool = True) -> Any:
    """Return a number, or an array of one axis, that is on every rank; a tensor of several axes unchanged."""
    if T.ndim > 1 or not allowed:
        return T
    return T.allgather()[()]


# ---------------------------------------------------------------- shapes
_Pieces = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _as_shape(shape: Any, present: tuple[int, ...]) -> tuple[int, ...]:
    """Return the extents of a reshaped tensor, of which one may be -1.  Raises LayoutError."""
    extents, size = [int(x) for x in np.atleast_1d(np.asarray(shape, dtype=object))], prod(present)
    known = prod(x for x in extents if x >= 0)
    if extents.count(-1) == 1 and known and size % known == 0:
        extents[extents.index(-1)] = size // known
    if min(extents, default=0) < 0 or prod(extents) != size:
        raise LayoutError(f"a tensor of shape {present} cannot become one of shape {tuple(extents)}")
    return tuple(extents)


def _pieces(old: tuple[int, ...], new: tuple[int, ...]) -> _Pieces:
    """Return the shortest runs of axes, before and after a reshape, of equal numbers of elements."""
    if not prod(old):
        return [(tuple(range(len(old))), tuple(range(len(new))))]
    pieces, ends = _Pieces(), [0, 0]
    while min(ends[0] - len(old), ends[1] - len(new)) < 0:
        begins, sizes = [*ends], [1, 1]
        while True:
            side = int(sizes[0] > sizes[1] or ends[0] == len(old))
            if sizes[0] == sizes[1] and ends != begins and min(e - b for e, b in zip(ends, begins)) > 0:
                break
            if ends[side] == (len(old), len(new))[side]:
                break
            sizes[side] *= (old, new)[side][ends[side]]
            ends[side] += 1
        pieces.append((tuple(range(begins[0], ends[0])), tuple(range(begins[1], ends[1]))))
    return pieces


def _reread(layout: TensorLayout, shape: tuple[int, ...], pieces: _Pieces) -> TensorLayout | None:
    """Return the layout of the reshaped tensor with the same matrix; None if there is none."""
    groups = []
    for axes in (layout.rows, layout.cols):
        group, left = list[int](), list(axes)
        while left:
            old, new = next(x for x in pieces if left[0] in x[0])
            if tuple(left[: len(old)]) != old:
                return None
            group, left = group + list(new), left[len(old) :]
        groups.append(group)
    groups[1] += [x for old, new in pieces if not old for x in new]
    try:
        return TensorLayout.of_matrix(layout.of(np.dtype(bool)), shape, *groups)
    except LayoutError:
        return None


def _readable(T: Any, shape: tuple[int, ...], pieces: _Pieces) -> TensorLayout:
    """Return a layout of a tensor whose matrix is also one of the reshaped tensor."""
    sizes = [prod(T.shape[x] for x in old) for old, _ in pieces]
    runs = T._default(sizes)
    rows, cols = (tuple(x for piece in group for x in pieces[piece][0]) for group in (runs.rows, runs.cols))
    layout = TensorLayout.even(T.shape, rows, cols, runs.grid_shape, runs.rank_map)
    first = []
    for dim, group in zip(layout.first, (runs.rows, runs.cols)):
        if group and prod(sizes):
            old, new = (prod(extents[x] for x in axes[1:]) for extents, axes in zip((T.shape, shape), pieces[group[0]]))
            unit = new // gcd(old, new)
            dim = replace(dim, block=-(-dim.block // unit) * unit)
        first.append(dim)
    return replace(layout, first=(first[0], first[1]))


def _parsed(key: Any, shape: tuple[int, ...]) -> tuple[dict[int, Any], list[int], list[int]]:
    """Return the indices by axis, the axes that are dropped, and the places of new axes in the result.

    The indices are a range of step 1, or an array.  Raises KeyIndexError.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    taken = sum(x is not None and x is not ... for x in keys)
    if taken > len(shape) or sum(x is ... for x in keys) > 1:
        raise KeyIndexError(f"{shown(key)} has {taken} indices, the tensor has shape {shape}")
    if not any(x is ... for x in keys):
        keys.append(...)
    at = next(at for at, x in enumerate(keys) if x is ...)
    keys[at : at + 1] = [slice(None)] * (len(shape) - taken)
    picks, dropped, new, axis, place = dict[int, Any](), list[int](), list[int](), 0, 0
    for x in keys:
        if x is None:
            new.append(place)
            place += 1
            continue
        one = picked((x, slice(None)), (shape[axis], 1))[0]
        if one.dropped:
            dropped.append(axis)
        place += not one.dropped
        if one.dropped or not isinstance(one.indices, range) or len(one.indices) != shape[axis]:
            picks[axis] = one.indices
        axis += 1
    if sum(isinstance(x, (list, np.ndarray)) and np.ndim(x) > 0 for x in keys) > 1:
        raise KeyIndexError("one axis of a tensor may be indexed by a list: T[rows][:, cols] for a second one")
    return picks, dropped, new


# ---------------------------------------------------------------- operands of elementwise functions
def _common_shape(name: str, inputs: Sequence[Any], out: Any) -> tuple[int, ...]:
    """Return the shape of the result of an elementwise function.  Raises LayoutError on all ranks."""
    tensor = next(x for x in (out, *inputs) if isinstance(x, TensorFunctions))
    shapes = [x.shape if isinstance(x, (TensorFunctions, DistMatrix)) else np.shape(x) for x in inputs]
    with together(tensor.grid.comm) as arguments:
        arguments += [name, *shapes]
        if out is not None and not isinstance(out, TensorFunctions):
            raise TypeError(f"{name} of a DistTensor: out is a {type(out).__name__}, and not a DistTensor")
        try:
            shape = np.broadcast_shapes(*shapes)
        except ValueError:
            raise LayoutError(f"{name}: shapes {' and '.join(map(str, shapes))} cannot be broadcast") from None
        if out is not None and out.shape != shape:
            raise LayoutError(f"{name} has the shape {shape}, and out is {out!r}")
    return shape


def _spread(x: Any, layout: TensorLayout, like: Any) -> Any:
    """Return an operand as a matrix that has, in this layout, the elements broadcast to its shape; a number unchanged."""
    if isinstance(x, DistMatrix):
        x = x.tensor(x.shape)
    if not isinstance(x, TensorFunctions) and not np.ndim(x):
        return x
    new = list(range(len(layout.shape) - np.ndim(x) if not isinstance(x, TensorFunctions) else len(layout.shape) - x.ndim))
    if isinstance(x, TensorFunctions):
        wide = x.expanded(new)
        part = spread(wide, layout)
        if part.shape == layout.shape:
            return part.unfolding
        elements, dtype = (lambda: part.local), part.dtype
    else:
        array = to_host(devices.adopted(x))[(None,) * len(new)]
        with together(like.grid.comm) as arguments:
            arguments += ["an array", described_elements(array)]
        coords = like.grid.base.reshaped(layout.grid_shape, layout.rank_map).coords
        picks = [layout.indices(at, coords) if n > 1 else [0] for at, n in enumerate(array.shape)]
        elements, dtype = (lambda: array[np.ix_(*picks)]), array.dtype
    return like._new(layout, dtype, elements).unfolding


def _swapped(layout: TensorLayout) -> TensorLayout:
    """Return the layout whose matrix is the transpose."""
    pr, pc = layout.grid_shape
    ranks = tuple(np.reshape(layout.rank_map, (pr, pc)).T.ravel().tolist())
    return replace(layout, rows=layout.cols, cols=layout.rows, first=layout.first[::-1], rank_map=ranks)


# ---------------------------------------------------------------- NumPy's functions
def concatenate(tensors: Sequence[Any], axis: int = 0) -> Any:
    """Return tensors joined along an axis, as numpy.concatenate.  Collective."""
    first = next(x for x in tensors if isinstance(x, TensorFunctions))
    with together(first.grid.comm) as arguments:
        arguments += ["concatenate", axis, *(str(getattr(x, "layout", x)) for x in tensors)]
        at = first._axes(axis)[0]
        others = {(x.ndim, x.shape[:at], x.shape[at + 1 :]) if isinstance(x, TensorFunctions) else None for x in tensors}
        if len(others) != 1:
            raise LayoutError(f"tensors joined along axis {axis} must agree in the other axes, got {[np.shape(x) for x in tensors]}")
        dtype = np.result_type(*(x.dtype for x in tensors))
    kept = first._default([n for x, n in enumerate(first.shape) if x != at])
    parts = [moved(x, kept.expanded([at], [x.shape[at]]), name="concatenate") for x in tensors]
    layout = kept.expanded([at], [sum(x.shape[at] for x in tensors)])
    return first._new(layout, dtype, lambda: np.concatenate([x.local for x in parts], axis=at))


def stack(tensors: Sequence[Any], axis: int = 0) -> Any:
    """Return tensors of one shape joined along a new axis, as numpy.stack.  Collective."""
    ndim = next(x for x in tensors if isinstance(x, TensorFunctions)).ndim + 1
    return concatenate([x.expanded([axis % ndim]) for x in tensors], axis % ndim)


def moveaxis(T: Any, source: Any, destination: Any) -> Any:
    """Return a view with axes moved to other places, as numpy.moveaxis.  Local."""
    here, there = T._axes(source), T._axes(destination)
    order = [x for x in range(T.ndim) if x not in here]
    for to, axis in sorted(zip(there, here)):
        order.insert(to, axis)
    return T.transpose(order)


def expand_dims(T: Any, axis: Any) -> Any:
    axes = np.lib.array_utils.normalize_axis_tuple(axis, T.ndim + np.size(axis))
    return T.expanded(sorted(axes))


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Return whether two tensors, or a tensor and an array, are equal within tolerances.  Collective."""
    tensor = a if isinstance(a, TensorFunctions) else b
    layout = tensor.layout
    A, B = (_spread(x, layout, tensor) for x in (a, b))
    return bool(np.allclose(A, B, rtol, atol, equal_nan))


_NAMES = ("sum", "prod", "min", "max", "any", "all", "mean", "var", "std", "transpose", "reshape", "ravel", "squeeze")
_METHODS = {f"numpy.{name}": name for name in (*_NAMES, "copy", "astype")}
_METHODS |= {"numpy.amin": "min", "numpy.amax": "max", "numpy.permute_dims": "transpose"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"numpy.{x.__name__}": x for x in (concatenate, stack, moveaxis, expand_dims, allclose)
} | {
    "numpy.concat": concatenate,
    "numpy.swapaxes": lambda a, axis1, axis2: moveaxis(a, (axis1, axis2), (axis2, axis1)),
    "numpy.shape": lambda a: a.shape,
    "numpy.ndim": lambda a: a.ndim,
    "numpy.size": lambda a: a.size,
    "numpy.einsum": lambda *x, **options: pdgemm.einsum(*x, **options),
    "numpy.tensordot": lambda *x, **options: pdgemm.tensordot(*x, **options),
    "numpy.real": lambda val: val._with(val.unfolding.real),
    "numpy.imag": lambda val: val._with(val.unfolding.imag),
}
