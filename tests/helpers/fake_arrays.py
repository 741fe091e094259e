"""Arrays of the simulated device: the host cannot read them, and NumPy's functions of them are launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

HALF = np.dtype(ml_dtypes.bfloat16)  # bfloat16: only some functions and casts of CuPy accept it


class FakeArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of the simulated device: a view of it is made as by NumPy; the host cannot read elements.

    As in CuPy, NumPy's functions of it are launches.  Only functions of CuPy 14.2, and arguments that it accepts, are
    allowed: an array of the host is not combined with one of the device.
    """

    __hash__ = None  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        """Launch an elementwise function; as in CuPy, the result is in C order, whatever the order of the operands."""
        if method != "__call__" or ufunc.signature is not None or ufunc.__name__ in _LACKING:
            return NotImplemented
        assert options.keys() <= {"dtype", "casting"}, f"CuPy's functions do not take {options}"
        _check_mixture(inputs)
        assert HALF not in [x.dtype for x in inputs if isinstance(x, FakeArray)], f"{ufunc.__name__} of bfloat16"
        if ufunc.__name__.startswith("logical_") and any(np.iscomplexobj(_empty(x)) for x in inputs):
            raise TypeError(f"cupy_{ufunc.__name__} has no loop for complex numbers")
        return _evaluated(self.device, ufunc.__name__, partial(ufunc, **options), inputs, out[0] if out else None)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        """Launch a function of NumPy that CuPy has and `pdgemm` calls, with CuPy's result."""
        name = function.__name__
        if name in ("ndim", "shape"):
            return getattr(self, name)
        assert name in _FUNCTIONS, f"is numpy.{name} one of CuPy's functions, and does it do the same?"
        joined = isinstance(arguments[0], (list, tuple))
        arrays = arguments[0] if joined else arguments[: _FUNCTIONS[name][1]]
        others = arguments[1:] if joined else arguments[_FUNCTIONS[name][1] :]
        _check_mixture((*arrays, *others, *options.values()))
        halves = HALF in [x.dtype for x in arrays if isinstance(x, FakeArray)]
        assert not halves or name in ("concatenate", "take", "expand_dims", "broadcast_to"), f"{name} of bfloat16"
        if name in ("expand_dims", "broadcast_to"):
            return self._like(function(self.x, *others, **options))
        if name == "where":
            assert isinstance(arrays[0], FakeArray), "cupy.where calls condition.astype"
        if name == "argmax":
            assert self.dtype == bool, "of several NaN CuPy's argmax finds any one"
        act = lambda *parts: _FUNCTIONS[name][0](*((parts,) if joined else parts), *others, **options)  # noqa: E731
        return _evaluated(self.device, name, act, arrays, None)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> FakeArray:
        """Convert like CuPy, which also converts complex numbers to real ones."""
        dtype, (row_first, col_first) = np.dtype(dtype), (self.flags.c_contiguous, self.flags.f_contiguous)
        if not copy and dtype == self.dtype and {"C": row_first, "F": col_first}.get(order, True):
            return self
        by_columns = order == "F" or (order == "K" and col_first and not row_first)
        made = self.device.empty(self.shape, dtype, "F" if by_columns else "C")
        act = lambda: quietly(np.copyto, made.x, self.x, "unsafe")  # noqa: E731
        self.device._launch("astype", (self,), (made,), act)
        return made

    def __matmul__(self, other: Any) -> FakeArray:
        _check_mixture((self, other))
        assert HALF not in (self.dtype, other.dtype)
        return _evaluated(self.device, "matmul", np.matmul, (self, other), None)

    def __bool__(self) -> bool:
        raise AssertionError("CuPy waits here: copy the number to the host where the host needs it")

    real = property(lambda self: self if self.dtype.kind != "c" else self._like(self.x.real))

    @property
    def imag(self) -> FakeArray:
        if self.dtype.kind == "c":
            return self._like(self.x.imag)
        zeros = self.device.empty(self.shape, self.dtype)
        zeros[...] = 0
        return zeros

    def __init__(self, x: np.ndarray, device: Any, managed: bool = False) -> None:
        self.x, self.device, self.managed = x, device, managed

    shape, strides, dtype, size, ndim, nbytes, itemsize, flags = (
        property(attrgetter(f"x.{name}"))
        for name in ("shape", "strides", "dtype", "size", "ndim", "nbytes", "itemsize", "flags")
    )

    def _like(self, x: np.ndarray) -> FakeArray:
        assert x.base is not None or x is self.x or not x.size, "the device does not copy by itself"
        made = object.__new__(type(self))
        vars(made).update(vars(self), x=x)
        return made

    @property
    def T(self) -> FakeArray:
        return self._like(self.x.T)

    def __getitem__(self, key: Any) -> FakeArray:
        keys = key if isinstance(key, tuple) else (key,)
        if keys and all(isinstance(k, FakeArray) for k in keys):
            assert {k.dtype.kind for k in keys} == {"i"}
            return _evaluated(self.device, "take", lambda x, *places: x[places], (self, *keys), None)
        assert not any(isinstance(k, (list, np.ndarray, FakeArray)) for k in keys), "no indexing by arrays"
        assert all(k in (..., None) or isinstance(k, (slice, int, np.integer)) for k in keys)
        found = self.x[key]
        assert isinstance(found, np.ndarray), "no reading of elements"
        return self._like(found)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, tuple) and key and all(isinstance(k, FakeArray) for k in key):
            places = tuple(k.x for k in key)
            read = (*key, *([value] if isinstance(value, FakeArray) else []))
            number = value.x if isinstance(value, FakeArray) else value
            assert not np.ndim(value) or isinstance(value, FakeArray), "CuPy does not assign arrays of the host"
            self.device._launch("put", read, (self,), lambda: self.x.__setitem__(places, number))
            return
        part = self[key]
        if isinstance(value, FakeArray):
            assert value.dtype.kind != "c" or self.dtype.kind == "c", "CuPy would drop imaginary parts"
            self.device._launch("assign", (value,), (part,), lambda: np.copyto(part.x, value.x, "unsafe"))
            return
        assert not np.ndim(value), "CuPy does not assign arrays of the host"
        self.device._launch("fill", (), (part,), lambda: part.x.fill(value))

    def reshape(self, *shape: Any, order: Any = "C") -> FakeArray:
        made = self.x.reshape(*shape, order=order)
        assert np.shares_memory(made, self.x) or not made.size, "reshape would copy"
        return self._like(made)

    def ravel(self, order: Any = "C") -> FakeArray:
        made = self.x.ravel(order)
        assert np.shares_memory(made, self.x) or not made.size, "ravel would copy"
        return self._like(made)

    def transpose(self, *axes: Any) -> FakeArray:
        order = axes[0] if len(axes) == 1 else axes
        assert order is None or all(type(x) is int for x in order), "CuPy takes a sequence of integers"
        return self._like(self.x.transpose(*axes))

    def swapaxes(self, *axes: int) -> FakeArray:
        return self._like(self.x.swapaxes(*axes))

    def sort(self) -> None:
        assert self.ndim == 1 and self.flags.c_contiguous, "CuPy sorts contiguous arrays in place"
        assert self.dtype != HALF, "sort of bfloat16"
        self.device._launch("sort", (self,), (self,), lambda: self.x.sort())

    def view(self, dtype: Any) -> FakeArray:
        return self._like(self.x.view(dtype))

    def __len__(self) -> int:
        return len(self.x)

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        raise TypeError("an array of the device is not converted to NumPy's without being asked")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "strides": self.strides} | {
            key: self.x.__array_interface__[key] for key in ("shape", "typestr", "data")
        }

    def get(self) -> np.ndarray:
        return self.device.to_host(self)


_LACKING = {"spacing", "isnat", "matvec", "vecmat", "vecdot"}  # ufuncs of NumPy that CuPy 14.2 lacks


def _in_any_order(x: np.ndarray, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> np.ndarray:
    """Return the sum from the last element to the first, in sequence: an order that NumPy does not use."""
    axes = normalize_axis_tuple(range(x.ndim) if axis is None else axis, x.ndim)
    last_first = np.moveaxis(x, axes, range(len(axes)))
    total = np.zeros(last_first.shape[len(axes) :], dtype or np.sum(np.zeros(1, x.dtype)).dtype)
    for part in last_first.reshape(-1, *total.shape)[::-1] if x.size else ():
        total = total + part.astype(total.dtype)
    return np.expand_dims(total, axes) if keepdims else total


# by name: the function, and how many of its arguments may be arrays of the device
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "sum": (_in_any_order, 1),
    "where": (np.where, 3),
    "take": (np.take, 2),
    **{name: (getattr(np, name), 1) for name in ("prod", "min", "max", "any", "all", "argmax", "concatenate")},
    **{name: (getattr(np, name), 1) for name in ("full_like", "round", "nan_to_num", "expand_dims", "sort", "cumsum")},
    "broadcast_to": (np.broadcast_to, 1),
    "searchsorted": (np.searchsorted, 2),
}


def _check_mixture(operands: Sequence[Any]) -> None:
    if any(isinstance(x, np.ndarray) for x in operands):
        raise TypeError("CuPy's functions take its arrays and numbers, and no arrays of the host")


def _empty(x: Any) -> Any:
    """Return zeros of the same shape and type, instead of an array that is not computed yet."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape) if isinstance(x, FakeArray) else x


def _evaluated(device: Any, name: str, act: Callable[..., Any], inputs: Sequence[Any], out: Any) -> FakeArray:
    """Launch a function of device arrays and numbers; the result's shape and type depend only on theirs."""
    with np.errstate(all="ignore"):
        like = np.asarray(act(*map(_empty, inputs)))
    made = device.empty(like.shape, like.dtype) if out is None else out
    arrays = [x.x if isinstance(x, FakeArray) else x for x in inputs]
    reads = [x for x in inputs if isinstance(x, FakeArray)]
    device._launch(name, reads, (made,), lambda: quietly(lambda: np.copyto(made.x, act(*arrays))))
    return made


def quietly(act: Callable[..., object], *args: Any) -> None:
    with np.errstate(all="ignore"):
        act(*args)


def spoilt(x: np.ndarray) -> np.ndarray:
    """Fill an array, which has not been written, with values that reveal a read; return it."""
    x.ravel(order="K").view(np.uint8).fill(0xFF)
    return x
