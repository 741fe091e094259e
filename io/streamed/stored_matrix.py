"""StoredMatrix: a matrix that stays in its file, and is read panel by panel when it is multiplied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any, Self

import numpy as np

from pdgemm.algorithms.product_options import Multiplicand, ProductCall, ProductOptions
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, LayoutError, MemoryLimitError
from pdgemm.gemm import pdgemm
from pdgemm.grids.distribution import Block, Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.report import CheckReport, all_checks
from pdgemm.io.source import Source
from pdgemm.io.streamed.file_panels import loaded_steps, opened_panels
from pdgemm.io.streamed.files_product import checks_of, operand_of, report_of_tiles
from pdgemm.io.streamed.stored_svd import LIMIT, stored_svd
from pdgemm.io.streamed.tiling import Operand, Tiling
from pdgemm.io.streamed.tiling_choice import counts
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_optional, op_letter
from pdgemm.matrix.argument_checks import as_scalar, check_alpha, check_matrices
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import communicator_of
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.support.agreement import GuardedCallback, agree, together
from pdgemm.support.members import attribute_at
from pdgemm.support.text import in_bytes, op_name


class StoredMatrix(Multiplicand):
    """A matrix in a file, as an operand of `pdgemm`: C := alpha op(A) op(B) + beta C with A, B or both in files.

    `pdgemm.io.hdf5.dataset` and `pdgemm.io.npy.dataset` return it.  Each panel of the inner dimension is read while the
    previous panel is multiplied: in memory are only C, an operand that is a DistMatrix, and two panels of each operand
    in a file.

    `A.T` and `A.H` are views; `A @ B` is the product; `pdgemm.linalg.svd(A, k)` computes the largest singular values.
    """

    def __init__(self, grid: ProcessGrid, source: Source) -> None:
        """Local: the file is not read.   source : the file, as `hdf5.dataset` has inspected it."""
        self.grid, self.source = grid, source

    shape: tuple[int, int] = attribute_at("source.shape")
    dtype: np.dtype = attribute_at("source.dtype")

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def T(self) -> Self:
        """The transpose, a view.  A.H.T of complex elements raises LayoutError."""
        return type(self)(self.grid, self.source.turned("T"))

    @property
    def H(self) -> Self:
        """The conjugate transpose, a view.  A.T.H of complex elements raises LayoutError."""
        return type(self)(self.grid, self.source.turned("C"))

    def planned_on(self, grid: ProcessGrid) -> Self:
        """Return the matrix on a grid on which a program is planned: nothing is read."""
        return type(self)(grid, self.source)

    def load(self, block: Block | None = None, **more: Any) -> DistMatrix:
        """Return the matrix as a DistMatrix.  Collective over the grid; arguments as in `hdf5.load` or `npy.load`."""
        matrix = self.source.again(self.grid).read(self.grid, block, **more)
        return matrix.T.H if self.source.op == "C" and self.dtype.kind == "c" else matrix

    def __repr__(self) -> str:
        rows, cols = self.shape
        return f"StoredMatrix({self.source.place}, {rows} x {cols} {self.dtype}, op {self.source.op})"

    def centered_svd(
        self,
        k: int,
        *,
        passes: int | None = None,
        memory: int | None = None,
        oversample: int | None = None,
        tolerance: float | None = None,
        steps: int | None = None,
        seed: int = 0,
        progress: Callable[[int, int], object] | None = None,
    ) -> tuple[DistMatrix, np.ndarray, DistMatrix, DistMatrix]:
        """Return U, s, Vh and mu with A - 1 mu ~ U diag(s) Vh, where mu is the mean of the rows.  Collective.

        The principal components of A, whose rows are observations, are the rows of Vh, their variances s^2 / (m - 1),
        and the scores U diag(s).  The mean needs no further pass: in the first pass the mean of the first panel is
        subtracted from all rows, and the results are corrected for the mean of all rows; later passes subtract the mean
        itself.

        Arguments, report and errors are those of `pdgemm.linalg.svd`, whose A is A - 1 mu here; mu is (1, n).
        """
        U, s, Vh, mean = stored_svd(
            self.grid, self.source, k, passes, memory, oversample, tolerance, steps, seed, progress, True
        )
        assert mean is not None
        return U, s, Vh, mean

    def __svd__(
        self, k: int | None, others: dict[str, Any], *arguments: Any
    ) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
        """Compute singular values as `pdgemm.linalg.svd` does.   others : arguments for a matrix in memory."""
        with together(communicator_of(self.grid)):
            if names := [name for name, value in others.items() if value not in (None, False)]:
                raise ArgumentError(f"{' and '.join(names)}: only for a matrix in memory, but {self!r} is in a file")
        return stored_svd(self.grid, self.source, k, *arguments)[:3]

    @staticmethod
    def __pdgemm__(call: ProductCall) -> DistMatrix:
        """Multiply as `pdgemm` does, with A, B or both in files."""
        alpha, A, B, beta, C, transa, transb, options, progress = call
        start, grid = perf_counter(), next(x.grid for x in (A, B) if isinstance(x, StoredMatrix))
        comm = communicator_of(grid)
        with together(comm) as description:
            check_alpha(alpha)
            if options.epilogue is not None:
                raise ArgumentError("products of matrices in files take no epilogue yet: apply it to C")
            A, B = _op(A, transa, "A"), _op(B, transb, "B")
            if C is not None:
                check_matrices(C=C)
            (m, k), (inner, n) = A.shape, B.shape
            if k != inner or (C is not None and C.shape != (m, n)):
                c_shape = None if C is None else C.shape
                raise LayoutError(f"shapes do not fit: op(A) is {(m, k)}, op(B) is {(inner, n)}, C is {c_shape}")
            if any(x.device != devices.HOST for x in (A, B, C) if isinstance(x, DistMatrix)):
                raise DeviceError("a product with a matrix in a file is on the host: use to_host, or load the file")
            stored = C.dtype if C is not None else dtypes.product(A.dtype, B.dtype)
            sums = np.dtype(options.accumulate_dtype or dtypes.arithmetic(stored))
            alpha, beta = as_scalar(alpha, stored, "alpha"), as_scalar(0 if C is None else beta, stored, "beta")
            limit = as_optional(options.memory_limit, "memory_limit", 1) or LIMIT
            layout = Distribution.over(grid.shape, (m, n)) if C is None else C.distribution
            copied = (options.protect == "repair") * layout.rows.largest * layout.cols.largest * sums.itemsize
            tiling = _panels((m, n, k if alpha else 0), grid.shape, A, B, limit, copied)
            description += ["pdgemm of files", tiling, alpha, beta, C is None, limit, options.accumulate_dtype]
        options = replace(options, memory_limit=limit - tiling.most_bytes)
        if grid.draft:
            names = (x.source.what for x in (A, B) if isinstance(x, StoredMatrix))
            grid.draft.add(" and ".join(dict.fromkeys(names)), tiling.file_reads)
        if C is None:
            C = DistMatrix.empty((m, n), grid=grid, dtype=stored)
        notify = GuardedCallback(None if grid.draft else progress)
        T = C if sums == stored or tiling.counts[2] == 1 else C.astype(sums)  # C is rounded once, not after each panel
        counted, wait, checks = _multiplied(grid, tiling, alpha, A, B, beta, T, options, notify)
        if T is not C:
            C[:, :] = T.astype(stored)
        left, right = op_name("A", transa.upper()), op_name("B", transb.upper())
        C.report = report_of_tiles(
            comm,
            f"C ({m} x {n}) := {left} ({m} x {k}) {right}, {stored}",
            {"bytes_read": counted, "bytes_written": 0},
            {"seconds": perf_counter() - start, "read_wait": wait, "write_wait": 0.0},
            plan=tiling.as_dict(limit),
            flops=gemm_flops(*tiling.mnk, stored.kind == "c"),
            saves=0,
            save_seconds=0.0,
            checks=checks,
        )
        return C


def _op(x: Any, trans: str, name: str) -> Any:
    """Return op(X) of a matrix, in memory or in a file."""
    letter = op_letter(trans, f"trans{name.lower()}")
    if not isinstance(x, DistMatrix | StoredMatrix):
        raise DTypeError(f"{name} must be a DistMatrix or a StoredMatrix, got {type(x).__name__}")
    return x if letter == "N" else x.T if letter == "T" else x.H


def _panels(mnk: tuple[int, int, int], grid: tuple[int, int], A: Any, B: Any, limit: int, copied: int) -> Tiling:
    """Return the tiling with the fewest panels that fit: two panels of each operand in a file take half of `limit`.

    The other half is for products, which may redistribute panels.
    copied : bytes of the copy of C that is needed to repeat a product.
    Raises MemoryLimitError.
    """
    a, b = (operand_of(x.source) if isinstance(x, StoredMatrix) else Operand(0, 0) for x in (A, B))
    for cut in (False, True):  # cut chunks, which are read as a whole for each part, only if necessary
        of = [x._replace(unit=(1, 1)) if cut else x for x in (a, b)]
        for count in counts(mnk[2]):
            tiling = Tiling(mnk, grid, of[0], of[1], 0, 0, 0, (1, 1, count))
            if 2 * tiling.most_bytes + copied <= limit:
                return tiling
    needed = 2 * tiling.most_bytes + copied
    raise MemoryLimitError(
        f"memory limit {in_bytes(limit)} per rank is too small for panels of {mnk[0]} rows of A and {mnk[1]} "
        f"columns of B: {in_bytes(needed)} ({needed} bytes) are needed"
    )


def _multiplied(
    grid: ProcessGrid,
    tiling: Tiling,
    alpha: Any,
    A: Any,
    B: Any,
    beta: Any,
    C: DistMatrix,
    options: ProductOptions,
    notify: GuardedCallback,
) -> tuple[int, float, CheckReport | None]:
    """Multiply panel by panel; return the bytes that this rank read, the seconds that it waited, and the checks."""
    (m, n, _), checks = tiling.mnk, list[CheckReport]()
    sources = (x.source if isinstance(x, StoredMatrix) else None for x in (A, B))
    with opened_panels(grid, *zip(sources, tiling.panels)) as (a, b):
        for number, step in enumerate(loaded_steps(grid.comm, tiling.steps(), a, b), 1):
            k0, k1 = step.inner
            panel_a = A[:, k0:k1] if a is None else a.panel(m, k1 - k0)
            panel_b = B[k0:k1, :] if b is None else b.panel(k1 - k0, n)
            result = pdgemm(alpha, panel_a, panel_b, beta if step.first else 1, C, **options.arguments)
            checks += checks_of(result, options.protect)
            notify(number, tiling.count)
    agree(grid.comm, notify.error)
    read = [x for x in (a, b) if x is not None]
    return sum(x.nbytes for x in read), sum(x.wait for x in read), all_checks(checks)
