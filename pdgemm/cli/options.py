"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pdgemm.cli.param_types import GRID
from pdgemm.planning.algorithm_grids import ALGORITHMS

MOST = 1 << 31
COUNT = click.IntRange(1, MOST)  # of ranks, layers, inner indices, repetitions
MOVERS = ("auto", "shared", "mpi", "ibcast", "ring", "staged", "ipc", "nccl")
DTYPES = ("float16", "float32", "float64", "complex64", "complex128", "int8")
BLAS_DTYPES = DTYPES[1:5]


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator, in the order of the help text."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


json_ = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
debug = click.option("--debug", is_flag=True, expose_value=False, help="Errors with a traceback.")  # read by `main`
device = click.option("--device", type=click.Choice(("host", "cuda")), default="host", show_default=True)
mover = click.option("--mover", type=click.Choice(MOVERS), default="auto", show_default=True)
machine = click.option("--machine", "machine_file", type=click.Path(), help="What `pdgemm calibrate` wrote.")
trace = together(
    click.option("--trace", "trace_file", type=click.Path(dir_okay=False), help="A timeline, for `pdgemm profile`."),
    click.option("--nvtx", is_flag=True, help="Ranges for Nsight Systems."),
)
algorithm = together(
    click.option("--algorithm", type=click.Choice(ALGORITHMS), default="auto", show_default=True),
    click.option("--product-grid", type=GRID, help="Grid of the product, which need not be that of the matrices."),
    click.option("--layers", type=COUNT, help="Layers of that grid (2.5d)."),
)
