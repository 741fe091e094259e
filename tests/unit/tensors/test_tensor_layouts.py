"""Layouts of tensors and the exchanges between them, with NumPy's arrays as local arrays."""

from __future__ import annotations

import doctest
import random
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import tiers

import pdgemm.grids.tensor_layout
from pdgemm.errors import LayoutError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.schedules.exchanges.tensor_exchange import plan_move, spread_layout, stays_in_place


def drawn_layout(draw: random.Random, shape: tuple[int, ...], ranks: int) -> TensorLayout:
    """Return a layout with any groups of axes, grid, blocks, first part and order of ranks."""
    axes = list(range(len(shape)))
    draw.shuffle(axes)
    at = draw.randint(0, len(axes))
    rows, cols = axes[:at], axes[at:]
    grids = [(x, ranks // x) for x in range(1, ranks + 1) if ranks % x == 0]
    grids = [(x, y) for x, y in grids if (rows or x == 1) and (cols or y == 1)]
    if not grids:
        return drawn_layout(draw, shape, ranks)
    layout = TensorLayout.even(shape, rows, cols, draw.choice(grids))
    first = [
        BlockCyclic(x.n, draw.randint(1, max(1, x.n)), x.parts, draw.randrange(x.parts)) if group else x
        for x, group in zip(layout.first, (rows, cols))
    ]
    order = list(range(ranks))
    draw.shuffle(order)
    return replace(layout, first=(first[0], first[1]), rank_map=tuple(order))


def drawn_shape(draw: random.Random, least: int = 0) -> tuple[int, ...]:
    return tuple(draw.choice((0, 1, 2, 3, 4, 5)) for _ in range(draw.randint(least, 5)))


def coords_of(layout: TensorLayout, rank: int) -> tuple[int, int]:
    return layout.of(np.dtype(float)).coords(rank)


def local_part(layout: TensorLayout, whole: np.ndarray, rank: int) -> np.ndarray:
    """Return the elements of a rank, with the axes of the tensor."""
    coords = coords_of(layout, rank)
    return whole[np.ix_(*(layout.indices(axis, coords) for axis in range(layout.ndim)))]


def as_matrix(layout: TensorLayout, whole: np.ndarray) -> np.ndarray:
    """Return the matrix that enumerates the axes of the rows and of the columns."""
    rows, cols = layout.rows, layout.cols
    return whole.transpose(rows + cols).reshape(prod(whole.shape[x] for x in rows), prod(whole.shape[x] for x in cols))


def check(layout: TensorLayout, whole: np.ndarray, ranks: int) -> None:
    """Check that the local arrays of a tensor and of its matrix have the same elements, and each element once."""
    assert layout.shape == whole.shape
    flat, seen = as_matrix(layout, whole), list[Any]()
    assert layout.matrix.shape == flat.shape
    for rank in range(ranks):
        coords, part = coords_of(layout, rank), local_part(layout, whole, rank)
        assert part.shape == layout.local_shape(coords)
        dims = layout.matrix.rows, layout.matrix.cols
        mine = flat[np.ix_(*(dim.indices(at) for dim, at in zip(dims, coords)))]
        assert np.array_equal(mine, part.transpose(layout.rows + layout.cols).reshape(mine.shape))
        seen += part.ravel().tolist()
    assert sorted(seen) == sorted(whole.ravel().tolist())


def test_docstrings() -> None:
    assert doctest.testmod(pdgemm.grids.tensor_layout).attempted >= 3
    assert not doctest.testmod(pdgemm.grids.tensor_layout).failed


@pytest.mark.parametrize("turn", range(4))
def test_views_of_layouts(turn: int) -> None:
    for number in range(tiers.examples(200)):
        draw = random.Random(1000 * turn + number)
        ranks, shape = draw.randint(1, 6), drawn_shape(draw, 1)
        layout, whole = drawn_layout(draw, shape, ranks), np.arange(prod(shape)).reshape(shape)
        check(layout, whole, ranks)
        axes = draw.sample(range(len(shape)), len(shape))
        check(layout.transposed(axes), whole.transpose(axes), ranks)
        check(layout.swapped, whole, ranks)
        assert layout.swapped.swapped == layout
        for rank in range(ranks):
            assert np.array_equal(local_part(layout.swapped, whole, rank), local_part(layout, whole, rank))
        new = sorted(draw.sample(range(len(shape) + 2), 2))
        extents = [draw.choice((1, 3)), draw.choice((1, 2))]
        wide = np.expand_dims(whole, new)
        for axis, n in zip(new, extents):
            wide = np.repeat(wide, n, axis)
        there = layout.expanded(new, extents)
        for rank in range(ranks):
            assert local_part(there, wide, rank).size == local_part(layout, whole, rank).size * prod(extents)
        assert not there.divided_among(new)
        assert there.without(new).same_owners(layout)
        gone = [x for x in range(len(shape)) if x not in layout.divided and shape[x] and draw.random() < 0.5]
        key = tuple(draw.randrange(shape[x]) if x in gone else slice(None) for x in range(len(shape)))
        check(layout.without(gone), whole[key], ranks)
        again = TensorLayout.of_matrix(layout.of(np.dtype(float)), shape, layout.rows, layout.cols)
        assert again.same_owners(layout) or not prod(shape)
        check(again, whole, ranks)


def test_a_matrix_whose_blocks_end_within_an_index_is_refused() -> None:
    dims = BlockCyclic(12, 4, 2), BlockCyclic(10, 10, 1)
    matrix = Layout(Distribution(*dims), (0, 1), np.dtype(float), "C")
    assert TensorLayout.of_matrix(matrix, (3, 4, 10), (0, 1), (2,)).local_shape((0, 0)) == (2, 4, 10)
    for shape, rows, message in (
        ((4, 3, 10), (0, 1), "a block of 4 rows ends within an index of the first axis, of 3 rows"),
        ((5, 3, 10), (0, 1), "12 rows are not the axes of extents"),
        ((10,), (), "a group without axes is on one grid row or column, not on 2"),
    ):
        with pytest.raises(LayoutError, match=message):
            TensorLayout.of_matrix(matrix, shape, rows, [x for x in range(len(shape)) if x not in rows])
    assert (
        str(TensorLayout.even((4, 3), (0,), (1,), (2, 1)))
        == "4 x 3, axes (0) by (1) in blocks of 2 x 3 on a 2 x 1 grid"
    )


@pytest.mark.parametrize("turn", range(4))
def test_moves_between_layouts(turn: int) -> None:
    """The runs of an exchange move each element to its place, and sends are the receives of others."""
    dtype = np.dtype(float)
    for number in range(tiers.examples(150)):
        draw = random.Random(1000 * turn + number)
        ranks, shape = draw.randint(1, 6), drawn_shape(draw, 1)
        source, target = drawn_layout(draw, shape, ranks), drawn_layout(draw, shape, ranks)
        whole = np.arange(prod(shape), dtype=float).reshape(shape)
        plan, order = plan_move(source, target, (dtype, dtype), ranks), target.rows + target.cols
        before = [
            local_part(source, whole, rank).transpose(order).reshape(plan.source.local_shape(rank))
            for rank in range(ranks)
        ]
        received = dict[tuple[int, int], int]()
        for rank in range(ranks):
            expected = local_part(target, whole, rank).transpose(order).reshape(plan.target.local_shape(rank))
            after, kept = np.full(expected.shape, np.nan), 0
            for block in plan.pulls(rank):
                (here, there), (left, right) = block.rows.indices(), block.cols.indices()
                after[np.ix_(there, right)] = before[block.peer][np.ix_(here, left)]
                kept += block.rows.size * block.cols.size * (block.peer == rank)
            assert np.array_equal(after, expected)
            received |= {(x.peer, rank): x.rows.size * x.cols.size for x in plan.receives(rank)}
            assert plan.traffic(rank).words_received == expected.size - kept
        sent = {(rank, x.peer): x.rows.size * x.cols.size for rank in range(ranks) for x in plan.sends(rank)}
        assert sent == received
        traffic = [plan.traffic(rank) for rank in range(ranks)]
        assert sum(x.words_sent for x in traffic) == sum(sent.values()) == sum(x.words_received for x in traffic)
        if stays_in_place(source, target):
            assert not sent
            assert all(
                np.array_equal(local_part(source, whole, rank), local_part(target, whole, rank))
                for rank in range(ranks)
            )


def test_elements_are_broadcast_to_the_parts_of_an_axis() -> None:
    dtype = np.dtype(float)
    for number in range(tiers.examples(150)):
        draw = random.Random(number)
        ranks, shape = draw.randint(1, 6), tuple(draw.choice((1, 2, 3, 4, 5)) for _ in range(draw.randint(1, 4)))
        thin = tuple(1 if draw.random() < 0.5 else n for n in shape)
        source, target = drawn_layout(draw, thin, ranks), drawn_layout(draw, shape, ranks)
        there, pairs = spread_layout(source, target)
        whole, wide = np.arange(prod(thin), dtype=float).reshape(thin), np.broadcast_to(0, shape)
        plan, order = plan_move(source, there, (dtype, dtype), ranks, pairs), target.rows + target.cols
        before = [
            local_part(source, whole, rank).transpose(order).reshape(plan.source.local_shape(rank))
            for rank in range(ranks)
        ]
        for rank in range(ranks):
            coords = coords_of(target, rank)
            if not wide[np.ix_(*(target.indices(x, coords) for x in range(len(shape))))].size:
                continue
            expected = whole[np.ix_(*([0] if n == 1 else target.indices(x, coords) for x, n in enumerate(thin)))]
            after = np.full(plan.target.local_shape(rank), np.nan)
            for block in plan.pulls(rank):
                (here, there_), (left, right) = block.rows.indices(), block.cols.indices()
                after[np.ix_(there_, right)] = before[block.peer][np.ix_(here, left)]
            assert np.array_equal(after, expected.transpose(order).reshape(after.shape))
