"""`pdgemm generate`, `multiply`, `einsum` and `verify`: matrices and tensors in files, on all ranks."""

from __future__ import annotations

from typing import Any, get_args

import click

from pdgemm.local.arrays.dtypes import COMPUTE
from pdgemm.local.arrays.element_functions import KINDS
from pdgemm.names import ElementTypeName, Protection
from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import OfAllRanks
from pdgemm.tools.cli.options import BYTES, DATASET, MATRIX, NUMBER, SECONDS, SHAPE, Dataset

_operands = options.stacked_options(click.argument("a", type=MATRIX), click.argument("b", type=MATRIX))
_scalars = options.stacked_options(
    click.option("--alpha", type=NUMBER, default=1.0, show_default=True),
    click.option("--beta", type=NUMBER, default=0.0, show_default=True),
    click.option("--transa", type=click.Choice("NTC", False), default="N", help="op(A): A, A^T or A^H."),
    click.option("--transb", type=click.Choice("NTC", False), default="N", help="op(B)."),
)


@click.command(cls=OfAllRanks, short_help="Write a test matrix to a file.")
@click.argument("target", type=DATASET)
@click.option("--shape", type=SHAPE, required=True)
@click.option("--dtype", type=click.Choice(options.DTYPES), default="float64", show_default=True)
@click.option(
    "--kind", type=click.Choice(KINDS), default="uniform", show_default=True,
    help="uniform: on [0, 1), of int8 on -128 to 127.  normal: with mean 0 and variance 1.",
)  # fmt: skip
@options.seed
@options.layout
@options.force
@options.compression
@options.json_
@options.debug
def generate(
    target: Dataset, shape: tuple[int, int], dtype: ElementTypeName, kind: str, seed: int, grid_shape: Any, block: Any,
    force: bool, compression: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Write a test matrix; the same seed gives the same matrix on any number of ranks."""
    import numpy as np

    from pdgemm.io.streamed.before_reading import Outlines, check_memory, check_result_file
    from pdgemm.local.arrays.element_functions import element_function
    from pdgemm.matrix.distmatrix import DistMatrix
    from pdgemm.tools.cli.session import session

    with session(grid_shape, as_json) as say:
        say.lost = f"{target.path} was not written, its contents are unchanged"
        outlines, known = Outlines(say.grid, block, "host"), np.dtype(dtype)
        outlines.of("the matrix", shape, known)
        check_result_file(say.grid, target, shape[0] * shape[1] * known.itemsize, force)
        check_memory(say.grid, sum(outlines.nbytes), "the parts of the matrix")
        with say.progress("generate"):
            f = element_function(kind, seed, known)
            matrix = DistMatrix.from_function(f, shape, grid=say.grid, block=block, dtype=dtype)
        say.save(target, matrix, compression=compression, overwrite=force)
    return 0


@click.command(cls=OfAllRanks, short_help="Multiply matrices from files to a file.")
@_operands
@click.option(
    "-o", "--output", type=DATASET, required=True,
    help="Dataset for C, replaced when the result is complete.  --force is needed to replace A, B, or a dataset that "
    "pdgemm did not write, unless it is C on entry.",
)  # fmt: skip
@click.option("--c", "c0", type=MATRIX, help="C on entry where beta is not 0; default: the output.")
@_scalars
@options.layout
@click.option("--dtype", type=click.Choice(options.DTYPES), help="Convert A and B first; default: as stored.")
@click.option(
    "--memory", type=BYTES,
    help="Memory per rank for A, B, C and all buffers; larger matrices are read and multiplied in parts.",
)  # fmt: skip
@click.option(
    "--checkpoint", type=SECONDS,
    help="Save a checkpoint next to the output every 10min or so; the same command resumes from it.",
)  # fmt: skip
@click.option(
    "--mtbf", type=SECONDS,
    help="Mean time between failures; it determines the checkpoint interval that loses least time (Young 1974).",
)  # fmt: skip
@options.memory_limit
@click.option("--panel-width", type=options.COUNT, help="Widest panel.")
@click.option(
    "--lookahead", type=click.IntRange(0, options.MOST),
    help="Number of panels fetched ahead of the one in use; default: 1 on one node, 4 on several.",
)  # fmt: skip
@options.mover
@options.algorithm
@click.option("--accumulate-dtype", type=click.Choice(options.SUMS), help="Accumulation type.")
@click.option(
    "--protect", type=click.Choice(get_args(Protection)),
    help="Compare rows of C with checksums; if they differ, end with an error (detect) or multiply again (repair).  "
    "With --memory or --checkpoint, each product of panels is compared by itself.",
)  # fmt: skip
@click.option("--compute-type", type=click.Choice(COMPUTE), help="Round A and B to this type, or cut them into slices.")
@options.device
@options.trace
@click.option(
    "--report", "page", type=click.Path(dir_okay=False),
    help="FILE.html: a page of the result, the time of each rank and a timeline; needs matplotlib and jinja2.",
)  # fmt: skip
@options.verified
@options.seed
@options.force
@options.compression
@options.json_
@options.debug
def multiply(
    a: Dataset, b: Dataset, output: Dataset, c0: Dataset | None, grid_shape: tuple[int, int] | None,
    trace_file: str | None, nvtx: bool, page: str | None, verified: bool, seed: int, force: bool, as_json: bool,
    **others: Any,
) -> int:  # fmt: skip
    """Compute C := alpha op(A) op(B) + beta C, from files to a file.

    All that can be known without the elements is checked before they are read: shapes, types, options, the output, and
    whether A, B, C and the buffers of the product fit the memory.  If A and B are one dataset, it is read once.

    --memory and --checkpoint exclude --block, --device cuda and --compression; --mtbf needs --checkpoint.
    """
    options.check_apart({"--trace": trace_file, "--report": page}, (a, b, c0, output))
    from pdgemm.io.streamed.multiply_files import multiply_files
    from pdgemm.tools.cli.session import session

    if others["mtbf"] is not None and others["checkpoint"] is None:
        raise click.UsageError("--mtbf needs --checkpoint, the time until the first checkpoint, which is timed")
    unfit = {"--block": others["block"], "--device cuda": others["device"] != "host"}
    unfit["--compression"] = others["compression"]
    for name in ("memory", "checkpoint"):
        if others[name] is not None and any(unfit.values()):
            raise click.UsageError(f"--{name} cannot be combined with {' or '.join(x for x in unfit if unfit[x])}")
    with session(grid_shape, as_json) as say, say.traced(trace_file, nvtx, page, force, str(output)):
        say.lost = f"{output.path} was not written, its contents are unchanged"
        where: dict[str, Any] = {"grid": say.grid, "observer": say, "overwrite": force}
        done = multiply_files(a, b, output, c0=c0, seed=seed if verified else None, **where, **others)
    return 0 if done.wrote else 1  # a wrong result is not stored


@click.command(cls=OfAllRanks, short_help="Contract tensors from files to a file.")
@click.argument("expression")
@click.argument("operands", type=MATRIX, nargs=-1, required=True)
@click.option(
    "-o", "--output", type=DATASET,
    help="Dataset for the result, replaced if pdgemm wrote it.  --force is needed to replace an operand.  A result "
    "without axes is a number, which is only printed.",
)  # fmt: skip
@click.option("--alpha", type=NUMBER, default=1.0, show_default=True)
@click.option("--dtype", type=click.Choice(options.DTYPES), help="Convert the operands first; default: as stored.")
@click.option(
    "--memory", type=BYTES,
    help="Memory per rank for the operands, the result and all buffers; an index that is summed is cut into slices "
    "where the memory is short.",
)  # fmt: skip
@options.trace
@options.verified
@options.seed
@options.force
@options.compression
@options.json_
@options.debug
def einsum(
    expression: str, operands: tuple[Dataset, ...], output: Dataset | None, trace_file: str | None, nvtx: bool,
    as_json: bool, force: bool, **others: Any,
) -> int:  # fmt: skip
    """Compute alpha times the sum of products of tensors in Einstein's notation, as numpy.einsum writes it.

    pdgemm einsum "ijab,abkl->ijkl" v.h5:/t2 v.h5:/w -o r.h5:/r

    The order of the contractions, the layouts in which the operands are read, and the algorithms are planned together.
    All that can be known without the elements is checked before they are read.  A dataset that is several operands is
    read once for each of their layouts.
    """
    options.check_apart({"--trace": trace_file}, (*operands, output))
    from pdgemm.io.streamed.einsum_files import einsum_files
    from pdgemm.tools.cli.session import session

    with session(None, as_json) as say, say.traced(trace_file, nvtx, None, force):
        if output is not None:
            say.lost = f"{output.path} was not written, its contents are unchanged"
        right = einsum_files(say.grid, say, expression, operands, output, force=force, **others)
    return 0 if right else 1  # a wrong result is not stored


@click.command(cls=OfAllRanks, short_help="Check a product that is stored.")
@_operands
@click.argument("c", type=MATRIX)
@click.option("--c0", type=MATRIX, help="C on entry, needed where beta is not 0.")
@_scalars
@options.seed
@options.layout
@options.json_
@options.debug
def verify(
    a: Dataset, b: Dataset, c: Dataset, c0: Dataset | None, alpha: complex, beta: complex, transa: str, transb: str,
    seed: int, grid_shape: tuple[int, int] | None, block: tuple[int, int] | None, as_json: bool,
) -> int:  # fmt: skip
    """Check C = alpha op(A) op(B) + beta C0 with random vectors, without a second product."""
    from pdgemm.io.source import source
    from pdgemm.io.streamed.before_reading import Outlines, check_memory, operands
    from pdgemm.matrix.residual import Claim, checked_claim, verify as residual_of
    from pdgemm.tools.cli.session import session

    if beta and c0 is None:
        raise click.UsageError("with --beta, C on entry is needed: --c0 FILE:/DATASET")
    with session(grid_shape, as_json) as say:
        grid, outlines = say.grid, Outlines(say.grid, block, "host")
        x, y, z = source(grid, "A", a, None, transa), source(grid, "B", b, None, transb), source(grid, "C", c)
        entry = source(grid, "C on entry", c0) if c0 else None
        once = x.is_same(y)
        A, B = operands(x, y, outlines.of_source, once)
        C, before = outlines.of_source(z), outlines.of_source(entry) if entry else None
        checked_claim(Claim(C, alpha, A, B, beta, before), seed)
        check_memory(grid, sum(outlines.nbytes), "the matrices")
        A, B = operands(x._replace(what="A and B") if once else x, y, lambda each: say.read(each, block), once)
        C, before = say.read(z, block), say.read(entry, block) if entry else None
        with say.progress("verify"):
            residual = residual_of(C, alpha, A, B, beta, before, seed=seed)
        say.report("verify", residual)
    return 0 if residual.passed else 1
