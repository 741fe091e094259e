"""`pdgemm generate`, `multiply` and `verify`: matrices in files, on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from pdgemm.arrays.dtypes import COMPUTE
from pdgemm.arrays.element_functions import KINDS
from pdgemm.cli import options
from pdgemm.cli.job import OfAllRanks
from pdgemm.cli.param_types import BLOCK, BYTES, DATASET, GRID, NUMBER, SHAPE, Dataset
from pdgemm.names import DeviceName, ElementTypeName

_layout = options.together(
    click.option("--grid", "grid_shape", type=GRID, help="Process grid; default: as square as possible."),
    click.option("--block", type=BLOCK, help="Block sizes of the layout; default: one block per rank."),
)
_scalars = options.together(
    click.option("--alpha", type=NUMBER, default=1.0, show_default=True),
    click.option("--beta", type=NUMBER, default=0.0, show_default=True),
    click.option("--transa", type=click.Choice("NTC", False), default="N", help="op(A): A, A^T or A^H."),
    click.option("--transb", type=click.Choice("NTC", False), default="N", help="op(B)."),
)
_seed = click.option("--seed", default=0, show_default=True)


@click.command(cls=OfAllRanks)
@click.argument("target", type=DATASET)
@click.option("--shape", type=SHAPE, required=True)
@click.option("--dtype", type=click.Choice(options.DTYPES), default="float64", show_default=True)
@click.option("--kind", type=click.Choice(KINDS), default="uniform", show_default=True)
@_seed
@_layout
@options.json_
@options.debug
def generate(
    target: Dataset,
    shape: tuple[int, int],
    dtype: ElementTypeName,
    kind: str,
    seed: int,
    grid_shape: tuple[int, int] | None,
    block: tuple[int, int] | None,
    as_json: bool,
) -> int:
    """Write a matrix of a KIND; for a seed it is the same on any number of ranks."""
    import numpy as np

    from pdgemm.arrays.element_functions import element_function
    from pdgemm.cli.session import session
    from pdgemm.io import hdf5
    from pdgemm.matrix.distmatrix import DistMatrix

    with session(grid_shape, as_json) as say:
        say.lost = f"{target.path} was not written, its contents are unchanged"
        with say.progress("generate"):
            f = element_function(kind, seed, np.dtype(dtype))
            matrix = DistMatrix.from_function(f, shape, grid=say.grid, block=block, dtype=dtype)
        with say.progress("write") as progress:
            wrote = hdf5.save(*target, matrix, progress=progress)
        say.report("wrote", wrote)
    return 0


@click.command(cls=OfAllRanks)
@click.argument("a", type=DATASET)
@click.argument("b", type=DATASET)
@click.option("-o", "--output", type=DATASET, required=True, help="Dataset for C.")
@click.option("--c", "c0", type=DATASET, help="C on entry where beta is not 0; default: the output.")
@_scalars
@_layout
@click.option("--dtype", type=click.Choice(options.DTYPES), help="Convert the operands; default: as they are stored.")
@click.option("--memory-limit", type=BYTES, help="Per rank, for buffers beyond A, B and C.")
@click.option("--panel-width", type=options.COUNT, help="Widest panel.")
@click.option(
    "--lookahead",
    type=click.IntRange(0, options.MOST),
    help="Panels in flight behind the one in use; default: 1 on one node, 4 between several.",
)
@options.mover
@options.algorithm
@click.option("--accumulate-dtype", type=click.Choice(options.SUMS), help="Accumulation type.")
@click.option("--compute-type", type=click.Choice(COMPUTE), help="Type that operands are rounded to; default: none.")
@options.device
@options.trace
@click.option("--verify", "verified", is_flag=True, help="Check the result before it is stored.")
@_seed
@options.json_
@options.debug
def multiply(
    a: Dataset,
    b: Dataset,
    output: Dataset,
    c0: Dataset | None,
    alpha: complex,
    beta: complex,
    transa: str,
    transb: str,
    grid_shape: tuple[int, int] | None,
    block: tuple[int, int] | None,
    dtype: ElementTypeName | None,
    product_grid: tuple[int, int] | None,
    accumulate_dtype: str | None,
    compute_type: str | None,
    device: DeviceName,
    trace_file: str | None,
    nvtx: bool,
    verified: bool,
    seed: int,
    as_json: bool,
    **others: Any,  # options of `pdgemm.pdgemm` by the same names
) -> int:
    """Compute C := alpha op(A) op(B) + beta C, from files to a file."""
    real = os.path.realpath
    from_output = c0 is None or (real(c0.path), c0.name.strip("/")) == (real(output.path), output.name.strip("/"))
    if trace_file and real(trace_file) in {real(x.path) for x in (a, b, c0, output) if x}:
        raise click.UsageError(f"--trace {trace_file} is a file that is read or written here: name another one")
    from pdgemm.arrays.dtypes import product
    from pdgemm.cli.session import session
    from pdgemm.gemm import pdgemm
    from pdgemm.io import hdf5
    from pdgemm.matrix.residual import verify

    types: dict[str, Any] = {"accumulate_dtype": accumulate_dtype, "compute_type": compute_type}
    with session(grid_shape, as_json) as say, say.traced(trace_file, nvtx):
        say.lost = f"{output.path} was not written, its contents are unchanged"
        A = say.load("A", a, block, dtype, transa, device)
        B = say.load("B", b, block, dtype, transb, device)
        # before the product, not after it
        stored = product(A.dtype, B.dtype)
        size = A.shape[0] * B.shape[1] * stored.itemsize
        hdf5.check_output(Path(output.path), output.name, say.grid, size)
        before = say.load("C on entry", c0 or output, block, stored, device=device) if beta else None
        C = before.copy() if verified and before is not None else before
        replaces = before.report if before is not None and from_output else None
        with say.progress("multiply") as progress:
            C = pdgemm(alpha, A, B, beta, C, shape=product_grid, progress=progress, **types, **others)
        say.report("product", C.report.summary())
        if verified:
            with say.progress("verify"):
                residual = verify(C, alpha, A, B, beta, before, seed=seed, **types)
            say.report("verify", residual)
            if not residual.passed:
                return 1  # a wrong result is not stored
        with say.progress("write") as progress:
            wrote = hdf5.save(*output, C, replaces=replaces, progress=progress)
        say.report("wrote", wrote)
    return 0


@click.command(cls=OfAllRanks)
@click.argument("a", type=DATASET)
@click.argument("b", type=DATASET)
@click.argument("c", type=DATASET)
@click.option("--c0", type=DATASET, help="C on entry, needed where beta is not 0.")
@_scalars
@_seed
@_layout
@options.json_
@options.debug
def verify(
    a: Dataset,
    b: Dataset,
    c: Dataset,
    c0: Dataset | None,
    alpha: complex,
    beta: complex,
    transa: str,
    transb: str,
    seed: int,
    grid_shape: tuple[int, int] | None,
    block: tuple[int, int] | None,
    as_json: bool,
) -> int:
    """Check C = alpha op(A) op(B) + beta C0 with random vectors, without a second product."""
    from pdgemm.cli.session import session
    from pdgemm.matrix.residual import verify as residual_of

    if beta and c0 is None:
        raise click.UsageError("with --beta, C on entry is needed: --c0 FILE:/DATASET")
    with session(grid_shape, as_json) as say:
        A = say.load("A", a, block, None, transa)
        B = say.load("B", b, block, None, transb)
        C = say.load("C", c, block)
        before = say.load("C on entry", c0, block) if c0 else None
        with say.progress("verify"):
            residual = residual_of(C, alpha, A, B, beta, before, seed=seed)
        say.report("verify", residual)
    return 0 if residual.passed else 1
