"""The largest singular values of a matrix in a file and their vectors, from passes over panels of it.

A matrix X with at least as many rows as columns, p x q, is reduced in the first pass: each rank factors its rows, panel
by panel, to a triangle of order q (sequential TSQR: Demmel, Grigori, Hoemmen & Langou, SIAM J. Sci. Comput. 34(1),
2012).  The triangles of all ranks, one below the other, are a matrix in memory with the singular values and the right
singular vectors V of X, and the second pass computes X V.  The mean mu of the rows costs no further pass: the same
transformations are applied to a column of ones, w, and the triangles minus w mu are those of X - 1 mu.

Where triangles do not fit, the search of `pdgemm.linalg.svd` runs as for a matrix in memory, and each of its products
with X or X^H is a pass over the panels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import frexp, hypot, ldexp, sqrt
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError, LinAlgError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io.source import Source
from pdgemm.io.streamed.file_panels import Panels, loaded_steps, opened_panels
from pdgemm.io.streamed.files_product import operand_of, over_ranks
from pdgemm.io.streamed.svd_plan import SvdPlan, fitting_plan
from pdgemm.io.streamed.tiling import PanelShape
from pdgemm.linalg.factors.tall_qr import svd_of_tall
from pdgemm.linalg.ranges import RangeOfPanels, times
from pdgemm.linalg.singular.svd import SvdSearch, Triplets, checked_search, leading_triplets, triplets_by_steps
from pdgemm.linalg.work import Work, text_of_function
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_optional
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of
from pdgemm.support.agreement import GuardedCallback, agree, together
from pdgemm.support.text import in_bytes, in_seconds, typed

LIMIT = 1 << 28  # bytes per rank for panels, bases and buffers, where the caller sets no limit
_ROUNDING = 8  # rounding errors of singular values from triangles of few rows, in eps |X|_F


def _text(report: Any) -> str:
    as_planned = "as" if report.bytes_read == report.plan["bytes_read"] else "NOT as"
    return (
        f"{text_of_function(report)}\n"
        f"read {in_bytes(report.bytes_read)}, {as_planned} planned; waited {in_seconds(report.read_wait)} for reading; "
        f"largest rank {in_bytes(report.peak)}"
    )


def stored_svd(
    grid: ProcessGrid,
    source: Source,
    k: Any,
    passes: Any = None,
    memory: Any = None,
    oversample: Any = None,
    tolerance: Any = None,
    steps: Any = None,
    seed: Any = 0,
    progress: Callable[[int, int], object] | None = None,
    centered: bool = False,
    planned: Callable[[SvdPlan, int], object] = lambda plan, memory: None,
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
            raise ArgumentError("svd of a matrix in a file computes the k largest singular values: pass k, or load it")
        search = checked_search(source.shape, k, oversample, tolerance, steps, seed)
        memory, most = as_optional(memory, "memory", 1) or LIMIT, as_optional(passes, "passes", 1)
        X, plan = _fitting(grid.size, source, search, bool(centered), oversample, memory)
        if most is not None and most < plan.passes(1):
            raise ArgumentError(
                f"{typed('--passes', 'passes =')} {most} is too few for {source.what}: at least {plan.passes(1)} are "
                f"needed with {in_bytes(memory)} per rank"
            )
        search = search._replace(width=plan.width)
        if most is not None and not plan.triangles:
            search = search._replace(steps=min(search.steps, (most - plan.passes(0)) // 2))
        arguments += ["svd of a file", source.what, source.op, plan, memory, search, bool(centered)]
    planned(plan, memory)
    work = Work("svd", memory_limit=memory - plan.most_bytes)
    file = _StoredOperand(work, base, X, plan, centered and not plan.centered, progress)
    shape = PanelShape((min(plan.rows, X.shape[0]), X.shape[1]), (plan.block, plan.across), 2 * plan.panels)
    with opened_panels(grid, (X, shape), panel_grid=file.panel_grid) as (panels,):
        assert panels
        file.panels = panels
        triplets = (_by_triangles if plan.triangles else _by_steps)(file, search)
    agree(comm, file.notify.error)
    if grid.draft:
        grid.draft.add(source.what, plan.file_reads(file.passes))
    U, V, mean = file.result(triplets.U), file.result(triplets.V), None
    if file.mean is not None:
        mean = times(file.result(file.mean), file.range.exponent)
        mean = mean if plan.centered else mean.T
        mean = mean.T.H if source.op == "C" else mean
    facts = triplets.facts(search, grid, f"{source.what}, {source.shape[0]} x {source.shape[1]}")
    measured = over_ranks(comm, {"bytes_read": file.panels.nbytes}, {"read_wait": file.panels.wait})
    measured["plan"] = plan.as_dict(memory, file.passes)
    U, Vh = _turned(X.op, source.op, U, V)
    U.report = Vh.report = work.later_report(grid, triplets.steps, facts, text=_text, **measured)
    return U, times(triplets.s, file.range.exponent), Vh, mean


def _fitting(
    ranks: int, source: Source, search: SvdSearch, centered: bool, oversample: int | None, memory: int
) -> tuple[Source, SvdPlan]:
    """Return the matrix to read, the dataset or its transpose, and the plan that fits.  Raises MemoryLimitError."""
    rows = source._replace(op="N")
    tall = rows if rows.shape[0] >= rows.shape[1] else rows.turned("T")
    triangles, steps = (
        SvdPlan(
            X.shape,
            (ranks, 1) if X.shape[0] >= X.shape[1] else (1, ranks),
            operand_of(X),
            search.k,
            search.width,
            triangles=way == "triangles",
            wide=np.result_type(X.dtype, np.float64).itemsize,
            centered=centered and X.transposed == source.transposed,
        )
        for X, way in ((tall, "triangles"), (rows, "steps"))
    )
    plan = fitting_plan(triangles, steps, oversample, memory)
    return tall if plan.triangles else rows, plan


def _turned(read: str, op: str, U: DistMatrix, V: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Return U and V^H of op(D) from U and V of the matrix that was read: D if `read` is "N", D^T if it is "T".

    D^T = conj(V) diag(s) U^T and D^H = V diag(s) U^H, for D = U diag(s) V^H.
    """
    conjugate = False
    for letter in (read, op):
        if letter != "N":
            U, V, conjugate = V, U, conjugate ^ (letter == "T")
    return (U.H.T, V.T) if conjugate else (U, V.H)


class _StoredOperand:
    """2^-exponent (X - its mean) for a matrix X in a file.  A product is a pass over the panels of X.

    All methods are collective.

    norm : |X|_F, known after the first pass.   range : the exponent, at which elements and squares neither overflow nor
    underflow.   mean : the mean of the rows, (1, q), or of each row, (p, 1); None: nothing is subtracted.
    passes : the number of passes begun.   sure : the number of passes that are certain, for progress.
    """

    panels: Panels

    def __init__(
        self,
        work: Work,
        base: ProcessGrid,
        source: Source,
        plan: SvdPlan,
        of_each_row: bool,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self.work, self.grid, self.plan, self._source = work, base, plan, source
        self.shape, self.dtype, self.device, self.A = source.shape, source.dtype, devices.HOST, self
        self.norm, self.passes, self.sure, self._read = 0.0, 0, plan.passes(1), 0
        self.range, self.notify = RangeOfPanels(source.dtype), GuardedCallback(None if base.draft else progress)
        self.mean = self.zeros((1, self.shape[1]), (1, plan.across)) if plan.centered else None
        if of_each_row:
            self.mean = self._like_rows(1)

    @property
    def panel_grid(self) -> ProcessGrid:
        """The grid of panels.  Each access marks the grid as used, because the least recently used grid is freed."""
        return self.grid.work_grid(self.plan.grid, 1, tuple(range(self.grid.size)))

    @property
    def H(self) -> _Adjoint:
        return _Adjoint(self)

    def times(self, work: Work, Y: DistMatrix, beta: complex = 0, C: DistMatrix | None = None) -> DistMatrix:
        """Compute and return C := X Y + beta C.   C : None: C is allocated, with its rows distributed like panels."""
        Z = self._like_rows(Y.shape[1])
        for rows, X in self._in_range():
            work.product(1, X, Y, 0, Z[rows])
        return Z if C is None else work.add(C, 1, Z, beta)

    def adjoint_times(self, work: Work, Y: DistMatrix) -> DistMatrix:
        """Return X^H Y, with rows distributed as the columns of panels."""
        width = Y.shape[1]
        there, block = self._like_rows(width), (-(-width // self.plan.grid[0]), self.plan.across)
        Z = self.zeros((width, self.shape[1]), block)
        work.copy(Y, there)
        for rows, X in self._in_range():
            work.product(1, there[rows].H, X, 1, Z)
        return Z.H

    def first_pass(self, kept: list[DistMatrix]) -> Iterator[tuple[slice, DistMatrix]]:
        """Read X for the first time, and yield panels and their rows; measure the norm, the range and the mean.

        kept : matrices that the caller computes from the panels; they are scaled with the panels.
        Where the mean of the rows is wanted, the mean of the first panel is subtracted here; the caller computes its
        difference from the mean of all rows: see `add_to_mean`.
        Raises LinAlgError on all ranks where an element is NaN or infinite.
        """
        product, q, shift = self.work.product, self.shape[1], self.plan.centered
        scaled = [x for x in (*kept, self.mean) if x is not None]
        for rows, X in self._pass():
            norm, change = self.range.bring(X, scaled)
            if not np.isfinite(norm):
                lines = "columns" if self._source.transposed else "rows"
                raise LinAlgError(
                    f"svd of {self._source.what}: {lines} {rows.start} to {rows.stop - 1} of the dataset have elements "
                    "that are NaN or infinite"
                )
            if shift and not rows.start:
                product(1 / len(X), self.ones((1, len(X))), X, 0, self.mean)
            elif self.mean is not None and not shift:
                product(1 / q, X, self.ones((q, 1)), 0, self.mean[rows])
            self._subtract_mean(rows, X)
            norm = norm if self.mean is None else X.norm()
            self.norm = hypot(float(times(np.float64(self.norm), -change)), norm)
            yield rows, X

    def add_to_mean(self, difference: DistMatrix) -> None:
        """Add `difference`, the mean of the rows of X - 1 mean, to the mean, and correct the norm."""
        assert self.mean is not None
        self.work.add(self.mean, 1, difference.astype(self.dtype))
        share = difference.norm() / (self.norm or 1.0)
        self.norm *= sqrt(max(0.0, 1 - self.shape[0] * share**2))

    def bring_near_1(self) -> None:
        """Scale X so that squares of its norm are in range.   Local, except for the mean."""
        exponent = frexp(self.norm)[1]
        if abs(exponent) > np.finfo(self.dtype).maxexp // 4:
            self.range.exponent += exponent
            self.norm = ldexp(self.norm, -exponent)
            if self.mean is not None:
                times(self.mean, -exponent)

    def result(self, X: DistMatrix) -> DistMatrix:
        """Return a copy of X on the user's grid, one block for each rank."""
        copy = DistMatrix.empty(X.shape, grid=self.grid, dtype=self.dtype)
        self.work.copy(X, copy)
        return copy

    def _in_range(self) -> Iterator[tuple[slice, DistMatrix]]:
        """Read X; yield the rows of each panel, and the panel, scaled by `range` and with the mean subtracted."""
        for rows, X in self._pass():
            if self.range.exponent:
                times(X, -self.range.exponent)
            self._subtract_mean(rows, X)
            yield rows, X

    def _pass(self) -> Iterator[tuple[slice, DistMatrix]]:
        self.passes += 1
        self.sure = max(self.sure, self.passes)
        for step in loaded_steps(self.grid.comm, self.plan.steps(), self.panels):
            _ = self.panel_grid
            yield slice(*step.rows), self.panels.panel(step.rows[1] - step.rows[0], self.shape[1])
            self._read += 1
            self.notify(self._read, self.plan.panels * self.sure)

    def _subtract_mean(self, rows: slice, X: DistMatrix) -> None:
        if self.mean is not None and self.plan.centered:
            self.work.product(-1, self.ones((len(X), 1)), self.mean, 1, X)
        elif self.mean is not None:
            self.work.product(-1, self.mean[rows], self.ones((1, self.shape[1])), 1, X)

    def ones(self, shape: tuple[int, int]) -> DistMatrix:
        return DistMatrix.ones(shape, grid=self.panel_grid, dtype=self.dtype)

    def zeros(self, shape: tuple[int, int], block: tuple[int, int]) -> DistMatrix:
        return DistMatrix.zeros(shape, grid=self.panel_grid, block=block, dtype=self.dtype)

    def _like_rows(self, columns: int) -> DistMatrix:
        """Return zeros (p, columns), with rows distributed as those of panels."""
        return self.zeros((self.shape[0], columns), (self.plan.block, -(-columns // self.plan.grid[1])))


class _Adjoint(NamedTuple):
    """The conjugate transpose of a matrix in a file."""

    H: _StoredOperand

    def times(self, work: Work, Y: DistMatrix, beta: complex = 0, C: Any = None) -> DistMatrix:
        """Compute C := X^H Y + beta C."""
        return work.add(C, 1, self.H.adjoint_times(work, Y), beta)


def _by_steps(file: _StoredOperand, search: SvdSearch) -> Triplets:
    """Return singular triplets of X by the Golub-Kahan steps that `svd` uses for matrices in memory.  Collective."""
    total = file.zeros((1, file.shape[1]), (1, file.plan.across))
    for _, X in file.first_pass([total]):
        if file.plan.centered:
            file.work.product(1, file.ones((1, len(X))), X, 1, total)
    if file.plan.centered:
        total *= 1 / file.shape[0]
        file.add_to_mean(total)
    file.bring_near_1()
    return triplets_by_steps(file.work, file, search)


def _by_triangles(file: _StoredOperand, search: SvdSearch) -> Triplets:
    """Return the singular triplets of X: its triangles have the same s and V, and a second pass computes X V.

    Collective.

    The triangles are in double precision: in single precision, sums of p addends lose digits, which no bound includes.
    """
    work, eps, root = file.work, dtypes.eps(file.dtype), sqrt(file.shape[0])
    S = _triangles(file)
    triplets = leading_triplets(work, S, search)
    U, _, Gh = svd_of_tall(file.times(work, triplets.V.astype(file.dtype)))
    V = work.product(1, triplets.V.astype(file.dtype), work.did(Gh).H)
    ratio = file.norm / (float(triplets.s[0]) or 1.0)
    rounding = (_ROUNDING + root / 16) * dtypes.eps(S.dtype) * ratio + eps * (1 if file.mean is None else ratio)
    return triplets._replace(
        U=U, s=triplets.s.astype(np.finfo(file.dtype).dtype), V=V,
        bounds=triplets.bounds + rounding, rounding=triplets.rounding + rounding,
        residual=triplets.residual + rounding + root / 4 * eps,
    )  # fmt: skip


def _triangles(file: _StoredOperand) -> DistMatrix:
    """Read X once; return its triangles as one matrix, with the singular values and right singular vectors of X.

    Collective.
    """
    plan, comm, grid, q = file.plan, file.grid.comm, file.panel_grid, file.shape[1]
    wide, used = np.result_type(file.dtype, np.float64), 0
    with together(comm):
        all_rows, block = (plan.kept * grid.size, plan.columns), (plan.kept, plan.columns)
        rows = DistMatrix.zeros(all_rows, grid=grid, block=block, dtype=wide)
    X, w = rows[:, :q], rows[:, q:]
    for _, panel in file.first_pass([X]):
        with together(comm):
            used = 0 if grid.draft else _with_rows(rows.local, used, panel.local)
    if plan.centered:
        difference = file.work.product(1 / file.shape[0], w.H, X)
        file.work.product(-1, w, difference, 1, X)
        file.add_to_mean(difference)
    with together(comm):
        S = DistMatrix.zeros((plan.stacked * grid.size, q), grid=grid, block=(plan.stacked, q), dtype=wide)
        if not grid.draft:
            used = used if used <= plan.stacked else _to_triangle(rows.local, used)
            S.local[:used] = rows.local[:used, :q]
    return S


def _with_rows(rows: np.ndarray, used: int, more: np.ndarray) -> int:
    """Append `more` to the `used` rows, and return the new number of rows.  Local.

    If space is short, the rows in use are first reduced to a triangle.
    """
    if used + len(more) > len(rows):
        used = _to_triangle(rows, used)
    end = used + len(more)
    rows[used:end, : more.shape[1]], rows[used:end, more.shape[1] :] = more, 1
    return end


def _to_triangle(rows: np.ndarray, used: int) -> int:
    """Overwrite the rows in use with R of their QR factorisation, and zeros; return the number of rows of R.  Local."""
    R = np.linalg.qr(rows[:used], mode="r")
    rows[: len(R)], rows[len(R) : used] = R, 0
    return len(R)
