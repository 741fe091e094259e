"""Checkpoints of a product from files to a file: when they are saved, and how a job begins and ends with them."""

from __future__ import annotations

import os
import uuid
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
from pdgemm.io.new_dataset import NewDataset, attributes
from pdgemm.io.streamed.earlier_ranks import after_earlier_ranks
from pdgemm.io.streamed.tiling import TileStep, waiting
from pdgemm.io.streamed.unfinished import (
    RUN,
    SUMS,
    Complete,
    Left,
    OutputPlace,
    SavedProduct,
    as_attrs,
    dataset_identity,
    is_whole,
    look_for_unfinished,
    move_finished_tiles,
    output_state,
    place_of,
    product_identity,
    run_of,
)
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support import files, signals
from pdgemm.support.agreement import together

MOST_FLOPS = 2.0**38  # operations of a rank in a step (some seconds); a checkpoint may be saved after each step
PATIENCE = 90.0  # seconds after a signal in which a job may finish a step and save


class WrongResult(Exception):
    """C is wrong: C replaces no dataset, and no later job goes on with this product."""


class When(NamedTuple):
    """The times at which checkpoints are saved.

    every : seconds between two checkpoints; 0: after each step.
    mtbf  : mean seconds between failures.  After the first save, every = sqrt(2 mtbf save), where `save` is the mean
            time of a save; this interval loses the least time (Young, Comm. ACM 17(9), 1974).
    """

    every: float
    mtbf: float | None = None


class Checkpoints:
    """The checkpoints of one product.  All methods are collective over the grid.

    dataset : the dataset of the tiles.   left : the state that an earlier job left; None: the product began anew.
    total   : the checksum of the tiles that earlier jobs have written, as a sum, on rank 0; 0 on other ranks.
    saves, seconds : the number of checkpoints of this job, and the seconds that they took.
    """

    def __init__(
        self,
        product: SavedProduct,
        place: OutputPlace,
        when: When,
        left: Left | None,
        dataset: NewDataset,
        state: dict[str, Any],
    ) -> None:
        self._comm, self._tiling, self._place, self._when = product.grid.comm, product.tiling, place, when
        self._finished, self._state, self._last = {*product.tiling.finished}, state, perf_counter()
        self.dataset, self.left, self.saves, self.seconds = dataset, left, 0, 0.0
        self.total = left.total if left is not None and self._comm.rank == 0 else 0
        self._share = left.share if left is not None else 0.0
        self._ending = 0

    @property
    def lost(self) -> str:
        """The message that says what is lost if the job ends now."""
        kept = f"; the same command goes on from {self._share:.1%}" if self._share else ""
        return f"{self._place.output} was not written, its contents are unchanged{kept}"

    def due(self, step: TileStep, last: bool) -> bool:
        """Return whether to save a checkpoint after a step.

        last : the step is the last of the product; save, because the later check of C may be interrupted.
        """
        if step.last:
            self._finished.add(step.tile)
        late = self._comm.rank == 0 and perf_counter() - self._last >= self._interval
        reasons = np.array([late, signals.signal_received()], np.int64)
        self._comm.Allreduce(MPI.IN_PLACE, reasons, MPI.MAX)
        self._ending = int(reasons[1])
        return last or bool(reasons.any())

    @property
    def _interval(self) -> float:
        if self._when.mtbf is None or not self.saves:
            return self._when.every
        return sqrt(2 * self._when.mtbf * self.seconds / self.saves)

    def save(self, step: TileStep, tile: DistMatrix, total: np.ndarray, read: list[np.ndarray]) -> None:
        """Save the state of the product after a step, and end the job if a signal was received.

        tile : the sums of the tile of this step.   total : the checksum of this rank's writes in this job, as a sum.
        read : for each input the sum of the elements that were read, in earlier jobs too.
        """
        start, comm, tiles = perf_counter(), self._comm, self._place.tiles
        with together(comm), files.naming(self._place.output), open(tiles, "rb") as written:
            os.fsync(written.fileno())
        totals = np.concatenate([total, *read])
        comm.Allreduce(MPI.IN_PLACE, totals, MPI.SUM)
        whole, *of_inputs = totals.tolist()
        whole = (whole + comm.bcast(self.total)) % 2**64
        now, sums = (None, tile[:0, :0]) if step.last else ((step.rows, step.cols, step.done), tile)
        share, parts = self._done(step), waiting(self._tiling, self._finished | {step.tile})
        inputs = {
            what: {**known, "read": f"{x:x}"} for (what, known), x in zip(self._state["inputs"].items(), of_inputs)
        }
        state = self._state | {"total": f"{whole:x}", "tile": now, "share": share, "parts": parts, "inputs": inputs}
        attrs = as_attrs(state, frozenset(self._finished), self._tiling)
        try:
            hdf5.save_all(self._place.checkpoint, {SUMS: sums}, attrs=attrs)
        except PdgemmError as error:  # a full disk: the last checkpoint still exists, and C may be finished
            if comm.rank == 0:
                files.say(f"no checkpoint was saved, and the product goes on: {error}")
        else:
            self.saves, self._share = self.saves + 1, share
            files.UNFINISHED.discard(tiles)
        self.seconds += comm.allreduce(perf_counter() - start, MPI.MAX)
        self._last = perf_counter()
        signals.doing("multiply", self.lost)
        if self._ending:
            signals.leave(self._ending)

    def _done(self, step: TileStep) -> float:
        """Return the share of the product that is done."""
        (m, n, k), (rows, cols, _) = self._tiling.mnk, self._tiling.cuts
        area = 1.0 * sum((rows[i][1] - rows[i][0]) * (cols[j][1] - cols[j][0]) for i, j in self._finished)
        if not step.last:
            size = (step.rows[1] - step.rows[0]) * (step.cols[1] - step.cols[0])
            area += size * (step.done[1] - step.done[0]) / max(1, k)
        return area / max(1, m * n)


@contextmanager
def checkpoints(
    product: SavedProduct, output: tuple[str, str], layout: Distribution, when: When
) -> Iterator[Checkpoints]:
    """Go on with the product of an earlier job, or begin a product; the block computes and completes C.

    Collective; the block raises on all ranks or on none.  If it raises, the last checkpoint stays, unless C is wrong.
    Raises Complete if an earlier job has finished the product, and the errors of `look_for_unfinished`.
    """
    grid, comm, dtype, path = product.grid, product.grid.comm, product.stored, Path(output[0])
    place = on_root(comm, path, lambda: place_of(*output))
    there = on_root(comm, path, place.tiles.exists)
    size = 0 if there else layout.shape[0] * layout.shape[1] * dtype.itemsize
    with replacing(path, comm, size, kept=place.tiles), after_earlier_ranks(comm, path, place.lock):
        try:
            left = look_for_unfinished(place, product)
            if left is not None and not is_whole(grid, place, left, product.as_before(left), dtype):
                if comm.rank == 0:
                    files.say(f"{place.checkpoint} is damaged, or its tiles are: the product begins again")
                left = None
            run = comm.bcast(uuid.uuid4().hex) if left is None else left.run
            now = on_root(comm, path, lambda: output_state(place))
            of = attributes(grid, layout, dtype, None) | {RUN: run}

            def dataset(file: Path) -> NewDataset:
                return NewDataset(file, path, output[1], grid, layout.shape, dtype, None, product.ndim)

            if left is None:
                on_root(comm, path, place.remove)
                on_root(comm, path, lambda: files.UNFINISHED.add(place.tiles))
                tiles = dataset(place.tiles)
                tiles.copy_others()
                tiles.create(of, {})
            else:
                if left.output != now:  # another program has changed the output meanwhile
                    copy = dataset(place.new)
                    on_root(comm, path, lambda: place.new.unlink(missing_ok=True))
                    copy.copy_others()
                    copy.create(of, {})
                    move_finished_tiles(grid, place, left, product.as_before(left), copy, dtype)
                tiles = dataset(place.tiles)
                tiles.reopen()
                product.go_on(left)
            inputs = {x.what: dataset_identity(x) for x in product.inputs}
            state = {"run": run, "problem": product_identity(place, product), "inputs": inputs, "output": now}
            yield Checkpoints(product, place, when, left, tiles, state)
        except BaseException as error:
            if comm.rank == 0 and (isinstance(error, WrongResult | Complete) or not place.checkpoint.exists()):
                with suppress(OSError):
                    place.remove()
                    place.lock.unlink(missing_ok=True)
            raise
        on_root(comm, path, lambda: place.lock.unlink(missing_ok=True))
    # no other job begins a product here as long as the checkpoint of this run exists
    on_root(comm, path, lambda: place.remove() if run_of(place) == run else None)
