"""Matrices and errors that the tests of `pdgemm.linalg` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdgemm.linalg.factors import tall_qr

EPS = 3  # the bound of SLATE's tests for errors divided by n |A| and the unit roundoff


def rng_matrix(m: int, n: int, dtype: str = "float64", seed: int = 0) -> np.ndarray:
    """Return normal random numbers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, n))
    return (x + 1j * rng.standard_normal((m, n)) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def positive_definite(n: int, dtype: str) -> np.ndarray:
    x = rng_matrix(n, n, dtype).astype(np.result_type(dtype, float))
    return (x @ x.conj().T / max(1, n) + np.eye(n)).astype(dtype)


def conditioned(m: int, n: int, kappa: float, dtype: str) -> np.ndarray:
    """Return a matrix whose singular values are 1 to 1/kappa, in equal ratios."""
    return with_singular_values(m, n, np.logspace(0, -np.log10(kappa), n), dtype)


def with_singular_values(m: int, n: int, values: np.ndarray, dtype: str) -> np.ndarray:
    left, right = (np.linalg.qr(rng_matrix(x, len(values), dtype, seed=x).astype("D"))[0] for x in (m, n))
    x = left * values @ right.conj().T
    return (x if np.dtype(dtype).kind == "c" else x.real).astype(dtype)


def hilbert(n: int, dtype: str) -> np.ndarray:
    """Return the Hilbert matrix, plus 8 n eps on the diagonal to keep it positive definite under rounding."""
    i = np.arange(n)
    return (1 / (i[:, None] + i + 1) + 8 * n * np.finfo(dtype).eps * np.eye(n)).astype(dtype)


def graded(n: int, dtype: str) -> np.ndarray:
    """Return a positive definite matrix whose rows and columns are scaled by 1 to 1e-6 (1e-3 in single precision)."""
    d = np.logspace(0, -6 if np.finfo(dtype).eps < 1e-10 else -3, n)
    return (positive_definite(n, dtype) * d * d[:, None]).astype(dtype)


def nearly_singular(n: int, dtype: str) -> np.ndarray:
    """Return a positive definite matrix of rank one, plus 10 n eps |x|^2 on its diagonal."""
    x = rng_matrix(n, 1, dtype)
    return (x @ x.conj().T + n * np.finfo(dtype).eps * 10 * np.linalg.norm(x) ** 2 * np.eye(n)).astype(dtype)


def kahan(n: int, dtype: str, theta: float = 1.2) -> np.ndarray:
    """Return Kahan's upper triangular matrix, whose small singular value is not visible on the diagonal."""
    s, c = np.sin(theta), np.cos(theta)
    return (np.diag(s ** np.arange(n)) @ (np.eye(n) - c * np.triu(np.ones((n, n)), 1))).astype(dtype)


DEFINITE: dict[str, Callable[[int, str], np.ndarray]] = {
    "random": positive_definite,
    "hilbert": hilbert,
    "graded": graded,
    "nearly singular": nearly_singular,
}


def eps_of(A: np.ndarray) -> float:
    return float(np.finfo(A.dtype).eps)


def norm(A: np.ndarray) -> float:
    return float(np.linalg.norm(A, 1)) if A.size else 0.0


def wide(A: np.ndarray) -> np.ndarray:
    """Convert to double precision, in which errors are measured."""
    return A.astype(np.result_type(A.dtype, np.float64))


def relative(residual: np.ndarray, scale: float, dtype: Any, n: int) -> float:
    """Return |residual|_1 / (n scale u), as in SLATE's tests."""
    return norm(residual) / (max(1, n) * scale * float(np.finfo(dtype).eps) or 1)


def forbid_replicated_triangles(monkeypatch: Any, most: int) -> None:
    """Let the QR factorisation that replicates R fail if min(m, n) exceeds `most`."""
    original = tall_qr.tall_qr

    def small(A: Any, *options: Any) -> Any:
        assert min(A.shape) <= most, "n^2 words on every rank"
        return original(A, *options)

    for module in ("factors.qr", "factors.tall_qr", "singular.lstsq", "singular.singular_values"):
        monkeypatch.setattr(f"pdgemm.linalg.{module}.tall_qr", small)
