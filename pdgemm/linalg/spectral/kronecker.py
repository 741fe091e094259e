"""Products of two factors that are small beside the result: matrix times vector, outer and Kronecker products."""

from __future__ import annotations

from math import prod
from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.errors import DeviceError, GridError, LayoutError
from pdgemm.grids.distribution import Block, BlockCyclic, Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder, Traffic
from pdgemm.instrument.run_report import MoveReport
from pdgemm.linalg.spectral.iterations import empty_like
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import to_host
from pdgemm.local.arrays.dtypes import common, element_type
from pdgemm.local.arrays.elementwise import set_elements
from pdgemm.matrix.argument_checks import check_matrices, communicator, op, op_letter, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.gather import block_index
from pdgemm.names import Transpose
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.support.agreement import together
from pdgemm.transport.collectives import carry_out


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
    start, comm = perf_counter(), communicator(A=A, B=B)
    with together(comm) as arguments:
        check_matrices(A=A, B=B)
        B.layout_in(A.grid)  # raises for a grid over other ranks
        dtype = element_type(common(A.dtype, B.dtype))
        if A.device != B.device:
            raise DeviceError(f"kron of matrices on {A.device} and {B.device}: use to_device")
        arguments += ["kron", A.distribution, B.distribution, A.dtype, B.dtype]
        (p, q), (rows, cols) = B.shape, (A.distribution.rows, A.distribution.cols)
        layout, b = Distribution(_repeated(rows, p), _repeated(cols, q)), np.empty(B.shape, B.dtype)
    C, gather, recorder = empty_like(A, dtype, layout), _to_every_rank(B), Recorder()
    recorder.hold(b.nbytes)
    _gather(B, b, gather, recorder.traffic)
    with together(comm):
        host = C.local if C.device == devices.HOST else np.empty(C.local.shape, dtype)
        if host.size:
            turned = not host.flags.c_contiguous
            x, y, product = (v.T if turned else v for v in (to_host(A.local), b, host))
            parts = product.reshape(len(x), len(y), x.shape[1], y.shape[1])
            np.multiply(x[:, None, :, None], y[None, :, None, :], out=parts)
        if host is not C.local:
            set_elements(C.local, host)
    ends = {"source": str(B.distribution), "target": "every rank"}
    C.report = MoveReport.of_run(recorder, [gather], B.grid, perf_counter() - start, name="B", **ends)
    return C


def _repeated(x: BlockCyclic, times: int) -> BlockCyclic:
    """Return the distribution in which each index becomes so many."""
    return BlockCyclic(x.n * times, max(1, x.block * times), x.parts, x.source, x.skip * times)


def _to_every_rank(B: DistMatrix) -> Collective:
    """Return how all ranks get all of B."""
    counts = (prod(B.distribution.local_shape(B.grid.coords_of(rank))) for rank in range(B.grid.size))
    return Collective("all_gather", "ring", tuple(range(B.grid.size)), tuple(counts), B.dtype)


def _gather(B: DistMatrix, whole: np.ndarray, gather: Collective, counted: Traffic) -> None:
    """Set `whole` on every rank to B, and count what is sent.  Collective."""
    if B.grid.draft:
        B.grid.draft.add("B", gather)
        return
    parts = np.empty(whole.size, B.dtype)
    own = to_host(B.local)
    ends = gather.offsets.tolist()
    parts[ends[B.grid.rank] : ends[B.grid.rank + 1]] = own.reshape(-1)
    carry_out(gather, B.grid.comm, [parts], counted)
    for rank in range(B.grid.size):
        i, j = B.grid.coords_of(rank)
        rows, cols = B.distribution.rows.indices(i), B.distribution.cols.indices(j)
        whole[block_index(rows, cols)] = parts[ends[rank] : ends[rank + 1]].reshape(len(rows), len(cols))
