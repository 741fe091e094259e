"""All singular values and their vectors: by LAPACK on one rank, or by a polar factor and eigenvectors of the other.

A = U H, H = V S V^H: A = (U V) S V^H (Nakatsukasa & Higham, SIAM J. Sci. Comput. 35(3), 2013, algorithm 5.3).
"""

from __future__ import annotations

import numpy as np

from pdgemm.linalg.eigen.eigh import eigh
from pdgemm.linalg.factors.householder import apply_reflectors, householder_factor
from pdgemm.linalg.factors.qr import factored
from pdgemm.linalg.factors.tall_qr import svd_of_tall
from pdgemm.linalg.functions.iterations import Work, empty_like
from pdgemm.linalg.functions.polar import unitary_factor
from pdgemm.local.arrays import device as devices
from pdgemm.matrix.distmatrix import DistMatrix

ON_ONE_RANK = 1024  # largest order for which LAPACK on one rank is faster than polar factors on a few


def all_triplets(work: Work, A: DistMatrix) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return U, s and V^H with A = U diag(s) V^H, U (m, k), V^H (k, n), k = min(m, n).  Collective over A.grid."""
    m, n = A.shape
    if 0 in A.shape:
        return empty_like(A)[:, :0], np.zeros(0, np.finfo(A.dtype).dtype), empty_like(A)[:0, :]
    if m < n:
        W, s, Gh = all_triplets(work, A.H)
        return Gh.H, s, W.H
    if n <= ON_ONE_RANK or A.grid.size == 1 or A.device != devices.HOST:
        U, s, Vh = svd_of_tall(A)
        return work.did(U), s, Vh
    if 2 * m > 3 * n:
        Q, R = factored(A)
        U, s, Vh = all_triplets(work, R)
        return work.product(1, work.did(Q), U, C=empty_like(A)), s, Vh
    U, _, _ = unitary_factor(work, A)
    P = work.product(-1, U.H, A)
    w, V = eigh(work.add(P.copy(), 0.5, P.H, 0.5))  # of -H, so that the largest values of H come first
    return work.product(1, U, work.did(V)), np.maximum(-w, 0), V.H


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
