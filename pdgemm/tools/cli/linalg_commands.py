"""`pdgemm solve`, `lstsq`, `svd`, `eigh`, `rank` and `gram`: linear algebra from files to files, on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import OfAllRanks
from pdgemm.tools.cli.linalg_job import (
    How,
    check,
    check_outputs,
    eigh_checks,
    lstsq_checks,
    none_is_wrong,
    on_all_ranks,
    reading_on_all_ranks,
    rounded,
    sources,
    structure_checks,
    svd_checks,
    svd_in_file,
    values_text,
    whole,
)
from pdgemm.tools.cli.param_types import BYTES, DATASET, MATRIX, SUBSET, Dataset

if TYPE_CHECKING:
    from pdgemm.tools.cli.session import Speaker

ASSUMED = ("gen", "pos", "her", "lower triangular", "upper triangular")


@click.command(cls=OfAllRanks, short_help="Solve systems of linear equations.")
@click.argument("a", type=MATRIX)
@click.argument("b", type=MATRIX)
@click.option("-o", "--output", type=DATASET, required=True, help="Dataset for X; replaced if pdgemm wrote it.")
@click.option(
    "--assume", type=click.Choice(ASSUMED), default="gen", show_default=True,
    help="What A is: pos: Hermitian and positive definite, her: Hermitian; their lower triangle is read.",
)  # fmt: skip
@click.option("--refine", is_flag=True, help="Factor in single precision, and refine X to double precision.")
@on_all_ranks
def solve(say: Speaker, how: How, a: Dataset, b: Dataset, output: Dataset, assume: Any, refine: bool) -> int:
    """Solve A X = B by a factorisation of A; --verify checks that A is what is assumed, and the backward error."""
    from pdgemm import linalg
    from pdgemm.errors import LayoutError
    from pdgemm.support.text import counted

    x, y = sources(say, {"A": a, "B": b}, how.dtype)
    if x.shape[0] != x.shape[1]:
        raise LayoutError(f"A must be square for solve, but it is {x.shape[0]} x {x.shape[1]}")
    if x.shape[0] != y.shape[0]:
        raise LayoutError(f"A has {counted(x.shape[0], 'row')}, but B has {y.shape[0]}")
    (n, m), wide = y.shape, max(x.dtype, y.dtype)
    squares = {"gen": 2, "her": 3}.get(assume, 1)  # matrices n x n: A, its factors, and messages of a triangle
    size = squares * n * n + 3 * n * m
    check(say, [(output, n * m)], (x, y), wide, how, (2 + 2 * how.verified) * size)
    A, B = (say.read(each, how.block) for each in (x, y))
    with say.progress("solve"):
        X = linalg.solve(A, B, assume_a=assume, refine=refine, lower=assume in ("pos", "her"))
    say.report("solve", X.report.summary())
    rcond: float = X.report.rcond
    say.note("rcond", [f"rcond {rcond:.1e}, an estimate of 1 / (|A|_1 |A^-1|_1) for the scaled A"], rcond)
    if how.verified:
        with say.progress("verify"):
            A = whole(A) if assume in ("pos", "her") else A
            scale, residual = max(1, n) * (A.norm(1) * X.norm(1) + B.norm(1)), (B - A @ X).norm(1)
            checks = [*structure_checks(A, assume), rounded("backward error", residual, X, scale)]
        if not none_is_wrong(say, checks):
            return 1
    _save(say, how, output, X, y.ndim)
    return 0


@click.command(cls=OfAllRanks, short_help="Solve a least-squares problem.")
@click.argument("a", type=MATRIX)
@click.argument("b", type=MATRIX)
@click.option("-o", "--output", type=DATASET, required=True, help="Dataset for X; replaced if pdgemm wrote it.")
@click.option(
    "--rcond", type=click.FloatRange(0),
    help="Singular values of A up to this part of the largest are taken for 0; default: max(m, n) eps.",
)  # fmt: skip
@on_all_ranks
def lstsq(say: Speaker, how: How, a: Dataset, b: Dataset, output: Dataset, rcond: float | None) -> int:
    """Compute X with the least norm of B - A X and, of all such X, the one of least norm.

    The rank of A, its largest and smallest singular value, and the norm of B - A X are printed.  --verify checks that
    X is a solution for a matrix that rounding takes for A and, where the rank is less than n, the one of least norm.
    """
    from pdgemm import linalg
    from pdgemm.errors import LayoutError
    from pdgemm.support.text import counted

    x, y = sources(say, {"A": a, "B": b}, how.dtype)
    if x.shape[0] != y.shape[0]:
        raise LayoutError(f"A has {counted(x.shape[0], 'row')}, but B has {y.shape[0]}")
    (m, n), p, wide = x.shape, y.shape[1], max(x.dtype, y.dtype)
    words = 2 * m * n + (3 + how.verified) * (m + n) * p + say.grid.size * min(m, n) ** 2
    words += 4 * how.verified * (m + n) * min(m, n)
    check(say, [(output, n * p)], (x, y), wide, how, words)
    A, B = (say.read(each, how.block) for each in (x, y))
    with say.progress("lstsq"):
        X, _, rank, s = linalg.lstsq(A, B, rcond=rcond)
    say.report("lstsq", X.report)
    say.note("rank", [f"rank {rank} of {m} x {n}"], rank)
    say.note("singular_values", [f"s_1 = {s[0]:.6g}, s_{len(s)} = {s[-1]:.6g}"] if len(s) else [], s.tolist())
    R = B - (A @ X).redistribute(like=B)
    residual, size = R.norm(), B.norm()
    say.note("residual", [f"|B - A X|_F = {residual:.6g}, |B|_F = {size:.6g}"], residual)
    if how.verified:
        with say.progress("verify"):
            checks = lstsq_checks(A.astype(wide), X, R, rank)
        if not none_is_wrong(say, checks):
            return 1
    _save(say, how, output, X, y.ndim)
    return 0


@click.command(cls=OfAllRanks, short_help="Compute a singular value decomposition.")
@click.argument("a", type=MATRIX)
@click.option("-k", type=options.COUNT, help="The k largest singular values; default: all.")
@click.option("-o", "--output", type=DATASET, required=True, help="Group of a file for U, s and Vh, such as f.h5:/svd.")
@click.option(
    "--oversample", type=click.IntRange(0, options.MOST),
    help="Columns of blocks more than k; default: 10, with --memory as many as fit.",
)  # fmt: skip
@click.option(
    "--tolerance", type=click.FloatRange(0, min_open=True),
    help="Error of the k values, as a part of the largest, at which the steps end; default: that of rounding.",
)  # fmt: skip
@click.option("--steps", type=options.COUNT, help="The most steps for the k values; default: 100.")
@click.option("--seed", default=0, show_default=True)
@click.option("--memory", type=BYTES, help="Memory per rank: A stays in its file, and is read in panels.  Needs -k.")
@click.option("--passes", type=options.COUNT, help="The most passes over A with --memory; default: as many as needed.")
@on_all_ranks
def svd(
    say: Speaker, how: How, a: Dataset, k: int | None, output: Dataset, memory: int | None, passes: int | None,
    **search: Any,
) -> int:  # fmt: skip
    """Compute the singular value decomposition of A, or its k largest singular values and their vectors.

    U (m x k), s (k numbers) and Vh (k x n) are written, where A is about U diag(s) Vh.  The values are printed, with a
    bound of their errors and the part of the sum of squares of A that they hold.  --verify checks that U and Vh have
    orthonormal columns and rows, that A V = U diag(s) and Ah U = V diag(s), and that no singular value of
    A - U diag(s) Vh exceeds the smallest one in s.

    With --memory, A may be larger than the memory: it is read twice if a triangle of its lesser dimension fits the
    memory of a rank, and otherwise until the values are known to the tolerance.  --verify reads it twice more.
    """
    from pdgemm import linalg
    from pdgemm.errors import ArgumentError

    (x,) = sources(say, {"A": a}, how.dtype)
    (m, n), parts = x.shape, {name: Dataset(output.path, f"{output.name}/{name}") for name in ("Vh", "s", "U")}
    few = min(m, n) if k is None else k
    if few > min(m, n):
        raise ArgumentError(f"-k {few} is more than the {min(m, n)} singular values of A, which is {m} x {n}")
    sizes = {"Vh": few * n, "s": few, "U": few * m}
    outputs = [(parts[name], sizes[name]) for name in parts]
    if memory is None and passes is not None:
        raise ArgumentError("--passes is for a matrix that stays in its file: name --memory, too")
    if memory is not None:
        check_outputs(say, outputs, (x,), x.dtype, how)
        A, (U, s, Vh) = svd_in_file(say, how, x, k, memory, passes, **search)
    else:
        words = (m + n) * (4 * few if k is None else 8 * (few + (search["oversample"] or 10)))
        check(say, outputs, (x,), x.dtype, how, words)
        A = say.read(x, how.block)
        with say.progress("svd"):
            U, s, Vh = linalg.svd(A, k, **search)
    say.report("svd", U.report)
    report: Any = U.report
    facts = report.facts if k else {}
    say.note("singular_values", values_text("s", s, facts), s.tolist())
    if how.verified:
        with say.progress("verify"):
            checks = svd_checks(A, U, s, Vh, facts, memory)
        if not none_is_wrong(say, checks):
            return 1
    for name, result in (("Vh", Vh), ("s", s), ("U", U)):
        _save(say, how, parts[name], result, several=True)
    return 0


@click.command(cls=OfAllRanks, short_help="Compute eigenvalues of a Hermitian matrix.")
@click.argument("a", type=MATRIX)
@click.option("-o", "--output", type=DATASET, help="Group of a file for w and V, such as f.h5:/eigh; default: none.")
@click.option("--lower/--upper", default=True, help="The triangle of A that is read; default: the lower one.")
@click.option("--subset", type=SUBSET, help="Eigenvalues LO to HI, both included, from 0 in ascending order.")
@click.option("--values", "alone", is_flag=True, help="Eigenvalues without eigenvectors, in a part of the time.")
@on_all_ranks
def eigh(
    say: Speaker, how: How, a: Dataset, output: Dataset | None, lower: bool, subset: tuple[int, int] | None, alone: bool
) -> int:
    """Compute eigenvalues and eigenvectors of a Hermitian A, of which one triangle is read.

    V (n x k) and w (k numbers in ascending order) are written, where A V = V diag(w); the values are printed.
    --verify checks that A is Hermitian, unless the triangle that is not read is zero, that V has orthonormal columns
    and that A V = V diag(w) and, if all eigenvalues are computed, that their sum is the trace of A, and the sum of
    their squares the square of its Frobenius norm.
    """
    from pdgemm import linalg
    from pdgemm.errors import ArgumentError, LayoutError
    from pdgemm.io.new_dataset import check_savable

    (x,) = sources(say, {"A": a}, how.dtype)
    n = x.shape[0]
    if n != x.shape[1]:
        raise LayoutError(f"A must be square for eigh, but it is {n} x {x.shape[1]}")
    if subset and not 0 <= subset[0] <= subset[1] < n:
        raise ArgumentError(f"--subset {subset[0]}:{subset[1]}: the eigenvalues of A are 0:{n - 1}, in ascending order")
    if subset and alone and how.verified:
        raise ArgumentError("--verify checks eigenvectors, or all eigenvalues: leave out --values or --subset")
    alone = alone or not (output or how.verified)  # the vectors have no use
    k = subset[1] - subset[0] + 1 if subset else n
    sizes = {"w": k} if alone else {"V": n * k, "w": k}
    parts = {name: Dataset(output.path, f"{output.name}/{name}") for name in sizes} if output else {}
    outputs, words = [(parts[name], sizes[name]) for name in parts], (4 + 2 * how.verified) * n * n
    check(say, outputs, (x,), x.dtype, how, words if alone else words + 4 * n * k)
    if output and alone and check_savable(Path(output.path), f"{output.name}/V", say.grid, 0) is not None:
        raise ArgumentError(f"{output}/V are vectors of other eigenvalues: name another group, or leave out --values")
    A, V = say.read(x, how.block), None
    with say.progress("eigh"):
        if alone:
            w = linalg.eigvalsh(A, lower=lower, subset_by_index=subset)
        else:
            w, V = linalg.eigh(A, lower=lower, subset_by_index=subset)
    if V is not None:
        say.report("eigh", V.report)
    say.note("eigenvalues", values_text("w", w), w.tolist())
    if how.verified:
        with say.progress("verify"):
            checks = eigh_checks(whole(A, lower), w, V)
        if not none_is_wrong(say, checks):
            return 1
    for name in parts:
        _save(say, how, parts[name], w if name == "w" else V, several=True)
    return 0


@click.command(cls=OfAllRanks, short_help="Print the rank of a matrix.")
@click.argument("a", type=MATRIX)
@click.option(
    "--rtol", type=click.FloatRange(0),
    help="Singular values up to this part of the largest are taken for 0; default: max(m, n) eps.",
)  # fmt: skip
@reading_on_all_ranks
def rank(say: Speaker, how: How, a: Dataset, rtol: float | None) -> int:
    """Print the rank of A, and the singular values on both sides of the tolerance, which tell how clear the rank is."""
    from pdgemm import linalg
    from pdgemm.local.arrays.arguments import as_real
    from pdgemm.local.arrays.dtypes import eps

    (x,) = sources(say, {"A": a}, how.dtype)
    (m, n), rtol = x.shape, max(x.shape) * eps(x.dtype) if rtol is None else as_real(rtol, "--rtol")
    check(say, [], (x,), x.dtype, how, 2 * m * n + say.grid.size * min(m, n) ** 2)
    A = say.read(x, how.block)
    with say.progress("rank"):
        s = linalg.svdvals(A)
    number = int((s > rtol * s.max(initial=0)).sum())
    shown = [at for at in sorted({0, number - 1, number}) if 0 <= at < len(s)]
    lines = [f"rank {number} (singular values above {rtol:.3g} s_1) of {m} x {n}"]
    say.note("rank", [*lines, ", ".join(f"s_{at + 1} = {s[at]:.6g}" for at in shown)] if shown else lines, number)
    say.note("singular_values", [], s.tolist())
    return 0


@click.command(cls=OfAllRanks, short_help="Compute the Gram matrix of columns.")
@click.argument("a", type=MATRIX)
@click.option("-o", "--output", type=DATASET, required=True, help="Dataset for G; replaced if pdgemm wrote it.")
@on_all_ranks
def gram(say: Speaker, how: How, a: Dataset, output: Dataset) -> int:
    """Compute the Gram matrix G := Ah A by half the operations of a product; --verify checks it by random vectors."""
    from pdgemm import linalg
    from pdgemm.matrix.residual import verify

    (x,) = sources(say, {"A": a}, how.dtype)
    n = x.shape[1]
    check(say, [(output, n * n)], (x,), x.dtype, how, 2 * n * n)
    A = say.read(x, how.block)
    with say.progress("gram"):
        G = linalg.gram(A)
    say.report("gram", G.report.summary())
    if how.verified:
        with say.progress("verify"):
            residual = verify(G, 1, A.H, A)
        if not none_is_wrong(say, [residual]):
            return 1
    _save(say, how, output, G)
    return 0


def _save(say: Speaker, how: How, output: Dataset, result: Any, ndim: int = 2, several: bool = False) -> None:
    """Write a matrix, or an array of numbers that all ranks have, to a dataset.  Collective; see `Speaker.save`."""
    say.save(output, result, several, compression=how.compression, ndim=ndim, overwrite=how.force)
