"""Checks of matrices before they are read: their datasets, their layouts, and the memory that they need."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import OutOfMemoryError
from pdgemm.gemm import plan
from pdgemm.grids.distribution import Block, Distribution
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io import new_dataset
from pdgemm.io.source import Source
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.dtypes import product
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.residual import Claim, checked_claim
from pdgemm.names import DeviceName
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.support.agreement import together
from pdgemm.support.files import check_replaced
from pdgemm.support.memory_left import MACHINE, memory_left
from pdgemm.support.text import in_bytes, typed


def operands(a: Source, b: Source, make: Callable[[Source], DistMatrix], once: bool) -> tuple[DistMatrix, DistMatrix]:
    """Return op(A) and op(B) in memory.

    make : a function that returns the matrix of a dataset; it transposes the matrix if op is "T" or "C".
    once : A and B are the same dataset: it is read once, and op(B) is a view of the same matrix.
    """
    A = make(a)
    B = make(b) if not once else A if a.transposed == b.transposed else A.T
    # `make` has transposed the matrix: x.T.H is its conjugate
    return tuple(x.T.H if op == "C" else x for x, op in ((A, a.op), (B, b.op)))  # type: ignore[return-value]


class Outlines:
    """Matrices with a layout but without memory, for checks of arguments.  Collective over the grid.

    On a device the matrices have memory: only an allocation shows whether enough device memory is free.
    """

    def __init__(self, grid: ProcessGrid, block: Block | None, device: DeviceName) -> None:
        self._grid, self._block, self._device = grid, block, device
        self._matrices: dict[str, DistMatrix] = {}

    @property
    def nbytes(self) -> list[int]:
        """The bytes of this rank's part of each matrix."""
        return [x.stored.size * x.dtype.itemsize for x in self._matrices.values()]

    def of(self, what: str, shape: tuple[int, int], dtype: np.dtype, order: Order = "C") -> DistMatrix:
        """Return the matrix of this name, which the first call creates."""
        if what not in self._matrices:
            self._matrices[what] = self._make(shape, dtype, order)
        return self._matrices[what]

    def of_source(self, x: Source) -> DistMatrix:
        return self.of(x.what, x.shape, x.dtype, "F" if x.transposed else "C")

    def _make(self, shape: tuple[int, int], dtype: np.dtype, order: Order) -> DistMatrix:
        grid, block = self._grid, self._block
        if self._device != devices.HOST:
            return DistMatrix.empty(shape, grid=grid, block=block, dtype=dtype, order=order, device=self._device)
        with together(grid.comm):
            distribution = Distribution.over(grid.shape, shape, block)
            size = distribution.local_shape(grid.coords)
            local = np.lib.stride_tricks.as_strided(np.zeros(1, dtype), size, (0, 0))
        # matrices are in the shared memory of a node if they fit
        fits = grid.size > 1 and (grid.memory.alone or sum(self.nbytes) + local.nbytes <= grid.memory.size)
        shared = bool(grid.comm.allreduce(fits, MPI.LAND))
        return DistMatrix(local, grid, distribution, order, shared=shared)


def check_operands_in_files(
    grid: ProcessGrid,
    a: Source,
    b: Source,
    c: Source | None,
    block: Block | None,
    device: DeviceName,
    seed: int | None,
    **options: Any,
) -> tuple[bool, ProductPlan]:
    """Raise the errors that the product would raise, and OutOfMemoryError where the memory is too small.

    Returns whether A and B are the same dataset (it is then read once), and the plan.

    c : C on entry.   seed : for `verify`, which needs a copy of C; None: the product is not verified.
    options : options of `plan`.
    """
    once = a.is_same(b) and a.dtype == b.dtype
    outlines = Outlines(grid, block, device)
    A, B = operands(a, b, outlines.of_source, once)
    C = outlines.of_source(c) if c else None
    if C is None and device == devices.HOST:
        C = outlines.of("C", (A.shape[0], B.shape[1]), product(A.dtype, B.dtype))
    planned = plan(A, B, C, **options)
    if seed is not None and C is not None:
        sums: Any = {name: options.get(name) for name in ("accumulate_dtype", "compute_type")}
        checked_claim(Claim(C, options["alpha"], A, B, options["beta"], C if c else None, **sums), seed)
    matrix_bytes = outlines.nbytes
    if device == devices.HOST:
        copy = matrix_bytes[-1] if seed is not None and c else 0
        needed = sum(matrix_bytes) + copy + planned.extra_bytes(grid.comm.rank)
    else:  # each matrix is read or written through host memory, one after the other
        needed = max(matrix_bytes)
    what, advice = "A, B, C and the buffers of the product", f", or multiply in parts ({typed('--memory', 'memory=')})"
    check_memory(grid, needed, what, advice)
    return once, planned


def check_memory(grid: ProcessGrid, nbytes: int, what: str, advice: str = "") -> None:
    """Raise OutOfMemoryError on all ranks if the ranks of a node need more memory than is left on the node.

    Collective over the grid.   nbytes : bytes that this rank needs.   what : the use of these bytes.
    """
    mine = memory_left()
    requests = grid.node.allgather((nbytes, [*mine]))
    with together(grid.comm):
        for name, left in mine.items():
            needed = sum(size for size, names in requests if name in names)
            if needed > left:
                of = "" if name == MACHINE else f" in its {name}"
                raise OutOfMemoryError(
                    f"{what} need {in_bytes(needed)} on {platform.node()}, where {in_bytes(left)} are left{of}: "
                    f"use more nodes{advice}"
                )


def check_result_file(
    grid: ProcessGrid,
    output: tuple[str, str],
    nbytes: int,
    force: bool,
    sources: Sequence[Source] = (),
    entry: Source | None = None,
) -> bool:
    """Raise FileError if the result cannot be saved, ArgumentError if it may replace a dataset only with `force`.

    nbytes : bytes of the result.   sources : the datasets that the result may not replace.
    entry  : C on entry, which the result may replace, like any dataset that pdgemm wrote.

    Returns whether the result replaces C on entry.
    """
    path, name = output
    old = new_dataset.check_savable(Path(path), name, grid, nbytes)
    in_place = old is not None and entry is not None and entry.stored.object == old.object
    if old is not None:
        lost = " and ".join(x.what for x in sources if old.object in x.stored.objects)
        why = [f"is {lost}"] if lost else []
        check_replaced(f"{path}:{name}", not lost and (in_place or old.by_pdgemm), force, *why)
    return in_place
