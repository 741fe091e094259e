"""TSQR, the QR factorisation of a tall matrix by a tree of QR factorisations of its block rows.

Demmel, Grigori, Hoemmen & Langou, Communication-optimal parallel and sequential QR and LU factorizations, SIAM J. Sci.
Comput. 34(1), 2012.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.device import Array, empty, of, to_host
from pdgemm.local.arrays.elementwise import CONVERT, Combine, add_elements, set_elements
from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.local.blas.local_qr import blocks, compact_qr, orthonormal_factors, phases
from pdgemm.schedules.panels.tsqr_schedule import Tree, packed_words
from pdgemm.support.agreement import together
from pdgemm.transport.panels.tree_messages import ascend, descend, unpacked


class Leaf(NamedTuple):
    """The QR factors of this rank's rows, A = Q_0 R, of which h = min(m, k).

    R : (h, k), upper trapezoidal, on the host.
    form : sets this rank's rows of Q to Q_0 C, for a C (h, k) of the host.
    """

    R: np.ndarray
    form: Callable[[np.ndarray], None]


def factored_rows(A: Array, copy: Combine, Q: Array, buffer: Array, recorder: Recorder) -> Leaf:
    """Return the factors of the rows of this rank, on the host or on the device where the rows are.  Local.

    A : (m, k).   copy : copies rows of A to the workspace.   Q : (m, k), row-major, which `form` overwrites.
    buffer : workspace of m k elements.   All three are on the host, or on one device.

    6 m k^2 flops, half of them in `form`.  A device needs 4 k^2 elements more.
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
    """Factor all rows at once, A = (I - V T V^H) R, and form Q_0 C = [C; 0] - V T V_1^H C, where V_1 is on top of V."""
    (m, k), device, dtype = Q.shape, of(Q), Q.dtype
    h, conjugate = min(m, k), dtype.kind == "c"
    if not h:
        return Leaf(np.zeros((0, k), dtype), lambda C: None)
    V = buffer.reshape(k, m).T
    copy(V, A)
    R, T, W, X = (empty(shape, dtype, "F", device) for shape in ((h, k), (h, h), (h, k), (h, k)))
    V, rest = V[:, :h], V[:, h:]
    compact_qr(V, R[:, :h], T)
    if rest.size:  # m = h: the columns behind the first h
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
    with together(comm), recorder.phase("compute"):  # a device may lack memory on one rank
        leaf.form(mine[packed_words(k, k) :].reshape(-1, k))
    return unpacked(mine[: packed_words(k, k)], upper)
