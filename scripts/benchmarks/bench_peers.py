#!/usr/bin/env python3
"""The same product by pdgemm, by its peers and by NumPy, taken in turns.

    PDGEMM_VENV=.venv-peers; . scripts/env.sh
    python scripts/benchmarks/bench_peers.py --json peers.json

setup_peers.sh installs the peers.  Each contender is a separate job that sleeps while others multiply.  NumPy's product
with all cores is measured right before and right after each; the ratio is the mean of these two times over the time of
the contender.  No ratio is printed if the two BLAS use kernels for processors of different generations:
OPENBLAS_CORETYPE asks each to use NumPy's kernel, but not all of them can.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

import click
from peers.job import Job, blas_of_numpy
from peers.places import ABSENT, Contender, Place
from peers.results import MNK, NumPyProduct, Result, measure, options, report
from threadpoolctl import threadpool_limits

from pdgemm.local.blas import library as blas, processors as kernels

SHAPES: dict[str, MNK] = {
    "512": (512, 512, 512),
    "1024": (1024, 1024, 1024),
    "2048": (2048, 2048, 2048),
    "4096": (4096, 4096, 4096),
    "tall": (65536, 128, 128),
    "large-k": (512, 512, 65536),
    "flat": (4096, 4096, 256),
}
FIELDS = ("m", "n", "k", "ranks", "dtype", "layout", "repeats")  # the names that commands may contain in braces
LAYOUTS = ("native", "columns")
DEFAULT = "1024,2048,4096,tall,large-k,flat"
QUICK: dict[str, MNK] = {"64": (64, 64, 64), "tall": (500, 8, 8), "large-k": (8, 8, 500)}
PYTHON = {  # the module that must be installed, and the variants
    "pdgemm": ("pdgemm", ("", "summa", "stationary_a", "stationary_b", "cannon", "2.5d", "inner", "mkl")),
    "pylops-mpi": ("pylops_mpi", ("block", "summa")),
    "heat": ("heat", ("",)),
    "dask": ("dask", ("",)),
}
SCALAPACK = {"": "scalapack_gemm", "256": "scalapack_gemm_256", "mkl": "scalapack_gemm_mkl"}


@click.command(context_settings={"max_content_width": 110})
@click.option("--shapes", default=DEFAULT, show_default=True, help=f"Some of {', '.join(SHAPES)}, N, or MxNxK.")
@click.option("--layout", type=click.Choice([*LAYOUTS, "both"]), default="both", show_default=True)
@click.option("--contenders", "patterns", default="*", show_default=True, help='Such as "pdgemm,scalapack*".')
@click.option("--external", multiple=True, help='"NAME=COMMAND", see above; repeatable.')
@click.option("--ranks", default=2, show_default=True)
@click.option("--threads", type=int, help="Threads of NumPy; by default all cores.")
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@click.option("--order", type=click.Choice("CF"), default="C", show_default=True, help="Order of pdgemm's arrays.")
@click.option("--block", default=0, help="Block size of pdgemm's native layout; by default one block per rank.")
@options
def main(
    shapes: str,
    layout: str,
    patterns: str,
    external: tuple[str, ...],
    ranks: int,
    threads: int | None,
    dtype: str,
    order: str,
    block: int,
    repeats: int,
    quick: bool,
    json_file: str | None,
) -> None:
    """Compare pdgemm with its peers and with NumPy: C = A B, all in turns.

    \b
    Layouts:
      native   A, B and C have the contender's fastest layouts
      columns  each has one block of columns per rank; the time of redistribution counts

    \b
    Contenders: pdgemm (its own choice, on SciPy's BLAS), pdgemm:mkl (on MKL), pdgemm:summa, pdgemm:stationary_a,
    pdgemm:stationary_b, pdgemm:cannon, pdgemm:2.5d, pdgemm:inner, pylops-mpi:block, pylops-mpi:summa, heat, dask,
    scalapack, scalapack:256 (its logical block raised from 32), scalapack:mkl, and external ones.  P ranks have one
    thread each; dask has P threads.

    An external contender is a command, in which {m}, {n}, {k}, {ranks}, {dtype}, {layout} and {repeats} are replaced.
    For each product it reads a line "m n k", and prints a line: the seconds of the product and an optional note after
    a space; or "-" and the reason why it cannot multiply.  A line "kernel NAME" before the first answer names the
    kernel of its BLAS, such as openblas_get_corename() or the Processor of MKL_Get_Version(); without this line, the
    name that OpenBLAS prints when it is loaded is taken.  Other lines of its output are ignored.  It must end at an
    empty line or at the end of input.  The first product of a shape is not counted: in it a contender can choose a
    layout and check the result.  A command that contains {m}, {n} or {k} is started again for each shape, and gets
    {repeats} lines.  Between products it must sleep.
    """
    sizes, repeats = (QUICK, min(repeats, 2)) if quick else (chosen(shapes), repeats)
    threads = threads or len(os.sched_getaffinity(0))
    numpy = blas_of_numpy()
    with threadpool_limits(threads, user_api="blas"):
        if numpy and numpy.num_threads != threads:
            raise click.BadParameter(f"NumPy's BLAS takes {numpy.num_threads}, not {threads}", param_hint="--threads")
    place = Place(ranks)
    taking = named(contenders(place, dtype, order, block), patterns) + [plugged_in(given) for given in external]
    values = {"ranks": ranks, "dtype": dtype, "repeats": repeats + 1}

    def cases() -> Iterator[list[Result]]:
        kernel = kernels.kernel(numpy)
        for name in LAYOUTS if layout == "both" else [layout]:
            with ExitStack() as stack, threadpool_limits(threads, user_api="blas"):
                here: dict[str, Any] = values | {"layout": name}
                jobs = {x.name: stack.enter_context(Job(x.command, kernel, **here)) for x in taking if not x.missing}
                for shape, mnk in sizes.items():
                    results = [Result(name, shape, mnk, "numpy", kernel=kernel)]
                    results += [Result(name, shape, mnk, x.name, trouble=x.missing) for x in taking]
                    measure(jobs, results, repeats, NumPyProduct(mnk, dtype))
                    yield results

    compares = f"Time of NumPy's product with {threads} threads over that of the contender:"
    about = values | {"repeats": repeats, "threads": threads, "contenders": {x.name: x.command for x in taking}}
    report(cases(), f"C = A B in {dtype} on {place.name}", compares, about, json_file)


def contenders(place: Place, dtype: str, order: str, block: int) -> list[Contender]:
    """Return all contenders, including those that are not installed."""
    known = []
    for name, (module, variants) in PYTHON.items():
        for variant in variants:
            missing = "" if find_spec(module) and (variant != "mkl" or blas.mkl()) else ABSENT
            where, how = (Place(1), str(place.ranks)) if name == "dask" else (place, variant)
            command = where.python(f"with_{name.partition('-')[0]}", how, "{layout}", dtype, order, block)
            library = f"env PDGEMM_BLAS={'mkl' if variant == 'mkl' else 'scipy'} " if name == "pdgemm" else ""
            known.append(Contender(title(name, variant), library + command, missing))
    drivers = [place.driver(title("scalapack", x), driver, f"{dtype} {{layout}}") for x, driver in SCALAPACK.items()]
    return known + drivers


def title(name: str, variant: str) -> str:
    return f"{name}:{variant}" if variant else name


def chosen(names: str) -> dict[str, MNK]:
    """Return the shapes of a list of names, of orders of squares, and of MxNxK.  Raises BadParameter."""
    shapes: dict[str, MNK] = {}
    for name in names.split(","):
        sides = name.split("x")
        if name in SHAPES:
            shapes[name] = SHAPES[name]
        elif all(side.isdigit() and int(side) for side in sides) and len(sides) in (1, 3):
            m, n, k = (int(side) for side in (sides * 3)[:3])
            shapes[name] = (m, n, k)
        else:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}, N, MxNxK", param_hint="--shapes")
    return shapes


def named(known: list[Contender], patterns: str) -> list[Contender]:
    """Return the contenders whose names match; NumPy always takes part.  Raises BadParameter."""
    chosen: dict[str, Contender] = {}
    for pattern in patterns.split(","):
        matching = [x for x in known if fnmatchcase(x.name, pattern)]
        if not matching and pattern not in ("", "numpy"):
            names = ", ".join(x.name for x in known)
            raise click.BadParameter(f"{pattern!r} is not one of numpy, {names}", param_hint="--contenders")
        chosen |= {x.name: x for x in matching}
    return list(chosen.values())


def plugged_in(given: str) -> Contender:
    """Return the contender of NAME=COMMAND.  Raises BadParameter."""
    name, _, command = given.partition("=")
    try:
        words = shlex.split(command.format(**dict.fromkeys(FIELDS, 1)))
        trouble = "" if name and words else "the name or the command is empty"
    except (KeyError, IndexError, ValueError) as bad:
        trouble = f"{type(bad).__name__}: {bad}"
    if trouble:
        raise click.BadParameter(f"{given!r} is not NAME=COMMAND: {trouble}", param_hint="--external")
    return Contender(name, command)


if __name__ == "__main__":
    main()
