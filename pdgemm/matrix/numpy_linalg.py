"""NumPy's functions of linear algebra that `pdgemm.linalg` computes, with NumPy's names and parameters.

All functions are collective over the grid.  They call `pdgemm.linalg`, a folder above `matrix`, by its public name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pdgemm
from pdgemm.local.arrays.integers import as_name


def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    return linalg("svd")(a, full_matrices=full_matrices) if compute_uv else linalg("svdvals")(a)


def eigh(a: Any, UPLO: str = "L") -> Any:
    return linalg("eigh")(a, lower=as_name(UPLO, "UPLO", ("L", "U")) == "L")


def eigvalsh(a: Any, UPLO: str = "L") -> Any:
    return linalg("eigvalsh")(a, lower=as_name(UPLO, "UPLO", ("L", "U")) == "L")


def qr(a: Any, mode: str = "reduced") -> Any:
    if mode not in ("reduced", "r"):
        raise TypeError("numpy.linalg.qr of a DistMatrix has mode 'reduced' or 'r'")
    return linalg("qr")(a, mode=mode)


def pinv(a: Any, rcond: float | None = None, hermitian: bool = False, *, rtol: float | None = None) -> Any:
    return linalg("pinv")(a, rtol=rtol if rcond is None else rcond)


def matrix_rank(A: Any, tol: float | None = None, hermitian: bool = False, *, rtol: float | None = None) -> Any:
    return linalg("matrix_rank")(A, tol, rtol=rtol)


def lstsq(a: Any, b: Any, rcond: float | None = None) -> Any:
    return linalg("lstsq")(a, b, rcond=rcond)


def linalg(name: str) -> Callable[..., Any]:
    """Return a function of `pdgemm.linalg`."""
    return getattr(pdgemm.linalg, name)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"numpy.linalg.{function.__name__}": function for function in (svd, eigh, eigvalsh, qr, lstsq, pinv, matrix_rank)
}
FUNCTIONS |= {
    "numpy.kron": lambda a, b: linalg("kron")(a, b),
    "numpy.linalg.cholesky": lambda a, /, *, upper=False: linalg("cholesky")(a, lower=not upper),
    "numpy.linalg.cond": lambda x, p=None: linalg("cond")(x, p),
    "numpy.linalg.det": lambda a: linalg("det")(a),
    "numpy.linalg.inv": lambda a: linalg("inv")(a),
    "numpy.linalg.matrix_norm": lambda x, /, *, ord="fro": linalg("norm")(x, ord),
    "numpy.linalg.matrix_power": lambda a, n: linalg("matrix_power")(a, n),
    "numpy.linalg.slogdet": lambda a: linalg("slogdet")(a),
    "numpy.linalg.solve": lambda a, b: linalg("solve")(a, b),
    "numpy.linalg.svdvals": lambda x: linalg("svdvals")(x),
}
