"""NumPy's operators and functions of a DistTensor."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np

import pdgemm
from pdgemm.errors import LayoutError
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.tensors.indexing import tensor_copies as copies
from pdgemm.tensors.indexing.tensor_axes import FUNCTIONS as ALONG_AXES
from pdgemm.tensors.indexing.tensor_sorting import FUNCTIONS as OF_SORTED
from pdgemm.tensors.numpy_modules import tensor_fft, tensor_linalg
from pdgemm.tensors.tensor_base import TensorBase, as_operands


class TensorFunctions(TensorBase, np.lib.mixins.NDArrayOperatorsMixin):
    """NumPy's protocols for DistTensor."""

    __array_priority__ = 1001
    __hash__ = None  # type: ignore[assignment]  # `==` is elementwise, as for arrays

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply an elementwise function to the unfoldings of tensors in one layout."""
        out = options.pop("out", (None,))[0]
        if ufunc in _PRODUCTS and method == "__call__":
            return _set(out, _PRODUCTS[ufunc](*inputs, **options))
        if method != "__call__":
            raise TypeError(f"numpy.{ufunc.__name__}.{method} is not available for a DistTensor")
        layout, operands, work = as_operands(ufunc.__name__, inputs, out)
        options |= {"out": (out.unfolding,)} if out is not None else {}
        result = ufunc(*operands, **options)
        if not work.empty:
            work.reported(result, 1)
        return out if out is not None else type(self)(result, layout)._like(result)

    def __array_function__(self, function: Callable[..., Any], types: Any, arguments: Any, options: Any) -> Any:
        name = f"{function.__module__}.{function.__name__}"
        if name in _METHODS:
            return _as_method(name, function, arguments, options)
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*arguments, **options)
        if name not in _ELEMENTWISE:
            raise TypeError(f"{name} is not available for a DistTensor: T.matrix(rows, cols) has functions of matrices")
        if name == "numpy.array_equal" and len({np.shape(x) for x in arguments[:2]}) > 1:
            return False
        layout, operands, work = as_operands(name, arguments, None)
        result = function(*operands, **options)
        if not isinstance(result, DistMatrix):
            return result
        if not work.empty:
            work.reported(result, 1)
        return type(self)(result, layout)._like(result)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("a DistTensor is not one array: use .local, .to_global(root) or .allgather()")

    def __iter__(self) -> Any:
        raise TypeError("a DistTensor cannot be iterated over: use .local, .to_global(root) or .allgather()")

    def __bool__(self) -> bool:
        raise ValueError("a DistTensor has no truth value: compare with numpy.allclose")


def _set(out: Any, product: Any) -> Any:
    """Return a product or, where a tensor is passed as `out`, this tensor with the elements of the product."""
    if out is None:
        return product
    if out.shape != np.shape(product):
        raise LayoutError(f"the product has the shape {np.shape(product)}, and out {out.shape}")
    out[...] = product
    return out


def _as_method(name: str, function: Callable[..., Any], arguments: Any, options: Any) -> Any:
    """Call the method of a tensor, with NumPy's arguments that do not have their defaults."""
    known = signature(function)
    (_, tensor), *others = known.bind(*arguments, **options).arguments.items()
    method = getattr(tensor, _METHODS[name])
    takes = signature(method).parameters
    named = {key: value for key, value in others if value is not known.parameters[key].default}
    if "correction" in named:  # the array API standard's name of ddof
        named["ddof"] = named.pop("correction")
    if not isinstance(tensor, TensorBase) or named.keys() - takes.keys():
        raise TypeError(f"{name} with {', '.join(sorted(named))} is not available for a DistTensor")
    return method(*named.values()) if any(x.kind is x.VAR_POSITIONAL for x in takes.values()) else method(**named)


_PRODUCTS: dict[np.ufunc, Callable[..., Any]] = {np.matmul: tensor_linalg.matmul, np.vecdot: copies.vecdot}
_NAMES = (
    *("sum", "prod", "min", "max", "any", "all", "mean", "var", "std", "argmin", "argmax", "count_nonzero"),
    *("transpose", "reshape", "ravel", "squeeze"),
)
_METHODS = {f"numpy.{name}": name for name in (*_NAMES, "copy", "astype")}
_METHODS |= {"numpy.amin": "min", "numpy.amax": "max", "numpy.permute_dims": "transpose"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "numpy.concat": copies.concatenate,
    "numpy.hstack": lambda tup: copies.concatenate(tup, int(np.ndim(tup[0]) > 1)),
    "numpy.vstack": lambda tup: copies.concatenate([x if np.ndim(x) > 1 else np.expand_dims(x, 0) for x in tup]),
    "numpy.shape": lambda a: a.shape,
    "numpy.ndim": lambda a: a.ndim,
    "numpy.size": lambda a: a.size,
    "numpy.einsum": lambda *x, **options: pdgemm.einsum(*x, **options),
    "numpy.tensordot": lambda *x, **options: pdgemm.tensordot(*x, **options),
}
_FUNCTIONS |= {f"numpy.{x.__name__}": x for x in copies.FUNCTIONS}
_FUNCTIONS |= {f"numpy.{x.__name__}": x for x in (*ALONG_AXES, *OF_SORTED)}
_FUNCTIONS |= {f"numpy.linalg.{x.__name__}": x for x in tensor_linalg.FUNCTIONS}
_FUNCTIONS |= {f"numpy.fft.{x.__name__}": x for x in tensor_fft.FUNCTIONS}
# functions of matrices that have one value for each element, or compare all elements
_ELEMENTWISE = {f"numpy.{name}" for name in ("where", "clip", "round", "around", "isclose", "allclose", "array_equal")}
_ELEMENTWISE |= {f"numpy.{name}" for name in ("nan_to_num", "real", "imag", "fix", "isneginf", "isposinf")}
_ELEMENTWISE |= {f"numpy.{name}_like" for name in ("zeros", "ones", "full", "empty")}
