"""TSQR, the QR factorisation of a tall matrix by a tree of QR factorisations of its block rows.

Demmel, Grigori, Hoemmen & Langou, Communication-optimal parallel and sequential QR and LU factorizations, SIAM J. Sci.
Comput. 34(1), 2012.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.local.blas.local_qr import blocks, orthonormal_factors, phases
from pdgemm.schedules.panels.tsqr_schedule import Tree, packed_words
from pdgemm.transport.panels.tree_messages import ascend, descend, unpacked


def tsqr(
    A: np.ndarray, copy: Combine, Q: np.ndarray, buffer: np.ndarray, tree: Tree, comm: MPI.Comm, recorder: Recorder
) -> np.ndarray:
    """Compute A = Q R, and return R, (k, k) with real numbers >= 0 on its diagonal, on every rank.  Collective.

    A : this rank's m rows, m >= 0; all ranks together have at least k rows.   copy : copies rows of A to the workspace.
    Q : (m, k), row-major, overwritten.   buffer : workspace of m k elements.   tree : `tsqr_tree` of these rows.

    Cost per rank: 6mk^2 flops, and 10 k^3 log2(P) flops in the tree; k^2/2 words up and 3k^2/2 words down each edge.
    Error: |Q^H Q - I| and |A - Q R| / |A| are O(k eps) for any A (Demmel et al. 2012; Mori, Yamamoto & Zhang 2012).
    """
    k = Q.shape[1]
    upper = ~np.tri(k, k=-1, dtype=bool)
    with recorder.phase("compute"):
        parts, triangles = [], list[np.ndarray]()
        for rows in blocks(len(Q), k, times=4):
            block = buffer[k * rows.start : k * rows.stop].reshape(-1, k, order="F")
            copy(block, A[rows])
            q, r = orthonormal_factors(block)
            parts.append((rows, q))
            triangles.append(r)
        local, R = orthonormal_factors(np.asfortranarray(np.vstack([np.zeros((0, k), Q.dtype), *triangles])))

    joined = list[tuple[np.ndarray, int]]()  # per child with rows: Q, and how many of its rows are this rank's

    def join(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
        with recorder.phase("compute"):
            first, second = (unpacked(x, upper) for x in (mine, other))
            q, r = orthonormal_factors(np.asfortranarray(np.vstack([first, second])))
            joined.append((q, len(first)))
            return r[upper[: len(r)]]

    R = unpacked(ascend(tree, comm, R[upper[: len(R)]], join, recorder), upper)
    mine = np.empty(0, Q.dtype)
    if comm.rank == tree.ranks[0]:
        diagonal = R.diagonal().copy()
        signs = phases(diagonal)
        R *= signs.conj()[:, None]
        np.fill_diagonal(R, np.abs(diagonal))
        mine = np.concatenate([R[upper], np.diag(signs).astype(Q.dtype).ravel()])

    def split(mine: np.ndarray, child: int) -> tuple[np.ndarray, np.ndarray]:
        if not tree.up[child]:
            return mine, mine[: packed_words(k, k)]
        with recorder.phase("compute"):
            R, C = mine[: packed_words(k, k)], mine[packed_words(k, k) :].reshape(-1, k)
            q, height = joined.pop()
            C = q @ C
            return tuple(np.concatenate([R, x.ravel()]) for x in (C[:height], C[height:]))  # type: ignore[return-value]

    mine = descend(tree, comm, mine, split, recorder)
    with recorder.phase("compute"):
        C, at = local @ mine[packed_words(k, k) :].reshape(-1, k), 0
        for rows, q in parts:
            gemm_accumulate(1, q, C[at : at + q.shape[1]], 0, Q[rows])
            at += q.shape[1]
    return unpacked(mine[: packed_words(k, k)], upper)
