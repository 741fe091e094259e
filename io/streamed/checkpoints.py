"""Checkpoints of a product from files to a file: when they are saved, and how a job begins and ends with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import sqrt
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.errors import PdgemmError
from pdgemm.grids.distribution import Distribution
from pdgemm.io import hdf5
from pdgemm.io.atomic import on_root, replacing
from pdgemm.io.new_dataset import NewDataset
from pdgemm.io.source import source
from pdgemm.io.streamed import unfinished
from pdgemm.io.streamed.file_panels import transfer_part
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support import files, signals
from pdgemm.support.agreement import together

MOST_FLOPS = 2.0**38  # operations of a rank in a step (some seconds); a checkpoint may be saved after each step
PATIENCE = 90.0  # seconds after a signal in which a job may finish a step and save


class WrongResult(Exception):
    """The comparison with random vectors shows that C is wrong: C is not stored, and no later job resumes it."""


class When(NamedTuple):
    """The times at which checkpoints are saved.

    every : seconds between two checkpoints; 0: after each step.
    mtbf  : mean seconds between failures.  After the first save, every = sqrt(2 mtbf save), where `save` is the mean
            time of a save; this interval loses the least time (Young, Comm. ACM 17(9), 1974).
    """

    every: float
    mtbf: float | None = None


class Checkpoints:
    """The checkpoints of one product, and the dataset that becomes C.  All methods are collective over the grid.

    when    : None: no checkpoints are saved.
    dataset : the dataset to which tiles are written.   left : the state that an earlier job left; None: the product
              began anew.
    total   : the checksum of the tiles that earlier jobs have written, as an integer, on rank 0; 0 on other ranks.
    saves, seconds : the number of checkpoints of this job, and the seconds that they took.
    patience : seconds after a signal in which the job may finish a step and save.
    """

    def __init__(
        self,
        product: unfinished.SavedProduct,
        place: unfinished.OutputPlace,
        when: When | None,
        left: unfinished.Left | None,
        dataset: NewDataset,
        description: dict[str, Any],
    ) -> None:
        self._grid, self._comm, self._tiling, self._place = product.grid, product.grid.comm, product.tiling, place
        self._when, self._description, self._last = when, description, perf_counter()
        self.dataset, self.left, self.saves, self.seconds = dataset, left, 0, 0.0
        self.patience = 0.0 if when is None else PATIENCE
        self.total = left.total if left is not None and self._comm.rank == 0 else 0
        self._share = left.share if left is not None else 0.0
        self._ending = 0

    @property
    def lost(self) -> str:
        """The message about the work that is lost if the job ends now."""
        kept = f"; the same command goes on from {self._share:.1%}" if self._share else ""
        return f"{self._place.output} was not written, its contents are unchanged{kept}"

    def load_sums(self, tile: DistMatrix) -> int:
        """Load the partial sums of the tile in which an earlier job ended; return the bytes that this rank has read."""
        sums = source(self._grid, unfinished.SUMS, (str(self._place.checkpoint), unfinished.SUMS))
        with sums.opened_alone(self._grid) as get, together(self._comm):
            return transfer_part(get, tile, (0, 0), tile.dtype.itemsize)

    def due(self, last: bool) -> bool:
        """Return whether to save a checkpoint after a step.

        last : whether the step is the last of the product.  After it a checkpoint is always saved, because the check of
            C, which follows, may be interrupted.
        """
        if self._when is None:
            return False
        late = self._comm.rank == 0 and perf_counter() - self._last >= self._interval(self._when)
        reasons = np.array([late, signals.signal_received()], np.int64)
        self._comm.Allreduce(MPI.IN_PLACE, reasons, MPI.MAX)
        self._ending = int(reasons[1])
        return last or bool(reasons.any())

    def _interval(self, when: When) -> float:
        if when.mtbf is None or not self.saves:
            return when.every
        return sqrt(2 * when.mtbf * self.seconds / self.saves)

    def save(self, done: int, sums: DistMatrix, written: np.ndarray) -> None:
        """Save the state of the product, and end the job if a signal was received.

        done : steps that are done, including those of earlier jobs.   sums : sums of the unfinished tile, or empty.
        written : this rank's share of the checksum of the tiles that this job wrote.
        """
        start, comm, tiles = perf_counter(), self._comm, self._place.tiles
        with together(comm), files.naming(self._place.output), open(tiles, "rb") as file:
            os.fsync(file.fileno())
        total = (comm.allreduce(int(written[0])) + comm.bcast(self.total)) % 2**64
        attrs = unfinished.attributes_of(self._description, self._tiling, done, total)
        try:
            hdf5.save_all(self._place.checkpoint, {unfinished.SUMS: sums}, attrs=attrs)
        except PdgemmError as error:  # a full disk: the last checkpoint still exists, and C may be finished
            if comm.rank == 0:
                files.say(f"no checkpoint was saved, and the product continues: {error}")
        else:
            self.saves, self._share = self.saves + 1, done / self._tiling.steps_of_all
            files.UNFINISHED.discard(tiles)
        self.seconds += comm.allreduce(perf_counter() - start, MPI.MAX)
        self._last = perf_counter()
        signals.doing("multiply", self.lost)
        if self._ending:
            signals.leave(self._ending)


@contextmanager
def checkpoints(
    product: unfinished.SavedProduct, output: tuple[str, str], layout: Distribution, when: When | None
) -> Iterator[Checkpoints]:
    """Resume the product of an earlier job, or begin a product; the block computes and completes C.

    when : None: the product begins anew, and leaves nothing to later jobs.

    Collective; the block raises on all ranks or on none.  If it raises, the last checkpoint stays, unless C is wrong.
    Raises the errors of `look_for_unfinished`.
    """
    grid, comm, dtype, path = product.grid, product.grid.comm, product.stored, Path(output[0])
    place = on_root(comm, path, lambda: unfinished.place_of(*output))
    tiles = NewDataset(path, output[1], grid, layout, dtype, ndim=product.ndim)
    if when is None:
        with tiles.replacing():
            yield Checkpoints(product, place, None, None, tiles, {})
        return
    there = on_root(comm, path, place.tiles.exists)
    size = 0 if there else layout.shape[0] * layout.shape[1] * dtype.itemsize

    def end() -> None:
        place.checkpoint.unlink(missing_ok=True)

    with (
        replacing(path, comm, size, kept=place.tiles, last=end),
        unfinished.after_earlier_ranks(comm, path, place.lock),
    ):
        try:
            description = on_root(comm, path, lambda: unfinished.description_of(place, product))
            left = unfinished.look_for_unfinished(place, product, description)
            if left is None:
                on_root(comm, path, place.remove)
                on_root(comm, path, lambda: files.UNFINISHED.add(place.tiles))
                tiles.create(place.tiles)
            else:
                tiles.reopen(place.tiles)
            yield Checkpoints(product, place, when, left, tiles, description)
        except BaseException as error:
            if comm.rank == 0 and (isinstance(error, WrongResult) or not place.checkpoint.exists()):
                with suppress(OSError):
                    place.remove()
                    place.lock.unlink(missing_ok=True)
            raise
        on_root(comm, path, lambda: place.lock.unlink(missing_ok=True))
