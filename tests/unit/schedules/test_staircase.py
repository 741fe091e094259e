"""Elements of a local array that belong to a triangle, compared with masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.schedules.staircase import Staircase


@st.composite
def dimension(draw: Any, n: int) -> np.ndarray:
    """Draw the global indices of one part of a random distribution of n."""
    layout = BlockCyclic(n, draw(st.integers(1, 12)), draw(st.integers(1, 4)))
    return layout.indices(draw(st.integers(0, layout.parts - 1)))


@st.composite
def local_arrays(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    n = draw(st.integers(0, 60))
    return draw(dimension(n)), draw(dimension(n))


def inside(triangle: str, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    mask: np.ndarray = (rows[:, None] >= cols) if triangle == "L" else (rows[:, None] <= cols)
    return mask


def masked(steps: Staircase, shape: tuple[int, ...]) -> np.ndarray:
    return steps.mask(shape[0 if steps.flipped else 1])


@pytest.mark.parametrize("triangle", "LU")
@given(local_arrays(), st.integers(0, 8), st.sampled_from([0, 5, 60]))
def test_tiles_cover_the_triangle_once(triangle: Any, array: Any, least: int, squares: int) -> None:
    rows, cols = array
    steps, wanted = Staircase.of(triangle, rows, cols), inside(triangle, rows, cols)
    assert (masked(steps, wanted.shape) == wanted).all() and steps.area == wanted.sum()
    covered = np.zeros(wanted.shape, int)
    for tile in steps.tiles(least, squares):
        covered[tile.rows, tile.cols] += 1
        part = wanted[tile.rows, tile.cols]
        if tile.square:
            assert rows[tile.rows].tolist() == cols[tile.cols].tolist() and len(part) <= squares
        else:
            assert part.all() if tile.inside else part.size <= least * least
    assert covered.max(initial=0) <= 1 and (covered[wanted] == 1).all()


@pytest.mark.parametrize("triangle", "LU")
@given(local_arrays(), st.data())
def test_parts(triangle: Any, array: Any, data: Any) -> None:
    """Windows, selected rows and columns, and the range of columns with elements in a range of rows."""
    rows, cols = array
    steps, wanted = Staircase.of(triangle, rows, cols), inside(triangle, rows, cols)
    (a, b), (c, d) = (sorted(data.draw(st.tuples(*[st.integers(0, len(x))] * 2))) for x in (rows, cols))
    window, part = wanted[a:b, c:d], steps.window(slice(a, b), slice(c, d))
    squares = [x for x in part.tiles(1, 60) if x.square]
    assert all(rows[a:b][x.rows].tolist() == cols[c:d][x.cols].tolist() for x in squares)
    assert (masked(steps.window(slice(a, b), slice(c, d)), window.shape) == window).all()
    some = tuple(np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x)))) for x in array)
    assert (masked(steps.part(*some), (len(some[0]), len(some[1]))) == wanted[np.ix_(*some)]).all()
    if a < b:
        first, last = steps.columns(a, b)
        assert not wanted[a:b, :first].any() and not wanted[a:b, last:].any()
