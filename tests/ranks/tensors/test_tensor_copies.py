"""Functions that reverse, shift, repeat, join or pick elements of tensors in all kinds of layouts, as NumPy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tiers
from drawn_tensors import elements, tensor_of

from pdgemm import DistTensor
from pdgemm.errors import ArgumentError, LayoutError

pytestmark = [pytest.mark.mpi, tiers.every_grid]


def check(result: Any, expected: Any, where: Any) -> None:
    """Compare a tensor, or a value that is on every rank, with NumPy's."""
    got, expected = result.allgather() if isinstance(result, DistTensor) else np.asarray(result), np.asarray(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), where
    assert np.allclose(got, expected), where


@pytest.mark.parametrize("seed", range(4))
def test_copies_of_drawn_tensors(grids: list[Any], seed: int) -> None:
    draw, number = random.Random(seed), 60 if tiers.everything() else 8
    for turn in range(number):
        grid = draw.choice(grids)
        shape = tuple(draw.choice((0, 1, 2, 3, 5, 8)) for _ in range(draw.randint(0, 4)))
        x, n = elements(shape, draw.choice(("float64", "complex64", "int32", "uint8")), turn), len(shape)
        X = tensor_of(x, grid, draw)
        axes = tuple(axis - draw.choice((0, n)) for axis in range(n) if draw.random() < 0.5)
        where = turn, X.layout, axes
        check(np.flip(X, axes), np.flip(x, axes), where)
        check(np.flip(X) + X, np.flip(x) + x, where)  # a layout that other functions take
        if axes:
            shifts = tuple(draw.randint(-9, 9) for _ in axes)
            check(np.roll(X, shifts, axes), np.roll(x, shifts, axes), (where, shifts))
        check(np.roll(X, n - 4), np.roll(x, n - 4), where)
        times = tuple(draw.randint(0, 3) for _ in range(draw.randint(0, n + 2)))
        check(np.tile(X, times), np.tile(x, times), (where, times))
        axis = draw.choice((None, *range(-n, n)))
        many = np.array([draw.randint(0, 3) for _ in range(x.size if axis is None else shape[axis])], int)
        check(np.repeat(X, many, axis), np.repeat(x, many, axis), (where, many, axis))
        check(np.repeat(X, 3, axis), np.repeat(x, 3, axis), (where, axis))
        wide = (*times[:1], *(draw.choice((0, 4)) if extent == 1 else extent for extent in shape))
        check(np.broadcast_to(X, wide), np.broadcast_to(x, wide), (where, wide))
        if axis is not None:
            parts = np.unstack(X, axis=axis)
            assert len(parts) == shape[axis]
            for one, expected in zip(parts, np.unstack(x, axis=axis)):
                check(one, expected, where)
            kinds = [draw.choice(("float64", "complex64")) for _ in range(draw.randint(1, 3))]
            arrays = [elements(shape, kind, at) for at, kind in enumerate(kinds)]
            tensors = [tensor_of(one, grid, draw) for one in arrays]
            check(np.concatenate(tensors, axis), np.concatenate(arrays, axis), where)
            check(np.stack(tensors, axis), np.stack(arrays, axis), where)
            y, z = elements((*shape, 3), x.dtype, 1), elements(shape[-1:], "float64", 2)
            v = elements((3,), "float32", 3)
            check(np.cross(tensor_of(y, grid, draw), v), np.cross(y, v), where)
            check(np.vecdot(X.real.astype(float), tensor_of(z, grid, draw)), np.vecdot(x.real.astype(float), z), where)
            if x.dtype.kind == "c":
                check(np.vecdot(X, X, axis=axis), np.vecdot(x, x, axis=axis), where)
        if n > 1:
            k, (first, second) = draw.randint(-4, 4), draw.sample(range(n), 2)
            check(np.tril(X, k), np.tril(x, k), (where, k))
            check(np.triu(X, k), np.triu(x, k), (where, k))
            check(np.diagonal(X, k, first, second), np.diagonal(x, k, first, second), (where, k, first, second))
            check(np.trace(X, k, first, second), np.trace(x, k, first, second), (where, k, first, second))


def test_a_triangle_has_zeros_beside_nan(grids: list[Any]) -> None:
    for grid in grids:
        x = np.where(np.eye(3, dtype=bool), 1.0, np.nan)
        check(np.tril(np.triu(DistTensor.from_global(x, grid=grid))), np.eye(3), grid)


def test_further_axes_of_extent_1_are_not_divided(grids: list[Any]) -> None:
    """A tensor of few elements, which a reshape moves to a grid of more rows and columns than it has axes."""
    for grid in grids:
        x = np.arange(2.0).reshape(1, 1, 2)
        X = DistTensor.from_global(x, grid=grid, rows=(2, 1, 0), cols=())
        for shape in ((1, 1, 2, 1), (1, 2, 1), (2, 1, 1, 1, 1)):
            check(X.reshape(shape), x.reshape(shape), (grid, shape))


@pytest.mark.on_ranks(2, 4)
def test_flip_sends_nothing_and_no_rank_has_a_whole_joined_vector(grid: Any) -> None:
    X, n = DistTensor.random((64, 6), seed=1), 64
    for axis in (0, 1, None):
        flipped = np.flip(X, axis)
        moved = np.flip(X.local, axis) if X.local.size else X.local
        assert np.array_equal(flipped.local, moved)  # each rank has its own elements in reversed order
    x = DistTensor.random((n,), seed=2)
    joined = np.concatenate([x, x])
    assert joined.local.size <= -(-2 * n // grid.size)
    assert np.roll(x, 3, 0).local.size == x.local.size


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda X: np.roll(X, 1.5, 0), ArgumentError, "integers, got 1.5"),
        (lambda X: np.roll(X, (1, 2), 0), ArgumentError, "axis=0 takes as many"),
        (lambda X: np.flip(X, 7), ArgumentError, r"axis=7 of a tensor of shape \(4, 3\)"),
        (lambda X: np.tile(X, -1), ArgumentError, "at least 0, got -1"),
        (lambda X: np.repeat(X, [1, 2], 0), ArgumentError, "one or 4 of them"),
        (lambda X: np.repeat(X, -1, 0), ArgumentError, "integers from 0 on"),
        (lambda X: np.broadcast_to(X, (3, 4)), LayoutError, r"\(4, 3\) is not broadcast to \(3, 4\)"),
        (lambda X: np.tril(X.ravel()), ArgumentError, "two axes, not of a tensor"),
        (lambda X: np.vecdot(X, np.ones(4)), LayoutError, "equal extents, got 3 and 4"),
        (lambda X: np.cross(X.T, X.T), LayoutError, "3 elements, got 4 and 4"),
    ],
)
def test_bad_arguments(grid: Any, call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(DistTensor.zeros((4, 3), grid=grid))
