"""The command line: `pdgemm` under mpirun, srun or alone.  Rank 0 speaks for all.

Exit codes, the same on all ranks: 0 done, 1 a result is wrong (`verify`, `--verify`), 2 bad input,
3 an unexpected error (the whole job is ended).
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import click

from pdgemm.elements import KINDS
from pdgemm.errors import ArgumentError, PdgemmError

DTYPES = ("float32", "float64", "complex64", "complex128")


# ------------------------------------------------------------------ the forms of arguments
class Dataset(NamedTuple):
    """A dataset in a file."""

    path: str
    name: str


class _Form(click.ParamType[Any]):
    """A click type made of a function and an example."""

    def __init__(self, name: str, parse: Callable[[str], Any], example: str) -> None:
        self.name, self._parse, self._example = name, parse, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError:
            self.fail(f"{value!r} is not of the form {self._example}", param, ctx)


def _dataset(text: str) -> Dataset:
    path, colon, name = text.rpartition(":")
    if not path or not colon or not name.strip("/"):
        raise ValueError
    return Dataset(path, name)


def _pair(text: str) -> tuple[int, int]:
    first, second = re.split("[x,]", text)
    return int(first), int(second)


def _block(text: str) -> tuple[int, int]:
    return _pair(text) if re.search("[x,]", text) else (int(text), int(text))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*(?:([KMGT]?)(i?)B?)\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def _number(text: str) -> complex:
    above, _, below = text.replace("i", "j").partition("/")
    value = complex(above) / complex(below or "1")
    return value if value.imag else value.real


DATASET = _Form("file:/dataset", _dataset, "FILE:/DATASET, such as a.h5:/x")
SHAPE = _Form("rows x cols", _pair, "5000x3000")
GRID = _Form("PrxPc", _pair, "2x3")
BLOCK = _Form("size", _block, "256 or 256x128")
BYTES = _Form("bytes", _bytes, "2GiB, 500MB or 1000000")
NUMBER = _Form("number", _number, "1.5, 1/3 or 2+1j")


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

    with _session(grid_shape, as_json) as say:
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
@click.option("--dtype", type=click.Choice(DTYPES), help="Convert the operands; default: A's own type.")
@click.option("--memory-limit", type=BYTES, help="Per rank, for buffers beyond A, B and C.")
@click.option("--panel-width", type=int, help="Widest panel.")
@click.option("--lookahead", default=1, show_default=True, help="Panels in flight behind the one in use.")
@click.option("--mover", type=click.Choice(("ibcast", "ring")), default="ibcast", show_default=True)
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
    verified: bool,
    seed: int,
    as_json: bool,
    debug: bool,
) -> int:
    """C := alpha op(A) op(B) + beta C, from files to a file."""
    from pdgemm.gemm import pdgemm
    from pdgemm.io import hdf5
    from pdgemm.io.atomic import check_writable
    from pdgemm.report import summary
    from pdgemm.residual import verify

    with _session(grid_shape, as_json) as say:
        A = say.load("A", a, block, dtype, transa)
        B = say.load("B", b, block, dtype, transb)
        # before the work, not after it
        check_writable(Path(output.path), say.grid.comm, A.shape[0] * B.shape[1] * A.dtype.itemsize)
        before = say.load("C on entry", c0 or output, block, dtype or str(A.dtype)) if beta else None
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
                progress=progress,
            )
        reports = say.grid.comm.gather(C.report)
        say.report("product", summary(reports) if reports else None)
        if verified:
            with say.progress("verify"):
                residual = verify(C, alpha, A, B, beta, before, seed=seed)
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

    if beta and c0 is None:
        raise click.UsageError("with --beta, C on entry is needed: --c0 FILE:/DATASET")
    with _session(grid_shape, as_json) as say:
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

    with _session(None, as_json) as say:
        facts = describe(say.grid)
        if as_json:
            say.facts.update(facts)
        else:
            click.echo("\n".join(lines(facts)))
    return 0


# ------------------------------------------------------------------ speaking
class _Speaker:
    """What commands need: the grid, and a voice that only rank 0 has."""

    def __init__(self, grid: Any, as_json: bool) -> None:
        from rich.console import Console

        self.grid, self.as_json = grid, as_json
        self.facts: dict[str, Any] = {"ranks": grid.size, "grid": grid.shape}
        self._console = Console(stderr=True)
        self._bar = grid.rank == 0 and self._console.is_terminal and not as_json

    def report(self, key: str, what: Any) -> None:
        """Say what has been done: a line, or a member of the JSON object."""
        if self.grid.rank:
            return
        from dataclasses import asdict, is_dataclass

        plain = asdict(what) if is_dataclass(what) else dict(what)  # type: ignore[arg-type]
        if key == "verify":
            plain["passed"] = what.passed
        self.facts[key] = [*self.facts.get(key, []), plain] if key == "read" else plain
        if not self.as_json:
            click.echo(_product_text(what) if key == "product" else str(what))

    def load(
        self, what: str, dataset: Dataset, block: tuple[int, int] | None, dtype: str | None = None, op: str = "N"
    ) -> Any:
        import numpy as np

        from pdgemm.io import hdf5

        with self.progress(f"read {what}") as progress:
            transpose = op.upper() != "N"
            matrix = hdf5.load(*dataset, self.grid, block, dtype=dtype, transpose=transpose, progress=progress)
            if op.upper() == "C":
                np.conjugate(matrix.local, out=matrix.local)
        self.report("read", matrix.report)
        return matrix

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], object] | None]:
        """A progress bar where rank 0 has a terminal."""
        if not self._bar:
            yield None
            return
        from rich.progress import Progress

        with Progress(console=self._console, transient=True) as bars:
            bar = bars.add_task(what, total=None)
            yield lambda done, total: bars.update(bar, completed=done, total=total)


@contextmanager
def _session(grid_shape: tuple[int, int] | None, as_json: bool) -> Iterator[_Speaker]:
    """A grid over all ranks and a speaker; at the end the JSON object."""
    from mpi4py import MPI

    from pdgemm.grids.process_grid import ProcessGrid

    _check_launcher(MPI.COMM_WORLD.size)
    start = perf_counter()
    with ProcessGrid(MPI.COMM_WORLD, grid_shape) as grid:
        say = _Speaker(grid, as_json)
        yield say
        if as_json and grid.rank == 0:
            say.facts["seconds"] = perf_counter() - start
            click.echo(json.dumps(say.facts, default=str))


def _check_launcher(size: int) -> None:
    """A launcher of another MPI library starts processes that do not know of each other."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        started = int(os.environ.get(name, "1"))
        if size == 1 and started > 1:
            from mpi4py import MPI

            library = MPI.Get_library_version().split(",")[0].split("\n")[0]
            raise ArgumentError(
                f"the launcher started {started} processes ({name}), but MPI sees one: the launcher belongs to "
                f"another MPI than mpi4py's {library}; use that library's mpiexec, or set MPI4PY_LIBMPI"
            )


def _product_text(facts: dict[str, Any]) -> str:
    """The summary of a product for people."""
    spread = facts["per_rank"]
    seconds = {name: f"{spread[name]['mean']:.3f}" for name in ("compute_seconds", "wait_seconds", "pack_seconds")}
    return (
        f"{facts['title']}\n"
        f"  {spread['seconds']['max']:.3f} s, {facts['gflops']:.1f} GFLOP/s; mean over ranks: compute "
        f"{seconds['compute_seconds']} s, wait {seconds['wait_seconds']} s, pack {seconds['pack_seconds']} s\n"
        f"  words received per rank: {spread['words_received']['min']} to {spread['words_received']['max']}, "
        f"in {spread['messages_received']['min']} to {spread['messages_received']['max']} messages "
        f"({'as' if facts['as_predicted'] else 'NOT as'} the formula says); "
        f"buffers up to {spread['extra_bytes']['max'] / 2**20:.1f} MiB"
    )


# ------------------------------------------------------------------ running
def main() -> None:
    """Entry point of `pdgemm`."""
    debug = "--debug" in sys.argv
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    if rank:  # help, results and plain errors come from rank 0
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = cli.main(prog_name="pdgemm", standalone_mode=False) or 0
    except click.exceptions.Exit as end:
        code = end.exit_code
    except click.ClickException as bad:
        code = _told(rank, bad.format_message(), debug)
    except (PdgemmError, MemoryError, OSError) as bad:
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
