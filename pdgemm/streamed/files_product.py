"""C := alpha op(A) op(B) + beta C from files to a file, with a tile of C and panels of A and B in memory."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.arrays import dtypes
from pdgemm.arrays.integers import as_seed
from pdgemm.errors import LayoutError
from pdgemm.gemm import pdgemm, plan
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.report import IOReport
from pdgemm.instrument.stream_report import StreamReport
from pdgemm.io import checksum
from pdgemm.io.matrix_files import Progress, Transfer
from pdgemm.io.new_dataset import NewDataset, new_dataset
from pdgemm.io.source import Source, source
from pdgemm.matrix.argument_checks import as_scalar
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.residual import Residual, random_vectors
from pdgemm.matrix.residual import residual as residual_of
from pdgemm.model.formulas import gemm_flops
from pdgemm.streamed.file_panels import Panels, TileWriter, loaded, moved, worker
from pdgemm.streamed.files_residual import applied
from pdgemm.streamed.tiling import Operand, Step, Tiling, fitting
from pdgemm.support.agreement import GuardedCallback, agree, together
from pdgemm.support.memory_left import largest_so_far


class _Counted(NamedTuple):
    """What this rank did for a product: bytes of files, seconds, and the checksum of what it wrote, as a sum."""

    read: int
    written: int
    read_wait: float
    write_wait: float
    write_seconds: float
    total: np.ndarray


class _Wrong(Exception):
    """The result is wrong: nothing is replaced by it."""


class FilesProduct:
    """C := alpha op(A) op(B) + beta C of matrices in files.  All is collective over the grid.

    a, b, entry : op(A), op(B) and C on entry; None where beta is 0.
    memory   : bytes per rank for all that is in memory at once: a tile, two panels of A and of B, and buffers.
    accumulate_dtype, options : those of `pdgemm`, which multiplies panels.

    tiling : what will be read and written, and in which order.   stored : the type of C in its file.
    Raises MemoryLimitError, which says how much is needed, LayoutError or DTypeError on all ranks.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        alpha: complex,
        a: Source,
        b: Source,
        beta: complex,
        entry: Source | None,
        memory: int,
        *,
        accumulate_dtype: Any = None,
        **options: Any,
    ) -> None:
        self.grid, self.a, self.b, self.entry, self.memory = grid, a, b, entry, memory
        with together(grid.comm) as description:
            (m, k), (inner, n) = a.shape, b.shape
            if k != inner or (entry is not None and entry.shape != (m, n)):
                given = None if entry is None else entry.shape
                raise LayoutError(f"shapes do not fit: op(A) is {a.shape}, op(B) is {b.shape}, C is {given}")
            self.stored = dtypes.product(a.dtype, b.dtype)
            self.held = np.dtype(accumulate_dtype or dtypes.arithmetic(self.stored))
            self.alpha = as_scalar(alpha, self.stored, "alpha")
            self.beta = as_scalar(0 if entry is None else beta, self.stored, "beta")
            used = k if self.alpha else 0  # where alpha is 0, A and B are not read
            of_c = self.held.itemsize, self.stored.itemsize, 0 if entry is None else entry.stored.dtype.itemsize
            self.tiling: Tiling = fitting((m, n, used), grid.shape, operand_of(a), operand_of(b), *of_c, memory)
            description += ["a product in tiles", self.tiling, self.alpha, self.beta, accumulate_dtype]
        limit = memory - self.tiling.most_bytes
        self._options = options | {"accumulate_dtype": accumulate_dtype, "memory_limit": limit}

    def run(
        self,
        output: tuple[str, str],
        *,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> tuple[StreamReport, Residual | None, IOReport | None]:
        """Compute C, compare it with A, B and random vectors if a seed is given, and write it.

        output   : file and dataset of C, which takes its place when it is complete, unless it is found to be wrong.
        seed     : that of the vectors (`pdgemm.verify`).   progress : called as progress(done, total) after each step.

        Returns the last report as None where C is wrong.  Raises FileError on all ranks, and what `pdgemm` raises.
        """
        start, tiling = perf_counter(), self.tiling
        with together(self.grid.comm) as description:
            seed = None if seed is None else as_seed(seed)
            description += ["a product in tiles", *output, seed]
        layout = Distribution.over(self.grid.shape, tiling.mnk[:2], tiling.blocks[:2])
        path, name = output
        residual, wrote = None, None
        with (
            suppress(_Wrong),
            new_dataset(Path(path), name, self.grid, layout, self.stored) as dataset,
        ):
            counted = self._written(dataset, GuardedCallback(progress))
            dataset.complete(checksum.text(self.grid.comm, counted.total), check=True)
            seconds = perf_counter() - start
            if seed is not None:
                residual = self._residual(source(self.grid, "C", dataset.place), seed)
                if not residual.passed:
                    raise _Wrong
            wrote = dataset.report(self.grid.comm.allreduce(counted.write_seconds, MPI.MAX))
        return self._report(counted, seconds), residual, wrote

    @property
    def plan(self) -> dict[str, Any]:
        return self.tiling.as_dict(self.memory)

    def explain(self) -> str:
        return self.tiling.explain(self.memory)

    def _residual(self, c: Source, seed: int) -> Residual:
        sums = {name: self._options[name] for name in ("accumulate_dtype", "compute_type") if name in self._options}
        X = random_vectors(c.shape[1], seed)
        of = partial(applied, self.grid)
        return residual_of(of, c, self.alpha, self.a, self.b, self.beta, self.entry, X, **sums)

    def _written(self, dataset: NewDataset, notify: GuardedCallback) -> _Counted:
        """Compute all tiles, in memory that is free again at the end."""
        tiling, grid, comm = self.tiling, self.grid, self.grid.comm
        (rows, cols, inner), (mb, nb, a_inner, b_inner) = tiling.largest, tiling.blocks
        with ExitStack() as stack:
            read_a, read_b = (stack.enter_context(x.opened_alone(grid)) for x in (self.a, self.b))
            entry = None if self.entry is None else stack.enter_context(self.entry.opened_alone(grid))
            write = stack.enter_context(dataset.opened_alone(write=True))
            reader, writer = (stack.enter_context(worker()) for _ in range(2))
            a = Panels(self.a, read_a, grid, (rows, inner), (mb, a_inner), tiling.loads[0], reader)
            b = Panels(self.b, read_b, grid, (inner, cols), (b_inner, nb), tiling.loads[1], reader)
            tile = DistMatrix.empty((rows, cols), grid=grid, block=(mb, nb), dtype=self.held)
            plan(a.panel(rows, inner), b.panel(inner, cols), tile, **self._options)  # raises what it must
            out = TileWriter(write, self.stored, writer)
            for number, step in enumerate(loaded(comm, tiling, a, b), 1):
                self._multiplied(step, a, b, tile, entry, out)
                notify(number, tiling.count)
            with together(comm):
                out.end_all()
        agree(comm, notify.error)
        read = a.nbytes + b.nbytes + out.entry_bytes
        return _Counted(read, out.nbytes, a.wait + b.wait, out.wait, out.seconds, out.total)

    def _multiplied(
        self, step: Step, a: Panels, b: Panels, tile: DistMatrix, entry: Transfer | None, out: TileWriter
    ) -> None:
        """Do one step; the first and the last of a tile by slabs, which are written while others are multiplied."""
        (r0, r1), (c0, c1), (k0, k1) = step.rows, step.cols, step.inner
        A, B, C = a.panel(r1 - r0, k1 - k0), b.panel(k1 - k0, c1 - c0), tile[: r1 - r0, : c1 - c0]
        if not (step.first or step.last):
            pdgemm(self.alpha, A, B, 1, C, **self._options)
            return
        height = tile.block[0] * self.grid.shape[0]
        for slab, first in enumerate(range(0, max(1, r1 - r0), height)):
            rows = slice(first, min(r1 - r0, first + height))
            if step.first:
                with together(self.grid.comm):
                    out.end(slab)  # of the tile before
                    if entry is not None and self.entry is not None:
                        out.entry_bytes += moved(entry, C[rows, :], (r0 + first, c0), self.entry.stored.dtype.itemsize)
            pdgemm(self.alpha, A[rows, :], B, self.beta if step.first else 1, C[rows, :], **self._options)
            if step.last:
                out.begin(slab, C[rows, :], (r0 + first, c0))

    def _report(self, counted: _Counted, seconds: float) -> StreamReport:
        tiling, comm = self.tiling, self.grid.comm
        m, n, k = tiling.mnk
        nbytes = np.array([counted.read, counted.written], np.int64)
        most = np.array([seconds, counted.read_wait, counted.write_wait, largest_so_far()])
        comm.Allreduce(MPI.IN_PLACE, nbytes, MPI.SUM)
        comm.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
        return StreamReport(
            title=f"C ({m} x {n}) := A ({m} x {self.a.shape[1]}) B, {self.stored}",
            plan=self.plan,
            bytes_read=int(nbytes[0]),
            bytes_written=int(nbytes[1]),
            flops=gemm_flops(m, n, k, self.stored.kind == "c"),
            seconds=float(most[0]),
            read_wait=float(most[1]),
            write_wait=float(most[2]),
            peak=int(most[3]),
        )


def operand_of(x: Source) -> Operand:
    """Return what a tiling needs to know of a dataset."""
    chunked = x.stored.offset is None
    unit = x.unit if chunked else (1, 1)
    chunk = unit[0] * unit[1] * x.stored.dtype.itemsize if chunked else 0
    return Operand(x.stored.dtype.itemsize, x.dtype.itemsize, unit, x.transposed, chunk)
