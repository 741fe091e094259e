#!/usr/bin/env python3
"""Between hosts: how far is each algorithm from what the processors and the cables allow?

    scripts/benchmarks/setup_peers.sh scalapack; . scripts/env.sh
    python scripts/benchmarks/bench_hosts.py --json hosts.json

Several hosts are made on this machine by scripts/hosts.sh.  For each shape the cables are given the rate at which what
SUMMA brings to a host takes RATIO times as long as its product.  The limit of an algorithm is

    max(product, transfer)      product   of a rank's share alone, while all other ranks form theirs
                                transfer  of the bytes that its plan brings to the busiest host, redistribution
                                          included, at the best rate of plain messages in both directions at once

The model is calibrated at that rate, as on a cluster: `auto` chooses by it, and its predictions are printed.

Product, exchange and all contenders are taken in turns; contenders are jobs of their own that sleep meanwhile.  The
first of them, "both", is the product and that exchange by plain messages, at once and independent of each other: the
processors that multiply also do the work of TCP, so that no algorithm may come nearer to the limit.  Where there are
more ranks than processors, the ranks share them; the product alone does so, too, and the table says so.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import click
from bench_peers import chosen, plugged_in
from peers.cables import (
    BOTH,
    DEBIAN_MPIRUN,
    LIMITS,
    TENSOR_PARALLEL,
    bytes_into_a_host,
    cables,
    numbers,
    placed,
    this_program,
)
from peers.contenders import ABSENT, DRIVERS, Contender
from peers.job import Job, Unable, blas_of_numpy

from pdgemm.local.blas import processors as kernels

ALGORITHMS = (BOTH, "auto", "summa", "cannon", "2.5d", "inner", "stationary_a", "stationary_b")
LAYOUTS = ("own", "blocks", "columns", *TENSOR_PARALLEL)
SHAPES = "3072,65536x512x512,512x512x65536,6144x6144x512"
TOLD = re.compile(r"([\d.]+) MB, (?:([\d.]+) s, )?")
HOPELESS = 12  # times the product: who takes longer in the first turn has no other


@dataclass
class Row:
    """hosts: "2x1" for two hosts with a rank each.  asked: transfer over product that was aimed at.

    megabytes: that enter the busiest host; None where they are not known.  predicted: seconds, by the calibration.
    once: it was so slow that it had one turn.
    """

    hosts: str
    layout: str
    shape: str
    asked: float
    contender: str
    product: float = 0.0
    exchange_rate: float = 0.0
    seconds: list[float] = field(default_factory=list)
    megabytes: float | None = None
    predicted: float | None = None
    note: str = ""
    trouble: str = ""
    once: bool = False

    @property
    def limit(self) -> float | None:
        """Seconds that it takes at least."""
        return None if self.megabytes is None else max(self.product, self.megabytes * 1e6 / self.exchange_rate)

    def line(self) -> str:
        if not self.seconds:
            return f"  {self.contender:14} {self.trouble}"
        limit = f"{median(self.seconds) / self.limit:5.2f} of {self.limit:.3f} s" if self.limit else 16 * " "
        sent = "" if self.megabytes is None else f"{self.megabytes:7.1f} MB"
        predicted = "" if self.predicted is None else f"predicted {self.predicted:.3f} s, "
        once = "once, " if self.once else ""
        return f"  {self.contender:14} {median(self.seconds):7.3f} s  {limit}  {sent:10}  {once}{predicted}{self.note}"


@click.command(context_settings={"max_content_width": 110})
@click.option("--hosts", default="2x1,3x1,2x2,4x1", show_default=True, help="HOSTSxRANKS, RANKS on each.")
@click.option("--ratios", default="0.25,1,4", show_default=True, help="Of transfer to product.")
@click.option("--shapes", default=SHAPES, show_default=True, help="N or MxNxK.")
@click.option("--layouts", default="own,columns", show_default=True, help=f"Of {', '.join(LAYOUTS)}.")
@click.option("--algorithms", default=",".join(ALGORITHMS), show_default=True)
@click.option("--scalapack/--no-scalapack", default=True, show_default=True)
@click.option("--external", multiple=True, help='"NAME=COMMAND", as of bench_peers.py; repeatable.')
@click.option("--repeats", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False))
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False))
@click.option("--worker", hidden=True)
@click.option("--inside", hidden=True, help="HOSTSxRANKS, on the first of these hosts.")
def main(
    hosts: str,
    ratios: str,
    shapes: str,
    layouts: str,
    algorithms: str,
    scalapack: bool,
    external: tuple[str, ...],
    repeats: int,
    json_file: str | None,
    markdown_file: str | None,
    worker: str | None,
    inside: str | None,
) -> None:
    """Multiply on several hosts with all algorithms, and print the time over that of the limit.

    \b
    Layouts:
      own      each algorithm's matrices lie where it moves nothing before and after its products, on its best grid
      blocks   one block per rank of the squarest grid, for all
      columns  one block of columns per rank, for all
      column-parallel, row-parallel
               those of docs/tensor_parallel.md: the cables have the rate at which what these layouts need takes RATIO
               times as long as the product
    """
    if worker:
        from mpi4py import MPI
        from peers.worker import serve

        setting = {"variant": worker, "layout": layouts, "dtype": "float64", "order": "C", "block": None}
        return serve(MPI.COMM_WORLD, "on_hosts", **setting)
    if inside:
        taking = [(name, job_of(name)) for name in algorithms.split(",")]
        if scalapack:
            missing = "" if (DRIVERS / "scalapack_gemm_256").exists() else ABSENT
            command = f"{DEBIAN_MPIRUN} {{ranks}} {DRIVERS}/scalapack_gemm_256 float64 "
            taking.append(("scalapack", Contender("scalapack", command + "{library_layout}", missing)))
        taking += [(x.name, x) for x in map(plugged_in, external)]
        for layout in layouts.split(","):
            on_these_hosts(inside, layout, chosen(shapes), [float(x) for x in ratios.split(",")], dict(taking), repeats)
        return None
    rows: list[Row] = []
    given = [f"--{name}={value}" for name, value in (("ratios", ratios), ("shapes", shapes), ("layouts", layouts))]
    given += [f"--algorithms={algorithms}", f"--repeats={repeats}", *(f"--external={x}" for x in external)]
    given += [] if scalapack else ["--no-scalapack"]
    for here in hosts.split(","):
        on_hosts = this_program(numbers(here)[0], "--inside", here, *given)
        with subprocess.Popen(on_hosts, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    rows.append(Row(**json.loads(line)))
                    click.echo(rows[-1].line())
                else:
                    click.echo(line, nl=False)
                if json_file:
                    Path(json_file).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
                if markdown_file:
                    Path(markdown_file).write_text(table(rows))
        if process.returncode:
            sys.exit(process.returncode)
    return None


def job_of(worker: str) -> Contender:
    program = f"{shlex.quote(sys.executable)} -m mpi4py {shlex.quote(sys.argv[0])}"
    return Contender(worker, f"mpirun {{ranks}} {program} --worker {worker} --layouts {{layout}}")


def on_these_hosts(
    hosts: str,
    layout: str,
    shapes: dict[str, tuple[int, int, int]],
    ratios: list[float],
    taking: dict[str, Contender],
    repeats: int,
) -> None:
    """Measure all shapes and rates, and print a row of JSON for each contender."""
    number, each = numbers(hosts)
    library_layout = "columns" if layout == "columns" else "native"
    values = {"ranks": placed(hosts), "layout": layout, "library_layout": library_layout}
    kernel, processors = kernels.kernel(blas_of_numpy()), len(os.sched_getaffinity(0)) * number
    with ExitStack() as stack:

        def job(contender: Contender) -> Job:
            return Job(contender.command, kernel, **values)

        limits = {name: stack.enter_context(job(job_of(name))) for name in LIMITS}
        for (shape, mnk), ratio in itertools.product(shapes.items(), ratios):
            rows = [Row(hosts, layout, shape, ratio, name, trouble=x.missing) for name, x in taking.items()]
            nbytes = bytes_into_a_host(mnk, number, layout)
            with cables(hosts, limits["product"], mnk, nbytes, ratio) as rate, ExitStack() as here:
                jobs = {x.name: here.enter_context(job(x)) for x in taking.values() if not x.missing}
                measure(limits, jobs, rows, mnk, repeats)
            shared = f", {number * each} ranks share {processors} processors" * (number * each > processors)
            print(
                f"{hosts}, {layout}, {shape}: product {rows[0].product:.3f} s, cable {rate / 1e6:.0f} Mbit/s, "
                f"plain messages {rows[0].exchange_rate * 8e-6:.0f} Mbit/s both ways{shared}"
            )
            for row in rows:
                print(json.dumps(asdict(row)), flush=True)


def measure(
    limits: dict[str, Job], jobs: dict[str, Job], rows: list[Row], mnk: tuple[int, int, int], repeats: int
) -> None:
    """Take all in turns; the first turn does not count, but for contenders that are hopeless: they have that one."""
    product, rate = list[float](), list[float]()
    for turn in range(repeats + 1):
        product.append(limits["product"].multiply(*mnk)[0])
        seconds, note = limits["exchange"].multiply(*mnk)
        rate.append(float(note.split()[0]) * 1e6 / seconds)
        for row in rows:
            if row.trouble or row.once:
                continue
            try:
                seconds, note = jobs[row.contender].multiply(*mnk)
            except Unable as failed:
                row.trouble, row.seconds = str(failed), []
                continue
            if told := TOLD.match(note):
                row.megabytes, row.predicted, row.note = (
                    float(told[1]),
                    float(told[2]) if told[2] else None,
                    note[told.end() :],
                )
            else:
                row.note = note
            row.once = turn == 0 and seconds > HOPELESS * product[0]
            row.seconds += [seconds] * (turn > 0 or row.once)
    for row in rows:
        row.product, row.exchange_rate = median(product[1:]), max(rate)


def table(rows: list[Row]) -> str:
    """Time over the limit, and the seconds, of each contender."""
    names = list(dict.fromkeys(row.contender for row in rows))
    lines = [
        "| hosts | layout | shape | transfer / product | " + " | ".join(names) + " |",
        "|---" * (4 + len(names)) + "|",
    ]
    cases = dict.fromkeys((row.hosts, row.layout, row.shape, row.asked) for row in rows)
    for case in cases:
        here = {row.contender: row for row in rows if (row.hosts, row.layout, row.shape, row.asked) == case}
        cells = []
        for name in names:
            row = here.get(name)
            text = "" if row is None or not row.seconds else f"{median(row.seconds):.2f} s"
            cells.append(f"{text} ({median(row.seconds) / row.limit:.2f})" if text and row and row.limit else text)
        lines.append("| " + " | ".join([*map(str, case), *cells]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
