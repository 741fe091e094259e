"""Singular value decompositions: the largest singular values, with bounds of their errors, or all of them.

All values are computed by LAPACK on one rank, or by eigenvectors of A^H A and QR factorisations.  LAPACK takes about
the same time for all matrices, the other way least where most values are near the largest one.
With the eigenvectors V of A^H A, columns of A V = Q R have inner products of about n eps s_1^2, and the lengths s_i.
So the off-diagonal elements of row i of R are about n eps s_1^2 / s_i.  In the rows of values above s_1 / 8 they are at
most 8 n eps s_1, and are dropped.  The other values are those of the trailing triangle R_22, which is factored in the
same way.
All transformations are unitary, so errors are those of the dropped elements and of rounding, whatever the condition.
QR as a step before a decomposition: Drmac & Veselic, SIAM J. Matrix Anal. Appl. 29(4), 2008.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy  # SciPy loads its packages, which takes long, when they are first used

from pdgemm.algorithms.panels.panel_run import run_on_one_rank
from pdgemm.algorithms.product_options import Streamed
from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.linalg.eigen.eigh import eigh
from pdgemm.linalg.factors.householder import apply_reflectors, householder_factor, householder_qr
from pdgemm.linalg.factors.operands import check_operand, is_reachable, most_on_one_rank
from pdgemm.linalg.factors.rank_k import herk
from pdgemm.linalg.factors.tall_qr import svd_of_tall
from pdgemm.linalg.ranges import ELEMENTS, in_range, times
from pdgemm.linalg.singular.golub_kahan import BLOCKS, LinearMap, Tempered, leading_space, missing
from pdgemm.linalg.work import Work, check_protection, near_one, random, to_one_rank
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_count, as_real, as_seed
from pdgemm.matrix.argument_checks import communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.names import Protection
from pdgemm.support.agreement import together, warn_together
from pdgemm.support.text import counted

ON_ONE_RANK = 512  # largest order for which LAPACK on one rank is faster than products on a few ranks
LEAST = 1 / 8  # least singular value whose vectors A^H A yields, in units of the largest one
ROUNDING = 100  # errors up to this multiple of eps of the type count as rounding errors


@in_range(lambda factors, a: (factors[0], times(factors[1], a), factors[2]), A=ELEMENTS)
def svd(
    A: DistMatrix | Streamed,
    k: int | None = None,
    *,
    full_matrices: bool = False,
    oversample: int | None = None,
    tolerance: float | None = None,
    steps: int | None = None,
    seed: int = 0,
    protect: Protection | None = None,
    passes: int | None = None,
    memory: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return U, s and Vh with A = U diag(s) Vh, or the k largest singular values and their vectors.  Collective.

    A : DistMatrix (m, n) of type s, d, c or z; A is not changed.  Or a matrix in a file: see the end.
    k : None: all min(m, n) values.  Up to 512 values, and on one rank, they are computed by LAPACK, after a QR
        factorisation if A is tall; more values by the eigenvectors V of A^H A, and a QR factorisation of A V.  Where
        all ranks are on one node, LAPACK uses the cores of all of them, up to 2048 values, unless many values are near
        the largest one: |A|_F^2 >= n s_1^2 / 8.
        A number: the k largest values, taken from all values if min(m, n) <= 6 (k + oversample), else computed by block
        Golub-Kahan steps with blocks of k + oversample columns; the first columns are random and depend on the seed.
    full_matrices : U (m, m) and Vh (n, n), on the host, only with all values.
    oversample : 10 by default.
    tolerance : the steps end when no value can differ from its exact value by more than tolerance s_1.  By default they
        end when only rounding errors of about 100 eps s_1 are left.
    steps : the largest number of steps, 100 by default.
    protect : protection of the products, as for `pdgemm`, only with k; factorisations are not protected.

    Returns U (m, k), s (k,) in descending order on every rank, and Vh (k, n); U and Vh have orthonormal columns and
    rows.  With k, `U.report.facts` has "bound": no value differs from its exact value by more than bound s_1; "share":
    sum s^2 / |A|_F^2, exactly the part of |A|_F^2 in U diag(s) Vh; "residual": max |A^H u - s v| / s_1.
    The bound follows from measured residuals, and from the norm of the rest of A: see `missing` in
    `pdgemm.linalg.singular.golub_kahan`.  If the share is near 1, the bound always holds; otherwise it holds unless the
    random columns miss a direction, which has a probability of about 10^-9 for 10 more columns than k (Halko,
    Martinsson & Tropp, 10.8).
    All ranks warn with scipy.linalg.LinAlgWarning if the bound exceeds the tolerance.

    Cost of a step with l = k + oversample: 2 products of A with l columns (4 mnl flops), 9 products with bases of 5 l
    columns, and 4 QR factorisations of l columns.  A few steps suffice if the values decay, 20 to 50 if they hardly do.
    At the end 2 products of A with k columns.  Memory: 8 (m + n) l words on all ranks together, 50 l^2 on each rank.
    Cost without k: about 2 mn^2 flops in addition to those of `eigh` and QR, and again for the values below s_1 / 8.
    LAPACK on one rank: about 10 mn^2 flops, and 3 mn words there.
    Raises DTypeError, ArgumentError or DeviceError on all ranks; LinAlgError where A has NaN or infinite elements.
    Error, without k: |A - U diag(s) Vh| <= c n eps s_1, with c about 1, and 10 where the ranks share the factors.
    Golub, Luk & Overton, ACM Trans. Math. Software 7(2), 1981; Halko, Martinsson & Tropp, SIAM Review 53(2), 2011;
    Musco & Musco, NeurIPS 2015; Li & Li, Linear Algebra Appl. 395, 2005.

    A matrix in a file (`pdgemm.io.hdf5.dataset`, `pdgemm.io.npy.dataset`) is read in panels, each while the previous
    one is multiplied; k is required.  If triangles of order min(m, n) fit the memory of each rank, 2 passes over the
    file are enough: the panels of a rank are reduced to one triangle by QR factorisations, and the triangles of all
    ranks together, a matrix in memory, have the singular values of A.  Otherwise the steps are those of a matrix in
    memory, with blocks that are as wide as the memory allows; each step reads A twice, and the rest 3 times.
    passes : the most passes over the file, another limit of the steps; if it is too low, all ranks warn, as above.
    memory : bytes per rank for panels, bases, singular vectors and all buffers; by default 256 MiB.
    oversample : by default as many columns as the memory allows, at least 2.
    progress : called as progress(done, total) after each panel; total grows with each step.
    U and Vh are on the grid of A, one block for each rank.  `U.report.facts` are as above; with triangles, "residual"
    is a bound; if the mean mu of the rows is subtracted, A stands for A - 1 mu.  `U.report.bytes_read` is the number of
    passes times the size of the dataset.

    Cost with triangles: 4 mn min(m, n) flops and 2 passes.  Memory of each rank: 6 min(m, n)^2 words and two panels.
    Raises MemoryLimitError, which says how many bytes are needed, FileError, and the errors above.
    Demmel, Grigori, Hoemmen & Langou, SIAM J. Sci. Comput. 34(1), 2012 (sequential TSQR).
    """
    in_file: Any = getattr(A, "__svd__", None)
    if in_file is not None:
        others = {"full_matrices": full_matrices, "protect": protect}
        of_file: tuple[DistMatrix, np.ndarray, DistMatrix] = in_file(
            k, others, passes, memory, oversample, tolerance, steps, seed, progress
        )
        return of_file
    in_memory: Any = A
    with together(communicator(A=A)) as arguments:
        check_operand("A", in_memory)
        if passes is not None or memory is not None or progress is not None:
            raise ArgumentError("passes, memory, progress are for a matrix in a file, and A is in memory")
        search = None if k is None else checked_search(in_memory.shape, k, oversample, tolerance, steps, seed)
        if k is None and protect is not None:
            raise ArgumentError(
                "protect is for products, and svd without k is a factorisation: pass k, or leave protect out"
            )
        square = in_memory.shape[0] == in_memory.shape[1]
        if full_matrices and (k is not None or (in_memory.device != devices.HOST and not square)):
            raise ArgumentError(
                "full_matrices=True is for all singular values, on the host; "
                f"A is {shape_of(in_memory)} on {in_memory.device}, k = {k}"
            )
        arguments += ["svd", in_memory.distribution, in_memory.dtype, search, bool(full_matrices)]
        arguments += [check_protection(protect, in_memory)]
    work = Work("svd", protect)
    if search is None:
        near_one("A", in_memory)  # raises where an element is NaN or infinite
        return _all(work, in_memory, full_matrices)
    triplets = leading_triplets(work, in_memory, search)
    work.reported(triplets.U, triplets.steps, **triplets.facts(search, in_memory.grid, shape_of(in_memory)))
    return triplets.U, triplets.s, triplets.V.H


class SvdSearch(NamedTuple):
    """Arguments of a search for the k largest singular values: see `svd`.

    width : columns of a block.   limit : the tolerance; None: that of rounding errors.
    """

    k: int
    width: int
    limit: float | None
    steps: int
    seed: int


def checked_search(shape: tuple[int, int], k: Any, oversample: Any, tolerance: Any, steps: Any, seed: Any) -> SvdSearch:
    """Return the search that arguments of `svd` describe.  Local, inside `together`; raises ArgumentError."""
    k = as_count(k, "k", 1)
    if k > min(shape):
        m, n = shape
        raise ArgumentError(f"k = {k} is more than the {min(shape)} singular values of A, which is {m} x {n}")
    width = k + (10 if oversample is None else as_count(oversample, "oversample", 0))
    limit = None if tolerance is None else as_real(tolerance, "tolerance", above=0)
    return SvdSearch(k, width, limit, 100 if steps is None else as_count(steps, "steps", 1), as_seed(seed))


class Triplets(NamedTuple):
    """The k largest singular values s of a matrix A, descending, with their vectors, the columns of U and V.

    share : sum s^2 / |A|_F^2.   bounds : bounds of the errors of s.   rounding : the part of the bounds that is due to
    rounding.   residual : max |A^H u - s v|.   steps : number of steps.
    bounds, rounding and residual are in units of s_1.
    """

    U: DistMatrix
    s: np.ndarray
    V: DistMatrix
    share: float
    bounds: np.ndarray
    rounding: float
    residual: float
    steps: int

    def facts(self, search: SvdSearch, grid: ProcessGrid, shape: str) -> dict[str, Any]:
        """Return the facts of a report; all ranks warn if the largest bound exceeds the tolerance.  Collective."""
        bound, eps = float(self.bounds.max()), dtypes.eps(self.U.dtype)
        wanted = ROUNDING * eps + 2 * self.rounding if search.limit is None else search.limit
        if grid.expected(bound > wanted, False):
            warn_together(
                grid.comm,
                f"svd of {shape}: the {search.k} largest singular values are known to {bound:.1e} s_1, not to "
                f"{wanted:.1e} s_1, after {counted(self.steps, 'step')}: raise steps= or tolerance=",
            )
        return {"bound": bound, "share": self.share, "residual": self.residual, "bounds": self.bounds.tolist()}


def leading_triplets(work: Work, A: DistMatrix, search: SvdSearch) -> Triplets:
    """Return the k largest singular triplets of a matrix in memory.  Collective over the grid of A."""
    near, far = near_one("A", A)
    norm = A.norm()
    norm = norm * near * far if np.isfinite(norm) else (A * near * far).norm()
    W = Tempered(A, near, far, norm)
    if not is_small(A, search.k, search.width - search.k):
        triplets = triplets_by_steps(work, W, search)
    else:
        U, s, Vh = all_triplets(work, A)
        s, k = s * near * far, search.k
        U, V = U[:, :k], Vh[:k].H
        R = W.times(work, V, -1, U * s[:k])
        after = np.append(s[k:], 0)  # no value is left after the last one
        triplets = _bounded(work, W, (U, s[:k], V), R, (after, np.zeros(len(after))), 0)
    return triplets._replace(s=triplets.s / near / far)


def triplets_by_steps(work: Work, W: LinearMap, search: SvdSearch) -> Triplets:
    """Return the k largest singular triplets of a linear map by block Golub-Kahan steps.  Collective."""
    k, width, limit, steps, seed = search
    target = ROUNDING * dtypes.eps(W.A.dtype) if limit is None else limit
    basis, ritz, done = leading_space(work, W, k, width, target, steps, (2 * seed + 1) % 2**64)
    Y = W.times(work, basis)
    U, s, Gh = svd_of_tall(Y)
    V = DistMatrix.empty((W.A.shape[1], k), grid=W.A.grid.base, dtype=W.A.dtype, device=W.A.device)
    work.product(1, basis, work.did(Gh).H, C=V)
    R = work.product(1, Y, Gh.H, -1, U * s)  # A V - U diag(s), without one more product with A
    return _bounded(work, W, (U, s, V), R, (ritz.s[k:], ritz.residuals[k:]), done)


def _all(work: Work, A: DistMatrix, full_matrices: bool) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    U, s, Vh = all_triplets(work, A)
    if full_matrices:
        U = completed(work, U) if A.shape[0] > A.shape[1] else U
        Vh = completed(work, Vh.H).H if A.shape[1] > A.shape[0] else Vh
    U = work.reported(U, 0)
    Vh.report = U.later_report
    return U, s, Vh


def is_small(A: DistMatrix, k: int, oversample: int) -> bool:
    """Would a full basis and one more block have at least as many columns as the whole space?"""
    return min(A.shape) <= (BLOCKS + 1) * (k + oversample)


def _bounded(
    work: Work,
    A: LinearMap,
    triplets: tuple[DistMatrix, np.ndarray, DistMatrix],
    R: DistMatrix,
    after: tuple[np.ndarray, np.ndarray],
    steps: int,
) -> Triplets:
    """Return approximate triplets U, s, V with bounds of the errors of s, from residuals.  Collective.

    R : A V - U diag(s).   after : the next approximate values, and their residuals.
    The bounds include rounding errors of products: sqrt(p) eps / 16 for a sum of p addends, 4 times that for a vector.
    """
    U, s, V = triplets
    L = A.H.times(work, U, -1, V * s)
    right, left = (X.vector_norm(2, axis=0) for X in (L, R))
    inside, *grams = (_gram(work, X, Y) for X, Y in ((U, R), (U, U), (V, V)))
    apart, first = max(float(np.linalg.norm(gram - np.eye(len(s)), 2)) for gram in grams), float(s[0]) or 1.0
    eps, root = dtypes.eps(U.dtype), float(np.sqrt(max(A.A.shape)))
    rounding = float(np.linalg.norm(inside, 2)) + (apart + (4 + root / 16) * eps) * float(s[0])
    values, residuals = np.append(s, after[0].astype(s.dtype)), np.append(np.maximum(left, right), after[1])
    bounds = missing(len(s), values, residuals, A.norm) + rounding
    share = min(1.0, float((s.astype(float) ** 2).sum()) / A.norm**2) if A.norm else 1.0
    residual = float(right.max()) / first + root / 4 * eps
    return Triplets(U, s, V, share, bounds / first, rounding / first, residual, steps)


def _gram(work: Work, X: DistMatrix, Y: DistMatrix) -> np.ndarray:
    """Return X^H Y in double precision: errors of long sums in single precision would exceed its small elements."""
    wide = np.result_type(X.dtype, np.float64)
    C = DistMatrix.empty((X.shape[1], Y.shape[1]), grid=X.grid.base, dtype=wide, device=X.device)
    return work.product(1, X.H, Y, 0, C).allgather()


def all_triplets(work: Work, A: DistMatrix) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return U, s and V^H with A = U diag(s) V^H, U (m, k), V^H (k, n), k = min(m, n).  Collective over A.grid."""
    m, n = A.shape
    if 0 in A.shape:
        return empty_like(A)[:, :0], np.zeros(0, np.finfo(A.dtype).dtype), empty_like(A)[:0, :]
    if m < n:
        W, s, Gh = all_triplets(work, A.H)
        return Gh.H, s, W.H
    is_tall, small = 2 * m > 3 * n, n <= most_on_one_rank(A, ON_ONE_RANK)
    is_shared = are_shared(A)
    if not is_shared and (is_tall or A.device != devices.HOST):
        U, s, Vh = svd_of_tall(A)
        return work.did(U), s, Vh
    if is_tall:
        Q, R = householder_qr(A)  # unlike `qr`, keeps R distributed
        assert Q is not None
        U, s, Vh = all_triplets(work, work.did(R))
        return work.product(1, Q, U, C=empty_like(A)), s, Vh
    near, far = near_one("A", A)
    W = A * near * far
    U, s, V = (_by_lapack if not is_shared or (small and not _is_flat(work, W)) else _by_gram_matrix)(work, W)
    return U, np.minimum.accumulate(s) / near / far, V.H


def _by_lapack(work: Work, A: DistMatrix) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return U, s and V by LAPACK on one rank; A may be overwritten.  Collective."""
    (m, n), X = A.shape, to_one_rank(work, A)
    U, Vh = (DistMatrix.empty(shape, grid=X.grid, dtype=A.dtype, order="F") for shape in ((m, n), (n, n)))

    def compute() -> np.ndarray:
        how: Any = {"full_matrices": False, "overwrite_a": True, "check_finite": False}
        U.stored[...], s, Vh.stored[...] = scipy.linalg.svd(X.stored, **how)
        return s

    ones = np.ones(n, np.finfo(A.dtype).dtype)
    s, U.report = run_on_one_rank("svd", X, (m, n, 5 * n), compute, ones, f"SVD of {shape_of(A)}", passes=2 * n // 3)
    V = work.did(Vh.H.redistribute(grid=A.grid.base))
    return work.did(work.did(U).redistribute(like=A)), s, V


def _is_flat(work: Work, A: DistMatrix) -> bool:
    """Are so many singular values near the largest one that `_by_gram_matrix` is fast?  Collective.

    That is |A|_F^2 >= n s_1^2 / 8: at least n/9 values are above s_1 / 8.  s_1 is estimated by power iterations.
    """
    n, squares = A.shape[1], A.norm() ** 2
    X = random(A, (n, 4))
    for _ in range(3):
        before, X = X, work.product(1, A.H, work.product(1, A, X))
    enough = squares * before.vector_norm(2, axis=0) >= n / 8 * X.vector_norm(2, axis=0)  # also where A is zero
    return A.grid.expected(bool(enough.all()), True)


def _by_gram_matrix(work: Work, A: DistMatrix) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return U, s (descending up to rounding) and V; the largest element of A must be about 1.  Collective.

    Cost for n > 512: that of `eigh`, 2 mn^2 flops for products, and 4 mn^2 for Q.  If the order of R_22 is above 512,
    the same again for R_22.
    """
    w, V = eigh(work.did(herk(-1.0, A, uplo="L", trans="C")))  # of -A^H A: the largest singular values are first
    Q, R = householder_qr(work.product(1, A, work.did(V)))
    assert Q is not None
    diagonal, n = work.did(R).diagonal().real, len(R)
    large = A.grid.expected(int(np.count_nonzero(w <= LEAST**2 * w[0])), n)
    Q *= np.where((diagonal < 0) & (np.arange(n) < large), -1, 1).astype(A.dtype)
    s = abs(diagonal[:large])
    if large < n:
        U2, s2, V2h = all_triplets(work, R[large:, large:])
        for X, factor in ((Q, U2), (V, V2h.H)):
            work.copy(work.product(1, X[:, large:], factor), X[:, large:])
        s = np.append(s, s2)
    return Q, s, V


def are_shared(A: DistMatrix) -> bool:
    """Do the ranks share the singular vectors of A, and the work?  Otherwise every rank holds min(m, n)^2 words.

    Panels of a matrix on a device must be reachable: see `is_reachable`.
    """
    return min(A.shape) > ON_ONE_RANK and A.grid.size > 1 and is_reachable(A)


def completed(work: Work, U: DistMatrix) -> DistMatrix:
    """Return a unitary matrix (m, m) whose first columns are U (m, k), on the host.  Collective over the grid of U.

    Cost: 2 m k^2 flops for the reflections of U, and 4 m k (m - k) for the other columns.
    """
    m, k = U.shape
    F, tau = householder_factor(U)
    work.did(F)
    whole = DistMatrix.eye(m, grid=U.grid, block=U.block, dtype=U.dtype)
    rest = whole[:, k:]
    apply_reflectors(F, tau, rest, False, work.did)
    work.copy(U, whole[:, :k])
    return whole
