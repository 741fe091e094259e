"""All eigenvalues and eigenvectors of a symmetric tridiagonal matrix by distributed divide and conquer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pdgemm.errors import LinAlgError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.linalg.factors.tall_qr import rows_only
from pdgemm.linalg.work import Work, on_one_rank
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.blas import secular
from pdgemm.local.blas.secular import Roots, Secular
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.support.agreement import together

LEAF = 256  # largest order of the parts that LAPACK solves on one rank
BLOCKS = 8  # row blocks of a leaf, so that the rows of each half are spread over all ranks

Wanted = Callable[[np.ndarray], slice]


class _Torn(NamedTuple):
    """A tridiagonal matrix torn into diagonal blocks, the leaves, and the eigenvalues and vectors of the leaves.

    like   : the argument of `tridiagonal_eigh`.
    empty  : a matrix (n, 0) with the row distribution, the grid and the type of all matrices of eigenvectors.
    e      : the off-diagonal elements.
    leaf   : the order of all leaves but the last.
    leaves : (n, leaf + 1) by rows, each leaf on one rank: row i has eigenvalue i of the leaf, then the eigenvector.
    w      : the eigenvalues of the leaves.
    """

    work: Work
    like: DistMatrix
    empty: DistMatrix
    e: np.ndarray
    leaf: int
    leaves: DistMatrix
    w: np.ndarray

    def matrix(self, lo: int, hi: int, cols: int) -> DistMatrix:
        """Return a new matrix (hi - lo, cols), its rows distributed as rows lo to hi - 1 of `empty`.  Collective."""
        rows = self.empty.distribution.rows.window(lo, hi)
        return empty_like(self.empty, distribution=Distribution(rows, BlockCyclic.even(cols, 1)))


def tridiagonal_eigh(
    work: Work, d: np.ndarray, e: np.ndarray, like: DistMatrix, wanted: Wanted | None = None
) -> tuple[np.ndarray, DistMatrix]:
    """Return w and V with T V = V diag(w), for the symmetric tridiagonal T of d and e.  Collective over like.grid.

    work   : counts the products, and the words of the leaves.
    d, e   : (n,) and (n - 1,), float32 or float64, the same to the bit on every rank; |T| is about 1.
    like   : a DistMatrix on a grid of the ranks that take part.
    wanted : None, or a function that gets all n eigenvalues, ascending, and returns the slice of the wanted ones.

    Returns w: the eigenvalues, all or the wanted ones, in ascending order, the same to the bit on every rank.  Returns
    V, with as many orthonormal columns: column-major, on the host, its rows in small blocks on all ranks of the grid.

    Cuppen's method: T is torn into leaves of order 256 at most, which LAPACK solves, each on one rank.  Two halves are
    joined by the eigenproblem of D + rho z z^T: deflation on rank 0, the roots of the secular equation divided among
    the ranks, and V := diag(V1, V2) U by two products.  Each rank computes its rows of U from the roots.
    Cost per rank of P: at most 4 n^3 / 3P flops in products, and O(n^2 / P + n log n) for roots and deflation; 2 n^2
    words of U, read or received in products, and about 7 n log2(n / 256) words of z and roots.  Deflated columns are
    neither computed nor multiplied.  Where few vectors are wanted, the last join, which has three quarters of the
    flops, computes only their columns.  Memory: about 3 n^2 / P words, and O(n) on every rank.
    Raises LinAlgError on all ranks where an element is NaN or infinite, or an iteration does not converge.
    Error: |T V - V diag(w)| <= c n eps |T| and |V^T V - I| <= c n eps, c less than 1.
    Cuppen, Numer. Math. 36, 1981; Gu & Eisenstat, SIAM J. Matrix Anal. Appl. 16(1), 1995; Tisseur & Dongarra, SIAM J.
    Sci. Comput. 20(6), 1999.
    """
    n, grid, d = len(d), rows_only(like), d.copy()
    if not (np.isfinite(d).all() and np.isfinite(e).all()):
        raise LinAlgError(f"a tridiagonal matrix of order {n} has NaN or infinite elements")
    number = 1 << (max(1, -(-n // LEAF)) - 1).bit_length()  # the number of leaves, a power of two: halves are equal
    leaf = max(1, -(-n // number))
    empty = DistMatrix.empty((n, 0), grid=grid, block=(max(1, leaf // BLOCKS), 1), dtype=d.dtype, order="F")
    cuts = np.arange(leaf, n, leaf)
    d[cuts - 1] -= np.abs(e[cuts - 1])
    d[cuts] -= np.abs(e[cuts - 1])
    leaves = _leaves(empty, d, e, leaf)
    torn = _Torn(work, like, empty, e, leaf, leaves, leaves[:, :1].allgather()[:, 0])
    return _solved(torn, 0, n, None, wanted)


def _leaves(empty: DistMatrix, d: np.ndarray, e: np.ndarray, leaf: int) -> DistMatrix:
    """Solve the leaves, each on its rank, and return the matrix `leaves` of `_Torn`.  Collective; sends nothing."""
    block = leaf, leaf + 1
    leaves = DistMatrix.empty((len(d), leaf + 1), grid=empty.grid, block=block, dtype=d.dtype)
    rows, x = leaves.indices()[0], leaves.stored
    with together(empty.grid.comm):
        for at in range(0, len(rows), leaf):
            mine = rows[at : at + leaf]
            lo, n = mine[0], len(mine)
            vectors = x[at : at + n, 1 : n + 1].T
            x[at : at + n, 0] = secular.eigenpairs(d[lo : lo + n], e[lo : lo + n - 1], vectors)
    return leaves


def _solved(
    torn: _Torn, lo: int, hi: int, V: DistMatrix | None, wanted: Wanted | None = None
) -> tuple[np.ndarray, DistMatrix]:
    """Return the eigenvalues and vectors of the block of rows lo, ..., hi - 1.   V : a matrix for the vectors, or None.

    Collective.
    """
    n, leaf = hi - lo, torn.leaf
    if n <= leaf:
        w = torn.w[lo:hi]
        part = wanted(w) if wanted else slice(None)
        vectors = torn.leaves[lo:hi, 1 : n + 1].T[:, part]
        V = torn.matrix(lo, hi, vectors.shape[1]) if V is None else V
        torn.work.copy(vectors, V)
        return w[part], V
    half = leaf * ((-(-n // leaf) + 1) // 2)
    Q = torn.matrix(lo, hi, n)
    Q[:half, half:].stored[...] = Q[half:, :half].stored[...] = 0
    w1, _ = _solved(torn, lo, lo + half, Q[:half, :half])
    w2, _ = _solved(torn, lo + half, hi, Q[half:, half:])
    return _joined(torn, lo, half, Q, np.concatenate([w1, w2]), V, wanted)


def _joined(
    torn: _Torn, lo: int, half: int, Q: DistMatrix, w: np.ndarray, V: DistMatrix | None, wanted: Wanted | None
) -> tuple[np.ndarray, DistMatrix]:
    """Return the result of `_solved`, from the solved halves.  Collective.

    lo, half : the first row, and the number of rows of the first half.
    Q, w     : diag(V1, V2), overwritten, and the eigenvalues of the halves.
    """
    rows_only(torn.like)  # marks the grid as recently used: the communicators of the least recently used grid are freed
    system = _system(Q, w, float(torn.e[lo + half - 1]), half)
    for p, q, c, s in () if Q.grid.idle else system.rotations:
        x, y = Q.stored[:, p], Q.stored[:, q]
        x[...], y[...] = c * x + s * y, c * y - s * x
    z, roots = _roots(Q, system)
    values = np.concatenate([roots.origins + roots.offsets, system.values])
    order = np.argsort(values, kind="stable")
    order = order[wanted(values[order]) if wanted else slice(None)]
    V = torn.matrix(lo, lo + len(Q), len(order)) if V is None else V
    at_root, elsewhere = np.flatnonzero(order < len(z)), np.flatnonzero(order >= len(z))
    _set_columns(V, elsewhere, Q, system.deflated[order[elsewhere] - len(z)])
    if len(at_root):
        some, W = roots.part(order[at_root]), Q[:, : len(at_root)]
        for at, end, which in ((0, half, system.upper), (half, len(Q), system.lower)):
            columns = system.columns[which]
            X = torn.matrix(lo + at, lo + end, len(columns))
            _set_columns(X, np.arange(len(columns)), Q[at:end], columns)
            torn.work.product(1, X, _vectors(Q, system.d[which], z[which], some), C=W[at:end])
            del X  # frees memory for the next X
        _set_columns(V, at_root, W, np.arange(len(at_root)))
    return values[order], V


def _set_columns(Y: DistMatrix, to: np.ndarray, X: DistMatrix, of: np.ndarray) -> None:
    """Set columns `to` of Y to columns `of` of X.  The rows of X and of Y have the same distribution.  Local."""
    for some in () if Y.grid.idle else slabs(len(of), len(Y.stored)):  # slabs that fit in cache
        Y.stored[:, to[some]] = X.stored[:, of[some]]


def _system(Q: DistMatrix, w: np.ndarray, e: float, half: int) -> Secular:
    """Return the rank-one update that joins diag(V1, V2), the same to the bit on every rank.  Collective.

    e : the off-diagonal element between the halves.
    """
    z = Q[half - 1 : half + 1].allgather().sum(axis=0)  # the last row of V1, and the first of V2
    z[half:] *= np.sign(e)
    n, dtype = len(z), z.dtype
    deflated = Q.grid.expected(lambda: secular.deflate(w, z, abs(e), half), lambda: secular.unreduced(n, half, dtype))
    return on_one_rank(Q, deflated)


def _roots(Q: DistMatrix, system: Secular) -> tuple[np.ndarray, Roots]:
    """Return z, changed so that its secular equation has exactly the computed roots, and the roots.  Collective.

    Each rank computes some of the roots, and all ranks receive all of them.
    """
    d, z, k = system.d, system.z, len(system.d)
    if k == 0:
        return z, Roots(z, z, z)
    grid, parts = Q.grid, Q.grid.shape[0]
    packed = DistMatrix.empty((k, 3), grid=grid, dtype=d.dtype)
    factors = DistMatrix.empty((parts, k), grid=grid, block=(1, k), dtype=d.dtype)
    with together(grid.comm):
        origins, offsets, products = secular.secular_roots(d, z, system.rho, packed.indices()[0])
        if not grid.idle:
            factors.stored[...] = products
    z = secular.loewner(factors.prod(axis=0), z)
    with together(grid.comm):
        lengths = secular.vector_lengths(d, z, origins, offsets)
        if not grid.idle:
            packed.stored[...] = np.stack([origins, offsets, lengths], axis=1)
    return z, Roots(*packed.allgather().T)


def _vectors(Q: DistMatrix, d: np.ndarray, z: np.ndarray, roots: Roots) -> DistMatrix:
    """Return the eigenvectors that belong to the roots, one row for each element of d, on the grid of Q.

    Collective; sends nothing.
    """
    U = DistMatrix.empty((len(d), len(roots.origins)), grid=Q.grid, dtype=Q.dtype, order="F")
    mine = U.indices()[0]
    for some in () if Q.grid.idle else slabs(U.shape[1], len(mine)):
        U.stored.T[some] = secular.vector_elements(d[mine], z[mine], roots.part(some))
    return U
