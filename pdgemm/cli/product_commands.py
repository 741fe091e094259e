"""`pdgemm generate`, `multiply` and `verify`: matrices in files, on all ranks."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import click

from pdgemm.arrays.dtypes import COMPUTE
from pdgemm.arrays.element_functions import KINDS
from pdgemm.cli import options
from pdgemm.cli.job import OfAllRanks
from pdgemm.cli.param_types import BLOCK, BYTES, DATASET, GRID, NUMBER, SECONDS, SHAPE, Dataset
from pdgemm.errors import ArgumentError
from pdgemm.names import DeviceName, ElementTypeName, Protection

if TYPE_CHECKING:
    from pdgemm.cli.session import Speaker
    from pdgemm.grids.process_grid import ProcessGrid
    from pdgemm.io.source import Source
    from pdgemm.matrix.distmatrix import DistMatrix

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
_force = click.option("--force", is_flag=True, help="Replace a dataset that exists.")


@click.command(cls=OfAllRanks)
@click.argument("target", type=DATASET)
@click.option("--shape", type=SHAPE, required=True)
@click.option("--dtype", type=click.Choice(options.DTYPES), default="float64", show_default=True)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="uniform",
    show_default=True,
    help="uniform: on [0, 1), of int8 on -128 to 127.  normal: with mean 0 and variance 1.",
)
@_seed
@_layout
@_force
@options.compression
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
    force: bool,
    compression: str | None,
    as_json: bool,
) -> int:
    """Write a test matrix; the same seed gives the same matrix on any number of ranks."""
    import numpy as np

    from pdgemm.arrays.element_functions import element_function
    from pdgemm.cli.ahead import Outlines, check_memory, check_output
    from pdgemm.cli.session import session
    from pdgemm.matrix.distmatrix import DistMatrix

    with session(grid_shape, as_json) as say:
        say.lost = f"{target.path} was not written, its contents are unchanged"
        outlines, known = Outlines(say.grid, block, "host"), np.dtype(dtype)
        outlines.of("the matrix", shape, known)
        check_output(say.grid, target, shape[0] * shape[1] * known.itemsize, force)
        check_memory(say.grid, sum(outlines.nbytes), "the parts of the matrix")
        with say.progress("generate"):
            f = element_function(kind, seed, known)
            matrix = DistMatrix.from_function(f, shape, grid=say.grid, block=block, dtype=dtype)
        say.save(target, matrix, compression=compression)
    return 0


@click.command(cls=OfAllRanks)
@click.argument("a", type=DATASET)
@click.argument("b", type=DATASET)
@click.option(
    "-o",
    "--output",
    type=DATASET,
    required=True,
    help="Dataset for C.  One that pdgemm wrote is replaced when the result is complete; A, B, and a dataset that "
    "pdgemm did not write only with --force, unless it is C on entry.",
)
@click.option("--c", "c0", type=DATASET, help="C on entry where beta is not 0; default: the output.")
@_scalars
@_layout
@click.option("--dtype", type=click.Choice(options.DTYPES), help="Convert A and B first; default: as stored.")
@click.option(
    "--memory",
    type=BYTES,
    help="Per rank, for A, B, C and all buffers: what does not fit is read and multiplied in parts.",
)
@click.option(
    "--checkpoint",
    type=SECONDS,
    help="Save what is done after each 10min or so, beside the output: the same command goes on with it.",
)
@click.option(
    "--mtbf",
    type=SECONDS,
    help="Mean time between failures: checkpoints are saved so often that the least is lost (Young 1974).",
)
@click.option("--memory-limit", type=BYTES, help="Per rank, for buffers beyond A, B and C.")
@click.option("--panel-width", type=options.COUNT, help="Widest panel.")
@click.option(
    "--lookahead",
    type=click.IntRange(0, options.MOST),
    help="Number of panels fetched ahead of the one in use; default: 1 on one node, 4 on several.",
)
@options.mover
@options.algorithm
@click.option("--accumulate-dtype", type=click.Choice(options.SUMS), help="Accumulation type.")
@click.option(
    "--protect",
    type=click.Choice(get_args(Protection)),
    help="Compare C with checksums, and end (detect) or multiply again (repair) where rows differ; with --memory or "
    "--checkpoint each product of panels by itself.",
)
@click.option("--compute-type", type=click.Choice(COMPUTE), help="Round A and B to it; default: not rounded.")
@options.device
@options.trace
@click.option(
    "--report",
    "page",
    type=click.Path(dir_okay=False),
    help="FILE.html: a page of the result, the time of each rank and a timeline; needs matplotlib and jinja2.",
)
@click.option("--verify", "verified", is_flag=True, help="Check the result before it is stored.")
@_seed
@click.option("--force", is_flag=True, help="Replace any dataset by C: A or B, or one of another program.")
@options.compression
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
    memory: int | None,
    checkpoint: float | None,
    mtbf: float | None,
    product_grid: tuple[int, int] | None,
    accumulate_dtype: str | None,
    compute_type: str | None,
    device: DeviceName,
    trace_file: str | None,
    nvtx: bool,
    page: str | None,
    verified: bool,
    seed: int,
    force: bool,
    compression: str | None,
    as_json: bool,
    **others: Any,  # options of `pdgemm.pdgemm` by the same names
) -> int:
    """Compute C := alpha op(A) op(B) + beta C, from files to a file.

    All that can be known without the elements is checked before they are read: shapes, types, options, the output, and
    whether A, B, C and the buffers of the product fit the memory.  One dataset as A and B is read once.

    --memory and --checkpoint do not go with --block, --device cuda and --compression; --mtbf needs --checkpoint.
    """
    real = os.path.realpath
    for name, file in {"--trace": trace_file, "--report": page}.items():
        if file and real(file) in {real(x.path) for x in (a, b, c0, output) if x}:
            raise click.UsageError(f"{name} {file} is a file that is read or written here: name another one")
    if trace_file and page and real(trace_file) == real(page):
        raise click.UsageError(f"--trace and --report are both {page}: name another file for one of them")
    from pdgemm.arrays.dtypes import product
    from pdgemm.cli.session import session
    from pdgemm.errors import LayoutError
    from pdgemm.io.source import source

    if mtbf is not None and checkpoint is None:
        raise click.UsageError("--mtbf needs --checkpoint, the time until the first one, whose duration is measured")
    unfit = {"--block": block, "--device cuda": device != "host"}
    unfit["--compression"] = compression is not None
    for name, given in {"--memory": memory, "--checkpoint": checkpoint}.items():
        if given is not None and any(unfit.values()):
            raise click.UsageError(f"{name} does not go with {' or '.join(x for x in unfit if unfit[x])}")
    others |= {"shape": product_grid, "accumulate_dtype": accumulate_dtype, "compute_type": compute_type}
    with session(grid_shape, as_json) as say, say.traced(trace_file, nvtx, page):
        say.lost = f"{output.path} was not written, its contents are unchanged"
        x, y = source(say.grid, "A", a, dtype, transa), source(say.grid, "B", b, dtype, transb)
        stored = product(x.dtype, y.dtype)
        z = source(say.grid, "C on entry", c0 or output, stored) if beta or c0 else None
        if z and not beta and z.shape != (x.shape[0], y.shape[1]):
            raise LayoutError(
                f"{':'.join(z.dataset)} is {z.shape[0]} x {z.shape[1]}, but C is {x.shape[0]} x {y.shape[1]}"
            )
        z = z if beta else None  # which is not read, then
        wanted = _Wanted(alpha, x, y, beta, z, stored, output, force, seed if verified else None, others)
        if memory is checkpoint is None:
            done = _in_memory(say, wanted, block, device, compression)
        else:
            done = _in_parts(say, wanted, memory, checkpoint, mtbf)
    return 0 if done else 1  # a wrong result is not stored


class _Wanted(NamedTuple):
    """C := alpha op(A) op(B) + beta C from files to a file, and the options of `pdgemm.pdgemm`.

    seed : that of the vectors of `verify`; None: the result is not verified.
    """

    alpha: complex
    a: Source
    b: Source
    beta: complex
    c: Source | None
    stored: Any  # the type of C
    output: Dataset
    force: bool
    seed: int | None
    options: dict[str, Any]

    @property
    def sums(self) -> dict[str, Any]:
        return {name: self.options[name] for name in ("accumulate_dtype", "compute_type")}

    @property
    def flops(self) -> int:
        from pdgemm.model.formulas import gemm_flops

        return gemm_flops(self.a.shape[0], self.b.shape[1], self.a.shape[1], self.stored.kind == "c")

    def check_output(self, grid: ProcessGrid) -> bool:
        from pdgemm.cli.ahead import check_output

        nbytes = self.a.shape[0] * self.b.shape[1] * self.stored.itemsize
        return check_output(grid, self.output, nbytes, self.force, (self.a, self.b), self.c, ours=True)


def _in_memory(
    say: Speaker, x: _Wanted, block: tuple[int, int] | None, device: DeviceName, compression: str | None
) -> bool:
    """Read A and B, multiply and store; return whether the result is right, as far as it is verified."""
    from pdgemm.cli.ahead import check_product, operands
    from pdgemm.gemm import pdgemm, plan
    from pdgemm.io.source import ndim_of_product
    from pdgemm.matrix.residual import verify
    from pdgemm.planning.simulator import words_between

    layout = block, device
    once = check_product(say.grid, x.a, x.b, x.c, *layout, x.seed, alpha=x.alpha, beta=x.beta, **x.options)
    in_place = x.check_output(say.grid)
    a = x.a._replace(what="A and B") if once else x.a
    A, B = operands(a, x.b, lambda each: say.read(each, *layout), once)
    before = say.read(x.c, *layout) if x.c else None
    C = before.copy() if x.seed is not None and before is not None else before
    replaces = before.report if before is not None and in_place else None
    with say.progress("multiply", x.flops) as progress:
        C = pdgemm(x.alpha, A, B, x.beta, C, progress=progress, **x.options)
    say.report("product", C.report.summary())
    if say.on_a_page:
        planned = plan(A, B, C, alpha=x.alpha, beta=x.beta, **x.options)
        with suppress(ArgumentError):  # too many ranks for a picture
            say.words = None if say.grid.rank else words_between(planned.product, say.grid.size)
    if x.seed is not None:
        with say.progress("verify"):
            residual = verify(C, x.alpha, A, B, x.beta, before, seed=x.seed, **x.sums)
        say.report("verify", residual)
        if not residual.passed:
            return False
    say.save(x.output, C, replaces=replaces, compression=compression, ndim=ndim_of_product(x.b, x.c))
    return True


def _in_parts(say: Speaker, x: _Wanted, memory: int | None, checkpoint: float | None, mtbf: float | None) -> bool:
    """The same with at most so many bytes per rank, and with checkpoints."""
    from pdgemm.cli.ahead import check_memory
    from pdgemm.streamed.checkpoints import MOST_FLOPS, When
    from pdgemm.streamed.files_product import FilesProduct
    from pdgemm.streamed.unfinished import Complete, Left

    when = None if checkpoint is None else When(checkpoint, mtbf)
    steps = {} if when is None else {"most_flops": MOST_FLOPS}
    product = FilesProduct(say.grid, x.alpha, x.a, x.b, x.beta, x.c, memory, **steps, **x.options)
    check_memory(say.grid, product.tiling.most_bytes, "a tile of C and panels of A and B", ", or less --memory")
    x.check_output(say.grid)

    def begun(left: Left | None) -> None:
        if left is not None:
            say.note("resumed", [str(left)], {"share": left.share, "generation": left.saved.token.generation})
        say.note("plan", [product.explain()], product.plan)

    with say.progress("multiply", x.flops) as progress:
        try:
            done = product.run(x.output, seed=x.seed, progress=progress, when=when, begun=begun)
        except Complete:
            say.note("complete", [f"{':'.join(x.output)} is complete: an earlier job has finished it"], True)
            return True
    for name, each in zip(("product", "verify", "wrote"), done):
        if each is not None:
            say.report(name, each)
    return done[2] is not None


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
    from pdgemm.cli.ahead import Outlines, check_memory, operands
    from pdgemm.cli.session import session
    from pdgemm.io.source import source
    from pdgemm.matrix.residual import check_arguments
    from pdgemm.matrix.residual import verify as residual_of

    if beta and c0 is None:
        raise click.UsageError("with --beta, C on entry is needed: --c0 FILE:/DATASET")
    with session(grid_shape, as_json) as say:
        grid, outlines = say.grid, Outlines(say.grid, block, "host")
        x, y, z = source(grid, "A", a, None, transa), source(grid, "B", b, None, transb), source(grid, "C", c)
        entry = source(grid, "C on entry", c0) if c0 else None
        once = x.is_same(y)
        A, B = operands(x, y, outlines.of_source, once)
        C, before = outlines.of_source(z), outlines.of_source(entry) if entry else None
        check_arguments(C, alpha, A, B, beta, before, seed=seed)
        check_memory(grid, sum(outlines.nbytes), "the matrices")

        def read(each: Source) -> DistMatrix:
            return say.read(each, block)

        A, B = operands(x._replace(what="A and B") if once else x, y, read, once)
        C, before = read(z), read(entry) if entry else None
        with say.progress("verify"):
            residual = residual_of(C, alpha, A, B, beta, before, seed=seed)
        say.report("verify", residual)
    return 0 if residual.passed else 1
