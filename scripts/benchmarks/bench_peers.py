#!/usr/bin/env python3
"""The same product by pdgemm, by its peers and by NumPy, taken in turns.

    PDGEMM_VENV=.venv-peers; . scripts/env.sh
    python scripts/benchmarks/bench_peers.py --json peers.json --markdown peers.md

setup_peers.sh installs what is compared.  Each contender is a job of its own that sleeps while others multiply;
NumPy's product with all cores is measured right before and right after each, and the ratio is the mean of these two
times over that of the contender.  There is none where the two BLAS multiply for processors of different generations:
OPENBLAS_CORETYPE tells each to use NumPy's kernel, but not all can.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import ExitStack
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path

import click
from peers.contenders import Contender, contenders
from peers.job import Job, blas_of_numpy
from peers.tables import machine, markdown
from peers.turns import MNK, Result, measure
from threadpoolctl import threadpool_limits

from pdgemm.local.blas import processors as kernels
from pdgemm.support.files import write_file

SHAPES: dict[str, MNK] = {
    "512": (512, 512, 512),
    "1024": (1024, 1024, 1024),
    "2048": (2048, 2048, 2048),
    "4096": (4096, 4096, 4096),
    "tall": (65536, 128, 128),
    "large-k": (512, 512, 65536),
    "flat": (4096, 4096, 256),
}
FIELDS = ("m", "n", "k", "ranks", "dtype", "layout", "repeats")  # of commands
LAYOUTS = ("native", "columns")
DEFAULT = "1024,2048,4096,tall,large-k,flat"
QUICK: dict[str, MNK] = {"64": (64, 64, 64), "tall": (500, 8, 8), "large-k": (8, 8, 500)}


@click.command(context_settings={"max_content_width": 110})
@click.option("--shapes", default=DEFAULT, show_default=True, help=f"Of {', '.join(SHAPES)}, or N, or MxNxK.")
@click.option("--layout", type=click.Choice([*LAYOUTS, "both"]), default="both", show_default=True)
@click.option(
    "--contenders", "patterns", default="*", show_default=True, help='Names or patterns: "pdgemm,scalapack*".'
)
@click.option("--external", multiple=True, help='"NAME=COMMAND", see above; repeatable.')
@click.option("--ranks", default=2, show_default=True)
@click.option("--threads", type=int, help="NumPy's; by default all cores.")
@click.option("--repeats", default=7, show_default=True)
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@click.option("--order", type=click.Choice("CF"), default="C", show_default=True, help="Of pdgemm's local arrays.")
@click.option("--block", type=int, help="Block size of pdgemm's native layout; by default one block per rank.")
@click.option("--quick", is_flag=True, help="Small shapes, twice each: does it work?")
@click.option("--json", "json_file", type=click.Path(dir_okay=False))
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False))
@click.option("--worker", hidden=True)
def main(
    shapes: str,
    layout: str,
    patterns: str,
    external: tuple[str, ...],
    ranks: int,
    threads: int | None,
    repeats: int,
    dtype: str,
    order: str,
    block: int | None,
    quick: bool,
    json_file: str | None,
    markdown_file: str | None,
    worker: str | None,
) -> None:
    """Compare pdgemm with its peers and with NumPy: C = A B, all in turns.

    \b
    Layouts:
      native   A, B and C lie as the contender likes it best
      columns  each in one block of columns per rank; moving them there and back counts

    \b
    Contenders: pdgemm (its own choice, on SciPy's BLAS), pdgemm:mkl (on MKL), pdgemm:summa, pdgemm:stationary_a,
    pdgemm:stationary_b, pdgemm:cannon, pdgemm:2.5d, pdgemm:inner, pylops-mpi:block, pylops-mpi:summa, heat, dask,
    scalapack, scalapack:256 (its logical block raised from 32), scalapack:mkl, and external ones.  P ranks have one
    thread each; dask has P threads.

    An external contender is a command, in which {m}, {n}, {k}, {ranks}, {dtype}, {layout} and {repeats} are replaced.
    It reads a line "m n k" for each product and answers with a line: the seconds that the product took, and after
    a space what may be noted about it; or "-" and why it cannot.  A line "kernel NAME" before the first answer says
    what its BLAS uses, such as openblas_get_corename() or the Processor of MKL_Get_Version(); if there is none, what
    OpenBLAS says when it is loaded is taken.  Other lines that it prints are passed over, and an empty line, or the
    end of input, ends it.  The first product of a shape is not counted: that is the time to choose
    a layout and to check the result.  A command that names {m}, {n} or {k} is started anew for each shape, and gets
    {repeats} lines.  Between its products it has to sleep.
    """
    if worker:
        from mpi4py import MPI
        from peers.worker import serve

        module, _, variant = worker.partition(":")
        module = "with_" + module.partition("-")[0]
        return serve(MPI.COMM_WORLD, module, variant=variant, layout=layout, dtype=dtype, order=order, block=block)

    sizes = QUICK if quick else chosen(shapes)
    repeats = min(repeats, 2) if quick else repeats
    threads = threads or len(os.sched_getaffinity(0))
    numpy = blas_of_numpy()
    kernel = kernels.kernel(numpy)
    with threadpool_limits(threads, user_api="blas"):
        if numpy and numpy.num_threads != threads:
            raise click.BadParameter(f"NumPy's BLAS takes {numpy.num_threads}, not {threads}", param_hint="--threads")
    known = contenders(ranks, dtype, f"--order {order}" + (f" --block {block}" if block else ""))
    taking = named(known, patterns) + [plugged_in(given) for given in external]
    about = machine() | {
        "date": f"{date.today()}",
        "ranks": ranks,
        "threads": threads,
        "dtype": dtype,
        "repeats": repeats,
        "command": sys.argv[1:],
        "contenders": {x.name: x.command for x in taking},
    }
    results: list[Result] = []
    for lie in LAYOUTS if layout == "both" else [layout]:
        values = {"layout": lie, "ranks": ranks, "dtype": dtype, "repeats": repeats + 1}
        with ExitStack() as stack, threadpool_limits(threads, user_api="blas"):
            jobs = {x.name: stack.enter_context(Job(x.command, kernel, **values)) for x in taking if not x.missing}
            for shape, mnk in sizes.items():
                here = [Result(lie, shape, mnk, "numpy", kernel=kernel)]
                here += [Result(lie, shape, mnk, x.name, trouble=x.missing) for x in taking]
                measure(jobs, here, dtype, repeats)
                results += here
                click.echo("\n".join([f"{lie}, {shape}", *(f"  {x.summary}" for x in here)]), err=True)
                if json_file:  # after each shape: what was measured is not lost
                    plain = about | {"results": [x.plain() for x in results]}
                    write_file(Path(json_file), json.dumps(plain, indent=1) + "\n")
                if markdown_file:
                    write_file(Path(markdown_file), markdown(about, results))
    if not markdown_file:
        click.echo(markdown(about, results), nl=False)


def chosen(names: str) -> dict[str, MNK]:
    """Of a list of names, of sizes of squares, and of MxNxK."""
    found: dict[str, MNK] = {}
    for name in names.split(","):
        sides = name.split("x")
        if name in SHAPES:
            found[name] = SHAPES[name]
        elif all(side.isdigit() and int(side) for side in sides) and len(sides) in (1, 3):
            m, n, k = (int(side) for side in (sides * 3)[:3])
            found[name] = (m, n, k)
        else:
            raise click.BadParameter(f"{name!r} is none of {', '.join(SHAPES)}, N, MxNxK", param_hint="--shapes")
    return found


def named(known: list[Contender], patterns: str) -> list[Contender]:
    """Those whose names match; NumPy always takes part."""
    found: dict[str, Contender] = {}
    for pattern in patterns.split(","):
        matching = [x for x in known if fnmatchcase(x.name, pattern)]
        if not matching and pattern not in ("", "numpy"):
            names = ", ".join(x.name for x in known)
            raise click.BadParameter(f"{pattern!r} is none of numpy, {names}", param_hint="--contenders")
        found |= {x.name: x for x in matching}
    return list(found.values())


def plugged_in(given: str) -> Contender:
    name, _, command = given.partition("=")
    try:
        words = shlex.split(command.format(**dict.fromkeys(FIELDS, 1)))
        trouble = "" if name and words else "one is empty"
    except (KeyError, IndexError, ValueError) as bad:
        trouble = f"{type(bad).__name__}: {bad}"
    if trouble:
        raise click.BadParameter(f"{given!r} is not NAME=COMMAND: {trouble}", param_hint="--external")
    return Contender(name, command)


if __name__ == "__main__":
    main()
