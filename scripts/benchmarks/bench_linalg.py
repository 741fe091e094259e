#!/usr/bin/env python3
"""Factorisations and solves by pdgemm.linalg, by ScaLAPACK and by SciPy's LAPACK, taken in turns.

    scripts/benchmarks/setup_peers.sh scalapack; PDGEMM_VENV=.venv-peers; . scripts/env.sh
    python scripts/benchmarks/bench_linalg.py --json linalg.json

Each contender is a separate job that sleeps while others work.  pdgemm's product of the same size is measured right
before and right after each contender; the reported ratio is the flop rate of the function over that of the product.
ScaLAPACK uses its fastest grid, block size (32, 64, 128, 256) and logical block, pdgemm.linalg its fastest grid, block
size and memory order, and SciPy all threads in one process.

    python scripts/benchmarks/bench_linalg.py --hosts 2x1 --ratio 1 --functions cholesky,lu,qr-r

Between hosts, which scripts/hosts.sh makes, the reported ratio is the time of the function over the limit

    max(product, transfer)      product   seconds of a rank's share of the product, while all other ranks compute
                                          theirs, times the flops of the function over the flops of the product
                                transfer  seconds of the bytes that the busiest host receives by pdgemm's program (in
                                          the layout that needs fewest), at the best rate of plain messages both ways

and the rate of the cables is set such that transfer takes RATIO times as long as product.
"""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from fnmatch import fnmatchcase
from time import sleep

import click
from peers.job import Job, Unable, blas_of_numpy
from peers.places import LIMITS, Contender, Limit, Place, cables
from peers.results import MNK, SETTLE, Result, Yardstick, measure, options, report

from pdgemm.local.blas import processors as kernels

PRODUCT = 2  # flops over n^3
FUNCTIONS = {  # flops over n^3, as LAPACK counts them
    "cholesky": (1 / 3, "A = L L^T"),
    "trsm": (1, "A X = B, A lower triangular, B n x n"),
    "trmm": (1, "A B, A lower triangular, B n x n"),
    "syrk": (1, "the lower triangle of A A^T, A n x n"),
    "lu": (2 / 3, "P A = L U"),
    "qr-r": (4 / 3, "R of A = Q R"),
    "qr": (8 / 3, "Q and R"),
    "eigh": (14 / 3, "A V = V D, A symmetric"),
    "eigh-10%": (5 / 3, "the lowest n/10 of these pairs"),
    "eigvalsh": (4 / 3, "only D"),
    "svd": (28 / 3, "A = U S V^T, n x n"),
    "svdvals": (8 / 3, "only S"),
    "qr-pivoted": (4 / 3, "R and P of A P = Q R"),
}


class Product:
    """pdgemm's product of n x n matrices, in a separate job."""

    def __init__(self, job: Job, mnk: MNK) -> None:
        self.job, self.mnk = job, mnk
        self.seconds()

    def seconds(self) -> float:
        sleep(SETTLE)
        taken, self.note = self.job.multiply(*self.mnk)
        sleep(SETTLE)
        return taken

    def bound(self, seconds: float, note: str) -> float:
        return seconds


@click.command(context_settings={"max_content_width": 110})
@click.option("--sizes", default="1024,2048,4096", show_default=True)
@click.option("--functions", default=",".join(FUNCTIONS), show_default=True)
@click.option("--contenders", "patterns", default="*", show_default=True, help='Such as "pdgemm,scipy".')
@click.option("--ranks", default=2, show_default=True)
@click.option("--hosts", help="Several hosts instead of --ranks: 2x4 is 2 hosts of 4 ranks each.  SciPy is left out.")
@click.option("--ratio", default=1.0, show_default=True, help="Ratio of transfer to product, between hosts.")
@click.option("--threads", type=int, help="Threads of SciPy; by default all cores.")
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@click.option("--inside", is_flag=True, hidden=True, help="This command runs on the first of these hosts.")
@options
def main(
    sizes: str,
    functions: str,
    patterns: str,
    ranks: int,
    hosts: str | None,
    ratio: float,
    threads: int | None,
    dtype: str,
    inside: bool,
    repeats: int,
    quick: bool,
    json_file: str | None,
) -> None:
    """Compare pdgemm.linalg with ScaLAPACK and LAPACK; the yardstick is pdgemm's product on the same ranks.

    Between hosts the yardstick is the limit of the processors and the cables, and SciPy does not take part.
    """
    wanted, repeats = functions.split(","), 1 if quick else repeats
    if unknown := [x for x in wanted if x not in FUNCTIONS]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(FUNCTIONS)}", param_hint="--functions")
    if not all(x.isdigit() and int(x) for x in sizes.split(",")):
        raise click.BadParameter(f"{sizes!r} is not a list of sizes", param_hint="--sizes")
    lengths = [300 if hosts else 40] if quick else [int(x) for x in sizes.split(",")]
    place = Place.between(hosts) if hosts else Place(ranks)
    if hosts:
        place.enter()
    known = contenders(place, dtype, threads or len(os.sched_getaffinity(0)))
    taking = [x for x in known if any(fnmatchcase(x.name, y) for y in patterns.split(","))]
    cases = (case(place, taking, f, n, dtype, repeats, ratio) for f, n in itertools.product(wanted, lengths))
    compares = "Flop rate over that of pdgemm's product of n x n matrices, measured right before and after it:"
    if hosts:
        compares = "Time over max(product, transfer), which are measured right before and after it:"
    about = {
        "ranks": place.ranks,
        "hosts": hosts,
        "repeats": repeats,
        "contenders": {x.name: x.command for x in taking},
    }
    report(cases, f"Linear algebra in {dtype} on {place.name}", compares, about, json_file)


def contenders(place: Place, dtype: str, threads: int) -> list[Contender]:
    """Return pdgemm, ScaLAPACK and, on one host, SciPy; some may not be installed."""
    ours = Contender("pdgemm", place.python("with_linalg", "pdgemm:{function}", "native", dtype))
    scipy = Place(1).python("with_linalg", "scipy:{function}", "native", dtype)
    one = f"env OMP_NUM_THREADS={threads} OPENBLAS_NUM_THREADS={threads} {scipy}"
    scalapack = place.driver("scalapack", "scalapack_linalg", f"{{function}} {dtype}")
    return [ours, scalapack, *([] if place.hosts else [Contender("scipy", one)])]


def case(
    place: Place, taking: list[Contender], function: str, n: int, dtype: str, repeats: int, ratio: float
) -> list[Result]:
    """Return the results of the yardstick and of all contenders, taken in turns."""
    mnk, kernel, (flops, explained) = (n, n, n), kernels.kernel(blas_of_numpy()), FUNCTIONS[function]
    share, over = flops / PRODUCT, place.hosts > 0
    results = [Result(f"{function}: {explained}", str(n), mnk, "limit" if over else "product", over=over)]
    for x in taking:
        trouble = x.missing
        results.append(Result(results[0].layout, str(n), mnk, x.name, scale=share, over=over, trouble=trouble))
    with ExitStack() as stack:

        def job(command: str) -> Job:
            return stack.enter_context(Job(command, kernel, function=function))

        try:
            yardstick: Yardstick
            if not over:
                yardstick = Product(job(place.python("with_linalg", "pdgemm:product", "native", dtype)), mnk)
            else:
                limits = {name: job(place.python("on_hosts", name, "own", dtype)) for name in LIMITS}
                planned = job(place.python("with_linalg", "planned:{function}", "native", dtype))
                nbytes = float(planned.multiply(*mnk)[1].split()[0]) * 1e6
                if not nbytes:
                    raise Unable("in one of the layouts nothing is sent between hosts")
                rate = stack.enter_context(cables(place, limits["product"], mnk, nbytes, ratio, share))
                yardstick = Limit(limits, mnk, nbytes, rate, share)
        except Unable as failed:
            results[0].trouble = str(failed)
            for result in results[1:]:
                result.trouble = result.trouble or f"no {results[0].contender}"
            return results
        measure({x.name: job(x.command) for x in taking if not x.missing}, results, repeats, yardstick)
    return results


if __name__ == "__main__":
    main()
