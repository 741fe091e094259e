"""`pdgemm solve`, `svd` and `gram`: linear algebra from files to files, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import OfAllRanks
from pdgemm.tools.cli.param_types import BLOCK, DATASET, GRID, Dataset

if TYPE_CHECKING:
    from pdgemm.io.source import Source
    from pdgemm.matrix.distmatrix import DistMatrix
    from pdgemm.tools.cli.session import Speaker

ASSUMED = ("gen", "pos", "her", "lower triangular", "upper triangular")
_MOST = 20  # the most singular values that are printed
_EPS = 3  # times n and the unit roundoff: the error bound in the tests of SLATE
_common = options.stacked_options(
    click.option("--grid", "grid_shape", type=GRID, help="Process grid; default: as square as possible."),
    click.option("--block", type=BLOCK, help="Block sizes of the layout; default: one block per rank."),
    click.option("--dtype", type=click.Choice(options.BLAS_DTYPES), help="Convert the matrices; default: as stored."),
    options.trace,
    click.option("--verify", "verified", is_flag=True, help="Check the result before it is stored."),
    click.option("--force", is_flag=True, help="Replace any dataset by the result."),
    options.compression,
    options.json_,
    options.debug,
)


class How(NamedTuple):
    """The options that `solve`, `svd` and `gram` share."""

    grid_shape: tuple[int, int] | None
    block: tuple[int, int] | None
    dtype: str | None
    trace_file: str | None
    nvtx: bool
    verified: bool
    force: bool
    compression: str | None
    as_json: bool


def _on_all_ranks(body: Callable[..., int]) -> Callable[..., int]:
    """Return a function of all options that calls `body` with a session, the common options and the other options."""

    @wraps(body)
    def run(**arguments: Any) -> int:
        from pdgemm.tools.cli.session import session

        how = How(*map(arguments.pop, How._fields))
        with session(how.grid_shape, how.as_json) as say, say.traced(how.trace_file, how.nvtx):
            return body(say, how, **arguments)

    return _common(run)


@dataclass(frozen=True)
class Check:
    """A relative error, and the largest error that rounding explains."""

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
    rcond: float = X.report.rcond
    say.note("rcond", [f"rcond {rcond:.1e}, an estimate of 1 / (|A|_1 |A^-1|_1)"], rcond)
    if how.verified:
        with say.progress("verify"):
            if "triangular" in assume or assume == "pos":
                A = _whole(A, assume)
            scale = max(1, n) * (A.norm(1) * X.norm(1) + B.norm(1))
            residual = (B - A @ X).norm(1)
        if not _all_pass(say, [_rounded("backward error", residual, scale, wide)]):
            return 1
    say.save(output, X, compression=how.compression, ndim=y.ndim)
    return 0


@click.command(cls=OfAllRanks)
@click.argument("a", type=DATASET)
@click.option("-k", type=options.COUNT, help="The k largest singular values; default: all.")
@click.option("-o", "--output", type=DATASET, required=True, help="Group of a file for U, s and Vh, such as f.h5:/svd.")
@click.option("--oversample", type=click.IntRange(0, options.MOST), default=10, show_default=True)
@click.option(
    "--tolerance", type=click.FloatRange(0, min_open=True),
    help="Error of the k values, as a part of the largest, at which the steps end; default: that of rounding.",
)  # fmt: skip
@click.option("--steps", type=options.COUNT, default=100, show_default=True, help="The most steps for the k values.")
@click.option("--seed", default=0, show_default=True)
@_on_all_ranks
def svd(say: Speaker, how: How, a: Dataset, k: int | None, output: Dataset, **search: Any) -> int:
    """Compute the singular value decomposition of A, or its k largest singular values and their vectors.

    U (m x k), s (k numbers) and Vh (k x n) are written, where A is about U diag(s) Vh.  The values are printed, with a
    bound of their errors and the part of the sum of squares of A that they hold.  --verify checks that U and Vh have
    orthonormal columns and rows, that A V = U diag(s) and Ah U = V diag(s), and that no value of A - U diag(s) Vh is
    larger.
    """
    from pdgemm import linalg
    from pdgemm.errors import ArgumentError
    from pdgemm.matrix.distmatrix import DistMatrix

    (x,) = _sources(say, {"A": a}, how.dtype)
    (m, n), parts = x.shape, {name: Dataset(output.path, f"{output.name}/{name}") for name in ("Vh", "s", "U")}
    few = min(m, n) if k is None else k
    if few > min(m, n):
        raise ArgumentError(f"-k {few} is more than the {min(m, n)} singular values of A, which is {m} x {n}")
    sizes = {"Vh": few * n, "s": few, "U": few * m}
    words = (m + n) * (4 * few if k is None else 8 * (few + search["oversample"]))
    _check(say, [(parts[name], sizes[name]) for name in parts], (x,), x.dtype, how, words)
    A = say.read(x, how.block)
    with say.progress("svd"):
        U, s, Vh = linalg.svd(A, k, **search)
    say.report("svd", U.report)
    report: Any = U.report
    facts = report.facts if k else {}
    say.note("singular_values", _values_text(s, facts), s.tolist())
    if how.verified:
        with say.progress("verify"):
            checks = _svd_checks(A, U, s, Vh, facts)
        if not _all_pass(say, checks):
            return 1
    values = DistMatrix.from_function(lambda i, j: s[i], (few, 1), grid=say.grid, dtype=s.dtype)
    for name, matrix, ndim in (("Vh", Vh, 2), ("s", values, 1), ("U", U, 2)):
        say.save(parts[name], matrix, compression=how.compression, ndim=ndim)
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
    say.save(output, G, compression=how.compression)
    return 0


def _sources(say: Speaker, datasets: dict[str, Dataset], dtype: str | None) -> list[Source]:
    """Return the sources of datasets.  Raises DTypeError where LAPACK does not support an element type."""
    from pdgemm.errors import DTypeError
    from pdgemm.io.source import source
    from pdgemm.local.arrays import dtypes

    sources = [source(say.grid, name, dataset, dtype) for name, dataset in datasets.items()]
    for x in sources:
        if x.dtype not in dtypes.BLAS:
            raise DTypeError(f"{x.what} is of {x.dtype}: convert it, --dtype float64")
    return sources


def _check(say: Speaker, outputs: list[tuple[Dataset, int]], sources: Any, dtype: Any, how: How, words: int) -> None:
    """Check all facts that need no elements.   words : the words that all ranks together need beside the sources."""
    from pdgemm.io.streamed.before_reading import Outlines, check_memory, check_result_file

    outlines = Outlines(say.grid, how.block, "host")
    for x in sources:
        outlines.of_source(x)
    say.lost = f"{outputs[0][0].path} was not written, its contents are unchanged"
    for output, size in outputs:
        check_result_file(say.grid, output, size * dtype.itemsize, how.force, sources, ours=True)
    needed = sum(outlines.nbytes) + -(-words * dtype.itemsize // say.grid.size)
    check_memory(say.grid, needed, "the matrices and their factors")


def _whole(A: DistMatrix, assume: str) -> DistMatrix:
    """Return the matrix of which `solve` read a triangle: the triangle itself, or the Hermitian matrix."""
    i, j = A.indices()
    upper = (i[:, None] < j) if assume != "upper triangular" else (i[:, None] > j)
    triangle = A.copy()
    triangle.local[upper] = 0
    if assume != "pos":
        return triangle
    strict = triangle.copy()
    strict.local[i[:, None] == j] = 0
    return triangle + strict.H.redistribute(like=A)


def _rounded(what: str, value: float, scale: float, dtype: Any) -> Check:
    """Return the check that rounding explains an error, relative to `scale`."""
    from pdgemm.local.arrays.dtypes import eps

    return Check(what, value / (scale or 1.0), _EPS * eps(dtype))


def _all_pass(say: Speaker, checks: Sequence[Check]) -> bool:
    """Report checks up to the first one that does not pass, and return whether all checks pass."""
    for check in checks:
        say.report("verify", check)
        if not check.passed:
            return False
    return True


# ---------------------------------------------------------------- singular values
def _values_text(s: Any, facts: dict[str, float]) -> list[str]:
    """Return lines with singular values and, if only the k largest were computed, with their error and their share."""
    texts = [f"{value:.10g}" for value in s]
    lines = [f"s = {', '.join(texts if len(s) <= _MOST else [*texts[: _MOST - 1], '...', texts[-1]])}"]
    if facts:
        lines.append(f"each is within {facts['bound']:.1e} s_1 of its true value; s_1 = {s[0]:.6g}")
        rest, doubt = 1 - facts["share"], 2 * len(s) * facts["bound"]
        part = f"{facts['share']:.4%}" if rest > 1e-6 else f"all but {max(rest, doubt):.1e}"
        lines.append(f"rank {len(s)} holds {part} of |A|_F^2")
    return lines


def _svd_checks(A: DistMatrix, U: DistMatrix, s: Any, Vh: DistMatrix, facts: dict[str, float]) -> list[Check]:
    """Return the checks of singular triplets; errors are relative to the largest singular value."""
    from pdgemm.linalg.singular.svd import norm_of_rest
    from pdgemm.local.arrays.dtypes import eps
    from pdgemm.matrix.distmatrix import DistMatrix

    first, rounding, V = float(s[0]) if len(s) and s[0] else 1.0, _EPS * eps(A.dtype) * sum(A.shape), Vh.H
    one = DistMatrix.eye(len(s), grid=A.grid, dtype=A.dtype)
    apart = {name: (X.H @ X).redistribute(like=one) - one for name, X in (("U", U), ("V", V))}
    checks = [Check(f"|{name}h {name} - I|", X.norm(1), rounding) for name, X in apart.items()]
    pairs = ("|A V - U s|", A, V, U, 0.0), ("|Ah U - V s|", A.H, U, V, facts.get("residual", 0.0))
    for what, M, X, Y, known in pairs:
        R = (M @ (X * (1 / first))).redistribute(like=Y) - Y * (s / first).astype(s.dtype)
        checks.append(Check(what, R.vector_norm(2, axis=0).max(initial=0), known + rounding))
    if len(s) < min(A.shape):
        over = max(0.0, norm_of_rest(A, U, s, Vh) - float(s[-1])) / first
        checks.append(Check("|A - U s Vh| beyond the last value", over, facts["bound"] + rounding))
    return checks
