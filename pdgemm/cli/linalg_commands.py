"""`pdgemm solve`, `svd` and `gram`: linear algebra from files to files, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pdgemm.cli import options
from pdgemm.cli.job import OfAllRanks
from pdgemm.cli.param_types import BLOCK, DATASET, GRID, Dataset

if TYPE_CHECKING:
    from pdgemm.cli.session import Speaker
    from pdgemm.io.source import Source
    from pdgemm.matrix.distmatrix import DistMatrix

ASSUMED = ("gen", "pos", "her", "lower triangular", "upper triangular")
_EPS = 3  # times n and the unit roundoff: the bound of the tests of SLATE
_common = options.together(
    click.option("--grid", "grid_shape", type=GRID, help="Process grid; default: as square as possible."),
    click.option("--block", type=BLOCK, help="Block sizes of the layout; default: one block per rank."),
    click.option("--dtype", type=click.Choice(options.BLAS_DTYPES), help="Convert the matrices; default: as stored."),
    options.trace,
    click.option("--verify", "verified", is_flag=True, help="Check the result before it is stored."),
    click.option("--force", is_flag=True, help="Replace any dataset by the result."),
    options.json_,
    options.debug,
)


class How(NamedTuple):
    """The options that all of these commands have."""

    grid_shape: tuple[int, int] | None
    block: tuple[int, int] | None
    dtype: str | None
    trace_file: str | None
    nvtx: bool
    verified: bool
    force: bool
    as_json: bool


def _on_all_ranks(body: Callable[..., int]) -> Callable[..., int]:
    """Return a function of all options for `body`, a function of a session, the common options and the others."""

    @wraps(body)
    def run(**given: Any) -> int:
        from pdgemm.cli.session import session

        how = How(*map(given.pop, How._fields))
        with session(how.grid_shape, how.as_json) as say, say.traced(how.trace_file, how.nvtx):
            return body(say, how, **given)

    return _common(run)


@dataclass(frozen=True)
class Check:
    """A relative error, and the largest that rounding explains."""

    what: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.value <= self.bound

    def __str__(self) -> str:
        return f"{self.what} {self.value:.1e} (tolerance {self.bound:.1e}): {'ok' if self.passed else 'WRONG'}"


@click.command(cls=OfAllRanks)
@click.argument("a", type=DATASET)
@click.argument("b", type=DATASET)
@click.option("-o", "--output", type=DATASET, required=True, help="Dataset for X; replaced if pdgemm wrote it.")
@click.option(
    "--assume", type=click.Choice(ASSUMED), default="gen", show_default=True,
    help="What A is: pos: Hermitian and positive definite, of which the lower triangle is read.",
)  # fmt: skip
@click.option("--refine", is_flag=True, help="Factor in single precision, and refine X to double precision.")
@_on_all_ranks
def solve(say: Speaker, how: How, a: Dataset, b: Dataset, output: Dataset, assume: Any, refine: bool) -> int:
    """Solve A X = B by a factorisation of A; --verify checks the backward error."""
    from pdgemm import linalg
    from pdgemm.errors import LayoutError
    from pdgemm.support.text import counted

    x, y = _sources(say, {"A": a, "B": b}, how.dtype)
    if x.shape[0] != x.shape[1]:
        raise LayoutError(f"A must be square to be solved with, it is {x.shape[0]} x {x.shape[1]}")
    if x.shape[0] != y.shape[0]:
        raise LayoutError(f"A has {counted(x.shape[0], 'row')}, but B has {y.shape[0]}")
    (n, m), wide = y.shape, max(x.dtype, y.dtype)
    size = n * n + 3 * n * m if assume == "pos" or "triangular" in assume else 2 * n * n + 3 * n * m
    _check(say, [(output, n * m)], (x, y), wide, how, (2 + how.verified) * size)
    A, B = (say.read(each, how.block) for each in (x, y))
    with say.progress("solve"):
        X = linalg.solve(A, B, assume_a=assume, refine=refine)
    say.report("solve", X.report.summary())
    if how.verified:
        with say.progress("verify"):
            if "triangular" in assume or assume == "pos":
                A = _whole(A, assume)
            scale = max(1, n) * (A.norm(1) * X.norm(1) + B.norm(1))
            residual = (B - A @ X).norm(1)
        if not _passes(say, [("backward error", residual, scale)], wide):
            return 1
    say.save(output, X)
    return 0


@click.command(cls=OfAllRanks)
@click.argument("a", type=DATASET)
@click.option("-k", type=options.COUNT, help="The k largest singular values, by random projections; default: all.")
@click.option("-o", "--output", type=DATASET, required=True, help="Group of a file for U, s and Vh, such as f.h5:/svd.")
@click.option("--oversample", type=click.IntRange(0, options.MOST), default=10, show_default=True)
@click.option("--power", type=click.IntRange(0, 100), default=2, show_default=True, help="Iterations.")
@click.option("--seed", default=0, show_default=True)
@_on_all_ranks
def svd(
    say: Speaker, how: How, a: Dataset, k: int | None, output: Dataset, oversample: int, power: int, seed: int
) -> int:
    """Write U (m x k), s (1 x k) and Vh (k x n), where A is about U diag(s) Vh.

    --verify checks that U and Vh have orthonormal columns and rows, and that Uh A = diag(s) Vh; how far A is from
    U diag(s) Vh is said in any case.
    """
    import numpy as np

    from pdgemm import linalg
    from pdgemm.errors import ArgumentError
    from pdgemm.matrix.distmatrix import DistMatrix

    (x,) = _sources(say, {"A": a}, how.dtype)
    (m, n), parts = x.shape, {name: Dataset(output.path, f"{output.name}/{name}") for name in ("Vh", "s", "U")}
    few = min(m, n) if k is None else k
    if few > min(m, n):
        raise ArgumentError(f"-k {few} is more than the {min(m, n)} singular values of A, which is {m} x {n}")
    sizes = {"Vh": few * n, "s": few, "U": few * m}
    _check(say, [(parts[name], sizes[name]) for name in parts], (x,), x.dtype, how, 4 * (m + n) * few)
    A = say.read(x, how.block)
    with say.progress("svd"):
        U, s, Vh = linalg.svd(A, k, oversample=oversample, power=power, seed=seed)
    say.report("svd", U.report)
    if how.verified:
        with say.progress("verify"):
            one = DistMatrix.eye(few, grid=say.grid, dtype=A.dtype)
            left, right = (U.H @ U).redistribute(like=one) - one, (Vh @ Vh.H).redistribute(like=one) - one
            moved = (U.H @ A).redistribute(like=Vh) - Vh * s.astype(s.dtype)[:, None]
            checks = [("|Uh U - I|", left.norm(1), float(few)), ("|Vh V - I|", right.norm(1), float(few))]
            checks += [("|Uh A - s Vh|", moved.norm(1), (m + n) * max(A.norm(1), A.norm(np.inf)))]
        if not _passes(say, checks, A.dtype):
            return 1
    values = DistMatrix.from_function(lambda i, j: s[j], (1, few), grid=say.grid, dtype=s.dtype)
    for name, matrix in (("Vh", Vh), ("s", values), ("U", U)):
        say.save(parts[name], matrix)
    return 0


@click.command(cls=OfAllRanks)
@click.argument("a", type=DATASET)
@click.option("-o", "--output", type=DATASET, required=True, help="Dataset for G; replaced if pdgemm wrote it.")
@_on_all_ranks
def gram(say: Speaker, how: How, a: Dataset, output: Dataset) -> int:
    """Compute the Gram matrix G := Ah A by half the operations of a product; --verify checks it by random vectors."""
    from pdgemm import linalg
    from pdgemm.matrix.residual import verify

    (x,) = _sources(say, {"A": a}, how.dtype)
    n = x.shape[1]
    _check(say, [(output, n * n)], (x,), x.dtype, how, 2 * n * n)
    A = say.read(x, how.block)
    with say.progress("gram"):
        G = linalg.gram(A)
    say.report("gram", G.report.summary())
    if how.verified:
        with say.progress("verify"):
            residual = verify(G, 1, A.H, A)
        say.report("verify", residual)
        if not residual.passed:
            return 1
    say.save(output, G)
    return 0


def _sources(say: Speaker, given: dict[str, Dataset], dtype: str | None) -> list[Source]:
    """Look at the datasets.  Raises DTypeError where LAPACK has no type for one."""
    from pdgemm.arrays import dtypes
    from pdgemm.errors import DTypeError
    from pdgemm.io.source import source

    found = [source(say.grid, name, dataset, dtype) for name, dataset in given.items()]
    for x in found:
        if x.dtype not in dtypes.BLAS:
            raise DTypeError(f"{x.what} is of {x.dtype}: convert it, --dtype float64")
    return found


def _check(say: Speaker, outputs: list[tuple[Dataset, int]], sources: Any, dtype: Any, how: How, words: int) -> None:
    """Check all that can be known without the elements.   words : that all ranks together need beside the sources."""
    from pdgemm.cli.ahead import Outlines, check_memory, check_output

    outlines = Outlines(say.grid, how.block, "host")
    for x in sources:
        outlines.of_source(x)
    say.lost = f"{outputs[0][0].path} was not written, its contents are unchanged"
    for output, size in outputs:
        check_output(say.grid, output, size * dtype.itemsize, how.force, sources, ours=True)
    needed = sum(outlines.nbytes) + -(-words * dtype.itemsize // say.grid.size)
    check_memory(say.grid, needed, "the matrices and their factors")


def _whole(A: DistMatrix, assume: str) -> DistMatrix:
    """Return the matrix whose triangle was read: a triangle, or a Hermitian matrix."""
    i, j = A.indices()
    upper = (i[:, None] < j) if assume != "upper triangular" else (i[:, None] > j)
    triangle = A.copy()
    triangle.local[upper] = 0
    if assume != "pos":
        return triangle
    strict = triangle.copy()
    strict.local[i[:, None] == j] = 0
    return triangle + strict.H.redistribute(like=A)


def _passes(say: Speaker, errors: Sequence[tuple[str, float, float]], dtype: Any) -> bool:
    """Report errors, each with the scale that it is relative to, and return whether rounding explains them all."""
    from pdgemm.arrays.dtypes import eps

    checks = [Check(what, value / (scale or 1.0), _EPS * eps(dtype)) for what, value, scale in errors]
    for check in checks:
        say.report("verify", check)
        if not check.passed:
            return False
    return True
