"""Options that several commands have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import click

from pdgemm.local.arrays import dtypes
from pdgemm.planning import algorithm_registry
from pdgemm.schedules import mover_registry
from pdgemm.tools.cli.param_types import GRID

MOST = 1 << 31
COUNT = click.IntRange(1, MOST)  # of ranks, layers, inner indices, repetitions
DTYPES = tuple(x.name for x in dtypes.OPERANDS if x in dtypes.STORED)
OPERANDS = tuple(x.name for x in dtypes.OPERANDS)
BLAS_DTYPES = tuple(x.name for x in dtypes.BLAS)
SUMS = tuple(x.name for x in dtypes.SUMS)


def stacked_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return several options as one decorator, in the order of the help text."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def check_apart(others: dict[str, str | None], datasets: Iterable[Any]) -> None:
    """Raise UsageError where a file beside the result, by the name of its option, is one with a dataset."""
    used = {os.path.realpath(x.path) for x in datasets if x}
    for name, file in others.items():
        if file and os.path.realpath(file) in used:
            raise click.UsageError(f"{name} {file} is a file that is read or written here: name another one")


compression = click.option(
    "--compression", type=click.Choice(("gzip", "lzf")), help="Compress the dataset that is written, in chunks."
)
force = click.option("--force", is_flag=True, help="Replace any file or dataset, also one that pdgemm did not write.")
json_ = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
debug = click.option("--debug", is_flag=True, expose_value=False, help="Print tracebacks of errors.")
device = click.option("--device", type=click.Choice(("host", "cuda")), default="host", show_default=True)
mover = click.option("--mover", type=click.Choice(mover_registry.mover_choices()), default="auto", show_default=True)
machine = click.option("--machine", "machine_file", type=click.Path(), help="File of `pdgemm calibrate`.")
trace = stacked_options(
    click.option("--trace", "trace_file", type=click.Path(dir_okay=False), help="Timeline for `pdgemm profile`."),
    click.option("--nvtx", is_flag=True, help="Mark NVTX ranges, for Nsight Systems."),
)
algorithm = stacked_options(
    click.option(
        "--algorithm", type=click.Choice(algorithm_registry.algorithm_choices()), default="auto", show_default=True
    ),
    click.option("--product-grid", type=GRID, help="Grid of the product, which need not be that of the matrices."),
    click.option("--layers", type=COUNT, help="Layers of that grid (2.5d)."),
)
