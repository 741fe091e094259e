"""Products of two factors that are small beside the result: matrix times vector, outer and Kronecker products."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.errors import DeviceError, GridError, LayoutError
from pdgemm.grids.distribution import Block, BlockCyclic, Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.run_report import MoveReport
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.spectral.iterations import empty_like
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import to_host
from pdgemm.local.arrays.dtypes import common, element_type
from pdgemm.local.arrays.elementwise import set_elements
from pdgemm.matrix.argument_checks import check_matrices, communicator, op, op_letter, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import Transpose
from pdgemm.support.agreement import together


def matvec(A: DistMatrix, x: Any, *, trans: Transpose = "N") -> Any:
    """Return op(A) x, for op(A) = A, A^T or A^H.  Collective over the grid.

    x : a 1-D array that is the same on every rank: so is the result.  Or a DistMatrix of one column: so is the result.

    Cost: 2 mn/P flops and m words to every rank; for a DistMatrix, those of `pdgemm`.
    Raises LayoutError where x has another length, ArgumentError where it differs among the ranks.
    """
    with together(communicator(A=A, x=x)) as arguments:
        check_matrices(A=A)
        M, letter = op(A, trans, "trans"), op_letter(trans, "trans")
        arguments += ["matvec", A.distribution, A.dtype, letter, isinstance(x, DistMatrix)]
        if isinstance(x, DistMatrix) and x.shape != (M.shape[1], 1):
            raise LayoutError(f"op(A) is {shape_of(M)}, but x is {shape_of(x)}; one column of that length was expected")
        if conjugated := letter == "C" and not isinstance(x, DistMatrix):
            x = to_host(devices.adopted(x))
            element_type(x.dtype)  # raises for what is no number
            x = x.conj()  # a conjugate of A is a copy
    if isinstance(x, DistMatrix):
        return M @ x
    return A.T.matvec(x).conj() if conjugated else M.matvec(x)


def outer(a: Any, b: Any, *, grid: ProcessGrid | None = None, block: Block | None = None) -> DistMatrix:
    """Return the matrix a_i b_j.  Collective over the grid.

    a, b : 1-D arrays that are the same on every rank, or DistMatrices of one column or one row.
    grid, block : of the result where both are arrays; nothing is sent then.  Else the rows lie as those of a, and the
        columns as those of b, as far as they are matrices, whose elements every rank receives.

    Raises LayoutError, ArgumentError or GridError on all ranks.
    """
    matrices = [x for x in (a, b) if isinstance(x, DistMatrix)]
    if matrices:
        made: DistMatrix = np.outer(a, b)  # type: ignore[assignment]
        return made
    if not isinstance(grid, ProcessGrid):
        raise GridError("outer of two arrays takes the grid of the result: outer(a, b, grid=grid)")
    with together(grid.comm) as arguments:
        x, y = (np.asarray(v).reshape(-1) for v in (a, b))
        arguments += ["outer", x.tobytes(), y.tobytes(), x.dtype, y.dtype]
    product = lambda i, j: x[i] * y[j]  # noqa: E731
    return DistMatrix.from_function(product, (len(x), len(y)), grid=grid, block=block, dtype=np.result_type(x, y))


def kron(A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Return the Kronecker product, whose block (i, j) of p x q elements is a_ij B.  Collective over the grid.

    A : DistMatrix (m, n);  B : DistMatrix (p, q) of any layout over the same ranks, on the same device.

    Returns a matrix (m p, n q) on the grid of A in blocks that are p x q times as large as those of A: the ranks that
    have elements of A have their multiples.  So A stays where it is, and every rank receives what it lacks of B:
    pq words at most, which the report has.  Cost: mnpq/P multiplications.
    Raises LayoutError, DTypeError or DeviceError on all ranks.
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
        host = C.local if C.device == devices.HOST else np.empty(C.local.shape, dtype)
        if host.size:
            turned = not host.flags.c_contiguous
            x, y, product = (v.T if turned else v for v in (to_host(A.local), b, host))
            parts = product.reshape(len(x), len(y), x.shape[1], y.shape[1])
            np.multiply(x[:, None, :, None], y[None, :, None, :], out=parts)
        if host is not C.local:
            set_elements(C.local, host)
    C.report = MoveReport(
        rank=A.grid.rank,
        seconds=perf_counter() - steps.start,
        counted=steps.vectors.counted,
        predicted=steps.vectors.predicted,
        vectors=steps.vectors,
        extra_bytes=b.nbytes,
        predicted_extra_bytes=p * q * B.dtype.itemsize,
        name="B",
        source=str(B.distribution),
        target="every rank",
    )
    return C


def _repeated(x: BlockCyclic, times: int) -> BlockCyclic:
    """Return the distribution in which each index becomes so many."""
    return BlockCyclic(x.n * times, max(1, x.block * times), x.parts, x.source, x.skip * times)
