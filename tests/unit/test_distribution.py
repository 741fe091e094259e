"""Index arithmetic, compared with dealing out block after block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pdgemm.errors import LayoutError
from pdgemm.grids.distribution import BlockCyclic, Distribution, UnevenBlocks


@st.composite
def layouts(draw: st.DrawFn, most: int = 60) -> BlockCyclic:
    """Draw layouts whose first block is as long as the others, shorter or longer."""
    parts, block = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    skip = block - draw(st.just(block) | st.integers(1, 25))
    return BlockCyclic(draw(st.integers(0, most)), block, parts, draw(st.integers(0, parts - 1)), skip)


def dealt(layout: BlockCyclic) -> list[list[int]]:
    """Return the global indices of each part, by dealing out block after block."""
    hands: list[list[int]] = [[] for _ in range(layout.parts)]
    start, stop, number = 0, layout.block - layout.skip, layout.source
    while start < layout.n:
        hands[number % layout.parts].extend(range(start, min(layout.n, stop)))
        start, stop, number = stop, stop + layout.block, number + 1
    return hands


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_blocks_of_any_length_lie_one_after_another(counts: list[int]) -> None:
    layout = UnevenBlocks.of(counts)
    ends = np.cumsum(counts)
    assert (layout.n, layout.parts, layout.largest) == (sum(counts), len(counts), max(counts))
    for part, (count, end) in enumerate(zip(counts, ends)):
        own = np.arange(end - count, end)
        assert layout.count(part) == count and layout.count(-1) == 0
        assert np.array_equal(layout.indices(part), own)
        assert (layout.owner(own) == part).all() and np.array_equal(layout.to_local(own), np.arange(count))
    with pytest.raises(TypeError, match="different lengths"):
        layout.window(0, 0)


@given(layouts())
def test_every_function_agrees_with_dealing(layout: BlockCyclic) -> None:
    hands = dealt(layout)
    for part, hand in enumerate(hands):
        assert layout.count(part) == len(hand)
        assert layout.indices(part).tolist() == hand
        for local, index in enumerate(hand):
            assert layout.owner(index) == part
            assert layout.to_local(index) == local
            assert layout.to_global(local, part) == index
    assert layout.largest == max(map(len, hands))
    every = np.arange(layout.n)  # arrays of indices, too
    assert layout.owner(every).tolist() == [layout.owner(g) for g in range(layout.n)]
    assert layout.to_local(every).tolist() == [layout.to_local(g) for g in range(layout.n)]


@given(layouts(), st.data())
def test_windows_and_canonical_forms_are_dealt_alike(layout: BlockCyclic, data: st.DataObject) -> None:
    """Windows that begin before, within or after a first block of another size."""
    start = data.draw(st.integers(0, layout.n))
    stop = data.draw(st.integers(start, layout.n))
    window = layout.window(start, stop)
    for part in range(layout.parts):
        expected = [g - start for g in dealt(layout)[part] if start <= g < stop]
        assert window.indices(part).tolist() == window.canonical.indices(part).tolist() == expected
        assert layout.indices(part)[layout.local_window(start, stop, part)].tolist() == [g + start for g in expected]
    owners = [window.owner(g) for g in range(window.n)]
    starts = [g for g in range(window.n) if not g or owners[g] != owners[g - 1]]
    assert set(starts) <= set(window.starts.tolist())
    assert window.parts == 1 or window.starts.tolist() == starts


@given(layouts(), layouts())
def test_local_shapes_and_owners_of_a_matrix(rows: BlockCyclic, cols: BlockCyclic) -> None:
    matrix = Distribution(rows, cols)
    shapes = [matrix.local_shape((i, j)) for i in range(rows.parts) for j in range(cols.parts)]
    assert sum(r * c for r, c in shapes) == rows.n * cols.n
    assert matrix.transposed.transposed == matrix
    if rows.n and cols.n:
        assert matrix.owner(rows.n - 1, 0) == (rows.owner(rows.n - 1), cols.source)


def test_one_block_per_rank_by_default() -> None:
    matrix = Distribution.over((2, 3), (10, 10))
    assert matrix.block == (5, 4)
    assert [matrix.local_shape((1, j)) for j in range(3)] == [(5, 4), (5, 4), (5, 2)]
    assert Distribution.over((2, 3), (0, 1)).local_shape((0, 0)) == (0, 1)


def test_beyond_32_bits() -> None:
    layout = BlockCyclic(10**12, 1000, 10**6, source=3)
    index = np.array([0, 10**12 - 1, 123456789012])
    part = layout.owner(index)
    assert [layout.to_global(layout.to_local(int(g)), int(p)) for g, p in zip(index, part)] == index.tolist()
    assert layout.count(3) == 10**6


def test_impossible_dimensions_and_matrices() -> None:
    for arguments in ((-1, 1, 1), (1, 0, 1), (1, -2, 1), (1, 1, 0), (1, 1, 2, 2), (1, 1, 2, -1), (1, 3, 1, 0, 3)):
        with pytest.raises(LayoutError):
            BlockCyclic(*arguments)
    options: tuple[dict[str, Any], ...] = ({"block": (1, 2, 3)}, {"block": 0}, {"source": (0, 9)})
    for shape, option in (((3,), {}), ((3, 3, 3), {}), *(((3, 3), x) for x in options)):
        with pytest.raises(LayoutError):
            Distribution.over((2, 2), shape, **option)  # type: ignore[arg-type]
