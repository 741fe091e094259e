"""The traces of all ranks in one file, on one clock, in the Trace Event Format, which Perfetto and Chrome display.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm import __version__
from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.spans import HOST, MOVING, Span, Trace, active, taking
from pdgemm.io.atomic import check_writable_on_all, on_root, replacing
from pdgemm.local.blas.threads import threads
from pdgemm.planning.machines.machine import Machine, machine_at_hand
from pdgemm.support import failures
from pdgemm.support.agreement import together
from pdgemm.support.waits import Wait

_PINGS = 100
_TAG = 77
_MARK = rb'^\{"displayTimeUnit": "ms", "otherData": \{"pdgemm": '  # the beginning of a trace
_PROBE = 1 << 20  # bytes of the message that shows the rate of a network


@contextmanager
def trace(
    path: str | Path | None,
    grid: ProcessGrid,
    *,
    nvtx: bool = False,
    machine: Machine | None = None,
    overwrite: bool = False,
) -> Iterator[None]:
    """Record the work of all ranks in the `with` block, and write it to a file.  Collective over the grid.

    path : the JSON file, for https://ui.perfetto.dev, chrome://tracing and `pdgemm profile`.  Each rank has a row for
        the host (pack, post, wait, product, read, write, redistribute), one for its transfers and, on a GPU, one for
        each stream.  None writes no file.
    nvtx : also mark phases, file access and redistributions as NVTX ranges of the same names; needs the package nvtx.
    overwrite : also replace a file that is not a trace of pdgemm.
    machine : the model whose bandwidths a profile compares with the measured ones; default: that of PDGEMM_MACHINE.

    Cost: less than a microsecond and 200 bytes of memory per span, and 400 bytes more while the file is written; a
    panel has about six spans.  The clocks of nodes are compared before and after the block, to within half of the
    shortest round trip of a message; then each node sends and receives a mebibyte, which shows slow networks.
    Raises FileError or ArgumentError on every rank, before the block or after it; a block that raises leaves no file.
    """
    comm = grid.comm
    with together(comm) as description:
        description += ["trace", path, nvtx, bool(overwrite)]
        if active():
            raise ArgumentError("a trace is being recorded already")
        if nvtx and find_spec("nvtx") is None:
            raise ArgumentError("ranges of NVTX need the package nvtx: pip install nvtx")
        machine = machine or machine_at_hand()
        taken = Trace(path is not None, import_module("nvtx") if nvtx else None)
    if path is None:
        with taking(taken):
            yield
        return
    path = Path(path)
    check_writable_on_all(path, comm, 1 << 16, bool(overwrite), _MARK)
    before = clocks(comm, grid.node)
    with taking(taken):
        yield
    after = clocks(comm, grid.node)
    _write(path, grid, taken.spans, (before, after), network(comm, grid.node), machine, bool(overwrite))


class Clocks(NamedTuple):
    """Readings of the clocks of this rank and of rank 0 at the same time, with the bound of the error; in seconds."""

    here: float
    root: float
    error: float


def clocks(comm: MPI.Comm, node: MPI.Comm, clock: Callable[[], float] = perf_counter) -> Clocks:
    """Compare the clocks of all nodes with the clock of rank 0.  Collective over comm and node.

    The ranks of a node share a clock.  The shortest of many round trips is used: rank 0 read its clock at the middle of
    the round trip, to within half of its length (Cristian, Probabilistic clock synchronization, Distributed Computing
    3, 1989).
    """
    reading = None
    with failures.node_leaders(comm, node) as leaders:
        for other in range(1, leaders.size if leaders else 0):
            if leaders.rank == 0:
                for _ in range(_PINGS):
                    leaders.recv(source=other, tag=_TAG)
                    leaders.send(clock(), dest=other, tag=_TAG)
            elif leaders.rank == other:
                reading = min((_ping(leaders, clock) for _ in range(_PINGS)), key=lambda x: x.error)
    if comm.rank == 0:
        now = clock()
        reading = Clocks(now, now, 0.0)
    return node.bcast(reading, root=0)


def _ping(leaders: MPI.Comm, clock: Callable[[], float]) -> Clocks:
    start = clock()
    leaders.send(None, dest=0, tag=_TAG)
    root = leaders.recv(source=0, tag=_TAG)
    end = clock()
    return Clocks((start + end) / 2, root, (end - start) / 2)


def on_root_clock(before: Clocks, after: Clocks) -> Callable[[float], float]:
    """Return the linear function that maps this rank's clock to rank 0's clock as both comparisons have found."""
    passed = after.here - before.here
    rate = (after.root - before.root) / passed if passed > 0 else 1.0
    return lambda t: before.root + (t - before.here) * rate


def network(comm: MPI.Comm, node: MPI.Comm) -> float | None:
    """Return the bytes per second of this node's network, None on a single node.  Collective over comm and node.

    Each node sends to the next node and receives from the previous node at the same time.  A slow node slows down two
    of these transfers, so the rate of a node is that of the faster of its two transfers.
    """
    bandwidth = None
    with failures.node_leaders(comm, node) as leaders:
        if leaders and leaders.size > 1:
            to, source = (leaders.rank + 1) % leaders.size, (leaders.rank - 1) % leaders.size
            leaving, coming = np.zeros(_PROBE, np.uint8), np.empty(_PROBE, np.uint8)
            for nbytes in (_PROBE // 16, _PROBE):  # the first transfer is the warm-up
                leaders.Barrier()
                start = perf_counter()
                arriving, sent = leaders.Irecv(coming[:nbytes], source), leaders.Isend(leaving[:nbytes], to)
                with Wait(leaders):
                    arriving.Wait()
                rate = nbytes / (perf_counter() - start)
                with Wait(leaders):
                    sent.Wait()
            bandwidth = max(rate, leaders.sendrecv(rate, source, source=to))
    return node.bcast(bandwidth, root=0)


def _write(
    path: Path,
    grid: ProcessGrid,
    spans: Sequence[Span],
    at: tuple[Clocks, Clocks],
    bytes_per_second: float | None,
    machine: Machine,
    overwrite: bool,
) -> None:
    """Write the file one rank after the other, so that no rank holds all spans."""
    comm, align = grid.comm, on_root_clock(*at)
    begun = comm.bcast(at[0].root)
    lines = _events(comm.rank, laid_out(spans), lambda t: 1e6 * (align(t) - begun))
    text = ",\n".join(map(json.dumps, lines))
    mine = {
        "host": platform.node(), "node": grid.nodes[comm.rank], "threads": threads(),
        "cores": sorted(os.sched_getaffinity(0)), "clock_error_us": 1e6 * max(x.error for x in at),
        "network": bytes_per_second,
    }  # fmt: skip
    about = {"pdgemm": __version__, "ranks": comm.gather(mine), "machine": json.loads(machine.as_json())}
    beginning = f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n'
    with replacing(path, comm, 0, overwrite, _MARK) as partial:
        for rank in range(comm.size):
            if comm.rank == rank and rank:
                comm.send(text, dest=0, tag=_TAG)
            elif comm.rank == 0 and rank:
                text = comm.recv(source=rank, tag=_TAG)
            on_root(comm, path, functools.partial(_add, partial, ",\n" if rank else beginning, text))
        on_root(comm, path, functools.partial(_add, partial, "\n]}\n"))


def _add(path: Path, *texts: str) -> None:
    with path.open("a") as file:
        file.writelines(texts)


def laid_out(spans: Iterable[Span]) -> list[tuple[str, Span]]:
    """Return spans and their rows; concurrent transfers have separate rows, because spans of one row may only nest."""
    ends: list[float] = []  # the end of the last transfer of each row
    placed = []
    for span in sorted(spans, key=lambda x: (x.start, -x.end)):
        row = span.row
        if row == MOVING:
            lane = next((n for n, end in enumerate(ends) if end <= span.start), len(ends))
            ends[lane : lane + 1] = [span.end]
            row = f"{MOVING} {lane + 1}"
        placed.append((row, span))
    return placed


def _events(
    rank: int, spans: list[tuple[str, Span]], microseconds: Callable[[float], float]
) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank, with the names of its rows."""
    names = sorted({HOST, *(row for row, _ in spans)}, key=lambda row: (row != HOST, row))
    tids = {row: number for number, row in enumerate(names)}
    yield _named("process_name", rank, 0, name=f"rank {rank} ({platform.node()})")
    yield _named("process_sort_index", rank, 0, sort_index=rank)
    for row, tid in tids.items():
        yield _named("thread_name", rank, tid, name=row)
        yield _named("thread_sort_index", rank, tid, sort_index=tid)
    for row, span in spans:
        arguments = {**({"bytes": span.nbytes} if span.nbytes else {}), **(span.facts() if span.facts else {})}
        start, end = microseconds(span.start), microseconds(span.end)
        event = {"name": span.name, "cat": row.split()[0], "ph": "X", "ts": start, "dur": end - start}
        yield event | {"pid": rank, "tid": tids[row]} | ({"args": arguments} if arguments else {})


def _named(what: str, rank: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": tid, "args": arguments}
