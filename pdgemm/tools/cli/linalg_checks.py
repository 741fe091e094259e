"""The checks that `--verify` makes in commands of linear algebra: relative errors, and bounds of rounding errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import Any

import numpy as np

from pdgemm.gemm import pdgemm
from pdgemm.linalg.factors.qr import qr
from pdgemm.linalg.factors.rank_k import both_triangles
from pdgemm.linalg.singular.svd import svd
from pdgemm.local.arrays.dtypes import eps
from pdgemm.matrix.array_functions import tril, triu
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.residual import Residual, verdict
from pdgemm.tools.cli.session import Speaker

EPS = 3  # times n and the unit roundoff: the error bound in the tests of SLATE
TELLS = 0.1  # the largest tolerance at which a relative error shows that a result is right
_RANDOM = 30  # the most random columns G of `svd_checks`


@dataclass(frozen=True)
class Check:
    """A relative error, and the bound that rounding sets for it.  The bound is infinite if a norm overflows."""

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
        return f"{self.what} {self.value:.1e} (tolerance {self.bound:.1e}): {verdict(self)}"


def rounded(what: str, value: float, A: DistMatrix, size: float, times: float = 1.0) -> Check:
    """Return the check that the error value / size is at most 3 eps times the factor `times`; eps is that of A's type.

    If the size is infinite, the check is neither passed nor wrong.
    """
    return Check(what, value / (size or 1.0), EPS * eps(A.dtype) * times if size < inf else inf)


def report_checks(say: Speaker, checks: Sequence[Check | Residual]) -> bool:
    """Report checks up to the first one that is wrong, and return whether no check is wrong."""
    done = [*takewhile(lambda x: not x.wrong, checks)]
    done += checks[len(done) : len(done) + 1]
    for each in done:
        say.report("verify", each, several=True)
    if facts := say.facts.get("verify"):  # on rank 0
        least = min(facts, key=lambda x: (not x["wrong"], x["passed"]))
        say.facts["verify"] = {**least, "checks": facts} if len(facts) > 1 else least
    return not any(x.wrong for x in checks)


def whole(A: DistMatrix, lower: bool = True) -> DistMatrix:
    """Return A or, if its other triangle is zero, the Hermitian matrix of the triangle that is read.  Collective."""
    H: DistMatrix = A if lower else A.H
    alone = triu(H, 1).norm("max") == 0 < tril(H, -1).norm("max")
    return both_triangles(H, "L") if alone else A


def structure_checks(A: DistMatrix, assumed: str) -> list[Check]:
    """Return the check that A has the assumed structure, Hermitian or triangular, relative to |A|_F; [] for "gen"."""
    if assumed == "gen":
        return []
    if assumed.endswith("triangular"):
        outside = triu(A, 1) if assumed.startswith("lower") else tril(A, -1)
        return [rounded(f"|A - its {assumed.split()[0]} triangle|", outside.norm(), A, A.norm())]
    apart = A.H.redistribute(like=A) - A
    return [rounded("|Ah - A|", apart.norm(), A, A.norm(), sum(A.shape))]


def solve_checks(A: DistMatrix, B: DistMatrix, X: DistMatrix, assumed: str) -> list[Check]:
    """Return the checks that A has the assumed structure, and that X solves A X = B."""
    A = whole(A) if assumed in ("pos", "her") else A
    scale, residual = max(1, len(A)) * (A.norm(1) * X.norm(1) + B.norm(1)), (B - A @ X).norm(1)
    return [*structure_checks(A, assumed), rounded("backward error", residual, X, scale)]


def svd_checks(A: Any, U: DistMatrix, s: Any, Vh: DistMatrix, facts: dict[str, Any], memory: int | None) -> list[Check]:
    """Return the checks of singular triplets of a matrix, in memory or in a file, which is read twice.

    Errors are relative to the largest singular value.  Let Q be an orthonormal basis of (A - U diag(s) Vh) G for a few
    random columns G.  Then |(A - U diag(s) Vh)^H Q|_2 is a lower bound of |A - U diag(s) Vh|_2 (Halko, Martinsson &
    Tropp, SIAM Review 53(2), 2011, section 4.5).
    """
    first, rounding, V = float(s[0]) if len(s) and s[0] else 1.0, EPS * eps(A.dtype) * sum(A.shape), Vh.H
    k, few = len(s), min(_RANDOM, *A.shape) if len(s) < min(A.shape) else 0
    values, limit = (s / first).astype(s.dtype), None if memory is None else max(memory, 1 << 24)

    def remaining(M: Any, X: DistMatrix, Y: DistMatrix, more: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
        """Return two matrices from one product with M: (M X - Y diag(s)) / s_1 and (M - Y diag(s) X^H) more / s_1.

        more : further columns.
        """
        columns: Any = np.hstack([X, more])
        both = pdgemm(1, M, columns * (1 / first), memory_limit=limit)
        image, rest = both[:, :k], both[:, k:]
        known = Y @ ((X.H @ more) * values[:, None])
        return image - (Y * values).redistribute(like=image), rest - known.redistribute(like=rest)

    G = DistMatrix.random((A.shape[1], few), grid=A.grid, seed=2**63, kind="normal", dtype=A.dtype)
    R, rest = remaining(A, V, U, G)
    Q = qr(rest)[0]
    if memory is not None and A.source.op == "T" and A.dtype.kind == "c":  # no view A.H: A^H U = conj(A^T conj(U))
        L, rest = remaining(A.T, U.H.T, V.H.T, Q.H.T)
    else:
        L, rest = remaining(A.H, U, V, Q)
    checks = _disorder("s", s[::-1], 0) + _orthonormal(rounding, U=U, V=V)
    for what, X, residual in (("|A V - U s|", R, 0.0), ("|Ah U - V s|", L, facts.get("residual", 0.0))):
        checks.append(Check(what, X.vector_norm(2, axis=0).max(initial=0), residual + rounding))
    if few:
        over = max(0.0, float(svd(rest)[1][0]) - float(values[-1]))
        checks.append(Check("|A - U s Vh| beyond the last value", over, facts["bound"] + rounding))
    return checks


def lstsq_checks(A: DistMatrix, X: DistMatrix, R: DistMatrix, rank: int) -> list[Check]:
    """Return the checks that X minimises |B - (A + E) X| for a small E, and is the solution of least norm.

    For each column x, with the residual r = b - A x, the least |E|_F is estimated relative to |A|_2.  It is about

        |(|x|^2 Ah A + |r|^2 I)^-1/2 Ah r|_2

    (Walden, Karlson & Sun, Numer. Linear Algebra Appl. 2(3), 1995).  Only the `rank` largest singular values of A and
    their vectors are used; the x of least norm is in the span of the right singular vectors.
    """
    _, s, Vh = svd(A)
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
    """Return [] if the values ascend and the first one is at least `least`, else one check that is wrong."""
    fall = max([*(values[:-1] - values[1:]), *(least - values[:1])], default=0.0)
    return [] if fall <= 0 else [Check(f"{name} is out of order by", float(fall), 0.0)]


def _orthonormal(rounding: float, **matrices: DistMatrix) -> list[Check]:
    """Return the checks that matrices have orthonormal columns; keywords are the names of the matrices in texts."""
    checks = []
    for name, X in matrices.items():
        one = DistMatrix.eye(X.shape[1], grid=X.grid, dtype=X.dtype)
        apart = (X.H @ X).redistribute(like=one) - one
        checks.append(Check(f"|{name}h {name} - I|", apart.norm(1), rounding))
    return checks


def eigh_checks(A: DistMatrix, w: Any, V: DistMatrix | None, lower: bool) -> list[Check]:
    """Return the checks of A, which must be Hermitian, of the eigenvalues w and, unless V is None, of the vectors V.

    Errors are relative to |A|_F.
    """
    H = whole(A, lower)
    n, checks, size = len(H), structure_checks(H, "her") + _disorder("w", w, -inf), H.norm() or 1.0
    rounding = EPS * eps(H.dtype) * sum(H.shape) if size < inf else inf
    values = w.astype(float) / size
    if len(w) == n:  # |w - w'|_2 <= |E|_F for the eigenvalues w' of A + E (Hoffman & Wielandt 1953)
        trace = abs(values.sum() - H.diagonal().astype(complex).sum() / size) / max(1, n) ** 0.5
        squares = abs((values**2).sum() - (H.norm() / size) ** 2)
        checks.append(Check("|sum of w - trace of A|", trace, rounding))
        checks.append(Check("|sum of w^2 - |A|_F^2|", squares, rounding))
    if V is not None:
        R = (H @ (V * (1 / size))).redistribute(like=V) - V * (w / size).astype(w.dtype)
        residual = R.vector_norm(2, axis=0).max(initial=0)
        checks += [*_orthonormal(rounding, V=V), Check("|A V - V w|", residual, rounding)]
    return checks
