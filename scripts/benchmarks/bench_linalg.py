#!/usr/bin/env python3
"""Factorisations and solves by pdgemm.linalg, by ScaLAPACK and by SciPy's LAPACK, taken in turns.

    scripts/benchmarks/setup_peers.sh scalapack; PDGEMM_VENV=.venv-peers; . scripts/env.sh
    python scripts/benchmarks/bench_linalg.py --json linalg.json --markdown linalg.md

Each contender is a job of its own that sleeps while others work.  pdgemm's product of the same size is measured right
before and right after each; what is reported is the flop rate of the function over that of the product.  ScaLAPACK
uses its fastest grid, block size (32, 64, 128, 256) and logical block, pdgemm.linalg its fastest grid, block size and
memory order, SciPy has all threads in one process.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from contextlib import ExitStack
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from time import sleep
from typing import Any

import click
from bench_gemm import SETTLE
from peers.contenders import ABSENT, DRIVERS, Contender
from peers.job import Job, Unable, blas_of_numpy
from peers.tables import cell, machine
from peers.turns import MNK, Result, measure

from pdgemm.local.blas import processors as kernels
from pdgemm.support.files import write_file

FLOPS = {  # over n^3, as LAPACK counts them
    "cholesky": 1 / 3, "trsm": 1, "trmm": 1, "syrk": 1, "lu": 2 / 3, "qr-r": 4 / 3, "qr": 8 / 3,
    "eigh": 14 / 3, "eigh-10%": 5 / 3, "eigvalsh": 4 / 3, "svdvals": 8 / 3,
}  # fmt: skip
EXPLAINED = {
    "cholesky": "A = L L^T", "trsm": "A X = B, A lower triangular, B n x n", "trmm": "A B, A lower triangular, B n x n",
    "syrk": "the lower triangle of A A^T, A n x n", "lu": "P A = L U", "qr-r": "R of A = Q R", "qr": "Q and R",
    "eigh": "A V = V D, A symmetric", "eigh-10%": "the lowest n/10 of these pairs", "eigvalsh": "D alone",
    "svdvals": "the singular values of A, n x n",
}  # fmt: skip
PRODUCT = 2  # n^3


class Yardstick:
    """pdgemm's product of n x n matrices, by a job of its own."""

    def __init__(self, job: Job, mnk: MNK) -> None:
        self.job, self.mnk = job, mnk
        self.seconds()

    def seconds(self) -> float:
        sleep(SETTLE)
        taken, self.note = self.job.multiply(*self.mnk)
        sleep(SETTLE)
        return taken


@click.command(context_settings={"max_content_width": 110})
@click.option("--sizes", default="1024,2048,4096", show_default=True)
@click.option("--functions", default=",".join(FLOPS), show_default=True)
@click.option("--contenders", "patterns", default="*", show_default=True, help='Such as "pdgemm,scipy".')
@click.option("--ranks", default=2, show_default=True)
@click.option("--threads", type=int, help="SciPy's; by default all cores.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@click.option("--quick", is_flag=True, help="Small sizes, once each: does it work?")
@click.option("--json", "json_file", type=click.Path(dir_okay=False))
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False))
@click.option("--worker", hidden=True)
def main(
    sizes: str,
    functions: str,
    patterns: str,
    ranks: int,
    threads: int | None,
    repeats: int,
    dtype: str,
    quick: bool,
    json_file: str | None,
    markdown_file: str | None,
    worker: str | None,
) -> None:
    """Compare pdgemm.linalg with ScaLAPACK and LAPACK; the yardstick is pdgemm's product on the same ranks."""
    if worker:
        from mpi4py import MPI
        from peers.linalg_worker import serve

        contender, _, function = worker.partition(":")
        return serve(MPI.COMM_WORLD, contender, function, dtype)

    threads = threads or len(os.sched_getaffinity(0))
    wanted, lengths = functions.split(","), [40] if quick else whole_numbers(sizes)
    if unknown := [x for x in wanted if x not in FLOPS]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(FLOPS)}", param_hint="--functions")
    repeats = 1 if quick else repeats
    kernel = kernels.kernel(blas_of_numpy())
    known = contenders(ranks, threads, dtype)
    taking = [x for x in known if any(fnmatchcase(x.name, pattern) for pattern in patterns.split(","))]
    about = machine() | {
        "date": f"{date.today()}", "ranks": ranks, "threads": threads, "dtype": dtype, "repeats": repeats,
        "command": sys.argv[1:], "contenders": {x.name: x.command for x in taking},
    }  # fmt: skip
    results: list[Result] = []
    for function in wanted:
        with ExitStack() as stack:
            jobs = {
                x.name: stack.enter_context(Job(x.command, kernel, function=function)) for x in taking if not x.missing
            }
            product = stack.enter_context(Job(known[0].command, kernel, function="product"))
            for n in lengths:
                here = [Result(function, str(n), (n, n, n), "product")]
                here += [Result(function, str(n), (n, n, n), x.name, trouble=x.missing) for x in taking]
                try:
                    yardstick = Yardstick(product, (n, n, n))
                except Unable as failed:
                    raise click.ClickException(f"pdgemm's product: {failed}") from None
                measure(jobs, here, dtype, repeats, yardstick)
                here[0].kernel, here[0].note = product.kernel, yardstick.note
                results += here
                click.echo("\n".join([f"{function}, {n}", *(f"  {summary(x)}" for x in here)]), err=True)
                if json_file:  # after each size: what was measured is not lost
                    plain = about | {"results": [plainly(x) for x in results]}
                    write_file(Path(json_file), json.dumps(plain, indent=1) + "\n")
                if markdown_file:
                    write_file(Path(markdown_file), markdown(about, results))
    if not markdown_file:
        click.echo(markdown(about, results), nl=False)


def whole_numbers(text: str) -> list[int]:
    if not all(x.isdigit() and int(x) for x in text.split(",")):
        raise click.BadParameter(f"{text!r} is not a list of sizes", param_hint="--sizes")
    return [int(x) for x in text.split(",")]


def contenders(ranks: int, threads: int, dtype: str) -> list[Contender]:
    """pdgemm, ScaLAPACK and SciPy, also where they are missing."""
    program = f"{shlex.quote(sys.executable)} -m mpi4py {shlex.quote(sys.argv[0])} --dtype {dtype} --worker"
    launcher, driver = shutil.which("mpiexec.openmpi"), DRIVERS / "scalapack_linalg"
    scalapack = f"{launcher} -n {ranks} {shlex.quote(str(driver))} {{function}} {dtype}"
    one = f"env OMP_NUM_THREADS={threads} OPENBLAS_NUM_THREADS={threads} mpiexec -n 1"
    return [
        Contender("pdgemm", f"mpiexec -n {ranks} {program} pdgemm:{{function}}"),
        Contender("scalapack", scalapack, "" if launcher and driver.exists() else ABSENT),
        Contender("scipy", f"{one} {program} scipy:{{function}}"),
    ]


def rates(result: Result) -> list[float]:
    """Flop rates of the function over those of pdgemm's product before and after it."""
    return [FLOPS[result.layout] / PRODUCT * ratio for ratio in result.ratios]


def gigaflops(result: Result) -> list[float]:
    flops = PRODUCT if result.contender == "product" else FLOPS[result.layout]
    return [flops * result.mnk[0] ** 3 / seconds / 1e9 for seconds in result.seconds]


def summary(result: Result) -> str:
    """In a line."""
    if not result.seconds:
        return f"{result.contender:10} {result.trouble}"
    ratio = f"{median(rates(result)):6.2f}" if rates(result) else 6 * " "
    said = "; ".join(filter(None, (result.kernel, result.unlike and f"no ratio: {result.unlike}", result.note)))
    return f"{result.contender:10} {1e3 * median(result.seconds):9.2f} ms {ratio}  {said}"


def plainly(result: Result) -> dict[str, Any]:
    found = result.plain()
    found["product_seconds"] = found.pop("numpy")
    return found | {"function": found.pop("layout"), "gigaflops": gigaflops(result), "rate_over_product": rates(result)}


def markdown(about: dict[str, Any], results: list[Result]) -> str:
    """Two tables: flop rates over that of pdgemm's product, and GFLOP/s; and how each did it, or why it did not."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"# Linear algebra in {about['dtype']} on {about['ranks']} ranks x 1 thread",
        "",
        f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f} before; {about['date']}; medians of "
        f"{about['repeats']}, with the least and the most. SciPy: one process, {about['threads']} threads.",
        f"bench_linalg.py {' '.join(about['command'])}".rstrip() + ".",
        f"BLAS: {'; '.join(about['blas'])}. MPI: {about['mpi']}. {versions}.",
        *(f"Warning: {text}." for text in about["warnings"]),
        "",
        "Flop rate over that of pdgemm's product of n x n matrices, right before and after:",
        "",
        *table([x for x in results if x.contender != "product"], lambda x: x.unlike or cell(rates(x))),
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
