"""Products with a Hermitian or symmetric matrix, of which one triangle is used."""

from __future__ import annotations

from typing import Literal, Unpack

from pdgemm.gemm import pdgemm
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.operands import check_operand
from pdgemm.linalg.factors.rank_k import RankOptions, Uplo, both_triangles
from pdgemm.local.arrays.arguments import as_name
from pdgemm.matrix.argument_checks import communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together


def hemm(
    alpha: complex, A: DistMatrix, B: DistMatrix, beta: complex = 0.0, C: DistMatrix | None = None, *,
    side: Literal["L", "R"] = "L", uplo: Uplo = "L", **options: Unpack[RankOptions],
) -> DistMatrix:  # fmt: skip
    """Compute C := alpha A B + beta C, or alpha B A + beta C with side "R", where A is Hermitian.  Collective.

    alpha, beta : numbers of C's type.  beta == 0: C is not read.
    A : DistMatrix (n, n), float32, float64, complex64 or complex128, of any layout.  One triangle is used; imaginary
        parts of the diagonal are taken as zero.
    B : DistMatrix (n, m), or (m, n) with side "R", of any layout.
    C : DistMatrix of the shape of B, overwritten.  None: a new matrix, in the layout of the product of A and B.
    side, uplo : the side of A, and its triangle, "L" or "U", that is used, with the diagonal.
    options : those of `pdgemm`.

    A is completed in its own layout, and then multiplied by `pdgemm`; `C.report` is the sum of both reports.

    Cost per rank on P ranks: 2 n^2 m/P flops; n^2/P words of A in, and the words of `pdgemm`; memory for n^2/P words of
    the completed A.  Triangle blocks of A in two dimensions would need as many words of B and C.
    Raises LayoutError, DTypeError, ArgumentError and the errors of `pdgemm`, the same on every rank.
    Error: |C - C^| <= gamma_n |alpha||A||B| (Higham 2002, 3.5).
    """
    return _completed(alpha, A, B, beta, C, side, uplo, options, hermitian=True)


def symm(
    alpha: complex, A: DistMatrix, B: DistMatrix, beta: complex = 0.0, C: DistMatrix | None = None, *,
    side: Literal["L", "R"] = "L", uplo: Uplo = "L", **options: Unpack[RankOptions],
) -> DistMatrix:  # fmt: skip
    """Compute C := alpha A B + beta C, or alpha B A + beta C with side "R", where A is symmetric.  Collective.

    Arguments, cost, errors and result are those of `hemm`; the diagonal of A may be complex.
    """
    return _completed(alpha, A, B, beta, C, side, uplo, options, hermitian=False)


def _completed(
    alpha: complex, A: DistMatrix, B: DistMatrix, beta: complex, C: DistMatrix | None, side: str, uplo: str,
    options: RankOptions, hermitian: bool,
) -> DistMatrix:  # fmt: skip
    """Return the result of `hemm`, or of `symm` if not `hermitian`.  Collective over the grid of A."""
    steps = Steps()
    with together(communicator(A=A)) as arguments:
        check_operand("A", A, square=True)
        side, triangle = as_name(side, "side", ("L", "R")), as_name(uplo, "uplo", ("L", "U"))
        arguments += ["a product with one triangle", side, triangle, hermitian, A.distribution, A.dtype]
    full = steps.did(both_triangles(A, triangle, hermitian))  # type: ignore[arg-type]
    left, right = (full, B) if side == "L" else (B, full)
    return steps.reported(steps.did(pdgemm(alpha, left, right, beta, C, **options)))  # type: ignore[arg-type]
