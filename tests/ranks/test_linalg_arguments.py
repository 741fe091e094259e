"""Functions of linear algebra whose arguments overlap, or differ among the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.mpi


def test_what_overlaps_or_differs_raises_on_all_ranks(comm: Any) -> None:
    from pdgemm import DistMatrix, ProcessGrid, linalg
    from pdgemm.errors import ArgumentError, DTypeError

    grid, first = ProcessGrid(comm), comm.rank == 0
    a = np.random.default_rng(1).standard_normal((12, 12)) + 12 * np.eye(12)
    A = DistMatrix.from_global(a + 1j * a.T, grid=grid, block=2)
    S = DistMatrix.from_global(a @ a.T, grid=grid, block=2)
    b = np.ones(12)
    for B in (S, S.T, S[:, 2:5]):
        with pytest.raises(ArgumentError, match="shares memory"):
            linalg.solve(S, B, overwrite_a=True)
    M = DistMatrix.from_global(np.c_[a, b], grid=grid, block=2)
    X = linalg.solve(M[:, :12], M[:, 12:], overwrite_a=True, overwrite_b=True)  # beside each other
    assert np.allclose(a @ X.allgather()[:, 0], b)
    with pytest.raises(DTypeError, match="factors must be an LU"):
        linalg.lu_solve((S, b), b)
    if comm.size == 1:
        return
    for call in (
        lambda: linalg.gram(S, uplo="L" if first else "full"),
        lambda: linalg.solve(S, S.copy(), assume_a="pos", overwrite_b=first),
        lambda: linalg.solve(S, b if first else S, refine=True),
        lambda: linalg.solve(S, b + first, refine=True),
        lambda: linalg.solve(S, b + first, assume_a="diagonal"),
        lambda: linalg.solve(A, A.H.T if first else A),
        lambda: linalg.solve_triangular(A.H if first else A.T, b),
        lambda: linalg.cholesky(A.H.T if first else A),
        lambda: linalg.lu_factor(A.H.T if first else A),
    ):
        with pytest.raises(ArgumentError, match="different arguments"):
            call()


def test_the_power_0_of_nan_is_the_identity(comm: Any) -> None:
    from pdgemm import DistMatrix, ProcessGrid, linalg

    A = DistMatrix.from_global(np.full((5, 5), np.nan), grid=ProcessGrid(comm), block=2)
    assert np.array_equal(linalg.matrix_power(A, 0).allgather(), np.eye(5))


def test_nan_is_not_positive_definite(comm: Any) -> None:
    """NaN in the triangle that is read, on the diagonal or beside it."""
    from pdgemm import DistMatrix, ProcessGrid, linalg
    from pdgemm.errors import LinAlgError

    with ProcessGrid(comm) as grid:
        for at in ((4, 4), (9, 3)):
            S = 12 * np.eye(12)
            S[at] = np.nan
            with pytest.raises(LinAlgError, match=rf"its leading minor of order {at[0] + 1} is not"):
                linalg.cholesky(DistMatrix.from_global(S, grid=grid, block=2))
