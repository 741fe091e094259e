"""Shared parts of the functions of matrices: counted products, workspace matrices, and the report of all steps."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from pdgemm.algorithms.product_options import as_protection
from pdgemm.errors import LinAlgError
from pdgemm.gemm import pdgemm
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.report import all_checks
from pdgemm.instrument.run_report import RunReport, summed
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.operands import check_operand, identity_like, to_one
from pdgemm.linalg.factors.qr import factored
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_name
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.matrix.argument_checks import communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.matrix_base import on_diagonal
from pdgemm.names import Protection
from pdgemm.support.agreement import together
from pdgemm.support.text import counted, in_seconds, in_words

T = TypeVar("T")


class Work:
    """The record of one call of a function of a matrix: it computes and counts products, and collects reports of steps.

    protect : protection of the products by checksums, or None.   memory_limit : limit of each product, as in `pdgemm`.
    did : records the report of a matrix that a factorisation, solve or redistribution returned; returns the matrix.
    ran : records the report of a step, or the function that makes the report.
    after : returns another algorithm's report with the sums of the recorded steps added.
    """

    def __init__(self, name: str, protect: Protection | None = None, memory_limit: int | None = None) -> None:
        self.name, self.start, self.products, self._steps = name, perf_counter(), 0, Steps()
        self.protect, self.memory_limit = protect, memory_limit
        self.did, self.ran, self.after = self._steps.did, self._steps.ran, self._steps.after

    @property
    def empty(self) -> bool:
        """Whether no step was recorded."""
        return not self._steps.reports

    def product(
        self, alpha: complex, A: DistMatrix, B: DistMatrix, beta: complex = 0, C: Any = None, **options: Any
    ) -> DistMatrix:
        """Compute C := alpha A B + beta C, count the product, and return C; if C is None, allocate it.  Collective.

        options : the algorithm and its grid, as for `pdgemm`.
        """
        self.products += 1
        options |= {"protect": self.protect, "memory_limit": self.memory_limit}
        return self.did(pdgemm(alpha, A, B, beta, C, **options))

    def add(self, Y: DistMatrix, alpha: complex, X: DistMatrix, beta: complex = 1) -> DistMatrix:
        """Return Y := alpha X + beta Y, by `add_matrices`; if X is redistributed, record the report.  Collective."""
        before = Y.later_report
        add_matrices(Y, alpha, X, beta)
        return Y if Y.later_report is before else self.did(Y)

    def copy(self, X: DistMatrix, Y: DistMatrix) -> None:
        """Set Y, a matrix or a view, to X.  Collective."""
        self.did(X.redistribute(Y))

    def reported(self, result: DistMatrix, steps: int, **facts: Any) -> DistMatrix:
        """Set the report of a result to the report of all steps, and return the result."""
        result.report = self.later_report(result.grid, steps, facts)
        return result

    def later_report(
        self, grid: ProcessGrid, steps: int, facts: dict[str, Any], **others: Any
    ) -> Callable[[], RunReport]:
        """Return a function that returns the report of all steps.   others : more attributes, such as `text`."""
        seconds = perf_counter() - self.start
        products, steps_reports, vectors = self.products, self._steps.reports, self._steps.vectors

        def report() -> RunReport:
            reports = [make() for make in steps_reports]
            checks = all_checks([x.checks for x in reports if getattr(x, "checks", None)])
            inside = sum(x.products for x in reports if hasattr(x, "products"))
            figures = {"name": self.name, "steps": steps, "products": products + inside, "facts": facts}
            figures |= summed(reports, vectors) | {"rank": grid.rank, "seconds": seconds, "checks": checks}
            return RunReport(comm=grid.comm, **{"text": text_of_function} | figures | others)

        return report


def text_of_function(report: Any) -> str:
    """Return the text of the report of a function of a matrix."""
    numbers = {name: value for name, value in report.facts.items() if not isinstance(value, list)}
    facts = "".join(f", {name} {value:{'.7g' if 0.9 < value < 1 else '.2g'}}" for name, value in numbers.items())
    checks = f"\n{report.checks}; factorisations, solves and redistributions were not compared" if report.checks else ""
    return (
        f"{report.name}: {counted(report.steps, 'step')}, {counted(report.products, 'product')}, "
        f"{in_words(report.counted.words_received)} received, {in_seconds(report.seconds)}{facts}{checks}"
    )


def started(name: str, A: DistMatrix, protect: Protection | None, square: bool = True, **choices: Any) -> Work:
    """Check the arguments of a function of A, and return its `Work`.  Collective over the grid of A.

    choices : for each argument name, its value and the tuple of valid values.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A, square)
        values = [as_name(value, argument, known) for argument, (value, known) in choices.items()]
        arguments += [name, A.distribution, A.dtype, *values, check_protection(protect, A)]
    return Work(name, protect)


def check_protection(protect: Any, A: DistMatrix) -> str:
    """Return the name of the protection.  Raises if it is unknown, or if A is on a device.  Local, in `together`."""
    return as_protection(protect, A.device != devices.HOST)


def add_matrices(Y: DistMatrix, alpha: complex, X: DistMatrix, beta: complex = 1) -> DistMatrix:
    """Compute Y := alpha X + beta Y for any layouts, and return Y.  Collective; local if the layouts are the same."""
    alike = X.dtype == Y.dtype and X.dtype in dtypes.BLAS and X.device == Y.device == devices.HOST
    if X.conjugated or not alike or not X.same_layout(Y):
        return X.redistribute(Y, alpha=alpha, beta=beta)
    x, y = X.stored, Y.stored
    if x.strides[0] < x.strides[1]:
        x, y = x.T, y.T
    for slab in slabs(*x.shape) if x.size else ():  # slabs that fit in cache
        part = x[slab] * alpha
        if beta != 0:
            part += y[slab] * beta
        y[slab] = part
    return Y


def add_to_diagonal(A: DistMatrix, value: complex) -> DistMatrix:
    """Compute A := A + value I in place, and return A.  Collective on a device, else local."""
    if A.device == devices.HOST:
        A.stored[on_diagonal(A)] += A.dtype.type(value)
        return A
    return add_matrices(A, value, identity_like(A))


def largest_part(A: DistMatrix) -> float:
    """Return max |a|, or the largest real or imaginary part if |a| overflows; NaN if an element is NaN.  Collective."""
    size = float(A.norm("max")) if A.size else 0.0
    if size == np.inf and A.dtype.kind == "c":
        size = float(np.max([A.real.norm("max"), A.imag.norm("max")]))
    return size


def near_one(name: str, A: DistMatrix) -> tuple[float, float]:
    """Return two powers of four, as `to_one`, that scale A to a `largest_part` of about 1.  Collective.

    name : A's name, for the message.   Raises LinAlgError on all ranks where an element is NaN or infinite.
    """
    size = largest_part(A)
    if not np.isfinite(size):
        raise LinAlgError(f"{name} ({shape_of(A)} on a {A.grid} grid) contains NaN or infinity")
    return to_one(size or 1.0, A.dtype)


def on_one_rank(A: DistMatrix, compute: Callable[..., T], *arguments: Any) -> T:
    """Return compute(*arguments), computed on rank 0 and broadcast.  Collective over the grid of A.

    So the result is the same to the bit on every rank, although LAPACK may round differently on different processors.
    An exception is raised on all ranks.  For a routine that a report lists, with its flops, see `run_on_one_rank`.
    """
    comm = A.grid.comm
    with together(comm):
        result = compute(*arguments) if comm.rank == 0 else None
    return comm.bcast(result, root=0)


def to_one_rank(work: Work, A: DistMatrix) -> DistMatrix:
    """Return A, or a copy, column-major on a grid of one rank, where LAPACK reads it.  Collective over A's grid."""
    if A.grid.shape == (1, 1) and A.order == "F":
        return A
    return work.did(A.redistribute(grid=A.grid.base.reshaped((1, 1), A.grid.rank_map[:1]), order="F"))


def distributed(A: DistMatrix, whole: np.ndarray) -> DistMatrix:
    """Return a small matrix, the same on every rank, as a DistMatrix on the grid and the device of A.  Collective."""
    array = np.asarray(whole, A.dtype)
    return DistMatrix.from_global(array, grid=A.grid, device=A.device, check=False)


def random(A: DistMatrix, shape: tuple[int, int], seed: int = 1) -> DistMatrix:
    """Return a matrix of normal random numbers, the same on every grid, of A's type and on A's device.  Collective."""
    return DistMatrix.random(shape, grid=A.grid, seed=seed, kind="normal", dtype=A.dtype, device=A.device)


def orthonormal_basis(
    work: Work, R: DistMatrix, V: DistMatrix, level: float = 0, noise: DistMatrix | None = None
) -> tuple[DistMatrix, DistMatrix]:
    """Return Q, an orthonormal basis orthogonal to V, and T, where Q T = (I - V V^H) (R + level * noise).  Collective.

    noise : normal random columns, which extend the basis where the columns of R are in the space of V.
    """
    Q = R if noise is None else work.add(noise.copy(), 1, R, level)
    triangles = []
    for passes in (2, 1):  # orthogonalise twice, which is enough (Parlett, The Symmetric Eigenvalue Problem, 1998, 6.9)
        Q = Q.copy()
        work.product(-1, V, work.product(1, V.H, Q), 1, Q)
        Q, T = factored(Q, passes=passes)
        work.did(Q)
        triangles.append(T)
    return Q, triangles[0]
