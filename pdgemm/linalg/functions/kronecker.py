"""Products of a matrix and a vector, outer products and Kronecker products."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.errors import DeviceError, GridError, LayoutError
from pdgemm.grids.distribution import Block, BlockCyclic, Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.run_report import report_of_move
from pdgemm.instrument.step_reports import Steps
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.arguments import op_letter
from pdgemm.local.arrays.device import Array, beside, to_host
from pdgemm.local.arrays.dtypes import common, element_type
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.elementwise import CONVERT, supported
from pdgemm.local.arrays.folds import ON_DEVICE
from pdgemm.matrix.argument_checks import check_matrices, communicator, op, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.names import Transpose
from pdgemm.schedules.collectives.vectors import gathering
from pdgemm.support.agreement import together


def matvec(A: DistMatrix, x: Any, *, trans: Transpose = "N") -> Any:
    """Return op(A) x.  Collective over the grid.

    A : DistMatrix (m, n) of any layout.
    x : a 1-D array, the same on every rank; then the result is such an array, too.  Or a DistMatrix of one column; then
        the result is a DistMatrix of one column.
    trans : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H.

    Cost per rank for P ranks: 2 mn/P flops, and the words of the result to every rank.  If x is a DistMatrix, the cost
    is that of `pdgemm`.
    Raises LayoutError where the length of x is wrong, ArgumentError where x differs among the ranks, or DTypeError.
    """
    with together(communicator(A=A, x=x)) as arguments:
        check_matrices(A=A)
        M = op(A, letter := op_letter(trans, "trans"))
        arguments += ["matvec", A.distribution, A.dtype, letter, isinstance(x, DistMatrix)]
        if isinstance(x, DistMatrix) and x.shape != (M.shape[1], 1):
            raise LayoutError(f"op(A) is {shape_of(M)}, so x must be {M.shape[1]} x 1, but it is {shape_of(x)}")
        if conjugated := letter == "C" and not isinstance(x, DistMatrix):
            x = to_host(devices.adopted(x))
            element_type(x.dtype)  # raises if the elements are not numbers
            x = x.conj()  # conjugate x and not A: a conjugate of A would be a copy
    if isinstance(x, DistMatrix):
        return M @ x
    return A.T.matvec(x).conj() if conjugated else M.matvec(x)


def outer(a: Any, b: Any, *, grid: ProcessGrid | None = None, block: Block | None = None) -> DistMatrix:
    """Return the matrix a_i b_j.  Collective over the grid.

    a, b : 1-D arrays that are the same on every rank, or DistMatrices of one column or one row.
    grid, block : the grid and the block size of the result if both a and b are arrays; then nothing is sent.  Otherwise
        the rows of the result are distributed as a if a is a matrix, the columns as b if b is a matrix, and every rank
        receives the elements of a and b.

    Raises LayoutError, ArgumentError or GridError on all ranks.
    """
    matrices = [x for x in (a, b) if isinstance(x, DistMatrix)]
    if matrices:
        result: DistMatrix = np.outer(a, b)  # type: ignore[assignment]
        return result
    if not isinstance(grid, ProcessGrid):
        raise GridError("outer of two arrays takes the grid of the result: outer(a, b, grid=grid)")
    with together(grid.comm) as arguments:
        x, y = (np.asarray(v).reshape(-1) for v in (a, b))
        arguments += ["outer", x.tobytes(), y.tobytes(), x.dtype, y.dtype]
    product = lambda i, j: x[i] * y[j]  # noqa: E731
    return DistMatrix.from_function(product, (len(x), len(y)), grid=grid, block=block, dtype=np.result_type(x, y))


def kron(A: Any, B: Any) -> DistMatrix:
    """Return the Kronecker product, whose block (i, j) of p x q elements is a_ij B.  Collective over the grid.

    A : DistMatrix (m, n);  B : DistMatrix (p, q) of any layout over the same ranks, on the same device.  One of them
        may be an array that is the same on every rank.

    Returns a matrix (m p, n q) on the grid of A, in blocks that are p x q times as large as the blocks of A: the rank
    that owns a_ij owns the block a_ij B.  So A is not sent; every rank receives the elements of B that it does not own,
    at most pq words, which `report` counts.  Cost per rank for P ranks: mnpq/P multiplications.
    Raises LayoutError, GridError, DTypeError or DeviceError on all ranks.
    """
    comm = communicator(A=A, B=B)
    with together(comm) as arguments:
        check_matrices(A=A, B=B)
        B.layout_in(A.grid)  # raises for a grid over other ranks
        dtype = element_type(common(A.dtype, B.dtype))
        if A.device != B.device:
            raise DeviceError(f"kron of matrices on {A.device} and {B.device}: use to_device")
        arguments += ["kron", A.distribution, B.distribution, A.dtype, B.dtype]
        (p, q), (rows, cols) = B.shape, (A.distribution.rows, A.distribution.cols)
        layout = Distribution(_repeated(rows, p), _repeated(cols, q))
    steps, C = Steps(), empty_like(A, dtype, layout)
    b = B.allgather()
    with together(comm):
        if C.local.size:
            _multiply(A.local, beside(b, C.local), C.local)
    recorder, (gather, _) = Recorder(traffic=steps.vectors.counted), gathering(B.layout_in(B.grid), B.grid.size)
    recorder.hold(b.nbytes)
    others: dict[str, Any] = {"source": str(B.distribution), "target": "every rank", "vectors": steps.vectors}
    others["predicted_extra_bytes"] = p * q * B.dtype.itemsize
    C.report = report_of_move(recorder, [gather], B.grid, perf_counter() - steps.start, name="B", **others)
    return C


def _multiply(x: Array, y: Array, product: Array) -> None:
    """Set `product` to the Kronecker product of x and y; all are on the host, or on one device.  Local."""
    if product.strides[0] < product.strides[1]:
        x, y, product = x.T, y.T, product.T
    parts = product.reshape(len(x), len(y), x.shape[1], y.shape[1])
    if isinstance(product, np.ndarray):
        np.multiply(x[:, None, :, None], y[None, :, None, :], out=parts)
        return
    for slab in slabs(len(x), product.size // len(x), ON_DEVICE):
        CONVERT(parts[slab], supported(x[slab])[:, None, :, None] * supported(y)[None, :, None, :])


def _repeated(x: BlockCyclic, times: int) -> BlockCyclic:
    """Return the distribution in which `times` consecutive indices replace each index of x."""
    return BlockCyclic(x.n * times, max(1, x.block * times), x.parts, x.source, x.skip * times)
