"""Generalized Hermitian eigenproblems, A v = w B v, A B v = w v and B A v = w v, as problems of one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pdgemm.errors import LinAlgError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.linalg.factors.cholesky import cholesky_factor
from pdgemm.linalg.factors.rank_k import both_triangles, make_diagonal_real
from pdgemm.linalg.factors.triangular import solve_triangular, trmm
from pdgemm.linalg.work import Work
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.dtypes import eps
from pdgemm.matrix.argument_checks import shape_of
from pdgemm.matrix.array_functions import tril, triu
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together, warn_together

_TILE = 128  # rows and columns of a tile that fits in cache with its transpose


@dataclass(frozen=True)
class Standard:
    """The eigenproblem C y = w y of one Hermitian matrix that has the eigenvalues of the problem of A and B.

    With B = L L^H, C is L^-1 A L^-H for A v = w B v, and L^H A L for the other two problems.

    C : DistMatrix (n, n); both triangles hold elements.   L : lower triangular.   kind : 1, 2 or 3, as in `eigh`.
    Cost: n^3/3 + 2 n^3 flops of all ranks for C, and n^2 for each vector.
    Error: backward stable for C, so that errors of w are those of A and B times |B^-1||B| (Higham & Davies,
    SIAM J. Matrix Anal. Appl. 23(2), 2001).
    """

    work: Work
    C: DistMatrix
    L: DistMatrix
    kind: Literal[1, 2, 3]

    @classmethod
    def of(cls, work: Work, A: DistMatrix, B: DistMatrix, kind: Literal[1, 2, 3]) -> Standard:
        """Return the standard problem for A and B; their lower triangles are read.  Collective.

        Raises LinAlgError on all ranks where B is not positive definite.
        """
        L, minor = cholesky_factor(B, lower=True)
        if minor:
            raise LinAlgError(
                f"B ({shape_of(B)} on a {B.grid} grid) is not positive definite: its leading minor of order {minor} "
                "is not"
            )
        return cls.of_factor(work, A, work.did(L), kind)

    @classmethod
    def of_factor(cls, work: Work, A: DistMatrix, L: DistMatrix, kind: Literal[1, 2, 3]) -> Standard:
        """Return the standard problem for A and B = L L^H; the lower triangle of A is read.  Collective."""
        H = work.did(both_triangles(A, "L"))
        first, second = ("N", "C") if kind == 1 else ("C", "N")
        apply = solve_triangular if kind == 1 else trmm
        half = work.did(apply(L, H, lower=True, trans=first))  # type: ignore[arg-type]
        C = work.did(apply(L, half, lower=True, trans=second, side="R"))  # type: ignore[arg-type]
        return cls(work, C, L, kind)

    def vectors(self, Y: DistMatrix) -> DistMatrix:
        """Return the eigenvectors V of the problem of A and B: V = L^-H Y, or V = L Y for B A v = w v.  Collective.

        Y : the eigenvectors of C, (n, m).
        """
        if self.kind == 3:
            return self.work.did(trmm(self.L, Y, lower=True))
        return self.work.did(solve_triangular(self.L, Y, lower=True, trans="C"))


def warn_unless_hermitian(work: Work, lower: bool, grid: ProcessGrid, **matrices: DistMatrix | None) -> None:
    """Warn on all ranks about matrices that are not Hermitian, unless the unread triangle is zero.  Collective.

    grid : the grid that the warning names; matrices may have been moved to one of its ranks.
    """
    for name, A in matrices.items():
        if A is None:
            continue
        H = A if lower else A.H
        if _is_hermitian(H):
            continue
        apart = A.grid.expected(work.add(H.copy(), -1, H.H).norm("max"), 0.0)
        if apart > 3 * len(A) * eps(A.dtype) * A.norm("max") and 0 < triu(H, 1).norm("max") < np.inf:
            triangle = "lower" if lower else "upper"
            warn_together(
                A.grid.comm,
                f"{name} ({shape_of(A)} on a {grid} grid) is not Hermitian: its {triangle} triangle is taken "
                f"(largest difference {apart:.1e})",
            )


def _is_hermitian(H: DistMatrix) -> bool:
    """Return whether the only rank of a grid, on the host, sees that a matrix equals its adjoint.  Collective."""
    if H.grid.shape != (1, 1) or H.grid.draft or H.device != devices.HOST:
        return False
    with (differs := together(H.grid.comm)):
        X, ends = H.local, range(0, 0 if H.grid.idle else len(H), _TILE)
        tiles = ((slice(i, i + _TILE), slice(j, j + _TILE)) for i in ends for j in ends if j <= i)
        differs.flag = not all(np.array_equal(X[i, j], X[j, i].conj().T) for i, j in tiles)
    return not differs.flag


def lower_triangle(A: DistMatrix) -> DistMatrix:
    """Return the lower triangle of A with the real part of the diagonal, as LAPACK reads A.  Collective."""
    T: DistMatrix = tril(A)
    make_diagonal_real(T)
    return T
