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

MOST_FLOPS = 2.0**38  # of a rank in a step, after which a checkpoint may be saved: some seconds
PATIENCE = 90.0  # seconds in which a job that is asked to end may finish a step and save


class WrongResult(Exception):
    """C is wrong: nothing is replaced by it, and nobody goes on with it."""


class When(NamedTuple):
    """When checkpoints are saved.

    every : seconds between two of them; 0: after each step.
    mtbf  : mean seconds between failures: once the time of a save is known, every = sqrt(2 mtbf save), which loses the
            least (Young, Comm. ACM 17(9), 1974).
    """

    every: float
    mtbf: float | None = None


class Checkpoints:
    """The checkpoints of one product.  All methods are collective over the grid.

    dataset : where tiles are written.   left : what there was at the beginning.
    total   : of the checksum of what earlier jobs have written, on rank 0.
    saves, seconds : checkpoints of this job, and the time that they took.
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
        """What is lost if the job ends now."""
        kept = f"; the same command goes on from {self._share:.1%}" if self._share else ""
        return f"{self._place.output} was not written, its contents are unchanged{kept}"

    def due(self, step: TileStep, last: bool) -> bool:
        """Return whether it is time to save, after a step.

        last : of the product: what follows, to read it again and to verify it, may be interrupted, too.
        """
        if step.last:
            self._finished.add(step.tile)
        late = self._comm.rank == 0 and perf_counter() - self._last >= self._interval
        told = np.array([late, signals.signal_received()], np.int64)
        self._comm.Allreduce(MPI.IN_PLACE, told, MPI.MAX)
        self._ending = int(told[1])
        return last or bool(told.any())

    @property
    def _interval(self) -> float:
        if self._when.mtbf is None or not self.saves:
            return self._when.every
        return sqrt(2 * self._when.mtbf * self.seconds / self.saves)

    def save(self, step: TileStep, tile: DistMatrix, total: np.ndarray, read: list[np.ndarray]) -> None:
        """Save what is done after a step, and end the job if it was asked to.

        tile : the sums of the tile of this step.   total : of the checksum of what this rank has written in this job.
        read : the same of what was read of the inputs, in earlier jobs too.
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
        except PdgemmError as error:  # a full disk: the last checkpoint is still there, and C may be finished
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
    """Go on with what an earlier job left of a product, or begin; in the block it is computed, and then complete.

    Collective; the block raises on all ranks or on none.  If it raises, what was saved stays, unless C is wrong.
    Raises Complete where nothing is left to do, and what `look_for_unfinished` raises.
    """
    grid, comm, dtype, path = product.grid, product.grid.comm, product.stored, Path(output[0])
    place = on_root(comm, path, lambda: place_of(*output))
    there = on_root(comm, path, place.tiles.exists)
    size = 0 if there else layout.shape[0] * layout.shape[1] * dtype.itemsize
    with replacing(path, comm, size, place.tiles), after_earlier_ranks(comm, path, place.lock):
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
                made = dataset(place.tiles)
                made.copy_others()
                made.create(of, {})
            else:
                if left.output != now:  # another program has saved to it meanwhile
                    copy = dataset(place.new)
                    on_root(comm, path, lambda: place.new.unlink(missing_ok=True))
                    copy.copy_others()
                    copy.create(of, {})
                    move_finished_tiles(grid, place, left, product.as_before(left), copy, dtype)
                made = dataset(place.tiles)
                made.reopen()
                product.go_on(left)
            inputs = {x.what: dataset_identity(x) for x in product.inputs}
            state = {"run": run, "problem": product_identity(place, product), "inputs": inputs, "output": now}
            yield Checkpoints(product, place, when, left, made, state)
        except BaseException as error:
            if comm.rank == 0 and (isinstance(error, WrongResult | Complete) or not place.checkpoint.exists()):
                with suppress(OSError):
                    place.remove()
                    place.lock.unlink(missing_ok=True)
            raise
        on_root(comm, path, lambda: place.lock.unlink(missing_ok=True))
    # nobody else begins a product here as long as there is this run's checkpoint
    on_root(comm, path, lambda: place.remove() if run_of(place) == run else None)
