"""The polar decomposition by dynamically weighted Halley iterations (QDWH), and the sign of a matrix."""

from __future__ import annotations

from math import sqrt
from typing import Any, Literal

import numpy as np

from pdgemm.errors import LinAlgError
from pdgemm.linalg.factors.cholesky import cho_solve, cholesky
from pdgemm.linalg.factors.operands import is_reachable
from pdgemm.linalg.factors.solve import inv
from pdgemm.linalg.factors.triangular import solve_triangular
from pdgemm.linalg.ranges import ELEMENTS, in_range, times
from pdgemm.linalg.work import Work, add_to_diagonal, near_one, random, started
from pdgemm.local.arrays import dtypes
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.names import Protection

_LEAST = 0.0484  # lower bound of the singular values for which the weight c of a step is 100
_MOST = 60  # largest number of steps; 16 are enough for a condition number of 1e16


@in_range(lambda factors, a: (factors[0], times(factors[1], a)), A=ELEMENTS)
def polar(A: DistMatrix, *, protect: Protection | None = None) -> tuple[DistMatrix, DistMatrix]:
    """Return U and H with A = U H, U^H U = I and H Hermitian and positive semidefinite.  Collective over the grid.

    A : DistMatrix (m, n) of type s, d, c or z, well- or ill-conditioned; A is not changed.  If m < n, the rows of U are
        orthonormal instead of its columns.
    protect : protection of the products, as for `pdgemm`; factorisations, solves and redistributions are not protected.

    Returns U (m, n) and H (n, n).  A singular matrix is perturbed by eps |A|, so that U exists.

    The steps are QDWH steps X := b/c X + (a - b/c) X (I + c X^H X)^-1 by Cholesky factorisations, with weights a, b, c
    from a lower bound of the singular values; the last step is a Newton-Schulz step, by products only.  The published
    algorithm begins with large weights, for which Cholesky is unstable, and uses QR factorisations of twice the size
    for these steps.  Here c is at most 100, the published limit for Cholesky; with c = 100 small singular values grow
    19 times a step: 4 to 6 steps for ordinary matrices and 17 for a condition number of 1e16, all of products and
    triangular solves.

    Cost of a step: 4 mn^2 + n^3/3 flops; three matrices like A and two (n, n) are allocated.  `U.report` has the steps
    and the measured |U^H U - I|.
    Raises LayoutError, DTypeError, ArgumentError or DeviceError on all ranks; LinAlgError where elements are NaN or
    infinite, or 60 steps do not suffice.
    Error: |A - U H|_F <= 100 eps |A|_F; |U^H U - I|_F <= 10 eps sqrt(n).
    Nakatsukasa, Bai & Gygi, SIAM J. Matrix Anal. Appl. 31(5), 2010; Nakatsukasa & Higham, SIAM J. Sci. Comput. 35(3),
    2013, (5.5) to (5.7).
    """
    work, tall = started("polar", A, protect, square=False), A.shape[0] >= A.shape[1]
    U, steps, orthogonality = unitary_factor(work, A if tall else A.H)
    U = U if tall else work.did(U.H.redistribute(like=A))
    P = work.product(1, U.H, A)
    H = work.add(P.copy(), 0.5, P.H, 0.5)
    return work.reported(U, steps, orthogonality=orthogonality), H


def unitary_factor(work: Work, A: DistMatrix) -> tuple[DistMatrix, int, float]:
    """Return the polar factor U of A (m >= n), the number of steps, and |U^H U - I|_F.  Collective."""
    if 0 in A.shape:
        return empty_like(A), 0, 0.0
    near, far = near_one("A", A)
    X, Y = empty_like(A), empty_like(A)
    work.add(X, near, A, beta=0)
    X *= far
    X *= 1 / (min(X.norm(), sqrt(X.norm(1)) * sqrt(X.norm(np.inf))) or 1)
    n, eps = A.shape[1], dtypes.eps(A.dtype)
    E: Any = add_to_diagonal(work.product(1, X.H, X), -1)
    least = _least_singular_value(work, E, eps)
    if least == 0:  # X is singular up to rounding: add a random matrix with a norm of about eps
        work.add(X, eps / (2 * sqrt(max(A.shape))), random(A, A.shape))
        E = add_to_diagonal(work.product(1, X.H, X, C=E), -1)
        least = eps / 100
    Z: Any = empty_like(E)
    for step in range(_MOST):
        error = E.grid.expected(E.norm(), sqrt(eps) if step + 1 >= E.grid.iterations(_MOST, 6) else 1.0)
        if error <= 4 * eps * sqrt(n):
            return X, step, error
        work.add(Y, 1, X, beta=0)
        if last := error**2 <= eps:
            work.product(-0.5, X, E, 1, Y)  # X (3 I - X^H X) / 2
        else:
            if 1 - least < eps**0.5 and error > 0.5:  # the bound `least` was too large
                least = _LEAST
            a, b, c = _weights(max(least, _LEAST))
            L = work.did(cholesky(add_to_diagonal(work.add(Z, c, E, beta=0), 1 + c), overwrite_a=True))
            Y = work.did(solve_triangular(L, Y, lower=True, trans="C", side="R", overwrite_b=True))
            Y = work.did(solve_triangular(L, Y, lower=True, side="R", overwrite_b=True))
            work.add(Y, b / c, X, beta=a - b / c)
            least = min(1, least * (a + b * least**2) / (1 + c * least**2))
        X, Y = Y, X
        E = add_to_diagonal(work.product(1, X.H, X, C=E), -1)
        if last:
            return X, step + 1, E.norm()
    raise LinAlgError(f"the polar decomposition of a matrix ({A.distribution}) did not converge in {_MOST} steps")


def _weights(least: float) -> tuple[float, float, float]:
    """Return a, b and c of the step that maps the interval [least, 1] closest to 1 (Nakatsukasa et al. 2010, 3.2)."""
    square = least**2
    d = (4 * max(0.0, 1 - square) / square**2) ** (1 / 3)
    a = sqrt(1 + d) + sqrt(8 - 4 * d + 8 * (2 - square) / (square * sqrt(1 + d))) / 2
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _least_singular_value(work: Work, E: DistMatrix, eps: float) -> float:
    """Return an estimate of X's least singular value, by inverse iteration with I + E = X^H X; 0 below eps^(1/2)."""
    n, Z = len(E), work.add(empty_like(E), 1, E, beta=0)
    shift = 10 * n * eps
    try:
        L = work.did(cholesky(add_to_diagonal(Z, 1 + shift), overwrite_a=True))
    except LinAlgError:
        return 0.0
    V = random(E, (n, 2))
    grown = 1.0
    for _ in range(3):
        V *= 1 / V.norm()
        V = work.did(cho_solve(L, V))
        grown = V.norm()
    value = 1 / grown - shift
    return sqrt(value) / 2 if value > shift else 0.0


def matrix_sign(
    A: DistMatrix, *, assume_a: Literal["gen", "her"] = "gen", protect: Protection | None = None
) -> DistMatrix:
    """Return S = A (A^2)^(-1/2), the sign of A.  Collective over the grid.

    S has the eigenvalue 1 for each eigenvalue of A with a positive real part, and -1 for each with a negative one.

    A        : DistMatrix (n, n) of type s, d, c or z without eigenvalues on the imaginary axis; A is not changed.
    assume_a : "her": A is Hermitian, and S is its unitary polar factor, by the steps of `polar`; "gen": Newton's
               iteration X := (mu X + (mu X)^-1) / 2 with norm scaling and a Newton-Schulz step at the end.
    protect  : protection of the products, as for `pdgemm`; factorisations, solves and redistributions are not
               protected.

    Returns S in the layout of A.  Cost with "gen": usually 5 to 12 inverses, and three products; `S.report` has the
    steps and |S^2 - I|_F / |S|_F^2.
    Raises LayoutError, DTypeError, ArgumentError or DeviceError on all ranks; LinAlgError where the iteration does not
    converge in 60 steps, or elements are NaN or infinite.
    Higham, Functions of Matrices, 2008, (5.34) and 5.8.
    """
    work = started("matrix_sign", A, protect, assume_a=(assume_a, ("gen", "her")))
    if assume_a == "her":
        X, steps, _ = unitary_factor(work, A)
    else:
        X, steps = _newton(work, A)
    E = add_to_diagonal(work.product(1, X, X), -1)
    return work.reported(X, steps, residual=E.norm() / (X.norm() or 1) ** 2)


def _newton(work: Work, A: DistMatrix) -> tuple[DistMatrix, int]:
    """Return sign(A) and the number of steps, by Newton's iteration with scaling (Higham 2008, 5.5).  Collective."""
    if 0 in A.shape:
        return empty_like(A), 0
    near, far = near_one("A", A)
    X, change, eps = A * near * far, np.inf, dtypes.eps(A.dtype)
    for step in range(_MOST):
        if change <= sqrt(eps):  # half of the digits are correct: a last step, by products only, doubles them
            E = add_to_diagonal(work.product(1, X, X), -1)
            return work.product(-0.5, X, E, 1, X.copy()), step + 1
        Y = work.did(inverse(X))
        mu = sqrt(Y.norm() / X.norm()) if change > 0.1 else 1.0
        work.add(Y, mu / 2, X, 0.5 / mu)
        X, difference = Y, work.add(X, 1, Y, -1)
        size = X.norm()
        change = difference.norm() / size if size else np.inf
        change = A.grid.expected(change, 0.0 if step + 2 >= A.grid.iterations(_MOST, 8) else 1.0)
    raise LinAlgError(
        f"the sign of a matrix ({A.distribution}) did not converge: are eigenvalues near the imaginary axis?"
    )


def inverse(A: DistMatrix) -> DistMatrix:
    """Return A^-1 in the layout and on the device of A.  Raises LinAlgError if A is singular.  Collective."""
    return inv(A if is_reachable(A) else A.to_host()).to_device(A.device)
