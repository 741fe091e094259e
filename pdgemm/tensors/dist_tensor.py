"""DistTensor: a distributed array of any number of dimensions, as a DistMatrix and the axes that it enumerates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Self, get_args

import numpy as np

from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.grids.process_grid import ProcessGrid, default_grid
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.arguments import as_name
from pdgemm.local.arrays.device import HOST, Array, to_host
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.local.arrays.element_functions import element_function
from pdgemm.local.arrays.elementwise import set_broadcast
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of, device_on, new_array, new_shared
from pdgemm.names import DeviceName, DType, RandomKind
from pdgemm.planning.tensors.tensor_layouts import default_layout
from pdgemm.support.agreement import described_elements, together
from pdgemm.tensors.indexing.tensor_indexing import TensorIndexing
from pdgemm.tensors.tensor_base import in_layout
from pdgemm.tensors.tensor_functions import TensorFunctions
from pdgemm.tensors.tensor_reductions import TensorReductions

Axes = Sequence[int]
Described = Callable[[list[object]], tuple[TensorLayout, np.dtype]]


class DistTensor(TensorIndexing, TensorReductions, TensorFunctions):
    """A dense array of any number of dimensions, distributed over the ranks of a ProcessGrid.

    unfolding : the DistMatrix that has the elements; its rows enumerate the indices of some axes, its columns those of
             the others, the first axis of each group slowest.
    layout : the `pdgemm.grids.tensor_layout.TensorLayout`: which rank owns which elements.  Only the first axis of each
             group is divided among ranks.
    local  : this rank's elements, an array with as many dimensions as the tensor.  Changing it changes the tensor.
    report : the report of the contraction, the load or the exchange that computed this tensor, or None.

    A DistMatrix is the tensor of two axes: `A.tensor(shape)` reads a matrix as a tensor, `T.matrix(rows, cols)` a
    tensor as a matrix.  Both send nothing where the groups of axes are those of the layout.

    Make a tensor by `empty, zeros, full, random, from_function, from_global` (all collective over the grid).
    `pdgemm.einsum` and `pdgemm.tensordot` contract tensors.  NumPy's elementwise operators and functions act on each
    rank's elements, with scalars, tensors and arrays of any shape that broadcasts; a tensor of another layout is moved
    first, and the report of the result has the words that were sent.  `numpy.einsum`, `tensordot`, `transpose`,
    `moveaxis`, `reshape`, `concatenate`, `stack` and the reductions take tensors, too.
    """

    # ------------------------------------------------------------------ making
    @classmethod
    def empty(
        cls,
        shape: Sequence[int],
        *,
        grid: ProcessGrid | None = None,
        rows: Axes | None = None,
        cols: Axes | None = None,
        dtype: DType = float,
        device: DeviceName = HOST,
        layout: TensorLayout | None = None,
    ) -> Self:
        """Make a tensor whose elements are not initialised.  Collective over the grid.

        shape : the extents of the axes, any number of them.
        grid  : by default a grid of all ranks.  Its shape is the shape of the grid of the unfolding, if `rows` or
                `cols` are given; otherwise the grid of its ranks that divides the two longest axes most evenly.
        rows, cols : the axes that the rows, and the columns, of the unfolding enumerate; the first of each is divided.
        layout : instead of rows and cols, a whole layout, such as that of a plan.
        Raises LayoutError, ArgumentError, DTypeError, DeviceError or MemoryError, on every rank.
        """
        grid = default_grid() if grid is None else grid

        def described(arguments: list[object]) -> tuple[TensorLayout, np.dtype]:
            chosen = _layout(shape, grid, rows, cols, layout)
            arguments += ["DistTensor.empty", str(chosen), chosen.rank_map]
            return chosen, element_type(dtype)

        return cls._described(described, grid, device)

    @classmethod
    def _described(cls, described: Described, grid: ProcessGrid, device: DeviceName) -> Self:
        """Return a tensor that is not initialised, after one agreement of the ranks.  Collective.

        described : returns the layout and the type, and appends what all ranks must have in common; it may be called
            twice, and what it raises on one rank is raised on all.
        """
        communicator_of(grid)
        where, chosen = device_on(grid, device), list[tuple[TensorLayout, ProcessGrid]]()

        def allocate(arguments: list[object]) -> Array:
            layout, dtype = described(arguments)
            arguments.append(dtype)
            there = grid.base.reshaped(layout.grid_shape, layout.rank_map)
            chosen[:] = [(layout, there)]
            return new_array(layout.matrix.local_shape(there.coords), dtype, "C", there, where)

        local, shared = new_shared(grid.base, allocate)
        layout, there = chosen[0]
        return cls(DistMatrix(local, there, layout.matrix, "C", shared=shared), layout)

    @classmethod
    def _allocated(cls, layout: TensorLayout, grid: ProcessGrid, dtype: np.dtype, device: DeviceName) -> Self:
        return cls._described(lambda _: (layout, dtype), grid, device)

    @classmethod
    def full(
        cls,
        shape: Sequence[int],
        value: complex,
        *,
        grid: ProcessGrid | None = None,
        rows: Axes | None = None,
        cols: Axes | None = None,
        dtype: DType | None = None,
        device: DeviceName = HOST,
        layout: TensorLayout | None = None,
    ) -> Self:
        """Make a tensor of one number, of NumPy's type of the number by default.  Collective; arguments of `empty`."""
        grid, number = default_grid() if grid is None else grid, list[np.ndarray]()

        def described(arguments: list[object]) -> tuple[TensorLayout, np.dtype]:
            chosen, kind = _layout(shape, grid, rows, cols, layout), None if dtype is None else element_type(dtype)
            number[:] = [np.asarray(value, kind)]
            arguments += ["DistTensor.full", str(chosen), chosen.rank_map, value]
            return chosen, element_type(number[0].dtype)

        tensor = cls._described(described, grid, device)
        if tensor.device == HOST:
            tensor.local[...] = number[0]
        else:
            tensor.unfolding.fill(value)
        return tensor

    @classmethod
    def zeros(cls, shape: Sequence[int], **options: Any) -> Self:
        """Make a tensor of zeros.  Collective; arguments of `empty`."""
        return cls.full(shape, 0, **{"dtype": float, **options})

    @classmethod
    def from_function(cls, f: Callable[..., Any], shape: Sequence[int], **options: Any) -> Self:
        """Make the tensor T[i, j, ...] = f(i, j, ...).  Collective; no element is sent; arguments of `empty`.

        f : called with one integer array for each axis, of extents that broadcast; returns a value that broadcasts.  An
            exception in f on any rank is raised on all ranks.
        """
        tensor = cls.empty(shape, **options)
        with together(tensor.grid.comm) as arguments:
            arguments.append("DistTensor.from_function")
            if tensor.local.size:
                tensor._set(np.broadcast_to(np.asarray(f(*np.ix_(*tensor.indices()))), tensor.local.shape))
        return tensor

    @classmethod
    def random(cls, shape: Sequence[int], *, seed: int = 0, kind: RandomKind = "uniform", **options: Any) -> Self:
        """Make a tensor of random numbers, which depend on the seed and the shape but not on the layout.  Collective.

        kind : "uniform" on [0, 1), or "normal" with mean 0 and variance 1.   Other arguments as for `empty`.
        """
        tensor = cls.empty(shape, **options)
        with together(tensor.grid.comm) as arguments:
            f = element_function(as_name(kind, "kind", get_args(RandomKind)), seed, tensor.dtype)
            arguments += ["DistTensor.random", f"seed={seed}", kind]
            if tensor.local.size:
                places = np.ravel_multi_index(np.ix_(*tensor.indices()), tensor.shape) if tensor.ndim else np.int64(0)
                tensor._set(np.reshape(f(np.reshape(places, (-1, 1)), np.zeros((1, 1), np.int64)), tensor.local.shape))
        return tensor

    @classmethod
    def from_global(
        cls,
        array: Any,
        *,
        check: bool = True,
        grid: ProcessGrid | None = None,
        rows: Axes | None = None,
        cols: Axes | None = None,
        dtype: DType | None = None,
        device: DeviceName = HOST,
        layout: TensorLayout | None = None,
    ) -> Self:
        """Distribute an array that is the same on every rank; each rank copies its part.  Collective.

        check : compare a checksum of the array among the ranks.   Other arguments as for `empty`.
        """
        grid, read = default_grid() if grid is None else grid, list[np.ndarray]()

        def described(arguments: list[object]) -> tuple[TensorLayout, np.dtype]:
            whole = _on_every_rank(array, dtype)
            read[:] = [whole]
            arguments += ["DistTensor.from_global", whole.shape, whole.dtype]
            arguments += [described_elements(whole)] if check and grid.size > 1 else []
            return _layout(whole.shape, grid, rows, cols, layout), element_type(whole.dtype if dtype is None else dtype)

        tensor = cls._described(described, grid, device)
        (whole,) = read
        # only a device, or a conversion that warns, may fail on one rank
        with together(grid.comm, device != HOST or not np.can_cast(whole.dtype, tensor.dtype)):
            if tensor.local.size:
                tensor._set(whole[np.ix_(*tensor.indices())] if whole.ndim else whole)
        return tensor

    @classmethod
    def of_matrix(cls, A: DistMatrix, shape: Sequence[int]) -> Self:
        """Return a matrix as a tensor of this shape; a view where no block ends within an index of a first axis.

        shape : extents of which the first ones have the product A.shape[0], and the others A.shape[1].  If a block of A
            ends within an index of the first axis of a group, A is redistributed.  Collective.
        """
        with together(A.grid.comm) as arguments:
            arguments += ["A.tensor", *shape, A.distribution]
            splits = sorted(range(len(shape) + 1), key=lambda k: k in (0, len(shape)))  # groups with axes come first
            possible = [k for k in splits if (prod(shape[:k]), prod(shape[k:])) == A.shape]
            if not possible:
                rows, cols = A.shape
                raise LayoutError(f"no first extents of {tuple(shape)} have the product {rows}, and the others {cols}")
        groups = [(tuple(range(k)), tuple(range(k, len(shape)))) for k in possible]
        for axes in groups:
            with suppress(LayoutError):
                return cls(A if A.order == "C" else A.T, TensorLayout.of_matrix(A.layout_in(A.grid), shape, *axes))
        target = default_layout(tuple(shape), len(A.grid.members), groups[0], A.grid.members)
        out = cls._allocated(target, A.grid, A.dtype, A.device)
        A.redistribute(out.unfolding)
        return out

    def _set(self, elements: np.ndarray) -> None:
        """Set the local elements to those of an array on the host.  Local."""
        set_broadcast(self.local, elements)

    # ------------------------------------------------------------------ reading
    def matrix(self, rows: Axes, cols: Axes | None = None) -> DistMatrix:
        """Return the matrix whose rows enumerate the axes `rows`, the first one slowest, and its columns the others.

        cols : by default the other axes in ascending order.  The matrix is a view of the tensor where these are its
        groups of axes, else a copy in another layout, of which `.report` has the words.  Collective.
        """
        with together(self.grid.comm) as arguments:
            axes = _groups(self.ndim, rows, cols)
            arguments += ["matrix of a tensor", *axes]
        for same, (down, across) in ((True, axes), (False, axes[::-1])):
            if (self.layout.rows, self.layout.cols) == (down, across):
                return self.unfolding if same else self.unfolding.T
        target = default_layout(self.shape, len(self.grid.members), axes, self.grid.members)
        return in_layout(self, target, name="matrix of a tensor").unfolding

    def __repr__(self) -> str:
        held = " x ".join(map(str, self.local.shape))
        return f"{type(self).__name__}({self.layout}, {self.dtype}; rank {self.grid.rank} holds {held or 'one number'})"


def _on_every_rank(array: Any, dtype: Any) -> np.ndarray:
    """Return an array, nested sequences or a number as an array on the host; numbers of Python in the type `dtype`."""
    if isinstance(array, (list, tuple, int, float, complex)) and dtype is not None:
        return np.asarray(array, element_type(dtype))
    return to_host(devices.adopted(array)) if np.ndim(array) else np.asarray(array)


def _layout(
    shape: Sequence[int], grid: ProcessGrid, rows: Axes | None, cols: Axes | None, layout: TensorLayout | None
) -> TensorLayout:
    """Return the layout of a new tensor.  Raises LayoutError or ArgumentError.  Local."""
    extents = tuple(int(x) for x in shape)
    if min(extents, default=0) < 0:
        raise LayoutError(f"the extents of a tensor must be >= 0, got {extents}")
    ranks = grid.members
    if layout is not None:
        if layout.shape != extents or set(layout.rank_map) - set(range(grid.size)):
            raise LayoutError(f"the layout is that of a tensor {layout}, not of {extents} on {grid.size} ranks")
        return layout
    if rows is None and cols is None:
        return default_layout(extents, len(ranks), None, ranks)
    if rows is None:
        down, across = _groups(len(extents), cols or (), None)[::-1]
    else:
        down, across = _groups(len(extents), rows, cols)
    if any(not axes and parts > 1 for axes, parts in zip((down, across), grid.base.shape)):
        return default_layout(extents, len(ranks), (down, across), ranks)
    return TensorLayout.even(extents, down, across, grid.base.shape, ranks)


def _groups(ndim: int, rows: Axes, cols: Axes | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two groups of axes, which together have each axis once.  Raises ArgumentError."""
    try:
        down = tuple(np.lib.array_utils.normalize_axis_tuple(rows, ndim))
        others = [x for x in range(ndim) if x not in down] if cols is None else cols
        across = tuple(np.lib.array_utils.normalize_axis_tuple(others, ndim))
    except ValueError as bad:
        raise ArgumentError(f"rows and cols are axes of a tensor of {ndim} dimensions: {bad}") from None
    if sorted(down + across) != list(range(ndim)):
        raise ArgumentError(f"rows {down} and cols {across} must have each of {ndim} axes once")
    return down, across
