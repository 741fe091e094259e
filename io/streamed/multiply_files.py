"""multiply_files(): C := alpha op(A) op(B) + beta C from datasets to a dataset, in memory or in parts."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.gemm import pdgemm
from pdgemm.grids.distribution import Block
from pdgemm.grids.process_grid import ProcessGrid, default_grid
from pdgemm.instrument.observer import Observer
from pdgemm.io import hdf5
from pdgemm.io.source import Source, ndim_of_product, source
from pdgemm.io.stored import file_and_name
from pdgemm.io.streamed.before_reading import check_memory, check_operands_in_files, check_result_file, operands
from pdgemm.io.streamed.checkpoints import MOST_FLOPS, When
from pdgemm.io.streamed.files_product import FilesProduct, FilesResult
from pdgemm.io.streamed.unfinished import Left
from pdgemm.local.arrays.arguments import as_count, op_letter
from pdgemm.local.arrays.dtypes import element_type, product
from pdgemm.matrix.local_arrays import communicator_of
from pdgemm.matrix.residual import verify
from pdgemm.names import DeviceName, DType, Transpose
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.support.agreement import together
from pdgemm.support.files import is_npy
from pdgemm.support.text import typed

Dataset = str | Path | tuple[str | Path, str]  # "a.h5:/x", or a file and the name of a dataset in it, or "a.npy"


def multiply_files(
    a: Dataset,
    b: Dataset,
    output: Dataset,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    c0: Dataset | None = None,
    transa: Transpose = "N",
    transb: Transpose = "N",
    grid: ProcessGrid | None = None,
    block: Block | None = None,
    dtype: DType | None = None,
    device: DeviceName = "host",
    memory: int | None = None,
    checkpoint: float | None = None,
    mtbf: float | None = None,
    compression: str | None = None,
    overwrite: bool = False,
    seed: int | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> FilesResult:
    """Compute C := alpha op(A) op(B) + beta C from files to a file, as `pdgemm multiply` does.  Collective.

        multiply_files("a.h5:/x", "b.h5:/y", "c.h5:/z", memory=2 << 30, checkpoint=600)

    a, b, output : datasets of A, B and C: "a.h5:/x", or the file and the name; A and B may be .npy files: "a.npy".
        C replaces a dataset that pdgemm wrote, or C on entry, when the new C is complete.  Only with overwrite, C
        replaces A, B, or a dataset of another program.
    c0      : the dataset, or .npy file, of C on entry, which is read if beta is not 0; by default the output.
    alpha, beta, transa, transb, options : as in `pdgemm`.
    grid    : by default a grid of all ranks.   block, device : layout and device of matrices in memory.
    dtype   : the type that A and B are converted to.
    memory  : bytes per rank for A, B, C and all buffers; larger matrices are read and multiplied in parts.
    checkpoint, mtbf : seconds between two checkpoints, and mean seconds between failures.  The same call goes on from
        the last checkpoint.  checkpoint, mtbf and memory exclude block, compression and a device.
    seed    : C is compared with A, B and random vectors of this seed, and not stored if the comparison shows that C is
        wrong.
    observer : receives progress, reports and plans.

    Before elements are read, all that does not depend on them is checked: shapes, types, options, the output, and
    whether the matrices and buffers fit the memory.
    Raises FileError, LayoutError, DTypeError, ArgumentError, MemoryLimitError or OutOfMemoryError on all ranks; then
    the file of C is unchanged.
    """
    say, grid = observer or Observer(), default_grid() if grid is None else grid
    in_parts = memory is not None or checkpoint is not None
    with together(communicator_of(grid)) as arguments:
        names = [None if x is None else _file_and_name(x) for x in (a, b, output, c0)]
        if mtbf is not None and checkpoint is None:
            raise ArgumentError("mtbf needs checkpoint, the seconds until the first save, whose duration is measured")
        if in_parts and (block is not None or device != "host" or compression is not None):
            raise ArgumentError("memory and checkpoint cannot be combined with block, compression or a device")
        ops = op_letter(transa, "transa"), op_letter(transb, "transb")
        memory = None if memory is None else as_count(memory, "memory", 1)
        wanted = None if dtype is None else element_type(dtype)
        arguments += ["multiply_files", names, alpha, beta, ops, wanted, memory, checkpoint, mtbf, seed]
        arguments += [f"overwrite={bool(overwrite)}"]
    from_a, from_b, to, entry = names
    assert from_a and from_b and to
    x, y = (source(grid, *what, wanted, op) for what, op in zip((("A", from_a), ("B", from_b)), ops))
    stored = product(x.dtype, y.dtype)
    if not to[1]:
        raise ArgumentError(f"output must be a dataset, such as c.h5:/z, got {to[0]}")
    z = source(grid, "C on entry", entry or to, stored) if beta or entry else None
    if z and not beta and z.shape != (x.shape[0], y.shape[1]):
        raise LayoutError(f"{z.place} is {z.shape[0]} x {z.shape[1]}, but C is {x.shape[0]} x {y.shape[1]}")
    if in_parts and beta and z and z.transposed:
        raise LayoutError(f"{z.place} is in Fortran order: C on entry of a product in parts must be in C order")
    work = _Work(grid, alpha, x, y, beta, z if beta else None, stored, to, overwrite, seed, options, say)
    if in_parts:
        return work.in_parts(memory, checkpoint, mtbf)
    return work.in_memory(block, device, compression)


def _file_and_name(dataset: Any) -> tuple[str, str]:
    """Return the file of a dataset, and its name in the file; a .npy file has the name "".  Raises ArgumentError."""
    file = dataset[0] if isinstance(dataset, tuple) and dataset[1:] == ("",) else dataset
    if is_npy(file):
        return str(file), ""
    file, name = file_and_name(*(dataset if isinstance(dataset, tuple) else (dataset, None)))
    return str(file), name


class _Work(NamedTuple):
    """A product of files with checked arguments.   c : C on entry; None: not read.   stored : type of C in its file."""

    grid: ProcessGrid
    alpha: complex
    a: Source
    b: Source
    beta: complex
    c: Source | None
    stored: np.dtype
    output: tuple[str, str]
    overwrite: bool
    seed: int | None
    options: dict[str, Any]
    say: Observer

    @property
    def flops(self) -> int:
        return gemm_flops(self.a.shape[0], self.b.shape[1], self.a.shape[1], self.stored.kind == "c")

    def check_output(self) -> bool:
        nbytes = self.a.shape[0] * self.b.shape[1] * self.stored.itemsize
        return check_result_file(self.grid, self.output, nbytes, self.overwrite, (self.a, self.b), self.c)

    def in_memory(self, block: Block | None, device: DeviceName, compression: str | None) -> FilesResult:
        """Read A and B, multiply, and store C."""
        options: Any = {"alpha": self.alpha, "beta": self.beta, **self.options}
        once, planned = check_operands_in_files(self.grid, self.a, self.b, self.c, block, device, self.seed, **options)
        in_place = self.check_output()
        self.say.planned(planned)
        a = self.a._replace(what="A and B") if once else self.a
        how: Any = {"say": self.say, "grid": self.grid, "block": block, "device": device}
        A, B = operands(a, self.b, lambda x: x.read_again(**how), once)
        before = self.c.read_again(**how) if self.c else None
        C = before.copy() if self.seed is not None and before is not None else before
        replaces: Any = before.report if before is not None and in_place else None
        with self.say.progress("multiply", self.flops) as progress:
            C = pdgemm(self.alpha, A, B, self.beta, C, progress=progress, **self.options)
        report: Any = C.report
        report = report.changed(operands=(self.a.op_name, self.b.op_name))  # they were transposed when they were read
        self.say.report("product", report.summary())
        residual = None
        if self.seed is not None:
            sums: Any = {name: self.options.get(name) for name in ("accumulate_dtype", "compute_type")}
            with self.say.progress("verify"):
                residual = verify(C, self.alpha, A, B, self.beta, before, seed=self.seed, **sums)
            self.say.report("verify", residual)
            if residual.wrong:
                return FilesResult(report, residual)
        with self.say.progress("write", self.a.shape[0] * self.b.shape[1] * self.stored.itemsize, "B/s") as progress:
            ndim = ndim_of_product(self.b, self.c)
            how = {"replaces": replaces, "overwrite": self.overwrite, "compression": compression, "ndim": ndim}
            wrote = hdf5.save(*self.output, C, progress=progress, **how)
        self.say.report("wrote", wrote)
        return FilesResult(report, residual, wrote)

    def in_parts(self, memory: int | None, checkpoint: float | None, mtbf: float | None) -> FilesResult:
        """Multiply and store in parts, with at most `memory` bytes per rank, and with checkpoints."""
        when = None if checkpoint is None else When(checkpoint, mtbf)
        operands, most = (self.a, self.b, self.beta, self.c), inf if when is None else MOST_FLOPS
        files = FilesProduct(self.grid, self.alpha, *operands, memory, most_flops=most, **self.options)
        check_memory(
            self.grid,
            files.tiling.most_bytes,
            "a tile of C and panels of A and B",
            f", or less {typed('--memory', 'memory=')}",
        )
        self.check_output()

        def begun(left: Left | None) -> None:
            if left is not None:
                self.say.note("resumed", [str(left)], {"share": left.share, "generation": left.saved.token.generation})
            self.say.note("plan", [files.explain()], files.plan)

        with self.say.progress("multiply", self.flops) as progress:
            done = files.run(self.output, seed=self.seed, progress=progress, when=when, begun=begun)
        for name, each in zip(("product", "verify", "wrote"), done):
            if each is not None:
                self.say.report(name, each)
        return done
