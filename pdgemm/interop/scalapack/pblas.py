"""Products, triangular solves and transposes: PBLAS.

p?gemm, p?symm, p?hemm, p?syrk, p?herk, p?syr2k, p?her2k, p?trmm, p?trsm, p?tran, p?tranu, p?tranc.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.gemm import pdgemm as gemm
from pdgemm.interop.scalapack.argument_lists import Extent, Letter, Scalar, Side, Submatrix, Trans, Uplo
from pdgemm.linalg.factors.rank_k import her2k, herk, syr2k, syrk
from pdgemm.linalg.factors.symmetric import hemm, symm
from pdgemm.linalg.factors.triangular import solve_triangular, trmm
from pdgemm.matrix.distmatrix import DistMatrix

Number = Annotated[complex, Scalar()]
Real = Annotated[float, Scalar(real=True)]
Result = Annotated[DistMatrix, Submatrix("m", "n", updated=True)]
Factor = Annotated[DistMatrix, Submatrix("n", "k", op="trans")]
Product = Annotated[DistMatrix, Submatrix("n", "n", updated=True)]


def p_gemm(
    transa: Trans, transb: Trans, m: Extent, n: Extent, k: Extent, alpha: Number,
    A: Annotated[DistMatrix, Submatrix("m", "k", op="transa")],
    B: Annotated[DistMatrix, Submatrix("k", "n", op="transb")], beta: Number, C: Result,
) -> None:  # fmt: skip
    """Compute sub(C) := alpha op(sub(A)) op(sub(B)) + beta sub(C).  Collective over the context.

    transa, transb : "N", "T" or "C".
    m, n, k : op(sub(A)) is m x k, op(sub(B)) k x n, sub(C) m x n.
    a, b, c : local arrays, column-major with the leading dimension of the descriptor, or one-dimensional.
              The elements of sub(C) are updated in place, and not read where beta is 0; no other elements are written.
    ia, ja  : first row and column of sub(A) in A, from 1, without restrictions.  Likewise ib, jb, ic, jc.
    desca, descb, descc : descriptors, as returned by `descinit` or `descinit2`.  An empty submatrix (m, n or k = 0)
              may begin anywhere, and its matrix may be empty.

    Cost, algorithm and error are those of `pdgemm.pdgemm`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.
    """
    gemm(alpha, A, B, beta, C, transa=transa, transb=transb)


def p_tran(
    routine: str, m: Extent, n: Extent, alpha: Number, A: Annotated[DistMatrix, Submatrix("n", "m")],
    beta: Number, C: Result,
) -> None:  # fmt: skip
    """Compute sub(C) := beta sub(C) + alpha sub(A)^T; p?tranc takes sub(A)^H.  Collective over the context.

    m, n : sub(C) is m x n, and sub(A) n x m.
    Each element that moves to another process is sent once.  Arguments and errors are those of p?gemm.
    """
    redistribute(A.H if routine.endswith("C") else A.T, C, alpha=alpha, beta=beta)


def p_syrk(
    uplo: Uplo, trans: Annotated[str, Letter("NTC", if_complex="NT")], n: Extent, k: Extent,
    alpha: Number, A: Factor, beta: Number, C: Product,
) -> None:  # fmt: skip
    """Compute a triangle of sub(C) := alpha op(sub(A)) op(sub(A))^T + beta sub(C).  Collective over the context.

    uplo  : "U" or "L", the triangle of sub(C), n x n; the other triangle is neither read nor written.
    trans : "N" op(sub(A)) = sub(A), n x k; "T" op(sub(A)) is the transpose of sub(A), k x n.  Real types take "C", too.
    Other arguments and errors are those of p?gemm; cost and algorithm are those of `pdgemm.linalg.syrk`.
    """
    if n:
        syrk(alpha, A, beta, C, uplo=uplo, trans="N" if trans == "N" else "T")


def p_herk(
    uplo: Uplo, trans: Annotated[Literal["N", "C"], Letter("NC")], n: Extent, k: Extent,
    alpha: Real, A: Factor, beta: Real, C: Product,
) -> None:  # fmt: skip
    """Compute a triangle of sub(C) := alpha op(sub(A)) op(sub(A))^H + beta sub(C).  Collective over the context.

    trans : "N" op(sub(A)) = sub(A), n x k; "C" op(sub(A)) is the conjugate transpose of sub(A), k x n.
    alpha, beta : real numbers.  The diagonal of sub(C) becomes real.
    Other arguments and errors are those of p?syrk; cost and algorithm are those of `pdgemm.linalg.herk`.
    """
    if n:
        herk(alpha, A, beta, C, uplo=uplo, trans=trans)


def p_syr2k(
    uplo: Uplo, trans: Annotated[str, Letter("NTC", if_complex="NT")], n: Extent, k: Extent,
    alpha: Number, A: Factor, B: Factor, beta: Number, C: Product,
) -> None:  # fmt: skip
    """Compute a triangle of sub(C) := alpha X Y^T + alpha Y X^T + beta sub(C).  Collective over the context.

    X is op(sub(A)), and Y is op(sub(B)); both are n x k.
    Arguments and errors are those of p?syrk; cost and algorithm are those of `pdgemm.linalg.syr2k`.
    """
    if n:
        syr2k(alpha, A, B, beta, C, uplo=uplo, trans="N" if trans == "N" else "T")


def p_her2k(
    uplo: Uplo, trans: Annotated[Literal["N", "C"], Letter("NC")], n: Extent, k: Extent,
    alpha: Number, A: Factor, B: Factor, beta: Real, C: Product,
) -> None:  # fmt: skip
    """Compute a triangle of sub(C) := alpha X Y^H + conj(alpha) Y X^H + beta sub(C).  Collective over the context.

    X is op(sub(A)), and Y is op(sub(B)); both are n x k.   beta : a real number.
    Arguments and errors are those of p?herk; cost and algorithm are those of `pdgemm.linalg.her2k`.
    """
    if n:
        her2k(alpha, A, B, beta, C, uplo=uplo, trans=trans)


def p_symm(
    routine: str, side: Side, uplo: Uplo, m: Extent, n: Extent, alpha: Number,
    A: Annotated[DistMatrix, Submatrix("the order of A", "the order of A")],
    B: Annotated[DistMatrix, Submatrix("m", "n")], beta: Number, C: Result,
) -> None:  # fmt: skip
    """Compute sub(C) := alpha S sub(B) + beta sub(C), or alpha sub(B) S + beta sub(C).  Collective over the context.

    S is symmetric for p?symm, and Hermitian for p?hemm; sub(A) has one triangle of it.

    side : "L": S is m x m, to the left of sub(B), which is m x n; "R": S is n x n, to the right.
    uplo : "U" or "L", the triangle of sub(A) that is used.
    Other arguments and errors are those of p?gemm; cost and algorithm are those of `pdgemm.linalg.symm`.
    """
    if m and n:
        (hemm if routine.endswith("HEMM") else symm)(alpha, A, B, beta, C, side=side, uplo=uplo)


def p_triangular(
    routine: str, side: Side, uplo: Uplo, transa: Trans, diag: Annotated[str, Letter("UN")], m: Extent, n: Extent,
    alpha: Number, A: Annotated[DistMatrix, Submatrix("the order of A", "the order of A")], B: Result,
) -> None:  # fmt: skip
    """Compute sub(B) := alpha F sub(B), or alpha sub(B) F, for a triangular sub(A).  Collective over the context.

    F is op(sub(A)) for p?trmm, and op(sub(A))^-1 for p?trsm, which solves equations.

    side   : "L": F is m x m, to the left of sub(B), which is m x n; "R": F is n x n, to the right.
    uplo   : "U" or "L", the triangle of sub(A) that is read.
    transa : "N", "T" or "C".
    diag   : "U" the diagonal is taken to be 1, and not read; "N" the diagonal is read.
    alpha  : where alpha is 0, sub(A) and sub(B) are not read.
    Other arguments and errors are those of p?gemm; cost and algorithm are those of `pdgemm.linalg.trmm` and
    `solve_triangular`.
    """
    options: Any = {"lower": uplo == "L", "trans": transa, "unit_diagonal": diag == "U", "side": side, "alpha": alpha}
    if alpha == 0:
        B.stored[...] = 0
    elif m and n and routine.endswith("TRSM"):
        solve_triangular(A, B, overwrite_b=True, **options)
    elif m and n:
        redistribute(trmm(A, B, **options), B)
