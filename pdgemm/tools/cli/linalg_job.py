"""The commands of linear algebra: each reads matrices from files, computes, checks the results, and writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor, log10
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg  # noqa: F401  here, so that the time of the first function does not include its loading

from pdgemm import linalg
from pdgemm.errors import ArgumentError, DTypeError, LayoutError
from pdgemm.io.new_dataset import check_savable
from pdgemm.io.source import Source, source
from pdgemm.io.streamed import stored_svd
from pdgemm.io.streamed.before_reading import Outlines, check_memory, check_result_file
from pdgemm.io.streamed.stored_matrix import StoredMatrix
from pdgemm.io.streamed.svd_plan import SvdPlan
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.arguments import as_real
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.residual import Residual, verify
from pdgemm.support.text import counted
from pdgemm.tools.cli import options
from pdgemm.tools.cli.linalg_checks import Check, eigh_checks, lstsq_checks, report_checks, solve_checks, svd_checks
from pdgemm.tools.cli.options import Dataset
from pdgemm.tools.cli.session import Speaker, session

_MOST = 20  # the most values that are printed


class How(NamedTuple):
    """Common options that the functions of the commands need."""

    block: tuple[int, int] | None
    force: bool
    verified: bool


class FileResults(NamedTuple):
    """The results of a command, and the checks of `--verify`.   several : the results are a group of datasets."""

    outputs: dict[Dataset, DistMatrix | np.ndarray]
    checks: Callable[[], Sequence[Check | Residual]] = list
    ndim: int = 2
    several: bool = False


def carry_out(
    name: str, a: Dataset, b: Dataset | None = None, *, grid_shape: tuple[int, int] | None,
    block: tuple[int, int] | None, dtype: str | None, trace_file: str | None, nvtx: bool, as_json: bool, force: bool,
    verified: bool = False, compression: str | None = None, **own: Any,
) -> int:  # fmt: skip
    """Run the command of this name on the matrices a and b, and return its exit code.  Collective over all ranks."""
    options.check_apart({"--trace": trace_file}, (a, b, own.get("output")))
    with session(grid_shape, as_json) as say, say.traced(trace_file, nvtx, None, force):
        operands = [source(say.grid, name, x, dtype) for name, x in (("A", a), ("B", b)) if x]
        for x in operands:
            if x.dtype not in dtypes.BLAS:  # LAPACK does not support it
                raise DTypeError(f"LAPACK does not support the {x.dtype} of {x.what}: convert it by --dtype float64")
        results = _COMMANDS[name](say, How(block, force, verified), *operands, **own)
        if verified:
            with say.progress("verify"):
                checks = results.checks()
            if not report_checks(say, checks):
                return 1
        written: dict[str, Any] = {"compression": compression, "ndim": results.ndim, "overwrite": force}
        for output, result in results.outputs.items():
            say.save(output, result, results.several, **written)
    return 0


def _read(
    say: Speaker, how: How, operands: Sequence[Source], outputs: dict[Dataset, int], words: int
) -> list[DistMatrix]:
    """Check all that can be checked without elements, and read the operands.

    outputs : the number of elements of each result.   words : the words that all ranks together need besides A and B.
    """
    outlines, dtype = Outlines(say.grid, how.block, "host"), max(x.dtype for x in operands)
    for x in operands:
        outlines.of_source(x)
    _check_outputs(say, how, operands, outputs)
    needed = sum(outlines.nbytes) + -(-words * dtype.itemsize // say.grid.size)
    check_memory(say.grid, needed, "the matrices and their factors")
    return [say.read(x, how.block) for x in operands]


def _check_outputs(say: Speaker, how: How, operands: Sequence[Source], outputs: dict[Dataset, int]) -> None:
    dtype = max(x.dtype for x in operands)
    for output, size in outputs.items():
        say.lost = f"{output.path} was not written, its contents are unchanged"
        check_result_file(say.grid, output, size * dtype.itemsize, how.force, operands)


def _check_rows(x: Source, y: Source) -> None:
    if x.shape[0] != y.shape[0]:
        raise LayoutError(f"A has {counted(x.shape[0], 'row')}, but B has {y.shape[0]}")


def _check_square(x: Source, name: str) -> None:
    if x.shape[0] != x.shape[1]:
        raise LayoutError(f"A must be square for {name}, but it is {x.shape[0]} x {x.shape[1]}")


def _solve(say: Speaker, how: How, x: Source, y: Source, output: Dataset, assume: Any, precision: str) -> FileResults:
    """Solve A X = B, and report the condition of A."""
    _check_square(x, "solve")
    _check_rows(x, y)
    n, m = y.shape
    # number of n x n matrices: A, factors, messages of a triangle; factors in both precisions
    squares = {"gen": 2, "her": 3}.get(assume, 1) + (precision == "single")
    words = (2 + 2 * how.verified) * (squares * n * n + 3 * n * m)
    A, B = _read(say, how, (x, y), {output: n * m}, words)
    with say.progress("solve"):
        X = linalg.solve(A, B, assume_a=assume, refine=precision == "single", lower=assume in ("pos", "her"))
    say.report("solve", X.report.summary())
    rcond: float = X.report.rcond
    say.note("rcond", [f"rcond {rcond:.1e}, an estimate of 1 / (|A|_1 |A^-1|_1) for the scaled A"], rcond)
    return FileResults({output: X}, lambda: solve_checks(A, B, X, assume), y.ndim)


def _lstsq(say: Speaker, how: How, x: Source, y: Source, output: Dataset, rcond: float | None) -> FileResults:
    """Compute X with the least norm of B - A X, and report the rank of A and the residual."""
    _check_rows(x, y)
    (m, n), p = x.shape, y.shape[1]
    words = 2 * m * n + (3 + how.verified) * (m + n) * p + say.grid.size * min(m, n) ** 2
    words += 4 * how.verified * (m + n) * min(m, n)
    A, B = _read(say, how, (x, y), {output: n * p}, words)
    with say.progress("lstsq"):
        X, _, rank, s = linalg.lstsq(A, B, rcond=rcond)
    say.report("lstsq", X.report)
    say.note("rank", [f"rank {rank} of {m} x {n}"], rank)
    say.note("singular_values", [f"s_1 = {s[0]:.6g}, s_{len(s)} = {s[-1]:.6g}"] if len(s) else [], s.tolist())
    R = B - (A @ X).redistribute(like=B)
    residual, size = R.norm(), B.norm()
    say.note("residual", [f"|B - A X|_F = {residual:.6g}, |B|_F = {size:.6g}"], residual)
    return FileResults({output: X}, lambda: lstsq_checks(A.astype(max(x.dtype, y.dtype)), X, R, rank), y.ndim)


def _svd(
    say: Speaker, how: How, x: Source, k: int | None, output: Dataset, memory: int | None, passes: int | None,
    **search: Any,
) -> FileResults:  # fmt: skip
    """Compute U, s and Vh of a matrix in memory or in its file, and report the values."""
    (m, n), few = x.shape, min(x.shape) if k is None else k
    if few > min(m, n):
        raise ArgumentError(f"-k {few} is more than the {min(m, n)} singular values of A, which is {m} x {n}")
    outputs = {output.member("Vh"): few * n, output.member("s"): few, output.member("U"): few * m}
    if memory is not None:
        _check_outputs(say, how, (x,), outputs)
        U, s, Vh = _svd_in_file(say, how, x, k, memory, passes, **search)
        A: Any = StoredMatrix(say.grid, x)
    elif passes is not None:
        raise ArgumentError("--passes needs --memory: it limits how often a matrix is read that stays in its file")
    else:
        words = (m + n) * (4 * few if k is None else 8 * (few + (search["oversample"] or 10)))
        (A,) = _read(say, how, (x,), outputs, words)
        with say.progress("svd"):
            U, s, Vh = linalg.svd(A, k, **search)
    report: Any = U.report
    facts = report.facts if k else {}
    say.report("svd", report)
    say.note("singular_values", values_text("s", s, facts), s.tolist())
    results: dict[Dataset, Any] = dict(zip(outputs, (Vh, s, U)))
    return FileResults(results, lambda: svd_checks(A, U, s, Vh, facts, memory), several=True)


def _svd_in_file(
    say: Speaker, how: How, x: Source, k: int | None, memory: int, passes: int | None, **search: Any
) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return the k largest singular values of a matrix in its file, with their vectors."""
    if k is None:
        raise ArgumentError("--memory needs -k, the number of largest singular values")
    if how.block is not None:
        raise ArgumentError("--memory cannot be combined with --block")

    def planned(plan: SvdPlan, memory: int) -> None:
        check_memory(say.grid, plan.most_bytes, "panels of A and matrices computed from them", ", or less --memory")
        say.note("plan", [plan.explain(memory)], plan.as_dict(memory))

    with say.progress("svd") as progress:
        U, s, Vh, _ = stored_svd.stored_svd(
            say.grid, x, k, passes, memory, progress=progress, planned=planned, **search
        )
    return U, s, Vh


def _eigh(
    say: Speaker, how: How, x: Source, output: Dataset | None, lower: bool, subset: tuple[int, int] | None, alone: bool
) -> FileResults:
    """Compute eigenvalues, and eigenvectors unless only the values are wanted, and report the values."""
    _check_square(x, "eigh")
    n = x.shape[0]
    if subset and not 0 <= subset[0] <= subset[1] < n:
        raise ArgumentError(f"--subset {subset[0]}:{subset[1]}: the eigenvalues of A are 0:{n - 1}, in ascending order")
    if subset and alone and how.verified:
        raise ArgumentError("--verify checks eigenvectors, or all eigenvalues: leave out --values or --subset")
    alone = alone or not (output or how.verified)  # the vectors have no use
    k = subset[1] - subset[0] + 1 if subset else n
    sizes = {"w": k} if alone else {"V": n * k, "w": k}
    outputs = {output.member(name): size for name, size in sizes.items()} if output else {}
    if output and alone and check_savable(Path(output.path), output.member("V").name, say.grid, 0) is not None:
        raise ArgumentError(f"{output}/V has earlier eigenvectors: name another group, or leave out --values")
    words = (4 + 2 * how.verified) * n * n + (0 if alone else 4 * n * k)
    (A,), V = _read(say, how, (x,), outputs, words), None
    with say.progress("eigh"):
        if alone:
            w = linalg.eigvalsh(A, lower=lower, subset_by_index=subset)
        else:
            w, V = linalg.eigh(A, lower=lower, subset_by_index=subset)
    if V is not None:
        say.report("eigh", V.report)
    say.note("eigenvalues", values_text("w", w), w.tolist())
    results: dict[Dataset, Any] = dict(zip(outputs, (w,) if alone else (V, w)))
    return FileResults(results, lambda: eigh_checks(A, w, V, lower), several=True)


def _rank(say: Speaker, how: How, x: Source, rtol: float | None) -> FileResults:
    """Report the rank of A, and the singular values on both sides of the tolerance."""
    (m, n), rtol = x.shape, max(x.shape) * dtypes.eps(x.dtype) if rtol is None else as_real(rtol, "--rtol")
    (A,) = _read(say, how, (x,), {}, 2 * m * n + say.grid.size * min(m, n) ** 2)
    with say.progress("rank"):
        s = linalg.svdvals(A)
    number = int((s > rtol * s.max(initial=0)).sum())
    shown = [at for at in sorted({0, number - 1, number}) if 0 <= at < len(s)]
    lines = [f"rank {number} (singular values above {rtol:.3g} s_1) of {m} x {n}"]
    say.note("rank", [*lines, ", ".join(f"s_{at + 1} = {s[at]:.6g}" for at in shown)] if shown else lines, number)
    say.note("singular_values", [], s.tolist())
    return FileResults({})


def _gram(say: Speaker, how: How, x: Source, output: Dataset) -> FileResults:
    """Compute the Gram matrix of the columns of A."""
    n = x.shape[1]
    (A,) = _read(say, how, (x,), {output: n * n}, 2 * n * n)
    with say.progress("gram"):
        G = linalg.gram(A)
    say.report("gram", G.report.summary())
    return FileResults({output: G}, lambda: [verify(G, 1, A.H, A)])


_COMMANDS: dict[str, Callable[..., FileResults]] = {
    "solve": _solve, "lstsq": _lstsq, "svd": _svd, "eigh": _eigh, "rank": _rank, "gram": _gram,
}  # fmt: skip


def values_text(name: str, s: Any, facts: dict[str, Any] | None = None) -> list[str]:
    """Return lines with values and, if only the k largest singular values were computed, their error and share.

    Digits that are uncertain by the error bound are not printed.
    """
    bounds = [x * s[0] for x in facts["bounds"]] if facts else [0.0] * len(s)
    texts = [_known_digits(*x) for x in zip(s, bounds)]
    lines = [f"{name} = {', '.join(texts if len(s) <= _MOST else [*texts[: _MOST - 1], '...', texts[-1]])}"]
    if facts:
        largest = _known_digits(s[0], bounds[0], 6)
        lines.append(f"each is within {facts['bound']:.1e} s_1 of its true value; s_1 = {largest}")
        rest, doubt = 1 - facts["share"], 2 * len(s) * facts["bound"]
        part = f"{facts['share']:.4%}" if rest > 1e-6 else f"all but {max(rest, doubt):.1e}"
        lines.append(f"rank {len(s)} holds {part} of |A|_F^2")
    return lines


def _known_digits(value: float, bound: float, most: int = 10) -> str:
    """Return a number in at most `most` digits, the last of which may be wrong by one; '< x' where none is known."""
    if bound > 0 and value <= bound:
        return f"< {value + bound:.1e}"
    digits = most if not bound else max(1, min(most, floor(log10(abs(value) / bound)) + 1))
    return f"{value:.{digits}g}"
