"""NumPy's functions of matrices, elements and attributes that arrays have, against NumPy on the whole matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layouts import drawn, matrices

from pdgemm.errors import ArgumentError, LayoutError

pytestmark = pytest.mark.mpi


def same(found: Any, expected: Any, exact: bool = True) -> bool:
    whole = found.allgather() if hasattr(found, "allgather") else np.asarray(found)
    close = np.array_equal(whole, expected) if exact else np.allclose(whole, expected)
    return whole.shape == np.shape(expected) and whole.dtype == np.asarray(expected).dtype and close


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_functions_of_elements(comm: Any, dtype: str) -> None:
    x, row = drawn((13, 8), dtype), drawn((1, 8), dtype, 1)[0]
    for A in matrices(comm, x, all_=comm.size == 4):
        assert same(np.where(np.abs(A) > 0.7, A, row), np.where(np.abs(x) > 0.7, x, row))
        assert same(np.where(np.abs(A) > 0.7, 0, A), np.where(np.abs(x) > 0.7, 0, x))
        assert same(np.round(A, 2), np.round(x, 2))
        with np.errstate(all="ignore"):
            assert dtype == "complex64" or same(np.nan_to_num(A / 0), np.nan_to_num(x / 0))
        assert same(np.isclose(A, row), np.isclose(x, row))
        for k in (-20, -3, 0, 2, 20):
            assert same(np.triu(A, k), np.triu(x, k))
            assert same(np.tril(A, k), np.tril(x, k))
        assert same(np.real(A), np.real(x)) and same(A.real, x.real)
        assert same(np.imag(A), np.imag(x)) and same(A.imag, x.imag)
        assert same(A.conj(), x.conj()) and same(A.H.real, x.T.real)
        assert (
            same(np.copy(A), x)
            and same(np.transpose(A), x.T)
            and same(np.astype(A, "complex128"), x.astype("complex128"))
        )
        assert np.count_nonzero(A) == np.count_nonzero(x)
        assert same(np.count_nonzero(np.triu(A), axis=0), np.count_nonzero(np.triu(x), axis=0))
        if dtype == "float64":
            assert same(np.clip(A, -0.5, row), np.clip(x, -0.5, row))
            assert same(np.clip(A, None, 0.1), np.clip(x, None, 0.1))
        assert np.array_equal(A, A.copy()) and not np.array_equal(A, A + 1) and not np.array_equal(A, A.T)
        assert np.allclose(A, A * (1 + 1e-7)) and not np.allclose(A, A + 1)


def test_equal_nan_and_other_layouts(comm: Any) -> None:
    x = drawn((13, 13), "float64")
    x[2, 3] = x[3, 2] = np.nan
    for A in matrices(comm, x, all_=False):
        B = A.T.copy().redistribute(like=A)
        assert not np.array_equal(A, A)
        assert np.array_equal(A, A, equal_nan=True)
        assert np.allclose(A, A, equal_nan=True) and not np.allclose(A, B, equal_nan=True)
        assert np.allclose(A + A.T, (B + B.T).T, equal_nan=True)
        assert np.array_equal(np.where(A < A.T, A, A.T).allgather(), np.where(x < x.T, x, x.T), equal_nan=True)


def test_matrices_like_others(comm: Any) -> None:
    x = drawn((13, 8), "float32")
    for A in matrices(comm, x, all_=False):
        for made, expected in (
            (np.zeros_like(A), np.zeros_like(x)),
            (np.ones_like(A, dtype="int32"), np.ones_like(x, dtype="int32")),
            (np.full_like(A, 2.5), np.full_like(x, 2.5)),
        ):
            assert same(made, expected) and made.same_layout(A)
        assert np.empty_like(A).same_layout(A)
        assert (len(A), A.size, A.nbytes, A.ndim, A.shape) == (13, 104, 416, 2, (13, 8))
        made.fill(7)
        assert same(made, np.full_like(x, 7))


def test_products(comm: Any) -> None:
    x, y = drawn((13, 8), "complex128"), drawn((13, 8), "complex128", 1)
    for A, B in zip(matrices(comm, x, all_=False), matrices(comm, y, all_=False)):
        B = B.redistribute(like=A)
        assert same(np.dot(A, B.T), np.dot(x, y.T), exact=False)
        assert same(np.dot(A, 2), np.dot(x, 2)) and same(np.inner(A, B), np.inner(x, y), exact=False)
        assert np.isclose(np.vdot(A, B), np.vdot(x, y))
        for text in (
            "ij,kj->ik",
            "ij,kj->ki",
            "ij,kj",
            "ji,jk->ik",
            "ij,ij->ij",
            "ij,ij->ji",
            "ij,ij->",
            "ij,ij->i",
            "ij,ij->j",
        ):
            found, expected = np.einsum(text, A, B), np.einsum(text, x, y)
            assert same(found, expected, exact=False) or np.isclose(found, expected).all(), text
        assert same(np.einsum("ij, jk -> ik", A, B.T), x @ y.T, exact=False)
        assert same(np.einsum("ij,ji->ij", A, B.T), x * y, exact=False)


def test_side_by_side(comm: Any) -> None:
    x, y = drawn((13, 8), "float64"), drawn((13, 8), "float32", 1)
    for A, B in zip(matrices(comm, x, all_=False), matrices(comm, y, all_=False)):
        B = B.redistribute(like=A)
        assert same(np.vstack((A, B, A)), np.vstack((x, y, x)))
        assert same(np.hstack([A, B]), np.hstack([x, y]))
        assert same(np.concatenate((A, B[:, :3]), axis=1), np.concatenate((x, y[:, :3]), axis=1))
        assert same(np.concatenate((A.T, B.T), axis=-2), np.concatenate((x.T, y.T), axis=-2))


def test_elements_rows_and_columns(comm: Any) -> None:
    x = drawn((13, 8), "float64")
    for A in matrices(comm, x, all_=False):
        assert same(A[3], x[3]) and same(A[-1, :], x[-1]) and same(A[:, 5], x[:, 5]) and same(A[2:7, -2], x[2:7, -2])
        assert A[4, 6] == x[4, 6] and A[np.int64(12), -1] == x[12, -1]
        assert np.array_equal(A.T[6], x[:, 6])
        B = A.copy()
        B[2] = 5
        B[:, 3] = 6
        B[-1, -1] = 7
        y = x.copy()
        y[2], y[:, 3], y[-1, -1] = 5, 6, 7
        assert same(B, y)
        for outside in ((13, 0), (0, 8), (-14, 0)):
            with pytest.raises(ArgumentError, match=r"index -?\d+ is out of range"):
                A[outside]
        for wrong in (A > 0, None, True, (1, 2, 3)):
            with pytest.raises(ArgumentError, match="submatrix|elements of a mask"):
                A[wrong]


def test_what_is_not_there_says_what_to_do(comm: Any) -> None:
    for A in matrices(comm, drawn((6, 6), "float64"), all_=False):
        calls: list[tuple[Any, ...]] = [
            (np.einsum, "ij,jk,kl->il", A, A, A),
            (np.einsum, "ii->i", A),
            (np.einsum, "ij,kl->ijkl", A, A),
            (np.triu, A, A),
            (np.clip, A, 2),
            (np.astype, A, A),
            (np.concatenate, (A, np.zeros((6, 6)))),
            (np.where, A > 0),
            (np.unique, A),
            (np.linalg.eig, A),
        ]
        for function, *arguments in calls:
            with pytest.raises(TypeError, match=r"DistMatrix|only matrices are joined"):
                function(*arguments)
        with pytest.raises(TypeError, match="zeros_like with these arguments .*shape"):
            np.zeros_like(A, shape=(2, 2))
        with pytest.raises(LayoutError, match="do not fit side by side"):
            np.vstack((A, A[:, :3]))
