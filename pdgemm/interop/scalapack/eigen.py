"""Hermitian eigenproblems: p?syevd, p?heevd; p?syevr, p?heevr; of two matrices, p?sygvd, p?hegvd; and SVD: p?gesvd."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.interop.scalapack.arguments import (
    Argument,
    Desc,
    Dtypes,
    Scalar,
    Sub,
    at_least_0,
    check_letter,
    checked,
    letter,
    of_type,
)
from pdgemm.interop.scalapack.descriptors import illegal, whole_number
from pdgemm.interop.scalapack.lapack import store_cholesky
from pdgemm.interop.scalapack.tied_vectors import SingularValues, Values
from pdgemm.linalg.eigen.eigh import eigh
from pdgemm.linalg.eigen.generalized import Standard
from pdgemm.linalg.singular.singular_values import svdvals
from pdgemm.linalg.singular.svd import svd
from pdgemm.linalg.work import Work

__all__ = [
    "pcgesvd", "pcheevd", "pcheevr", "pchegvd", "pdgesvd", "pdsyevd", "pdsyevr", "pdsygvd", "psgesvd", "pssyevd",
    "pssyevr", "pssygvd", "pzgesvd", "pzheevd", "pzheevr", "pzhegvd",
]  # fmt: skip


@dataclass(eq=False)
class Wanted:
    """The arguments range, vl, vu, il and iu, of which the last four are numbers 9 to 12: the wanted eigenvalues.

    kind : "A" all eigenvalues; "V" those in the interval (vl, vu]; "I" numbers il to iu, from 1, in ascending order.
    n    : the order of sub(A).
    """

    kind: str
    vl: Any
    vu: Any
    il: Any
    iu: Any
    n: int

    def check(self, routine: str, dtypes: Dtypes) -> None:
        """Raise IllegalArgument for an argument that `kind` makes use of."""
        if self.kind == "V":
            ends = Scalar(9, self.vl, real=True), Scalar(10, self.vu, real=True)
            for end in ends:
                end.check(routine, dtypes)
            self.vl, self.vu = (end.value for end in ends)
            if self.n and not self.vl < self.vu:
                raise illegal(routine, 10, 0, f"vu is {self.vu}, must be > vl, which is {self.vl}")
        elif self.kind == "I":
            self.il = _within(routine, 11, "il", self.il, 1, max(1, self.n))
            self.iu = _within(routine, 12, "iu", self.iu, min(self.il, self.n), self.n)

    def __str__(self) -> str:
        """Return the arguments that processes compare."""
        ends = {"V": f" ({self.vl}, {self.vu}]", "I": f" {self.il} to {self.iu}"}
        return f"{self.kind}{ends.get(self.kind, '')}"

    @property
    def subset(self) -> dict[str, Any]:
        """The arguments of `eigh`."""
        if self.kind == "V":
            return {"subset_by_value": (self.vl, self.vu)}
        return {"subset_by_index": (self.il - 1, self.iu - 1)} if self.kind == "I" else {}


def _within(routine: str, number: int, name: str, value: Any, least: int, most: int) -> int:
    """Return an integer argument.  Raises IllegalArgument where it is not within its bounds."""
    whole = whole_number(value)
    if whole is None or not least <= whole <= most:
        raise illegal(routine, number, 0, f"{name} must be an integer within {least} to {most}, got {value!r}")
    return whole


def _evd(
    routine: str, dtypes: Dtypes, jobz: str, uplo: str, n: int, a: np.ndarray, ia: int, ja: int, desca: Desc,
    w: np.ndarray, z: np.ndarray, iz: int, jz: int, descz: Desc,
) -> int:  # fmt: skip
    """Compute the eigenvalues and eigenvectors of a Hermitian sub(A), and return INFO, 0.  Collective over the context.

    jobz : "V" eigenvalues and eigenvectors; "N" eigenvalues alone, and z, iz, jz and descz are ignored.
    uplo : "U" or "L", the triangle of sub(A), n x n, that is read; unlike in ScaLAPACK, sub(A) is not changed.
    w    : local array of n real numbers, the eigenvalues in ascending order, the same on every process.
    a, ia, ja, desca, z, iz, jz, descz : as in p?gemm; sub(Z), n x n, is overwritten with the eigenvectors.

    Cost, algorithm and error are those of `pdgemm.linalg.eigh`.
    Raises IllegalArgument on every process, before any message is sent; its `info` is ScaLAPACK's INFO.  Raises
    LinAlgError on every process where elements are NaN or infinite.
    """

    def check() -> None:
        check_letter(routine, 1, "jobz", jobz, "NV")
        check_letter(routine, 2, "uplo", uplo, "UL")
        at_least_0(routine, n=(3, n))

    sub_a, sub_z = Sub("a", 4, a, ia, ja, desca, n, n), Sub("z", 9, z, iz, jz, descz, n, n)
    values = Values(8, w, sub_a, written=True)
    _compute(routine, dtypes, check, letter(jobz) == "V", uplo, sub_a, Wanted("A", 0, 0, 0, 0, n), values, sub_z)
    return 0


def _evr(
    routine: str, dtypes: Dtypes, jobz: str, range: str, uplo: str, n: int, a: np.ndarray, ia: int, ja: int,
    desca: Desc, vl: float, vu: float, il: int, iu: int, w: np.ndarray, z: np.ndarray, iz: int, jz: int, descz: Desc,
) -> tuple[int, int, int]:  # fmt: skip
    """Compute some eigenvalues and eigenvectors of a Hermitian sub(A), and return INFO, M and NZ.  Collective.

    range  : "A" all eigenvalues; "V" those in the interval (vl, vu]; "I" numbers il to iu, from 1, in ascending order.
    vl, vu, il, iu : ignored where `range` makes no use of them.
    w      : local array of n real numbers, of which the first M are the eigenvalues.
    z, iz, jz, descz : sub(Z) is n x n, and its first NZ columns are overwritten with the eigenvectors.

    Returns INFO, which is 0; M, the number of eigenvalues; and NZ, the number of eigenvectors: M, or 0 for jobz = "N".
    Arguments and numbers of arguments are those of ScaLAPACK, in which M and NZ are numbers 13 and 14.
    Other arguments, cost and errors are those of p?syevd.
    """

    def check() -> None:
        check_letter(routine, 1, "jobz", jobz, "NV")
        check_letter(routine, 2, "range", range, "AVI")
        check_letter(routine, 3, "uplo", uplo, "UL")
        at_least_0(routine, n=(4, n))

    sub_a, sub_z = Sub("a", 5, a, ia, ja, desca, n, n), Sub("z", 16, z, iz, jz, descz, n, n)
    wanted, values, vectors = Wanted(letter(range), vl, vu, il, iu, n), Values(15, w, sub_a, written=True), letter(jobz)
    m = _compute(routine, dtypes, check, vectors == "V", uplo, sub_a, wanted, values, sub_z)
    return 0, m, m if vectors == "V" else 0


def _compute(
    routine: str, dtypes: Dtypes, check: Callable[[], None], vectors: bool, uplo: str,
    sub_a: Sub, wanted: Wanted, values: Values, sub_z: Sub,
) -> int:  # fmt: skip
    """Check the arguments; store eigenvalues in w, and vectors in sub(Z) if wanted; return the number of values."""
    arguments: list[Argument] = [sub_a, wanted, values, *([sub_z] if vectors else [])]
    same = f", {vectors}, {letter(uplo)}, n={sub_a.rows}, {wanted}"
    (A, *Z), _ = checked(routine, dtypes, check, arguments, updated=int(vectors), same=same)
    if not sub_a.rows:
        return 0
    lower = letter(uplo) == "L"
    if not vectors:
        w = _of_triangle(A, lower=lower, eigvals_only=True, **wanted.subset)
    else:
        w, V = _of_triangle(A, lower=lower, **wanted.subset)
        redistribute(V, Z[0][:, : len(w)])
    values.put(w)
    return len(w)


def _of_triangle(A: Any, **how: Any) -> Any:
    """Return what `eigh` does of the triangle that it reads; ScaLAPACK's callers may have anything in the other one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is not Hermitian")
        return eigh(A, **how)


def _gvd(
    routine: str, dtypes: Dtypes, ibtype: int, jobz: str, uplo: str, n: int, a: np.ndarray, ia: int, ja: int,
    desca: Desc, b: np.ndarray, ib: int, jb: int, descb: Desc, w: np.ndarray,
) -> int:  # fmt: skip
    """Compute the eigenvalues and eigenvectors of sub(A) v = w sub(B) v, and return INFO.  Collective.

    ibtype : 1: sub(A) v = w sub(B) v;  2: sub(A) sub(B) v = w v;  3: sub(B) sub(A) v = w v.
    jobz   : "V": sub(A), n x n, is overwritten with the eigenvectors V, where V^H B V = I, and V^H B^-1 V = I for
             ibtype 3; "N": eigenvalues alone, and sub(A) is not changed.
    uplo   : "U" or "L", the triangle of sub(A) and of sub(B) that is read; that of sub(B), Hermitian and positive
             definite, is overwritten with its Cholesky factor, as by p?potrf.
    w      : as in p?syevd.

    Returns 0, or n + i where the leading minor i of sub(B) is not positive definite; then nothing is changed.
    ScaLAPACK has p?sygvx; name and arguments of this routine are those of LAPACK, with ScaLAPACK's matrices.
    Other arguments and errors are those of p?syevd; the cost is that of `pdgemm.linalg.eigh` with B.
    """

    def check() -> None:
        _within(routine, 1, "ibtype", ibtype, 1, 3)
        check_letter(routine, 2, "jobz", jobz, "NV")
        check_letter(routine, 3, "uplo", uplo, "UL")
        at_least_0(routine, n=(4, n))

    sub_a, sub_b = Sub("a", 5, a, ia, ja, desca, n, n), Sub("b", 9, b, ib, jb, descb, n, n)
    values = Values(13, w, sub_a, written=True)
    same = f", {ibtype}, {letter(jobz)}, {letter(uplo)}, n={n}"
    (A, B), _ = checked(routine, dtypes, check, [sub_a, sub_b, values], updated=2, same=same)
    if not n:
        return 0
    lower, kind = letter(uplo) == "L", whole_number(ibtype)
    L, minor = store_cholesky(B, lower)
    if minor:
        return n + minor
    pair = Standard.of_factor(Work(routine), A if lower else A.H, L if lower else L.H, kind)  # type: ignore[arg-type]
    if letter(jobz) == "N":
        values.put(_of_triangle(pair.C, eigvals_only=True))
        return 0
    eigenvalues, Y = _of_triangle(pair.C)
    redistribute(pair.vectors(Y), A)
    values.put(eigenvalues)
    return 0


def _gesvd(
    routine: str, dtypes: Dtypes, jobu: str, jobvt: str, m: int, n: int, a: np.ndarray, ia: int, ja: int, desca: Desc,
    s: np.ndarray, u: np.ndarray, iu: int, ju: int, descu: Desc, vt: np.ndarray, ivt: int, jvt: int, descvt: Desc,
) -> int:  # fmt: skip
    """Compute the singular values of sub(A) = U diag(s) V^H, and vectors, and return INFO, 0.  Collective.

    jobu  : "V": sub(U), m x k with k = min(m, n), is overwritten with the left singular vectors; "N": u, iu, ju and
            descu are ignored.
    jobvt : "V": sub(VT), k x n, is overwritten with V^H; "N": vt, ivt, jvt and descvt are ignored.
    m, n  : sub(A) is m x n; unlike in ScaLAPACK, it is not changed.
    s     : local array of k real numbers, the singular values in descending order, the same on every process.
    Other arguments and errors are those of p?syevd.  Cost, algorithm and error are those of `pdgemm.linalg.svd`, or of
    `svdvals` for two letters "N"; one "N" saves nothing.
    """

    def check() -> None:
        check_letter(routine, 1, "jobu", jobu, "NV")
        check_letter(routine, 2, "jobvt", jobvt, "NV")
        at_least_0(routine, m=(3, m), n=(4, n))

    k = min((x for x in map(whole_number, (m, n)) if x is not None), default=0)  # of arguments that `check` passes
    sub_a = Sub("a", 5, a, ia, ja, desca, m, n)
    sub_u, sub_vt = Sub("u", 10, u, iu, ju, descu, m, k), Sub("vt", 14, vt, ivt, jvt, descvt, k, n)
    wanted = [x for x, job in ((sub_u, jobu), (sub_vt, jobvt)) if letter(job) == "V"]
    values = SingularValues(9, s, sub_a, written=True)
    same = f", {letter(jobu)}, {letter(jobvt)}, m={m}, n={n}"
    checked(routine, dtypes, check, [sub_a, values, *wanted], updated=len(wanted), same=same)
    if not k:
        return 0
    if not wanted:
        values.put(svdvals(sub_a.matrix))
        return 0
    U, all_s, Vh = svd(sub_a.matrix)
    for sub, vectors in ((sub_u, U), (sub_vt, Vh)):
        if sub in wanted:
            redistribute(vectors, sub.matrix)
    values.put(all_s)
    return 0


psgesvd, pdgesvd, pcgesvd, pzgesvd = (of_type(f"p{x}gesvd", _gesvd) for x in "sdcz")
pssyevd, pdsyevd, pcheevd, pzheevd = (of_type(f"p{x}evd", _evd) for x in ("ssy", "dsy", "che", "zhe"))
pssyevr, pdsyevr, pcheevr, pzheevr = (of_type(f"p{x}evr", _evr) for x in ("ssy", "dsy", "che", "zhe"))
pssygvd, pdsygvd, pchegvd, pzhegvd = (of_type(f"p{x}gvd", _gvd) for x in ("ssy", "dsy", "che", "zhe"))
