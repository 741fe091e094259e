#!/usr/bin/env python3
"""Between hosts: how close is each algorithm to the limit of the processors and the cables?

    scripts/benchmarks/setup_peers.sh scalapack; . scripts/env.sh
    python scripts/benchmarks/bench_hosts.py --hosts 2x1 --json hosts.json

scripts/hosts.sh makes several hosts on this machine.  For each shape the rate of the cables is set such that the
transfer of the bytes that a host receives in SUMMA takes RATIO times as long as the product.  The limit of an
algorithm is

    max(product, transfer)      product   seconds of a rank's share of the product, while all others compute theirs
                                transfer  seconds of the bytes that the busiest host receives by the plan, including
                                          redistribution, at the best rate of plain messages in both directions

For programs that do not report these bytes, the bytes of SUMMA are used.  The time model is calibrated at that rate,
as on a cluster: `auto` chooses by it, and its predictions are printed.

Product, exchange and all contenders take turns; each is a separate job that sleeps while others run.  The first
contender, "both", runs the product and the exchange by plain messages concurrently and independently: as the
processors that multiply also do the work of TCP, an algorithm can hardly be faster.  If there are more ranks than
processors, the ranks share them, also in the product of the limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import click
from bench_peers import chosen, plugged_in
from peers.job import Job, blas_of_numpy
from peers.places import BOTH, LIMITS, TENSOR_PARALLEL, Contender, Limit, Place, bytes_into_a_host, cables
from peers.results import Result, measure, options, report

from pdgemm.local.blas import processors as kernels

ALGORITHMS = (BOTH, "auto", "summa", "cannon", "2.5d", "inner", "stationary_a", "stationary_b")
LAYOUTS = ("own", "blocks", "columns", *TENSOR_PARALLEL)
SHAPES = "3072,65536x512x512,512x512x65536,6144x6144x512"


@click.command(context_settings={"max_content_width": 110})
@click.option("--hosts", default="2x1", show_default=True, help="HOSTSxRANKS: RANKS on each of several hosts.")
@click.option("--ratios", default="0.25,1,4", show_default=True, help="Ratios of transfer to product.")
@click.option("--shapes", default=SHAPES, show_default=True, help="Shapes N or MxNxK.")
@click.option("--layouts", default="own,columns", show_default=True, help=f"Some of {', '.join(LAYOUTS)}.")
@click.option("--algorithms", default=",".join(ALGORITHMS), show_default=True)
@click.option("--scalapack/--no-scalapack", default=True, show_default=True)
@click.option("--external", multiple=True, help='"NAME=COMMAND", as in bench_peers.py; repeatable.')
@click.option("--inside", is_flag=True, hidden=True, help="This command runs on the first of these hosts.")
@options
def main(
    hosts: str,
    ratios: str,
    shapes: str,
    layouts: str,
    algorithms: str,
    scalapack: bool,
    external: tuple[str, ...],
    inside: bool,
    repeats: int,
    quick: bool,
    json_file: str | None,
) -> None:
    """Multiply on several hosts with all algorithms, and print the ratio of each time to the limit.

    \b
    Layouts:
      own      for each algorithm the layouts that need no redistribution, on its best grid
      blocks   one block per rank of the squarest grid, for all algorithms
      columns  one block of columns per rank, for all algorithms
      column-parallel, row-parallel
               the layouts of docs/tensor_parallel.md; the rate of the cables is set such that the transfers of these
               layouts take RATIO times as long as the product
    """
    place, kernel = Place.between(hosts), kernels.kernel(blas_of_numpy())
    sizes, repeats = (chosen("300"), 1) if quick else (chosen(shapes), repeats)
    place.enter()

    def cases() -> Iterator[list[Result]]:
        for layout, (shape, mnk), ratio in itertools.product(layouts.split(","), sizes.items(), ratios.split(",")):
            taking = [worker(place, name, layout) for name in algorithms.split(",")]
            library_layout = "columns" if layout == "columns" else "native"
            if scalapack:
                taking.append(place.driver("scalapack", "scalapack_gemm_256", f"float64 {library_layout}"))
            taking += map(plugged_in, external)
            title = f"{layout}, transfer / product {ratio}"
            results = [Result(title, shape, mnk, "limit", over=True)]
            results += [Result(title, shape, mnk, x.name, over=True, trouble=x.missing) for x in taking]
            nbytes, values = (
                bytes_into_a_host(mnk, place.hosts, layout),
                {"ranks": place.ranks, "layout": library_layout},
            )
            with ExitStack() as stack:

                def job(x: Contender, stack: ExitStack = stack, values: dict[str, object] = values) -> Job:
                    return stack.enter_context(Job(x.command, kernel, **values))

                limits = {name: job(worker(place, name, layout)) for name in LIMITS}
                rate = stack.enter_context(cables(place, limits["product"], mnk, nbytes, float(ratio)))
                jobs = {x.name: job(x) for x in taking if not x.missing}
                measure(jobs, results, repeats, Limit(limits, mnk, nbytes, rate))
            yield results

    compares = "Time over max(product, transfer), which are measured right before and after it:"
    report(cases(), f"C = A B on {place.name}", compares, {"hosts": hosts, "repeats": repeats}, json_file)


def worker(place: Place, name: str, layout: str) -> Contender:
    return Contender(name, place.python("on_hosts", name, layout, "float64"))


if __name__ == "__main__":
    main()
