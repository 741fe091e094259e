"""A checksum of a matrix that does not depend on how the matrix is dealt out."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from pdgemm.elements import hashed, slabs


def checksum(comm: MPI.Comm, local: np.ndarray, rows: np.ndarray, cols: np.ndarray) -> str:
    """sum_ij u_i v_j bits(a_ij) mod 2^64, u and v odd hashes of the indices.  Collective over `comm`.

    local : this rank's elements;  rows, cols : their global numbers.
    Any change to a single element is seen with certainty (an odd factor has an inverse mod 2^64), an
    exchange of elements, rows or columns but for a chance of about 2^-64.  One pass over the elements.
    """
    words = max(1, local.itemsize // 8)  # a complex128 is two words, all others one
    unsigned = np.dtype(f"u{local.itemsize // words}")
    u = _weights(rows, 0)
    v = _weights((cols[:, None] * words + np.arange(words)).ravel(), 1)
    total = np.zeros(1, np.uint64)
    if local.size:
        for slab in slabs(*local.shape):
            bits = np.ascontiguousarray(local[slab]).view(unsigned).astype(np.uint64, copy=False)
            total += u[slab] @ (bits @ v)
    comm.Allreduce(MPI.IN_PLACE, total, MPI.SUM)
    return f"bilinear64:{int(total[0]):016x}"


def _weights(indices: np.ndarray, stream: int) -> np.ndarray:
    return hashed(indices, np.zeros(1, np.int64), 0, stream) | np.uint64(1)
