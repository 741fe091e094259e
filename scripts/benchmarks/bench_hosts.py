#!/usr/bin/env python3
"""Between hosts: how far is each algorithm from what the processors and the cables allow?

    scripts/benchmarks/setup_peers.sh scalapack; . scripts/env.sh
    python scripts/benchmarks/bench_hosts.py --hosts 2x1 --json hosts.json

Several hosts are made on this machine by scripts/hosts.sh.  For each shape the cables are given the rate at which what
SUMMA brings to a host takes RATIO times as long as its product.  The limit of an algorithm is

    max(product, transfer)      product   of a rank's share alone, while all other ranks form theirs
                                transfer  of the bytes that its plan brings to the busiest host, redistribution
                                          included, at the best rate of plain messages in both directions at once

and for programs that do not say how many bytes these are, the bytes of SUMMA.  The model is calibrated at that rate, as
on a cluster: `auto` chooses by it, and its predictions are printed.

Product, exchange and all contenders are taken in turns; contenders are jobs of their own that sleep meanwhile.  The
first of them, "both", is the product and that exchange by plain messages, at once and independent of each other: the
processors that multiply also do the work of TCP, so that no algorithm may come nearer to the limit.  Where there are
more ranks than processors, the ranks share them, as for the product alone.
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
@click.option("--ratios", default="0.25,1,4", show_default=True, help="Of transfer to product.")
@click.option("--shapes", default=SHAPES, show_default=True, help="N or MxNxK.")
@click.option("--layouts", default="own,columns", show_default=True, help=f"Of {', '.join(LAYOUTS)}.")
@click.option("--algorithms", default=",".join(ALGORITHMS), show_default=True)
@click.option("--scalapack/--no-scalapack", default=True, show_default=True)
@click.option("--external", multiple=True, help='"NAME=COMMAND", as of bench_peers.py; repeatable.')
@click.option("--inside", is_flag=True, hidden=True, help="On the first of these hosts.")
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

    compares = "Time over max(product, transfer), right before and after:"
    report(cases(), f"C = A B on {place.name}", compares, {"hosts": hosts, "repeats": repeats}, json_file)


def worker(place: Place, name: str, layout: str) -> Contender:
    return Contender(name, place.python("on_hosts", name, layout, "float64"))


if __name__ == "__main__":
    main()
