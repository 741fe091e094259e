"""Sorts, searches, sets, cumulative sums and differences of tensors and of arrays, compared with NumPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tiers
from drawn_tensors import elements, tensor_of

from pdgemm import DistTensor, array_api
from pdgemm.array_api import Array
from pdgemm.errors import ArgumentError, DTypeError

pytestmark = [pytest.mark.mpi, tiers.every_grid]

DTYPES = ("float64", "complex64", "int32", "float32", "uint8", "bool", "uint64")


def check(result: Any, expected: Any, what: Any, error: float = 0.0) -> None:
    expected = np.asarray(expected)
    assert result.shape == expected.shape, what
    assert result.dtype == expected.dtype, what
    if isinstance(result, DistTensor):
        assert result.report is None or result.report.counted == result.report.predicted, what
        result = result.allgather()
    if error:
        assert np.allclose(result, expected, error, error, equal_nan=True), what
    else:
        assert np.array_equal(result, expected, equal_nan=expected.dtype.kind in "fc"), what


class Case:
    """A drawn tensor, and the same array of NumPy."""

    def __init__(self, grids: list[Any], seed: int) -> None:
        self.draw, self.seed = random.Random(seed), seed
        self.source = np.random.default_rng(seed)
        self.grid, self.kind = self.draw.choice(grids), self.draw.choice((DistTensor, Array))
        self.dtype = np.dtype(self.draw.choice(DTYPES))
        self.x = self.elements(self.draw.choice((1, 1, 2, 3)))
        self.X = self.tensor(self.x)
        self.what = seed, self.x.shape, self.dtype, self.X.layout
        self.axis = self.draw.randrange(-self.x.ndim, self.x.ndim) if self.x.ndim else 0

    def elements(self, most: int) -> np.ndarray:
        x = elements(tuple(self.draw.choice((0, 1, 2, 3, 5, 8, 17)) for _ in range(self.draw.randint(0, most))),
                     self.dtype, self.draw.randrange(99))  # fmt: skip
        x = np.round(x) + 0 if x.dtype.kind in "fc" and self.draw.random() < 0.5 else x  # some are equal
        x = x.astype(self.dtype)
        if x.size and self.dtype.kind == "f" and self.draw.random() < 0.3:
            x.reshape(-1)[self.draw.randrange(x.size)] = np.nan
        return x

    def tensor(self, x: Any) -> Any:
        T = tensor_of(np.asarray(x), self.grid, self.draw)
        return self.kind(T.unfolding, T.layout)


def cases(grids: list[Any], seed: int, number: int) -> Any:
    number *= 6 if tiers.everything() else 2 if grids[0].comm.size < 3 else 1
    return (Case(grids, 1000 * seed + turn) for turn in range(number))


def test_sorts(grids: list[Any]) -> None:
    for case in cases(grids, 1, 16):
        x, X, axis = case.x, case.X, case.axis
        if not x.ndim:
            continue
        check(np.argsort(X, axis), np.argsort(x, axis, stable=True), case.what)
        if x.dtype.kind == "c":
            continue
        check(np.sort(X, axis), np.sort(x, axis), case.what)
        check(np.sort(X, None), np.sort(x, None), case.what)
        if not (x != x).any():
            back = np.argsort(-x.astype(object), axis, kind="stable").astype(np.int64)
            check(array_api.argsort(X, axis=axis, descending=True), back, case.what)
            check(array_api.sort(X, axis=axis, descending=True), np.take_along_axis(x, back, axis), case.what)


def test_searches(grids: list[Any]) -> None:
    for case in cases(grids, 2, 12):
        x, X, draw = case.x, case.X, case.draw
        axis, keepdims = draw.choice((None, *range(-x.ndim, x.ndim))), draw.random() < 0.5
        for name in ("argmax", "argmin", "count_nonzero") if x.size else ("count_nonzero",):
            f = getattr(np, name)
            check(f(X, axis=axis, keepdims=keepdims), f(x, axis=axis, keepdims=keepdims), (name, axis, *case.what))
        for one, expected in zip(np.nonzero(X) if x.ndim else (), np.nonzero(x) if x.ndim else ()):
            check(one, expected, case.what)
        if x.dtype.kind == "c":
            continue
        y = case.elements(2)
        Y = case.tensor(y) if draw.random() < 0.7 else y
        check(np.isin(X, Y), np.isin(x, y), case.what)
        check(array_api.isin(X, Y, invert=True), np.isin(x, y, invert=True), case.what)
        ordered = np.sort(x, None)
        order = draw.sample(range(x.size), x.size)
        sorter = np.argsort(np.array(order, np.int64)) if draw.random() < 0.5 else None
        shuffled = ordered if sorter is None else ordered[order]
        side: Any = draw.choice(("left", "right"))
        result = np.searchsorted(case.tensor(shuffled), Y, side, None if sorter is None else case.tensor(sorter))
        check(result, np.searchsorted(shuffled, y, side, sorter), (side, y, *case.what))


def test_sets(grids: list[Any]) -> None:
    for case in cases(grids, 3, 6):
        equal_nan = case.draw.random() < 0.5
        results = np.unique(case.X, True, True, True, equal_nan=equal_nan)
        for one, expected in zip(results, np.unique(case.x, True, True, True, equal_nan=equal_nan)):
            check(one, expected, case.what)
        name = case.draw.choice(("unique_all", "unique_counts", "unique_inverse"))
        result, known = (getattr(np, name)(x) for x in (case.X, case.x))
        assert result._fields == known._fields
        for one, expected in zip(result, known):
            check(one, expected, case.what)
        check(np.unique_values(case.X), np.unique(case.x, equal_nan=False), case.what)


def test_functions_along_an_axis(grids: list[Any]) -> None:
    for case in cases(grids, 4, 12):
        x, X, draw, axis = case.x, case.X, case.draw, case.axis
        if not x.ndim:
            continue
        error = 1e-4 if x.dtype in ("float32", "complex64") else 1e-12
        one = draw.choice((axis, None))
        check(np.cumsum(X, one), np.cumsum(x, one), case.what, error)
        if x.dtype.kind != "b":
            initial = draw.random() < 0.5
            for name in ("cumulative_sum", "cumulative_prod"):
                result, expected = (getattr(np, name)(a, axis=axis, include_initial=initial) for a in (X, x))
                check(result, expected, (name, axis, *case.what), error)
        n = draw.randint(0, 3)
        check(np.diff(X, n, axis), np.diff(x, n, axis), (n, *case.what), error)
        end = x.take([0], axis) if x.shape[axis] else x
        check(np.diff(X, 1, axis, end), np.diff(x, 1, axis, end), case.what, error)
        if x.shape[axis]:
            i = case.source.integers(-x.shape[axis], x.shape[axis], draw.randint(0, 9))
            check(np.take(X, draw.choice((i, case.tensor(i))), axis), np.take(x, i, axis), case.what)
            shape = [draw.randint(0, 6) if a == axis % x.ndim else draw.choice((1, n)) for a, n in enumerate(x.shape)]
            i = case.source.integers(-x.shape[axis], x.shape[axis], shape)
            result = np.take_along_axis(X, draw.choice((i, case.tensor(i))), axis)
            check(result, np.take_along_axis(x, i, axis), (axis, shape, *case.what))


def test_no_rank_has_a_whole_vector(comm: Any, grid: Any) -> None:
    """Each rank sends its elements at most once, and has its even share of each result."""
    n = 1000
    x = (np.arange(n) * 7919) % 211
    X = Array.from_global(x, grid=grid)
    share = -(-n // comm.size)
    results = [np.sort(X), np.argsort(X), np.cumsum(X), np.nonzero(X)[0], *np.unique_all(X)]
    assert all(r.local.size <= share for r in results)
    if comm.size > 1:
        sort, argsort, sums = (r.report.counted.words_received for r in results[:3])
        assert sort <= share
        assert argsort <= 2 * share
        assert sums <= 2 * comm.size


@pytest.mark.on_ranks(2, 3)
def test_bad_arguments_raise_the_same_error_on_all_ranks(comm: Any, grid: Any) -> None:
    X = Array.from_global(np.ones((3, 4)), grid=grid)
    calls: tuple[tuple[Any, type, str], ...] = (
        (lambda: np.sort(X[0] + 1j), DTypeError, "sort of complex numbers"),
        (lambda: np.sort(X, 2), ArgumentError, "axis=2 of a tensor"),
        (
            lambda: np.argmax(X[:, :0], axis=1),
            ArgumentError,
            r"argmax of no elements: axis=1 of a tensor of shape \(3, 0",
        ),
        (lambda: np.nonzero(X[0, 0]), ArgumentError, "at least one axis"),
        (lambda: np.searchsorted(X, 1), ArgumentError, "a sorted tensor of one axis"),
        (lambda: np.searchsorted(X[0], 1, "middle"), ArgumentError, "middle"),  # type: ignore[call-overload]
        (lambda: np.cumulative_sum(X), ArgumentError, "along one axis: name it"),
        (lambda: np.diff(X, -1), ArgumentError, "0 or more times, got n=-1"),
        (lambda: np.take_along_axis(X, X, 0), ArgumentError, "whole numbers or truth values, got float64"),
        (lambda: np.take_along_axis(X, X[0], 0), ArgumentError, "as many axes as the tensor's 2 are needed"),
        (lambda: np.unique(X, axis=0), TypeError, "axis"),
    )
    for call, error, message in calls:
        with pytest.raises(error, match=message) as raised:
            call()
        assert len({*comm.allgather(str(raised.value))}) == 1
