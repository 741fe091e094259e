"""Names of NumPy and SciPy in `pdgemm.linalg`, and the names that messages advise: each is there and can be called."""

from __future__ import annotations

import re
from importlib import import_module
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import rng_matrix

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, LinAlgError
from pdgemm.matrix import numpy_functions

pytestmark = pytest.mark.mpi


def test_names_of_scipy_and_numpy_do_what_theirs_do(comm: Any) -> None:
    rng = np.random.default_rng(2)
    x, b = rng.standard_normal((9, 9)) + 1j * rng.standard_normal((9, 9)), np.arange(9) + 1j
    h, low = x @ x.conj().T + np.eye(9), x[:, :3] @ x[:3, :6]
    with ProcessGrid(comm) as grid:
        A, H, L = (DistMatrix.from_global(np.ascontiguousarray(y), grid=grid, block=2) for y in (x, h, low))
        functions: Any = np.linalg
        for of in (linalg, functions):
            assert np.allclose(of.svdvals(L), scipy.linalg.svdvals(low))
            assert np.allclose(of.eigvalsh(H), scipy.linalg.eigvalsh(h))
            assert of.matrix_rank(L) == of.matrix_rank(L.T) == 3 == np.linalg.matrix_rank(low)
            assert of.matrix_rank(A, 4.0) == np.linalg.matrix_rank(x, 4.0)
            assert np.allclose(of.pinv(L).allgather(), scipy.linalg.pinv(low))
            assert np.allclose(of.pinv(L.T).allgather(), scipy.linalg.pinv(low.T))
        assert np.allclose(linalg.pinv(A, atol=1.5).allgather(), scipy.linalg.pinv(x, atol=1.5, rtol=0), atol=1e-10)
        upper = DistMatrix.from_global(np.triu(h) + np.tril(x, -1), grid=grid)
        assert np.allclose(linalg.eigvalsh(upper, lower=False), scipy.linalg.eigvalsh(h))
        empty = L[:0]
        assert linalg.svdvals(empty).shape == (0,) and linalg.matrix_rank(empty) == 0
        assert linalg.pinv(empty).shape == (6, 0)
        U, s, Vh = linalg.svd(A, full_matrices=False)
        assert np.allclose((U * s @ Vh).allgather(), x) and len(linalg.svd(A, full_matrices=True)) == 3
        for lower in (False, True):
            pair = linalg.cho_factor(H, lower=lower)
            assert np.allclose(linalg.cho_solve(pair, b), np.linalg.solve(h, b)) and pair[1] is lower
        lu, piv = linalg.lu_factor(A)
        exact, pivots = scipy.linalg.lu_factor(x)
        assert np.allclose(lu.allgather(), exact) and np.array_equal(piv, pivots)
        for trans in ("N", "T", "C"):
            solved = linalg.lu_solve((lu, piv), b, trans=trans)  # type: ignore[arg-type]
            assert np.array_equal(solved, linalg.lu_solve(linalg.lu_factor(A), b, trans=trans))  # type: ignore[arg-type]
        with pytest.raises(LinAlgError, match="pivot 4 of 5 is zero"):
            linalg.lu_solve((*linalg.lu_factor(DistMatrix.from_global(np.diag([1.0, 1, 1, 0, 1]), grid=grid)),), b[:5])
        for wrong in (piv[:-1], piv - 9, piv.astype(float), None):
            with pytest.raises(ArgumentError, match="pivots must be 9 row numbers below 9"):
                linalg.lu_solve((lu, wrong), b)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="tol or rtol, not both"):
            linalg.matrix_rank(A, 1.0, rtol=1.0)
        with pytest.raises(ArgumentError, match="rtol must be a real number"):
            linalg.pinv(A, rtol=np.nan)


@pytest.mark.parametrize("dtype", ["f", "d", "F", "D"])
def test_rank_and_pseudoinverse_of_any_shape(comm: Any, dtype: str) -> None:
    """Wide and tall matrices, of every rank, one row, one column, zeros: as NumPy and SciPy."""
    with ProcessGrid(comm) as grid:
        for m, n, rank in ((12, 7, 7), (7, 12, 7), (7, 12, 3), (9, 9, 5), (1, 8, 1), (8, 1, 1), (1, 1, 1), (5, 6, 0)):
            whole = (rng_matrix(m, rank, dtype, 1) @ rng_matrix(rank, n, dtype, 2)).astype(dtype)
            A = DistMatrix.from_global(whole, grid=grid, block=(2, 3))
            assert linalg.matrix_rank(A) == np.linalg.matrix_rank(whole) == rank
            X, expected = linalg.pinv(A), scipy.linalg.pinv(whole)
            assert X.shape == (n, m) and X.dtype == dtype
            condition = np.linalg.norm(whole, 2) * np.linalg.norm(expected, 2)
            bound = 30 * max(m, n) * np.finfo(dtype).eps * condition * (np.linalg.norm(expected, 2) or 1)
            assert np.linalg.norm(X.allgather() - expected, 2) <= bound
        assert linalg.matrix_rank(A, rtol=0) == 0 and linalg.matrix_rank(A + 1, 1e3) == 0


def test_every_name_that_a_message_advises_can_be_called(comm: Any) -> None:
    advice = numpy_functions._INSTEAD.values()
    names = sorted({*re.findall(r"\b(?:pdgemm|numpy|hdf5)(?:\.\w+)+", " ".join(advice))})
    assert "pdgemm.linalg.solve" in names and "hdf5.save" in names
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(np.eye(4) * 2, grid=grid)
        for name in names:
            module = "pdgemm.io" if name.startswith("hdf5") else name.split(".")[0]
            if module != "numpy":
                import_module(".".join(["pdgemm.io.hdf5"] if module == "pdgemm.io" else name.split(".")[:-1]))
            function = attrgetter(name.removeprefix("pdgemm.").removeprefix("numpy."))(import_module(module))
            assert callable(function), name
            if name.startswith("pdgemm.linalg"):
                assert function(*([A] * (1 + ("solve" in name)))) is not None
        for attribute in re.findall(r"\bA\.(\w+)", " ".join(advice)):
            assert hasattr(A, attribute), attribute
