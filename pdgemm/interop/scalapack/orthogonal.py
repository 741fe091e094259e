"""QR factorisations, with column pivoting or without, and products with Q: p?geqrf, p?geqpf; p?orgqr, p?ormqr."""

from __future__ import annotations

from functools import partial

import numpy as np

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.instrument.step_reports import Steps
from pdgemm.interop.scalapack.arguments import (
    Desc,
    Dtypes,
    Sub,
    at_least_0,
    check_letter,
    check_written,
    checked,
    letter,
    of_type,
)
from pdgemm.interop.scalapack.descriptors import illegal
from pdgemm.interop.scalapack.tied_vectors import ColumnOrder, Tau
from pdgemm.linalg.factors.householder import apply_reflectors, householder_factor
from pdgemm.linalg.factors.pivoted_qr import pivoted_factor
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together

__all__ = [
    "pcgeqpf", "pcgeqrf", "pcungqr", "pcunmqr", "pdgeqpf", "pdgeqrf", "pdorgqr", "pdormqr", "psgeqpf", "psgeqrf",
    "psorgqr", "psormqr", "pzgeqpf", "pzgeqrf", "pzungqr", "pzunmqr",
]  # fmt: skip


def _geqrf(
    routine: str, dtypes: Dtypes, m: int, n: int, a: np.ndarray, ia: int, ja: int, desca: Desc, tau: np.ndarray
) -> int:
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
    sub_a = Sub("a", 3, a, ia, ja, desca, m, n)
    factors, check = Tau(7, tau, sub_a, written=True), partial(at_least_0, routine, m=(1, m), n=(2, n))
    (A,), _ = checked(routine, dtypes, check, [sub_a, factors], same=f", m={m}, n={n}")
    if m and n:
        F, all_tau = householder_factor(A)
        redistribute(F, A)
        factors.put(all_tau)
    return 0


def _geqpf(
    routine: str, dtypes: Dtypes, m: int, n: int, a: np.ndarray, ia: int, ja: int, desca: Desc, ipiv: np.ndarray,
    tau: np.ndarray,
) -> int:  # fmt: skip
    """Factor sub(A) P = Q R with column pivoting, and return INFO, 0.  Collective over the context.

    m, n : sub(A) is m x n, and overwritten with R and, below the diagonal, the vectors of the reflectors.
    ipiv : local array of integers, of LOCc(JA + N - 1) entries; entry l is the column of A, from 1, that is now local
           column l, the same in all rows of the grid.  It is not read.
    Other arguments and errors are those of p?geqrf, whose reflectors these are: p?orgqr and p?ormqr take them.

    The pivots are those of `pdgemm.linalg.qr`, which chooses 64 columns at a time in a random projection.  Up to small
    factors they are as large as ScaLAPACK's, which takes the longest column each time; the same if m n <= 768^2.
    Cost and error are those of `pdgemm.linalg.qr`.
    """
    sub_a = Sub("a", 3, a, ia, ja, desca, m, n)
    order, factors = ColumnOrder(7, ipiv, sub_a, written=True), Tau(8, tau, sub_a, written=True)
    check = partial(at_least_0, routine, m=(1, m), n=(2, n))
    (A,), _ = checked(routine, dtypes, check, [sub_a, order, factors], same=f", m={m}, n={n}")
    if m and n:
        F, all_tau, p = pivoted_factor(routine, A, Steps())
        redistribute(F, A)
        factors.put(all_tau)
        order.put(p)
    return 0


def _ungqr(
    routine: str, dtypes: Dtypes, m: int, n: int, k: int, a: np.ndarray, ia: int, ja: int, desca: Desc, tau: np.ndarray
) -> int:
    """Form the first n columns of Q of p?geqrf, and return INFO, 0.  Collective over the context.

    m, n, k : sub(A) is m x n, m >= n >= k, and overwritten with Q; its first k columns and tau hold k reflectors.
    Other arguments and errors are those of p?geqrf.  Cost: 4 m n k/P flops on P processes, in products.
    """
    sub_a = Sub("a", 4, a, ia, ja, desca, m, n)
    sub_f = Sub("a", 4, a, ia, ja, desca, m, k)
    factors = Tau(8, tau, sub_f, written=False)

    def check() -> None:
        at_least_0(routine, m=(1, m), n=(2, n), k=(3, k))
        if n > m:
            raise illegal(routine, 2, 0, f"n is {n}, must be <= m, which is {m}")
        if k > n:
            raise illegal(routine, 3, 0, f"k is {k}, must be <= n, which is {n}")

    (_, A), _ = checked(routine, dtypes, check, [sub_f, sub_a, factors], updated=0, same=f", m={m}, n={n}, k={k}")
    with together(A.grid.comm):
        check_written(routine, sub_a, [])
    if n:
        Q = DistMatrix.eye((m, n), grid=A.grid, block=A.block, dtype=A.dtype, order="F")
        if k:
            apply_reflectors(sub_f.matrix, factors.gathered(), Q, adjoint=False)
        redistribute(Q, A)
    return 0


def _unmqr(
    routine: str, dtypes: Dtypes, side: str, trans: str, m: int, n: int, k: int, a: np.ndarray, ia: int, ja: int,
    desca: Desc, tau: np.ndarray, c: np.ndarray, ic: int, jc: int, descc: Desc,
) -> int:  # fmt: skip
    """Compute sub(C) := op(Q) sub(C), or sub(C) op(Q), with Q of p?geqrf, and return INFO, 0.  Collective.

    side  : "L" for op(Q) sub(C), "R" for sub(C) op(Q).   trans : "N" op(Q) = Q; "C", or "T" if real, op(Q) = Q^H.
    m, n  : sub(C) is m x n, and overwritten.   k : the number of reflectors, in the columns of sub(A) and in tau.
    Other arguments and errors are those of p?geqrf.  Cost: 4 m n k/P flops on P processes, in products.
    """
    order = m if letter(side) == "L" else n
    adjoint = "T" if dtypes[0].kind == "f" else "C"
    sub_a, sub_c = Sub("a", 6, a, ia, ja, desca, order, k), Sub("c", 11, c, ic, jc, descc, m, n)
    factors = Tau(10, tau, sub_a, written=False)

    def check() -> None:
        check_letter(routine, 1, "side", side, "LR")
        check_letter(routine, 2, "trans", trans, "N" + adjoint)
        at_least_0(routine, m=(3, m), n=(4, n), k=(5, k))
        if k > order:
            raise illegal(routine, 5, 0, f"k is {k}, must be <= the order of Q, which is {order}")

    same = f", {letter(side)}, {letter(trans)}, m={m}, n={n}, k={k}"
    (A, C), _ = checked(routine, dtypes, check, [sub_a, factors, sub_c], same=same)
    if not (m and n and k):
        return 0
    all_tau, forward = factors.gathered(), letter(trans) == "N"
    if letter(side) == "L":
        apply_reflectors(A, all_tau, C, adjoint=not forward)
    else:  # C Q = (Q^H C^H)^H
        D = redistribute(C.H, grid=C.grid)
        apply_reflectors(A, all_tau, D, adjoint=forward)
        redistribute(D.H, C)
    return 0


psgeqrf, pdgeqrf, pcgeqrf, pzgeqrf = (of_type(f"p{x}geqrf", _geqrf) for x in "sdcz")
psgeqpf, pdgeqpf, pcgeqpf, pzgeqpf = (of_type(f"p{x}geqpf", _geqpf) for x in "sdcz")
psorgqr, pdorgqr, pcungqr, pzungqr = (of_type(f"p{x}gqr", _ungqr) for x in ("sor", "dor", "cun", "zun"))
psormqr, pdormqr, pcunmqr, pzunmqr = (of_type(f"p{x}mqr", _unmqr) for x in ("sor", "dor", "cun", "zun"))
