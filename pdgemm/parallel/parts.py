"""The parameters that a user passes: arrays, formulas, and parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from math import prod
from typing import Any, Literal, Protocol

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.arguments import as_count, as_real
from pdgemm.local.arrays.dtypes import FLOATS, element_type, names
from pdgemm.local.arrays.element_functions import ElementFunction, element_function, fill
from pdgemm.schedules.training.mesh_shape import MeshShape
from pdgemm.schedules.training.parameter_division import Division, Window, extents

_REAL = tuple(x for x in FLOATS if x.kind != "c")


class FlatValues(Protocol):
    """Elements of a flat parameter, or of a rank's part of it, which are computed or read when a range is taken."""

    def __getitem__(self, span: slice) -> np.ndarray: ...


class Initial:
    """The initial values of a parameter by a formula, of which each rank computes what it keeps.

    ::

        Buckets(mesh, {"w": Initial((4096, 4096), "normal", seed=1, scale=0.02), "b": Initial(4096, "zeros")}, stage=3)

    shape  : of the parameter.
    values : "normal", of mean 0 and variance 1, "uniform" on [0, 1), "zeros", "ones", or a function f(i, j) of arrays
        of rows and columns, as of `DistMatrix.from_function`.  A vector has one row, and an array of more dimensions
        the rows of its first one.
    seed   : of random numbers, which are the same on any number of ranks.   scale : by which values are multiplied.
    dtype  : float16, bfloat16, float32 or float64.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        values: str | ElementFunction = "zeros",
        *,
        seed: int = 0,
        scale: float = 1.0,
        dtype: Any = np.float32,
    ) -> None:
        shape = (shape,) if isinstance(shape, int | np.integer) else shape
        self.shape = tuple(as_count(n, "shape", 0) for n in shape)
        self.dtype, self.size, self._scale = element_type(dtype), prod(self.shape), as_real(scale, "scale")
        self._whole, self._window = self.shape, tuple(slice(0, n) for n in self.shape)
        self._values = element_function(values, seed, np.dtype(np.float64)) if isinstance(values, str) else values
        name = values if isinstance(values, str) else getattr(values, "__qualname__", type(values).__name__)
        sizes = " x ".join(map(str, self.shape))
        self._said = f"Initial({sizes} {name} of seed {seed} times {scale} {self.dtype})"  # the same on all ranks

    def __repr__(self) -> str:
        return self._said

    def windowed(self, window: Window) -> Initial:
        """Return the same values of a window of the parameter alone: `shape` and elements are those of the window."""
        part = copy(self)
        part.shape, part._window = extents(window), window
        part.size = prod(part.shape)
        return part

    def __getitem__(self, span: slice) -> np.ndarray:
        """Return a range of elements of the flat parameter, or window, of which their rows are computed.  Local."""
        kind = np.result_type(self.dtype, np.float32)
        if span.start >= span.stop:  # also beyond the last row, which a function need not have
            return np.empty(0, kind)
        rows, cols = as_table(self.shape)
        first, last = span.start // cols, -(-span.stop // cols)
        columns = span if rows == 1 else slice(0, cols)
        at_row, at_columns = self._places(columns)
        table = np.empty((last - first, columns.stop - columns.start), kind)
        fill(table, np.arange(at_row + first, at_row + last), at_columns, self._values)
        start = span.start - (first * cols + columns.start)
        flat: np.ndarray = table.reshape(-1)[start : start + span.stop - span.start]
        flat *= flat.dtype.type(self._scale)
        return flat

    def _places(self, columns: slice) -> tuple[int, np.ndarray]:
        """Return the first row of the window in the matrix of the parameter, and there some columns of the window."""
        if len(self.shape) < 2:  # of one row
            start = self._window[0].start if self._window else 0
            return 0, np.arange(start + columns.start, start + columns.stop)
        rows, *others = self._window
        places = np.zeros(1, np.int64)
        for n, x in zip(self._whole[1:], others):
            places = (places[:, None] * n + np.arange(x.start, x.stop)).ravel()
        return rows.start, places[columns]


def as_table(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the matrix of a parameter: a vector has one row, further dimensions are columns."""
    words = prod(shape)
    rows = shape[0] if len(shape) > 1 and words else 1
    return rows, words // rows


class Part:
    """A parameter of which each rank has a part, or of whose gradient ranks compute addends.

    ::

        Buckets(mesh, {
            "qkv": Part(w, tp=1),                    # columns [j c, (j+1) c) on rank j along tp, c = ceil(n / tp)
            "norm": Part(gain, tp="sum"),            # whole; each rank along tp has the gradient of its own rows
            "w1": Part(Initial((8, 48, 192)), ep=0), # experts in blocks along ep
            "table": Part(table, tp=0, tied=True),   # on the first and on the last stage along pp
        })

    values : the whole parameter, an array or `Initial`; the same on all ranks.
    tp, ep, tied : see `Division`; by default the parameter is whole on each rank, and so is its gradient along tp.

    Gradients are added over dp and cp; with "sum" and ep also over tp, with ep over the copies of experts in place of
    dp, and with `tied` over the first and the last stage.  Where ranks along tp have whole gradients that differ,
    `Buckets.finish` raises an error.
    Raises ArgumentError where a dimension is not one of the parameter, or tp and ep both divide one.
    """

    def __init__(
        self,
        values: np.ndarray | Initial,
        *,
        tp: int | Literal["sum"] | None = None,
        ep: int | None = None,
        tied: bool = False,
    ) -> None:
        self.values = values if isinstance(values, Initial) else of_host(values)
        self.division = Division(self.values.shape, tp, ep, bool(tied))

    def windowed(self, mesh: MeshShape, rank: int) -> np.ndarray | Initial:
        """Return what a rank of a mesh has.  Local."""
        window = self.division.window(mesh, rank)
        return self.values.windowed(window) if isinstance(self.values, Initial) else self.values[window]


def of_host(x: Any, what: str = "a parameter") -> np.ndarray:
    """Return an array of NumPy.  Raises ArgumentError for an array on a device."""
    if device := devices.of(x):
        raise ArgumentError(f"{what} is on a device, {device.name}; training takes arrays of the host")
    return np.asarray(x)


def as_part(x: Any, name: str) -> Part:
    """Return a parameter as a `Part`, whole on each rank if it is none.  Raises ArgumentError."""
    if isinstance(x, Part):
        return x
    return Part(x if isinstance(x, Initial) else of_host(x, f"parameter {name!r}"))


def type_of_parameters(values: Mapping[str, np.ndarray | Initial], dtype: Any) -> np.dtype:
    """Return the type of the parameters.  Raises ArgumentError or DTypeError."""
    for name, x in values.items():
        if x.dtype not in _REAL:
            raise DTypeError(f"parameter {name!r} is of {x.dtype}; parameters are real numbers: {names(_REAL)}")
        for other, y in values.items():
            arrays = isinstance(x, np.ndarray) and isinstance(y, np.ndarray)
            if other != name and arrays and x.size and y.size and np.shares_memory(x, y):
                raise ArgumentError(f"parameters {name!r} and {other!r} share memory: pass one of them")
    kinds = {x.dtype for x in values.values()}
    if dtype is None and len(kinds) > 1:
        raise DTypeError(f"parameters are of {names(tuple(sorted(kinds, key=str)))}: convert them with dtype=")
    kind = element_type(dtype) if dtype is not None else next(iter(kinds), np.dtype(np.float32))
    if kind not in _REAL:
        raise DTypeError(f"parameters are real numbers of {names(_REAL)}, got dtype={kind}")
    return kind
