"""One run of a command: the grid over all ranks, and the output of rank 0."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import Block
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.observer import Observer
from pdgemm.instrument.report import Summary
from pdgemm.instrument.run_report import RunReport
from pdgemm.io import hdf5
from pdgemm.io.atomic import on_root
from pdgemm.io.source import Source
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.planning.machines.simulator import words_between
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.support import agreement, launcher, signals
from pdgemm.support.text import echo, in_bytes, in_rate, in_seconds
from pdgemm.tools.cli.options import Dataset
from pdgemm.tools.profiling.trace_file import trace

SECONDS_BETWEEN_LINES = 5.0


class Speaker(Observer):
    """The grid of a command, and its output, which only rank 0 writes."""

    def __init__(self, grid: ProcessGrid, as_json: bool) -> None:
        self.grid, self.as_json = grid, as_json
        self.lost = "nothing was written"
        self.facts: dict[str, Any] = {"ranks": grid.size, "grid": grid.shape}
        self._plan: ProductPlan | None = None  # for the page of --report
        self._said = list[str]()  # texts of reports, for the page of --report

    def report(self, key: str, what: Any, several: bool = False) -> None:
        """Report a result, as a line or as a member of the JSON object.   several : the member is a list of results."""
        if self.grid.rank:
            return
        plain = what.as_dict() if isinstance(what, Summary | RunReport) else asdict(what)
        if key == "verify":
            plain |= {"passed": what.passed, "wrong": what.wrong}
        self._said.append(str(what))
        self.note(key, [str(what)], [*self.facts.get(key, []), plain] if several or key == "read" else plain)

    def note(self, key: str, lines: Sequence[str], fact: Any, err: bool = False) -> None:
        """Print lines or, with --json, add a fact to the JSON object."""
        if self.grid.rank:
            return
        self.facts[key] = fact
        for line in lines if not self.as_json else ():
            echo(line, err)

    def warn(self, text: str) -> None:
        """Print a warning on standard error, and keep it for the JSON object.  Rank 0 only."""
        self.facts["warnings"] = [*self.facts.get("warnings", []), text]
        echo(f"pdgemm: warning: {text}", err=True)

    def read(self, x: Source, block: Block | None) -> DistMatrix:
        """Read a matrix, or its transpose where the op of its source is not "N"."""
        return x.read_again(self, self.grid, block, device="host")

    def save(self, output: Dataset, matrix: DistMatrix | np.ndarray, several: bool = False, **options: Any) -> None:
        """Write a matrix.   several : the command writes several matrices, as a list in the JSON object."""
        with self.progress("write", prod(matrix.shape) * matrix.dtype.itemsize, "B/s") as progress:
            wrote = hdf5.save(*output, matrix, grid=self.grid, progress=progress, **options)
        self.report("wrote", wrote, several)

    def planned(self, plan: ProductPlan) -> None:
        self._plan = plan

    @contextmanager
    def traced(self, path: str | None, nvtx: bool, page: str | None, force: bool, of: str = "") -> Iterator[None]:
        """Trace the `with` block if a trace file, NVTX ranges or a page was requested; write the file and the page.

        page : an HTML file for the trace and the reports.   of : the name of the result, for the heading of the page.
        """
        if page is None:
            with trace(path, self.grid, nvtx=nvtx, overwrite=force) if path or nvtx else nullcontext():
                yield
            return
        from pdgemm.tools.profiling.profile import load_profile
        from pdgemm.tools.studies.pictures import check_page, draw_timeline

        comm, out, words = self.grid.comm, Path(page), None
        file = Path(path or out.with_name(f".{out.name}.trace.json"))  # removed at the end unless it was requested
        on_root(comm, out, lambda: check_page(out, force))  # before the product, not after it
        with trace(file, self.grid, nvtx=nvtx, overwrite=force):
            yield
        said = "\n".join(self._said)
        title = next((f"{of}: {line.partition(',')[0]}" for line in said.splitlines() if " := " in line), of)
        if self._plan is not None and self.grid.rank == 0:
            with suppress(ArgumentError):  # too many ranks for a picture
                words = words_between(self._plan.product, self.grid.size)
        try:
            on_root(comm, out, lambda: draw_timeline(load_profile(file, spans=True), out, title, said, words))
        finally:
            if path is None and self.grid.rank == 0:
                file.unlink(missing_ok=True)
        self.note("report", [f"wrote {page}"], page)

    @contextmanager
    def progress(
        self, what: str, amount: float = 0, unit: str = "FLOP/s"
    ) -> Iterator[Callable[[int, int], object] | None]:
        """Announce a piece of work, and provide a function that prints its progress; None where no lines are printed.

        amount : bytes or floating-point operations of the whole work; 0: unknown.   unit : the unit of their rate.
        """
        signals.doing(what, self.lost)
        yield None if self.grid.rank or self.as_json else ProgressLines(what, amount, unit)


class ProgressLines:
    """Progress lines on standard error, one every few seconds, with the share of the work that is done and its rate.

    amount, unit : as in `Speaker.progress`.
    """

    def __init__(self, what: str, amount: float, unit: str) -> None:
        self._what, self._amount, self._in_bytes = what, amount, unit == "B/s"
        self._start, self._last = perf_counter(), 0.0

    def __call__(self, done: int, total: int) -> None:
        now, share = perf_counter() - self._start, done / max(total, 1)
        if now - self._last < SECONDS_BETWEEN_LINES or not 0 < share < 1:
            return
        self._last = now
        rate = share * self._amount / now
        rate_text = f"{in_bytes(rate)}/s" if self._in_bytes else in_rate(rate)
        parts = f"{share:.0%} in {in_seconds(now)}", rate_text * (rate > 0), f"{in_seconds(now / share - now)} left"
        echo(f"{self._what}: {', '.join(filter(None, parts))}", err=True)


@contextmanager
def session(grid_shape: tuple[int, int] | None, as_json: bool) -> Iterator[Speaker]:
    """Provide a `Speaker` with a grid of all ranks; print its JSON object at the end."""
    check_launcher(MPI.COMM_WORLD.size)
    start = perf_counter()
    with ProcessGrid(MPI.COMM_WORLD, grid_shape) as grid, warnings.catch_warnings():
        say = Speaker(grid, as_json)
        agreement.print_once(say.warn)
        yield say
        if as_json and grid.rank == 0:
            say.facts["seconds"] = perf_counter() - start
            echo(json.dumps(say.facts, default=str))


def check_launcher(size: int) -> None:
    """Raise ArgumentError where a launcher of another MPI library has started separate processes."""
    started, name = launcher.said_size()
    if size == 1 and started > 1:
        library = MPI.Get_library_version().split(",")[0].split("\n")[0]
        raise ArgumentError(
            f"the launcher started {started} processes ({name}), but MPI sees one: the launcher belongs to "
            f"another MPI than mpi4py's {library}; use that library's mpiexec, or set MPI4PY_LIBMPI"
        )
