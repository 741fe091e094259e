"""A contender on its ranks: it tries its layouts, checks the fastest, and multiplies once for each line of input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from math import inf
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdgemm.local.arrays.element_functions import element_function, fill
from pdgemm.local.blas import processors
from peers.job import blas_of_numpy

if TYPE_CHECKING:
    from mpi4py import MPI

NAP = 0.02  # seconds between polls; a dozen jobs that poll every millisecond would use a third of a core
SURPLUS = 1.5  # a layout whose first run takes this many times the best time is not run again


class Block(NamedTuple):
    """The part of a matrix on one rank: values[r, c] is the element (rows[r], cols[c])."""

    rows: np.ndarray | range
    cols: np.ndarray | range
    values: np.ndarray


@dataclass(frozen=True)
class Setting:
    """The call that a contender must run, and how.   variant : an algorithm or a function.

    layout : "native", the fastest layout of the package; "columns", one block of columns of A, B and C per rank; or
        another layout that the module of the contender supports.
    """

    comm: MPI.Intracomm
    mnk: tuple[int, int, int]
    variant: str
    layout: str
    dtype: str
    order: str
    block: int | None


class Way(NamedTuple):
    """A contender in one layout: matrices are allocated, and `run` computes once.

    error : returns the relative error of the last run, which must be at most `tolerance`; None: nothing is checked.
    fill : called before each run; its time does not count.
    """

    note: str
    run: Callable[[], object]
    error: Callable[[], float] | None = None
    tolerance: float = 0.0
    fill: Callable[[], object] = lambda: None


Maker = Callable[[], Way]


def nothing() -> Block:
    """Return an empty block."""
    return Block(range(0), range(0), np.zeros((0, 0)))


def filled(shape: tuple[int, int], rows: slice, cols: slice, seed: int, dtype: str) -> Block:
    """Return a contiguous part of a random matrix of a shape."""
    here, there = range(*rows.indices(shape[0])), range(*cols.indices(shape[1]))
    block = Block(here, there, np.empty((len(here), len(there)), dtype))
    randomize(block, seed)
    return block


def randomize(block: Block, seed: int) -> None:
    """Fill a block with elements of mean 0 that depend only on indices: sums are small, and a wrong index shows."""
    uniform = element_function("uniform", seed, block.values.dtype)
    half = block.values.dtype.type(0.5)
    fill(block.values, np.asarray(block.rows), np.asarray(block.cols), lambda i, j: uniform(i, j) - half)


def part(n: int, parts: int, at: int) -> slice:
    """Return one of the equal parts of range(n); the last ones may be smaller or empty."""
    size = -(-n // parts)
    return slice(min(n, at * size), min(n, at * size + size))


def boxes(count: int, sides: int = 2) -> list[tuple[int, ...]]:
    """Return all ways to write a count as a product of `sides` factors."""
    if sides == 1:
        return [(count,)]
    first = [side for side in range(1, count + 1) if count % side == 0]
    return [(side, *rest) for side in first for rest in boxes(count // side, sides - 1)]


def product(
    setting: Setting, note: str, run: Callable[[], object], blocks: Callable[[], tuple[Block, Block, Block]]
) -> Way:
    """Return a `Way` to multiply.   blocks : returns this rank's A, B and C; no element is on two ranks."""
    tolerance = 8 * setting.mnk[2] ** 0.5 * float(np.finfo(setting.dtype).eps)
    return Way(note, run, lambda: error(setting.comm, setting.mnk, blocks()), tolerance)


def error(comm: MPI.Intracomm, mnk: tuple[int, int, int], blocks: tuple[Block, Block, Block]) -> float:
    """Return |C x - A (B x)| / |A (B x)| for a random x."""

    def times(block: Block, x: np.ndarray, rows: int) -> np.ndarray:
        y = np.zeros(rows)
        y[block.rows] = block.values @ x[block.cols]
        return np.asarray(comm.allreduce(y))

    m, n, k = mnk
    A, B, C = blocks
    x = np.random.default_rng(3).random(n) - 0.5
    expected = times(A, times(B, x, k), m)
    return float(np.linalg.norm(times(C, x, m) - expected) / np.linalg.norm(expected))


def next_line(comm: MPI.Comm) -> str:
    """Return the next line of rank 0's input on all ranks.  Until then all ranks sleep, for others to use the cores."""
    if comm.rank == 0:
        line = sys.stdin.readline().strip()
        for rank in range(1, comm.size):
            comm.send(line, dest=rank)
        return line
    while not comm.iprobe(source=0):
        sleep(NAP)
    return comm.recv(source=0)


def timed(comm: MPI.Intracomm, way: Way) -> float:
    """Return the seconds until the last rank has finished, on all ranks."""
    way.fill()
    comm.Barrier()
    start = perf_counter()
    way.run()
    comm.Barrier()
    return comm.bcast(perf_counter() - start)


def fastest(comm: MPI.Intracomm, makers: Iterator[Maker]) -> Way:
    """Return the fastest `Way`, by the faster of its two runs; one that is much slower than another runs only once."""
    best, least, trouble = None, inf, ""
    for make in makers:
        try:
            way = make()
            seconds = timed(comm, way)
            if seconds < SURPLUS * least:
                seconds = min(seconds, timed(comm, way))
        except Exception as failed:  # assumed to be raised on all ranks; otherwise the job hangs, and is ended
            trouble = trouble or f"{type(failed).__name__}: {failed}"
            continue
        if seconds < least:
            best, least = way, seconds
    if best is None:
        raise RuntimeError(trouble or "no layout")
    return best


def checked(comm: MPI.Intracomm, way: Way) -> Way:
    """Check the result of a `Way`, and return it.  Raises ArithmeticError on all ranks."""
    if way.error is not None:
        timed(comm, way)
        wrong = way.error()
        if not wrong <= way.tolerance:
            raise ArithmeticError(f"wrong: relative error {wrong:.1e}")
    return way


def serve(comm: MPI.Intracomm, module: str, **setting: Any) -> None:
    """For each line "m n k" that rank 0 reads, run once; rank 0 prints the seconds, or "-" and the reason."""
    peer = import_module(f"peers.{module}")
    makers: Callable[[Setting], Iterator[Maker]] = peer.makers
    if comm.rank == 0:
        kernel = peer.kernel() if hasattr(peer, "kernel") else processors.kernel(blas_of_numpy())
        if kernel is not None:  # otherwise the BLAS has printed it
            print("kernel", kernel, flush=True)
    now, way, trouble = "", None, ""
    while line := next_line(comm):
        if line != now:
            now, way, trouble = line, None, ""  # the old matrices are freed before new ones are allocated
            m, n, k = map(int, line.split())
            try:
                way = checked(comm, fastest(comm, makers(Setting(comm, (m, n, k), **setting))))
            except Exception as failed:
                trouble = str(failed)
        answer = f"{timed(comm, way):.9f} {way.note}" if way else f"- {trouble}"
        if comm.rank == 0:
            print(" ".join(answer.split()), flush=True)
