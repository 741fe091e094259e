"""Hermitian eigenproblems: p?syevd, p?heevd, p?syevr, p?heevr; generalized: p?sygvd, p?hegvd; and SVD: p?gesvd."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.interop.scalapack.argument_lists import Extent, Kind, Letter, RoutineCall, Scalar, Submatrix, Uplo
from pdgemm.interop.scalapack.lapack import store_cholesky
from pdgemm.interop.scalapack.tied_vectors import Vector, VectorArgument
from pdgemm.linalg.eigen.eigh import eigh
from pdgemm.linalg.eigen.generalized import Standard
from pdgemm.linalg.singular.singular_values import svdvals
from pdgemm.linalg.singular.svd import svd
from pdgemm.linalg.work import Work
from pdgemm.matrix.distmatrix import DistMatrix


class ProblemType(Kind):
    """The argument ibtype, 1, 2 or 3."""

    def check(self, call: RoutineCall, name: str) -> int:
        return call.within(name, 1, 3)


class Bounds(Kind):
    """The arguments vl, vu, il and iu of p?syevr, which `p_evr` gets as one tuple, `bounds`.

    The tuple is (vl, vu) if the letter `range` is "V", (il, iu) if it is "I", and otherwise ().
    In ScaLAPACK's argument list the results m and nz follow iu, so `fortran` lists them, too.
    """

    def fortran(self, name: str) -> dict[str, Any]:
        return {"vl": float, "vu": float, "il": int, "iu": int, "m": None, "nz": None}

    def check(self, call: RoutineCall, name: str) -> tuple[Any, ...]:
        n = call.values["n"]
        if call.values["range"] == "V":
            vl, vu = (Scalar(real=True).check(call, x) for x in ("vl", "vu"))
            if n and not vl < vu:
                raise call.illegal("vu", f"vu is {vu}, must be > vl, which is {vl}")
            return vl, vu
        if call.values["range"] == "I":
            il = call.within("il", 1, max(1, n))
            return il, call.within("iu", min(il, n), n)
        return ()


Job = Annotated[str, Letter("NV")]
Square = Annotated[DistMatrix, Submatrix("n", "n")]
UpdatedSquare = Annotated[DistMatrix, Submatrix("n", "n", updated=True)]
Vectors = Annotated[DistMatrix | None, Submatrix("n", "n", wanted="jobz", updated=True)]
Values = Annotated[VectorArgument, Vector("A", "real", length="n", updated=True)]


def p_evd(jobz: Job, uplo: Uplo, n: Extent, A: Square, w: Values, Z: Vectors) -> int:
    """Compute the eigenvalues and eigenvectors of a Hermitian sub(A), and return INFO, 0.  Collective over the context.

    jobz : "V" eigenvalues and eigenvectors; "N" only eigenvalues, and z, iz, jz and descz are ignored.
    uplo : "U" or "L", the triangle of sub(A), n x n, that is read; unlike in ScaLAPACK, sub(A) is not changed.
    w    : local array of n real numbers, the eigenvalues in ascending order, the same on every process.
    a, ia, ja, desca, z, iz, jz, descz : as in p?gemm; sub(Z), n x n, is overwritten with the eigenvectors.

    Cost, algorithm and error are those of `pdgemm.linalg.eigh`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.  Raises
    LinAlgError on every process where elements are NaN or infinite.
    """
    _eigenpairs(uplo, A, w, Z)
    return 0


def p_evr(
    jobz: Job, range: Annotated[str, Letter("AVI")], uplo: Uplo, n: Extent, A: Square,
    bounds: Annotated[tuple[Any, ...], Bounds()], w: Values, Z: Vectors,
) -> tuple[int, int, int]:  # fmt: skip
    """Compute some eigenvalues and eigenvectors of a Hermitian sub(A), and return INFO, M and NZ.  Collective.

    range  : "A" all eigenvalues; "V" those in the interval (vl, vu]; "I" numbers il to iu, from 1, in ascending order.
    vl, vu, il, iu : ignored where `range` makes no use of them.
    w      : local array of n real numbers; the first M become the eigenvalues.
    z, iz, jz, descz : sub(Z) is n x n, and its first NZ columns are overwritten with the eigenvectors.

    Returns INFO, which is 0; M, the number of eigenvalues; and NZ, the number of eigenvectors: M, or 0 for jobz = "N".
    Arguments and numbers of arguments are those of ScaLAPACK, in which M and NZ are numbers 13 and 14.
    Other arguments, cost and errors are those of p?syevd.
    """
    indices = {"subset_by_index": tuple(x - 1 for x in bounds)} if range == "I" else {}
    m = _eigenpairs(uplo, A, w, Z, **({"subset_by_value": bounds} if range == "V" else indices))
    return 0, m, 0 if Z is None else m


def _eigenpairs(uplo: str, A: DistMatrix, w: VectorArgument, Z: DistMatrix | None, **subset: Any) -> int:
    """Store eigenvalues in w, and eigenvectors in Z unless it is None; return the number of eigenvalues."""
    if not A.shape[0]:
        return 0
    if Z is None:
        values = _of_triangle(A, lower=uplo == "L", eigvals_only=True, **subset)
    else:
        values, vectors = _of_triangle(A, lower=uplo == "L", **subset)
        redistribute(vectors, Z[:, : len(values)])
    w.put(values)
    return len(values)


def _of_triangle(A: Any, **how: Any) -> Any:
    """Return the result of `eigh`, without its warning that A is not Hermitian: one triangle may hold anything."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not Hermitian")
        return eigh(A, **how)


def p_gvd(
    routine: str, ibtype: Annotated[Literal[1, 2, 3], ProblemType()], jobz: Job, uplo: Uplo, n: Extent,
    A: UpdatedSquare, B: UpdatedSquare, w: Values,
) -> int:  # fmt: skip
    """Compute the eigenvalues and eigenvectors of sub(A) v = w sub(B) v, and return INFO.  Collective.

    ibtype : 1: sub(A) v = w sub(B) v;  2: sub(A) sub(B) v = w v;  3: sub(B) sub(A) v = w v.
    jobz   : "V": sub(A), n x n, is overwritten with the eigenvectors V; V^H B V = I, or V^H B^-1 V = I if ibtype is 3;
             "N": only eigenvalues, and sub(A) is not changed.
    uplo   : "U" or "L", the triangle of sub(A) and of sub(B) that is read.  sub(B) is Hermitian and positive definite;
             its triangle is overwritten with its Cholesky factor, as by p?potrf.
    w      : as in p?syevd.

    Returns 0, or n + i where the leading minor i of sub(B) is not positive definite; then nothing is changed.
    ScaLAPACK has p?sygvx; name and arguments of this routine are those of LAPACK, with ScaLAPACK's matrices.
    Other arguments and errors are those of p?syevd; the cost is that of `pdgemm.linalg.eigh` with B.
    """
    if not n:
        return 0
    L, minor = store_cholesky(B, uplo == "L")
    if minor:
        return n + minor
    pair = Standard.of_factor(Work(routine), *((A, L) if uplo == "L" else (A.H, L.H)), ibtype)
    if jobz == "N":
        values = _of_triangle(pair.C, eigvals_only=True)
    else:
        values, Y = _of_triangle(pair.C)
        redistribute(pair.vectors(Y), A)
    w.put(values)
    return 0


def p_gesvd(
    jobu: Job, jobvt: Job, m: Extent, n: Extent, A: Annotated[DistMatrix, Submatrix("m", "n")],
    s: Annotated[VectorArgument, Vector("A", "real", updated=True)],
    U: Annotated[DistMatrix | None, Submatrix("m", "min(m, n)", wanted="jobu", updated=True)],
    Vt: Annotated[DistMatrix | None, Submatrix("min(m, n)", "n", wanted="jobvt", updated=True)],
) -> int:  # fmt: skip
    """Compute the singular values, and singular vectors, of sub(A) = U diag(s) V^H; return INFO, 0.  Collective.

    jobu  : "V": sub(U), m x k with k = min(m, n), is overwritten with the left singular vectors; "N": u, iu, ju and
            descu are ignored.
    jobvt : "V": sub(VT), k x n, is overwritten with V^H; "N": vt, ivt, jvt and descvt are ignored.
    m, n  : sub(A) is m x n; unlike in ScaLAPACK, it is not changed.
    s     : local array of k real numbers, the singular values in descending order, the same on every process.
    Other arguments and errors are those of p?syevd.  Cost, algorithm and error are those of `pdgemm.linalg.svd`, or of
    `svdvals` if both letters are "N"; a single "N" saves no time.
    """
    if m and n and U is None and Vt is None:
        s.put(svdvals(A))
    elif m and n:
        left, values, right = svd(A)
        for X, vectors in ((U, left), (Vt, right)):
            if X is not None:
                redistribute(vectors, X)
        s.put(values)
    return 0
