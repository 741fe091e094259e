"""TensorBase: the elements and the layout of a tensor, and its views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Self

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import set_broadcast
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import is_readable, new_array
from pdgemm.names import DeviceName
from pdgemm.planning.tensors.tensor_layouts import default_layout
from pdgemm.support.agreement import together

Axis = int | tuple[int, ...] | None  # axes of a reduction; None: all


class TensorBase:
    """A DistMatrix, `unfolding`, and the axes that its rows and columns enumerate, `layout`."""

    narrow_products = False  # whether products of int8 are int8, as in NumPy, and not int32

    def __init__(self, unfolding: DistMatrix, layout: TensorLayout) -> None:
        """Make a tensor of a matrix without checking that it fits the layout.  Local; `A.tensor` checks."""
        self.unfolding, self.layout = unfolding, layout

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
    def device(self) -> DeviceName:
        """The name of the memory that the local arrays are in: "host", "cuda"."""
        return self.unfolding.device

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
