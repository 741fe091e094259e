"""The largest singular values by block Golub-Kahan steps, and bounds of their errors."""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple, Protocol

import numpy as np

from pdgemm.linalg.factors.qr import factored, qr
from pdgemm.linalg.factors.tall_qr import rows_only
from pdgemm.linalg.work import Work, distributed, on_one_rank, orthonormal_basis, random
from pdgemm.local.arrays import dtypes
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like

BLOCKS = 5  # blocks of vectors in each basis
KEPT = 2  # blocks that a restart retains


class LinearMap(Protocol):
    """A linear map that is given by its products with matrices.

    A : a matrix with the map's shape, type, device and grid.   norm : |A|_F.   H : the conjugate transpose.
    """

    @property
    def A(self) -> Any: ...
    @property
    def norm(self) -> float: ...
    @property
    def H(self) -> Any: ...
    def times(self, work: Work, X: DistMatrix, beta: complex = 0, C: DistMatrix | None = None) -> DistMatrix:
        """Compute C := A X + beta C.  Collective."""


class Tempered(NamedTuple):
    """The linear map far near A.  It is applied as far (A (near X)), so that no product overflows.

    near, far : powers of two.   norm : |far near A|_F.
    """

    A: DistMatrix
    near: float
    far: float
    norm: float

    def times(self, work: Work, X: DistMatrix, beta: complex = 0, C: DistMatrix | None = None) -> DistMatrix:
        """Compute C := far A (near X) + beta C.  Collective."""
        small = work.add(empty_like(X), self.near, X, 0)  # in node-shared memory if possible, so read in place
        return work.product(self.far, self.A, small, beta, C)

    @property
    def H(self) -> Tempered:
        return self._replace(A=self.A.H)


class Ritz(NamedTuple):
    """Approximate singular triplets of A, in the bases U and V: values s, and vectors U P and V Q.

    A V Q = U P diag(s).

    residuals : the lengths of the columns of A^H U P - V Q diag(s).
    """

    s: np.ndarray
    P: np.ndarray
    Q: np.ndarray
    residuals: np.ndarray


def leading_space(
    work: Work, A: LinearMap, k: int, width: int, target: float, steps: int, seed: int
) -> tuple[DistMatrix, Ritz, int]:
    """Return an orthonormal basis (n, k) of the leading right singular vectors, distributed by rows.  Collective.

    width  : columns of a block; more than k to approximate values after the k-th, too.
    target : the steps end when no value can differ from its exact value by more than target times the largest value.
    steps  : the most steps; each has one product of A, and one of A^H, with a block.
    seed   : the first of the three seeds of random columns.

    Block Lanczos bidiagonalisation with full reorthogonalisation (Golub, Luk & Overton, ACM Trans. Math. Software 7(2),
    1981), in which the first step is the projection of Halko, Martinsson & Tropp and the others build the block Krylov
    space of Musco & Musco (NeurIPS 2015).  Full bases keep the best 2 of their 5 blocks (Baglama & Reichel, SIAM J.
    Sci. Comput. 27(1), 2005).
    Returns also the triplets of the last step, and the number of steps.
    """
    (m, n), grid, most = A.A.shape, rows_only(A.A), BLOCKS * width

    def zeros(rows: int, cols: int) -> DistMatrix:
        return DistMatrix.zeros((rows, cols), grid=grid, dtype=A.A.dtype, device=A.A.device)

    U, V, W, Y = zeros(m, most), zeros(n, most), zeros(m, width), zeros(n, width)
    seeds = [(seed + x) % 2**64 or 2**63 for x in range(3)]
    left, right = random(W, W.shape, seeds[0]), random(Y, Y.shape, seeds[1])
    new, used, level = work.did(qr(random(Y, Y.shape, seeds[2]))[0]), 0, 0.0
    B = np.zeros((most, most), A.A.dtype)
    steps = grid.iterations(steps, 8)
    for step in range(1, steps + 1):
        rows_only(A.A)  # marks the grid as recently used: the communicators of the least recently used grid are freed
        block = slice(used, used + width)
        work.copy(new, V[:, block])
        A.times(work, new, C=W)
        level = max(level, W.norm() * dtypes.eps(W.dtype) / sqrt(width)) or dtypes.eps(W.dtype)
        # noise of the size of rounding errors extends the basis if the columns of W are in its space
        Q, _ = orthonormal_basis(work, W, U, level / sqrt(m), left)
        work.copy(Q, U[:, block])
        B[:, block] = work.product(1, U.H, W).allgather()  # columns of U that are not in use yet are zero
        A.H.times(work, U[:, block], C=Y)
        new, R = orthonormal_basis(work, Y, V, level / sqrt(n), right)
        used += width
        ritz = on_one_rank(A.A, _ritz, B, used, R.allgather())
        most_missing = grid.expected(missing(k, ritz.s, ritz.residuals, A.norm).max(), np.inf)
        if step == steps or most_missing <= target * float(ritz.s[0] or 1):
            break
        if used == most:
            used = KEPT * width
            for X, vectors in ((U, ritz.P), (V, ritz.Q)):
                best = work.product(1, X, distributed(X, vectors[:, :used]), C=zeros(len(X), used))
                work.copy(best, X[:, :used])
                X[:, used:] = 0
            B[:] = 0
            np.fill_diagonal(B, ritz.s[:used])
    basis = work.product(1, V, distributed(V, ritz.Q[:, :k]), C=zeros(n, k))
    return work.did(factored(basis, passes=1)[0]), ritz, step


def _ritz(B: np.ndarray, used: int, R: np.ndarray) -> Ritz:
    """Return the singular triplets of the part of B that is in use, B[:used, :used].  Local.

    R : A^H U = V B^H + N R for the last block of columns of U, where N is the next block of V.
    """
    P, s, Qh = np.linalg.svd(B[:used, :used])
    unused = np.zeros((len(B) - used, used), B.dtype)
    return Ritz(s, np.vstack([P, unused]), np.vstack([Qh.conj().T, unused]), np.linalg.norm(R @ P[-len(R) :], axis=0))


def missing(k: int, s: np.ndarray, residuals: np.ndarray, norm: float) -> np.ndarray:
    """Return bounds of the differences between the k largest singular values and the first k numbers of s.  Local.

    s         : at least k approximate singular values, descending, with orthonormal vectors u and v.
    residuals : for each value the length of the longer one of A v - s u and A^H u - s v.
    norm      : |A|_F.

    In the bases (u, others) and (v, others), A is [[diag(s), E^H], [F, A']], where |E| and |F| are at most epsilon, the
    2-norm of all residuals.  Let t be a bound of |A'|, and g = max(s - t, 0).  Then the difference for a value s is at
    most 2 epsilon^2 / (g + sqrt(g^2 + 4 epsilon^2)) + max(t - s, 0) (Li & Li, Linear Algebra Appl. 395, 2005,
    theorem 3).  There are two bounds t, of which the smaller one is used: sqrt(|A|_F^2 - sum s^2), which always holds,
    and the next approximate value plus its residual, which holds unless the random block misses a direction.
    The same is done for the first j values alone, for each j < k, with a t that covers the others; the least bound of
    each value is returned.
    """
    rounding, s, residuals = 10 * float(np.finfo(s.dtype).eps), s.astype(float), residuals.astype(float)
    epsilon = np.sqrt(np.cumsum(residuals[:k] ** 2))
    rest = sqrt(max(0.0, norm**2 - float((s[:k] ** 2).sum())) + rounding * norm**2)
    if len(s) > k:
        rest = min(rest, float(s[k] + residuals[k]))
    bounds = np.full(k, np.inf)
    for j in range(k):  # split s after value j: values after it belong to A'
        t = rest if j + 1 == k else max(s[j + 1], rest) + epsilon[-1]
        gap = np.maximum(s[: j + 1] - t, 0)
        root = np.sqrt(gap**2 + 4 * epsilon[j] ** 2)
        moved = np.divide(2 * epsilon[j] ** 2, gap + root, out=np.zeros(j + 1), where=root > 0)
        bounds[: j + 1] = np.minimum(bounds[: j + 1], moved + np.maximum(t - s[: j + 1], 0))
    return bounds
