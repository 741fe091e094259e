"""CholeskyQR, repeated until Q is accurate: the QR factorisation of a tall matrix by matrix products.

CholeskyQR2: Yamamoto, Nakatsukasa, Yanagisawa & Fukaya, Electron. Trans. Numer. Anal. 44, 2015.  Its shift: Fukaya,
Kannan, Nakatsukasa, Yamamoto & Yanagisawa, SIAM J. Sci. Comput. 42(1), 2020.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array, of, to_host
from pdgemm.local.arrays.dtypes import eps
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.local.blas.local_lapack import multiply_triangular
from pdgemm.local.blas.local_qr import add_gram, divide, new_gram, row_blocks
from pdgemm.schedules.panels.tsqr_schedule import MEASURED, Tree
from pdgemm.support.agreement import together
from pdgemm.transport.panels.tree_messages import ascend, descend, to_all, unpacked

PASSES = 3  # at most: one with a shift and two without
LONGEST = 4.0  # squared length of a column of Q, above which |A - Q R| may be too large
NEAR = 0.5  # |Q^H Q - I|_F, up to which one more pass reaches rounding errors


class Passes(NamedTuple):
    """The outcome of CholeskyQR.

    R : None if CholeskyQR failed.   number : of passes over A.   departure : |Q^H Q - I|_F, measured before the last
    pass; NaN if the Cholesky factorisation failed.   shift : of the first pass, relative to the squared column lengths.
    """

    R: np.ndarray | None
    number: int
    departure: float
    shift: float


def cholesky_qr(A: Array, copy: Combine, Q: Array, tree: Tree, m: int, comm: MPI.Comm, recorder: Recorder) -> Passes:
    """Compute A = Q R with real numbers > 0 on the diagonal of R, or return R = None on all ranks.  Collective.

    A : this rank's rows, possibly none.   copy : copies rows of A to Q.   Q : row-major, overwritten.  If A and Q are
    on a device, products and divisions run there; Q^H Q is copied to the host, and R to the device.
    tree : `gram_tree` of these rows.   m : the number of rows of all ranks.

    A pass factors Q^H Q = R^H R and divides, Q := Q R^-1.  A pass is the last one if it measures |Q^H Q - I|_F <= 1/2:
    then |R^-1|^2 <= 2, and the errors of Q are those of this product and this division, O(k eps).  The first pass may
    add a shift s to the diagonal, as Fukaya et al. do, after the columns are scaled to length 1.  One rank computes the
    factor of Q^H Q and sends it to all ranks, so that R is the same on all ranks to the last bit.

    Cost of a pass per rank, for P ranks: 2mk^2/P flops, k^2/2 words up and k^2/2 words down each edge of the tree.
    """
    k = Q.shape[1]
    upper, whole = ~np.tri(k, k=-1, dtype=bool), np.eye(k, dtype=Q.dtype, order="F")  # R of all passes
    shift = 0.0
    on_device = of(Q) is not None  # which may lack memory on one rank
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
    """Return R, where R^H R = G + s D^2, the norm |G - I|_F, or NaN if G has no such factor, and s.  Local.

    G : (k, k), the upper triangle of Q^H Q; Q has m rows, and columns of lengths D.   first : s may be positive.

    If a pivot is not above the rounding errors of G, sqrt(m) eps of its entries and k eps of the factorisation, the
    columns may be dependent, and s = 0 is rejected.  The shift is 11 (mk + k(k+1)) u |G| (Fukaya et al. 2020, (4.1)).
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
