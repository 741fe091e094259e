"""Windows of rows in which partial sums are reduced, and their counts: one process, no MPI."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tiers import examples

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.products import reduction
from pdgemm.schedules.products.reduction import Reduction, height
from pdgemm.schedules.rounds import Tally


@st.composite
def reductions(draw: st.DrawFn) -> Reduction:
    """Draw reductions of partial sums of all of C on every rank, as in "inner", to any layout of C."""

    def side(n: int, parts: int) -> BlockCyclic:
        block = draw(st.sampled_from([1, 2, 5, max(1, -(-n // parts))]))
        return BlockCyclic(n, block, parts, draw(st.integers(0, parts - 1)), block - draw(st.integers(1, 2 * block)))

    m, n = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    pr, pc = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (3, 2), (5, 1)]))
    everyone, high = tuple(range(pr * pc)), draw(st.integers(1, 15))
    C = Layout(Distribution(side(m, pr), side(n, pc)), tuple(draw(st.permutations(everyone))), np.dtype(float))
    return Reduction(BlockCyclic.even(m, 1), BlockCyclic.even(n, 1), everyone, C, C.dtype, high, "")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "LEAST_ROWS", 1)


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reductions())
def test_windows_have_each_row_once_and_are_counted(short: None, sums: Reduction) -> None:
    m, ranks = sums.rows.n, range(len(sums.rank_map))
    windows = sums.windows(0)
    rows = [row for window in windows for lo, hi in window for row in range(lo, hi)]
    assert sorted(rows) == list(range(m)) * bool(sums.cols.n)
    assert all(window and list(window) == sorted(window) for window in windows)
    assert len(windows) == sums.turns(0)
    assert max(map(height, windows), default=0) == sums.highest(0) <= sums.highest(None)
    for turn, window in enumerate(windows):
        counts = sums.counts(0, 0, window)
        assert counts.sum() == height(window) * sums.cols.n
        sends = [np.count_nonzero(np.delete(counts, rank)) for rank in ranks]
        for rank in ranks:
            traffic, others = sums.traffic(rank, slice(turn, turn + 1)), len(ranks) - 1
            assert traffic.words_sent == counts.sum() - counts[rank]
            assert traffic.words_received == counts[rank] * others
            assert traffic.messages_sent == sends[rank]
            assert traffic.messages_received == others * bool(counts[rank])
    first, end = sorted((len(windows) // 3, len(windows) * 3 // 4))
    for rank in ranks:  # counts of several windows equal sums over single windows
        for some in (slice(first, end), slice(0, -1), slice(None)):
            each = [sums.traffic(rank, slice(x, x + 1)) for x in range(len(windows))[some]]
            assert sums.traffic(rank, some) == sum(each, Traffic())
    tally = Tally(sums.rounds(), len(ranks))
    for rank in ranks:
        assert sums.traffic(rank) == sum(tally.of(rank).values(), Traffic())
        own = max((sums.counts(0, 0, window)[rank] for window in windows), default=0)
        assert sums.buffers(rank)["own part of C"][0] == own
        assert all(words <= sums.buffers(None)[name][0] for name, (words, _) in sums.buffers(rank).items())


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("block", [1, 32, 700, 10**6])
def test_every_window_belongs_to_all_ranks_in_equal_parts(shape: tuple[int, int], block: int) -> None:
    """All ranks own nearly equal parts of a window, for any distribution of C's rows: no link is idle."""
    (pr, pc), m = shape, 8400
    rows = BlockCyclic(m, min(block, m // pr), pr)
    C = Layout(Distribution(rows, BlockCyclic.even(600, pc)), tuple(range(pr * pc)), np.dtype(float))
    sums = Reduction(BlockCyclic.even(m, 1), BlockCyclic.even(600, 1), tuple(range(pr * pc)), C, C.dtype, m // 8, "")
    assert len(sums.windows(0)) == 8
    for window in sums.windows(0):
        counts = sums.counts(0, 0, window)
        assert counts.min() >= 0.8 * counts.max()


def test_windows_of_many_owners_stay_whole() -> None:
    """Windows are not divided among many owners: fewer than 64 rows per owner would be slow to multiply."""
    C = Layout(Distribution(BlockCyclic.even(3200, 32), BlockCyclic.even(100, 1)), tuple(range(32)), np.dtype(float))
    sums = Reduction(BlockCyclic.even(3200, 1), BlockCyclic.even(100, 1), tuple(range(32)), C, C.dtype, 400, "")
    assert sums.windows(0) == [((row, row + 400),) for row in range(0, 3200, 400)]
