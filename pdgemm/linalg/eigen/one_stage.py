"""The direct reduction of a Hermitian matrix to real tridiagonal form, A = Q T Q^H, and products with Q."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pdgemm.algorithms.panels.panel_run import can_read, run_panels, working_copy
from pdgemm.algorithms.panels.tridiagonal_panels import Tridiagonal
from pdgemm.linalg.factors.householder import apply_reflectors
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.panels.tridiagonal_schedule import TridiagonalSchedule

BLOCK, WIDTH = 64, 32  # of the working copy, and columns of a panel


def reduced(H: DistMatrix) -> tuple[np.ndarray, np.ndarray, DistMatrix, np.ndarray]:
    """Return d, e, F and tau, where H = Q T Q^H, and T is real and tridiagonal.  Collective over the grid of H.

    H : DistMatrix (n, n), float32, float64, complex64 or complex128, on the host, of any layout; only its lower
        triangle is read, of the diagonal the real part, and it is not changed.  The caller has checked this.

    d (n,) and e (n - 1,), the diagonal and the subdiagonal of T, and tau (n - 1,) are the same on every rank to the
    last bit.  F (n, n) has the reflectors below its diagonal: Q = H_1 H_2 ..., H_k = I - tau_k v v^H, where v has zeros
    down to row k, 1 in row k + 1, and then the elements of column k of F.  `F.report` has the words.

    Cost per rank for P ranks: 4/3 n^3 / P flops, half of them in products of the matrix and a vector; 3/2 n^2 words in,
    at most, in 2 n (P - 1) messages or signals; extra memory for n^2/P words.
    Error: |H - Q T Q^H| <= c n eps |H| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 19.3).
    Dongarra, Sorensen & Hammarling, J. Comput. Appl. Math. 27, 1989.
    """
    n, A = len(H), H.distribution
    fits = A.block == (BLOCK, BLOCK) and A.source == (0, 0) and A.rows.skip == A.cols.skip == 0
    W, moves = working_copy(H, BLOCK, fits, False, "F")
    real = np.finfo(H.dtype).dtype
    d, e, tau = np.zeros(n, real), np.zeros(max(0, n - 1), real), np.zeros(max(0, n - 1), H.dtype)
    schedule = TridiagonalSchedule(W.layout_in(W.grid), WIDTH, can_read(W))
    executor: Any = partial(Tridiagonal, d=d, e=e, tau=tau)
    what = f"reduction of a Hermitian matrix ({shape_of(H)}) to tridiagonal form"
    _, W.report = run_panels(schedule, executor, {"A": W}, what, moves)
    if W.grid.size > len(schedule.ranks):  # ranks without a position in the grid have taken no part
        d, e, tau = W.grid.comm.bcast((d, e, tau), schedule.ranks[0])
    return d, e, W, tau


def apply_back(F: DistMatrix, tau: np.ndarray, X: DistMatrix) -> None:
    """Compute X := Q X with the Q of `reduced`.  Collective over the grid of F.

    X : DistMatrix (n, k) of any layout, overwritten.

    Cost per rank for P ranks: 2 n^2 k / P flops, in products.
    """
    if len(tau):
        apply_reflectors(F[1:, :-1], tau, X[1:], adjoint=False)
