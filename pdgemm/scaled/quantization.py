"""quantize() rounds a matrix to 8-bit values with scales."""

from __future__ import annotations

from numbers import Real
from typing import Any

import ml_dtypes
import numpy as np

from pdgemm.errors import ArgumentError, DeviceError, DTypeError, LayoutError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_count, as_name, as_pair, as_real
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import all_shared, new_array
from pdgemm.names import DType
from pdgemm.scaled.scaled_matrix import POWERS, VALUES, Scaled, local_strip, scaled_view
from pdgemm.schedules.products.scales import STRIP
from pdgemm.support.agreement import together

SHARING = ("tensor", "row", "column", "block")  # the elements that share a scale
_LEAST, _MOST = 2.0**-126, float(np.finfo(np.float32).max)  # smallest and largest float32 scale


def quantize(
    A: DistMatrix,
    dtype: DType,
    scales: str | float = "tensor",
    *,
    block: tuple[int, int] = (1, 32),
    scale_dtype: DType = np.float32,
    saturate: bool = True,
) -> Scaled:
    """Return a Scaled Q with Q ~ A: values a / s, rounded to 8 bits, for a scale s of each block.  Collective.

        Q = quantize(A, "float8_e4m3fn", "block", scale_dtype="float8_e8m0fnu")     # OCP microscaling, MXFP8
        Q = quantize(A, "float8_e4m3fn", "block", block=(128, 128))

    A      : DistMatrix (m, n), real, on the host.
    dtype  : float8_e4m3fn (largest number 448), float8_e5m2 (57344) or int8 (127).
    scales : elements that share a scale: "tensor", "row", "column", or "block".  s is the largest finite |a| divided by
             the largest number of the type, and 1 where all are 0.  Or a number, the scale of the tensor, such as that
             of an earlier step.
    block  : rows and columns of a block, for "block".  The blocks of A's layout must begin at borders of these blocks,
             so that each of them is on one rank.
    scale_dtype : float32, or float8_e8m0fnu: powers of two, the least at which no element is too large.
    saturate : True: elements that are too large for the type become its largest number.  False: they become NaN
             (float8_e4m3fn) or infinity (float8_e5m2).  Infinities are too large; finite elements can be too large
             only if `scales` is a number.

    NaN stays NaN; int8 cannot hold it.  Rounding is to nearest, ties to even.

    Error: |q - a| <= u |a| + s d / 2, where u is 2^-4 for float8_e4m3fn and 2^-3 for float8_e5m2, and the least
    positive number d is 2^-9 and 2^-16; for int8 u = 0 and d = 1; plus the rounding of a / s to float32.
    Cost: nothing is sent for "block"; else all-reduces of the m, n or 1 largest elements.  Memory for one copy of A.
    Raises DTypeError, LayoutError, ArgumentError or DeviceError on every rank.

    OCP Microscaling Formats (MX) 1.0, 2023: the scale there is a power of two, too, but may be half as large, and then
    the largest elements saturate.  Micikevicius et al., FP8 formats for deep learning, arXiv:2209.05433, 2022.
    """
    checked = together(communicator(A=A))
    with checked as arguments:
        check_matrices(A=A)
        to, of_scales = dtypes.element_type(dtype), dtypes.element_type(scale_dtype)
        arguments += ["quantize", A.distribution, A.dtype, to, of_scales, scales, block, saturate]
        _check_types(A, to, of_scales, saturate)
        sides = _sides(A.shape, scales, block)
        if of_scales == POWERS and isinstance(scales, Real) and np.frexp(float(scales))[0] != 0.5:
            raise ArgumentError(f"scales = {scales} must be a power of two: {POWERS} has no other numbers")
        if scales == "block":
            rows, cols = A.distribution.rows, A.distribution.cols
            places = Distribution(_aligned(rows, sides[0], "rows"), _aligned(cols, sides[1], "columns"))
        finite = np.abs(A.local.astype(np.float64 if A.dtype == np.float64 else STRIP))
        checked.flag = to.kind == "i" and bool(np.isnan(finite).any())
        finite[~np.isfinite(finite)] = 0
        values = new_array(A.stored.shape, to, A.order, A.grid)
    if checked.flag:
        raise ArgumentError(f"A has NaN, which {to} cannot hold: use numpy.nan_to_num(A)")
    if scales == "block":
        largest = DistMatrix(_of_blocks(finite, *sides), A.grid, places)
    elif isinstance(scales, Real) or not A.size:
        shape = tuple(-(-n // side) for n, side in zip(A.shape, sides))
        largest = DistMatrix.zeros(shape, grid=A.grid.base)  # type: ignore[arg-type]
    else:
        axis = {"tensor": None, "row": 1, "column": 0}[str(scales)]
        largest = DistMatrix(finite, A.grid, A.distribution, A.order).max(axis=axis, keepdims=True)
    numbers = _scales(largest.local, largest_number(to), of_scales == POWERS, scales)
    of_blocks = DistMatrix(numbers.astype(of_scales), largest.grid, largest.distribution)
    Q = scaled_view(DistMatrix(values, A.grid, A.distribution, A.order), of_blocks, sides)
    strip, _ = local_strip(Q)
    ratio = finite  # reuses its memory
    CONVERT(ratio, A.local)
    with np.errstate(all="ignore"):
        strip.apply(ratio, np.arange(ratio.shape[1]), np.divide)
        values[...] = rounded(ratio, to, saturate)
    Q.values.shared = all_shared(values, A.grid)
    return Q


def largest_number(dtype: np.dtype) -> float:
    """Return the largest finite number of a type of values; for int8 it is 127, and -128 is not used."""
    return 127.0 if dtype.kind == "i" else float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def rounded(x: np.ndarray, dtype: np.dtype, saturate: bool) -> np.ndarray:
    """Return x rounded to a type of values.  Overwrites x.

    saturate : numbers that are too large for the type become its largest number.
    """
    if dtype.kind == "i":
        np.rint(x, out=x)
    if saturate:
        top = largest_number(dtype)
        np.clip(x, -top, top, out=x)
    return x.astype(dtype)


def _check_types(A: DistMatrix, to: np.dtype, of_scales: np.dtype, saturate: bool) -> None:
    if A.device != devices.HOST:
        raise DeviceError(f"A is on {A.device}, but only matrices on the host are quantized: use to_host")
    if A.dtype not in dtypes.FLOATS or A.dtype.kind == "c":
        raise DTypeError(f"A must be real, got {A.dtype}")
    if to not in VALUES:
        raise DTypeError(f"values of a Scaled must be {dtypes.names(VALUES)}, not {to}")
    if of_scales not in (STRIP, POWERS):
        raise DTypeError(f"scale_dtype must be float32 or {POWERS}, not {of_scales}")
    if to.kind == "i" and not saturate:
        raise ArgumentError("saturate=False is for types with NaN or infinity, and int8 has none")


def _sides(shape: tuple[int, int], scales: Any, block: Any) -> tuple[int, int]:
    """Return the numbers of rows and of columns of the blocks that share a scale."""
    m, n = (max(1, x) for x in shape)
    if isinstance(scales, Real) and not isinstance(scales, bool):
        number = as_real(scales, "scales", above=0)
        if not _LEAST <= number <= _MOST:
            raise ArgumentError(f"scales = {number} is not within {_LEAST} and {_MOST}")
        return m, n
    name = as_name(scales, "scales", SHARING)
    if name == "block":
        mb, nb = as_pair(block, "block must be one pair (rows, columns), got", LayoutError)
        return as_count(mb, "block", 1), as_count(nb, "block", 1)
    return {"tensor": (m, n), "row": (1, n), "column": (m, 1)}[name]


def _aligned(dim: BlockCyclic, side: int, what: str) -> BlockCyclic:
    """Return how the rows, or columns, of the matrix of scales are distributed.

    Each is on the rank that owns the `side` rows, or columns, of A that share it.
    dim : the distribution of the rows, or columns, of A.   what : "rows" or "columns", for messages.
    """
    n = -(-dim.n // side)
    if dim.parts == 1:
        return BlockCyclic.even(n, 1)
    if dim.n <= dim.first:  # one owner
        return BlockCyclic(n, max(1, n), dim.parts, dim.source)
    if dim.block % side or dim.skip % side:
        first = f" (the first block has {dim.first})" if dim.skip else ""
        raise LayoutError(
            f"blocks of {side} {what} that share a scale must not cross ranks: A has blocks of {dim.block} {what}"
            f"{first}; A.redistribute(block=...) brings A to blocks of a multiple of {side}"
        )
    return BlockCyclic(n, dim.block // side, dim.parts, dim.source, dim.skip // side)


def _of_blocks(x: np.ndarray, mb: int, nb: int) -> np.ndarray:
    """Return the largest element of each block of mb x nb of a local array."""
    if not x.size:
        return np.zeros([-(-n // side) for n, side in zip(x.shape, (mb, nb))], x.dtype)
    rows = np.maximum.reduceat(x, np.arange(0, x.shape[0], mb), axis=0)
    return np.maximum.reduceat(rows, np.arange(0, x.shape[1], nb), axis=1)


def _scales(largest: np.ndarray, top: float, powers: bool, wanted: Any) -> np.ndarray:
    """Return the scale at which the largest element becomes the largest number of the type; 1 where all elements are 0.

    wanted : the argument `scales` of `quantize`; a number replaces all computed scales.
    """
    if isinstance(wanted, Real):
        return np.full(largest.shape, float(wanted))
    ratio = largest.astype(np.float64) / top
    if powers:
        fraction, exponent = np.frexp(ratio)
        ratio = np.ldexp(1.0, np.clip(exponent - (fraction == 0.5), -127, 127))
    else:
        ratio = np.clip(ratio, _LEAST, _MOST)
    return np.where(largest > 0, ratio, 1)
