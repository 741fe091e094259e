"""Some eigenvalues and eigenvectors of a Hermitian matrix by block Lanczos with thick restarts.

Wu & Simon, SIAM J. Matrix Anal. Appl. 22(2), 2000.
"""

from __future__ import annotations

from math import sqrt

import numpy as np

from pdgemm.errors import LinAlgError
from pdgemm.linalg.factors.operands import empty_like
from pdgemm.linalg.factors.qr import qr
from pdgemm.linalg.work import Work, distributed, on_one_rank, orthonormal_basis, random
from pdgemm.local.arrays import dtypes
from pdgemm.matrix.distmatrix import DistMatrix


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
        R = R[:, R.shape[1] - width :]  # plus noise, which leads out of the basis if a residual is a rounding error
        new, _ = orthonormal_basis(work, R, V[:, :used], 10 * dtypes.eps(H.dtype) * scale / sqrt(n), noise)
    raise LinAlgError(
        f"{k} eigenvalues of {H.distribution} were not found in {steps} steps: residuals up to "
        f"{residuals[-k:].max() / scale:.1e} of the norm, wanted {tolerance:.1e}; raise steps= or tolerance="
    )
