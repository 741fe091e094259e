"""Datasets that are read as tensors, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import Block
from pdgemm.grids.process_grid import ProcessGrid, default_grid
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.instrument.spans import taking, timed
from pdgemm.io import boxes
from pdgemm.io.atomic import on_root
from pdgemm.io.pieces import Progress, within
from pdgemm.io.source import Source, source
from pdgemm.io.stored import check_checksum, check_unchanged
from pdgemm.local.arrays.arguments import as_range, shown
from pdgemm.local.arrays.device import HOST
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.matrix.local_arrays import communicator_of, device_on
from pdgemm.names import DeviceName
from pdgemm.support.agreement import together
from pdgemm.support.text import counted
from pdgemm.tensors.dist_tensor import DistTensor


class IndexRanges(tuple[tuple[int, int], ...]):
    """A range of indices of each axis of a tensor, from the first index to the one after the last."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self)

    def __str__(self) -> str:
        return f"[{', '.join(f'{start}:{stop}' for start, stop in self)}]"


Named = Callable[[], tuple[str | Path, str]]  # returns a file and the name of a dataset, or raises on some ranks


def inspected(
    call: str, named: Named, grid: ProcessGrid | None, dtype: Any, *others: object, op: str = "N", tensor: bool = False
) -> tuple[ProcessGrid, Source]:
    """Return the grid, by default of all ranks, and the source of a dataset that a function reads.  Collective.

    call : the name of the function.   others : its other arguments, which all ranks compare.
    """
    grid = default_grid() if grid is None else grid
    with together(communicator_of(grid)) as description:
        path, name = map(str, named())
        wanted = None if dtype is None else element_type(dtype)
        description += [call, path, name, wanted, op, *others]
    return grid, source(grid, ":".join(filter(None, (path, name))), (path, name), wanted, op, tensor)


def load(
    call: str,
    named: Named,
    grid: ProcessGrid | None,
    block: Block | None,
    rows: Any,
    cols: Any,
    part: Any,
    layout: Any,
    *,
    dtype: Any,
    transpose: bool,
    device: DeviceName,
    verify: bool = False,
    progress: Progress | None = None,
    **placed: Any,
) -> Any:
    """Return a tensor if the dataset has more than two dimensions, or for a part or a layout; otherwise a matrix.

    The arguments are those of `hdf5.load`; `placed` has the source.  Collective; raises its errors.
    """
    # `DistMatrix.empty` compares the other arguments of the layout
    others = rows, cols, shown(part), shown(layout), bool(verify), device
    grid, x = inspected(call, named, grid, dtype, *others, op="T" if transpose else "N", tensor=True)
    device_on(grid, device)
    if x.stored.ndim < 3 and part is None and layout is None:
        return x.read(grid, block, rows, cols, verify, progress, device=device, **placed)
    with together(grid.comm):
        if any(value is not None for value in (block, rows, cols)) or tuple(placed["source"]) != (0, 0):
            why = "block, source, rows and cols are those of a matrix; a tensor has part and layout"
            raise ArgumentError(f"{x.place} is read as a tensor of {counted(x.stored.ndim, 'dimension')}: {why}")
    return read_tensor(x, grid, part, layout, verify, progress, device)


def read_tensor(
    x: Source,
    grid: ProcessGrid,
    part: Any = None,
    layout: Any = None,
    verify: bool = False,
    progress: Progress | None = None,
    device: DeviceName = HOST,
) -> DistTensor:
    """Return a dataset, or a part, as a tensor with its dimensions, transposed where op is not "N".

    part, layout, verify, progress, device : as in `hdf5.load`.  Collective; raises the errors of `load`.
    """
    start, comm, stored = perf_counter(), grid.comm, x.stored
    order = -1 if x.by_columns else 1
    of_array = stored.extents[: stored.ndim][::order]
    with together(comm):
        ranges = IndexRanges(_ranges(part, of_array, x.place))
        shape, shown_part = ranges.shape, None if ranges.shape == of_array else ranges
        carried, collective = x.way(verify, shown_part)
        options = _layout_options(layout)
    shape = shape[::-1] if x.transposed != x.by_columns else shape
    T = DistTensor.empty(shape, grid=grid, dtype=carried, device=device, **options)
    there = T.T if x.transposed else T  # with the axes of the file
    there = there.expanded([1]) if stored.ndim == 1 else there
    window = (*ranges[::order], (0, 1))[: len(stored.extents)]
    with timed("read", T.unfolding.stored.nbytes), taking(None):
        with x.opened(comm, collective, stored.extents) as transfer:
            boxes.read(there, within(transfer, window), stored.unit, progress)
        on_root(comm, Path(x.dataset[0]), lambda: check_unchanged(x.place, stored))
    if verify:
        check_checksum(stored, x.place, boxes.checksum_of(there))  # the same on every rank
    T = T if T.dtype == x.dtype else T.astype(x.dtype)
    T.unfolding.report = x.report(collective, of_array, T.size, start, shown_part)
    return T


def _ranges(part: Any, extents: tuple[int, ...], what: str) -> list[tuple[int, int]]:
    """Return the range of each axis.  Raises ArgumentError.   part : a range, or None, for each axis; None: all."""
    parts = (None,) * len(extents) if part is None else part
    if not isinstance(parts, (tuple, list)) or len(parts) != len(extents):
        raise ArgumentError(f"part of {what} has a slice for each of {len(extents)} axes, got {shown(part)}")
    return [as_range(x, f"indices of axis {axis}", n) for axis, (x, n) in enumerate(zip(parts, extents))]


def _layout_options(layout: Any) -> dict[str, Any]:
    """Return the options of `DistTensor.empty` for a layout, or for the axes of rows and of columns."""
    if layout is None or isinstance(layout, TensorLayout):
        return {"layout": layout}
    try:
        rows, cols = layout
    except (TypeError, ValueError):
        raise ArgumentError(f"layout is a TensorLayout or the axes of rows and of columns: {shown(layout)}") from None
    return {"rows": rows, "cols": cols}
