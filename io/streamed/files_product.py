"""C := alpha op(A) op(B) + beta C from files to a file, with a tile of C and panels of A and B in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.product_options import ProductOptions
from pdgemm.algorithms.protection import checksum
from pdgemm.errors import LayoutError
from pdgemm.gemm import pdgemm, plan
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.report import CheckReport, all_checks
from pdgemm.instrument.run_report import RunReport
from pdgemm.io import pieces
from pdgemm.io.pieces import Progress, Transfer
from pdgemm.io.source import ReadSums, Source, ndim_of_product, source
from pdgemm.io.streamed.checkpoints import Checkpoints, When, WrongResult, checkpoints
from pdgemm.io.streamed.file_panels import Panels, TileWriter, loaded_steps, opened_panels, transfer_and_sum, worker
from pdgemm.io.streamed.tiling import Operand, TileStep, Tiling
from pdgemm.io.streamed.tiling_choice import fits_in, fitting, most_memory
from pdgemm.io.streamed.unfinished import Left
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.arguments import as_seed
from pdgemm.matrix.argument_checks import as_scalar
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.residual import Claim, Images, Residual, added_images, random_vectors, residual as residual_of
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.support import signals
from pdgemm.support.agreement import GuardedCallback, agree, together
from pdgemm.support.memory_left import largest_so_far
from pdgemm.support.text import counted, in_bytes, in_rate, in_seconds


class FilesResult(NamedTuple):
    """The outcome of `multiply_files`; a part that was not done is None.

    product  : the report of the product.   verified : the comparison with random vectors.
    wrote    : the report of writing C; None if the comparison shows that C is wrong, and C was not stored.
    """

    product: Any = None
    verified: Residual | None = None
    wrote: RunReport | None = None


class FilesProduct:
    """C := alpha op(A) op(B) + beta C of matrices in files.  All methods are collective over the grid.

    a, b, entry : op(A), op(B) and C on entry; None where beta is 0.
    memory   : bytes per rank for a tile, two panels of A, two panels of B, and buffers.
               None: as many bytes as the product needs with whole matrices A, B and C.
    most_flops : limit of the operations of a rank in a step, unless panels would become thin.
    accumulate_dtype, options : as in `pdgemm`, which multiplies panels; memory_limit bounds its buffers.

    shape  : shape of C.   stored : type of C in its file.   tiling : the order of reads and writes.
    ndim, inputs, problem : see `SavedProduct`.
    Raises MemoryLimitError, which says how many bytes are needed, LayoutError or DTypeError on all ranks.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        alpha: complex,
        a: Source,
        b: Source,
        beta: complex,
        entry: Source | None,
        memory: int | None,
        *,
        most_flops: float = inf,
        accumulate_dtype: Any = None,
        **options: Any,
    ) -> None:
        self.grid, self.a, self.b, self.entry, self._memory = grid, a, b, entry, memory
        self._options = ProductOptions(accumulate_dtype=accumulate_dtype, **options)
        self._protect = self._options.protect or ""
        with together(grid.comm) as description:
            self.shape = a.shape[0], b.shape[1]
            if a.shape[1] != b.shape[0] or (entry is not None and entry.shape != self.shape):
                entry_shape = None if entry is None else entry.shape
                raise LayoutError(f"shapes do not fit: op(A) is {a.shape}, op(B) is {b.shape}, C is {entry_shape}")
            self.stored = dtypes.product(a.dtype, b.dtype)
            self.held = np.dtype(accumulate_dtype or dtypes.arithmetic(self.stored))
            self.alpha = as_scalar(alpha, self.stored, "alpha")
            self.beta = as_scalar(0 if entry is None else beta, self.stored, "beta")
            mnk = *self.shape, a.shape[1] if self.alpha else 0  # where alpha is 0, A and B are not read
            of_c = self.held.itemsize, self.stored.itemsize, 0 if entry is None else entry.stored.dtype.itemsize
            whole = Tiling(mnk, grid.shape, operand_of(a), operand_of(b), *of_c, protect=self._protect)
            self.tiling: Tiling = fitting(whole, memory, most_flops)
            description += ["a product in tiles", self.tiling, self.alpha, self.beta, accumulate_dtype]
        self.ndim, self.inputs = ndim_of_product(b, entry), [x for x in (a, b, entry) if x is not None]
        ops = {f"op({x.what})": f"{x.op}, {x.shape[0]} x {x.shape[1]} {x.dtype}" for x in self.inputs}
        others = {"sums": str(self.held), "compute_type": str(self._options.compute_type)}
        self.problem = {"alpha": str(self.alpha), "beta": str(self.beta), **ops, **others}

    def run(
        self,
        output: tuple[str, str],
        *,
        seed: int | None = None,
        progress: Progress | None = None,
        when: When | None = None,
        begun: Callable[[Left | None], object] = lambda left: None,
    ) -> FilesResult:
        """Compute C, compare it with A, B and random vectors if seed is not None, and write C.

        output   : file and dataset, which C replaces when C is complete, unless the comparison shows that C is wrong.
        seed     : seed of the vectors (`pdgemm.verify`).   progress : called as progress(done, total) after each step.
        when     : the times of checkpoints; None: no checkpoints are saved.
        begun    : called before the first step, with the state that an earlier job has left, or None.

        Returns the reports of the product, of the comparison, and of the output; the last is None if C is wrong.
        Raises FileError and the errors of `pdgemm` on all ranks.
        """
        start, tiling = perf_counter(), self.tiling
        with together(self.grid.comm) as description:
            seed = None if seed is None else as_seed(seed)
            description += ["a product in tiles", *output, seed]
        layout = Distribution.over(self.grid.shape, tiling.mnk[:2], tiling.blocks[:2])
        residual, wrote = None, None
        with suppress(WrongResult), checkpoints(self, output, layout, when) as kept:
            dataset = kept.dataset
            begun(kept.left)
            out = self._written(kept, GuardedCallback(progress))
            dataset.complete(checksum.text(self.grid.comm, out.total), check=True)
            seconds = perf_counter() - start
            if seed is not None:
                residual = self.residual(source(self.grid, "C", dataset.place), seed)
                if residual.wrong:
                    raise WrongResult
            wrote = dataset.report(self.grid.comm.allreduce(out.seconds, MPI.MAX))
        return FilesResult(self._report(out, seconds, kept), residual, wrote)

    # ------------------------------------------------------------------ an earlier job
    def go_on(self, left: Left) -> bool:
        """If the tiling of an earlier job fits the memory, use it and skip the steps done; return whether it fits."""
        a, b = (operand_of(x)._replace(unit=unit) for x, unit in zip((self.a, self.b), left.units))
        tiling = replace(self.tiling, a=a, b=b, counts=left.counts, done=left.done)
        if there := fits_in(tiling, self._memory):
            self.tiling = tiling
        return there

    @property
    def memory(self) -> int:
        """The memory of a rank, in bytes."""
        return most_memory(self.tiling.all_bytes) if self._memory is None else self._memory

    @property
    def plan(self) -> dict[str, Any]:
        return self.tiling.as_dict(self.memory)

    def explain(self) -> str:
        return self.tiling.explain(self.memory)

    def residual(self, c: Source, seed: int) -> Residual:
        """Return the comparison of C in a file with A, B and random vectors.  Collective."""
        sums = {name: self._options.arguments[name] for name in ("accumulate_dtype", "compute_type")}
        X = random_vectors(c.shape[1], seed)
        of = partial(applied, self.grid)
        # inspect the files again: their times may differ now; the sums of the reads showed that elements did not change
        a, b, *entry = (x.again(self.grid) for x in self.inputs)
        return residual_of(of, Claim(c, self.alpha, a, b, self.beta, entry[0] if entry else None, **sums), X)

    def _written(self, kept: Checkpoints, notify: GuardedCallback) -> TileWriter:
        """Compute and write all tiles; return the writer with its counts.  Tile and panels are freed at the end."""
        tiling, grid, comm = self.tiling, self.grid, self.grid.comm
        (rows, cols, inner), adds = tiling.largest, tiling.counts[2] > 1 or self.entry is not None
        left, limit = self.memory - tiling.most_bytes, self._options.memory_limit
        options = replace(self._options, memory_limit=left if limit is None else min(left, limit)).arguments
        with ExitStack() as stack:
            sums = ReadSums(self.entry.place, self.held) if self.entry else None
            entry = (stack.enter_context(self.entry.opened_alone(grid, sums)), sums) if self.entry and sums else None
            stack.enter_context(signals.patience(kept.patience))
            write = stack.enter_context(kept.dataset.opened_alone(write=True))
            writer = stack.enter_context(worker())
            a, b = stack.enter_context(opened_panels(grid, *zip((self.a, self.b), tiling.panels)))
            assert a and b
            tile = DistMatrix.empty((rows, cols), grid=grid, block=tiling.blocks[:2], dtype=self.held)
            plan(a.panel(rows, inner), b.panel(inner, cols), tile, beta=int(adds), **options)  # errors of products
            out = TileWriter(write, self.stored, writer)
            if (current := tiling.current) is not None:
                (r0, r1), (c0, c1) = current.rows, current.cols
                out.bytes_read += kept.load_sums(tile[: r1 - r0, : c1 - c0])
            for number, step in enumerate(loaded_steps(comm, tiling.steps(), a, b), 1):
                self._multiply(step, a, b, tile, entry, out, options)
                notify(number, tiling.count)
                if kept.due(number == tiling.count):
                    with together(comm):
                        out.end_all()
                    (r0, r1), (c0, c1) = step.rows, step.cols
                    sums_of_tile = tile[:0, :0] if step.last else tile[: r1 - r0, : c1 - c0]
                    kept.save(tiling.done + number, sums_of_tile, out.total)
            with together(comm):
                out.end_all()
        agree(comm, notify.error)
        out.bytes_read, out.read_wait = out.bytes_read + a.nbytes + b.nbytes, a.wait + b.wait
        out.total[:] = (int(out.total[0]) + kept.total) % 2**64
        return out

    def _multiply(
        self,
        step: TileStep,
        a: Panels,
        b: Panels,
        tile: DistMatrix,
        entry: tuple[Transfer, ReadSums] | None,
        out: TileWriter,
        options: dict[str, Any],
    ) -> None:
        """Multiply the panels of one step.

        In the first and the last step of a tile, C is multiplied slab by slab (blocks of rows): the first step reads
        each slab of C on entry, and the last step writes each slab while the next one is multiplied.

        entry : the transfer of C on entry, and its ReadSums.
        """
        (r0, r1), (c0, c1), (k0, k1) = step.rows, step.cols, step.inner
        A, B, C = a.panel(r1 - r0, k1 - k0), b.panel(k1 - k0, c1 - c0), tile[: r1 - r0, : c1 - c0]
        height = tile.block[0] * self.grid.shape[0]
        slabs = [slice(first, min(r1 - r0, first + height)) for first in range(0, max(1, r1 - r0), height)]
        if not (step.first or step.last):
            out.checks += checks_of(pdgemm(self.alpha, A, B, 1, C, **options), self._protect)
            return
        for slab, rows in enumerate(slabs):
            if step.first:
                with together(self.grid.comm):
                    out.end(slab)
                    if entry is not None and self.entry is not None:
                        (get, read), start = entry, (r0 + rows.start, c0)
                        nbytes, total = transfer_and_sum(get, C[rows, :], start, self.entry.stored.dtype.itemsize)
                        out.bytes_read += nbytes
                        read.add(((start[0], r0 + rows.stop), (c0, c1)), total)
            result = pdgemm(self.alpha, A[rows, :], B, self.beta if step.first else 1, C[rows, :], **options)
            out.checks += checks_of(result, self._protect)
            if step.last:
                out.begin(slab, C[rows, :], (r0 + rows.start, c0))

    def _report(self, out: TileWriter, seconds: float, kept: Checkpoints) -> RunReport:
        """Return the report of the product: sums of bytes and maxima of times over all ranks.  Collective."""
        (m, n), k = self.shape, self.a.shape[1]
        return report_of_tiles(
            self.grid.comm,
            f"C ({m} x {n}) := {self.a.op_name} ({m} x {k}) {self.b.op_name}, {self.stored}",
            {"bytes_read": out.bytes_read, "bytes_written": out.nbytes},
            {"seconds": seconds, "read_wait": out.read_wait, "write_wait": out.wait},
            plan=self.plan,
            flops=gemm_flops(*self.tiling.mnk, self.stored.kind == "c"),
            saves=kept.saves,
            save_seconds=kept.seconds,
            checks=all_checks(out.checks),
        )


def report_of_tiles(comm: MPI.Intracomm, title: str, sums: Any, most: Any, **others: Any) -> RunReport:
    """Return the report of a product of matrices in files, with a tile of C and panels in memory.  Collective.

    sums, most : figures of this rank by name; the report has the sums, or the maxima, of all ranks.
    others : `plan`, `flops`, `saves`, `save_seconds`, and `checks`: the report of the checks of all products on this
        rank; None: the products are not checked.
    """
    return RunReport(_text, title=title, **over_ranks(comm, sums, most), **others)


def over_ranks(comm: MPI.Intracomm, sums: Mapping[str, Any], most: Mapping[str, Any]) -> dict[str, Any]:
    """Return sums and maxima of figures over all ranks, and `peak`, the most memory that any rank has used so far."""
    maxima = {**most, "peak": largest_so_far()}
    return {x: comm.allreduce(sums[x]) for x in sums} | {x: comm.allreduce(maxima[x], MPI.MAX) for x in maxima}


def _text(report: Any) -> str:
    saves = f", {counted(report.saves, 'checkpoint')} {in_seconds(report.save_seconds)}" if report.saves else ""
    return (
        f"{report.title}: {in_seconds(report.seconds)} ({in_rate(1e9 * report.gflops)}); waited "
        f"{in_seconds(report.read_wait)} for reading, {in_seconds(report.write_wait)} for writing{saves}\n"
        f"read {in_bytes(report.bytes_read)} and wrote {in_bytes(report.bytes_written)}, "
        f"{'as' if report.as_predicted else 'NOT as'} planned; largest rank {in_bytes(report.peak)}"
        + (f"\n{report.checks}" if report.checks else "")
    )


def checks_of(C: DistMatrix, protect: str | None) -> list[CheckReport]:
    """Return a list of one item, the report of the checksums of the product C; an empty list without `protect`."""
    report: Any = C.report if protect else None
    return [report.checks] if protect else []


def operand_of(x: Source) -> Operand:
    """Return the properties of a dataset that a tiling depends on."""
    chunked = x.stored.offset is None
    unit = x.unit if chunked else (1, 1)
    chunk = unit[0] * unit[1] * x.stored.dtype.itemsize if chunked else 0
    return Operand(x.stored.dtype.itemsize, x.dtype.itemsize, unit, x.transposed, chunk)


def applied(grid: ProcessGrid, source: Source, X: np.ndarray, size: np.ndarray) -> Images:
    """Return three results for `residual_of`: op(M) X, |op(M)| size, and the largest element of each row of op(M).

    The results are whole on every rank, in double precision.  Collective over the grid.
    """
    comm, wide = grid.comm, np.result_type(source.dtype, X.dtype, np.float64)
    product = np.zeros((source.shape[0], X.shape[1]), wide)
    bound, most = np.zeros(product.shape), np.zeros(len(product))
    with source.opened_alone(grid) as transfer:
        for piece in pieces.cut(source.stored.shape, source.stored.unit, comm.size):
            row, col, (rows, cols) = piece.share(comm.rank)
            with together(comm):
                part = np.empty((rows, cols), source.dtype)
                transfer(row, col, part)
                part = part.astype(wide, copy=False)
                left, right = slice(row, row + rows), slice(col, col + cols)
                if source.transposed:
                    part, left, right = (part.conj() if source.op == "C" else part).T, right, left
                product[left] += part @ X[right]
                bound[left] += np.abs(part) @ size[right]
                np.maximum(most[left], np.abs(part).max(axis=1, initial=0), out=most[left])
    return added_images(comm, product, bound, most)
