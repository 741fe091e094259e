"""The command line: `pdgemm` under mpirun, srun or alone.  Rank 0 speaks for all.

Exit codes, the same on all ranks: 0 done, 1 a result is wrong (`verify`, `--verify`), 2 bad input,
3 an unexpected error (the whole job is ended), 130 and 143 ended by SIGINT, SIGTERM or SIGUSR1.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import traceback
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdgemm.arrays.dtypes import COMPUTE
from pdgemm.arrays.element_functions import KINDS
from pdgemm.cli import options
from pdgemm.cli.param_types import BLOCK, BYTES, DATASET, GRID, MNK, NUMBER, SHAPE, Dataset
from pdgemm.cli.scaling import inside_job, plot, scaling
from pdgemm.devices import gpu_binding
from pdgemm.errors import ArgumentError, PdgemmError, check_together

if TYPE_CHECKING:
    from pdgemm.planning.estimates import Question

WITHOUT_MPI = ("plan", "simulate", "plot", "profile")  # commands that run on one process and need no MPI library
UNEXPECTED = 3
SUMS = ("float32", "float64", "complex64", "complex128", "int32")


_layout = options.together(
    click.option("--grid", "grid_shape", type=GRID, help="Process grid; default: as square as can be."),
    click.option("--block", type=BLOCK, help="Block sizes of the layout; default: one block per rank."),
)
_scalars = options.together(
    click.option("--alpha", type=NUMBER, default=1.0, show_default=True),
    click.option("--beta", type=NUMBER, default=0.0, show_default=True),
    click.option("--transa", type=click.Choice("NTC", False), default="N", help="op(A): as it is, T, or C for A^H."),
    click.option("--transb", type=click.Choice("NTC", False), default="N", help="op(B)."),
)
_algorithm = options.together(
    options.algorithm,
    click.option("--product-grid", type=GRID, help="Grid of the product, which need not be that of the matrices."),
    click.option("--layers", type=options.COUNT, help="Layers of that grid (2.5d)."),
)
_question = options.together(
    click.option("--shape", type=MNK, required=True, help="m,n,k of C (m x n) = A (m x k) B (k x n)."),
    click.option("--ranks", type=options.COUNT, required=True),
    click.option("--memory", type=BYTES, help="Per rank, for all: its parts of A, B and C, copies, panels, messages."),
    click.option(
        "--ranks-per-node", type=options.COUNT, help="Default: what the machine file says, else all on one node."
    ),
    options.machine,
    click.option("--dtype", type=click.Choice(options.BLAS_DTYPES), default="float64", show_default=True),
    _algorithm,
    click.option("--mover", type=click.Choice(("ibcast", "ring")), default="ibcast", show_default=True),
)
_seed = click.option("--seed", default=0, show_default=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pdgemm")
def cli() -> None:
    """Distributed dense matrix multiplication: C := alpha op(A) op(B) + beta C.

    Run alone or on many ranks: mpirun -n 4 pdgemm multiply a.h5:/x b.h5:/y -o c.h5:/z
    """


cli.add_command(scaling)
cli.add_command(plot)


# ------------------------------------------------------------------ commands
@cli.command()
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

    from pdgemm.arrays.element_functions import element_function
    from pdgemm.cli.session import session
    from pdgemm.io import hdf5
    from pdgemm.matrix.distmatrix import DistMatrix

    with session(grid_shape, as_json) as say:
        say.lost = f"{target.path} was not written, what it held is as it was"
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
@click.option("--dtype", type=click.Choice(options.DTYPES), help="Convert the operands; default: as they are stored.")
@click.option("--memory-limit", type=BYTES, help="Per rank, for buffers beyond A, B and C.")
@click.option("--panel-width", type=options.COUNT, help="Widest panel.")
@click.option(
    "--lookahead",
    type=click.IntRange(0, options.MOST),
    default=1,
    show_default=True,
    help="Panels in flight behind the one in use.",
)
@options.mover
@_algorithm
@click.option("--accumulate-dtype", type=click.Choice(SUMS), help="Type in which products are added up.")
@click.option("--compute-type", type=click.Choice(COMPUTE), help="What operands are rounded to; default: nothing.")
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
    dtype: str | None,
    memory_limit: int | None,
    panel_width: int | None,
    lookahead: int,
    mover: str,
    algorithm: str,
    product_grid: tuple[int, int] | None,
    layers: int | None,
    accumulate_dtype: str | None,
    compute_type: str | None,
    device: str,
    trace_file: str | None,
    nvtx: bool,
    verified: bool,
    seed: int,
    as_json: bool,
    debug: bool,
) -> int:
    """C := alpha op(A) op(B) + beta C, from files to a file."""
    real = os.path.realpath
    from_output = c0 is None or (real(c0.path), c0.name.strip("/")) == (real(output.path), output.name.strip("/"))
    if trace_file and real(trace_file) in {real(x.path) for x in (a, b, c0, output) if x}:
        raise click.UsageError(f"--trace {trace_file} is a file that is read or written here: name another one")
    from pdgemm.arrays.dtypes import product
    from pdgemm.cli.session import session
    from pdgemm.gemm import pdgemm
    from pdgemm.instrument.report import summary
    from pdgemm.io import hdf5
    from pdgemm.matrix.residual import verify

    with session(grid_shape, as_json) as say, say.traced(trace_file, nvtx):
        say.lost = f"{output.path} was not written, what it held is as it was"
        A = say.load("A", a, block, dtype, transa, device)
        B = say.load("B", b, block, dtype, transb, device)
        # before the work, not after it
        stored = product(A.dtype, B.dtype)
        size = A.shape[0] * B.shape[1] * stored.itemsize
        hdf5.check_output(Path(output.path), output.name, say.grid, size)
        before = say.load("C on entry", c0 or output, block, str(stored), device=device) if beta else None
        C = before.copy() if verified and before is not None else before
        replaces = before.report if before is not None and from_output else None
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
                shape=product_grid,
                layers=layers,
                accumulate_dtype=accumulate_dtype,
                compute_type=compute_type,
                progress=progress,
            )
        reports = say.grid.comm.gather(C.report)
        say.report("product", summary(reports) if reports else None)
        if verified:
            with say.progress("verify"):
                residual = verify(
                    C,
                    alpha,
                    A,
                    B,
                    beta,
                    before,
                    seed=seed,
                    accumulate_dtype=accumulate_dtype,
                    compute_type=compute_type,
                )
            say.report("verify", residual)
            if not residual.passed:
                return 1  # a wrong result is not stored
        with say.progress("write") as progress:
            say.report("wrote", hdf5.save(*output, C, replaces=replaces, progress=progress))
    return 0


@cli.command()
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
    debug: bool,
) -> int:
    """Is C = alpha op(A) op(B) + beta C0?  By random vectors, without a second product."""
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


@cli.command()
@options.json_
@options.debug
def info(as_json: bool, debug: bool) -> int:
    """What this installation can do, what is missing, and how to get it."""
    from pdgemm.cli.session import say_line, session
    from pdgemm.profiling.environment import describe, table

    with session(None, as_json) as say:
        facts = describe(say.grid)
        if as_json:
            say.facts.update(facts)
        else:
            say_line(str(table(facts)))
    return 0


@cli.command()
@click.option("-o", "--output", type=click.Path(dir_okay=False), required=True, help="JSON file for --machine.")
@options.json_
@options.debug
def calibrate(output: str, as_json: bool, debug: bool) -> int:
    """Measure messages, copies and products on these ranks, for plans of this machine.

    Products use the file that PDGEMM_MACHINE names; `plan` and `simulate` the one of --machine.
    """
    from mpi4py import MPI

    from pdgemm.calibrate import calibrate as measure
    from pdgemm.cli.session import session
    from pdgemm.io.atomic import check_writable, on_root, replacing

    path = Path(output)
    with session(None, as_json) as say:
        comm = say.grid.comm
        check_writable(path, comm, 1 << 16)  # before the work, not after it
        with say.progress("calibrate") as progress:
            machine = measure(MPI.COMM_WORLD, progress)
        text = machine.as_json() + "\n"
        with replacing(path, comm, len(text)) as partial:
            on_root(comm, path, lambda: partial.write_text(text))
        say.report("machine", machine)
    return 0


@cli.command()
@_question
@click.option(
    "--redistribute",
    is_flag=True,
    help="A, B and C lie otherwise than the algorithm wants them; words are then at most what is said.",
)
@options.json_
@options.debug
def plan(redistribute: bool, as_json: bool, debug: bool, **asked: Any) -> int:
    """What would run, how long it would take, and what the alternatives cost.  Needs no MPI."""
    from pdgemm.planning.candidate_table import table
    from pdgemm.planning.choice import estimates

    question = _asked(redistributed=redistribute, **asked)
    found = estimates(question)
    if as_json:
        facts = {"shape": question.mnk, "ranks": question.ranks, "machine": question.machine.name}
        click.echo(json.dumps({**facts, "candidates": [x.as_dict() for x in found]}))
    else:
        click.echo(found[0].summary(question.mnk, question.ranks))
        click.echo(f"machine: {question.machine.name}; lower bound {question.bound:.4g} words per rank")
        click.echo(table(found))
    return 0


@cli.command()
@_question
@options.json_
@options.debug
def simulate(as_json: bool, debug: bool, **asked: Any) -> int:
    """Walk the schedule of all ranks, message by message, nodes sharing their way to the network.  Needs no MPI."""
    from pdgemm.planning.choice import chosen, product_of
    from pdgemm.planning.simulator import simulate as walk
    from pdgemm.support.text import counted, in_bytes

    question = _asked(**asked)
    estimate = chosen(question)[0]
    candidate, run = estimate.candidate(), walk(product_of(estimate), question.machine, question.ranks)
    facts = {
        "shape": question.mnk,
        "ranks": question.ranks,
        "algorithm": candidate.algorithm,
        "inside": candidate.inside,
        "grid": candidate.grid,
        "layers": candidate.layers,
        "seconds": run.seconds,
        "formula_seconds": candidate.seconds,
        "compute_seconds": {"mean": float(run.computed.mean()), "max": float(run.computed.max())},
        "node_bytes": {"mean": float(run.node_bytes.mean()), "max": float(run.node_bytes.max())},
        "formula_words_received": candidate.words_per_rank,
        **{
            name: {"min": int(x.min()), "mean": float(x.mean()), "max": int(x.max())}
            for name in ("words_received", "words_sent", "messages_received", "messages_sent")
            for x in (getattr(run, name),)
        },
    }
    if as_json:
        click.echo(json.dumps(facts))
        return 0
    nodes, busiest = len(run.node_bytes), run.computed.max()
    words, messages = run.words_received, run.messages_received
    by_formula = f"{candidate.words_per_rank:.0f} in {candidate.messages_per_rank:.0f}"
    click.echo(
        f"{candidate.summary(question.mnk, question.ranks)}\n"
        f"simulated on {counted(nodes, 'node')}: {run.seconds:.4g} s, of which the busiest rank computes "
        f"{busiest:.4g}; by formula {candidate.seconds:.4g} s\n"
        f"words received per rank: {words.min()} to {words.max()}, in {messages.min()} to {messages.max()} messages "
        f"(formula {by_formula})\n"
        f"into a node: {in_bytes(run.node_bytes.mean())} on average, {in_bytes(run.node_bytes.max())} at most"
    )
    return 0


@cli.command()
@click.argument("trace_file", type=click.Path(dir_okay=False))
@options.machine
@options.json_
@options.debug
def profile(trace_file: str, machine_file: str | None, as_json: bool, debug: bool) -> int:
    """Show where the time of `--trace` went: phase by phase, and rank by rank.  Needs no MPI."""
    from pdgemm.model.machine import load_machine
    from pdgemm.profiling.profile import load_profile
    from pdgemm.profiling.profile_tables import tables

    found = load_profile(Path(trace_file), load_machine(machine_file) if machine_file else None)
    click.echo(json.dumps(found.as_dict()) if as_json else tables(found))
    return 0


def _asked(
    shape: tuple[int, int, int],
    ranks: int,
    memory: int | None,
    ranks_per_node: int | None,
    machine_file: str | None,
    dtype: str,
    algorithm: str,
    product_grid: tuple[int, int] | None,
    layers: int | None,
    mover: str,
    redistributed: bool = False,
) -> Question:
    """The options of `plan` and `simulate`."""
    import numpy as np

    from pdgemm.model.machine import load_machine, on_nodes
    from pdgemm.planning.estimates import Question

    machine = load_machine(machine_file)
    if ranks_per_node is not None:
        machine = on_nodes(machine, ranks_per_node)
    return Question(
        *shape,
        ranks,
        dtype=np.dtype(dtype),
        memory=memory,
        redistributed=redistributed,
        algorithm=algorithm,
        shape=product_grid,
        layers=layers,
        mover=mover,
        machine=machine,
    )


# ------------------------------------------------------------------ running
def main() -> None:
    """Entry point of `pdgemm`."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not be text
    debug, several = "--debug" in sys.argv, inside_job(sys.argv)
    name = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    if not several and name in (*WITHOUT_MPI, scaling.name):
        sys.exit(_alone(debug))
    # a rank that left in an orderly way while MPI starts would be waited for
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if {"cuda", "--device=cuda"} & {*sys.argv}:
        with suppress(PdgemmError):  # on this rank only: all hear of it when the first matrix is made
            gpu_binding.choose()  # before MPI starts
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as bad:
        if name in WITHOUT_MPI:
            sys.exit(_alone(debug))
        click.echo(f"pdgemm: error: no usable MPI library ({bad}); pip install 'pdgemm[mpi]' brings one", err=True)
        sys.exit(2)

    from pdgemm.support import signals

    rank = MPI.COMM_WORLD.rank
    signals.watch(rank)
    if rank:  # help, results and plain errors come from rank 0
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        check_together(MPI.COMM_WORLD, None, f"pdgemm {shlex.join(sys.argv[1:])}")
        # all ranks were given the same command, and get to the same end; these need one only
        code = 0 if rank and name in WITHOUT_MPI else _code(rank, debug)
    except ArgumentError as bad:
        code = _told(rank, str(bad), debug)
    except BaseException:
        # perhaps on this rank only: the others would wait for it for ever
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(UNEXPECTED)
    # a launcher may kill the job at the first exit code that is not 0: let everyone get here
    MPI.COMM_WORLD.Barrier()
    sys.exit(code)


def _alone(debug: bool) -> int:
    """The exit code where there is no MPI, and nobody else to be ended."""
    try:
        return _code(0, debug)
    except click.Abort:
        return 128 + signal.SIGINT
    except SystemExit:  # as click ends where nobody reads what it says any more
        return 0
    except Exception:
        traceback.print_exc()
        return UNEXPECTED


def _code(rank: int, debug: bool) -> int:
    """Run the command; the exit code."""
    try:
        return cli.main(prog_name="pdgemm", standalone_mode=False) or 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as bad:
        click.echo(bad.format_message())
        return 2
    except click.ClickException as bad:
        return _told(rank, bad.format_message(), debug)
    except PdgemmError as bad:  # raised on all ranks together
        return _told(rank, str(bad), debug)


def _told(rank: int, message: str, debug: bool) -> int:
    if rank == 0:
        if debug:
            traceback.print_exc()
        click.echo(f"pdgemm: error: {' '.join(message.split())}", err=True)
    return 2
