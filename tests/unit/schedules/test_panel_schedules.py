"""Schedules of panel algorithms: panels and tiles cover the matrix or triangle, and words equal formulas."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, strategies as st

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.index_map import overlap_counts
from pdgemm.grids.layout import Layout
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.simulator import simulate
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.factor_schedules import CholeskySchedule, LUSchedule, TriangularSchedule
from pdgemm.schedules.panels.panel_schedule import diagonal_panels, gathered_rows, is_balanced, lower_tiles, panel_slabs
from pdgemm.schedules.panels.row_moves import PermutationSchedule, RowMoves, permutation
from pdgemm.schedules.rounds import COLS

GRIDS = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 3)]


@st.composite
def dimensions(draw: Any, n: int | None = None) -> BlockCyclic:
    n = draw(st.integers(0, 40)) if n is None else n
    block, parts = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    return BlockCyclic(n, block, parts, draw(st.integers(0, parts - 1)), draw(st.integers(-3, block - 1)))


@st.composite
def square(draw: Any) -> tuple[BlockCyclic, BlockCyclic]:
    rows = draw(dimensions())
    return rows, draw(dimensions(rows.n))


@given(square(), st.integers(1, 12))
def test_panels_cover_the_diagonal(both: tuple[BlockCyclic, BlockCyclic], width: int) -> None:
    """Each panel has one owner and at most the given width, and begins at the end of the previous one."""
    rows, cols = both
    panels = diagonal_panels(rows, cols, width)
    assert [panel.start for panel in panels] == [0, *(panel.stop for panel in panels)][: len(panels)]
    assert not panels or panels[-1].stop == rows.n
    for panel in panels:
        assert 0 < panel.width <= width
        assert {int(rows.owner(g)) for g in range(panel.start, panel.stop)} == {panel.row}
        assert {int(cols.owner(g)) for g in range(panel.start, panel.stop)} == {panel.col}


@given(square(), st.integers(1, 6), st.sampled_from([0, 4, 60]), st.data())
def test_tiles_cover_the_triangle_once(
    both: tuple[BlockCyclic, BlockCyclic], smallest: int, most: int, data: Any
) -> None:
    rows, cols = both
    start, stop = sorted(data.draw(st.tuples(st.integers(0, rows.n), st.integers(0, rows.n))))
    for i, j in itertools.product(range(rows.parts), range(cols.parts)):
        covered = np.zeros((rows.count(i), cols.count(j)), int)
        down, right = rows.indices(i)[:, None], cols.indices(j)
        in_squares = np.zeros_like(covered)
        for r, c, whole, alike in lower_tiles(rows, cols, (i, j), start, stop, smallest, most):
            covered[r, c] += 1
            assert not whole or (down[r] >= right[c]).all()
            if alike:
                assert c.stop - c.start <= most and down[r].ravel().tolist() == right[c].tolist()
                in_squares[r, c] = 1
        inside = (right >= start) & (right < stop)
        assert (covered[(down >= right) & inside] == 1).all()
        assert covered.max(initial=0) <= 1
        assert not covered[:, ~inside].any()
        for local in range(cols.count(j)):  # in a row, fewer than `smallest` columns above the diagonal are covered
            above = np.flatnonzero((covered - in_squares)[:, local] * (down[:, 0] < right[local]))
            assert all(right[max(0, local - smallest + 1)] <= down[row, 0] for row in above)


def test_square_tiles_have_the_same_rows_and_columns() -> None:
    """Rows 0, 1, 4 and columns 0, 2, 4 have equal first and last indices, but are not a square tile."""
    rows, cols = BlockCyclic(5, 2, 2), BlockCyclic(5, 1, 2)
    for r, c, _, square in lower_tiles(rows, cols, (0, 0), 0, 5, 1, 8):
        assert not square or rows.indices(0)[r].tolist() == cols.indices(0)[c].tolist()


@given(dimensions())
def test_local_indices_of_the_trailing_matrix(dimension: BlockCyclic) -> None:
    for part, end in itertools.product(range(dimension.parts), range(dimension.n + 1)):
        assert dimension.below(end, part) == (dimension.indices(part) < end).sum()


def layout(n: int, m: int, block: Any, shape: tuple[int, int], dtype: str = "float64") -> Layout:
    return Layout(Distribution.over(shape, (n, m), block), tuple(range(shape[0] * shape[1])), np.dtype(dtype))


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("mover", ["ring", "shared"])
def test_words_of_a_cholesky_factorisation(shape: tuple[int, int], mover: str) -> None:
    """w^2 (Pr - 1) words of each diagonal block, and (n - k) w (Pr + Pc - 2) of each panel and its transpose."""
    (pr, pc), n = shape, 100
    plan = CholeskySchedule(layout(n, n, 8, shape), 8, mover)
    widths = [(panel.width, n - panel.stop) for panel in plan.steps]
    expected = sum(w * w * (pr - 1) + rest * w * (pr + pc - 2) for w, rest in widths if rest)
    traffic = [plan.traffic(rank) for rank in range(pr * pc)]
    assert plan.total_words == sum(x.words_received for x in traffic) == expected
    assert sum(x.words_read for x in traffic) == (expected if mover == "shared" else 0)
    assert sum(x.messages_sent for x in traffic) == sum(x.messages_received for x in traffic)
    simulated = simulate(plan, Machine(), pr * pc)
    assert mover == "shared" or [simulated.traffic(rank) for rank in range(pr * pc)] == traffic
    longer = simulate(CholeskySchedule(layout(2 * n, 2 * n, 8, shape), 8, mover), Machine(), pr * pc)
    assert longer.seconds > simulated.seconds > 0


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("lower", [True, False])
def test_words_of_a_triangular_solve(shape: tuple[int, int], lower: bool) -> None:
    """w^2 (Pc - 1) words of each diagonal block, (n - k) w (Pc - 1) of each panel, w m (Pr - 1) of each row of X."""
    (pr, pc), n, m = shape, 60, 20
    A = layout(n, n, 7, shape)
    plan = TriangularSchedule(A, 7, "ring", layout(n, m, (7, 3), shape), lower)
    widths = [(panel.width, plan.rest(panel)[1] - plan.rest(panel)[0]) for panel in plan.steps]
    expected = sum((w * w + w * rest) * (pc - 1) + w * m * (pr - 1) * (rest > 0) for w, rest in widths)
    assert plan.total_words == expected
    inverse, whole = (TriangularSchedule(A, 7, "ring", A, lower, inverse=x) for x in (True, False))
    assert inverse.total_words < whole.total_words or pr == 1
    assert inverse.flops * 3 <= whole.flops + 3


def test_which_layouts_share_the_work() -> None:
    assert is_balanced(layout(1000, 1000, 50, (2, 2)), 128)
    assert is_balanced(layout(1000, 1000, None, (1, 1)), 128)
    assert is_balanced(layout(100, 100, None, (2, 2)), 128)  # one panel: no work to share
    assert not is_balanced(layout(1000, 1000, None, (2, 2)), 128)
    assert not is_balanced(layout(1000, 1000, 300, (2, 2)), 128)
    assert not is_balanced(layout(1000, 1000, 4, (2, 2)), 128)  # too narrow panels


def factored(shape: tuple[int, int], m: int, n: int, block: int, mover: str = "ring") -> tuple[LUSchedule, np.ndarray]:
    """Return the LU schedule with the pivots of a random matrix, and the pivots."""
    pivots = scipy.linalg.lu_factor(np.random.default_rng(0).standard_normal((m, n)))[1]
    return LUSchedule(layout(m, n, block, shape), block, mover, pivots=tuple(pivots.tolist())), pivots


@pytest.mark.parametrize("shape", GRIDS)
@pytest.mark.parametrize("size", [(60, 60), (60, 25), (25, 60)])
@pytest.mark.parametrize("mover", ["ring", "shared"])
def test_words_of_an_lu_factorisation(shape: tuple[int, int], size: tuple[int, int], mover: str) -> None:
    """Words: gathered and returned panels, pivots to all, L along rows, U along columns, and exchanged rows."""
    (pr, pc), (m, n) = shape, size
    plan, pivots = factored(shape, m, n, 7, mover)
    rows, cols = plan.A.distribution.rows, plan.A.distribution.cols
    expected, lying = 0, np.arange(m)
    for panel in plan.steps:
        w, behind = panel.width, m - panel.start
        expected += 2 * w * (behind - rows.window(panel.start, m).count(panel.row)) + w * (pr - 1) + w * pr * (pc - 1)
        expected += w * behind * (pc - 1) * (panel.stop < n) + w * (n - panel.stop) * (pr - 1) * (panel.stop < m)
        before = np.arange(m)
        for here, there in enumerate(pivots[panel.start : panel.stop].tolist(), panel.start):
            before[[here, there]] = before[[there, here]]
        expected += (n - panel.stop) * int((rows.owner(before) != rows.owner(np.arange(m))).sum())
        lying = lying[before]
    for panel in plan.steps:
        last = permutation(np.append(np.arange(panel.stop), pivots[panel.stop :]), m)
        expected += panel.width * int((rows.owner(last) != rows.owner(np.arange(m))).sum())
    assert np.array_equal(lying, permutation(pivots, m))
    traffic = [plan.traffic(rank) for rank in range(pr * pc)]
    assert plan.total_words == sum(x.words_received for x in traffic) == expected
    assert sum(x.messages_sent for x in traffic) == sum(x.messages_received for x in traffic)
    assert cols.n == n and plan.flops > 0


@given(st.data())
def test_rows_are_moved_as_pivots_exchange_them(data: Any) -> None:
    m = data.draw(st.integers(1, 30))
    start = data.draw(st.integers(0, m - 1))
    pivots = np.array([data.draw(st.integers(t, m - 1)) for t in range(start, data.draw(st.integers(start, m)))], int)
    one_by_one = np.arange(m)
    for here, there in enumerate(pivots.tolist(), start):
        one_by_one[[here, there]] = one_by_one[[there, here]]
    moves = RowMoves.of(pivots, start)
    together = np.arange(m)
    together[moves.targets] = moves.sources
    assert np.array_equal(together, one_by_one)
    assert (moves.targets != moves.sources).all()


@given(dimensions(), dimensions(), st.data())
def test_buffers_of_a_permutation(rows: BlockCyclic, cols: BlockCyclic, data: Any) -> None:
    """The buffers have exactly the rows that are received, and the rows that leave their place."""
    order, ranks = data.draw(st.permutations(range(rows.n))), range(rows.parts * cols.parts)
    layout = Layout(Distribution(rows, cols), (*ranks,), np.dtype(float), "C")
    plan = PermutationSchedule(layout, 0, "ring", order=(*order,))
    for rank in ranks:
        (leaving, _), (arriving, _) = (plan.buffers(rank)[name] for name in ("leaving rows", "arriving rows"))
        i, j = layout.coords(rank)
        assert arriving == plan.traffic(rank).words_received
        assert leaving == sum(order[g] != g for g in rows.indices(i)) * cols.count(j)
        assert plan.buffers(None)["leaving rows"][0] >= leaving and plan.buffers(None)["arriving rows"][0] >= arriving
    assert plan.extra_bytes(len(ranks)) == 0


@given(dimensions(), st.data())
def test_rows_of_a_gathered_panel(rows: BlockCyclic, data: Any) -> None:
    """A gathered panel has the diagonal block on top, other rows grouped by grid row, and no row is missing."""
    for panel in diagonal_panels(rows, data.draw(dimensions(rows.n)), 5):
        order = gathered_rows(rows, panel)
        assert np.array_equal(order[: panel.width], np.arange(panel.start, panel.stop))
        assert np.array_equal(np.sort(order), np.arange(panel.start, rows.n))
        for part, where in panel_slabs(rows, panel).items():
            mine = order[where]
            assert (rows.owner(mine) == part).all()
            assert (np.diff(mine) > 0).all()


def test_pivots_that_are_not_known_are_drawn() -> None:
    """With random pivots, a plan before the run counts about as many words as the run."""
    plan, _ = factored((2, 2), 200, 200, 16)
    before, again = LUSchedule(plan.A, 16, "ring"), LUSchedule(plan.A, 16, "ring")
    assert before == again and before.total_words == again.total_words
    assert abs(before.total_words - plan.total_words) < 0.1 * plan.total_words


def test_rows_of_a_transposed_panel_come_from_their_own_ranks() -> None:
    """In the columns of a grid that is not square, a rank receives the rows of the transposed panel that it lacks."""
    layout = Layout(Distribution.over((2, 3), (50, 50), (3, 4)), tuple(range(6)), np.dtype("d"))
    schedule = CholeskySchedule(layout, 4, RING.name)
    for panel, at in zip(schedule.steps[:-1], [*schedule.rounds()][1::2]):
        received = np.zeros((2, 3), int)
        for x in at.moves:
            if x.along == COLS:
                np.add.at(received.reshape(-1), x.target, x.words)
        rest = [x.window(panel.stop, 50) for x in (schedule.rows, schedule.cols)]
        lacking = schedule.cols_from(panel.stop) - overlap_counts(*rest)
        assert (received == lacking * panel.width).all(), panel
