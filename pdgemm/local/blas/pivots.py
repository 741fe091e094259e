"""QR factorisations with column pivoting on one rank, by LAPACK."""

from __future__ import annotations

import numpy as np

from pdgemm.local.arrays.device import Array, empty, of, to_host
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.blas.local_lapack import call_lapack, keep_triangle, reflect

_BLOCK = 32  # columns that LAPACK may reflect at once with the workspace that is allocated


def reflect_in_turn(A: Array, order: np.ndarray) -> Array:
    """Overwrite A with R and reflectors of A[:, order], as `local_lapack.reflect`, and return tau.  Local.

    order : overwritten with the order of LAPACK's geqp3, which takes the column that is farthest from the space of
        those before it; as they are if A has NaN or infinite elements.
    A device has no such routine: R of its geqrf is ordered on the host, and A[:, order] factored again.
    """
    order[:] = range(A.shape[1])
    if (device := of(A)) is None:
        return _geqp3(A, order) if np.isfinite(A).all() else reflect(A)
    if not A.size:
        return reflect(A)
    X = empty(A.shape, A.dtype, "F", device)
    CONVERT(X, A)
    reflect(X)
    R = np.asfortranarray(to_host(X[: X.shape[1]]))
    keep_triangle(R, lower=False)
    order[:] = pivots_of(R)
    CONVERT(X, A)
    for here, there in enumerate(order.tolist()):
        CONVERT(A[:, here : here + 1], X[:, there : there + 1])
    return reflect(A)


def pivots_of(X: np.ndarray) -> np.ndarray:
    """Return the column numbers of X in the order of LAPACK's geqp3; as they are if X has NaN or infinity.  Local.

    X : (m, n), column-major, overwritten.
    """
    order = np.arange(X.shape[1])
    if np.isfinite(X).all():
        _geqp3(X, order)
    return order


def _geqp3(A: np.ndarray, order: np.ndarray) -> np.ndarray:
    (m, n), dtype = A.shape, A.dtype
    tau, work, pivots = np.zeros(min(m, n), dtype), np.empty(2 * n + (n + 1) * _BLOCK, dtype), np.zeros(n, np.intc)
    if A.size:
        real = [np.empty(2 * n, np.finfo(dtype).dtype)] if dtype.kind == "c" else []
        call_lapack("geqp3", dtype, m, n, A, pivots, tau, work, work.size, *real)
        order[:] = pivots - 1
    return tau
