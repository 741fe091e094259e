"""Eigenvalues and eigenvectors of Hermitian matrices: all by spectral divide and conquer, or some by block Lanczos."""

from __future__ import annotations

from math import sqrt
from typing import Any, Literal

import numpy as np

from pdgemm.errors import ArgumentError, LinAlgError
from pdgemm.linalg.factors.operands import to_one
from pdgemm.linalg.factors.qr import factored, qr
from pdgemm.linalg.functions.iterations import (
    Work,
    add_to_diagonal,
    check_operand,
    check_protection,
    distributed,
    empty_like,
    eps_of,
    finite_norm,
    on_one_rank,
    orthonormal_basis,
    random,
)
from pdgemm.linalg.functions.polar import unitary_factor
from pdgemm.local.arrays.integers import as_count, as_name
from pdgemm.matrix.argument_checks import as_real, communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import Protection
from pdgemm.support.agreement import together

SMALL = 512  # largest order for which LAPACK on one rank is faster than a division of the spectrum


def eigh(
    A: DistMatrix,
    k: int | None = None,
    *,
    which: Literal["largest", "smallest"] = "largest",
    lower: bool = True,
    tolerance: float | None = None,
    steps: int = 300,
    protect: Protection | None = None,
) -> tuple[np.ndarray, DistMatrix]:
    """Return w and V with A V = V diag(w), for a Hermitian A.  Collective over the grid.

    A     : DistMatrix (n, n) of type s, d, c or z; only one triangle is read, and A is not changed.
    k     : None: all eigenvalues.  Else the k largest or smallest, `which`: by block Lanczos or, where 3 (k + 8) >= n,
        as a part of all eigenvalues.
    lower : read the lower triangle of A, otherwise the upper.
    tolerance : of the residuals |A v - w v|_2 / |A|_F for k pairs; by default 1e-10, for 32-bit types 1e-5.
    steps : the largest number of steps of block Lanczos, each a product of A with k + 8 columns.
    protect : protection of the products, as for `pdgemm`; factorisations, solves and redistributions are not protected.

    Returns w in ascending order, real and the same on every rank, and V (n, n) or (n, k) with orthonormal columns.
    The residuals are measured: `V.report.facts["residual"]` is |A V - V diag(w)|_F / |A|_F.

    For all eigenvalues, the spectrum is divided at a number sigma: the polar factor U of A - sigma I is also its sign,
    and (I + U) / 2 projects on the eigenvectors of eigenvalues above sigma.  The two halves are divided in the same way
    down to order 512, which LAPACK solves on one rank.  This takes about 50 n^3 flops, all in products and Cholesky
    factorisations, against 9 n^3 flops of LAPACK, half of which stream the matrix from memory.
    For some eigenvalues: thick-restarted block Lanczos with explicit residuals, in 2 (5 k + 40) vectors.
    Raises LayoutError, DTypeError, ArgumentError or DeviceError on all ranks; LinAlgError where
    elements are NaN or infinite, or the iteration does not converge.
    Error: |A V - V diag(w)| <= c n eps |A|, c about 1, for all eigenvalues; the tolerance for some by Lanczos.
    Nakatsukasa & Higham, SIAM J. Sci. Comput. 35(3), 2013, algorithm 5.2; Wu & Simon, SIAM J. Matrix Anal. Appl. 22(2),
    2000.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A, square=True)
        k = None if k is None else as_count(k, "k", 1)
        steps, least = as_count(steps, "steps", 1), 1e-5 if np.finfo(A.dtype).bits == 32 else 1e-10
        tolerance = least if tolerance is None else as_real(tolerance, "tolerance", above=0)
        if k is not None and k > len(A):
            raise ArgumentError(f"k = {k} is more than the {len(A)} eigenvalues of A, which is {shape_of(A)}")
        as_name(which, "which", ("largest", "smallest"))
        arguments += ["eigh", A.distribution, A.dtype, k, which, bool(lower), tolerance, steps]
        arguments.append(check_protection(protect, A))
    work = Work("eigh", protect)
    H = _hermitian(work, A, lower)
    near, far = to_one(finite_norm("eigh", H) or 1.0, H.dtype)
    H *= near
    H *= far
    scale = H.norm() or 1.0
    if k is None or 3 * (k + 8) >= len(A):
        w, V, done = _divided(work, H, scale)
        w = np.maximum.accumulate(w)  # rounding errors may change the order of values on two sides of a division
        if k is not None:
            part = slice(len(w) - k, None) if which == "largest" else slice(0, k)
            w, V = w[part], V[:, part]
    else:
        sign = 1 if which == "largest" else -1
        w, V, done = _lanczos(work, H, k, sign, scale, tolerance, steps)
    residual = H.grid.expected(work.add(work.product(1, H, V), -1, V * w).norm() / scale, 0.0)
    if k is None and residual > 10 * len(A) * eps_of(A):
        raise LinAlgError(f"the division of the spectrum of {H.distribution} lost digits: residual {residual:.1e}")
    return w / near / far, work.reported(V, done, residual=residual)


def eigvalsh(A: DistMatrix, *, lower: bool = True) -> np.ndarray:
    """Return all eigenvalues of a Hermitian A in ascending order, as scipy.linalg.eigvalsh.  Collective over the grid.

    Arguments, cost and errors are those of `eigh`, which also computes the eigenvectors.
    """
    return eigh(A, lower=lower)[0]


def _hermitian(work: Work, A: DistMatrix, lower: bool) -> DistMatrix:
    """Return the Hermitian matrix whose lower or upper triangle is that of A.  Collective."""
    part, rest = (np.tril(A), np.tril(A, -1)) if lower else (np.triu(A), np.triu(A, 1))
    H: Any = work.add(part, 1, rest.H)  # type: ignore[arg-type, attr-defined]
    return add_to_diagonal(H, 0)


# ---------------------------------------------------------------- all eigenvalues
def _divided(work: Work, H: DistMatrix, scale: float) -> tuple[np.ndarray, DistMatrix, int]:
    """Return all eigenvalues, in ascending order, the eigenvectors, and the number of divisions.  Collective."""
    n = len(H)
    if n <= SMALL:
        w, V = _by_lapack(H)
        return w, V, 0
    mean, real = float(H.trace().real) / n, np.finfo(H.dtype).dtype
    spread = add_to_diagonal(H.copy(), -mean).norm()
    if spread <= 10 * sqrt(n) * eps_of(H) * scale:  # all eigenvalues are the same up to rounding
        return np.full(n, mean, real), DistMatrix.eye(n, grid=H.grid, dtype=H.dtype, device=H.device), 0
    above, below = _bases(work, H, mean, spread)
    halves = [work.product(1, Q.H, work.product(1, H, Q)) for Q in (below, above)]
    V, w, start, divisions = empty_like(H), np.zeros(0, real), 0, 1
    for Q, half in zip((below, above), halves):
        values, vectors, more = _divided(work, half, scale)
        work.product(1, Q, vectors, C=V[:, start : start + len(values)])
        start, divisions, w = start + len(values), divisions + more, np.append(w, values)
    return w, V, divisions


def _bases(work: Work, H: DistMatrix, mean: float, spread: float) -> tuple[DistMatrix, DistMatrix]:
    """Return orthonormal bases of the eigenvectors of eigenvalues above and below a number, about half on each side."""
    n, middle = len(H), float(np.median(H.diagonal().real))
    for sigma in (middle, mean, mean):  # there are eigenvalues above and below the mean
        sigma += 1e-3 * spread / sqrt(n)  # a number that is unlikely to be an eigenvalue
        U, _, _ = unitary_factor(work, add_to_diagonal(H.copy(), -sigma))
        trace = U.grid.expected(float(U.trace().real), float(-(n % 2)))
        count = round((n + trace) / 2)
        if 0 < count < n and abs(n + trace - 2 * count) < 0.1:
            above = _range(work, add_to_diagonal(work.add(U.copy(), 0.25, U.H, 0.25), 0.5), count)
            rest = add_to_diagonal(work.product(-1, above, above.H, C=U), 1)
            return above, _range(work, rest, n - count)
        spread = -7 * spread
    raise LinAlgError(f"the spectrum of {H.distribution} could not be divided at {mean:.3g}")


def _range(work: Work, P: DistMatrix, rank: int) -> DistMatrix:
    """Return an orthonormal basis of the range of a projector P.  Collective.   rank : the rank of P."""
    Q = random(P, (len(P), rank))
    for passes in (2, 1):  # the second pass restores digits that the first lost to the condition of the random matrix
        Q = work.did(factored(work.product(1, P, Q), passes=passes)[0])
    return Q


def _by_lapack(H: DistMatrix) -> tuple[np.ndarray, DistMatrix]:
    whole, n = H.to_global(0), len(H)
    lapack = H.grid.expected(lambda: np.linalg.eigh(whole), lambda: (np.ones(n), np.eye(n)))  # type: ignore[arg-type]
    pair = on_one_rank(H, lapack)
    return pair[0], distributed(H, pair[1])


# ---------------------------------------------------------------- some eigenvalues
def _lanczos(
    work: Work, H: DistMatrix, k: int, sign: int, scale: float, tolerance: float, steps: int
) -> tuple[np.ndarray, DistMatrix, int]:
    """Return k eigenvalues of H in ascending order, their vectors, and the number of steps.  Collective.

    sign : 1: the largest eigenvalues; -1: the smallest, as the largest of -H.   scale : |H|_F.
    """
    n, width = len(H), k + 8
    most = min(n, 5 * width)
    V = DistMatrix.empty((n, most), grid=H.grid, dtype=H.dtype, device=H.device)  # the basis
    W = empty_like(V)  # sign H V
    noise = random(H, (n, width))
    new, used, T = work.did(qr(noise)[0]), 0, np.zeros((0, 0), H.dtype)
    for step in range(1, steps + 1):
        last, used = used, used + new.shape[1]
        work.copy(new, V[:, last:used])
        work.product(sign, H, V[:, last:used], C=W[:, last:used])
        columns = work.product(1, V[:, :used].H, W[:, last:used]).allgather()
        T = np.block([[T, columns[:last]], [columns[:last].conj().T, columns[last:]]])
        w, Y = on_one_rank(H, np.linalg.eigh, (T + T.conj().T) / 2)
        keep = used if used + width > most else 0  # not 0: the basis is full, restart with Ritz vectors
        kept = distributed(H, Y[:, -2 * width :] if keep else Y[:, -width:])
        X, AX = work.product(1, V[:, :used], kept), work.product(1, W[:, :used], kept)
        w = w[-X.shape[1] :]
        R = AX - X * w
        residuals = R.vector_norm(2, axis=0)
        residuals = H.grid.expected(residuals, residuals * (step < H.grid.iterations(steps, 20)))
        if residuals[-k:].max() <= tolerance * scale:
            order = slice(-k, None) if sign > 0 else slice(-1, -k - 1, -1)
            return sign * w[order], work.product(1, V[:, :used], distributed(H, Y[:, order])), step
        if keep:
            used, T = X.shape[1], np.diag(w).astype(H.dtype)
            work.copy(X, V[:, :used])
            work.copy(AX, W[:, :used])
        R = R[:, R.shape[1] - width :]  # plus noise, which leads out of the basis if a residual is a rounding error
        new, _ = orthonormal_basis(work, R, V[:, :used], 10 * eps_of(H) * scale / sqrt(n), noise)
    raise LinAlgError(
        f"{k} eigenvalues of {H.distribution} were not found in {steps} steps: residuals up to "
        f"{residuals[-k:].max() / scale:.1e} of the norm, wanted {tolerance:.1e}; raise steps= or tolerance="
    )
