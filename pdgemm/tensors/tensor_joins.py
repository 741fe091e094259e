"""NumPy's functions that join tensors, or move their axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdgemm.errors import LayoutError
from pdgemm.matrix.array_functions import check_one_device
from pdgemm.support.agreement import together
from pdgemm.tensors.broadcast_operands import as_operand
from pdgemm.tensors.tensor_base import TensorBase
from pdgemm.tensors.tensor_moves import in_layout


def concatenate(tensors: Sequence[Any], axis: int = 0) -> Any:
    """Return tensors joined along an axis, as numpy.concatenate.  Collective."""
    first = next(x for x in tensors if isinstance(x, TensorBase))
    with together(first.grid.comm) as arguments:
        arguments += ["concatenate", axis, *(str(getattr(x, "layout", x)) for x in tensors)]
        at = first.axes_of(axis)[0]
        others = {(x.ndim, x.shape[:at], x.shape[at + 1 :]) if isinstance(x, TensorBase) else None for x in tensors}
        if len(others) != 1:
            raise LayoutError(
                f"tensors joined along axis {axis} must agree in the other axes, got {[np.shape(x) for x in tensors]}"
            )
        check_one_device("concatenate", tensors)
        dtype = np.result_type(*(x.dtype for x in tensors))
    kept = first.default_layout([n for x, n in enumerate(first.shape) if x != at])
    parts = [in_layout(x, kept.expanded([at], [x.shape[at]]), name="concatenate") for x in tensors]
    layout = kept.expanded([at], [sum(x.shape[at] for x in tensors)])
    return first.with_elements(layout, dtype, lambda: np.concatenate([x.local for x in parts], axis=at))


def stack(tensors: Sequence[Any], axis: int = 0) -> Any:
    """Return tensors of one shape joined along a new axis, as numpy.stack.  Collective."""
    ndim = next(x for x in tensors if isinstance(x, TensorBase)).ndim + 1
    return concatenate([x.expanded([axis % ndim]) for x in tensors], axis % ndim)


def moveaxis(T: Any, source: Any, destination: Any) -> Any:
    """Return a view with axes moved to other places, as numpy.moveaxis.  Local."""
    here, there = T.axes_of(source), T.axes_of(destination)
    order = [x for x in range(T.ndim) if x not in here]
    for to, axis in sorted(zip(there, here)):
        order.insert(to, axis)
    return T.transpose(order)


def expand_dims(T: Any, axis: Any) -> Any:
    axes = np.lib.array_utils.normalize_axis_tuple(axis, T.ndim + np.size(axis))
    return T.expanded(sorted(axes))


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Return whether two tensors, or a tensor and an array, are equal within tolerances.  Collective."""
    tensor = a if isinstance(a, TensorBase) else b
    layout = tensor.layout
    A, B = (as_operand(x, layout, tensor) for x in (a, b))
    return bool(np.allclose(A, B, rtol, atol, equal_nan))
