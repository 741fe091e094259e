"""TensorBase: the elements and the layout of a tensor, and its views; exchanges from one layout to another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from time import perf_counter
from typing import Any, Self, TypeVar

import numpy as np

from pdgemm.algorithms.indexing.selection import copy_pairs
from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.linalg.work import Work
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.device import Array, to_host
from pdgemm.local.arrays.elementwise import set_broadcast
from pdgemm.matrix.array_functions import check_one_device
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import is_readable, new_array
from pdgemm.names import DeviceName
from pdgemm.planning.tensors.tensor_layouts import default_layout
from pdgemm.schedules.exchanges import tensor_exchange
from pdgemm.support.agreement import described_elements, together
from pdgemm.support.members import attribute_at
from pdgemm.transport.block_copy import copy_permuted

Axis = int | tuple[int, ...] | None  # axes of a reduction; None: all


class TensorBase:
    """A DistMatrix, `unfolding`, and the axes that its rows and columns enumerate, `layout`.

    device : the name of the memory that the local arrays are in: "host", "cuda".
    report : the report of the contraction, the load or the exchange that made this tensor, or None.
    later_report : the report, or the function that makes the report when it is first read.
    """

    narrow_products = False  # whether products of int8 are int8, as in NumPy, and not int32

    def __init__(self, unfolding: DistMatrix, layout: TensorLayout) -> None:
        """Make a tensor of a matrix without checking that it fits the layout.  Local; `A.tensor` checks."""
        self.unfolding, self.layout = unfolding, layout

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    @property
    def size(self) -> int:
        return prod(self.layout.shape)

    shape: tuple[int, ...] = attribute_at("layout.shape")
    dtype: np.dtype = attribute_at("unfolding.dtype")
    device: DeviceName = attribute_at("unfolding.device")
    grid: ProcessGrid = attribute_at("unfolding.grid")
    report: Any = attribute_at("unfolding.report")
    later_report: Any = attribute_at("unfolding.later_report")

    def __len__(self) -> int:
        return self.shape[0]

    def _like(self, unfolding: DistMatrix) -> Self:
        """Return a tensor of other elements in the same layout.  Local."""
        if unfolding.order == "F":
            return type(self)(unfolding.T, self.layout.swapped)
        return type(self)(unfolding, self.layout)

    @property
    def local(self) -> Array:
        """This rank's elements, with the axes of the tensor; a view of `unfolding.local`.

        A view, because a reshape that only divides rows and columns never copies, on the host or on a device; but of a
        conjugated matrix, `A.H.tensor(shape)`, it is a copy, as `unfolding.local`.
        Of a tensor without axes, a rank without its number has an array of shape (0, 0).
        """
        elements, coords = self.unfolding.local, self.grid.coords
        axes, extents = self.layout.rows + self.layout.cols, self.layout.local_shape(coords)
        if not axes and not elements.size:
            return elements
        return elements.reshape([extents[x] for x in axes]).transpose(sorted(range(len(axes)), key=axes.__getitem__))

    def indices(self) -> list[np.ndarray]:
        """Return, for each axis, the indices of this rank's elements, ascending.  Local."""
        return [self.layout.indices(axis, self.grid.coords) for axis in range(self.ndim)]

    def allgather(self) -> np.ndarray:
        """Return the whole tensor on every rank.  Collective."""
        return self._whole(self.unfolding.allgather())

    def to_global(self, root: int = 0) -> np.ndarray | None:
        """Return the whole tensor on `root`, None on the other ranks.  Collective."""
        whole = self.unfolding.to_global(root)
        return None if whole is None else self._whole(whole)

    def _whole(self, matrix: np.ndarray) -> np.ndarray:
        axes = self.layout.rows + self.layout.cols
        return matrix.reshape([self.shape[x] for x in axes]).transpose(np.argsort(axes) if axes else None)

    # ------------------------------------------------------------------ copies
    def copy(self) -> Self:
        """Return a copy in the same layout.  Collective."""
        return self._like(self.unfolding.copy())

    def astype(self, dtype: Any) -> Self:
        """Return a copy with elements of another type.  Collective."""
        return self._like(self.unfolding.astype(dtype))

    def to_device(self, device: DeviceName = "cuda") -> Self:
        """Return a copy in the memory of a device or the host, or the tensor itself if it is there.  Collective.

        Raises DeviceError where the device does not exist, OutOfMemoryError where its memory is full; on every rank.
        """
        return self._like(self.unfolding.to_device(device))

    def to_host(self) -> Self:
        """Return a copy in the memory of the host, or the tensor itself if it is there.  Collective."""
        return self._like(self.unfolding.to_host())

    def conj(self) -> Self:
        """Return the complex conjugate, a copy.  Local."""
        return self._like(self.unfolding.conj())

    @property
    def real(self) -> Self:
        """The real part: a copy, or the elements themselves if they are not complex.  Local."""
        return self._like(self.unfolding.real)

    @property
    def imag(self) -> Self:
        """The imaginary part, a copy.  Local."""
        return self._like(self.unfolding.imag)

    def fill(self, value: complex) -> None:
        """Set all elements to a number.  Collective."""
        self.unfolding.fill(value)

    # ------------------------------------------------------------------ views
    def transpose(self, *axes: Any) -> Self:
        """Return the tensor with its axes in another order, as numpy.transpose: a view.  Local."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = range(self.ndim)[::-1] if order is None or (not axes and self.ndim) else order
        places = self.axes_of(order)
        if len(places) != self.ndim:
            raise ArgumentError(f"{self.ndim} axes are transposed, got {shown(axes)}")
        return type(self)(self.unfolding, self.layout.transposed(places))

    @property
    def T(self) -> Self:
        """The tensor with its axes in reversed order, a view.  Local."""
        return self.transpose()

    def expanded(self, axes: Sequence[int]) -> Self:
        """Return the tensor with new axes of extent 1 at these places, ascending; a view.  Local."""
        return type(self)(self.unfolding, self.layout.expanded(axes))

    def axes_of(self, axis: Any) -> tuple[int, ...]:
        """Return axes as numbers from 0 on; None: all.  Raises ArgumentError.  Local."""
        try:
            axes = range(self.ndim) if axis is None else np.lib.array_utils.normalize_axis_tuple(axis, self.ndim)
            return tuple(axes)
        except (ValueError, TypeError) as bad:
            raise ArgumentError(f"axis={shown(axis)} of a tensor of shape {self.shape}: {bad}") from None

    # ------------------------------------------------------------------ new tensors
    def _result(self) -> Any:
        """Return the result of a function: of fewer than two axes a number or an array on every rank, else itself."""
        return self if self.ndim > 1 else self.allgather()[()]

    def default_layout(self, shape: Sequence[int]) -> TensorLayout:
        """Return the default layout of a tensor of this shape on all ranks of this grid."""
        ranks = self.grid.members
        return default_layout(tuple(shape), len(ranks), None, ranks)

    def part(self, places: dict[int, int]) -> Self:
        """Return the part with these indices of some axes, none of which is divided.  Local."""
        key = (*(places.get(axis, slice(None)) for axis in range(self.ndim)), ...)
        return self.with_elements(self.layout.without([*places]), self.dtype, lambda: self.local[key])

    def with_elements(self, layout: TensorLayout, dtype: np.dtype, elements: Callable[[], Array]) -> Self:
        """Return a tensor on the grid and the device of this one.  Collective.

        elements : returns those of this rank, which are broadcast, on the host or on the device.
        """
        with (agreement := together(self.grid.comm)):
            there = self.grid.base.reshaped(layout.grid_shape, layout.rank_map)
            shape, where = layout.matrix.local_shape(there.coords), devices.of(self.unfolding.stored)
            local = new_array(shape, dtype, "C", there, where)
            agreement.flag = not is_readable(local, there)
            result = type(self)(DistMatrix(local, there, layout.matrix, "C"), layout)
            if local.size:
                set_broadcast(result.local, elements())
        result.unfolding.shared = not agreement.flag
        return result


Tensor = TypeVar("Tensor", bound=TensorBase)


def in_layout(
    T: Tensor,
    target: TensorLayout,
    pairs: tensor_exchange.Pairs = tensor_exchange.NO_PAIRS,
    name: str = "move",
    memory_limit: int | None = None,
    out: DistMatrix | None = None,
) -> Tensor:
    """Return a copy of T in another layout, or T itself if it has this layout.  Collective over the grid of T.

    target : the layout of the result, whose axis k is axis k of T.
    pairs  : for an axis of which only some indices are copied, the pairs of an index of T and an index of the result.
    memory_limit : bytes per rank for the message buffers.
    out    : the matrix of a tensor in the layout `target`, which gets the elements; it shares no memory with T.

    The local arrays of T are copied once, with their axes in the order of the result.  If each rank keeps its elements,
    that is all; otherwise they are packed, sent and unpacked.  `.report` has the words that were sent.
    """
    if out is None and not pairs and T.layout.same_owners(target):
        return T
    start, grid, X = perf_counter(), T.grid.base, T.unfolding
    layout = tensor_exchange.matrix_to_read(T.layout, target, T.dtype)
    stays = out is None and not pairs and tensor_exchange.stays_in_place(T.layout, target)
    there = grid.reshaped(target.grid_shape, target.rank_map)
    here = grid.reshaped(layout.distribution.grid_shape, layout.rank_map)
    with (agreement := together(grid.comm)) as arguments:
        arguments += [name, str(T.layout), str(target), T.dtype]
        ordered = T.local.transpose(target.rows + target.cols) if T.ndim else T.local  # (0, 0) where the number is not
        # elements that other ranks of the node cannot read are copied to where they can; conjugates are a private copy
        shares = X.shared and not X.conjugated
        in_place = bool(ordered.flags.c_contiguous) and (shares or not grid.shares_memory)
        shape = layout.distribution.local_shape(here.coords)
        local = read = ordered.reshape(shape) if in_place else _copied(ordered, shape, X, here)
        if out is not None:
            local = out.stored
        elif not stays:
            local = new_array(target.matrix.local_shape(there.coords), T.dtype, "C", there, devices.of(X.stored))
        readable = shares if in_place else is_readable(read, here)
        agreement.flag = not readable or not is_readable(local, there)
    shared = not agreement.flag
    result = DistMatrix(local, there, target.matrix, "C", shared=shared) if out is None else out
    if not stays:
        source = DistMatrix(read, here, layout.distribution, "C", shared=shared)
        copy_pairs(name, source, result, tensor_exchange.index_products(T.layout, target, pairs), start, memory_limit)
    return type(T)(result, target)


def spread(T: Tensor, target: TensorLayout) -> Tensor:
    """Return the elements of T that are broadcast to each rank's part of a tensor of this layout.  Collective.

    The axes of T are those of `target`, of the same extent or of extent 1.
    """
    return in_layout(T, *tensor_exchange.spread_layout(T.layout, target), name="broadcast")


def _copied(x: Array, shape: tuple[int, int], like: DistMatrix, grid: ProcessGrid) -> Array:
    """Return a copy of an array with rows contiguous, as a matrix of this shape.  Local."""
    copy = new_array(shape, x.dtype, "C", grid, devices.of(like.stored))
    copy_permuted(x, copy.reshape(x.shape))
    return copy


def common_shape(name: str, inputs: Sequence[Any], out: Any) -> tuple[int, ...]:
    """Return the shape of the result of an elementwise function.  Raises LayoutError on all ranks."""
    tensor = next(x for x in (out, *inputs) if isinstance(x, TensorBase))
    shapes = [x.shape if isinstance(x, (TensorBase, DistMatrix)) else np.shape(x) for x in inputs]
    with together(tensor.grid.comm) as arguments:
        arguments += [name, *shapes]
        if out is not None and not isinstance(out, TensorBase):
            raise TypeError(f"{name} of a DistTensor: out is a {type(out).__name__}, and not a DistTensor")
        try:
            shape = np.broadcast_shapes(*shapes)
        except ValueError:
            raise LayoutError(f"{name}: shapes {' and '.join(map(str, shapes))} cannot be broadcast") from None
        if out is not None and out.shape != shape:
            raise LayoutError(f"{name} has the shape {shape}, and out is {out!r}")
        check_one_device(name, [x for x in (out, *inputs) if isinstance(x, (TensorBase, DistMatrix))])
    return shape


def as_operands(name: str, inputs: Sequence[Any], out: Any = None) -> tuple[TensorLayout, list[Any], Work]:
    """Return the layout of the result of an elementwise function, and the operands in it, with the record of moves.

    Collective.
    """
    shape = common_shape(name, inputs, out)
    tensors = [x for x in (out, *inputs) if isinstance(x, TensorBase)]
    like = next((x for x in tensors if x.shape == shape), None)
    layout = like.layout if like is not None else tensors[0].default_layout(shape)
    work = Work(name)
    return layout, [as_operand(x, layout, tensors[0], work) for x in inputs], work


def as_operand(x: Any, layout: TensorLayout, like: Any, work: Work) -> Any:
    """Return a number unchanged, any other operand as a matrix of this layout to whose shape it is broadcast."""
    if isinstance(x, DistMatrix):
        x = x.tensor(x.shape)
    if not isinstance(x, TensorBase) and not np.ndim(x):
        return x
    new = list(range(len(layout.shape) - np.ndim(x) if not isinstance(x, TensorBase) else len(layout.shape) - x.ndim))
    if isinstance(x, TensorBase):
        wide = x.expanded(new)
        part = spread(wide, layout)
        if part is not wide:
            work.did(part)
        if part.layout.same_owners(layout):  # and not one element for each part of as many indices
            return part.unfolding
        elements, dtype = (lambda: part.local), part.dtype
    else:
        array = to_host(devices.adopted(x))[(None,) * len(new)]
        with together(like.grid.comm) as arguments:
            arguments += ["an array", described_elements(array)]
        coords = like.grid.base.reshaped(layout.grid_shape, layout.rank_map).coords
        picks = [layout.indices(at, coords) if n > 1 else [0] for at, n in enumerate(array.shape)]
        elements, dtype = (lambda: array[np.ix_(*picks)]), array.dtype
    return like.with_elements(layout, dtype, elements).unfolding
