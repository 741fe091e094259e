"""Products of layers: of matrices that are divided along a line of a mesh, and of arrays of one rank."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np

from pdgemm.algorithms.plan_workspace import Workspace
from pdgemm.algorithms.prepared import Prepared
from pdgemm.algorithms.product_options import Operands
from pdgemm.errors import NodeMemoryError
from pdgemm.gemm import Plan, plan
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Order
from pdgemm.local.blas.local_gemm import gemm_accumulate, leading, product_slabs
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import allocated
from pdgemm.names import AlgorithmName
from pdgemm.parallel.mesh import Mesh
from pdgemm.support.agreement import together

_KEPT = 64  # plans whose buffers are kept
Array = np.ndarray


class Divided(NamedTuple):
    """A rank's part of a matrix whose rows or columns are divided along a line.

    local : the part.   shape : of the whole matrix.   by : what is divided, in blocks of ceil(n/ranks).
    order : the memory order of the parts of all ranks; a part of one row or column is in both.
    """

    local: Array
    shape: tuple[int, int]
    by: Literal["rows", "columns"]
    order: Order = "C"

    @property
    def T(self) -> Divided:
        by: Literal["rows", "columns"] = "rows" if self.by == "columns" else "columns"
        return Divided(self.local.T, self.shape[::-1], by, "F" if self.order == "C" else "C")


class LineProducts:
    """C := A B + beta C of divided matrices over an axis of a mesh, each planned once for its sizes and types.

    The buffers of plans are kept, and serve all layers that multiply matrices of these sizes.
    kind : of `mesh.traffic`, as which words count.
    """

    def __init__(self, mesh: Mesh, axis: str, kind: str) -> None:
        self._mesh, self.line, self._kind = mesh, mesh.line(axis), kind
        self._checks = mesh.checks(self.line)
        self._plans = dict[tuple[Any, ...], tuple[Plan, Workspace]]()

    def __call__(self, algorithm: AlgorithmName, A: Divided, B: Divided, C: Divided, beta: int = 0) -> None:
        """Compute C := A B + beta C.  Collective over the line; the ranks agree when sizes are new.

        algorithm : "allgather" or "reduce_scatter".
        """
        self._checks.meet(self._mesh.traffic["decisions"])  # in what follows no rank looks for calls
        key = (algorithm, beta, *((x.shape, x.by, x.local.dtype, x.order) for x in (A, B, C)))
        matrices = self._matrix(A), self._matrix(B), self._matrix(C)
        if key in self._plans:
            planned, workspace = self._plans[key] = self._plans.pop(key)  # the last one that was used is last
        else:
            planned, workspace = self._plans[key] = self._planned(algorithm, beta, *matrices)
            if len(self._plans) > _KEPT:
                self._plans.pop(next(iter(self._plans)))
        product = Prepared(planned, 1, Operands(*matrices, False), workspace)
        product.run(beta, perf_counter(), progress=lambda done, panels: let_move(self._mesh))
        self._mesh.traffic[self._kind] += product.traffic

    def _matrix(self, x: Divided) -> DistMatrix:
        """Return a divided matrix as a matrix on the line; nothing is copied."""
        parts, whole = self.line.size, x.by == "rows"
        rows, columns = (
            BlockCyclic.even(n, parts if whole == first else 1) for n, first in zip(x.shape, (True, False))
        )
        grid = self.line.T if whole else self.line
        return DistMatrix(x.local, grid, Distribution(rows, columns), x.order)

    def _planned(
        self, algorithm: AlgorithmName, beta: int, A: DistMatrix, B: DistMatrix, C: DistMatrix
    ) -> tuple[Plan, Workspace]:
        """Return the plan of a product and its buffers.  Collective over the line."""

        def workspace() -> Workspace:
            with together(self.line.comm):
                return Workspace(planned, A, B)

        planned = plan(A, B, C, beta=beta, algorithm=algorithm)
        try:
            return planned, allocated(self.line.comm, workspace)
        except NodeMemoryError:  # raised on all ranks, so all ranks send panels instead
            planned = plan(A, B, C, beta=beta, algorithm=algorithm, mover="mpi")
            return planned, allocated(self.line.comm, workspace)


def line_products(mesh: Mesh, axis: str, kind: str) -> LineProducts:
    """Return the products of a line, which all layers of a mesh share."""
    if (key := (LineProducts, axis, kind)) not in mesh.workspaces:
        mesh.workspaces[key] = LineProducts(mesh, axis, kind)
    products: LineProducts = mesh.workspaces[key]
    return products


def add_product(mesh: Mesh, A: Array, B: Array, beta: int, C: Array) -> None:
    """Compute C := A B + beta C of arrays of this rank, in slabs between which messages move on.  Local.

    The slabs, and so the bits of C, depend on the sizes alone.  2mnk flops.
    """
    for a, b, c in product_slabs(A, B, C):
        gemm_accumulate(1, a, b, beta, c)
        let_move(mesh)


def let_move(mesh: Mesh) -> None:
    """Let messages in flight, as of reductions of gradients, move on.  Local."""
    if mesh.transfers.in_flight:
        mesh.transfers.poll()


def for_blas(x: Array, dtype: np.dtype) -> Array:
    """Return an array of this type of which rows or columns are contiguous; the array itself if it is one."""
    x = np.asarray(x, dtype)
    try:
        leading(x)
    except ValueError:
        return np.ascontiguousarray(x)
    return x
