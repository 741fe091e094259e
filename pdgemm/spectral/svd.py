"""Singular value decompositions: the largest singular values by random projections, or all of a tall matrix."""

from __future__ import annotations

import numpy as np

from pdgemm.arrays.integers import as_count, as_seed
from pdgemm.errors import ArgumentError
from pdgemm.factors.qr import qr
from pdgemm.factors.tall_qr import svd_of_tall
from pdgemm.matrix.argument_checks import communicator, size
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.spectral.iterations import Work, check_operand, finite_norm, like, random
from pdgemm.support.agreement import together

PROBES = 6  # random vectors for the estimate of the error, which is too small with probability 10^-6


def svd(
    A: DistMatrix, k: int | None = None, *, oversample: int = 10, power: int = 2, seed: int = 0
) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    """Return U, s and Vh with A = U diag(s) Vh, or the k largest singular values by random projections.  Collective.

    A : DistMatrix (m, n) of type s, d, c or z; it is not changed.
    k : None: all min(m, n) values, by a QR factorisation and LAPACK on one rank, for tall or wide A.
        Else A is approximated by the range of A (A^H A)^power Omega, of which Omega has k + oversample random columns
        that depend on the seed alone: the result is the same on every grid but for rounding.
    power : iterations, with a QR factorisation after each product; 0 is enough where the values decay fast.

    Returns U (m, k), s (k,) in descending order on every rank, and Vh (k, n), a view; U and Vh have orthonormal
    columns and rows.  `U.report.facts["error"]` estimates |A - U diag(s) Vh|_2: it is s_(k+1) of the projection
    and 10 sqrt(2/pi) times the longest of 6 residuals of random vectors, and too small with probability 10^-6.

    Cost with l = k + oversample: 2 (power + 1) products of A, 4 mnl (power + 1) flops, the first of l + 6 columns, and
    as many QR factorisations of l columns.
    Raises DTypeError, ArgumentError or DeviceError on all ranks; LinAlgError where A has NaN or
    infinite elements.
    E |A - Q Q^H A| <= (1 + 4 sqrt(2 min(m, n) / (k - 1)))^(1 / (2 power + 1)) s_(k+1) with oversample = k.
    Halko, Martinsson & Tropp, SIAM Review 53(2), 2011, algorithms 4.4 and 5.1, (4.3), (1.10).
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A)
        least = min(A.shape)
        k = None if k is None else as_count(k, "k", 1)
        columns, power, seed = as_count(oversample, "oversample", 0), as_count(power, "power", 0), as_seed(seed)
        if k is not None and k > least:
            raise ArgumentError(f"k = {k} is more than the {least} singular values of A, which is {size(A)}")
        arguments += ["svd", A.distribution, A.dtype, k, oversample, power, seed]
    finite_norm("svd", A, "max") if A.size else 0.0
    if k is None:
        return _all(A)
    columns = min(k + columns, least)
    work = Work("svd")
    Y = work.product(1, A, random(A, (A.shape[1], columns + PROBES), (2 * seed + 1) % 2**64))
    probes, Q = Y[:, columns:], work.did(qr(Y[:, :columns])[0])
    for _ in range(power):
        Q = work.did(qr(work.product(1, A.H, Q))[0])
        Q = work.did(qr(work.product(1, A, Q))[0])
    W, s, Gh = svd_of_tall(work.product(1, A.H, Q))  # A ~ Q Q^H A = Q (W s Gh)^H
    work.did(W)
    work.product(-1, Q, work.product(1, Q.H, probes), 1, probes)
    error = 10 * np.sqrt(2 / np.pi) * float(probes.vector_norm(2, axis=0).max())
    error += float(s[k]) if k < columns else 0.0
    U = work.product(1, Q, Gh[:k, :].H)
    return work.reported(U, power, error=error), s[:k], W[:, :k].H


def _all(A: DistMatrix) -> tuple[DistMatrix, np.ndarray, DistMatrix]:
    if 0 in A.shape:
        return like(A)[:, :0], np.zeros(0, np.finfo(A.dtype).dtype), like(A)[:0, :]
    if A.shape[0] >= A.shape[1]:
        return svd_of_tall(A)
    W, s, Gh = svd_of_tall(A.H)
    U, Vh = Gh.H, W.H
    U.report = Vh.report = W.report
    return U, s, Vh
