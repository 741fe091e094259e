"""Factorisations by elimination, solves and inverses.

p?potrf, p?potrs, p?potri, p?posv; p?getrf, p?getrs, p?getri, p?gesv.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.instrument.step_reports import Steps
from pdgemm.interop.scalapack.argument_lists import Extent, Submatrix, Trans, Uplo
from pdgemm.interop.scalapack.tied_vectors import Vector, VectorArgument
from pdgemm.linalg.factors.cholesky import cho_solve, cholesky_factor
from pdgemm.linalg.factors.lu import LU, lu_factor, lu_solve
from pdgemm.linalg.factors.rank_k import herk
from pdgemm.linalg.factors.solve import inverse_by_lu
from pdgemm.linalg.factors.triangular import inv_triangular
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.staircase import Staircase
from pdgemm.transport.store import store

Factor = Annotated[DistMatrix, Submatrix("n", "n")]
Square = Annotated[DistMatrix, Submatrix("n", "n", updated=True)]
Rectangle = Annotated[DistMatrix, Submatrix("m", "n", updated=True)]
Solution = Annotated[DistMatrix, Submatrix("n", "nrhs", updated=True)]
Pivots = Annotated[VectorArgument, Vector("A", "index", axis=0)]
NewPivots = Annotated[VectorArgument, Vector("A", "index", axis=0, updated=True)]


def p_potrf(uplo: Uplo, n: Extent, A: Square) -> int:
    """Factor sub(A) = L L^H, or U^H U, and return INFO.  Collective over the context.

    uplo  : "U" or "L", the triangle of sub(A), n x n, that is read, and overwritten with U or L.
    a, ia, ja, desca : as in p?gemm; the other triangle is neither read nor written.

    Returns 0, or the order of the first leading minor of sub(A) that is not positive definite; then sub(A) is
    unchanged.  The factor is computed in a copy of sub(A), in square blocks where these share the work more evenly.

    Cost, algorithm and error are those of `pdgemm.linalg.cholesky`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.
    """
    return store_cholesky(A, uplo == "L")[1] if n else 0


def p_potrs(uplo: Uplo, n: Extent, nrhs: Extent, A: Factor, B: Solution) -> int:
    """Solve A X = sub(B), where sub(A) holds the factor of A that p?potrf stored.  Collective over the context.

    uplo : "U" or "L", the triangle of sub(A), n x n, that holds the factor; the other triangle is not read.
    nrhs : sub(B) is n x nrhs, and overwritten with X.
    Returns INFO, 0.  Other arguments and errors are those of p?potrf; cost and error are those of
    `pdgemm.linalg.cho_solve`.
    """
    if n and nrhs:
        cho_solve(A, B, lower=uplo == "L", overwrite_b=True)
    return 0


def p_posv(uplo: Uplo, n: Extent, nrhs: Extent, A: Square, B: Solution) -> int:
    """Factor sub(A) as p?potrf does, solve sub(A) X = sub(B) as p?potrs does, and return INFO.  Collective.

    Arguments, the result and errors are those of p?potrs and p?potrf.  Where INFO is not 0, sub(A) and sub(B) are
    unchanged.
    """
    if not n:
        return 0
    factor, info = store_cholesky(A, uplo == "L")
    if nrhs and not info:
        cho_solve(factor, B, lower=uplo == "L", overwrite_b=True)
    return info


def p_potri(uplo: Uplo, n: Extent, A: Square) -> int:
    """Overwrite the Cholesky factor that p?potrf stored in sub(A) with a triangle of A^-1; return INFO.  Collective.

    Returns 0, or the number of the first element on the diagonal of the factor that is zero; then sub(A) is unchanged.
    Other arguments and errors are those of p?potrf.  Cost: 4 n^3/(3P) flops on P processes, in an inverse of the factor
    and half a product.
    """
    zero = _first_zero(A) if n else 0
    if n and not zero:  # (L L^H)^-1 = L^-H L^-1, and (U^H U)^-1 = U^-1 U^-H
        Y = inv_triangular(A, lower=uplo == "L")
        herk(1.0, Y, 0.0, A, uplo=uplo, trans="C" if uplo == "L" else "N")
    return zero


def _first_zero(A: DistMatrix) -> int:
    """Return the number, from 1, of the first zero on the diagonal of A; 0 if no element is zero.  Collective."""
    zeros = np.flatnonzero(A.diagonal() == 0)
    return int(zeros[0]) + 1 if zeros.size else 0


def store_cholesky(A: DistMatrix, lower: bool) -> tuple[DistMatrix, int]:
    """Return the Cholesky factor of A, perhaps in another layout, and INFO; if INFO is 0, store the factor in A."""
    factor, info = cholesky_factor(A, lower)
    if not info:
        triangle = Staircase.of("L" if lower else "U", *A.indices())
        store(A.stored, redistribute(factor, like=A).stored, CONVERT, within=triangle)
    return factor, info


def p_getrf(m: Extent, n: Extent, A: Rectangle, ipiv: NewPivots) -> int:
    """Factor sub(A) = P L U with partial pivoting, and return INFO.  Collective over the context.

    m, n : sub(A) is m x n, and overwritten with U and, below the diagonal, L; the unit diagonal of L is not stored.
    a, ia, ja, desca : as in p?gemm.
    ipiv : local array of integers, of LOCr(M_A) + MB_A entries; entry l is the row of A, from 1, with which local row l
           was exchanged, for rows ia to ia + min(m, n) - 1.

    Returns 0, or the number of the first element on the diagonal of U that is zero; also then the factors are complete.
    The factors are computed in a copy of sub(A), in square blocks where these share the work more evenly.

    Cost, algorithm and error are those of `pdgemm.linalg.lu_factor`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.
    """
    return _eliminated(A, ipiv).zero_pivot if m and n else 0


def p_getrs(trans: Trans, n: Extent, nrhs: Extent, A: Factor, ipiv: Pivots, B: Solution) -> int:
    """Solve op(A) X = sub(B), where sub(A) and ipiv hold the factors that p?getrf stored.  Collective.

    trans : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H; A is n x n.
    nrhs  : sub(B) is n x nrhs, and overwritten with X.
    Returns INFO, 0; X has infinities where U has a zero on its diagonal.  Other arguments and errors are those of
    p?getrf; an ipiv with a row outside sub(A) is illegal.  Cost and error are those of `pdgemm.linalg.lu_solve`.
    """
    if n and nrhs:
        lu_solve(LU(A, ipiv.gathered(), 0), B, trans=trans, overwrite_b=True)
    return 0


def p_gesv(n: Extent, nrhs: Extent, A: Square, ipiv: NewPivots, B: Solution) -> int:
    """Factor sub(A) as p?getrf does, solve sub(A) X = sub(B) as p?getrs does, and return INFO.  Collective.

    Arguments, the result and errors are those of p?getrs and p?getrf.  Where INFO is not 0, sub(B) is unchanged.
    """
    if not n:
        return 0
    factors = _eliminated(A, ipiv)
    if nrhs and not factors.zero_pivot:
        lu_solve(factors, B, overwrite_b=True)
    return factors.zero_pivot


def p_getri(n: Extent, A: Square, ipiv: Pivots) -> int:
    """Overwrite the LU factors that p?getrf stored in sub(A) with A^-1; return INFO.  Collective.

    n : sub(A) is n x n.
    Returns 0, or the number of the first element on the diagonal of U that is zero; then sub(A) is unchanged.
    Other arguments and errors are those of p?getrs.  Cost: 4 n^3/(3P) flops on P processes, in an inverse of L and a
    triangular solve; error: that of `pdgemm.linalg.inv`.
    """
    if not n:
        return 0
    factors = LU(A, ipiv.gathered(), _first_zero(A))
    if not factors.zero_pivot:
        redistribute(inverse_by_lu(Steps(), factors), A)
    return factors.zero_pivot


def _eliminated(A: DistMatrix, ipiv: VectorArgument) -> LU:
    """Return the LU factors of A, perhaps in another layout; store them in A, and the pivots in ipiv."""
    factors = lu_factor(A)
    redistribute(factors.LU, A)
    ipiv.put(factors.pivots)
    return factors
