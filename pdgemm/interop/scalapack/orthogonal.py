"""QR factorisations, with column pivoting or without, and products with Q: p?geqrf, p?geqpf; p?orgqr, p?ormqr."""

from __future__ import annotations

from typing import Annotated

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.instrument.step_reports import Steps
from pdgemm.interop.scalapack.argument_lists import Extent, Letter, Side, Size, Submatrix
from pdgemm.interop.scalapack.tied_vectors import Vector, VectorArgument
from pdgemm.linalg.factors.householder import apply_reflectors, householder_factor, pivoted_factor
from pdgemm.matrix.distmatrix import DistMatrix

Matrix = Annotated[DistMatrix, Submatrix("m", "n", updated=True)]
NewTau = Annotated[VectorArgument, Vector("A", "number", axis=1, updated=True)]


def p_geqrf(m: Extent, n: Extent, A: Matrix, tau: NewTau) -> int:
    """Factor sub(A) = Q R by Householder reflections, and return INFO, 0.  Collective over the context.

    m, n : sub(A) is m x n, and overwritten with R and, below the diagonal, the vectors of the reflectors.
    a, ia, ja, desca : as in p?gemm.
    tau  : local array of the type of A, of LOCc(JA + min(M, N) - 1) entries; entry l is the factor of the reflector in
           local column l, the same in all rows of the grid.

    Q = H_1 H_2 ... H_k, H_j = I - tau_j v v^H, where v is 0 before row j, 1 in row j, and stored in column j below: the
    reflectors of LAPACK.  They are computed in a copy of sub(A), in square blocks where these share the work better.

    Cost, algorithm and error are those of `pdgemm.linalg.householder_qr`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.
    """
    if m and n:
        factor, all_tau = householder_factor(A)
        redistribute(factor, A)
        tau.put(all_tau)
    return 0


def p_geqpf(
    routine: str, m: Extent, n: Extent, A: Matrix,
    ipiv: Annotated[VectorArgument, Vector("A", "index", axis=1, length="n", updated=True)], tau: NewTau,
) -> int:  # fmt: skip
    """Factor sub(A) P = Q R with column pivoting, and return INFO, 0.  Collective over the context.

    m, n : sub(A) is m x n, and overwritten with R and, below the diagonal, the vectors of the reflectors.
    ipiv : local array of integers, of LOCc(JA + N - 1) entries; entry l is the column of A, from 1, that is now local
           column l, the same in all rows of the grid.  Old values of ipiv are not read.
    Other arguments and errors are those of p?geqrf.  The reflectors are stored in the same way, so p?orgqr and p?ormqr
    accept them.

    The pivots are those of `pdgemm.linalg.qr`, which chooses 64 columns at a time in a random projection.  ScaLAPACK
    chooses the longest column each time.  If m n <= 768^2, its pivots are the same.  For larger matrices its pivot
    elements may be larger by small factors.
    Cost and error are those of `pdgemm.linalg.qr`.
    """
    if m and n:
        factor, all_tau, order = pivoted_factor(routine, A, Steps())
        redistribute(factor, A)
        tau.put(all_tau)
        ipiv.put(order)
    return 0


def p_ungqr(
    m: Extent, n: Annotated[int, Size(most="m")], k: Annotated[int, Size(most="n")], A: Matrix,
    tau: Annotated[VectorArgument, Vector("A", "number", axis=1, length="k")],
) -> int:  # fmt: skip
    """Form the first n columns of Q of p?geqrf, and return INFO, 0.  Collective over the context.

    m, n, k : sub(A) is m x n, m >= n >= k, and overwritten with Q; its first k columns and tau hold k reflectors.
    Other arguments and errors are those of p?geqrf.  Cost: 4 m n k/P flops on P processes, in products.
    """
    if n:
        Q = DistMatrix.eye((m, n), grid=A.grid, block=A.block, dtype=A.dtype, order="F")
        if k:
            apply_reflectors(A[:, :k], tau.gathered(), Q, adjoint=False)
        redistribute(Q, A)
    return 0


def p_unmqr(
    side: Side, trans: Annotated[str, Letter("NT", if_complex="NC")], m: Extent, n: Extent,
    k: Annotated[int, Size(most="the order of Q")], A: Annotated[DistMatrix, Submatrix("the order of Q", "k")],
    tau: Annotated[VectorArgument, Vector("A", "number", axis=1)], C: Matrix,
) -> int:  # fmt: skip
    """Compute sub(C) := op(Q) sub(C), or sub(C) op(Q), with Q of p?geqrf, and return INFO, 0.  Collective.

    side  : "L" for op(Q) sub(C), "R" for sub(C) op(Q).   trans : "N" op(Q) = Q; "C", or "T" if real, op(Q) = Q^H.
    m, n  : sub(C) is m x n, and overwritten.   k : the number of reflectors, in the columns of sub(A) and in tau.
    Other arguments and errors are those of p?geqrf.  Cost: 4 m n k/P flops on P processes, in products.
    """
    if m and n and k and side == "L":
        apply_reflectors(A, tau.gathered(), C, adjoint=trans != "N")
    elif m and n and k:  # C Q = (Q^H C^H)^H
        D = redistribute(C.H, grid=C.grid)
        apply_reflectors(A, tau.gathered(), D, adjoint=trans == "N")
        redistribute(D.H, C)
    return 0
