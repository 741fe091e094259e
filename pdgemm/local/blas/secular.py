"""Divide and conquer for symmetric tridiagonal matrices on one rank: leaves, deflation and the secular equation.

Two halves are joined by the eigenproblem of D + rho z z^T, where D has the eigenvalues of the halves.  Each root of its
secular equation, 1 + rho sum z_i^2 / (d_i - lambda) = 0, is stored as its origin, which is a pole next to it, and its
offset from this pole, so that all differences d_i - lambda are accurate.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from math import hypot, sqrt
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import LinAlgError
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.blas import library as blas
from pdgemm.local.blas.local_lapack import call_lapack, fortran_letter

Rotation = tuple[int, int, float, float]


class Secular(NamedTuple):
    """The matrix D + rho z z^T that joins two halves, after deflation.

    d, z, rho : the part that is not deflated, with d ascending, rho > 0 and |z| = 1 up to rounding.
    columns   : the columns of diag(V1, V2) that belong to d.
    upper, lower : for each of these columns, whether it has elements in the rows of V1, and in the rows of V2.
    rotations : (p, q, c, s) in order: columns p and q become c p + s q and c q - s p before anything else.
    values, deflated : the eigenvalues that are known already, and their columns of diag(V1, V2).
    """

    d: np.ndarray
    z: np.ndarray
    rho: float
    columns: np.ndarray
    upper: np.ndarray
    lower: np.ndarray
    rotations: list[Rotation]
    values: np.ndarray
    deflated: np.ndarray


class Roots(NamedTuple):
    """Some or all roots.  Each is the sum of an origin, which is a nearby element of d, and an offset.

    lengths : the 2-norms of their vectors z / (d - root).
    """

    origins: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray

    def part(self, some: Any) -> Roots:
        """Return some of the roots, by a slice or their numbers."""
        return Roots(*(x[some] for x in self))


def eigenpairs(d: np.ndarray, e: np.ndarray, V: np.ndarray) -> np.ndarray:
    """Return the eigenvalues, ascending, of a tridiagonal matrix, and set V to its eigenvectors, by LAPACK's stedc.

    d, e : (n,) and (n - 1,), not changed.   V : (n, n), column-major.   Raises LinAlgError.  Local.
    """
    n, dtype, w = len(d), V.dtype, d.copy()
    work, integers = np.empty(1 + 4 * n + n * n, dtype), np.empty(3 + 5 * n, np.intc)
    arrays = w, e.copy(), V, work
    if call_lapack("stedc", dtype, fortran_letter("I"), n, *arrays, work.size, integers, integers.size):
        raise LinAlgError(f"the eigenvalues of a tridiagonal matrix of order {n} do not converge")
    return w


def unreduced(n: int, half: int, dtype: np.dtype) -> Secular:
    """Return a system of n eigenvalues without deflation, for plans.   half : the number of rows of V1."""
    at, none = np.arange(n), np.zeros(0, int)
    return Secular(at.astype(dtype), np.ones(n, dtype), 1.0, at, at < half, at >= half, [], none.astype(dtype), none)


def deflate(d: np.ndarray, z: np.ndarray, rho: float, half: int) -> Secular:
    """Return the system of D + rho z z^T without the eigenvalues that are known up to rounding.  Local.

    d, z : eigenvalues of the first `half`, then of the second, each ascending; |z| = sqrt 2.   rho >= 0.

    An eigenvalue is deflated if its element of z is negligible, or if a rotation of its column and the next one makes
    the element negligible.  This perturbs D + rho z z^T by 8 u max(|d|, |z|), as in LAPACK's dlaed2.
    Gu & Eisenstat, SIAM J. Matrix Anal. Appl. 16(1), 1995, section 4.1.
    """
    dtype, rho = d.dtype, 2 * rho
    z = z / dtype.type(sqrt(2))
    tolerance = 4 * float(np.finfo(dtype).eps) * float(max(np.abs(d).max(), np.abs(z).max()))  # eps is 2 u
    order = np.argsort(d, kind="stable")
    active = order[rho * np.abs(z[order]) > tolerance].tolist()
    upper = np.arange(len(d)) < half
    lower, d_, z_ = ~upper, d.tolist(), z.tolist()
    columns, rotations = list[int](), list[Rotation]()
    for p, q in pairwise(active):
        t = hypot(z_[p], z_[q])
        c, s = z_[q] / t, -z_[p] / t
        if abs((d_[q] - d_[p]) * c * s) > tolerance:
            columns.append(p)
            continue
        rotations.append((p, q, c, s))
        z_[q] = t
        d_[p], d_[q] = d_[p] * c * c + d_[q] * s * s, d_[p] * s * s + d_[q] * c * c
        for part in (upper, lower):
            part[[p, q]] = part[p] | part[q]
    kept = np.array(columns + active[-1:], int)
    d, z = np.array(d_, dtype), np.array(z_, dtype)
    deflated = np.setdiff1d(order, kept)
    return Secular(d[kept], z[kept], rho, kept, upper[kept], lower[kept], rotations, d[deflated], deflated)


def secular_roots(
    d: np.ndarray, z: np.ndarray, rho: float, some: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the origins and offsets of some roots, and their factors of Loewner's formula, by LAPACK's laed4.  Local.

    some : numbers of the roots, from 0.   Raises LinAlgError where a root does not converge.
    Factor i of k is the product over these roots j of (d_i - lambda_j) / (d_i - d_j), without the divisor where i is j.
    """
    k, dtype = len(d), d.dtype
    origins, offsets, factors = np.zeros(len(some), dtype), np.zeros(len(some), dtype), np.ones(k, dtype)
    delta, gaps, number = np.empty(k, dtype), np.empty(k, dtype), ctypes.c_int(0)
    real = ctypes.c_double if dtype.itemsize == 8 else ctypes.c_float
    root, info, laed4 = real(0), ctypes.c_int(0), blas.routine("laed4", dtype.char)
    arrays = [ctypes.c_void_p(x.ctypes.data) for x in (d, z, delta)]
    scalars = [ctypes.byref(x) for x in (real(rho), root, info)]
    arguments = (ctypes.byref(ctypes.c_int(k)), ctypes.byref(number), *arrays, *scalars)
    for at, j in enumerate(some.tolist()):
        if k > 2:
            number.value = j + 1
            laed4(*arguments)
            if info.value:
                raise LinAlgError(f"root {j} of a secular equation of order {k} does not converge")
        else:
            delta[:] = _few_differences(d, rho * z * z, j)
        near = j + 1 if j + 1 < k and abs(delta[j + 1]) < abs(delta[j]) else j
        origins[at], offsets[at] = d[near], -delta[near]
        np.subtract(d, d[j], out=gaps)
        gaps[j] = 1
        delta /= gaps
        factors *= delta
    return origins, offsets, factors


def _few_differences(d: np.ndarray, s: np.ndarray, j: int) -> np.ndarray:
    """Return d - lambda_j where d has one or two elements: laed4 then returns vectors instead.   s : rho z^2."""
    if len(d) == 1:
        return -s
    gap = d[1] - d[0]
    root, rest = hypot(gap + s[1] - s[0], 2 * sqrt(s[0] * s[1])), s[0] + s[1] - gap
    long, most = (abs(rest) + root) / 2, (gap + s[0] + s[1] + root) / 2
    short = s[1] * gap / long
    below, above = (short, long) if rest > 0 else (long, short)  # d_1 - lambda_0 and lambda_1 - d_1
    return np.array([-s[0] * gap / most, below] if j == 0 else [-most, -above])


def loewner(factors: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return the vector, up to scaling and with the signs of z, for which the computed roots are exact.  Local.

    factors : the third results of `secular_roots`, multiplied over all roots.
    The eigenvectors for this z are orthogonal to working precision.
    Gu & Eisenstat, SIAM J. Matrix Anal. Appl. 16(1), 1995.
    """
    return np.copysign(np.sqrt(np.abs(factors)), z)


def vector_lengths(d: np.ndarray, z: np.ndarray, origins: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the 2-norms of the vectors z / (d - root), for each of the roots.  Local."""
    lengths = np.ones(len(origins), d.dtype)
    for some in slabs(len(origins), len(d)):
        x = vector_elements(d, z, Roots(origins, offsets, lengths).part(some))
        lengths[some] = np.sqrt(np.einsum("ij,ij->i", x, x))
    return lengths


def vector_elements(d: np.ndarray, z: np.ndarray, roots: Roots) -> np.ndarray:
    """Return elements of the unit eigenvectors of D + rho z z^T, a row for each root.  Local.

    d, z : the entries of d and z for the requested elements.
    """
    x = d - roots.origins[:, None]
    x -= roots.offsets[:, None]
    np.divide(z, x, out=x)
    x /= roots.lengths[:, None]
    return x
