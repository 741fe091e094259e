"""Where a machine is measured (host or GPU), with which sizes, and how functions are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.devices.streams import recorder_of
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array, Device, Pinned
from pdgemm.local.arrays.dtypes import BLAS, NARROW, TYPE
from pdgemm.local.arrays.elementwise import set_elements
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import AnyName
from pdgemm.schedules.mover_registry import NCCL, RING, by_messages

REPEATS = 7
LEAST = 2  # the fewest repeats, however long they take
ENOUGH = 0.6  # seconds after which no further repeat begins: the times of long work vary less


class Sizes(NamedTuple):
    """The sizes of the measured work: large enough for a measurement, small enough to take seconds.

    side   : rows and columns of C in local products.   widths : inner dimensions of these products.
    times  : local products that are started together.
    copied : rows and columns of an array that is copied.   touched : words that are written to new memory.
    words  : words of a large message.   moved : rows and columns of a large redistribution, for each rank.
    beside : rows and columns of C, and inner dimension, of the products that overlap with a transfer.
    """

    side: int
    widths: tuple[int, ...]
    times: int
    copied: int
    touched: int
    words: int
    moved: int
    beside: tuple[int, int]


HOSTS = Sizes(768, (8, 32, 128, 256, 512), 1, 2048, 1 << 22, 1 << 18, 256, (1024, 1024))
GPUS = Sizes(4096, (64, 256, 1024, 4096), 4, 8192, 1 << 25, 1 << 22, 2048, (4096, 4096))


class MeasuredPlace(NamedTuple):
    """The device of the matrices, and the transport of its messages: staged through the host, or NCCL."""

    device: Device | None
    sizes: Sizes
    staged: bool = False
    nccl: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(map(str, (*BLAS, *(x for x in NARROW if TYPE[x].cuda is not None)) if self.device else BLAS))

    @property
    def broadcasts(self) -> tuple[str, ...]:
        """The movers that can be measured."""
        return (*((RING.name,) if self.staged else by_messages()), *((NCCL.name,) if self.nccl else ()))

    def empty(self, *shape: int, dtype: Any = np.float64) -> Array:
        return devices.empty(shape, dtype, device=self.device)

    def pinned(self, words: int) -> Pinned | None:
        """Return a pinned host buffer for `words` words if messages are staged, otherwise None."""
        return self.device.pinned(words, np.float64) if self.device and self.staged else None

    def random(self, rows: int, cols: int, dtype: str) -> Array:
        """Return a matrix of random numbers, because a GPU multiplies zeros and ones faster than usual elements."""
        matrix, source = self.empty(rows, cols, dtype=dtype), np.random.default_rng(rows)
        numbers = source.standard_normal((rows, cols), np.float32)
        set_elements(matrix, (numbers * (1 + 1j) if matrix.dtype.kind == "c" else numbers).astype(dtype))
        return matrix

    def zeros(self, m: int, n: int, grid: ProcessGrid, **layout: Any) -> DistMatrix:
        name = AnyName(self.device.name if self.device else devices.HOST)
        return DistMatrix.zeros((m, n), grid=grid, device=name, **layout)

    def recorded(self, act: Callable[[Recorder], object]) -> Callable[[], None]:
        """Return a function that calls `act` with a new recorder, and waits for the device."""

        def work() -> None:
            recorder = recorder_of(self.empty(0))
            act(recorder)
            recorder.finish()

        return work

    def work(self, phase: str, act: Callable[[], object]) -> Callable[[], None]:
        """Return a function that carries out a phase of a product, and waits for the device."""

        def act_in_phase(recorder: Recorder) -> None:
            with recorder.phase(phase):
                act()

        return self.recorded(act_in_phase)


def timed(comm: MPI.Comm, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median over repeats of the seconds of the slowest rank."""
    return in_turns(comm, [work], repeats)[0]


def in_turns(comm: MPI.Comm, works: Sequence[Callable[[], object]], repeats: int = REPEATS) -> list[float]:
    """Time several functions in turns, so that a short disturbance of the machine falls on few repeats of each."""
    seconds, spent = [list[float]() for _ in works], 0.0
    for turn in range(repeats + 1):
        if turn > LEAST and spent > ENOUGH:  # `spent` is the same on all ranks
            break
        for work, taken in zip(works, seconds):
            comm.Barrier()
            start = perf_counter()
            work()
            longest = comm.allreduce(perf_counter() - start, MPI.MAX)
            spent += longest
            taken += [longest] * (turn > 0)
    return [float(median(taken)) for taken in seconds]
