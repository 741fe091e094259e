"""An unfinished product: its tiles and sums stay in files beside the output, and a later job computes the rest.

The output c.h5:/z has two files beside it: `c.h5.z.checkpoint-tiles`, which becomes c.h5 when C is complete, and
`c.h5.z.checkpoint`, which lists the finished tiles and holds the sums of the current tile.  A job that goes on with
smaller tiles keeps these sums, as `c.h5.z.checkpoint-sums3`, until all tiles that need the sums are finished.  In the
name of a dataset `/`, `.` and `%` become `%2F`, `%2E` and `%25`, so that no two outputs share files; the end of a name
that is too long becomes a hash.

A job may trust the files of a killed job for these reasons.  The checkpoint is replaced as a whole, and names only
tiles that are on the disk.  Tiles and sums are compared with their checksums before a job goes on with them.  No rank
of the killed job still writes to the files, because each rank holds a lock, for which the next job waits.  An input is
the same if the state of its file is the same, with the system's own time of change, or if the elements that were read
are the same again: the checkpoint has their sum, taken when they were read.  (A checksum attribute of the dataset may
be older than its elements.)  The output carries the name of the run: if a job was killed when only the removal of these
files was left, the next job does not compute the output again, from itself.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import product as product_of
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.protection import checksum
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io import generations
from pdgemm.io.atomic import on_root
from pdgemm.io.new_dataset import NewDataset
from pdgemm.io.pieces import Transfer
from pdgemm.io.source import Region, Source, source
from pdgemm.io.stored import attribute
from pdgemm.io.streamed.tiling import STAGED, Range, TilePart, Tiling
from pdgemm.support import files
from pdgemm.support.agreement import together
from pdgemm.support.file_states import State, ordinary, settled
from pdgemm.support.text import short_name

RUN = "pdgemm_run"  # attribute of the output: the run of a product that wrote the output
SUMS = "sums"  # the dataset in a checkpoint
_ENDINGS = 64  # bytes of a name for the endings of the files beside the output, and of temporary files


class OutputPlace(NamedTuple):
    """The output, links resolved, its dataset, and the files beside it."""

    output: Path
    name: str
    checkpoint: Path
    tiles: Path
    lock: Path
    new: Path  # the tiles, while they are copied to a new file

    def sums(self, generation: int) -> Path:
        """Return the file that keeps the sums of a checkpoint."""
        return self.checkpoint.with_name(f"{self.checkpoint.name}-sums{generation}")

    def remove(self) -> None:
        """Remove the files of an earlier job, the checkpoint last; on rank 0."""
        name = re.escape(self.checkpoint.name)
        of_mpi = files.OF_MPI
        ours = re.compile(rf"{name}-(tiles|new|sums\d+){of_mpi}|\.{name}\.[0-9a-f]+\.partial{of_mpi}")
        leftovers = [x for x in self.checkpoint.parent.iterdir() if ours.fullmatch(x.name)]
        for path in (*leftovers, self.checkpoint):
            path.unlink(missing_ok=True)
        files.UNFINISHED.discard(self.tiles)


def place_of(path: str, name: str) -> OutputPlace:
    """Return the names of the output, and of the files beside it that hold an unfinished product."""
    output = Path(os.path.realpath(path))
    escaped = re.sub(r"[%/.\0-\x1f\x7f]", lambda x: f"%{ord(x[0]):02X}", _path(name))
    most = os.pathconf(output.parent, "PC_NAME_MAX") - _ENDINGS
    first = output.with_name(f"{short_name(f'{output.name}.{escaped}', most)}.checkpoint")
    return OutputPlace(output, name, first, *(first.with_name(f"{first.name}-{x}") for x in ("tiles", "lock", "new")))


def _path(name: str) -> str:
    """Return the name of a dataset as HDF5 reads it, without empty parts and dots."""
    return "/".join(x for x in name.split("/") if x not in ("", "."))


def product_identity(place: OutputPlace, product: SavedProduct) -> dict[str, str]:
    """Return the properties that identify a product, without the folder, whose name may differ in the next job."""
    return product.problem | {"output": f"{place.output.name}:/{_path(place.name)}"}


def output_state(place: OutputPlace) -> list[int] | None:
    """Return the state of the output's file; None if the file does not exist."""
    return _on_any_device(settled(place.output))


def _on_any_device(state: State | None) -> list[int] | None:
    """Return a state without the device number, which may change when a file system is mounted again."""
    return None if state is None else [state.inode, state.size, state.modified, state.changed]


class SavedProduct(Protocol):
    """The interface of a product that has checkpoints."""

    grid: ProcessGrid
    stored: np.dtype
    tiling: Tiling

    @property
    def ndim(self) -> int: ...
    @property
    def problem(self) -> dict[str, str]: ...
    @property
    def inputs(self) -> list[Source]: ...
    @property
    def held_types(self) -> list[np.dtype]: ...
    def as_before(self, left: Left) -> Tiling: ...
    def go_on(self, left: Left) -> None: ...


class Left(NamedTuple):
    """The state of an unfinished product that an earlier job has left.

    run      : the name of the run.   share : the share of the product that is done.
    counts, units : counts of the earlier tiling, and units of A and B in it.   finished, parts : as in a Tiling.
    total    : the checksum of the finished tiles, as a sum.   read : for each input, the sum of the elements read.
    read_regions : the regions of op(A), op(B) and C on entry that were read.
    output   : the state of the output's file when its other contents were copied to the file of the tiles.
    """

    saved: generations.Generation
    run: str
    share: float
    counts: tuple[int, int, int]
    units: tuple[tuple[int, int], tuple[int, int]]
    finished: frozenset[tuple[int, int]]
    parts: tuple[TilePart, ...]
    total: int
    read: tuple[int, ...]
    read_regions: tuple[frozenset[Region], ...]
    output: list[int] | None

    def has_read(self, number: int) -> Callable[[Region], bool]:
        """Return the function that says whether a region was read.  Its tiling has all ends of the earlier tiling."""

        def known(region: Region) -> bool:
            return any(
                all(x[0] <= y[0] and y[1] <= x[1] for x, y in zip(other, region)) for other in self.read_regions[number]
            )

        return known

    def __str__(self) -> str:
        file = self.saved.path
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.stat().st_mtime))
        return f"goes on from {file}: {self.share:.1%} is done, saved at {when} by {self.saved.process}"


class Complete(Exception):
    """An earlier job has finished this product, and the output has the result."""


def as_attrs(state: dict[str, Any], finished: frozenset[tuple[int, int]], tiling: Tiling) -> dict[str, Any]:
    """Return the attributes of a checkpoint."""
    bits = np.zeros([len(x) for x in tiling.cuts[:2]], bool)
    for tile in finished:
        bits[tile] = True
    of = {"counts": tiling.counts, "units": (tiling.a.unit, tiling.b.unit)}
    return {"product": json.dumps(state | of), "finished": np.packbits(bits), "tiles": bits.shape}


def look_for_unfinished(place: OutputPlace, product: SavedProduct) -> Left | None:
    """Return the state that an earlier job has left of this product; None if there is none.  Collective.

    Raises Complete; ArgumentError if the checkpoint is of another product, or if inputs have changed.
    """
    grid, path = product.grid, place.checkpoint
    comm = grid.comm
    left, state, run = on_root(comm, path, lambda: _saved(place))
    if left is None:
        return None
    complete = run == left.run  # the run of the checkpoint wrote the output
    for what, here in product_identity(place, product).items():
        if (there := state["problem"].get(what)) != here:
            if complete:  # another product may begin
                return None
            raise ArgumentError(
                f"{path} is of another product, whose {what} is {there} and not {here}: {_advice(place)}"
            )
    left = _with_regions(place, product, left, state)
    for number, x in enumerate(product.inputs):
        in_place = os.path.realpath(x.dataset[0]) == str(place.output)
        if complete and in_place and x.what == "C on entry":  # C has replaced this dataset
            continue
        if not _is_same(product, number, left, state["inputs"].get(x.what), path):
            if complete:
                return None
            raise ArgumentError(f"{x.place} is not what it was when {path} was saved: {_advice(place)}")
    if complete:
        raise Complete
    if state["tile"] is not None:
        sums = Path(left.parts[0].file)
        on_root(comm, path, lambda: None if sums.exists() else generations.linked(path, sums))
    return left


def _with_regions(place: OutputPlace, product: SavedProduct, left: Left, state: dict[str, Any]) -> Left:
    """Return `left` with the current tile as a part, and with the sums and the regions that were read of each input."""
    parts = left.parts
    if state["tile"] is not None:
        rows, cols, done = state["tile"]
        parts = (_part(rows, cols, done, str(place.sums(left.saved.token.generation))), *parts)
    read = tuple(int(state["inputs"].get(x.what, {"read": "0"})["read"], 16) for x in product.inputs)
    rows, cols, _ = product.as_before(left).cuts
    regions = [(rows[i], cols[j], (0, product.tiling.mnk[2])) for i, j in left.finished]
    regions += [(x.rows, x.cols, x.done) for x in parts]
    of_a, of_b, of_c = ({(x[p], x[q]) for x in regions} for p, q in ((0, 2), (2, 1), (0, 1)))
    return left._replace(parts=parts, read=read, read_regions=tuple(map(frozenset, (of_a, of_b, of_c))))


def _saved(place: OutputPlace) -> tuple[Left | None, dict[str, Any], str | None]:
    """Return the contents of the checkpoint, its state, and the run that wrote the output.

    Without a checkpoint, or if it is damaged: (None, {}, None).  Raises FileError if the checkpoint cannot be read now,
    or is another file.
    """
    path = place.checkpoint
    if not path.exists():
        return None, {}, None
    try:
        left, state = _parsed(generations.inspect(path))
    except generations.DamagedError as error:
        files.say(f"{error}: the product begins again")
        return None, {}, None
    return left, state, attribute(place.output, place.name, RUN)


def _parsed(saved: generations.Generation) -> tuple[Left, dict[str, Any]]:
    """Return the contents of a checkpoint, without the current tile, and its state.  Raises DamagedError."""
    try:
        state = json.loads(saved.attrs["product"])
        if not isinstance(state["problem"], dict):
            raise ValueError("the product is not described")
        for x in state["inputs"].values():
            int(x["read"], 16)
        if state["tile"] is not None:
            rows, cols, done = state["tile"]
            _part(rows, cols, done, "")
        shape = [int(x) for x in saved.attrs["tiles"]]
        bits = np.unpackbits(saved.attrs["finished"], count=int(np.prod(shape))).reshape(shape)
        finished = frozenset((int(i), int(j)) for i, j in np.argwhere(bits))
        (m, n, k), (a, b) = state["counts"], state["units"]
        tiling = (int(m), int(n), int(k)), ((int(a[0]), int(a[1])), (int(b[0]), int(b[1])))
        parts, total = tuple(_part(*x) for x in state["parts"]), int(state["total"], 16)
        left = Left(saved, state["run"], state["share"], *tiling, finished, parts, total, (), (), state["output"])
        return left, state
    except Exception as bad:  # another version or program may have written anything
        what = f"{type(bad).__name__}: {' '.join(str(bad).split())}"
        raise generations.DamagedError(f"{saved.path} is not a checkpoint of this version ({what})") from None


def run_of(place: OutputPlace) -> str | None:
    """Return the run of the checkpoint; None if the checkpoint is missing or damaged."""
    if not place.checkpoint.exists():
        return None
    with suppress(generations.DamagedError):
        return _parsed(generations.inspect(place.checkpoint))[0].run
    return None


def _advice(place: OutputPlace) -> str:
    return f"finish that one, or delete {place.checkpoint}*"


def _part(rows: list[int], cols: list[int], done: list[int], file: str) -> TilePart:
    return TilePart((rows[0], rows[1]), (cols[0], cols[1]), (done[0], done[1]), file)


def dataset_identity(x: Source) -> dict[str, Any]:
    """Return the identity of a dataset, without reading it: its name in its file, and the states of its files."""
    states = {tuple(_on_any_device(state) or ()) for _, state in x.stored.states}
    return {"name": _path(x.dataset[1]), "files": sorted(map(list, states))}


def _is_same(product: SavedProduct, number: int, left: Left, known: dict[str, Any] | None, path: Path) -> bool:
    """Return whether a dataset still has the elements that an earlier job has read of it.  Collective."""
    x, comm = product.inputs[number], product.grid.comm
    if known is None:
        return False
    if dataset_identity(x).items() <= known.items():
        return True
    if comm.rank == 0:
        files.say(
            f"{x.place} is another file than when {path} was saved, or was moved or changed: what the job "
            "before has read of it is read again and compared"
        )
    cuts, total, held = product.as_before(left).cuts, checksum.zero(), product.held_types[number]
    down, across = ((0, 2), (2, 1), (0, 1))[number]
    regions = filter(left.has_read(number), product_of(cuts[down], cuts[across]))
    in_file = [(cols, rows) if x.transposed else (rows, cols) for rows, cols in regions]
    with x.opened_alone(product.grid) as get, together(comm):
        for rows, cols, elements in _shares(in_file, product.grid, held, get):
            total += checksum.bilinear(elements, np.arange(*rows), np.arange(*cols))
    return checksum.text(comm, total) == checksum.as_text(left.read[number])


# ------------------------------------------------------------------ tiles of an earlier job
def is_whole(grid: ProcessGrid, place: OutputPlace, left: Left, tiling: Tiling, dtype: np.dtype) -> bool:
    """Return whether the finished tiles and the sums are unchanged.  Collective.   tiling : of the earlier job.

    Raises FileError if a file cannot be read now, because such a fault may be temporary.
    """
    comm, wanted = grid.comm, [(place.tiles, place.name, tiling.mnk[:2], dtype)]
    for part in left.parts:
        shape = part.rows[1] - part.rows[0], part.cols[1] - part.cols[0]
        wanted.append((Path(part.file), SUMS, shape, None))  # type: ignore[arg-type]
    if not on_root(comm, place.tiles, lambda: all(generations.has(*x) for x in wanted)):
        return False
    try:
        return _is_same_as_saved(grid, place, left, tiling, dtype)
    except (FileError, LayoutError, DTypeError):  # raised on all ranks
        with together(comm):
            for path, *_ in wanted:
                _check_readable(comm, path)
        return False


def _check_readable(comm: MPI.Intracomm, path: Path) -> None:
    """Raise FileError if this rank's share of the bytes cannot be read now; else an error of HDF5 means damage."""
    with files.naming(path), open(path, "rb", opener=ordinary) as file:
        size = os.fstat(file.fileno()).st_size
        end = size * (comm.rank + 1) // comm.size
        file.seek(size * comm.rank // comm.size)
        while file.tell() < end and file.read(STAGED):
            pass


def _is_same_as_saved(grid: ProcessGrid, place: OutputPlace, left: Left, tiling: Tiling, dtype: np.dtype) -> bool:
    """Return whether the finished tiles and the sums have their recorded checksums."""
    comm, total = grid.comm, checksum.zero()
    for part in left.parts:
        x = source(grid, SUMS, (part.file, SUMS))
        if x.checksum(grid) != x.stored.checksum:
            return False
    with source(grid, "C", (str(place.tiles), place.name)).opened_alone(grid) as get, together(comm):
        for rows, cols, elements in _finished(tiling, left, grid, dtype, get):
            total += checksum.bilinear(elements, np.arange(*rows), np.arange(*cols))
    return checksum.text(comm, total) == checksum.as_text(left.total)


def move_finished_tiles(
    grid: ProcessGrid, place: OutputPlace, left: Left, tiling: Tiling, new: NewDataset, dtype: np.dtype
) -> None:
    """Copy finished tiles to a file with new other contents, and rename it to the file of the tiles.  Collective."""
    tiles, comm = source(grid, "C", (str(place.tiles), place.name)), grid.comm
    with tiles.opened_alone(grid) as get, new.opened_alone(write=True) as put, together(comm):
        for rows, cols, elements in _finished(tiling, left, grid, dtype, get):
            put(rows[0], cols[0], elements)
    on_root(comm, place.new, lambda: files.rename(place.new, place.tiles))


def _finished(
    tiling: Tiling, left: Left, grid: ProcessGrid, dtype: np.dtype, get: Transfer
) -> Iterator[tuple[Range, Range, np.ndarray]]:
    """Yield the rows, columns and elements of this rank's share of finished tiles, some rows at a time."""
    rows, cols, _ = tiling.cuts
    return _shares([(rows[i], cols[j]) for i, j in sorted(left.finished)], grid, dtype, get)


def _shares(
    regions: Iterable[Region], grid: ProcessGrid, dtype: np.dtype, get: Transfer
) -> Iterator[tuple[Range, Range, np.ndarray]]:
    """Yield the rows, columns and elements of this rank's share of regions of a dataset, some rows at a time."""
    for (r0, r1), (c0, c1) in regions:
        first, end = (r0 + (r1 - r0) * x // grid.size for x in (grid.rank, grid.rank + 1))
        lines = max(1, STAGED // max(1, (c1 - c0) * dtype.itemsize))
        for row in range(first, end, lines):
            elements = np.empty((min(end, row + lines) - row, c1 - c0), dtype)
            get(row, c0, elements)
            yield (row, row + len(elements)), (c0, c1), elements
