"""The largest singular values of a matrix in a file and their vectors, from sketches that are computed pass by pass.

Two passes: V is sought in the space P of the rows of Psi^H A for a random Psi; the second pass computes Y = A P and,
panel by panel, the norm of what is left, A - Y P^H (Halko, Martinsson & Tropp, SIAM Review 53(2), 2011, of A^H).  More
passes turn the space towards the singular vectors first, each by one product with A or A^H (algorithm 4.4 there).
One pass: Y = A Omega, W = Psi^H A, Q = orth(Y), X = (Psi^H Q)^+ W, A ~ Q X, or the same of A^H (Tropp, Yurtsever, Udell
& Cevher, SIAM J. Matrix Anal. Appl. 38(4), 2017).  A third sketch estimates the error (the same authors, SIAM J. Sci.
Comput. 41(4), 2019, section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import hypot, sqrt
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError, DTypeError, LinAlgError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io.source import ReadSums, Source
from pdgemm.io.streamed.file_panels import Panels, loaded_steps, worker
from pdgemm.io.streamed.files_product import operand_of
from pdgemm.io.streamed.sketch_plan import ESTIMATING, SketchPlan, certain_factor, fitting_sketch
from pdgemm.linalg.factors.qr import qr
from pdgemm.linalg.functions.iterations import FunctionReport, Work, distributed, on_one_rank
from pdgemm.linalg.ranges import RangeOfPanels, times
from pdgemm.linalg.singular.svd import svd
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.element_functions import element_function
from pdgemm.local.arrays.integers import as_count, as_seed
from pdgemm.matrix.argument_checks import as_optional
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of
from pdgemm.support.agreement import GuardedCallback, agree, together
from pdgemm.support.memory_left import largest_so_far
from pdgemm.support.text import in_bytes, in_seconds

LIMIT = 1 << 28  # bytes per rank for panels, sketches and buffers, where the caller sets no limit
_ROUNDING = 10  # times sqrt(n + width) eps |A|_F: errors of the products, of which the errors are random


@dataclass(frozen=True, kw_only=True)
class StoredReport(FunctionReport):
    """The report of a function of a matrix in a file; its steps are passes over the file.

    plan       : the planned passes and reads (`SketchPlan.as_dict`).   bytes_read : the counted bytes of all ranks.
    read_wait  : seconds in which the slowest rank waited for the file.
    peak       : bytes of the largest resident set of a rank so far, as in a StreamReport.
    """

    plan: dict[str, Any]
    bytes_read: int
    read_wait: float
    peak: int

    @property
    def as_predicted(self) -> bool:
        return super().as_predicted and self.bytes_read == self.plan["bytes_read"]

    def __str__(self) -> str:
        as_planned = "as" if self.bytes_read == self.plan["bytes_read"] else "NOT as"
        return (
            f"{super().__str__()}\n"
            f"read {in_bytes(self.bytes_read)}, {as_planned} planned, of which waits for reading "
            f"{in_seconds(self.read_wait)}; largest rank {in_bytes(self.peak)}"
        )


class Triplets(NamedTuple):
    """Approximate singular triplets of a dataset, and the row of means that was subtracted; None: none was.

    facts : as `pdgemm.linalg.svd` describes them.
    """

    U: DistMatrix
    s: np.ndarray
    V: DistMatrix
    mean: DistMatrix | None
    facts: dict[str, float]


def stored_svd(
    grid: ProcessGrid,
    source: Source,
    k: Any,
    passes: Any = None,
    memory: Any = None,
    oversample: Any = None,
    seed: Any = 0,
    centered: bool = False,
    progress: Callable[[int, int], object] | None = None,
    planned: Callable[[SketchPlan, int], object] = lambda plan, memory: None,
) -> tuple[DistMatrix, np.ndarray, DistMatrix, DistMatrix | None]:
    """Return U, s, Vh of op(A) in a file, and the mean that was subtracted, if `centered`.  Collective over the grid.

    Arguments, report and errors are those of `pdgemm.linalg.svd`.
    planned : called with the plan and the memory before an element is read.
    """
    comm, base = communicator_of(grid), grid.base
    with together(comm) as arguments:
        if source.dtype not in dtypes.BLAS:
            raise DTypeError(f"{source.what} is of {source.dtype}: open it with dtype={dtypes.names(dtypes.BLAS)}")
        if k is None:
            raise ArgumentError("svd of a matrix in a file computes the k largest singular values: name k, or load it")
        k, (m, n), seed = as_count(k, "k", 1), source.stored.shape, as_seed(seed)
        if k > min(m, n):
            raise ArgumentError(f"k = {k} is more than the {min(m, n)} singular values of A, which is {m} x {n}")
        passes, memory = as_optional(passes, "passes", 1) or 2, as_optional(memory, "memory", 1) or LIMIT
        oversample = None if oversample is None else as_count(oversample, "oversample", 0)
        shape = (grid.size, 1) if m >= n else (1, grid.size)
        of_file = operand_of(source._replace(op="N"))
        rows = bool(centered) and not source.transposed
        plan = SketchPlan((m, n), shape, of_file, int(source.dtype.kind != "c"), k, k, passes, rows)
        plan = fitting_sketch(plan, oversample, memory)
        arguments += ["svd of a file", source.what, source.op, plan, memory, seed, bool(centered)]
    planned(plan, memory)
    if grid.draft:
        grid.draft.add(source.what, plan.file_reads)
    work = Work("svd", memory_limit=memory - plan.most_bytes)
    with ExitStack() as stack:
        sums = ReadSums(source.place, source.dtype)
        get = stack.enter_context(source.opened_alone(grid, sums))
        reader = stack.enter_context(worker())
        file = _File(work, base, source, plan, 2 * seed + 1, bool(centered), progress)
        layout = (min(plan.rows, m), n), (plan.block, plan.across)
        panels = Panels(source._replace(op="N"), get, file.grid, *layout, plan.panels * plan.passes, reader, sums)
        U, s, V, mean, facts = (_in_one_pass if passes == 1 else _in_passes)(file, panels)
    agree(comm, file.notify.error)
    if exponent := file.range.exponent:
        s, mean = times(s, exponent), None if mean is None else times(mean, exponent)
        facts |= {name: float(times(np.float64(x), exponent)) for name, x in facts.items() if name != "factor"}
    measured: dict[str, Any] = {
        "bytes_read": comm.allreduce(panels.nbytes),
        "read_wait": comm.allreduce(panels.wait, MPI.MAX),
        "peak": comm.allreduce(largest_so_far(), MPI.MAX),
    }
    report = work.later_report(StoredReport, grid, passes, facts, plan=plan.as_dict(memory), **measured)
    if source.transposed:
        U, V, mean = V, U, None if mean is None else mean.T
        U, Vh = (U, V.H) if source.op == "C" else (U.H.T, V.T)
        mean = mean.T.H if mean is not None and source.op == "C" else mean
    else:
        Vh = V.H
    U.report = Vh.report = report
    return U, s, Vh, mean


class _File:
    """A dataset that is read in passes, its sketches, and the mean that is subtracted.  Methods are collective.

    norm : |A|_F of the panels of this pass, without the mean.   kept : what the first pass has computed so far.
    range : everything is computed of 2^-range.exponent A, whose elements neither overflow nor underflow.
    mean : the mean of the rows, (1, n), or of the columns, (m, 1), of a dataset that is read as its transpose.
    """

    def __init__(
        self,
        work: Work,
        base: ProcessGrid,
        source: Source,
        plan: SketchPlan,
        seed: int,
        centered: bool,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self.work, self.base, self.source, self.plan = work, base, source, plan
        self.dtype, self.seed, self._centered = source.dtype, seed % 2**64, centered
        self.norm, self.mean, self._read, self.kept = 0.0, None, 0, list[DistMatrix]()
        self.range = RangeOfPanels(source.dtype)
        self.notify = GuardedCallback(None if base.draft else progress)
        if centered:
            self.mean = self.like_rows(1) if source.transposed else self.like_columns(1)

    @property
    def grid(self) -> ProcessGrid:
        """The grid of panels, marked as recently used: the least recently used grid is freed."""
        return self.base.work_grid(self.plan.grid, 1, tuple(range(self.base.size)))

    def zeros(self, shape: tuple[int, int], block: tuple[int, int]) -> DistMatrix:
        return DistMatrix.zeros(shape, grid=self.grid, block=block, dtype=self.dtype)

    def like_rows(self, cols: int) -> DistMatrix:
        """Return zeros (m, cols), whose rows lie where the rows of panels lie."""
        return self.zeros((self.plan.shape[0], cols), (self.plan.block, -(-cols // self.plan.grid[1])))

    def like_columns(self, rows: int) -> DistMatrix:
        """Return zeros (rows, n), whose columns lie where the columns of panels lie."""
        return self.zeros((rows, self.plan.shape[1]), (max(1, -(-rows // self.plan.grid[0])), self.plan.across))

    def result(self, X: DistMatrix) -> DistMatrix:
        """Return a copy of X on the user's grid, one block for each rank."""
        copy = DistMatrix.empty(X.shape, grid=self.base, dtype=self.dtype)
        self.work.copy(X, copy)
        return copy

    def passed(self, panels: Panels) -> Iterator[tuple[slice, DistMatrix]]:
        """Read the dataset once, and yield panels, from which the mean is subtracted, and their rows.

        Raises LinAlgError on all ranks where an element is NaN or infinite.
        """
        plan, comm, self.norm = self.plan, self.base.comm, 0.0
        for step in loaded_steps(comm, plan.steps(), panels):
            rows, X = slice(*step.rows), panels.panel(step.rows[1] - step.rows[0], plan.shape[1])
            _ = self.grid
            norm = self._norm_in_range(X)
            if self.mean is not None:
                self._subtract_mean(rows, X, self.mean)
                norm = X.norm()
            if not np.isfinite(norm):
                raise LinAlgError(
                    f"svd of {self.source.what}: rows {rows.start} to {rows.stop - 1} of the dataset have elements "
                    "that are NaN or infinite"
                )
            self.norm = hypot(self.norm, norm)
            yield rows, X
            self._read += 1
            self.notify(self._read, plan.panels * plan.passes)

    def _norm_in_range(self, X: DistMatrix) -> float:
        """Bring a panel in range, and return its norm; in the first pass the range is that of the panels so far."""
        if self._read >= self.plan.panels:
            X = times(X, -self.range.exponent) if self.range.exponent else X
            return X.norm() if self.mean is None else 0.0
        norm, change = self.range.bring(X, self.kept)
        self.norm = float(times(np.float64(self.norm), -change))
        return norm

    def _subtract_mean(self, rows: slice, X: DistMatrix, mean: DistMatrix) -> None:
        """Subtract the mean of each row of the dataset, or the mean of rows, at first that of the rows of one panel."""
        product, (r, n) = self.work.product, X.shape
        if self.source.transposed:
            product(1 / n, X, self._ones((n, 1)), 0, mean[rows])
            product(-1, mean[rows], self._ones((1, n)), 1, X)
            return
        if not self._read:
            product(1 / r, self._ones((1, r)), X, 0, mean)
        product(-1, self._ones((r, 1)), mean, 1, X)

    def _ones(self, shape: tuple[int, int]) -> DistMatrix:
        return DistMatrix.ones(shape, grid=self.grid, dtype=self.dtype)

    def _random_rows(self, rows: slice) -> DistMatrix:
        """Return rows of Psi, of the sketch that estimates the error and, where sums are sketched, of ones."""
        normal, last = element_function("normal", self.seed, self.dtype), self.plan.sketched - 1

        def elements(i: np.ndarray, j: np.ndarray) -> Any:
            values = normal(i + rows.start, j)
            return np.where(j == last, values.dtype.type(1), values) if self.plan.centered else values

        shape = rows.stop - rows.start, self.plan.sketched
        block = self.plan.block, -(-shape[1] // self.plan.grid[1])
        return DistMatrix.from_function(elements, shape, grid=self.grid, block=block, dtype=self.dtype)

    def random_columns(self) -> DistMatrix:
        """Return Omega."""
        (_, n), cols, (pr, pc) = self.plan.shape, self.plan.right, self.plan.grid
        block, seed = (-(-n // pr), -(-cols // pc)), (self.seed + 1) % 2**64
        return DistMatrix.random((n, cols), grid=self.grid, block=block, seed=seed, kind="normal", dtype=self.dtype)

    def sketched(self, panels: Panels, Omega: Any = None) -> tuple[DistMatrix, Any]:
        """Read the dataset once; return all sketches from the left, without a row of sums, and A Omega, if any."""
        plan, product = self.plan, self.work.product
        W = self.like_columns(plan.sketched)
        sums = self.zeros((plan.sketched, 1), (W.block[0], 1)) if plan.centered else None
        Y = None if Omega is None else self.like_rows(plan.right)
        self.kept = [x for x in (W, Y, self.mean) if x is not None]
        for rows, X in self.passed(panels):
            if plan.sketched:
                T = self._random_rows(rows)
                product(1, T.H, X, 1, W)
                if sums is not None:
                    product(1, T.H, self._ones((len(T), 1)), 1, sums)
            if Y is not None:
                product(1, X, Omega, 0, Y[rows])
        if sums is None or self.mean is None:
            return W, Y
        m, last = plan.shape[0], plan.sketched - 1  # the mean of all rows is that of the first panel and a difference
        difference = W[last:] * (1 / m)
        self.work.add(self.mean, 1, difference)
        product(-1, sums[:last], difference, 1, W[:last])
        if Y is not None:
            product(-1, self._ones((m, 1)), product(1, difference, Omega), 1, Y)
        if self.norm:
            self.norm *= sqrt(max(0.0, 1 - m * (difference.norm() / self.norm) ** 2))
        return W[:last], Y

    def times(self, panels: Panels, P: DistMatrix) -> DistMatrix:
        """Read the dataset once, and return A P."""
        Y = self.like_rows(P.shape[1])
        for rows, X in self.passed(panels):
            self.work.product(1, X, P, 0, Y[rows])
        return Y

    def turned(self, panels: Panels, Y: DistMatrix) -> DistMatrix:
        """Read the dataset once, and return an orthonormal basis of A^H Q, where Q is one of the columns of Y."""
        Q, B = self.work.did(qr(Y)[0]), self.like_columns(Y.shape[1])
        for rows, X in self.passed(panels):
            self.work.product(1, Q[rows].H, X, 1, B)
        return self.work.did(qr(B.H)[0])

    def sketch_of(self, Q: DistMatrix) -> DistMatrix:
        """Return what `sketched` returns of A, without a row of sums, of a matrix with rows as those of `like_rows`."""
        plan = self.plan
        F = self.zeros((plan.sketched, Q.shape[1]), (-(-plan.sketched // plan.grid[0]), -(-Q.shape[1] // plan.grid[1])))
        for step in plan.steps():
            rows = slice(*step.rows)
            self.work.product(1, self._random_rows(rows).H, Q[rows], 1, F)
        return F[: plan.sketched - plan.centered]

    def facts(self, error: float, certain: float, **more: float) -> dict[str, float]:
        """Return the facts of a report.   certain : how many times `error` the error is, at most, but for rounding."""
        rounding = _ROUNDING * sqrt(self.plan.shape[1] + self.plan.width) * dtypes.eps(self.dtype) * self.norm
        bound = certain * error + rounding
        return {"norm": self.norm, "error": error, "bound": bound, **more, "factor": self.plan.factor}


def _in_passes(file: _File, panels: Panels) -> Triplets:
    """Project A on a space of rows; the error is that of the projection, which is measured, and of the rank."""
    work, plan, k, missed = file.work, file.plan, file.plan.k, 0.0
    if plan.passes % 2:
        P = file.turned(panels, file.sketched(panels, file.random_columns())[1])
    else:
        P = work.did(qr(file.sketched(panels)[0].H)[0])
    for _ in range(plan.passes // 2 - 1):
        P = file.turned(panels, file.times(panels, P))
    Y = file.like_rows(plan.width)
    for rows, X in file.passed(panels):
        work.product(1, X, P, 0, Y[rows])
        work.product(-1, Y[rows], P.H, 1, X)  # A - A P P^H, in place of the panel
        missed = hypot(missed, X.norm())
    U, s, Gh = svd(Y)
    V = file.result(work.product(1, P, work.did(Gh)[:k].H))
    least = hypot(*s[k:].tolist())
    facts = file.facts(hypot(missed, least), 1.0, least=least)
    return Triplets(file.result(U[:, :k]), s[:k], V, file.mean, facts)


def _in_one_pass(file: _File, panels: Panels) -> Triplets:
    """Find a basis in the sketch of the longer side, and the other factor by least squares; estimate the error."""
    work, plan, k = file.work, file.plan, file.plan.k
    Omega = file.random_columns()
    W, Y = file.sketched(panels, Omega)
    Psi_A, estimating = W[: plan.left], slice(plan.left, plan.left + ESTIMATING)
    if plan.shape[0] >= plan.shape[1]:  # A = Q X
        Q = work.did(qr(Y)[0])
        F = file.sketch_of(Q)
        X = work.product(1, _inverse(F[: plan.left]), Psi_A)
        V, s, Gh = svd(X.H)
        U = work.product(1, Q, work.did(Gh)[:k].H)
        of_U = work.product(1, F[estimating], Gh[:k].H)
    else:  # A = Z P^H
        P = work.did(qr(Psi_A.H)[0])
        inverse = _inverse(work.product(1, Omega.H, P))
        Z = work.product(1, Y, inverse.H, C=file.like_rows(plan.width))
        U, s, Gh = svd(Z)
        V = work.product(1, P, work.did(Gh)[:k].H)
        of_U = file.sketch_of(U[:, :k])[estimating]
    U, V = file.result(U[:, :k]), file.result(V[:, :k])
    E = file.result(W[estimating])
    work.product(-1, of_U * s[:k], V.H, 1, E)
    error = E.norm() / sqrt((2 - plan.alpha) * ESTIMATING)
    facts = file.facts(error, certain_factor(ESTIMATING, plan.alpha))
    return Triplets(U, s[:k], V, file.mean, facts)


def _inverse(S: DistMatrix) -> DistMatrix:
    """Return the pseudoinverse of a small matrix, whose columns are independent, on its grid.  Collective."""
    return distributed(S, on_one_rank(S, np.linalg.pinv, S.allgather()))
