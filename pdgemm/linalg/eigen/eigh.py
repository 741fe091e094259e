"""Eigenvalues and eigenvectors of Hermitian matrices, also of generalized problems with two matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy  # SciPy loads its packages, which takes long, when they are first used

from pdgemm.algorithms.panels.panel_run import run_on_one_rank
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, LinAlgError
from pdgemm.linalg.eigen import division
from pdgemm.linalg.eigen.generalized import Standard, lower_triangle, warn_unless_hermitian
from pdgemm.linalg.eigen.tridiagonal import Wanted, tridiagonal_eigh
from pdgemm.linalg.eigen.tridiagonal_form import OneStage, TwoStages, hermitian_band
from pdgemm.linalg.factors.operands import check_operand, most_on_one_rank
from pdgemm.linalg.factors.qr import qr
from pdgemm.linalg.factors.rank_k import both_triangles
from pdgemm.linalg.ranges import ELEMENTS, in_range
from pdgemm.linalg.work import (
    Work,
    check_protection,
    distributed,
    near_one,
    on_one_rank,
    orthonormal_basis,
    random,
    to_one_rank,
)
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_count, as_name, as_pair, as_real, as_whole, shown
from pdgemm.local.blas.band import eigenvalues_of_band, eigenvalues_of_tridiagonal
from pdgemm.matrix.argument_checks import check_devices, communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.names import Protection
from pdgemm.support.agreement import together

LARGE_FOR_VALUES = 3072  # least order from which eigenvalues without vectors are computed faster through a band
STEPS = 300  # the most steps of block Lanczos; after these A is reduced
# Least orders from which two stages are faster than one, with all vectors and with some.  On 2 ranks at 4096 one stage
# took 8.4 s, with a tenth of the vectors 7.0 s, and two stages 8.1 s; the time of one stage grows faster with n.
LARGE, LARGE_FOR_PART = 16384, 6144
FEW = 4  # least ratio of n to the number of vectors for which LAPACK computes them faster by inverse iteration

Solved = tuple[np.ndarray, DistMatrix, int, dict[str, float]]  # w, V, steps, and facts of the report


@dataclass(frozen=True)
class Subset:
    """The eigenvalues that are wanted: all, those with indices from lo to hi, or those in an interval (lo, hi]."""

    kind: Literal["all", "index", "value"] = "all"
    lo: float = 0
    hi: float = 0

    def slice_of(self, w: np.ndarray) -> slice:
        """Return the slice of the wanted eigenvalues; w has all eigenvalues, in ascending order."""
        if self.kind == "value":
            return slice(*np.searchsorted(w, [self.lo, self.hi], side="right").tolist())
        return slice(int(self.lo), int(self.hi) + 1) if self.kind == "index" else slice(0, len(w))


def eigh(
    A: DistMatrix,
    B: DistMatrix | None = None,
    *,
    lower: bool = True,
    eigvals_only: bool = False,
    type: Literal[1, 2, 3] = 1,
    subset_by_index: Sequence[int] | None = None,
    subset_by_value: Sequence[float] | None = None,
    k: int | None = None,
    which: Literal["largest", "smallest"] = "largest",
    tolerance: float | None = None,
    steps: int | None = None,
    protect: Protection | None = None,
) -> Any:
    """Return w and V with A V = V diag(w), for a Hermitian A, as scipy.linalg.eigh.  Collective over the grid of A.

    A     : DistMatrix (n, n) of type s, d, c or z, of any layout; only one triangle is read, and the real
        part of the diagonal.  A is not changed.
    B     : None, or a Hermitian and positive definite DistMatrix (n, n) of A's type; the same triangle is read.
    lower : read the lower triangles, otherwise the upper.
    eigvals_only : return only w, in less time.
    type  : the problem with B: 1: A v = w B v, and V^H B V = I;  2: A B v = w v, and V^H B V = I;
        3: B A v = w v, and V^H B^-1 V = I.
    subset_by_index : (lo, hi): the eigenvalues lo to hi, counted from 0 in ascending order, and their vectors.
    subset_by_value : (lo, hi): the eigenvalues in the interval (lo, hi]; lo and hi may be infinite.
    k, which : compute only the k largest or smallest eigenvalues, by block Lanczos or, if 3 (k + 8) >= n, as a subset.
    tolerance : largest residuals |A v - w v|_2 / |A|_F for k pairs; by default 1e-10, for 32-bit types 1e-5.
    steps : the largest number of steps of block Lanczos, each a product of A with k + 8 columns.  By default 300, after
        which the pairs are computed as a subset: where many eigenvalues are close to the k-th, no number of
        steps may suffice.
    protect : protection of the products, as for `pdgemm`, only if B is None; other steps are not protected.

    All ranks warn with scipy.linalg.LinAlgWarning where A or B is not Hermitian, up to rounding, unless the triangle
    that is not read is zero.
    Returns w in ascending order, real and the same on every rank, and V (n, n) or (n, number of w) with orthonormal
    columns.

    On the host, reflections reduce A to a tridiagonal matrix: directly or, for large n, through a band of 64 diagonals.
    The eigenvectors of the tridiagonal matrix are computed by divide and conquer, and transformed back.  With m of n
    vectors, for P ranks, the direct way takes (4/3 n^3 + 1/3 n^3 + 3 n^2 m)/P flops, 2/3 n^3 of them in products of
    A and vectors, bound by memory; LAPACK reduces the last 1024 columns on one rank.  The way through the band takes
    (4/3 n^3 + 1/3 n^3 + 6 n^2 m)/P, nearly all in products, and 400 n^2 in a pipeline of all ranks.  Eigenvalues
    without vectors take 4/3 n^3/P flops, through the band from n = 3072 on, with 400 n^2 on one rank.
    Each rank receives about 3 n^2 words, and the words of the products; memory: about 5 n^2/P words besides A, and on
    one rank 1024^2, or 4096^2 where all ranks are on one node.  Up to order 512, LAPACK solves the whole problem on one
    rank.  Where all ranks are on one node, LAPACK uses the cores of all of them, up to order 2048, and for the last
    4096 columns of larger matrices.  On a device, and with `protect`, the spectrum is divided at a number sigma: the
    polar factor U of A - sigma I is also its sign, and (I + U) / 2 projects on the eigenvectors of eigenvalues above
    sigma.  The divisions take about 50 n^3/P flops, in products and Cholesky factorisations.
    Block Lanczos stores 2 (5 k + 40) vectors, with thick restarts and explicit residuals.  B adds a
    Cholesky factorisation and n^2 (2 n + m)/P flops in triangular solves or products.
    After a division or Lanczos, `V.report.facts["residual"]` is |A V - V diag(w)|_F / |A|_F, as measured.
    Raises LayoutError, DTypeError, ArgumentError or DeviceError on all ranks; LinAlgError where elements are NaN or
    infinite, B is not positive definite, or an iteration does not converge.
    Error: |A V - V diag(w)| <= c n eps |A| with c about 1; by Lanczos, the tolerance times |A|_F.  With B these are
    multiplied by |B^-1||B|.
    Dongarra, Sorensen & Hammarling, J. Comput. Appl. Math. 27, 1989; Bischof, Lang & Sun, ACM Trans. Math. Softw.
    26(4), 2000; Auckenthaler et al., Parallel Comput. 37(12), 2011; Gu & Eisenstat, SIAM J. Matrix Anal. Appl. 16(1),
    1995; Nakatsukasa & Higham, SIAM J. Sci. Comput. 35(3), 2013; Wu & Simon, SIAM J. Matrix Anal. Appl. 22(2), 2000.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A, square=True)
        _check_pair(A, B, type, protect)
        subset, k = _subset(A, subset_by_index, subset_by_value, k, which)
        most = STEPS if steps is None else as_count(steps, "steps", 1)
        least = 1e-5 if np.finfo(A.dtype).bits == 32 else 1e-10
        tolerance = least if tolerance is None else as_real(tolerance, "tolerance", above=0)
        arguments += ["eigh", A.distribution, A.dtype, None if B is None else B.distribution, type, bool(lower)]
        arguments += [bool(eigvals_only), subset, k, which, tolerance, steps and most, check_protection(protect, A)]
    work = Work("eigh", protect)
    method, there, iterates = _method(A, subset, eigvals_only, protect), A, k is not None and 3 * (k + 8) < len(A)
    if B is None and method in BY_LAPACK and not iterates:
        there = to_one_rank(work, A)
    warn_unless_hermitian(work, lower, A.grid, A=there, B=B)
    H, pair = there if lower else there.H, None
    if B is not None:
        pair = Standard.of(work, H, B if lower else B.H, type)
        H = pair.C
    T = lower_triangle(H)
    # two factors that scale the largest element to about 1; their product may overflow
    near, far = near_one("A" if B is None else "A, or its product with B or the inverse of B,", T)
    T *= near
    T *= far

    def scaled_back(values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):  # an eigenvalue may be infinite
            return values / near / far

    def wanted(values: np.ndarray) -> slice:
        part = subset.slice_of(scaled_back(values))
        return A.grid.expected(part, slice(None)) if subset.kind == "value" else part

    by_steps = _by_lanczos(work, T, k, which, tolerance, most, steps is None) if iterates else None
    w, V, done, facts = by_steps or METHODS[method](work, T, wanted)
    if eigvals_only:
        return scaled_back(w)
    V = pair.vectors(V) if pair else V
    if not V.same_layout(A):
        columns = empty_like(A, distribution=A[:, : V.shape[1]].distribution)
        work.copy(V, columns)
        V = columns
    return scaled_back(w), work.reported(V, done, **facts)


def eigvalsh(
    A: DistMatrix,
    B: DistMatrix | None = None,
    *,
    lower: bool = True,
    type: Literal[1, 2, 3] = 1,
    subset_by_index: Sequence[int] | None = None,
    subset_by_value: Sequence[float] | None = None,
) -> np.ndarray:
    """Return eigenvalues of a Hermitian A in ascending order, as scipy.linalg.eigvalsh.  Collective over the grid.

    Arguments and errors are those of `eigh`; the cost is that of `eigh` with eigvals_only.
    """
    options: Any = {"subset_by_index": subset_by_index, "subset_by_value": subset_by_value}
    return eigh(A, B, lower=lower, eigvals_only=True, type=type, **options)


class Inertia(NamedTuple):
    """The numbers of negative, zero and positive eigenvalues of a Hermitian matrix."""

    negative: int
    zero: int
    positive: int


@in_range(lambda counts, a: counts, A=ELEMENTS)
def inertia(A: DistMatrix, *, lower: bool = True) -> Inertia:
    """Return the numbers of negative, zero and positive eigenvalues of a Hermitian A.  Collective over the grid of A.

    A, lower : as for `eigvalsh`.  Cost and errors are those of `eigvalsh`.  Eigenvalues up to n eps |A|_2 count as 0.
    """
    w = eigvalsh(A, lower=lower)
    least = len(A) * np.finfo(w.dtype).eps * np.abs(w).max(initial=0)
    signs = np.where(np.abs(w) <= least, 0, np.sign(w))
    return Inertia(*(int((signs == sign).sum()) for sign in (-1, 0, 1)))


def _method(A: DistMatrix, subset: Subset, eigvals_only: bool, protect: Protection | None) -> str:
    """Return the name in METHODS of the fastest method for the wanted eigenvalues, or eigenpairs, of A."""
    if protect is not None or A.device != devices.HOST:
        return "division"
    if len(A) <= most_on_one_rank(A, division.SMALL):
        few = subset.kind == "index" and FEW * (subset.hi + 1 - subset.lo) <= len(A)
        return "values by LAPACK" if eigvals_only else "few by LAPACK" if few else "LAPACK"
    if eigvals_only:
        return "values of a band" if len(A) >= LARGE_FOR_VALUES else "values"
    return "two stages" if len(A) >= (LARGE if subset.kind == "all" else LARGE_FOR_PART) else "one stage"


def _in_stages(reduction: type[OneStage | TwoStages], work: Work, T: DistMatrix, wanted: Wanted) -> Solved:
    """Return the wanted eigenvalues and vectors by a reduction to tridiagonal form.  Collective."""
    form = reduction.of(work, T)
    w, V = tridiagonal_eigh(work, form.d, form.e, T, wanted)
    return w, form.apply(work, V), 0, {}


def _values(work: Work, T: DistMatrix, wanted: Wanted) -> Solved:
    """Return the wanted eigenvalues by a reduction to tridiagonal form; no vectors are computed.  Collective."""
    form = OneStage.of(work, T)
    w = on_one_rank(T, eigenvalues_of_tridiagonal, form.d, form.e)
    return w[wanted(w)], T, 0, {}


def _values_of_band(work: Work, T: DistMatrix, wanted: Wanted) -> Solved:
    """Return the wanted eigenvalues by a reduction to a band; no vectors are computed.  Collective."""
    w = on_one_rank(T, eigenvalues_of_band, hermitian_band(work, T)[0])
    return w[wanted(w)], T, 0, {}


def _by_lapack(work: Work, T: DistMatrix, wanted: Wanted, vectors: bool = True, few: bool = False) -> Solved:
    """Return the wanted eigenvalues and vectors by LAPACK on one rank.  Collective.

    few : the wanted pairs are known by their indices; only they are computed, by bisection and inverse iteration.
    """
    n, X = len(T), to_one_rank(work, T)
    part = wanted(np.ones(n)) if few else slice(0, n)
    columns = part.stop - part.start
    V = DistMatrix.empty((n, columns), grid=X.grid, dtype=T.dtype, order="F") if vectors else T

    def compute() -> np.ndarray:
        how: Any = {"driver": "evr", "subset_by_index": (part.start, part.stop - 1)} if few else {"driver": "evd"}
        how |= {"eigvals_only": not vectors, "overwrite_a": True, "check_finite": False}
        result = scipy.linalg.eigh(X.stored, lower=True, **how)
        if vectors:
            V.stored[...] = result[1]
        return result[0] if vectors else result

    k = 2 * n / 3 + vectors * (columns + (not few) * 2 * n / 3)  # of 2 n^2 k flops
    what = f"Eigenpairs ({shape_of(T)})"
    w, report = run_on_one_rank("eigh", X, (n, n, k), compute, np.ones(columns), what, passes=n // 6)
    V.report = report
    return (w, work.did(V), 0, {}) if few else (w[wanted(w)], work.did(V)[:, wanted(w)], 0, {})


def _by_division(work: Work, T: DistMatrix, wanted: Wanted) -> Solved:
    """Return the wanted eigenvalues and vectors by division of the spectrum; LAPACK solves small parts.  Collective."""
    H = work.did(both_triangles(T, "L"))
    scale = H.norm() or 1.0
    w, V, done = division.divided(work, H, scale)
    w = np.maximum.accumulate(w)  # rounding errors may change the order of values on two sides of a division
    part = wanted(w)
    residual = _residual(work, H, w[part], V[:, part]) / scale
    if residual > 10 * len(H) * dtypes.eps(H.dtype):
        raise LinAlgError(
            f"the division of the spectrum of a matrix ({H.distribution}) lost digits: residual {residual:.1e}"
        )
    return w[part], V[:, part], done, {"residual": residual}


def _by_lanczos(
    work: Work, T: DistMatrix, k: Any, which: str, tolerance: float, steps: int, may_fail: bool
) -> Solved | None:
    """Return k eigenvalues and vectors by block Lanczos.  Collective.   may_fail : return None if this fails."""
    H = work.did(both_triangles(T, "L"))
    scale, sign = H.norm() or 1.0, 1 if which == "largest" else -1
    try:
        w, V, done = lanczos(work, H, k, sign, scale, tolerance, steps)
    except LinAlgError:  # raised on all ranks
        if may_fail:
            return None
        raise
    return w, V, done, {"residual": _residual(work, H, w, V) / scale}


BY_LAPACK = "LAPACK", "few by LAPACK", "values by LAPACK"
METHODS: dict[str, Callable[[Work, DistMatrix, Wanted], Solved]] = {
    "division": _by_division,
    "LAPACK": _by_lapack,
    "few by LAPACK": partial(_by_lapack, few=True),
    "values by LAPACK": partial(_by_lapack, vectors=False),
    "values": _values,
    "values of a band": _values_of_band,
    "one stage": partial(_in_stages, OneStage),
    "two stages": partial(_in_stages, TwoStages),
}


def _residual(work: Work, H: DistMatrix, w: np.ndarray, V: DistMatrix) -> float:
    """Return |H V - V diag(w)|_F.  Collective."""
    return H.grid.expected(work.add(work.product(1, H, V), -1, V * w).norm(), 0.0)


def _check_pair(A: DistMatrix, B: DistMatrix | None, kind: int, protect: Protection | None) -> None:
    """Raise where `type` is unknown, or B does not fit A.  Local, inside `together`."""
    if kind not in (1, 2, 3):
        raise ArgumentError(f"type must be 1, 2 or 3, got {shown(kind)}")
    if B is None:
        return
    check_operand("B", B, square=True)
    check_devices(A, B, None)
    if B.shape != A.shape:
        raise LayoutError(
            f"A and B must have the same shape: A is {shape_of(A)} on a {A.grid} grid, "
            f"B is {shape_of(B)} on a {B.grid} grid"
        )
    if B.dtype != A.dtype:
        raise DTypeError(f"A is {A.dtype}, and B {B.dtype}: they must be of one type")
    B.layout_in(A.grid)
    if protect is not None:
        raise ArgumentError("protect is for products, and B is factored: pass protect or B, not both")


def _subset(
    A: DistMatrix, by_index: Sequence[int] | None, by_value: Sequence[float] | None, k: int | None, which: str
) -> tuple[Subset, int | None]:
    """Return the wanted part of the spectrum of A, and k.  Raises ArgumentError.  Local, inside `together`."""
    n = len(A)
    as_name(which, "which", ("largest", "smallest"))
    if sum(x is not None for x in (by_index, by_value, k)) > 1:
        raise ArgumentError("eigh takes only one of k, subset_by_index and subset_by_value")
    if k is not None:
        k = as_count(k, "k", 1)
        if k > n:
            raise ArgumentError(f"k = {k} is more than the {n} eigenvalues of A, which is {shape_of(A)}")
        return Subset("index", *((n - k, n - 1) if which == "largest" else (0, k - 1))), k
    if by_index is not None:
        lo, hi = as_pair(by_index, "subset_by_index must be a pair (lo, hi), got")
        first = as_whole(lo, "the first index of subset_by_index", 0, max(0, n - 1))
        return Subset("index", first, as_whole(hi, "the last index of subset_by_index", first, n - 1)), None
    if by_value is not None:
        ends = as_pair(by_value, "subset_by_value must be a pair (lo, hi), got")
        lo, hi = (x if x in (-np.inf, np.inf) else as_real(x, "an end of subset_by_value") for x in ends)
        if not lo < hi:
            raise ArgumentError(f"subset_by_value must be an interval (lo, hi] with lo < hi, got {shown(by_value)}")
        return Subset("value", lo, hi), None
    return Subset(), None


def lanczos(
    work: Work, H: DistMatrix, k: int, sign: int, scale: float, tolerance: float, steps: int
) -> tuple[np.ndarray, DistMatrix, int]:
    """Return k eigenvalues of H in ascending order, their vectors, and the number of steps.  Collective.

    sign : 1: the largest eigenvalues; -1: the smallest, as the largest of -H.   scale : |H|_F.
    """
    n, width = len(H), k + 8
    most = min(n, 5 * width)
    V = DistMatrix.empty((n, most), grid=H.grid, dtype=H.dtype, device=H.device)  # the basis
    W = empty_like(V)  # sign H V
    noise = random(H, (n, width))
    new, used, T = work.did(qr(noise)[0]), 0, np.zeros((0, 0), H.dtype)
    for step in range(1, steps + 1):
        last, used = used, used + new.shape[1]
        work.copy(new, V[:, last:used])
        work.product(sign, H, V[:, last:used], C=W[:, last:used])
        columns = work.product(1, V[:, :used].H, W[:, last:used]).allgather()
        T = np.block([[T, columns[:last]], [columns[:last].conj().T, columns[last:]]])
        w, Y = on_one_rank(H, np.linalg.eigh, (T + T.conj().T) / 2)
        keep = used if used + width > most else 0  # not 0: the basis is full, restart with Ritz vectors
        kept = distributed(H, Y[:, -2 * width :] if keep else Y[:, -width:])
        X, AX = work.product(1, V[:, :used], kept), work.product(1, W[:, :used], kept)
        w = w[-X.shape[1] :]
        R = AX - X * w
        residuals = R.vector_norm(2, axis=0)
        residuals = H.grid.expected(residuals, residuals * (step < H.grid.iterations(steps, 20)))
        if residuals[-k:].max() <= tolerance * scale:
            order = slice(-k, None) if sign > 0 else slice(-1, -k - 1, -1)
            return sign * w[order], work.product(1, V[:, :used], distributed(H, Y[:, order])), step
        if keep:
            used, T = X.shape[1], np.diag(w).astype(H.dtype)
            work.copy(X, V[:, :used])
            work.copy(AX, W[:, :used])
        R = R[:, R.shape[1] - width :]  # with noise, which extends the basis if a residual is a rounding error
        new, _ = orthonormal_basis(work, R, V[:, :used], 10 * dtypes.eps(H.dtype) * scale / sqrt(n), noise)
    raise LinAlgError(
        f"{k} eigenvalues of a matrix ({H.distribution}) were not found in {steps} steps: residuals up to "
        f"{residuals[-k:].max() / scale:.1e} of the norm, wanted {tolerance:.1e}; raise steps= or tolerance="
    )
