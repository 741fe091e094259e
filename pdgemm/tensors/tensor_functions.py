"""NumPy's operators and functions of a DistTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np

import pdgemm
from pdgemm.names import DeviceName
from pdgemm.tensors.broadcast_operands import as_operand, common_shape
from pdgemm.tensors.tensor_base import TensorBase
from pdgemm.tensors.tensor_joins import allclose, concatenate, expand_dims, moveaxis, stack


class TensorFunctions(TensorBase, np.lib.mixins.NDArrayOperatorsMixin):
    """NumPy's protocols for DistTensor."""

    __array_priority__ = 1001
    __hash__ = None  # type: ignore[assignment]  # `==` is elementwise, as for arrays

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply an elementwise function to the unfoldings of tensors in one layout."""
        if ufunc is np.matmul and method == "__call__":
            return _matmul(*inputs)
        out = options.pop("out", (None,))[0]
        shape = common_shape(ufunc.__name__, inputs, out)
        tensors = [x for x in (out, *inputs) if isinstance(x, TensorBase)]
        like = next((x for x in tensors if x.shape == shape), None)
        layout = like.layout if like is not None else tensors[0].default_layout(shape)
        operands = [as_operand(x, layout, tensors[0]) for x in inputs]
        options |= {"out": (out.unfolding,)} if out is not None else {}
        result = getattr(ufunc, method)(*operands, **options) if method == "__call__" else NotImplemented
        if result is NotImplemented:
            raise TypeError(f"numpy.{ufunc.__name__}.{method} is not available for a DistTensor")
        return out if out is not None else type(self)(result, layout)._like(result)

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


def _matmul(a: Any, b: Any) -> Any:
    """Return products of matrices along the last two axes, as numpy.matmul."""
    (left, i), (right, k) = (("ij", "i"), ("jk", "k"))
    if np.ndim(a) == 1:
        left, i = "j", ""
    if np.ndim(b) == 1:
        right, k = "j", ""
    return pdgemm.einsum(f"...{left},...{right}->...{i}{k}", a, b)


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
    "numpy.real": lambda val: val._like(val.unfolding.real),
    "numpy.imag": lambda val: val._like(val.unfolding.imag),
}
