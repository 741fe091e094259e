"""An unfinished product: its tiles and sums stay in files beside the output, and a later job computes the rest.

The output c.h5:/z has two files beside it: `c.h5.z.checkpoint-tiles`, which becomes c.h5 when C is complete, and
`c.h5.z.checkpoint`, which has the number of steps that are done and the sums of the current tile.  In the name of a
dataset `/`, `.` and `%` become `%2F`, `%2E` and `%25`, so that no two outputs share files; the end of a name that is
too long becomes a hash.

    checkpoint  tiles    the product                               the next job
    missing     missing  is not begun, or is complete              begins
    missing     there    was ended before its first checkpoint,    removes the tiles, and begins
                         or between the two steps of its end
    there       missing  has lost its tiles                        begins again
    there       there    is done in part                           resumes, or refuses, or begins again

The next job refuses another product, and inputs that have changed.  It begins again where the tiles do not fit its
memory, or where the output has changed, because the file of the tiles has copies of its other datasets.  At its end a
job removes the checkpoint, and then gives the tiles the name of the output.  If a job is killed in between, the next
job begins again with the old C, so that no product is applied twice to C on entry.

A job may trust the files of a killed job for these reasons.  The checkpoint is replaced as a whole, and counts only
steps whose tiles are on the disk.  Tiles and sums are compared with their checksums before a job uses them.
No rank of the killed job still writes to the files, because each rank holds a lock, for which the next job waits.  An
input is the same if the state of its file is the same, including the time of change, which only the system can set.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.protection import checksum
from pdgemm.errors import ArgumentError, FileError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.io import generations
from pdgemm.io.atomic import on_root
from pdgemm.io.pieces import file_sum
from pdgemm.io.source import Source, source
from pdgemm.io.streamed.tiling import Tiling
from pdgemm.support import files
from pdgemm.support.agreement import together
from pdgemm.support.file_states import State, settled
from pdgemm.support.text import short_name

SUMS = "sums"  # the dataset in a checkpoint
_ENDINGS = 64  # bytes of a name for the endings of the files beside the output, and of temporary files


class OutputPlace(NamedTuple):
    """The output file (links resolved), the dataset in it, and the files of an unfinished product beside it."""

    output: Path
    name: str
    checkpoint: Path
    tiles: Path
    lock: Path

    def remove(self) -> None:
        """Remove the files of an earlier job, the checkpoint last; on rank 0."""
        name, of_mpi = re.escape(self.checkpoint.name), files.OF_MPI
        ours = re.compile(rf"{name}-tiles{of_mpi}|\.{name}\.[0-9a-f]+\.partial{of_mpi}")
        leftovers = [x for x in self.checkpoint.parent.iterdir() if ours.fullmatch(x.name)]
        for path in (*leftovers, self.checkpoint):
            path.unlink(missing_ok=True)
        files.UNFINISHED.discard(self.tiles)


def place_of(path: str, name: str) -> OutputPlace:
    """Return the names of the output, and of the files beside it that hold an unfinished product."""
    output = Path(os.path.realpath(path))
    escaped = re.sub(r"[%/.\0-\x1f\x7f]", lambda x: f"%{ord(x[0]):02X}", generations.plain_name(name))
    most = os.pathconf(output.parent, "PC_NAME_MAX") - _ENDINGS
    first = output.with_name(f"{short_name(f'{output.name}.{escaped}', most)}.checkpoint")
    return OutputPlace(output, name, first, *(first.with_name(f"{first.name}-{x}") for x in ("tiles", "lock")))


class SavedProduct(Protocol):
    """The interface of a product that has checkpoints.

    stored, ndim : type and dimensions of the dataset of C.   inputs : the datasets that are read.
    problem : the properties that identify the product, as text, by their names in messages.
    """

    grid: ProcessGrid
    stored: np.dtype
    tiling: Tiling
    ndim: int
    inputs: list[Source]
    problem: dict[str, str]

    def go_on(self, left: Left) -> bool: ...


class Left(NamedTuple):
    """The state of an unfinished product that an earlier job has left.

    share  : the share of the product that is done.   done : the number of steps that are done.
    counts, units : the counts of the earlier tiling, and the units of A and B in it.
    total  : the checksum of the finished tiles, as an integer.
    """

    saved: generations.Generation
    share: float
    done: int
    counts: tuple[int, int, int]
    units: tuple[tuple[int, int], tuple[int, int]]
    total: int

    def __str__(self) -> str:
        file = self.saved.path
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.stat().st_mtime))
        return f"goes on from {file}: {self.share:.1%} is done, saved at {when} by {self.saved.process}"


def description_of(place: OutputPlace, product: SavedProduct) -> dict[str, Any]:
    """Return the description that later jobs compare: the product, the names and the states of its files.  Local."""
    datasets = {x.what: x.dataset for x in product.inputs} | {"output": (str(place.output), place.name)}
    names = {what: f"{Path(file).name}:/{generations.plain_name(name)}" for what, (file, name) in datasets.items()}
    inputs = {x.what: sorted(_on_any_device(state) or [] for _, state in x.stored.states) for x in product.inputs}
    return {"problem": product.problem | names, "inputs": inputs, "output": _on_any_device(settled(place.output))}


def _on_any_device(state: State | None) -> list[int] | None:
    """Return a state without the device number, which may change when a file system is mounted again."""
    return None if state is None else [state.inode, state.size, state.modified, state.changed]


def attributes_of(description: dict[str, Any], tiling: Tiling, done: int, total: int) -> dict[str, Any]:
    """Return the attributes of a checkpoint after `done` steps.   total : the checksum of the finished tiles."""
    tiles = {"counts": tiling.counts, "units": (tiling.a.unit, tiling.b.unit), "done": done, "total": f"{total:x}"}
    return {"product": json.dumps(description | tiles | {"share": done / tiling.steps_of_all})}


def look_for_unfinished(place: OutputPlace, product: SavedProduct, now: dict[str, Any]) -> Left | None:
    """Return the state of this product that an earlier job has left; None: the product begins anew.  Collective.

    now : the description of the product.
    Raises ArgumentError if the checkpoint is of another product, or if inputs have changed.
    """
    grid, path, advice = product.grid, place.checkpoint, f"finish that one, or delete {place.checkpoint}*"
    left, before, why = on_root(grid.comm, path, lambda: _saved(path))
    fresh = product.tiling
    if left is not None:
        for what, here in now["problem"].items():
            if (there := before["problem"].get(what)) != here:
                raise ArgumentError(f"{path} is of another product, whose {what} is {there} and not {here}: {advice}")
        for x in product.inputs:
            if before["inputs"].get(x.what) != now["inputs"][x.what]:
                raise ArgumentError(f"the file of {x.place} has changed since {path} was saved: {advice}")
        if before["output"] != now["output"]:
            why = f"{place.output} has changed since {path} was saved"
        elif not product.go_on(left):
            why = f"the tiles of {path} do not fit the memory"
        elif not is_whole(grid, place, left, product.tiling, product.stored):
            why = f"{path} is damaged, or its tiles are"
    if not why:
        return left
    product.tiling = fresh
    if grid.comm.rank == 0:
        files.say(f"{why}: the product begins again")
    return None


def _saved(path: Path) -> tuple[Left | None, dict[str, Any], str]:
    """Return (state, description, "") of the checkpoint; if it is not valid, (None, {}, the reason).

    If no file exists, the reason is "".

    Raises FileError if the checkpoint cannot be read now, or is another file.
    """
    if not path.exists():
        return None, {}, ""
    try:
        saved = generations.inspect(path)
        state = json.loads(saved.attrs["product"])
        if not (isinstance(state["problem"], dict) and isinstance(state["inputs"], dict)):
            raise ValueError("the product is not described")
        (m, n, k), (a, b), _ = state["counts"], state["units"], state["output"]
        tiling = (int(m), int(n), int(k)), ((int(a[0]), int(a[1])), (int(b[0]), int(b[1])))
        left = Left(saved, float(state["share"]), int(state["done"]), *tiling, int(state["total"], 16))
    except generations.DamagedError as error:
        return None, {}, str(error)
    except FileError:
        raise
    except Exception as bad:  # another version or program may have written anything
        what = f"{type(bad).__name__}: {' '.join(str(bad).split())}"
        return None, {}, f"{path} is not a checkpoint of this version ({what})"
    return left, state, ""


# ------------------------------------------------------------------ tiles and ranks of an earlier job
def is_whole(grid: ProcessGrid, place: OutputPlace, left: Left, tiling: Tiling, dtype: np.dtype) -> bool:
    """Return whether the finished tiles and the sums are unchanged.  Collective.   tiling : that of the earlier job.

    Raises FileError if a file cannot be read now, because such a fault may be temporary.
    """
    if not on_root(grid.comm, place.tiles, lambda: generations.has(place.tiles, place.name, tiling.mnk[:2], dtype)):
        return False
    if tiling.current is not None:
        sums = source(grid, SUMS, (str(place.checkpoint), SUMS))
        if sums.checksum(grid) != sums.stored.checksum:
            return False
    return _sum_of_tiles(grid, place, tiling, dtype) == checksum.as_text(left.total)


def _sum_of_tiles(grid: ProcessGrid, place: OutputPlace, tiling: Tiling, dtype: np.dtype) -> str:
    """Return the checksum of the finished tiles in their file.  Collective."""
    total = checksum.zero()
    with source(grid, "C", (str(place.tiles), place.name)).opened_alone(grid) as get:
        for (r0, r1), (c0, c1) in tiling.finished:
            total += file_sum((r1 - r0, c1 - c0), dtype, get, (1, 1), grid.comm, (r0, c0))
    return checksum.text(grid.comm, total)


@contextmanager
def after_earlier_ranks(comm: MPI.Intracomm, path: Path, lock: Path) -> Iterator[None]:
    """Wait until no rank of an earlier, perhaps killed, job runs; then hold a lock for which later jobs wait.

    Collective.
    """
    end, waited = time.monotonic() + files.file_patience(), False
    while not on_root(comm, path, lambda: _is_free(path, lock, end)):
        if comm.rank == 0 and not waited:
            files.say(f"{path}: waiting for ranks of an earlier job, which still run")
        waited = True
    with together(comm), files.naming(lock):  # a rank that cannot open the lock file does not raise alone
        descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT)
    try:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _is_free(path: Path, lock: Path, end: float) -> bool:
    """Return whether no rank of an earlier job holds the lock.  Raises FileError after the time `end`.  Local."""
    held = files.lock(lock)
    if held is not None:
        os.close(held)
        return True
    if time.monotonic() > end:
        raise FileError(
            f"{path}: ranks of an earlier job still write to it; end them, or set {files.WAIT} to more seconds"
        )
    time.sleep(0.2)
    return False
