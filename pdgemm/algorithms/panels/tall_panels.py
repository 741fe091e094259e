"""The QR factorisation of a tall matrix, by a tree of QR factorisations of its block rows, TSQR, or by CholeskyQR.

TSQR: Demmel, Grigori, Hoemmen & Langou, Communication-optimal parallel and sequential QR and LU factorizations, SIAM J.
Sci. Comput. 34(1), 2012.  CholeskyQR2, which repeats matrix products until Q is accurate: Yamamoto, Nakatsukasa,
Yanagisawa & Fukaya, Electron. Trans. Numer. Anal. 44, 2015.  Its shift: Fukaya, Kannan, Nakatsukasa, Yamamoto &
Yanagisawa, SIAM J. Sci. Comput. 42(1), 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array, empty, of, to_host
from pdgemm.local.arrays.dtypes import eps
from pdgemm.local.arrays.elementwise import CONVERT, Combine, add_elements, set_elements
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.local.blas.local_lapack import multiply_triangular
from pdgemm.local.blas.local_qr import (
    add_gram,
    blocks,
    compact_qr,
    divide,
    new_gram,
    orthonormal_factors,
    phases,
    row_blocks,
)
from pdgemm.schedules.panels.tsqr_schedule import MEASURED, Tree, packed_words
from pdgemm.support.agreement import together
from pdgemm.transport.panels.tree_messages import ascend, descend, to_all, unpacked

PASSES = 3  # at most: one with a shift and two without
LONGEST = 4.0  # squared length of a column of Q, above which |A - Q R| may be too large
NEAR = 0.5  # |Q^H Q - I|_F, up to which one more pass reaches rounding errors


class Leaf(NamedTuple):
    """The QR factors of this rank's m rows, A = Q_0 R, with h = min(m, k) rows in R.

    R : (h, k), upper trapezoidal, on the host.
    form : sets this rank's rows of Q to Q_0 C, for a C (h, k) on the host.
    """

    R: np.ndarray
    form: Callable[[np.ndarray], None]


def factored_rows(A: Array, copy: Combine, Q: Array, buffer: Array, recorder: Recorder) -> Leaf:
    """Factor this rank's rows where they are, on the host or a device.  Local.

    A : (m, k).   copy : copies rows of A to the workspace.   Q : (m, k), row-major, which `form` overwrites.
    buffer : workspace of m k elements.   All three are on the host, or on one device.

    Cost: 6 m k^2 flops, half of them in `form`.  On a device, 4 k^2 more elements of memory are allocated.
    """
    with recorder.phase("compute"):
        return _on_host(A, copy, Q, buffer) if of(Q) is None else _on_device(A, copy, Q, buffer)


def _on_host(A: np.ndarray, copy: Combine, Q: np.ndarray, buffer: np.ndarray) -> Leaf:
    """Factor blocks of rows that fit in cache, and then their triangles."""
    k = Q.shape[1]
    parts, triangles = list[tuple[slice, np.ndarray]](), list[np.ndarray]()
    for rows in blocks(len(Q), k, times=4):
        block = buffer[k * rows.start : k * rows.stop].reshape(-1, k, order="F")
        copy(block, A[rows])
        q, r = orthonormal_factors(block)
        parts.append((rows, q))
        triangles.append(r)
    local, R = orthonormal_factors(np.asfortranarray(np.vstack([np.zeros((0, k), Q.dtype), *triangles])))

    def form(C: np.ndarray) -> None:
        C, at = local @ C, 0
        for rows, q in parts:
            gemm_accumulate(1, q, C[at : at + q.shape[1]], 0, Q[rows])
            at += q.shape[1]

    return Leaf(R, form)


def _on_device(A: Array, copy: Combine, Q: Array, buffer: Array) -> Leaf:
    """Factor all rows at once, A = (I - V T V^H) R, and form Q_0 C = [C; 0] - V T V_1^H C, V_1 = V[:h]."""
    (m, k), device, dtype = Q.shape, of(Q), Q.dtype
    h, conjugate = min(m, k), dtype.kind == "c"
    if not h:
        return Leaf(np.zeros((0, k), dtype), lambda C: None)
    V = buffer.reshape(k, m).T
    copy(V, A)
    R, T, W, X = (empty(shape, dtype, "F", device) for shape in ((h, k), (h, h), (h, k), (h, k)))
    V, rest = V[:, :h], V[:, h:]
    compact_qr(V, R[:, :h], T)
    if rest.size:  # m = h: the columns after the first h
        CONVERT(R[:, h:], rest)
        gemm_accumulate(1, V.T, R[:, h:], 0, W[:, h:], conjugate_a=conjugate)
        gemm_accumulate(1, T.T, W[:, h:], 0, X[:, h:], conjugate_a=conjugate)
        gemm_accumulate(-1, V, X[:, h:], 1, R[:, h:])

    def form(C: np.ndarray) -> None:
        set_elements(R, C)
        gemm_accumulate(1, V[:h].T, R, 0, W, conjugate_a=conjugate)
        gemm_accumulate(1, T, W, 0, X)
        gemm_accumulate(-1, V, X, 0, Q)
        add_elements(Q[:h], R)

    return Leaf(to_host(R), form)


def tsqr(leaf: Leaf, tree: Tree, comm: MPI.Comm, recorder: Recorder) -> np.ndarray:
    """Compute A = Q R, and return R, (k, k) with real numbers >= 0 on its diagonal, on every rank.  Collective.

    leaf : the factors of this rank's m rows, m >= 0; all ranks together have at least k rows.
    tree : `tsqr_tree` of these rows.

    Cost per rank: 6mk^2 flops, and 10 k^3 log2(P) flops in the tree, on the host; k^2/2 words up and 3k^2/2 words down
    each edge.
    Error: |Q^H Q - I| and |A - Q R| / |A| are O(k eps) for any A (Demmel et al. 2012; Mori, Yamamoto & Zhang 2012).
    """
    k = leaf.R.shape[1]
    upper = ~np.tri(k, k=-1, dtype=bool)
    joined = list[tuple[np.ndarray, int]]()  # per child with rows: Q, and how many of its rows are this rank's

    def join(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
        with recorder.phase("compute"):
            first, second = (unpacked(x, upper) for x in (mine, other))
            q, r = orthonormal_factors(np.asfortranarray(np.vstack([first, second])))
            joined.append((q, len(first)))
            return r[upper[: len(r)]]

    R = unpacked(ascend(tree, comm, leaf.R[upper[: len(leaf.R)]], join, recorder), upper)
    mine = np.empty(0, R.dtype)
    if comm.rank == tree.ranks[0]:
        diagonal = R.diagonal().copy()
        signs = phases(diagonal)
        R *= signs.conj()[:, None]
        np.fill_diagonal(R, np.abs(diagonal))
        mine = np.concatenate([R[upper], np.diag(signs).astype(R.dtype).ravel()])

    def split(mine: np.ndarray, child: int) -> tuple[np.ndarray, np.ndarray]:
        if not tree.up[child]:
            return mine, mine[: packed_words(k, k)]
        with recorder.phase("compute"):
            R, C = mine[: packed_words(k, k)], mine[packed_words(k, k) :].reshape(-1, k)
            q, height = joined.pop()
            C = q @ C
            return tuple(np.concatenate([R, x.ravel()]) for x in (C[:height], C[height:]))  # type: ignore[return-value]

    mine = descend(tree, comm, mine, split, recorder)
    with together(comm), recorder.phase("compute"):  # a device may be out of memory on one rank
        leaf.form(mine[packed_words(k, k) :].reshape(-1, k))
    return unpacked(mine[: packed_words(k, k)], upper)


class Passes(NamedTuple):
    """The outcome of CholeskyQR.

    R : None if CholeskyQR failed.   number : number of passes over A.   departure : |Q^H Q - I|_F before the last pass;
    NaN if the Cholesky factorisation failed.   shift : s of the first pass, relative to the squared column lengths.
    """

    R: np.ndarray | None
    number: int
    departure: float
    shift: float


def cholesky_qr(A: Array, copy: Combine, Q: Array, tree: Tree, m: int, comm: MPI.Comm, recorder: Recorder) -> Passes:
    """Compute A = Q R with real numbers > 0 on the diagonal of R, or return R = None on all ranks.  Collective.

    A : this rank's rows, possibly none.   copy : copies rows of A to Q.   Q : row-major, overwritten.  If A and Q are
    on a device, the device computes products and divisions; Q^H Q is copied to the host, and R to the device.
    tree : `gram_tree` of these rows.   m : the number of rows of all ranks.

    A pass factors Q^H Q = R^H R and divides, Q := Q R^-1.  A pass is the last one if it measures |Q^H Q - I|_F <= 1/2:
    then |R^-1|^2 <= 2, and the errors of Q are the errors of this product and division, O(k eps).  The first pass may
    add a shift s to the diagonal, as Fukaya et al. do, after the columns are scaled to length 1.  One rank computes the
    factor of Q^H Q and sends it to all ranks, so that R is the same on all ranks to the last bit.

    Cost of a pass per rank, for P ranks: 2mk^2/P flops, k^2/2 words up and k^2/2 words down each edge of the tree.
    """
    k = Q.shape[1]
    upper, whole = ~np.tri(k, k=-1, dtype=bool), np.eye(k, dtype=Q.dtype, order="F")  # R of all passes
    shift = 0.0
    on_device = of(Q) is not None  # a device may be out of memory on one rank
    with together(comm, on_device), recorder.phase("compute"):
        G = new_gram(Q)
        for rows in row_blocks(Q):
            copy(Q[rows], A[rows])
            add_gram(Q[rows], G)
        mine = to_host(G)[upper].conj()
    for number in range(1, PASSES + 1):
        sums = ascend(tree, comm, mine, np.add, recorder)
        if comm.rank == tree.ranks[0]:
            with recorder.phase("compute"), np.errstate(all="ignore"):
                R, *measured = factor(unpacked(sums, upper), m, number == 1)
                sums = np.append(R[upper], measured).astype(Q.dtype)
        packed = descend(tree, comm, sums, to_all, recorder)
        departure, added = packed[-MEASURED:].real.tolist()
        shift = max(shift, added)
        last = departure <= NEAR
        if np.isnan(departure) or (number == PASSES and not last):
            return Passes(None, number, departure, shift)
        with together(comm, on_device), recorder.phase("compute"):
            R, G = unpacked(packed[:-MEASURED], upper), new_gram(Q)
            if number > 1:
                multiply_triangular(np.asfortranarray(R), whole, lower=False)
            else:
                whole = np.asfortranarray(R)
            for rows in row_blocks(Q):
                divide(Q[rows], R)
                if not last:
                    add_gram(Q[rows], G)
            mine = to_host(G)[upper].conj()
        if last:
            break
    return Passes(whole, number, departure, shift)


def factor(G: np.ndarray, m: int, first: bool) -> tuple[np.ndarray, float, float]:
    """Return R, |G - I|_F and s, where R^H R = G + s D^2; NaN as the norm if G has no such factor.  Local.

    G : (k, k), the upper triangle of Q^H Q; Q has m rows, and columns of lengths D.   first : s may be positive.

    A factor for s = 0 is rejected if a pivot is not above the rounding errors, because columns of Q may be dependent
    then.  These errors are sqrt(m) eps in G, and k eps in its factor.
    A positive s is 11 (mk + k(k+1)) u |G| (Fukaya et al. 2020, (4.1)).
    """
    k, unit = len(G), eps(G.dtype)
    wide = G.astype(np.result_type(G.dtype, np.float64))
    wide += np.triu(wide, 1).conj().T
    squares, limits = wide.diagonal().real, np.finfo(G.dtype)
    nothing = np.zeros_like(G), np.nan, 0.0
    most = float(limits.max) * unit if first else LONGEST
    if not (squares >= float(limits.tiny) / unit).all() or not (squares <= most).all():
        return nothing  # NaN, squares outside the range of this type, or a Q with large errors
    departure = float(np.linalg.norm(wide - np.eye(k)))
    lengths = np.sqrt(squares)
    scaled = wide / lengths / lengths[:, None]
    shift = 11 * (m * k + k * (k + 1)) * unit / 2 * min(float(k), float(np.linalg.norm(scaled, 1)))
    for s in (0.0, shift)[: 1 + first]:
        try:
            R = np.linalg.cholesky(scaled + s * np.eye(k)).conj().T
        except np.linalg.LinAlgError:
            continue
        if s or (R.diagonal().real ** 2).min(initial=1) > (k + np.sqrt(m)) * unit:
            return (R * lengths).astype(G.dtype), departure, s
    return nothing
