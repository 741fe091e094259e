"""`pdgemm solve`, `lstsq`, `svd`, `eigh`, `rank` and `gram`: linear algebra from files to files, on all ranks.

The commands are declared here; `linalg_job`, which needs MPI, carries them out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import OfAllRanks
from pdgemm.tools.cli.options import BYTES, DATASET, MATRIX, SUBSET

ASSUMED = ("gen", "pos", "her", "lower triangular", "upper triangular")

_dtype = click.option(
    "--dtype", type=click.Choice(options.BLAS_DTYPES), help="Convert the matrices; default: as stored."
)
_reading = options.stacked_options(options.layout, _dtype, options.trace, options.force)
_writing = options.stacked_options(options.verified, options.compression)


def _output(text: str, required: bool = True) -> Any:
    return click.option("-o", "--output", type=DATASET, required=required, help=text)


def _command(short_help: str, *own: Callable[[Any], Any], writes: bool = True) -> Callable[[Any], click.Command]:
    """Return a decorator that makes a command on a matrix A.   own : the parameters of this command only."""

    def decorate(declared: Callable[[], None]) -> click.Command:
        @wraps(declared)
        def run(**arguments: Any) -> int:
            from pdgemm.tools.cli.linalg_job import carry_out

            return carry_out(declared.__name__, **arguments)

        common = (_reading, *[_writing] * writes, options.json_, options.debug)
        parameters = options.stacked_options(click.argument("a", type=MATRIX), *own, *common)
        return click.command(cls=OfAllRanks, short_help=short_help)(parameters(run))

    return decorate


@_command(
    "Solve systems of linear equations.",
    click.argument("b", type=MATRIX),
    _output("Dataset for X; replaced if pdgemm wrote it."),
    click.option(
        "--assume", type=click.Choice(ASSUMED), default="gen", show_default=True,
        help="Structure of A: pos: Hermitian and positive definite, her: Hermitian; the lower triangle is read.",
    ),
    click.option(
        "--precision", type=click.Choice(("double", "single")), default="double", show_default=True,
        help="Precision of the factors of a matrix in double precision; single: X is refined to double precision.",
    ),
)  # fmt: skip
def solve() -> None:
    """Solve A X = B by a factorisation of A; --verify checks the structure of A and the backward error."""


@_command(
    "Solve a least-squares problem.",
    click.argument("b", type=MATRIX),
    _output("Dataset for X; replaced if pdgemm wrote it."),
    click.option(
        "--rcond", type=click.FloatRange(0),
        help="Singular values of A up to this fraction of the largest one count as 0; default: max(m, n) eps.",
    ),
)  # fmt: skip
def lstsq() -> None:
    """Compute X with the least norm of B - A X and, of all such X, the one of least norm.

    The rank of A, its largest and smallest singular value, and the norm of B - A X are printed.  --verify checks that
    X is a solution for a matrix that differs from A by rounding errors.  If the rank is less than n, it also checks
    that X is the solution of least norm.
    """


@_command(
    "Compute a singular value decomposition.",
    click.option("-k", type=options.COUNT, help="The k largest singular values; default: all."),
    _output("Group of a file for U, s and Vh, such as f.h5:/svd."),
    click.option(
        "--oversample", type=click.IntRange(0, options.MOST),
        help="Columns of the search block beyond k; default: 10, with --memory as many as fit.",
    ),
    click.option(
        "--tolerance", type=click.FloatRange(0, min_open=True),
        help="Stop at this error of the k values, relative to the largest one; default: the rounding error.",
    ),
    click.option("--steps", type=options.COUNT, help="Maximum number of steps for the k values; default: 100."),
    options.seed,
    click.option(
        "--memory", type=BYTES, help="Memory per rank: A stays in its file, and is read in panels.  Needs -k.",
    ),
    click.option(
        "--passes", type=options.COUNT, help="Maximum number of passes over A with --memory; default: no maximum.",
    ),
)  # fmt: skip
def svd() -> None:
    """Compute the singular value decomposition of A, or its k largest singular values and their vectors.

    U (m x k), s (k numbers) and Vh (k x n) are written, where A is about U diag(s) Vh.  The values are printed, with a
    bound of their errors and their share of |A|_F^2.  --verify checks that U and Vh have orthonormal columns and rows,
    that A V = U diag(s) and Ah U = V diag(s), and that no singular value of A - U diag(s) Vh exceeds the smallest one
    in s.

    With --memory, A may be larger than the memory: it is read twice if a triangle of order min(m, n) fits the
    memory of a rank, and otherwise as often as the tolerance requires.  --verify reads it twice more.
    """


@_command(
    "Compute eigenvalues of a Hermitian matrix.",
    _output("Group of a file for w and V, such as f.h5:/eigh; default: none.", required=False),
    click.option("--lower/--upper", default=True, help="The triangle of A that is read; default: the lower one."),
    click.option("--subset", type=SUBSET, help="Eigenvalues LO to HI, both included, numbered from 0."),
    click.option("--values", "alone", is_flag=True, help="Only eigenvalues, in less time."),
)
def eigh() -> None:
    """Compute eigenvalues and eigenvectors of a Hermitian A, of which one triangle is read.

    V (n x k) and w (k numbers in ascending order) are written, where A V = V diag(w); the values are printed.
    --verify checks that V has orthonormal columns, that A V = V diag(w), and that A is Hermitian, unless the triangle
    that is not read is zero.  If all eigenvalues are computed, their sum must be the trace of A, and the sum of their
    squares |A|_F^2.
    """


@_command(
    "Print the rank of a matrix.",
    click.option(
        "--rtol", type=click.FloatRange(0),
        help="Singular values up to this fraction of the largest one count as 0; default: max(m, n) eps.",
    ),
    writes=False,
)  # fmt: skip
def rank() -> None:
    """Print the rank of A, and the singular values on both sides of the tolerance, which tell how clear the rank is."""


@_command("Compute the Gram matrix of columns.", _output("Dataset for G; replaced if pdgemm wrote it."))
def gram() -> None:
    """Compute the Gram matrix G := Ah A by half the operations of a product; --verify checks it by random vectors."""
