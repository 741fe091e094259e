"""One run of a command: the grid over all ranks, and the output of rank 0."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from time import perf_counter
from typing import Any

import click
from mpi4py import MPI
from rich.console import Console
from rich.progress import Progress

from pdgemm.cli.param_types import Dataset
from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.report import Summary
from pdgemm.io import hdf5
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import DeviceName, DType
from pdgemm.profiling.trace_file import trace
from pdgemm.support import launcher, signals

SECONDS_BETWEEN_LINES = 5.0


class Speaker:
    """The grid of a command, and its output, which only rank 0 writes."""

    def __init__(self, grid: ProcessGrid, as_json: bool) -> None:
        self.grid, self.as_json = grid, as_json
        self.lost = "nothing was written"
        self.facts: dict[str, Any] = {"ranks": grid.size, "grid": grid.shape}
        self._console = Console(stderr=True)
        self._bar = grid.rank == 0 and self._console.is_terminal and not as_json

    def report(self, key: str, what: Any) -> None:
        """Report a result, as a line or as a member of the JSON object."""
        if self.grid.rank:
            return
        plain = what.as_dict() if isinstance(what, Summary) else asdict(what)
        if key == "verify":
            plain["passed"] = what.passed
        self.facts[key] = [*self.facts.get(key, []), plain] if key == "read" else plain
        if not self.as_json:
            say_line(str(what))

    def load(
        self,
        what: str,
        dataset: Dataset,
        block: tuple[int, int] | None,
        dtype: DType | None = None,
        op: str = "N",
        device: DeviceName = "host",
    ) -> DistMatrix:
        with self.progress(f"read {what}") as progress:
            transpose = op.upper() != "N"
            matrix = hdf5.load(
                *dataset, self.grid, block, dtype=dtype, transpose=transpose, device=device, progress=progress
            )
        self.report("read", matrix.report)
        return matrix.T.H if op.upper() == "C" else matrix

    def traced(self, path: str | None, nvtx: bool) -> AbstractContextManager[None]:
        """Return a context manager that traces its block, if a trace was requested."""
        return trace(path, self.grid, nvtx=nvtx) if path or nvtx else nullcontext()

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], object] | None]:
        """Show a bar where rank 0 has a terminal, else a line every few seconds, as under mpirun."""
        signals.doing(what, self.lost)
        if not self._bar:
            yield None if self.grid.rank or self.as_json else _Lines(what)
            return
        with Progress(console=self._console, transient=True) as bars:
            bar = bars.add_task(what, total=None)
            yield lambda done, total: bars.update(bar, completed=done, total=total)


class _Lines:
    """Says on standard error how much of something is done, every few seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._start = what, perf_counter()
        self._last = self._start

    def __call__(self, done: int, total: int) -> None:
        now = perf_counter()
        if now - self._last < SECONDS_BETWEEN_LINES or not 0 < done < total:
            return
        self._last, left = now, (now - self._start) * (total - done) / done
        click.echo(f"{self._what}: {done / total:.0%} in {now - self._start:.0f} s, {left:.0f} s left", err=True)


def say_line(text: str) -> None:
    """Print a line to standard output; the work continues where it is closed."""
    try:
        click.echo(text)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def session(grid_shape: tuple[int, int] | None, as_json: bool) -> Iterator[Speaker]:
    """Provide the output over a grid of all ranks; print the JSON object at the end."""
    check_launcher(MPI.COMM_WORLD.size)
    start = perf_counter()
    with ProcessGrid(MPI.COMM_WORLD, grid_shape) as grid:
        say = Speaker(grid, as_json)
        yield say
        if as_json and grid.rank == 0:
            say.facts["seconds"] = perf_counter() - start
            say_line(json.dumps(say.facts, default=str))


def check_launcher(size: int) -> None:
    """Raise ArgumentError where a launcher of another MPI library has started separate processes."""
    started, name = launcher.said_size()
    if size == 1 and started > 1:
        library = MPI.Get_library_version().split(",")[0].split("\n")[0]
        raise ArgumentError(
            f"the launcher started {started} processes ({name}), but MPI sees one: the launcher belongs to "
            f"another MPI than mpi4py's {library}; use that library's mpiexec, or set MPI4PY_LIBMPI"
        )
