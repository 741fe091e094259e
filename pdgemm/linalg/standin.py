"""Stand-ins, on one rank, until the factorisations are merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from pdgemm.errors import LinAlgError
from pdgemm.linalg.iterations import on_one_rank
from pdgemm.matrix.distmatrix import DistMatrix


def _spread(A: DistMatrix, whole: Any) -> DistMatrix:
    return DistMatrix.from_global(whole, grid=A.grid.base, device=A.device)


def inv(A: DistMatrix) -> DistMatrix:
    whole = A.allgather()

    def inverted() -> Any:
        try:
            return np.linalg.inv(whole)
        except np.linalg.LinAlgError as bad:
            raise LinAlgError(str(bad)) from None

    return _spread(A, on_one_rank(A, inverted)).redistribute(like=A)


def lu_factor(A: DistMatrix, *, overwrite_a: bool = False) -> Any:
    lu = scipy.linalg.lu_factor(A.allgather())
    if (np.diag(lu[0]) == 0).any():
        raise LinAlgError("singular")
    return lu


def lu_solve(LU: Any, B: DistMatrix, *, trans: str = "N") -> DistMatrix:
    solve: Any = scipy.linalg.lu_solve
    return _spread(B, solve(LU, B.allgather(), trans="NTC".index(trans)))
