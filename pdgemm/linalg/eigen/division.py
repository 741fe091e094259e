"""All eigenvalues and eigenvectors of a Hermitian matrix by division of its spectrum, by products only.

Nakatsukasa & Higham, SIAM J. Sci. Comput. 35(3), 2013, algorithm 5.2.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from pdgemm.errors import LinAlgError
from pdgemm.linalg.factors.householder import householder_qr
from pdgemm.linalg.factors.operands import is_reachable
from pdgemm.linalg.factors.qr import factored
from pdgemm.linalg.functions.polar import unitary_factor
from pdgemm.linalg.work import Work, add_to_diagonal, distributed, on_one_rank, random
from pdgemm.local.arrays import dtypes
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like

SMALL = 512  # largest order for which LAPACK on one rank is faster than a division on all ranks


def divided(work: Work, H: DistMatrix, scale: float) -> tuple[np.ndarray, DistMatrix, int]:
    """Return all eigenvalues of H, ascending, the eigenvectors, and the number of divisions.  Collective.

    scale : the Frobenius norm of the matrix that was divided first.
    """
    n = len(H)
    if n <= SMALL:
        whole = H.to_global(0)
        lapack = H.grid.expected(lambda: np.linalg.eigh(whole), lambda: (np.ones(n), np.eye(n)))  # type: ignore[arg-type]
        pair = on_one_rank(H, lapack)
        return pair[0], distributed(H, pair[1]), 0
    mean, real = float(H.trace().real) / n, np.finfo(H.dtype).dtype
    spread = add_to_diagonal(H.copy(), -mean).norm()
    if spread <= 10 * sqrt(n) * dtypes.eps(H.dtype) * scale:  # all eigenvalues are the same up to rounding
        return np.full(n, mean, real), DistMatrix.eye(n, grid=H.grid, dtype=H.dtype, device=H.device), 0
    above, below = _bases(work, H, mean, spread)
    halves = [work.product(1, Q.H, work.product(1, H, Q)) for Q in (below, above)]
    V, w, start, divisions = empty_like(H), np.zeros(0, real), 0, 1
    for Q, half in zip((below, above), halves):
        values, vectors, more = divided(work, half, scale)
        work.product(1, Q, vectors, C=V[:, start : start + len(values)])
        start, divisions, w = start + len(values), divisions + more, np.append(w, values)
    return w, V, divisions


def _bases(work: Work, H: DistMatrix, mean: float, spread: float) -> tuple[DistMatrix, DistMatrix]:
    """Return orthonormal bases of two invariant spaces of H.  Collective.

    The first space has the eigenvectors whose eigenvalues are above a number, and the second space has the others.
    The number is chosen so that each space has about half of the dimension.
    """
    n, middle = len(H), float(np.median(H.diagonal().real))
    for sigma in (middle, mean, mean):  # there are eigenvalues above and below the mean
        sigma += 1e-3 * spread / sqrt(n)  # a number that is unlikely to be an eigenvalue
        U, _, _ = unitary_factor(work, add_to_diagonal(H.copy(), -sigma))
        trace = U.grid.expected(float(U.trace().real), float(-(n % 2)))
        count = round((n + trace) / 2)
        if 0 < count < n and abs(n + trace - 2 * count) < 0.1:
            above = _range(work, add_to_diagonal(work.add(U.copy(), 0.25, U.H, 0.25), 0.5), count)
            rest = add_to_diagonal(work.product(-1, above, above.H, C=U), 1)
            return above, _range(work, rest, n - count)
        spread = -7 * spread
    raise LinAlgError(f"the spectrum of a matrix ({H.distribution}) could not be divided at {mean:.3g}")


def _range(work: Work, P: DistMatrix, rank: int) -> DistMatrix:
    """Return an orthonormal basis of the range of a projector P.  Collective.   rank : the rank of P."""
    Q: Any = random(P, (len(P), rank))
    divides = rank > SMALL and is_reachable(P)  # all ranks have parts of R, which would not fit the memory of each
    for passes in (2, 1):  # the second pass restores digits that the first lost to the condition of the random matrix
        X = work.product(1, P, Q)
        Q = work.did((householder_qr(X) if divides else factored(X, passes=passes))[0])
    return Q
