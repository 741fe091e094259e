"""The operands of elementwise functions of tensors: moved to one layout and broadcast to one shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdgemm.errors import LayoutError
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.linalg.work import Work
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import to_host
from pdgemm.matrix.array_functions import check_one_device
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import described_elements, together
from pdgemm.tensors.tensor_base import TensorBase
from pdgemm.tensors.tensor_moves import spread


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
