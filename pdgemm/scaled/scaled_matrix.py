"""Scaled: a matrix of 8-bit numbers and a matrix of scales, as one operand."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from pdgemm.algorithms.indexing.selection import copy_pairs
from pdgemm.algorithms.product_options import FullProduct, Multiplicand, Operands, OperandScales, ProductCall
from pdgemm.algorithms.products.strips import Strip
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, LayoutError
from pdgemm.gemm import carried_out
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_count, as_pair, op_letter
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.arrays.keys import is_view, picked
from pdgemm.matrix.argument_checks import check_alpha, check_matrices, communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import new_array
from pdgemm.names import DType
from pdgemm.schedules.products.scales import STRIP, blocks_of, strips_of_parts
from pdgemm.support.agreement import together
from pdgemm.support.members import attribute_at

VALUES = tuple(map(np.dtype, ("float8_e4m3fn", "float8_e5m2", "int8")))
POWERS = np.dtype("float8_e8m0fnu")  # scales that are powers of two
_SCALES = (np.dtype(np.float32), POWERS)


class Scaled(Multiplicand):
    """The matrix of elements V[i, j] S[i // mb, j // nb]: 8-bit values V, and a scale for each block of mb x nb.

    values : DistMatrix (m, n) of float8_e4m3fn, float8_e5m2 or int8.
    scales : DistMatrix (ceil(m / mb), ceil(n / nb)) of positive numbers, float32 or float8_e8m0fnu, of any layout over
             the same ranks.
    block  : (mb, nb).  Without it the shape of `scales` decides: (1, 1) is one scale for the tensor, (m, 1) one for
             each row, (1, n) one for each column.  The last blocks may be smaller.

    Views of a Scaled Q share its elements: `Q.T`, and `Q[i0:i1, j0:j1]` that begins at a border of blocks or is within
    one block.  `Q @ R` and `pdgemm(alpha, Q, R, beta, C)` multiply, also with a DistMatrix as the other operand;
    without C the result is float32, or wider if the other operand is.  `pdgemm.quantize` makes a Scaled of a
    DistMatrix, and `decode` a DistMatrix of a Scaled.

    `shape`, `size` and `grid` are those of `values`, and `dtype` is the type of the values.

    Collective over the grid of `values`.  On the host only.
    Raises DTypeError, LayoutError, GridError, DeviceError, or ArgumentError for a scale that is not positive or not
    finite; the same on every rank.
    """

    def __init__(self, values: DistMatrix, scales: DistMatrix, block: tuple[int, int] | None = None) -> None:
        with together(communicator(values=values)) as arguments:
            check_matrices(values=values, scales=scales)
            arguments += ["Scaled", values.distribution, values.dtype, scales.distribution, scales.dtype, block]
            for name, x, known in (("values", values, VALUES), ("scales", scales, _SCALES)):
                if x.dtype not in known:
                    raise DTypeError(f"{name} of a Scaled must be {dtypes.names(known)}, not {x.dtype}")
                if x.device != devices.HOST:
                    raise DeviceError(f"{name} of a Scaled must be on the host, these are on {x.device}: use to_host")
            scales.layout_in(values.grid)  # raises for a grid over other ranks
            block = _block(values.shape, scales.shape, block)
            known_scales = scales.local.astype(STRIP)
            if not (np.isfinite(known_scales) & (known_scales > 0)).all():
                raise ArgumentError("scales must be positive and finite")
        self.values, self.scales, self.block = values, scales, block

    # ------------------------------------------------------------------ properties and views
    shape: tuple[int, int] = attribute_at("values.shape")
    dtype: np.dtype = attribute_at("values.dtype")
    grid: ProcessGrid = attribute_at("values.grid")
    size: int = attribute_at("values.size")

    @property
    def nbytes(self) -> int:
        """The bytes of values and scales of the whole matrix."""
        return self.values.nbytes + self.scales.nbytes

    @property
    def T(self) -> Scaled:
        """The transpose, a view.  Local."""
        return scaled_view(self.values.T, self.scales.T, self.block[::-1])

    H = T  # the values are real

    def __getitem__(self, key: Any) -> Scaled:
        """Return the submatrix Q[i0:i1, j0:j1], a view that begins at a border of blocks or is in one block.  Local.

        Raises LayoutError, with the nearest borders, for other submatrices, and ArgumentError if a key is not a slice
        of step 1.
        """
        if not is_view(key):
            raise ArgumentError("a Scaled Q is indexed only by slices, Q[i0:i1, j0:j1]: index Q.decode() for elements")
        ends, of_scales = list[slice](), list[slice]()
        for axis, (x, block) in enumerate(zip(picked(key, self.shape), self.block)):
            start, stop = x.indices.start, x.indices.stop  # type: ignore[union-attr]
            first, last = start // block, -(-stop // block)
            if start % block and last - first > 1:
                what, below = ("rows", "columns")[axis], first * block
                raise LayoutError(
                    f"{what} {start}:{stop} do not begin at a border of the blocks of {block} {what} that share a "
                    f"scale: the borders next to {start} are {below} and {below + block}"
                )
            ends.append(slice(start, stop))
            of_scales.append(slice(first, last if stop > start else first))
        return scaled_view(self.values[ends[0], ends[1]], self.scales[of_scales[0], of_scales[1]], self.block)

    def __repr__(self) -> str:
        mb, nb = self.block
        return f"Scaled({self.values.distribution}, {self.dtype}; a {self.scales.dtype} scale for each {mb} x {nb})"

    # ------------------------------------------------------------------ moving and converting
    def redistribute(
        self,
        *,
        grid: ProcessGrid | None = None,
        block: int | tuple[int, int] | None = None,
        source: tuple[int, int] = (0, 0),
        order: Order = "C",
    ) -> Scaled:
        """Return a copy in another layout, with the arguments of `DistMatrix.redistribute`.  Collective.

        Cost: two exchanges, of the values and of the scales.
        """
        values = self.values.redistribute(grid=grid, block=block, source=source, order=order)
        sides = tuple(max(1, -(-x // scale)) for x, scale in zip(values.block, self.block))
        scales = self.scales.redistribute(grid=grid, block=sides, source=source, order=order)  # type: ignore[arg-type]
        return scaled_view(values, scales, self.block)

    def copy(self) -> Scaled:
        """Return a copy with the same layout.  Local."""
        return scaled_view(self.values.copy(), self.scales.copy(), self.block)

    def decode(self, dtype: DType = np.float32) -> DistMatrix:
        """Return the elements, values times scales, as a DistMatrix in the layout of the values.  Collective.

        dtype : a real or complex type.  Each element is one product, which is always exact in float64 and complex128.
            For other types it is computed in float32: exactly, if the scale is a power of two and the product does not
            over- or underflow, otherwise with one rounding.  Then it is rounded to a narrower type.

        Cost: one exchange of the scales that this rank lacks.  `.report` has its words.
        Raises DTypeError on every rank.
        """
        with together(self.grid.comm) as arguments:
            wanted = dtypes.element_type(dtype)
            arguments += ["decode", self.values.distribution, wanted]
            if wanted not in dtypes.FLOATS:
                raise DTypeError(f"a Scaled is decoded to {dtypes.names(dtypes.FLOATS)}, not to {wanted}")
            work = np.dtype(wanted if wanted in dtypes.BLAS else np.float32)
            local = new_array(self.values.stored.shape, work, self.values.order, self.grid)
        matrix = DistMatrix(local, self.grid, self.values.distribution, self.values.order)
        CONVERT(local, self.values.stored)
        strip, report = local_strip(self)
        with np.errstate(all="ignore"):
            strip.apply(local, np.arange(self.values.stored.shape[1]))
        matrix = matrix.astype(wanted, copy=False)
        matrix.report = report
        return matrix

    # ------------------------------------------------------------------ products
    @staticmethod
    def __pdgemm__(call: ProductCall) -> DistMatrix:
        """Multiply as `pdgemm` does, with A, B or both of low precision."""
        alpha, A, B, beta, C, transa, transb, options, progress = call
        form = _ScaledProduct(A, B, transa, transb, options.protect is not None)
        left, right = (x.values if isinstance(x, Scaled) else x for x in (A, B))
        return carried_out(form, alpha, left, right, beta, C, options, progress)


class _ScaledProduct(NamedTuple):
    """The product op(A) op(B) where A, B or both have scales."""

    A: Any
    B: Any
    transa: str
    transb: str
    protected: bool

    def operands(self, alpha: Any, A: DistMatrix, B: DistMatrix, beta: Any, C: DistMatrix | None) -> Operands:
        """Return op(A) and op(B) as values with scales, and C, after checking that they match.  Local."""
        check_alpha(alpha)
        check_matrices(A=A, B=B, **({} if C is None else {"C": C}))
        if self.protected:
            raise ArgumentError("protect: products of a Scaled are not compared with checksums; decode() it")
        if C is not None and dtypes.kind_rank(C.dtype) == 0:
            raise DTypeError(f"C is {shape_of(C)} of {C.dtype}: a product of a Scaled is of real or complex numbers")
        dtype = dtypes.arithmetic(A.dtype, B.dtype, STRIP)
        operands = FullProduct(self.transa, self.transb, dtype).operands(alpha, A, B, beta, C)
        a, b = (_op_scales(x, *to) for x, *to in ((self.A, self.transa, "transa"), (self.B, self.transb, "transb")))
        return operands._replace(scales=(a, b))


def _op_scales(x: Any, trans: str, name: str) -> OperandScales | None:
    """Return the scales of op(x); None for a matrix without scales."""
    if not isinstance(x, Scaled):
        return None
    turned = x if op_letter(trans, name) == "N" else x.T
    return OperandScales(turned.scales, turned.block)


def scaled_view(values: DistMatrix, scales: DistMatrix, block: tuple[int, int]) -> Scaled:
    """Return a Scaled whose parts are known to fit.  Local."""
    scaled = Scaled.__new__(Scaled)
    scaled.values, scaled.scales, scaled.block = values, scales, block
    return scaled


def local_strip(x: Scaled) -> tuple[Strip, Any]:
    """Return the scales of this rank's values, and the report of their exchange.  Collective."""
    start, grid, values = perf_counter(), x.grid, x.values.distribution
    own = tuple([dim.indices(part) for part in range(dim.parts)] for dim in (values.rows, values.cols))
    with together(grid.comm):
        distribution, pairs = strips_of_parts(x.block, own, 1)  # type: ignore[arg-type]
        strip = DistMatrix(new_array(distribution.local_shape(grid.coords), STRIP, "C", grid), grid, distribution)
    copy_pairs("scales", x.scales, strip, pairs, start)
    inner = values.cols.indices(grid.coords[1])
    block_of = np.searchsorted(blocks_of(inner, x.block[1]), inner // x.block[1])
    return Strip(strip.stored, block_of), strip.later_report


def _block(shape: tuple[int, int], scales: tuple[int, int], block: Any) -> tuple[int, int]:
    """Return the numbers of rows and of columns of a block that shares a scale.

    Raises LayoutError if `scales`, the shape of the matrix of scales, does not fit.
    """
    if block is None:
        if any(x not in (1, n) for x, n in zip(scales, shape)):
            raise LayoutError(f"scales of shape {scales} for values of shape {shape} need block=(rows, columns)")
        sides = [1 if x == n else n for x, n in zip(scales, shape)]
    else:
        sides = list(as_pair(block, "block must be one pair (rows, columns), got", LayoutError))
    mb, nb = (as_count(max(1, n) if block is None else n, "block", 1) for n in sides)
    expected = tuple(-(-n // side) for n, side in zip(shape, (mb, nb)))
    if scales != expected:
        raise LayoutError(f"blocks of {mb} x {nb} of values of shape {shape} have {expected} scales, not {scales}")
    return mb, nb
