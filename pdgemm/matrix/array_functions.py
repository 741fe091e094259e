"""NumPy's functions of matrices that are not methods, and the redistribution of operands to one layout and shape.

FUNCTIONS maps NumPy's names to functions, ABOVE to names of functions in `pdgemm`.  `numpy_functions` rejects arguments
that a function does not take.  All functions are collective over the grid; operands may have any layouts and are
broadcast as in elementwise operations.
Functions compute on the host or on the device that holds their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any

import numpy as np

import pdgemm
from pdgemm.errors import ArgumentError, DeviceError, LayoutError
from pdgemm.grids.distribution import Distribution
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.alignment import aligned
from pdgemm.local.arrays.arguments import as_name, shown
from pdgemm.local.arrays.device import beside, to_host
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.local.arrays.elementwise import Combine, all_close, close, evaluated, is_extension
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.matrix.matrix_base import MatrixBase
from pdgemm.schedules.staircase import Staircase
from pdgemm.support.agreement import described_elements, together
from pdgemm.transport.store import store

_NOT_GIVEN: Any = object()


def type_of(x: Any) -> Any:
    """Return the element type of a matrix or of an array; a number is returned unchanged."""
    if isinstance(x, MatrixBase) or (devices.of(x) and np.ndim(x)):
        return x.dtype
    if np.ndim(x) or isinstance(x, np.ma.MaskedArray):
        return devices.adopted(x).dtype
    return x


def as_number(x: Any) -> Any:
    """Return the number in a 0-D array, which CuPy rejects as an operand; a number is returned unchanged."""
    return x[()] if isinstance(x, np.ndarray) else x


def fitted(name: str, inputs: Sequence[Any], out: MatrixBase | None = None) -> tuple[list[Any], MatrixBase, Any]:
    """Return the local parts of operands that differ in layout or shape, a matrix of the result's layout, and a report.

    Matrices are redistributed to the layout of `out` or, if it is None, of the first matrix that has the result's
    shape.  A matrix of one row or column is gathered on every rank; each rank then takes its part of the row or column,
    as from a NumPy array.  Collective.

    The report is that of the redistribution if one matrix was redistributed, otherwise a tuple of such reports.
    """
    matrices = [x for x in (*inputs, out) if isinstance(x, MatrixBase)]
    if any(isinstance(x, np.matrix) for x in inputs):  # depends only on types, so all ranks raise
        raise TypeError(f"{name} of a DistMatrix and a numpy.matrix, whose * is a product: pass numpy.asarray(x)")
    inputs = [
        x if isinstance(x, MatrixBase) else to_host(devices.adopted(x)) if np.ndim(x) else as_number(x) for x in inputs
    ]
    shapes = [x.shape if isinstance(x, MatrixBase) else np.shape(x) for x in inputs]
    with together(matrices[0].grid.comm) as arguments:
        arguments += [name, *shapes, *(f"{x.distribution} of {x.dtype}" for x in matrices)]
        others = (x for x in inputs if not isinstance(x, MatrixBase))
        arguments += [described_elements(np.asarray(x)) if np.ndim(x) else complex(x) for x in others]
        text = " and ".join(str(getattr(x, "distribution", None) or f"an array of shape {np.shape(x)}") for x in inputs)
        try:
            shape = np.broadcast_shapes(*shapes)
        except ValueError:
            raise LayoutError(f"{name}: {text} cannot be broadcast to one shape") from None
        if len(shape) != 2 or (out is not None and out.shape != shape):
            there = "a matrix has two dimensions" if out is None else f"out is {out.distribution}"
            raise LayoutError(f"{name} of {text} has the shape {shape}, and {there}")
        alike = [x for x in (out, *matrices) if x is not None and x.shape == shape]
        like = alike[0] if alike else _crossed(matrices, shape)
        for x in matrices:
            x.layout_in(like.grid)  # raises for grids over other ranks
    parts, reports = list[Any](), list[Any]()
    rows, cols = like.indices()
    for x in inputs:
        if isinstance(x, MatrixBase) and x.shape == shape:
            if not like.same_layout(x):
                x = pdgemm.redistribute(x, like=like)  # type: ignore[arg-type]
                reports.append(x.report)
            parts.append(x.local)
        elif not isinstance(x, MatrixBase) and not np.ndim(x):
            parts.append(x)
        else:
            mine = part_of_broadcast(x.allgather() if isinstance(x, MatrixBase) else x, rows, cols)  # type: ignore[attr-defined]
            device = devices.of(like.stored)
            parts.append(device.to_device(mine, "C") if device else mine)
    return parts, like, reports[0] if len(reports) == 1 else tuple(reports)


def part_of_broadcast(array: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Return rows and columns of an array that is broadcast to a matrix; a dimension of length 1 is returned whole."""
    whole = np.atleast_2d(array)
    return whole[rows if len(whole) > 1 else slice(None)][:, cols if whole.shape[1] > 1 else slice(None)]


def _crossed(matrices: Sequence[MatrixBase], shape: tuple[int, int]) -> MatrixBase:
    """Return a matrix without elements, with the row layout of one operand and the column layout of another."""
    grid = matrices[0].grid
    rows = next((x.distribution.rows for x in matrices if x.shape[0] == shape[0] and x.grid.same_as(grid)), None)
    cols = next((x.distribution.cols for x in matrices if x.shape[1] == shape[1] and x.grid.same_as(grid)), None)
    default = Distribution.over(grid.shape, shape, None, (0, 0))
    layout = Distribution(rows or default.rows, cols or default.cols)
    return type(matrices[0])(matrices[0].stored[:0, :0], grid, layout)


# ---------------------------------------------------------------- NumPy's functions
def _elementwise(name: str, act: Callable[..., Any], *operands: Any) -> Any:
    """Apply a NumPy function to the elements of matrices, on the host or the device that holds them."""
    matrices = [x for x in operands if isinstance(x, MatrixBase)]
    check_one_device(name, matrices)
    kinds = [type_of(x) for x in operands]
    dtype = element_type(act(*(np.ones(1, x) if isinstance(x, np.dtype) else x for x in kinds)).dtype)
    parts, like, report = fitted(name, operands)
    device = devices.of(like.stored)
    with together(like.grid.comm, device is not None):  # a device may lack memory on one rank
        if device is None:
            local = np.ascontiguousarray(act(*parts))
        else:
            rows, cols = map(len, like.indices())
            local = aligned((rows, cols), dtype, "C", device)
            evaluated(act, parts, local)
    result = type(matrices[0])(local, like.grid, like.distribution)
    if report:
        result.report = report
    return result


def check_one_device(name: str, matrices: Sequence[Any]) -> None:
    """Raise DeviceError, on all ranks, where matrices or tensors are not all on the host or all on one device."""
    for other in matrices:
        if other.device != matrices[0].device:
            raise DeviceError(f"{name} of arrays on {matrices[0].device} and {other.device}: use to_device")


def where(condition: Any, x: Any, y: Any) -> Any:
    def chosen(condition: Any, x: Any, y: Any) -> Any:
        if np.ndim(condition) == 0:  # CuPy takes an array only
            condition = beside(np.full((1, 1), bool(condition)), x if np.ndim(x) else y)
        return np.where(condition, x, y)

    return _elementwise("where", chosen, condition, x, y)


def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    return _elementwise("isclose", partial(close, rtol=rtol, atol=atol, equal_nan=equal_nan), a, b)


def around(a: Any, decimals: int = 0) -> Any:
    return _elementwise("round", partial(np.round, decimals=decimals), a)


def nan_to_num(x: Any, *, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    if x.device != devices.HOST and is_extension(x.dtype):  # NumPy replaces no element of these types
        return x.copy()
    return _elementwise("nan_to_num", partial(np.nan_to_num, nan=nan, posinf=posinf, neginf=neginf), x)


def clip(a: Any, a_min: Any = _NOT_GIVEN, a_max: Any = _NOT_GIVEN, *, min: Any = None, max: Any = None) -> Any:
    """Return the elements limited to an interval; either limit may be None."""
    if (a_min is _NOT_GIVEN) != (a_max is _NOT_GIVEN):
        raise TypeError("numpy.clip of a DistMatrix takes both limits, one of which may be None, or min= and max=")
    least, most = (min, max) if a_min is _NOT_GIVEN else (a_min, a_max)
    result = a.copy() if least is None else np.maximum(a, least)
    return result if most is None else np.minimum(result, most)


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    parts, like, _ = fitted("allclose", (a, b))
    differ = together(like.grid.comm)
    with differ as arguments:
        tolerances = float(rtol), float(atol), bool(equal_nan)
        arguments += ["allclose", *tolerances]
        differ.flag = not all_close(parts[0], parts[1], *tolerances)  # becomes True on all ranks if it is True on any
    return not differ.flag


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """Return whether shapes and elements are equal.  Collective."""
    if np.shape(a1) != np.shape(a2):
        return False
    equal: Any = np.equal(a1, a2)
    if equal_nan:
        equal = equal | (np.not_equal(a1, a1) & np.not_equal(a2, a2))
    return bool(equal.all())


def triu(m: Any, k: int = 0) -> Any:
    rows, cols = m.indices()
    return _cleared(m, Staircase(cols.searchsorted(rows + index(k))))


def tril(m: Any, k: int = 0) -> Any:
    rows, cols = m.indices()
    return _cleared(m, Staircase(rows.searchsorted(cols - index(k)), flipped=True))


def _cleared(m: Any, where: Staircase) -> Any:
    """Return a copy of m in which the elements of the `Staircase` are zero."""
    result = m.copy()
    store(result.stored, None, Combine(1, 0), within=where)
    return result


def full_like(a: Any, fill_value: Any, dtype: Any = None) -> Any:
    result = empty_like(a, dtype)
    result.local[...] = result.dtype.type(fill_value)
    return result


def dot(a: Any, b: Any) -> Any:
    return a * b if np.ndim(a) == 0 or np.ndim(b) == 0 else a @ b


def inner(a: Any, b: Any) -> Any:
    return a @ np.transpose(b)


def outer(a: Any, b: Any) -> Any:
    """Return the matrix a_i b_j of two vectors: matrices of one column or row, or arrays that are on every rank."""
    matrix = a if isinstance(a, MatrixBase) else b
    with together(matrix.grid.comm):
        column, row = _column(a), _column(b).T
    return np.multiply(column, row)


def _column(x: Any) -> Any:
    if not isinstance(x, MatrixBase):
        return to_host(devices.adopted(x)).reshape(-1, 1)
    if 1 not in x.shape:
        raise LayoutError(f"numpy.outer takes matrices of one column or one row, and vectors; got {x.distribution}")
    return x if x.shape[1] == 1 else x.T


def vdot(a: Any, b: Any) -> Any:
    return np.multiply(np.conj(a), b).sum()


def concatenate(arrays: Sequence[Any], axis: int = 0) -> Any:
    """Return matrices joined along an axis, on the grid and with the block size of the first matrix."""
    first: Any = next(x for x in arrays if isinstance(x, MatrixBase))
    with together(first.grid.comm) as arguments:
        if axis not in (0, 1, -1, -2) or not all(isinstance(x, MatrixBase) for x in arrays):
            raise TypeError(
                "only a DistMatrix is joined, along axis 0 or 1: distribute arrays first, DistMatrix.from_global"
            )
        arguments += ["concatenate", axis, *(x.distribution for x in arrays)]
        axis = axis % 2
        if any(x.shape[1 - axis] != first.shape[1 - axis] or x.device != first.device for x in arrays):
            text = " and ".join(f"{x.distribution} on {x.device}" for x in arrays)
            raise LayoutError(f"matrices to join along axis {axis} must match in the other axis and device, got {text}")
    shape = [*first.shape]
    shape[axis] = sum(x.shape[axis] for x in arrays)
    dtype = np.result_type(*(x.dtype for x in arrays))
    result = type(first).empty(tuple(shape), grid=first.grid, block=first.block, dtype=dtype, device=first.device)
    start = 0
    for x in arrays:
        part = slice(start, start := start + x.shape[axis])
        x.redistribute(result[part, :] if axis == 0 else result[:, part])
    return result


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    if keepdims and axis is None:
        raise ArgumentError("numpy.linalg.norm of a DistMatrix takes keepdims only with an axis")
    return x.norm("fro" if ord is None else ord, axis, keepdims)


def _dtype(dtypes: Any) -> np.dtype:
    """Return an element type.  Raises TypeError for a matrix, whose own dtype NumPy would take."""
    if isinstance(dtypes, MatrixBase):
        raise TypeError("a DistMatrix is not an element type")
    return element_type(dtypes)


def take(a: Any, indices: Any, axis: int) -> Any:
    return a[indices] if _axis_of(a, axis) == 0 else a[:, indices]


def flip(m: Any, axis: int | None = None) -> Any:
    down = slice(None, None, -1) if axis is None or _axis_of(m, axis) == 0 else slice(None)
    across = slice(None, None, -1) if axis is None or _axis_of(m, axis) == 1 else slice(None)
    return m[down, across]


def roll(a: Any, shift: int, axis: int) -> Any:
    """Return the matrix with its rows, or its columns, rolled by `shift` places.  Collective."""
    at = _axis_of(a, axis)
    with together(a.grid.comm):
        indices = np.roll(np.arange(a.shape[at]), index(shift))
    return take(a, indices, at)


def ptp(a: Any, axis: int | None = None) -> Any:
    return a.max(axis) - a.min(axis)


def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    return pdgemm.linalg.svd(a, full_matrices=full_matrices) if compute_uv else pdgemm.linalg.svdvals(a)


def eigh(a: Any, UPLO: str = "L") -> Any:
    return pdgemm.linalg.eigh(a, lower=as_name(UPLO, "UPLO", ("L", "U")) == "L")


def eigvalsh(a: Any, UPLO: str = "L") -> Any:
    return pdgemm.linalg.eigvalsh(a, lower=as_name(UPLO, "UPLO", ("L", "U")) == "L")


def qr(a: Any, mode: Any = "reduced") -> Any:
    if mode not in ("reduced", "r"):
        raise TypeError("numpy.linalg.qr of a DistMatrix takes mode 'reduced' or 'r'")
    return pdgemm.linalg.qr(a, mode=mode)


def pinv(a: Any, rcond: float | None = None, hermitian: bool = False, *, rtol: float | None = None) -> Any:
    return pdgemm.linalg.pinv(a, rtol=rtol if rcond is None else rcond)


def matrix_rank(A: Any, tol: float | None = None, hermitian: bool = False, *, rtol: float | None = None) -> Any:
    return pdgemm.linalg.matrix_rank(A, tol, rtol=rtol)


def lstsq(a: Any, b: Any, rcond: float | None = None) -> Any:
    return pdgemm.linalg.lstsq(a, b, rcond=rcond)


def _of_tensor(x: Any) -> Any:
    """Return a tensor of two axes as a matrix, other results unchanged."""
    return x.matrix([0]) if np.ndim(x) == 2 else x


def _axis_of(a: Any, axis: Any) -> int:
    with together(a.grid.comm):
        if axis not in (0, 1, -1, -2):
            raise ArgumentError(f"axis must be 0 or 1, got {shown(axis)}")
    return int(axis) % 2


_NUMPY: tuple[Callable[..., Any], ...] = (where, isclose, around, nan_to_num, clip, allclose, array_equal, triu, tril)
_NUMPY += (full_like, dot, inner, outer, vdot, concatenate, take, roll)
FUNCTIONS: dict[str, Callable[..., Any]] = {f"numpy.{function.__name__}": function for function in _NUMPY}
FUNCTIONS |= {f"numpy.linalg.{f.__name__}": f for f in (norm, svd, eigh, eigvalsh, qr, lstsq, pinv, matrix_rank)}
FUNCTIONS |= {
    "numpy.einsum": lambda *operands, **options: _of_tensor(pdgemm.einsum(*operands, **options)),
    "numpy.tensordot": lambda a, b, axes=2: _of_tensor(pdgemm.tensordot(a, b, axes)),
    "numpy.linalg.cholesky": lambda a, /, *, upper=False: pdgemm.linalg.cholesky(a, lower=not upper),
    "numpy.linalg.matrix_norm": lambda x, /, *, ord="fro": pdgemm.linalg.norm(x, ord),
    "numpy.round": around,
    "numpy.flip": flip,
    "numpy.flipud": lambda m: flip(m, 0),
    "numpy.fliplr": lambda m: flip(m, 1),
    "numpy.ptp": ptp,
    "numpy.concat": concatenate,
    "numpy.vstack": lambda tup: concatenate(tup, 0),
    "numpy.hstack": lambda tup: concatenate(tup, 1),
    "numpy.empty_like": lambda prototype, dtype=None: empty_like(prototype, dtype),
    "numpy.zeros_like": lambda a, dtype=None: full_like(a, 0, dtype),
    "numpy.ones_like": lambda a, dtype=None: full_like(a, 1, dtype),
    "numpy.real": lambda val: val.real,
    "numpy.imag": lambda val: val.imag,
    "numpy.diag": lambda v, k=0: v.diagonal(k),
    "numpy.count_nonzero": lambda a, axis=None, keepdims=False: (a != 0).sum(axis, keepdims),
    "numpy.astype": lambda x, dtype, copy=True: x.astype(_dtype(dtype), copy),
}

# functions of `pdgemm.statistics` and `pdgemm.linalg`, modules above this folder; parameters are in NumPy's order
_RANKED = ("median", "percentile", "quantile")
_STATISTICS = ("sort", "cumsum", "histogram", *_RANKED)
_WITHOUT_NAN = (f"nan{name}" for name in ("sum", "prod", "min", "max", "mean", "var", "std", *_RANKED))
_LINALG = ("cond", "det", "inv", "matrix_power", "slogdet", "solve", "svdvals")
ABOVE = {f"numpy.{name}": f"statistics.{name}" for name in (*_STATISTICS, *_WITHOUT_NAN)} | {
    "numpy.kron": "linalg.kron"
}
ABOVE |= {f"numpy.linalg.{name}": f"linalg.{name}" for name in _LINALG}
