"""The QR factorisation with column pivoting, whose pivots are chosen in a small random projection of the matrix."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.linalg

from pdgemm.algorithms.panels.householder_panels import Householder
from pdgemm.algorithms.panels.panel_run import run_panels, working_copy
from pdgemm.gemm import pdgemm
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.householder import BLOCK, apply_reflectors, householder_schedule
from pdgemm.linalg.factors.lu import permuted
from pdgemm.linalg.factors.operands import to_factor
from pdgemm.linalg.factors.tall_qr import tall_qr
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.element_functions import element_function
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.array_functions import triu
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.gather import to_all_ranks
from pdgemm.support.agreement import together

MORE = 10  # rows of a sketch beyond the columns that it chooses: Halko, Martinsson & Tropp, SIAM Review 53(2), 2011


class Sketch:
    """Y = G X, where X is the trailing matrix, and G has normal random numbers in BLOCK + MORE rows.

    Columns of Y are about as long as those of X, relative to each other, and so are their distances to the space of
    other columns.  Rank 0 keeps Y up to date by the formula of Duersch & Gu, and chooses columns by LAPACK's geqp3.
    """

    def __init__(self, W: DistMatrix, steps: Steps) -> None:
        self._W, self._steps = W, steps
        self._draw(0)

    def _draw(self, start: int) -> None:
        """Draw the sketch of the trailing matrix W[start:, start:].  Collective."""
        W = self._W
        shape, seed = (BLOCK + MORE, len(W) - start), start + 1
        G = DistMatrix.random(shape, grid=W.grid.base, seed=seed, kind="normal", dtype=W.dtype, device=W.device)
        G *= 2.0 ** -(3 + shape[1].bit_length())  # |g| < 8, so that no sum of products overflows
        self._Y = self._steps.did(pdgemm(1, G, W[start:, start:])).allgather()
        self._first = 0.0  # |r_ii| of the first column that this sketch has chosen

    def chosen(self, number: int) -> np.ndarray:
        """Return the order of the columns of X that puts `number` pivots first, the same on every rank.  Collective."""
        n = self._Y.shape[1]
        order = beginning_with(_chosen(self._Y, number, self._W.grid, np.random.default_rng(n).permutation(n)), n)
        with together(self._W.grid.comm):
            self._Y = self._Y[:, order]
        return order

    def update(self, order: np.ndarray, start: int, stop: int) -> None:
        """Make the sketch that of the next trailing matrix, after columns start to stop are eliminated.  Collective.

        If X P = Q [R11 R12; 0 X'], and [Y1 Y2] = G X P, then Y2 - Y1 R11^-1 R12 is a sketch of X'.  Its rounding errors
        are about eps times the sketch that was drawn, so another one is drawn where X' may be as small as sqrt(eps)
        times the trailing matrix of that one.   order : of columns start to stop, since they were chosen.
        """
        W, b = self._W, stop - start
        R = W[start:stop, start:].allgather()
        sizes = abs(R.diagonal())
        self._first = self._first or sizes[0]
        small = not sizes.min() > np.sqrt(dtypes.eps(W.dtype)) * self._first  # also if NaN
        if W.grid.expected(small, False):
            self._draw(stop)
            return
        first, self._Y = self._Y[:, order], self._Y[:, b:]
        with together(W.grid.comm):  # rank 0 may lack memory
            if W.grid.comm.rank == 0 and not W.grid.draft:
                X = scipy.linalg.solve_triangular(R[:, :b], first.T, trans="T", check_finite=False).T  # Y1 R11^-1
                self._Y = self._Y - X @ R[:, b:]


def pivoted_qr(A: DistMatrix, want_q: bool = True) -> tuple[DistMatrix | None, DistMatrix, np.ndarray]:
    """Return Q, R and p, where A[:, p] = Q R, as scipy.linalg.qr(A, mode="economic", pivoting=True).  Collective.

    A : DistMatrix (m, n) of any shape, float32, float64, complex64 or complex128, of any layout; unchanged.
    want_q : False leaves Q out, and returns None in its place.

    Q (m, k) has orthonormal columns, k = min(m, n);  R (k, n) is upper triangular;  p (n,) is the same on every rank.
    Q and R are column-major, in the layout of A, or in square blocks where this does not share the work evenly;
    `R.report` has the words.  BLOCK columns at a time are chosen in a sketch of BLOCK + MORE rows, and ordered by
    LAPACK's factorisation with pivoting of their own R.  So |r_jj| decreases among these columns, and later ones exceed
    it by a small factor at most; it is about as large as the singular value s_j, except for matrices such as Kahan's.
    The random numbers do not depend on the layout, nor do the pivots, but for rounding.

    Cost per rank for P ranks, b = BLOCK, m >= n: the flops of `householder_qr`, 2 m n b/P for each sketch, of which
    most matrices take one, and 6 m n b/P to order columns; on one rank 2 n^2 b to choose them.  Words in: those of
    `householder_qr`, n^2/2 for rows of R, at most 2 m n/P for columns that change places, and m n/P for panels.
    Raises LayoutError, DTypeError, DeviceError, ArgumentError or GridError on all ranks.
    Error: that of `householder_qr`.
    Duersch & Gu, SIAM J. Sci. Comput. 39(4), 2017; Martinsson, Quintana-Orti, Heavner & van de Geijn, SIAM J. Sci.
    Comput. 39(2), 2017.
    """
    steps = Steps(what=_what(A))
    F, tau, p = pivoted_factor("qr", A, steps)
    Q = _formed(F, tau, steps) if want_q else None
    R = triu(F[: len(tau)])
    for factor in (Q, R):
        if factor is not None:
            steps.reported(factor)
    return Q, R, p


class PivotedFactor(NamedTuple):
    """A[:, p] = Q R, where R and the reflectors of Q, with tau, are in F, as `householder_factor` returns them."""

    F: DistMatrix
    tau: np.ndarray
    p: np.ndarray


def pivoted_factor(name: str, A: DistMatrix, steps: Steps) -> PivotedFactor:
    """Factor A as `pivoted_qr` does, without forming Q.  Collective.   name : of the function that factors A."""
    n, k = A.shape[1], min(A.shape)
    W, moves = to_factor(f"{name} with column pivoting", A, BLOCK, False, "F")  # columns that move are contiguous
    if moves:
        steps.did(W)
    p, tau = np.arange(n), np.zeros(k, A.dtype)
    sketch = Sketch(W, steps) if n > BLOCK and k else None
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        if sketch and stop < n:
            _permute(W, p, start, sketch.chosen(stop - start), steps)
        order = _order_of_panel(W[start:, start:stop], steps)
        _permute(W, p, start, order, steps)
        _eliminate(W[start:, start:], tau[start:stop], _what(A), steps)
        if sketch and stop < k:
            sketch.update(order, start, stop)
    return PivotedFactor(W, to_all_ranks(W.grid, "tau", tau, sums=True), p)


def _what(A: DistMatrix) -> str:
    return f"QR factors of a matrix ({shape_of(A)}) with column pivoting"


def _order_of_panel(panel: DistMatrix, steps: Steps) -> np.ndarray:
    """Return the order in which LAPACK's geqp3 takes the columns of a panel, the same on every rank.  Collective."""
    factors = tall_qr(panel, "tsqr")
    factors.Q.report = factors.report
    steps.did(factors.Q)
    return _chosen(factors.R, len(factors.R), panel.grid, np.arange(len(factors.R)))


def _permute(W: DistMatrix, p: np.ndarray, start: int, order: np.ndarray, steps: Steps) -> None:
    """Put columns of W, from `start` on, and the numbers p of these columns, in this order.  Collective."""
    columns = slice(start, start + len(order))
    p[columns] = p[columns][order]
    steps.did(permuted(W[:, columns].T, order))


def _eliminate(X: DistMatrix, tau: np.ndarray, what: str, steps: Steps) -> None:
    """Reduce the first len(tau) columns of X to R and reflectors, reflect the other columns, and set tau.  Collective.

    Each number of tau is set on one rank.
    """
    schedule = replace(householder_schedule(X, False), columns=len(tau))
    _, X.report = run_panels(schedule, partial(Householder, tau=tau), {"A": X}, what)
    steps.did(X)


def _formed(F: DistMatrix, tau: np.ndarray, steps: Steps) -> DistMatrix:
    """Return Q = H_1 H_2 ... H_k, (m, k), in the layout of the reflectors F.  Collective."""
    k, width = len(tau), 2 * BLOCK
    Q = working_copy(F[:, :k], BLOCK, True, False)[0]._filled("eye", element_function("eye", 0, np.dtype("d")))
    for start in reversed(range(0, k, width)):  # in columns before `start`, Q is still the identity
        part = slice(start, min(k, start + width))
        apply_reflectors(F[start:, part], tau[part], Q[start:, start:], False, steps.did)
    return Q


def _chosen(X: np.ndarray, number: int, grid: ProcessGrid, planned: np.ndarray) -> np.ndarray:
    """Return the first pivots of X, which rank 0 has, on every rank; a plan has the first of `planned`.  Collective."""
    with together(grid.comm):
        pivots = planned if grid.draft or grid.comm.rank else _pivots(X)
    return to_all_ranks(grid, "pivots", pivots[:number])


def _pivots(X: np.ndarray) -> np.ndarray:
    """Return the column numbers of X in the order of LAPACK's geqp3; as they are if X has NaN or infinity.  Local."""
    if not np.isfinite(X).all():
        return np.arange(X.shape[1])
    return scipy.linalg.qr(X, mode="r", pivoting=True)[1].astype(np.int64)


def beginning_with(pivots: np.ndarray, n: int) -> np.ndarray:
    """Return 0, 1, ..., n - 1 with the pivots first, in their order, and few other numbers moved.  Local."""
    order, first = np.arange(n), len(pivots)
    order[:first] = pivots
    order[np.sort(pivots[pivots >= first])] = np.setdiff1d(np.arange(first), pivots)
    return order
