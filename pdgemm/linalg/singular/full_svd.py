"""All singular values and their vectors: by LAPACK on one rank, or by eigenvectors of A^H A and QR factorisations.

With the eigenvectors V of A^H A, columns of A V = Q R have inner products of about n eps s_1^2, and the lengths s_i.
So row i of R has elements of about n eps s_1^2 / s_i beside its diagonal: those of the values above s_1 / 8 are within
8 n eps s_1, and are dropped.  The values below have a triangle of their own, R_22, which is factored in the same way.
All transformations are unitary, so errors are those of the dropped elements and of rounding, whatever the condition.
QR as a step before a decomposition: Drmac & Veselic, SIAM J. Matrix Anal. Appl. 29(4), 2008.
"""

from __future__ import annotations

import numpy as np

from pdgemm.linalg.eigen.eigh import eigh
from pdgemm.linalg.factors.householder import apply_reflectors, householder_factor, householder_qr
from pdgemm.linalg.factors.operands import empty_like
from pdgemm.linalg.factors.rank_k import herk
from pdgemm.linalg.factors.tall_qr import svd_of_tall
from pdgemm.linalg.work import Work, near_one
from pdgemm.local.arrays import device as devices
from pdgemm.matrix.distmatrix import DistMatrix

ON_ONE_RANK = 512  # largest order for which LAPACK on one rank is faster than products on a few
LEAST = 1 / 8  # of the singular values whose vectors A^H A yields, in units of the largest one


def all_triplets(work: Work, A: DistMatrix) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return U, s and V^H with A = U diag(s) V^H, U (m, k), V^H (k, n), k = min(m, n).  Collective over A.grid."""
    m, n = A.shape
    if 0 in A.shape:
        return empty_like(A)[:, :0], np.zeros(0, np.finfo(A.dtype).dtype), empty_like(A)[:0, :]
    if m < n:
        W, s, Gh = all_triplets(work, A.H)
        return Gh.H, s, W.H
    if not are_shared(A):
        U, s, Vh = svd_of_tall(A)
        return work.did(U), s, Vh
    if 2 * m > 3 * n:
        Q, R = householder_qr(A)  # no rank has all of R
        assert Q is not None
        U, s, Vh = all_triplets(work, work.did(R))
        return work.product(1, Q, U, C=empty_like(A)), s, Vh
    near, far = near_one("A", A)
    U, s, V = _by_gram_matrix(work, A * near * far)
    return U, np.minimum.accumulate(s) / near / far, V.H


def _by_gram_matrix(work: Work, A: DistMatrix) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return U, s, in descending order up to rounding, and V, where the largest element of A is about 1.  Collective.

    Cost for n > 512: that of eigh, and 2 mn^2 flops for the products and 4 mn^2 for Q; again for R_22, if it is large.
    """
    w, V = eigh(work.did(herk(-1.0, A, uplo="L", trans="C")))  # of -A^H A: the largest singular values come first
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
    """Do the ranks share the singular vectors of A, and the work?  Otherwise every rank holds min(m, n)^2 words."""
    return min(A.shape) > ON_ONE_RANK and A.grid.size > 1 and A.device == devices.HOST


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
