"""The matrices of LAPACK's test programs, and the ratios that must be below its thresholds.

The numbers of types are those of dchkst (symmetric), dchkbd (rectangular), and dchkge, dchkpo and dchkqr, of dlatb4.
Products with unitary matrices are computed in double precision, as are all ratios.
Anderson et al., LAPACK Users' Guide, 3rd ed., 1999; LAPACK Working Note 41, Installation guide, sections 6.1 and 6.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

EIGEN, LINEAR = 50, 30  # the thresholds of sep.in and svd.in, and of dtest.in
SYMMETRIC, RECTANGULAR, GENERAL, DEFINITE, LEAST_SQUARES = (range(1, last + 1) for last in (21, 16, 11, 9, 8))


def spectrum(mode: int, n: int, cond: float, rng: np.random.Generator, signs: bool = False) -> np.ndarray:
    """Return n numbers from 1 to 1/cond, as dlatm1.

    mode : 1: one is 1;  2: one is 1/cond;  3: geometric;  4: arithmetic;  5: uniform logarithms;  6: normal.
    signs : each number has a random sign.
    """
    d = {
        1: lambda: np.where(np.arange(n) == 0, 1, 1 / cond),
        2: lambda: np.where(np.arange(n) == n - 1, 1 / cond, 1),
        3: lambda: cond ** (-np.arange(n) / max(1, n - 1)),
        4: lambda: np.linspace(1, 1 / cond, n),
        5: lambda: np.exp(-rng.uniform(0, np.log(cond), n)),
        6: lambda: rng.standard_normal(n),
    }[mode]()
    return d * rng.choice([-1, 1], n) if signs else d


def unitary(n: int, k: int, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Return k random orthonormal columns, in double precision."""
    x = rng.standard_normal((2, n, k))
    return np.linalg.qr(x[0] + 1j * x[1] if np.dtype(dtype).kind == "c" else x[0])[0]


def uniform(m: int, n: int, dtype: Any, rng: np.random.Generator) -> np.ndarray:
    x = rng.uniform(-1, 1, (2, m, n))
    return x[0] + 1j * x[1] if np.dtype(dtype).kind == "c" else x[0]


def hermitian(x: np.ndarray) -> np.ndarray:
    return (x + x.conj().T) / 2


def _constants(dtype: Any) -> tuple[float, float, float]:
    """Return the spacing of numbers at 1, and the square roots of the smallest normal number and of its inverse."""
    kind = np.finfo(dtype)
    least = float(np.sqrt(float(kind.tiny)))
    return float(kind.eps), least, 1 / least


def symmetric(number: int, n: int, dtype: Any, seed: int = 0) -> np.ndarray:
    """Return a matrix of dchkst, by the number of its type, 1 to 21."""
    rng, (ulp, small, large) = np.random.default_rng([seed, number, n]), _constants(dtype)
    mode = {3: 4, 4: 3, 5: 1, 6: 3, 7: 3, 8: 4, 9: 3, 10: 1, 11: 4, 12: 4, 16: 4, 17: 3, 18: 1, 19: 4, 20: 4}.get(
        number
    )
    size = large * ulp / max(1, n) if number in (6, 11, 14, 19) else 1.0
    size = small * n / ulp if number in (7, 12, 15, 20) else size
    cond = 1 / ulp / max(1, n) / 10 if 8 <= number <= 15 else 1 / ulp
    if number <= 2:
        x: np.ndarray = np.eye(n) * (number - 1)
    elif number in (13, 14, 15):
        x = hermitian(uniform(n, n, dtype, rng))
    elif number == 21:  # a tridiagonal matrix with eigenvalues of geometric sizes, diagonally dominant
        d = spectrum(3, n, cond, rng)
        beside = 0.1 * np.sqrt(d[:-1] * d[1:])
        x = np.diag(d) + np.diag(beside, 1) + np.diag(beside, -1) if n else np.zeros((0, 0))
    else:
        assert mode
        d = spectrum(mode, n, cond, rng, signs=number < 16)
        Q = unitary(n, n, dtype, rng) if number >= 8 else np.eye(n)
        x = hermitian((Q * d) @ Q.conj().T)
    return np.asarray(x * size, dtype)


def rectangular(number: int, m: int, n: int, dtype: Any, seed: int = 0) -> np.ndarray:
    """Return a matrix of dchkbd, by the number of its type, 1 to 16."""
    rng, (ulp, small, large) = np.random.default_rng([seed, number, m, n]), _constants(dtype)
    k = min(m, n)
    mode = {3: 4, 4: 3, 5: 1, 6: 3, 7: 3, 8: 4, 9: 3, 10: 1, 11: 4, 12: 4}.get(number)
    size = large * ulp / max(1, n) if number in (6, 11, 14) else 1.0
    size = small * max(m, n) / ulp if number in (7, 12, 15) else size
    if number <= 2:
        x: np.ndarray = np.eye(m, n) * (number - 1)
    elif number in (13, 14, 15):
        x = uniform(m, n, dtype, rng)
    elif number == 16:  # bidiagonal, with logarithms that are uniform between those of ulp^2 and of ulp^-2
        elements = np.exp(rng.uniform(2 * np.log(ulp), -2 * np.log(ulp), (2, k))) * rng.choice([-1, 1], (2, k))
        x = np.zeros((m, n))
        np.fill_diagonal(x, elements[0])
        np.fill_diagonal(x[:, 1:], elements[1, : min(m, max(0, n - 1))])
    else:
        assert mode
        d = spectrum(mode, k, 1 / ulp, rng)
        U, V = (unitary(y, k, dtype, rng) if number >= 8 else np.eye(y, k) for y in (m, n))
        x = (U * d) @ V.conj().T
    return np.asarray(x * size, dtype)


def linear(path: str, number: int, m: int, n: int, dtype: Any, seed: int = 0) -> tuple[np.ndarray, int]:
    """Return a matrix of dchkge ("ge"), dchkpo ("po") or dchkqr ("qr"), and its first zero column or 0.

    number : 1: diagonal;  2, 3 ("ge", "qr"): triangular;  then: condition 2;  three with zeros ("ge", "po"): in the
    first, the last, or half of the columns ("po": the middle one, and rows);  conditions of sqrt(0.1/eps) and 0.1/eps;
    near underflow and near overflow.
    """
    rng, (ulp, least, _) = np.random.default_rng([seed, number, m, n]), _constants(dtype)
    eps, k, position = ulp / 2, min(m, n), number + 2 * (path == "po" and number > 1)
    if path == "qr" and position > 4:
        position += 3
    bad = 0.1 / eps
    cond = {8: np.sqrt(bad), 9: bad}.get(position, 2.0)
    d = spectrum(3, k, cond, rng)
    if position == 1:
        x: np.ndarray = np.zeros((m, n))
        np.fill_diagonal(x, d)
    elif path == "po":
        U = unitary(n, n, dtype, rng)
        x = hermitian((U * d) @ U.conj().T)
    else:
        x = (unitary(m, k, dtype, rng) * d) @ unitary(n, k, dtype, rng).conj().T
    if position in (2, 3):  # a factor of x, which has the singular values of x
        triangle = np.linalg.qr(x if position == 2 else x.conj().T)[1]
        x = np.zeros_like(x)
        x[:k] += triangle if position == 2 else 0
        x[:, :k] += triangle.conj().T if position == 3 else 0
    zero = {5: 1, 6: k, 7: k // 2 + 1}.get(position, 0) if k else 0
    if zero:
        x[:, zero - 1 : n if position == 7 and path == "ge" else zero] = 0
        if path == "po":
            x[zero - 1] = 0
    small = 0.25 * (least * least / eps)
    return np.asarray(x * {10: small, 11: 1 / small}.get(position, 1.0), dtype), zero


def glued_wilkinson(n: int, dtype: Any, glue: float = 1e-8) -> np.ndarray:
    """Return copies of Wilkinson's matrix of order 21, joined by small elements: clusters of nearly equal pairs."""
    d, e = np.abs(np.arange(n) % 21 - 10.0), np.where(np.arange(1, n) % 21, 1.0, glue)
    return (np.diag(d) + np.diag(e, 1) + np.diag(e, -1)).astype(dtype)


def ratio(residual: np.ndarray, size: float, n: int, dtype: Any) -> float:
    """Return |residual|_1 / (size n ulp)."""
    return norm(residual) / ((size or 1) * max(1, n) * float(np.finfo(dtype).eps))


def exponent(a: np.ndarray) -> int:
    """Return e, where the largest element of a is about 2^e."""
    return int(np.frexp(np.abs(a).max(initial=0))[1])


def times(x: np.ndarray, e: int) -> np.ndarray:
    """Return 2^e x in double precision."""
    return np.asarray(x, np.result_type(x.dtype, float)) * 2.0 ** (e // 2) * 2.0 ** (e - e // 2)


def to_one(*arrays: np.ndarray) -> list[np.ndarray]:
    """Return arrays in double precision, divided by the power of 2 that brings the elements of the first to about 1."""
    return [times(x, -exponent(arrays[0])) for x in arrays]


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.reshape(len(x), -1), 1)) if x.size else 0.0


def orthogonality(x: np.ndarray) -> float:
    """Return |I - X^H X| / (m ulp), as dort01, for columns X (m, k); of a wide X, its rows."""
    wide = np.asarray(x if x.shape[0] >= x.shape[1] else x.conj().T, np.result_type(x.dtype, float))
    return ratio(wide.conj().T @ wide - np.eye(wide.shape[1]), 1, len(wide), x.dtype)


def of_pairs(a: np.ndarray, w: np.ndarray, v: np.ndarray) -> tuple[float, float]:
    """Return |A V - V D| / (|A| n ulp) and |I - V^H V| / (n ulp), as dsyt22 for some of the pairs."""
    (x, d), wide = to_one(a, w), np.asarray(v, np.result_type(v.dtype, float))
    return ratio(x @ wide - wide * d, norm(x), len(a), a.dtype), orthogonality(v)


def of_triplets(a: np.ndarray, u: np.ndarray, s: np.ndarray, vh: np.ndarray) -> tuple[float, float, float]:
    """Return |A - U S V^H| / (|A| max(m, n) ulp), as dbdt01, and the departures of U and V."""
    x, d = to_one(a, s)
    return ratio((u * d) @ vh - x, norm(x), max(a.shape), a.dtype), orthogonality(u), orthogonality(vh)


def of_values(x: np.ndarray, y: np.ndarray) -> float:
    """Return max |x - y| / (max |x| ulp)."""
    a, b = to_one(x, y)
    return float(np.abs(a - b).max(initial=0) / ((np.abs(a).max(initial=0) or 1) * np.finfo(x.dtype).eps))


def of_solution(a: np.ndarray, x: np.ndarray, b: np.ndarray, exact: np.ndarray, cond: float) -> tuple[float, float]:
    """Return max |b - A x| / (|A| |x| ulp) over the columns, as dget02, and max |x - exact| / (|exact| cond ulp)."""
    (A, B), X, ulp = to_one(a, b), times(x, 0), float(np.finfo(a.dtype).eps)
    columns = range(x.shape[1]) if len(a) else ()
    residuals = [norm(B[:, j] - A @ X[:, j]) / (norm(A) * norm(X[:, j]) * ulp) for j in columns]
    errors = [np.abs(X - exact)[:, j].max() / (np.abs(exact[:, j]).max() * cond * ulp) for j in columns]
    return max(residuals, default=0.0), max(errors, default=0.0)
