#!/usr/bin/env python3
"""Factorisations and solves by pdgemm.linalg, by ScaLAPACK and by SciPy's LAPACK, taken in turns.

    scripts/benchmarks/setup_peers.sh scalapack; PDGEMM_VENV=.venv-peers; . scripts/env.sh
    python scripts/benchmarks/bench_linalg.py --json linalg.json --markdown linalg.md

Each contender is a job of its own that sleeps while others work.  pdgemm's product of the same size is measured right
before and right after each; what is reported is the flop rate of the function over that of the product.  ScaLAPACK
uses its fastest grid, block size (32, 64, 128, 256) and logical block, pdgemm.linalg its fastest grid, block size and
memory order, SciPy has all threads in one process.

    python scripts/benchmarks/bench_linalg.py --hosts 2x1 --ratio 1 --functions cholesky,lu,qr-r

Between hosts that scripts/hosts.sh makes, what is reported is the time of the function over the limit

    max(product, transfer)      product   of a rank's share alone, while all other ranks form theirs, times the flops of
                                          the function over those of the product
                                transfer  of the bytes that pdgemm's program brings to the busiest host, in the layout
                                          where they are fewest, at the best rate of plain messages both ways at once

and the cables have the rate at which transfer takes RATIO times as long as product.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import click
from bench_gemm import SETTLE
from peers.cables import DEBIAN_MPIRUN, LIMITS, cables, numbers, placed, this_program
from peers.contenders import ABSENT, DRIVERS, Contender
from peers.job import Job, Unable, blas_of_numpy
from peers.tables import cell, machine
from peers.turns import MNK, Result, measure

from pdgemm.local.blas import processors as kernels
from pdgemm.support.files import write_file

FLOPS = {  # over n^3, as LAPACK counts them
    "cholesky": 1 / 3, "trsm": 1, "trmm": 1, "syrk": 1, "lu": 2 / 3, "qr-r": 4 / 3, "qr": 8 / 3,
    "eigh": 14 / 3, "eigh-10%": 5 / 3, "eigvalsh": 4 / 3, "svd": 28 / 3, "svdvals": 8 / 3,
    "qr-pivoted": 4 / 3, "ldl": 1 / 3,
}  # fmt: skip
EXPLAINED = {
    "cholesky": "A = L L^T", "trsm": "A X = B, A lower triangular, B n x n", "trmm": "A B, A lower triangular, B n x n",
    "syrk": "the lower triangle of A A^T, A n x n", "lu": "P A = L U", "qr-r": "R of A = Q R", "qr": "Q and R",
    "eigh": "A V = V D, A symmetric", "eigh-10%": "the lowest n/10 of these pairs", "eigvalsh": "D alone",
    "svd": "A = U S V^T, n x n", "svdvals": "S alone", "qr-pivoted": "R and P of A P = Q R",
    "ldl": "A = L D L^T, symmetric, with pivots",
}  # fmt: skip
PRODUCT = 2  # n^3
LACKS = {("scalapack", "ldl"): "it has no factorisation of a symmetric matrix that is not definite"}


class Yardstick:
    """pdgemm's product of n x n matrices, by a job of its own."""

    name = "product"

    def __init__(self, job: Job, mnk: MNK) -> None:
        self.job, self.mnk = job, mnk
        self.seconds()

    def seconds(self) -> float:
        sleep(SETTLE)
        taken, self.note = self.job.multiply(*self.mnk)
        sleep(SETTLE)
        return taken


class Limit:
    """max(product, transfer) between hosts.   jobs : of LIMITS.   share : of a product.   rate : the cables', bit/s."""

    name = "limit"

    def __init__(self, jobs: dict[str, Job], mnk: MNK, share: float, nbytes: float, rate: float) -> None:
        self.jobs, self.job, self.mnk, self.share = jobs, jobs["product"], mnk, share
        self.nbytes, self.rate, self.carried = nbytes, rate, 0.0
        self.seconds()

    def seconds(self) -> float:
        sleep(SETTLE)
        product = self.share * self.job.multiply(*self.mnk)[0]
        taken, note = self.jobs["exchange"].multiply(*self.mnk)
        self.carried = max(self.carried, float(note.split()[0]) * 1e6 / taken)
        sleep(SETTLE)
        transfer = self.nbytes / self.carried
        self.note = f"product {product:.4f} s, transfer {transfer:.4f} s of {self.nbytes / 1e6:.1f} MB at "
        self.note += f"{self.carried * 8e-6:.0f} Mbit/s by plain messages, cables of {self.rate / 1e6:.0f} Mbit/s"
        return max(product, transfer)


@dataclass(frozen=True)
class Ranks:
    """Where jobs run.   hosts : "2x1" for two hosts with a rank each; None: on this one."""

    number: int
    dtype: str
    hosts: str | None

    def worker(self, name: str) -> str:
        program = f"{shlex.quote(sys.executable)} -m mpi4py {shlex.quote(sys.argv[0])}"
        launcher = f"mpirun {placed(self.hosts)}" if self.hosts else f"mpiexec -n {self.number}"
        return f"{launcher} {program} --dtype {self.dtype} --worker {name}"

    def scalapack(self) -> Contender:
        launcher, driver = shutil.which("mpiexec.openmpi"), DRIVERS / "scalapack_linalg"
        start = f"{DEBIAN_MPIRUN} {placed(self.hosts)}" if self.hosts else f"{launcher} -n {self.number}"
        command = f"{start} {shlex.quote(str(driver))} {{function}} {self.dtype}"
        return Contender("scalapack", command, "" if launcher and driver.exists() else ABSENT)


@click.command(context_settings={"max_content_width": 110})
@click.option("--sizes", default="1024,2048,4096", show_default=True)
@click.option("--functions", default=",".join(FLOPS), show_default=True)
@click.option("--contenders", "patterns", default="*", show_default=True, help='Such as "pdgemm,scipy".')
@click.option("--ranks", default=2, show_default=True)
@click.option("--hosts", help="HOSTSxRANKS, instead of --ranks: RANKS on each of several hosts; without SciPy.")
@click.option("--ratio", default=1.0, show_default=True, help="Of transfer to product, between hosts.")
@click.option("--threads", type=int, help="SciPy's; by default all cores.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@click.option("--quick", is_flag=True, help="Small sizes, once each: does it work?")
@click.option("--json", "json_file", type=click.Path(dir_okay=False))
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False))
@click.option("--worker", hidden=True)
@click.option("--inside", is_flag=True, hidden=True, help="On the first of these hosts.")
def main(
    sizes: str,
    functions: str,
    patterns: str,
    ranks: int,
    hosts: str | None,
    ratio: float,
    threads: int | None,
    repeats: int,
    dtype: str,
    quick: bool,
    json_file: str | None,
    markdown_file: str | None,
    worker: str | None,
    inside: bool,
) -> None:
    """Compare pdgemm.linalg with ScaLAPACK and LAPACK; the yardstick is pdgemm's product on the same ranks.

    Between hosts the yardstick is what the processors and the cables allow, and SciPy does not take part.
    """
    if worker:
        return work(worker, dtype)
    threads = threads or len(os.sched_getaffinity(0))
    wanted, lengths = functions.split(","), [300 if hosts else 40] if quick else whole_numbers(sizes)
    if unknown := [x for x in wanted if x not in FLOPS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(FLOPS)}", param_hint="--functions")
    command = [x for x in sys.argv[1:] if x != "--inside"]
    if hosts:
        number, each = on_hosts(hosts)
        if not inside:
            sys.exit(subprocess.run(this_program(number, *command, "--inside")).returncode)
        ranks = number * each
    repeats = 1 if quick else repeats
    where = Ranks(ranks, dtype, hosts)
    taking = [x for x in contenders(where, threads) if any(fnmatchcase(x.name, y) for y in patterns.split(","))]
    about = machine() | {
        "date": f"{date.today()}", "ranks": ranks, "hosts": hosts, "threads": threads, "dtype": dtype,
        "repeats": repeats, "command": command, "contenders": {x.name: x.command for x in taking},
    }  # fmt: skip
    results: list[Result] = []
    for function, n in itertools.product(wanted, lengths):
        here = measured(where, taking, function, n, repeats, ratio)
        results += here
        click.echo("\n".join([f"{function}, {n}", *(f"  {summary(x, hosts)}" for x in here)]), err=True)
        if json_file:  # after each size: what was measured is not lost
            plain = about | {"results": [plainly(x, hosts) for x in results]}
            write_file(Path(json_file), json.dumps(plain, indent=1) + "\n")
        if markdown_file:
            write_file(Path(markdown_file), markdown(about, results))
    if not markdown_file:
        click.echo(markdown(about, results), nl=False)


def work(worker: str, dtype: str) -> None:
    """As a job of a contender, or of a limit."""
    from mpi4py import MPI
    from peers import linalg_worker
    from peers import worker as products

    contender, _, function = worker.partition(":")
    if contender in LIMITS:
        setting = {"variant": contender, "layout": "own", "dtype": dtype, "order": "C", "block": None}
        return products.serve(MPI.COMM_WORLD, "on_hosts", **setting)
    return linalg_worker.serve(MPI.COMM_WORLD, contender, function, dtype)


def on_hosts(text: str) -> tuple[int, int]:
    try:
        return numbers(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not HOSTSxRANKS", param_hint="--hosts") from None


def measured(where: Ranks, taking: list[Contender], function: str, n: int, repeats: int, ratio: float) -> list[Result]:
    """All contenders in turns; the first result is that of the yardstick."""
    mnk, kernel = (n, n, n), kernels.kernel(blas_of_numpy())
    of_yardstick = Result(function, str(n), mnk, (Limit if where.hosts else Yardstick).name)
    here = [of_yardstick] + [
        Result(function, str(n), mnk, x.name, trouble=x.missing or LACKS.get((x.name, function), "")) for x in taking
    ]
    with ExitStack() as stack:

        def job(command: str) -> Job:
            return stack.enter_context(Job(command, kernel, function=function))

        yardstick: Yardstick | Limit
        try:
            if where.hosts:
                limits = {name: job(where.worker(name)) for name in LIMITS}
                share, planned = FLOPS[function] / PRODUCT, job(where.worker("planned:{function}"))
                nbytes = float(planned.multiply(*mnk)[1].split()[0]) * 1e6
                if not nbytes:
                    raise Unable("in one of its layouts nothing is sent between hosts")
                rate = stack.enter_context(cables(where.hosts, limits["product"], mnk, nbytes, ratio, share))
                yardstick = Limit(limits, mnk, share, nbytes, rate)
            else:
                yardstick = Yardstick(job(where.worker("pdgemm:product")), mnk)
        except Unable as failed:
            of_yardstick.trouble = str(failed)
            for x in here[1:]:
                x.trouble = x.trouble or f"no {of_yardstick.contender}"
            return here
        measure({x.name: job(x.command) for x in taking if not x.missing}, here, where.dtype, repeats, yardstick)
        of_yardstick.kernel, of_yardstick.note = yardstick.job.kernel, yardstick.note
    return here


def whole_numbers(text: str) -> list[int]:
    if not all(x.isdigit() and int(x) for x in text.split(",")):
        raise click.BadParameter(f"{text!r} is not a list of sizes", param_hint="--sizes")
    return [int(x) for x in text.split(",")]


def contenders(where: Ranks, threads: int) -> list[Contender]:
    """pdgemm, ScaLAPACK and, on one host, SciPy, also where they are missing."""
    one = f"env OMP_NUM_THREADS={threads} OPENBLAS_NUM_THREADS={threads}"
    scipy = Contender("scipy", f"{one} {Ranks(1, where.dtype, None).worker('scipy:{function}')}")
    return [
        Contender("pdgemm", where.worker("pdgemm:{function}")),
        where.scalapack(),
        *([] if where.hosts else [scipy]),
    ]


def compared(result: Result, hosts: str | None) -> list[float]:
    """Flop rates over those of pdgemm's product before and after; between hosts, times over the limit then."""
    return [1 / ratio if hosts else FLOPS[result.layout] / PRODUCT * ratio for ratio in result.ratios]


def gigaflops(result: Result) -> list[float]:
    flops = PRODUCT if result.contender == "product" else FLOPS[result.layout]
    return [flops * result.mnk[0] ** 3 / seconds / 1e9 for seconds in result.seconds]


def summary(result: Result, hosts: str | None) -> str:
    """In a line."""
    if not result.seconds:
        return f"{result.contender:10} {result.trouble}"
    ratios = compared(result, hosts)
    ratio = f"{median(ratios):6.2f}" if ratios else 6 * " "
    said = "; ".join(filter(None, (result.kernel, result.unlike and f"no ratio: {result.unlike}", result.note)))
    return f"{result.contender:10} {1e3 * median(result.seconds):9.2f} ms {ratio}  {said}"


def plainly(result: Result, hosts: str | None) -> dict[str, Any]:
    plain, seconds = result.plain(), "limit_seconds" if hosts else "product_seconds"
    plain |= {seconds: plain.pop("numpy"), "function": plain.pop("layout"), "gigaflops": gigaflops(result)}
    return plain | {"time_over_limit" if hosts else "rate_over_product": compared(result, hosts)}


def markdown(about: dict[str, Any], results: list[Result]) -> str:
    """Two tables: what `compared` returns, and GFLOP/s; and how each did it, or why it did not."""
    hosts = about["hosts"]
    compares = (
        "Time over max(product, transfer), right before and after:"
        if hosts
        else "Flop rate over that of pdgemm's product of n x n matrices, right before and after:"
    )
    where = f"{hosts} hosts x ranks, 1 thread each" if hosts else f"{about['ranks']} ranks x 1 thread"
    medians = f"medians of {about['repeats']}, with the least and the most."
    scipy = "" if hosts else f" SciPy: one process, {about['threads']} threads."
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"# Linear algebra in {about['dtype']} on {where}",
        "",
        f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f} before; {about['date']}; {medians}{scipy}",
        f"bench_linalg.py {' '.join(about['command'])}".rstrip() + ".",
        f"BLAS: {'; '.join(about['blas'])}. MPI: {about['mpi']}. {versions}.",
        *(f"Warning: {text}." for text in about["warnings"]),
        "",
        compares,
        "",
        *table(
            [x for x in results if x.contender not in (Yardstick.name, Limit.name)],
            lambda x: x.unlike or cell(compared(x, hosts)),
        ),
        "",
        "GFLOP/s:",
        "",
        *table(results, lambda x: cell(gigaflops(x))),
        "",
    ]
    for x in results:
        if x.trouble or x.note:
            lines.append(f"- {x.layout}, {x.shape}, {x.contender}: {x.trouble or x.note}")
    return "\n".join(lines) + "\n"


def table(results: list[Result], text: Any) -> list[str]:
    """A line for each function and contender, a column for each size."""
    sizes = list(dict.fromkeys(x.shape for x in results))
    cells = {(x.layout, x.contender, x.shape): text(x) for x in results}
    lines = [f"| function | contender | {' | '.join(f'n = {n}' for n in sizes)} |", "|---" * (2 + len(sizes)) + "|"]
    for function, name in dict.fromkeys((x.layout, x.contender) for x in results):
        row = " | ".join(cells.get((function, name, n), "–") for n in sizes)
        lines.append(f"| {function}: {EXPLAINED[function]} | {name} | {row} |")
    return lines


if __name__ == "__main__":
    main()
