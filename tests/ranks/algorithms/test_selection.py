"""Rows and columns selected by lists, steps and masks, and assigned elements, compared with NumPy's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pdgemm import DistMatrix, ProcessGrid, assign, select
from pdgemm.errors import ArgumentError, DTypeError, LayoutError

pytestmark = pytest.mark.mpi

M, N = 23, 17
ROWS = np.arange(M)
KEYS: list[Any] = [
    slice(None, None, 2),
    slice(None, None, -1),
    [5, 0, 5, -1, 3],
    (slice(None), [0, 2, 1, 3]),  # not consecutive, but last - first = length - 1
    ROWS % 3 == 0,
    ROWS < 0,
    range(0, M, 4),
    (slice(1, 12), [1, 0, 4]),
    (slice(None, None, 3), slice(None, None, -2)),
    np.ix_([3, 1], [2, 2, 0]),
    ([2, 9, 1], 3),
    (4, slice(None, None, -1)),
    (..., 0),
    (ROWS % 2 == 1, slice(3, 9)),
]


def layouts(comm: Any, whole: np.ndarray) -> Iterator[tuple[Any, np.ndarray]]:
    """Yield (matrix, array): in shared or private memory, cyclic or even, transposed, conjugated, or on one rank."""
    with ProcessGrid(comm) as grid, ProcessGrid(comm, (1, 1), ranks=[comm.size - 1]) as one:
        yield DistMatrix.from_global(whole, grid=grid, block=(3, 2)), whole
        yield DistMatrix.from_global(whole, grid=grid).copy(), whole
        yield DistMatrix.from_global(whole.T, grid=grid, block=(2, 5), source=(grid.shape[0] - 1, 0)).T, whole
        wide = np.pad(whole * (1 + 2j), ((2, 1), (1, 3)))
        part = slice(2, 2 + M), slice(1, 1 + N)
        yield DistMatrix.from_global(wide.T, grid=grid, block=4)[part[::-1]].H, wide[part].conj()
        yield DistMatrix.from_global(whole, grid=one), whole


def test_rows_and_columns_are_selected_by_one_counted_exchange(comm: Any) -> None:
    whole = np.random.default_rng(0).standard_normal((M, N))
    for A, x in layouts(comm, whole):
        for key in KEYS:
            found, expected = A[key], x[key]
            if expected.ndim == 2:
                assert found.report.counted == found.report.predicted
                assert sum(comm.allgather(found.report.counted.words_received)) == moved(A, found, key)
                A.local[...] if A.conjugated else A.local.fill(0)  # the selection is a copy: A may change
                found, whole_again = found.allgather(), A
                if not A.conjugated:
                    whole_again[...] = x
            assert found.dtype == expected.dtype and np.array_equal(found, expected), key


def moved(A: Any, found: Any, key: Any) -> int:
    """Return the number of selected elements that are on another rank in A than in the result."""
    rows, cols = np.meshgrid(*(np.arange(n) for n in A.shape), indexing="ij")
    rows, cols = rows[key], cols[key]
    i, j = A.distribution.owner(rows, cols)
    to_i, to_j = found.distribution.owner(*np.indices(found.shape))
    return int(((i != to_i) | (j != to_j)).sum())


def test_elements_are_set_to_numbers_arrays_and_matrices(comm: Any) -> None:
    drawn = np.random.default_rng(1)
    whole = drawn.standard_normal((M, N))
    for A, x in layouts(comm, whole):
        if A.conjugated:
            with pytest.raises(ValueError, match="conjugate"):
                A[1] = 0
            continue
        B, y = A.copy(), x.copy()
        for key in [*KEYS, 1, (slice(None), 2), (slice(2, 9), slice(1, 4)), (3, 5)]:
            shape = np.shape(y[key])
            for value in (7.0, drawn.standard_normal(shape), drawn.standard_normal(shape[-1:])):
                B[key] = value
                y[key] = value
            matrix = drawn.standard_normal(shape)
            column = len(shape) == 1 and isinstance(key, tuple) and key[1] in (0, 2, 3)
            thin = matrix.reshape(-1, 1) if column else np.atleast_2d(matrix)
            B[key] = DistMatrix.from_global(thin, grid=A.grid, block=2)
            y[key] = matrix
            assert np.array_equal(B.allgather(), y), key
        B[[1, 0, 3, 2]] = B[0:4]  # overlapping source and target
        y[[1, 0, 3, 2]] = y[0:4].copy()
        B[1] += 1
        B[:, 0] *= 2
        B[2:4, 1:3] = np.ones((2, 2))
        B[2, 3] -= 1
        y[1] += 1
        y[:, 0] *= 2
        y[2:4, 1:3] = 1
        y[2, 3] -= 1
        B[5:8] = B[9:10]  # broadcast
        y[5:8] = y[9:10]
        B[B > 0.5] = 0
        B[y < -1] = 9
        y[y > 0.5] = 0
        y[y < -1] = 9
        assert np.array_equal(B.allgather(), y)


def test_bad_selections_raise_on_all_ranks_and_change_nothing(comm: Any, grid: Any) -> None:
    whole = np.arange(30.0).reshape(6, 5)
    A = DistMatrix.from_global(whole, grid=grid, block=2)
    outside = "out of range"
    for key, message in (
        ((6, 0), outside),
        ((0, -6), outside),
        ([0, 6], outside),
        ((slice(2), [-6]), outside),
        (np.ones(5, bool), "a mask of 5 rows for a dimension of 6"),
        (A > 3, "numpy.where"),
        (whole > 3, "numpy.where"),
        (([0, 1], [0, 1]), "numpy.ix_"),
        ([0.5], "whole numbers"),
        ([[0, 1]], "one dimension"),
        (None, "got None"),
        (True, "got True"),
        (1.5, "got 1.5"),
        ((1, 2, 3), "two dimensions"),
        ((..., 1, ...), "two dimensions"),
        ("x", "got 'x'"),
    ):
        with pytest.raises(IndexError, match=message):
            A[key]
        with pytest.raises(ArgumentError, match=message):
            A[key]
    for key, value, error, message in (
        (slice(2), np.ones((3, 5)), LayoutError, r"\(3, 5\) cannot be broadcast to 2 x 5"),
        ([0, 2], A, LayoutError, "cannot be broadcast to 2 x 5"),
        (1, np.ones(4), LayoutError, "cannot be broadcast to 1 x 5"),
        (1, np.ones(5) * 1j, DTypeError, "cannot become float64"),
        (1, A[:1].astype("D"), DTypeError, "cannot become float64"),
        ([1], A[:1].astype("D"), DTypeError, "cannot become float64"),
        (1, ["x"] * 5, TypeError, "elements are numbers"),
        (A > 3, np.ones(5), ArgumentError, r"numpy.where\(mask, B, A\)"),
        (A, 1, LayoutError, "truth values"),
        ((slice(2), 9), 0, IndexError, outside),
    ):
        with pytest.raises(error, match=message):
            A[key] = value
    for call in (lambda: select(A, [9]), lambda: assign(A, [9], A), lambda: assign(A, [0], A)):
        with pytest.raises((IndexError, LayoutError)):
            call()
    if comm.size > 1:  # arguments that differ among the ranks
        last = comm.rank == comm.size - 1
        for differs in (
            lambda: A[[0, 1 + last]],
            lambda: A.__setitem__(1, np.full(5, float(last))),
            lambda: A.__setitem__([1 + last], 1),
            lambda: A.__setitem__(A > 3, 1.0 + last),
            lambda: A.__setitem__(whole > 3 + last, 1.0),
            lambda: A + np.full((6, 5), float(last)),
            lambda: A.allclose(np.full((6, 5), float(last))),
        ):
            with pytest.raises(ArgumentError, match="different arguments"):
                differs()
    assert np.array_equal(A.allgather(), whole)


def test_arrays_that_are_on_every_rank_are_operands(comm: Any) -> None:
    for A, x in layouts(comm, np.random.default_rng(2).standard_normal((M, N))):
        other = x[::-1].copy()
        for found, expected in (
            (A + other, x + other),
            (other - A, other - x),
            (A * other, x * other),
            (A / other, x / other),
            (other >= A, x <= other),
            (np.isclose(A, other), np.isclose(x, other)),
            (A[:1, :] + other, x[:1] + other),
        ):
            assert np.array_equal(found.allgather(), expected)
        assert np.allclose(A, x) and A.allclose(x) and not A.allclose(other) and A.allclose(x.astype("F"), rtol=1e-3)


def test_numpys_names_of_selections(comm: Any) -> None:
    for A, x in layouts(comm, np.random.default_rng(3).standard_normal((M, N))):
        assert np.array_equal(A.mT.allgather(), x.T) and A.itemsize == x.itemsize
        assert A.astype(A.dtype, copy=False) is A and A.astype(A.dtype) is not A
        assert np.astype(A, A.dtype, copy=False) is A and A.astype("F", copy=False).dtype == "complex64"
