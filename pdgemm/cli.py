"""The command line: `pdgemm` under mpirun, srun or alone.  Rank 0 speaks for all.

Exit codes, the same on all ranks: 0 done, 1 a result is wrong (`verify`, `--verify`), 2 bad input,
3 an unexpected error (the whole job is ended).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pdgemm.elements import KINDS
from pdgemm.errors import PdgemmError
from pdgemm.forms import BLOCK, BYTES, DATASET, GRID, NUMBER, SHAPE, Dataset

ALGORITHMS = ("auto", "summa", "inner")
SUMS = ("float32", "float64", "complex64", "complex128", "int32")
DTYPES = ("float16", "float32", "float64", "complex64", "complex128", "int8")


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator, in the order of the help text."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_layout = _options(
    click.option("--grid", "grid_shape", type=GRID, help="Process grid; default: as square as can be."),
    click.option("--block", type=BLOCK, help="Block sizes of the layout; default: one block per rank."),
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
_debug = click.option("--debug", is_flag=True, help="Errors with a traceback.")
_scalars = _options(
    click.option("--alpha", type=NUMBER, default=1.0, show_default=True),
    click.option("--beta", type=NUMBER, default=0.0, show_default=True),
    click.option("--transa", type=click.Choice("NTC", False), default="N", help="op(A): as it is, T, or C for A^H."),
    click.option("--transb", type=click.Choice("NTC", False), default="N", help="op(B)."),
)
_seed = click.option("--seed", default=0, show_default=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pdgemm")
def cli() -> None:
    """Distributed dense matrix multiplication: C := alpha op(A) op(B) + beta C.

    Run alone or on many ranks: mpirun -n 4 pdgemm multiply a.h5:/x b.h5:/y -o c.h5:/z
    """


# ------------------------------------------------------------------ commands
@cli.command()
@click.argument("target", type=DATASET)
@click.option("--shape", type=SHAPE, required=True)
@click.option("--dtype", type=click.Choice(DTYPES), default="float64", show_default=True)
@click.option("--kind", type=click.Choice(KINDS), default="uniform", show_default=True)
@_seed
@_layout
@_json
@_debug
def generate(
    target: Dataset,
    shape: tuple[int, int],
    dtype: str,
    kind: str,
    seed: int,
    grid_shape: tuple[int, int] | None,
    block: tuple[int, int] | None,
    as_json: bool,
    debug: bool,
) -> int:
    """Write a matrix of a KIND, the same for a seed on any number of ranks."""
    import numpy as np

    from pdgemm.elements import element_function
    from pdgemm.io import hdf5
    from pdgemm.matrix import DistMatrix
    from pdgemm.session import session

    with session(grid_shape, as_json) as say:
        with say.progress("generate"):
            f = element_function(kind, seed, np.dtype(dtype))
            matrix = DistMatrix.from_function(f, shape, grid=say.grid, block=block, dtype=dtype)
        with say.progress("write") as progress:
            say.report("wrote", hdf5.save(*target, matrix, progress=progress))
    return 0


@cli.command()
@click.argument("a", type=DATASET)
@click.argument("b", type=DATASET)
@click.option("-o", "--output", type=DATASET, required=True, help="Where C goes.")
@click.option("--c", "c0", type=DATASET, help="C on entry where beta is not 0; default: the output.")
@_scalars
@_layout
@click.option("--dtype", type=click.Choice(DTYPES), help="Convert the operands; default: as they are stored.")
@click.option("--memory-limit", type=BYTES, help="Per rank, for buffers beyond A, B and C.")
@click.option("--panel-width", type=int, help="Widest panel.")
@click.option("--lookahead", default=1, show_default=True, help="Panels in flight behind the one in use.")
@click.option("--mover", type=click.Choice(("ibcast", "ring")), default="ibcast", show_default=True)
@click.option("--algorithm", type=click.Choice(ALGORITHMS), default="auto", show_default=True)
@click.option("--accumulate-dtype", type=click.Choice(SUMS), help="Type in which products are added up.")
@click.option("--verify", "verified", is_flag=True, help="Check the result before it is stored.")
@_seed
@_json
@_debug
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
    dtype: str | None,
    memory_limit: int | None,
    panel_width: int | None,
    lookahead: int,
    mover: str,
    algorithm: str,
    accumulate_dtype: str | None,
    verified: bool,
    seed: int,
    as_json: bool,
    debug: bool,
) -> int:
    """C := alpha op(A) op(B) + beta C, from files to a file."""
    from pdgemm.dtypes import product
    from pdgemm.gemm import pdgemm
    from pdgemm.io import hdf5
    from pdgemm.io.atomic import check_writable
    from pdgemm.report import summary
    from pdgemm.residual import verify
    from pdgemm.session import session

    with session(grid_shape, as_json) as say:
        A = say.load("A", a, block, dtype, transa)
        B = say.load("B", b, block, dtype, transb)
        # before the work, not after it
        stored = product(A.dtype, B.dtype)
        check_writable(Path(output.path), say.grid.comm, A.shape[0] * B.shape[1] * stored.itemsize)
        before = say.load("C on entry", c0 or output, block, str(stored)) if beta else None
        C = before.copy() if verified and before is not None else before
        with say.progress("multiply") as progress:
            C = pdgemm(
                alpha,
                A,
                B,
                beta,
                C,
                memory_limit=memory_limit,
                panel_width=panel_width,
                lookahead=lookahead,
                mover=mover,
                algorithm=algorithm,
                accumulate_dtype=accumulate_dtype,
                progress=progress,
            )
        reports = say.grid.comm.gather(C.report)
        say.report("product", summary(reports) if reports else None)
        if verified:
            with say.progress("verify"):
                residual = verify(C, alpha, A, B, beta, before, seed=seed, accumulate_dtype=accumulate_dtype)
            say.report("verify", residual)
            if not residual.passed:
                return 1  # a wrong result is not stored
        with say.progress("write") as progress:
            say.report("wrote", hdf5.save(*output, C, progress=progress))
    return 0


@cli.command()
@click.argument("a", type=DATASET)
@click.argument("b", type=DATASET)
@click.argument("c", type=DATASET)
@click.option("--c0", type=DATASET, help="C on entry, needed where beta is not 0.")
@_scalars
@_seed
@_layout
@_json
@_debug
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
    debug: bool,
) -> int:
    """Is C = alpha op(A) op(B) + beta C0?  By random vectors, without a second product."""
    from pdgemm.residual import verify as residual_of
    from pdgemm.session import session

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


@cli.command()
@_json
@_debug
def info(as_json: bool, debug: bool) -> int:
    """What this installation can do, what is missing, and how to get it."""
    from pdgemm.info import describe, lines
    from pdgemm.session import say_line, session

    with session(None, as_json) as say:
        facts = describe(say.grid)
        if as_json:
            say.facts.update(facts)
        else:
            say_line("\n".join(lines(facts)))
    return 0


# ------------------------------------------------------------------ running
def main() -> None:
    """Entry point of `pdgemm`."""
    debug = "--debug" in sys.argv
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as bad:
        click.echo(f"pdgemm: error: no usable MPI library ({bad}); pip install 'pdgemm[mpi]' brings one", err=True)
        sys.exit(2)

    rank = MPI.COMM_WORLD.rank
    if rank:  # help, results and plain errors come from rank 0
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = cli.main(prog_name="pdgemm", standalone_mode=False) or 0
    except click.exceptions.Exit as end:
        code = end.exit_code
    except click.exceptions.NoArgsIsHelpError as bad:
        click.echo(bad.format_message())
        code = 2
    except click.ClickException as bad:
        code = _told(rank, bad.format_message(), debug)
    except PdgemmError as bad:  # raised on all ranks together
        code = _told(rank, str(bad), debug)
    except BaseException:
        # perhaps on this rank only: the others would wait for it for ever
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(3)
    # a launcher may kill the job at the first exit code that is not 0: let everyone get here
    MPI.COMM_WORLD.Barrier()
    sys.exit(code)


def _told(rank: int, message: str, debug: bool) -> int:
    if rank == 0:
        if debug:
            traceback.print_exc()
        click.echo(f"pdgemm: error: {' '.join(message.split())}", err=True)
    return 2
