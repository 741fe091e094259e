"""What the commands of linear algebra share: options, matrices from files, checks before reading and of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from itertools import takewhile
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pdgemm.tools.cli import options
from pdgemm.tools.cli.param_types import BLOCK, GRID, Dataset

if TYPE_CHECKING:
    from pdgemm.io.source import Source
    from pdgemm.matrix.distmatrix import DistMatrix
    from pdgemm.matrix.residual import Residual
    from pdgemm.tools.cli.session import Speaker

EPS = 3  # times n and the unit roundoff: the error bound in the tests of SLATE
TELLS = 0.1  # the largest tolerance of a relative error that shows a result to be right
_MOST = 20  # the most values that are printed
_RANDOM = 30  # random columns with which a matrix in a file is compared
_reading = options.stacked_options(
    click.option("--grid", "grid_shape", type=GRID, help="Process grid; default: as square as possible."),
    click.option("--block", type=BLOCK, help="Block sizes of the layout; default: one block per rank."),
    click.option("--dtype", type=click.Choice(options.BLAS_DTYPES), help="Convert the matrices; default: as stored."),
    options.trace,
    options.force,
)
_writing = options.stacked_options(
    click.option("--verify", "verified", is_flag=True, help="Check the result before it is stored."),
    options.compression,
)
_reporting = options.stacked_options(options.json_, options.debug)


class How(NamedTuple):
    """The options that the commands share, of which a command without a result in a file has the first seven."""

    grid_shape: tuple[int, int] | None
    block: tuple[int, int] | None
    dtype: str | None
    trace_file: str | None
    nvtx: bool
    as_json: bool
    force: bool
    verified: bool = False
    compression: str | None = None


def _with(common: Callable[[Any], Any], body: Callable[..., int]) -> Any:
    """Return a function of all options that calls `body` with a session, the common options and the other options."""

    @wraps(body)
    def run(**arguments: Any) -> int:
        from pdgemm.tools.cli.session import session

        how = How(**{name: arguments.pop(name) for name in How._fields if name in arguments})
        options.check_apart({"--trace": how.trace_file}, (x for x in arguments.values() if isinstance(x, Dataset)))
        with session(how.grid_shape, how.as_json) as say, say.traced(how.trace_file, how.nvtx, None, how.force):
            return body(say, how, **arguments)

    return common(run)


def on_all_ranks(body: Callable[..., int]) -> Callable[..., int]:
    """Decorate the body of a command that writes a result, with a session and all common options."""
    command: Callable[..., int] = _with(options.stacked_options(_reading, _writing, _reporting), body)
    return command


def reading_on_all_ranks(body: Callable[..., int]) -> Callable[..., int]:
    """Decorate the body of a command that prints its result alone, with a session and the options for reading."""
    command: Callable[..., int] = _with(options.stacked_options(_reading, _reporting), body)
    return command


@dataclass(frozen=True)
class Check:
    """A relative error, and the largest error that rounding explains; infinite where a norm overflows."""

    what: str
    value: float
    bound: float

    @property
    def wrong(self) -> bool:
        return self.bound < inf and not self.value <= self.bound

    @property
    def passed(self) -> bool:
        return self.value <= self.bound <= TELLS

    def __str__(self) -> str:
        from pdgemm.matrix.residual import verdict

        return f"{self.what} {self.value:.1e} (tolerance {self.bound:.1e}): {verdict(self)}"


def sources(say: Speaker, datasets: dict[str, Dataset], dtype: str | None) -> list[Source]:
    """Return the sources of datasets.  Raises DTypeError where LAPACK does not support an element type."""
    from pdgemm.errors import DTypeError
    from pdgemm.io.source import source
    from pdgemm.local.arrays import dtypes

    read = [source(say.grid, name, dataset, dtype) for name, dataset in datasets.items()]
    for x in read:
        if x.dtype not in dtypes.BLAS:
            raise DTypeError(f"{x.what} is of {x.dtype}: convert it, --dtype float64")
    return read


def check(say: Speaker, outputs: list[tuple[Dataset, int]], matrices: Any, dtype: Any, how: How, words: int) -> None:
    """Check all facts that need no elements.   words : the words that all ranks together need beside the sources."""
    from pdgemm.io.streamed.before_reading import Outlines, check_memory

    outlines = Outlines(say.grid, how.block, "host")
    for x in matrices:
        outlines.of_source(x)
    check_outputs(say, outputs, matrices, dtype, how)
    needed = sum(outlines.nbytes) + -(-words * dtype.itemsize // say.grid.size)
    check_memory(say.grid, needed, "the matrices and their factors")


def check_outputs(say: Speaker, outputs: list[tuple[Dataset, int]], matrices: Any, dtype: Any, how: How) -> None:
    """Check that the outputs can be written.   outputs : datasets and their numbers of elements."""
    from pdgemm.io.streamed.before_reading import check_result_file

    if outputs:
        say.lost = f"{outputs[0][0].path} was not written, its contents are unchanged"
    for output, size in outputs:
        check_result_file(say.grid, output, size * dtype.itemsize, how.force, matrices)


def svd_in_file(
    say: Speaker, how: How, x: Source, k: int | None, memory: int, passes: int | None, **search: Any
) -> tuple[Any, Any]:
    """Return a matrix in its file, and its k largest singular values with their vectors."""
    from pdgemm.errors import ArgumentError
    from pdgemm.io.streamed.before_reading import check_memory
    from pdgemm.io.streamed.stored_matrix import StoredMatrix
    from pdgemm.io.streamed.stored_svd import stored_svd
    from pdgemm.io.streamed.svd_plan import SvdPlan

    if k is None:
        raise ArgumentError("--memory is for the largest singular values: name -k")
    if how.block is not None:
        raise ArgumentError("--memory does not go with --block")

    def planned(plan: SvdPlan, memory: int) -> None:
        check_memory(say.grid, plan.most_bytes, "panels of A and what is computed of them", ", or less --memory")
        say.note("plan", [plan.explain(memory)], plan.as_dict(memory))

    with say.progress("svd") as progress:
        triplets = stored_svd(say.grid, x, k, passes, memory, progress=progress, planned=planned, **search)
    return StoredMatrix(say.grid, x.dataset, x.stored, x.dtype, x.op), triplets[:3]


def rounded(what: str, value: float, A: DistMatrix, size: float, times: float = 1.0) -> Check:
    """Return the check that an error is at most 3 eps `times` the size, of A's type; an infinite size tells nothing."""
    from pdgemm.local.arrays.dtypes import eps

    return Check(what, value / (size or 1.0), EPS * eps(A.dtype) * times if size < inf else inf)


def none_is_wrong(say: Speaker, checks: Sequence[Check | Residual]) -> bool:
    """Report checks up to the first one that is wrong, and return whether none is."""
    done = [*takewhile(lambda x: not x.wrong, checks)]
    done += checks[len(done) : len(done) + 1]
    for each in done:
        say.report("verify", each)
    if say.grid.rank == 0 and len(done) > 1:
        facts = [{**asdict(x), "passed": x.passed, "wrong": x.wrong} for x in done]
        least = min(facts, key=lambda x: (not x["wrong"], x["passed"]))
        say.facts["verify"] = {**least, "checks": facts}
    return not any(x.wrong for x in checks)


def whole(A: DistMatrix, lower: bool = True) -> DistMatrix:
    """Return A or, if its file has the triangle alone that is read, the Hermitian matrix of it.  Collective."""
    from pdgemm.linalg.factors.rank_k import both_triangles
    from pdgemm.matrix.array_functions import tril, triu

    H: DistMatrix = A if lower else A.H
    alone = triu(H, 1).norm("max") == 0 < tril(H, -1).norm("max")
    return both_triangles(H, "L") if alone else A


def structure_checks(A: DistMatrix, assumed: str) -> list[Check]:
    """Return the check that A is what it is assumed to be: nothing, Hermitian, or triangular; relative to |A|_F."""
    from pdgemm.matrix.array_functions import tril, triu

    if assumed == "gen":
        return []
    if assumed.endswith("triangular"):
        outside = triu(A, 1) if assumed.startswith("lower") else tril(A, -1)
        return [rounded(f"|A - its {assumed.split()[0]} triangle|", outside.norm(), A, A.norm())]
    apart = A.H.redistribute(like=A) - A
    return [rounded("|Ah - A|", apart.norm(), A, A.norm(), sum(A.shape))]


def values_text(name: str, s: Any, facts: dict[str, Any] | None = None) -> list[str]:
    """Return lines with values and, if only the k largest singular values were computed, their error and share.

    Of a value whose error is bounded, only digits that the bound leaves are printed.
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
    from math import floor, log10

    if bound > 0 and value <= bound:
        return f"< {value + bound:.1e}"
    digits = most if not bound else max(1, min(most, floor(log10(abs(value) / bound)) + 1))
    return f"{value:.{digits}g}"


def svd_checks(A: Any, U: DistMatrix, s: Any, Vh: DistMatrix, facts: dict[str, Any], memory: int | None) -> list[Check]:
    """Return the checks of singular triplets of a matrix, in memory or in a file, which is read twice.

    Errors are relative to the largest value.  With Q, an orthonormal basis of (A - U diag(s) Vh) G for a few random
    columns G, |(A - U diag(s) Vh)^H Q|_2 is a lower bound of the norm of the rest (Halko, Martinsson & Tropp, SIAM
    Review 53(2), 2011, section 4.5).
    """
    import numpy as np

    from pdgemm.gemm import pdgemm
    from pdgemm.linalg.factors.qr import qr
    from pdgemm.linalg.singular.svd import svd
    from pdgemm.local.arrays.dtypes import eps
    from pdgemm.matrix.distmatrix import DistMatrix

    first, rounding, V = float(s[0]) if len(s) and s[0] else 1.0, EPS * eps(A.dtype) * sum(A.shape), Vh.H
    k, few = len(s), min(_RANDOM, *A.shape) if len(s) < min(A.shape) else 0
    values, limit = (s / first).astype(s.dtype), None if memory is None else max(memory, 1 << 24)

    def remaining(M: Any, X: DistMatrix, Y: DistMatrix, more: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
        """Return M X / s_1 - Y diag(s) / s_1, and (M - Y diag(s) X^H) more / s_1, from one product with M."""
        columns: Any = np.hstack([X, more])
        both = pdgemm(1, M, columns * (1 / first), memory_limit=limit)
        image, rest = both[:, :k], both[:, k:]
        known = Y @ ((X.H @ more) * values[:, None])
        return image - (Y * values).redistribute(like=image), rest - known.redistribute(like=rest)

    G = DistMatrix.random((A.shape[1], few), grid=A.grid, seed=2**63, kind="normal", dtype=A.dtype)
    R, rest = remaining(A, V, U, G)
    Q = qr(rest)[0]
    if memory is not None and A.source.op == "T" and A.dtype.kind == "c":  # A^H U = conj(A^T conj(U)): A.H is no view
        L, rest = remaining(A.T, U.H.T, V.H.T, Q.H.T)
    else:
        L, rest = remaining(A.H, U, V, Q)
    checks = _disorder("s", s[::-1], 0) + _orthonormal(U, V)
    for what, X, residual in (("|A V - U s|", R, 0.0), ("|Ah U - V s|", L, facts.get("residual", 0.0))):
        checks.append(Check(what, X.vector_norm(2, axis=0).max(initial=0), residual + rounding))
    if few:
        over = max(0.0, float(svd(rest)[1][0]) - float(values[-1]))
        checks.append(Check("|A - U s Vh| beyond the last value", over, facts["bound"] + rounding))
    return checks


def lstsq_checks(A: DistMatrix, X: DistMatrix, R: DistMatrix, rank: int) -> list[Check]:
    """Return the checks that X is a solution for A + E, where |E| is small, and the one of least norm.

    |(|x|^2 Ah A + |r|^2 I)^-1/2 Ah r|_2 is about the least |E|_F, relative to |A|_2, for each column x and its residual
    r = b - A x (Walden, Karlson & Sun, Numer. Linear Algebra Appl. 2(3), 1995).  Of A, its `rank` largest singular
    values and their vectors are taken; x has no part outside of these.
    """
    import numpy as np

    from pdgemm import linalg

    _, s, Vh = linalg.svd(A)
    kept, Vh, first, most = s[:rank, None].astype(float), Vh[:rank], float(s.max(initial=0)) or 1.0, max(A.shape)
    x, r = (np.asarray(M.vector_norm(2, axis=0), float) for M in (X, R))
    sizes = np.hypot(kept * x, r)
    gradient = (Vh @ ((A * (1 / first)).H @ R)) * (1 / np.where(sizes > 0, sizes, 1.0)).astype(s.dtype)
    checks = [rounded("backward error", gradient.vector_norm(2, axis=0).max(initial=0), A, 1.0, most)]
    if rank < A.shape[1]:
        outside, clear = X - (Vh.H @ (Vh @ X)).redistribute(like=X), first / float(kept.min(initial=first))
        checks.append(rounded("|X - V Vh X|", outside.norm(), A, X.norm(), most * clear))
    return checks


def _disorder(name: str, values: Any, least: float) -> list[Check]:
    """Return a check that is wrong, if values do not ascend, or begin below `least`; else nothing."""
    fall = max([*(values[:-1] - values[1:]), *(least - values[:1])], default=0.0)
    return [] if fall <= 0 else [Check(f"{name} is out of order by", float(fall), 0.0)]


def _orthonormal(U: DistMatrix, V: DistMatrix) -> list[Check]:
    """Return the checks that U and V have orthonormal columns."""
    from pdgemm.local.arrays.dtypes import eps
    from pdgemm.matrix.distmatrix import DistMatrix

    one, rounding = DistMatrix.eye(U.shape[1], grid=U.grid, dtype=U.dtype), EPS * eps(U.dtype) * (len(U) + len(V))
    apart = {name: (X.H @ X).redistribute(like=one) - one for name, X in (("U", U), ("V", V))}
    return [Check(f"|{name}h {name} - I|", X.norm(1), rounding) for name, X in apart.items()]


def eigh_checks(H: DistMatrix, w: Any, V: DistMatrix | None) -> list[Check]:
    """Return the checks of A, of eigenvalues and, unless V is None, of eigenvectors; errors are relative to |A|_F."""
    from pdgemm.local.arrays.dtypes import eps
    from pdgemm.matrix.distmatrix import DistMatrix

    n, checks, size = len(H), structure_checks(H, "her") + _disorder("w", w, -inf), H.norm() or 1.0
    rounding = EPS * eps(H.dtype) * sum(H.shape) if size < inf else inf
    values = w.astype(float) / size
    if len(w) == n:  # |w - w'|_2 <= |E|_F for the eigenvalues w' of A + E (Hoffman & Wielandt 1953)
        trace = abs(values.sum() - H.diagonal().astype(complex).sum() / size) / max(1, n) ** 0.5
        squares = abs((values**2).sum() - (H.norm() / size) ** 2)
        checks += [
            Check("|sum of w - trace of A|", trace, rounding),
            Check("|sum of w^2 - |A|_F^2|", squares, rounding),
        ]
    if V is not None:
        one = DistMatrix.eye(len(w), grid=H.grid, dtype=H.dtype)
        R = (H @ (V * (1 / size))).redistribute(like=V) - V * (w / size).astype(w.dtype)
        apart, residual = ((V.H @ V).redistribute(like=one) - one).norm(1), R.vector_norm(2, axis=0).max(initial=0)
        checks += [Check("|Vh V - I|", apart, rounding), Check("|A V - V w|", residual, rounding)]
    return checks
