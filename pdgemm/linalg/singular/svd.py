"""Singular value decompositions: the largest singular values, with bounds of their errors, or all of a tall matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdgemm.algorithms.product_options import Streamed
from pdgemm.errors import ArgumentError
from pdgemm.linalg.factors.tall_qr import svd_of_tall
from pdgemm.linalg.functions.iterations import Work, check_operand, check_protection, eps_of, near_one
from pdgemm.linalg.ranges import ELEMENTS, in_range, times
from pdgemm.linalg.singular.full_svd import all_triplets, completed
from pdgemm.linalg.singular.golub_kahan import BLOCKS, Tempered, leading_space, missing
from pdgemm.linalg.singular.norms import largest_singular_value
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.integers import as_count, as_seed
from pdgemm.matrix.argument_checks import as_real, communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import Protection
from pdgemm.support.agreement import together, warn_together
from pdgemm.support.text import counted

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
    k : None: all min(m, n) values.  Up to 512 of them, and on a device, come from a QR factorisation and LAPACK on one
        rank; more of them from the eigenvectors V of A^H A, and a QR factorisation of A V.  Otherwise the k largest:
        taken from all values if min(m, n) <= 6 (k + oversample), else computed by block Golub-Kahan steps with
        blocks of k + oversample columns, which start from random columns that depend on the seed alone.
    full_matrices : U (m, m) and Vh (n, n), on the host, with all values alone.
    oversample : 10 by default.
    tolerance : the steps end when no value can differ from its exact value by more than tolerance s_1.  By default they
        end when only rounding errors of about 100 eps s_1 are left.
    steps : the largest number of steps, 100 by default.
    protect : protection of the products, as for `pdgemm`, only with k; factorisations are not protected.

    Returns U (m, k), s (k,) in descending order on every rank, and Vh (k, n); U and Vh have orthonormal columns and
    rows.  With k, `U.report.facts` has "bound": no value differs from its exact value by more than bound s_1; "share":
    sum s^2 / |A|_F^2, exactly the part of |A|_F^2 in U diag(s) Vh; "residual": the longest A^H u - s v, over s_1.
    The bound follows from measured residuals, and from the norm of the rest of A: see `missing` in
    `pdgemm.linalg.singular.golub_kahan`.  If the share is near 1, the bound always holds; otherwise it holds unless the
    random columns miss a direction, with a probability of about 10^-9 for 10 more columns than k (Halko, Martinsson &
    Tropp, 10.8).
    All ranks warn with scipy.linalg.LinAlgWarning if the bound exceeds the tolerance.

    Cost of a step with l = k + oversample: 2 products of A with l columns, 4 mnl flops, 9 products with bases, which
    have 5 l columns, and 4 QR factorisations of l columns; a few steps if the values decay, 20 to 50 if they hardly do.
    At the end 3 products of A with k columns.  Of all values, without k: about 2 mn^2 flops beside those of `eigh` and
    QR, and again for the values below s_1 / 8.  Memory: 8 (m + n) l words of all ranks together, and 50 l^2 of each.
    Raises DTypeError, ArgumentError or DeviceError on all ranks; LinAlgError where A has NaN or infinite elements.
    Error, without k: |A - U diag(s) Vh| <= c n eps s_1, with c about 1, and 10 where the ranks share the factors.
    Golub, Luk & Overton, ACM Trans. Math. Software 7(2), 1981; Halko, Martinsson & Tropp, SIAM Review 53(2), 2011;
    Musco & Musco, NeurIPS 2015; Li & Li, Linear Algebra Appl. 395, 2005.

    A matrix in a file (`pdgemm.io.hdf5.dataset`, `pdgemm.io.npy.dataset`) is read once or a few times, in panels of
    rows of the dataset, each while the one before is multiplied.  The k largest singular values are those of an
    approximation of rank l = k + oversample in the space of random combinations of the rows of A, or of its columns.
    passes : 2 by default.  The last pass computes the approximation in that space that is nearest to A, and measures
        its error; each pass between turns the space nearer to the singular vectors, by the ratio of the next singular
        values to the first ones.  1: both factors come from sketches, and so does an estimate of the error.
    memory : bytes per rank for panels, sketches, singular vectors and all buffers; by default 256 MiB.
    oversample : by default max(10, k + 1), or fewer, at least 2, where the memory is short.
    progress : called as progress(done, total) after each panel.
    No other arguments.  U and Vh are on the grid of A, one block for each rank.

    `U.report.facts` then has, in Frobenius norms: "norm": |A|, measured.  "error": |A - U diag(s) Vh|, measured, but
    with one pass estimated from 30 random vectors; the expectation of the estimate's square is the square of the error.
    "bound": the error is not larger, but for rounding errors beyond the 10 sqrt(n + l) eps |A| that are included; with
    one pass this is 1.77 times the estimate (1.47 for complex elements), and holds with a probability of 99.9%.
    "least", not with one pass: no matrix of rank k is nearer to A; s_j <= sigma_j <= sqrt(s_j^2 + error^2 - least^2)
    for the exact sigma_j; and the first j triplets have the error sqrt(error^2 + s_(j+1)^2 + ... + s_k^2).  "factor":
    before anything is read, the expected error is at most so many times the least of all matrices of rank k; for
    oversample = k + 1 that is 1.41, and with one pass 5.
    `U.report.bytes_read` is passes times the size of the dataset.

    Cost: 6 mnl flops with two passes, 2 mnl more for each further one, 2 mn (3 l + 31) with one.  Memory of all ranks
    together: 3 ml + 4 nl words, with one pass 3 ml + (5 l + 31) n, and two panels.
    Raises MemoryLimitError, which says how many bytes are needed, FileError, and what is raised above.
    Halko, Martinsson & Tropp, 2011; Tropp, Yurtsever, Udell & Cevher, SIAM J. Matrix Anal. Appl. 38(4), 2017, and SIAM
    J. Sci. Comput. 41(4), 2019.
    """
    in_file: Any = getattr(A, "__svd__", None)
    if in_file is not None:
        others = {"full_matrices": full_matrices, "tolerance": tolerance, "steps": steps, "protect": protect}
        of_file: tuple[DistMatrix, np.ndarray, DistMatrix] = in_file(
            k, others, passes, memory, oversample, seed, progress
        )
        return of_file
    of_files = {"passes": passes, "memory": memory, "progress": progress}
    in_memory: Any = A  # which is checked there
    width, most = 10 if oversample is None else oversample, 100 if steps is None else steps
    return _of_matrix(in_memory, k, of_files, full_matrices, width, tolerance, most, seed, protect)


def _of_matrix(
    A: DistMatrix,
    k: int | None,
    of_files: dict[str, Any],
    full_matrices: bool,
    oversample: int,
    tolerance: float | None,
    steps: int,
    seed: int,
    protect: Protection | None,
) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return U, s and Vh of a matrix in memory.   of_files : arguments for a matrix in a file.   Collective."""
    with together(communicator(A=A)) as arguments:
        check_operand("A", A)
        least = min(A.shape)
        k = None if k is None else as_count(k, "k", 1)
        if any(x is not None for x in of_files.values()):
            raise ArgumentError(f"{', '.join(of_files)} are for a matrix in a file, and A is in memory")
        width, steps, seed = as_count(oversample, "oversample", 0), as_count(steps, "steps", 1), as_seed(seed)
        limit = None if tolerance is None else as_real(tolerance, "tolerance", above=0)
        if k is not None and k > least:
            raise ArgumentError(f"k = {k} is more than the {least} singular values of A, which is {shape_of(A)}")
        if k is None and protect is not None:
            raise ArgumentError(
                "protect is for products, and svd without k is a factorisation: name k, or leave it out"
            )
        if full_matrices and (k is not None or (A.device != devices.HOST and A.shape[0] != A.shape[1])):
            raise ArgumentError(
                f"full_matrices=True is for all singular values, on the host; A is {shape_of(A)} on {A.device}, k = {k}"
            )
        arguments += ["svd", A.distribution, A.dtype, k, width, limit, steps, seed, bool(full_matrices)]
        arguments += [check_protection(protect, A)]
    work, (near, far) = Work("svd", protect), near_one("A", A)
    if k is None:
        return _all(work, A, full_matrices)
    norm = A.norm()
    norm = norm * near * far if np.isfinite(norm) else (A * near * far).norm()
    W = Tempered(A, near, far, norm)
    if is_small(A, k, width):
        U, s, Vh = all_triplets(work, A)
        s, U, V, done = s * near * far, U[:, :k], Vh[:k].H, 0
        after = s[k:], np.zeros(least - k)
    else:
        target = ROUNDING * eps_of(A) if limit is None else limit
        basis, ritz, done = leading_space(work, W, k, k + width, target, steps, (2 * seed + 1) % 2**64)
        U, s, Gh = svd_of_tall(W.times(work, basis))
        work.did(U)
        V = work.product(1, basis, Gh.H, C=empty_right_vectors(A, k))
        after = ritz.s[k:], ritz.residuals[k:]
    bound, rounding, residual = _bound(work, W, U, s[:k], V, after)
    wanted = ROUNDING * eps_of(A) + 2 * rounding if limit is None else limit
    if A.grid.expected(bound > wanted, False):
        warn_together(
            A.grid.comm,
            f"svd of {shape_of(A)}: the {k} largest singular values are known to {bound:.1e} s_1, not to "
            f"{wanted:.1e} s_1, after {counted(done, 'step')}: raise steps= or tolerance=",
        )
    share = min(1.0, float((s[:k].astype(float) ** 2).sum()) / norm**2) if norm else 1.0
    work.reported(U, done, bound=bound, share=share, residual=residual)
    return U, s[:k] / near / far, V.H


def _all(work: Work, A: DistMatrix, full_matrices: bool) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    U, s, Vh = all_triplets(work, A)
    if full_matrices:
        U = completed(work, U) if A.shape[0] > A.shape[1] else U
        Vh = completed(work, Vh.H).H if A.shape[1] > A.shape[0] else Vh
    U = work.reported(U, 0)
    Vh.report = U.later_report
    return U, s, Vh


def norm_of_rest(A: DistMatrix, U: DistMatrix, s: np.ndarray, Vh: DistMatrix) -> float:
    """Return a lower bound of |A - U diag(s) Vh|_2 by Lanczos steps, without a random number of `svd`.  Collective.

    If the norm is not larger than s_k, the singular values s are the largest ones of A.
    """
    near, far = near_one("A", A)
    values = s.astype(float) * near * far

    def apply(x: np.ndarray) -> np.ndarray:
        return A.matvec(near * x) * far - U.matvec(values * Vh.matvec(x))

    def adjoint(x: np.ndarray) -> np.ndarray:
        x = x.conj()
        return (A.T.matvec(near * x) * far - Vh.T.matvec(values * U.T.matvec(x))).conj()

    return largest_singular_value(A, apply, adjoint, 1e-4) / near / far


def is_small(A: DistMatrix, k: int, oversample: int) -> bool:
    """Would a full basis and one more block have at least as many columns as the whole space?"""
    return min(A.shape) <= (BLOCKS + 1) * (k + oversample)


def empty_right_vectors(A: DistMatrix, k: int) -> DistMatrix:
    """Return an uninitialised matrix for k right singular vectors of A, (n, k), on A's grid.  Collective."""
    return DistMatrix.empty((A.shape[1], k), grid=A.grid.base, dtype=A.dtype, device=A.device)


def _bound(
    work: Work, A: Tempered, U: DistMatrix, s: np.ndarray, V: DistMatrix, after: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float, float]:
    """Return a bound of the errors of s, the part of this bound that is due to rounding, and the longest A^H u - s v.

    All three are relative to s_1.   after : the next approximate values, and their residuals.   Collective.
    """
    R, L = A.times(work, V, -1, U * s), A.H.times(work, U, -1, V * s)
    right, left = (X.vector_norm(2, axis=0) for X in (L, R))
    inside, *grams = (work.product(1, X.H, Y).allgather() for X, Y in ((U, R), (U, U), (V, V)))
    apart = max(float(np.linalg.norm(gram - np.eye(len(s)), 2)) for gram in grams)
    first = float(s[0])
    rounding = float(np.linalg.norm(inside, 2)) + (apart + 4 * eps_of(U)) * first
    values, residuals = np.append(s, after[0].astype(s.dtype)), np.append(np.maximum(left, right), after[1])
    most = float(missing(len(s), values, residuals, A.norm).max()) + rounding
    return most / (first or 1.0), rounding / (first or 1.0), float(right.max()) / (first or 1.0)
