"""Tilings of products of files: each part is multiplied once; reads and memory are as planned."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiers import examples, pairs

from pdgemm.errors import MemoryLimitError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.io.streamed.svd_plan import SvdPlan, fitting_plan
from pdgemm.io.streamed.tiling import STAGED, Operand, Tiling
from pdgemm.io.streamed.tiling_choice import best_tiling, fitting

A, B = Operand(8, 8), Operand(4, 8)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.tuples(*[st.integers(1, 3000)] * 3),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from([1, 7, 64]),
    st.sampled_from([1, 10, 100]),
    st.booleans(),
    st.integers(0, 1 << 23),
)
def test_chosen_tilings_fit_the_memory(
    mnk: tuple[int, int, int], grid: tuple[int, int], rows: int, cols: int, turned: bool, more: int
) -> None:
    """Chosen tilings fit the memory of each rank, given the layouts of tiles, and do not cut chunks that fit."""
    chunk = 8 * rows * cols
    a, b = Operand(8, 8, (rows, cols), turned, chunk), Operand(8, 8, (cols, rows), not turned, chunk)
    memory = (1 << 22) + more
    found = fitting(Tiling(mnk, grid, a, b, 8, 8, 0), memory)
    height, width, inner = found.largest
    mb, nb, ka, kb = found.blocks
    for i, j in product(range(grid[0]), range(grid[1])):
        of_rows, of_cols = BlockCyclic(height, mb, grid[0]).count(i), BlockCyclic(width, nb, grid[1]).count(j)
        of_a, of_b = BlockCyclic(inner, ka, grid[1]).count(j), BlockCyclic(inner, kb, grid[0]).count(i)
        panels = of_rows * of_a, of_b * of_cols
        held = of_rows * of_cols + sum(min(2, loads) * size for loads, size in zip(found.loads, panels))
        assert 8 * held + 2 * (STAGED + a.chunk + b.chunk) <= found.most_bytes <= memory
    m, n, k = mnk
    assert found.bytes_read >= 8 * (m * k + k * n)
    assert found.bytes_read + found.bytes_written >= found.bound(memory) * (1 - 1e-12)
    if found.a.unit == (rows, cols):
        assert all(first % rows == 0 for first, _ in found.cuts[0]) and mb % rows == 0


def test_the_order_reads_little_more_than_the_bound() -> None:
    """With much memory each element is read once; with little, reads are near Hong and Kung's bound."""
    n = 30_000
    for ranks, memory, most in (((1, 2), 35, 1.0), ((8, 8), 30, 1.0), ((1, 2), 30, 1.5), ((2, 2), 26, 1.9)):
        found = fitting(Tiling((n, n, n), ranks, Operand(8, 8), Operand(8, 8), 8, 8, 0), 1 << memory)
        assert 1 <= (found.bytes_read + found.bytes_written) / found.bound(1 << memory) <= most, (memory, found)
    # if one panel has all inner indices, panels of A stay in memory, and are read once
    thin = fitting(Tiling((100_000, 100_000, 500), (2, 2), Operand(8, 8), Operand(8, 8), 8, 8, 0), 1 << 27)
    assert thin.counts[2] == 1 and thin.loads[0] == thin.counts[0]


@pytest.mark.parametrize("mnk", [(10**5,) * 3, (10**12,) * 3, (10**9, 7, 10**12)], ids=str)
@pytest.mark.parametrize("memory", [1 << 20, 10 << 30])
def test_few_tilings_are_looked_at(mnk: tuple[int, int, int], memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tilings that the search constructs does not grow with the product."""
    made, plain = [], Tiling.__init__

    def counted(self: Tiling, *fields: Any, **named: Any) -> None:
        made.append(1)
        plain(self, *fields, **named)

    monkeypatch.setattr(Tiling, "__init__", counted)
    monkeypatch.setattr(Tiling, "cuts", property(lambda self: pytest.fail("a tile for each, in a list")))
    found = best_tiling(Tiling(mnk, (2, 2), Operand(8, 8), Operand(8, 8), 8, 8, 0), memory)
    assert len(made) <= 2 * 50
    if isinstance(found, int):
        assert memory == 1 << 20 and found > memory
        assert isinstance(best_tiling(Tiling(mnk, (2, 2), Operand(8, 8), Operand(8, 8), 8, 8, 0), found), Tiling)
    else:
        assert found.all_bytes <= memory and found.as_dict(memory)["tiles"] == [*found.numbers]
        assert "times the lower bound" in found.explain(memory)
        assert found.bytes_read + found.bytes_written >= found.bound(memory) * (1 - 1e-12)


@pytest.mark.parametrize("grid", [(1, 1), (2, 3)])
def test_too_little_memory_says_how_much_is_needed(grid: tuple[int, int]) -> None:
    whole = Tiling((1000, 2000, 3000), grid, Operand(8, 8), Operand(8, 8), 8, 8, 0)
    with pytest.raises(MemoryLimitError, match=r"no tile fits 1\.0 MiB of memory per rank: .* are needed") as raised:
        fitting(whole, 1 << 20)
    needed = int(str(raised.value).split("(")[1].split()[0])
    fitting(whole, needed)
    with pytest.raises(MemoryLimitError):
        fitting(whole, needed - 100)


def test_chunks_that_do_not_fit_are_read_in_parts() -> None:
    chunk = Operand(8, 8, (1000, 1000), chunk=8_000_000)
    found = fitting(Tiling((5000, 5000, 5000), (1, 1), chunk, chunk, 8, 8, 0), 50_000_000)
    assert found.a.unit == (1, 1)
    assert found.most_bytes <= 50_000_000
    whole = fitting(Tiling((5000, 5000, 5000), (1, 1), chunk, chunk, 8, 8, 0), 200_000_000)
    assert all(first % 1000 == 0 for cuts in whole.cuts for first, _ in cuts)


@pytest.mark.parametrize(
    ("mnk", "counts"),
    [
        *pairs([(7, 11, 13), (40, 3, 60)], [(2, 3, 1), (3, 2, 4), (1, 1, 5)]),
        *[(mnk, (1, 1, 1)) for mnk in ((0, 5, 3), (4, 5, 0), (1, 1, 1))],
        *[((7, 11, 13), (7, 11, 13)), ((40, 3, 200), (1, 3, 2))],
    ],
)
def test_each_product_is_done_once_by_one_job_or_two(mnk: tuple[int, int, int], counts: tuple[int, int, int]) -> None:
    """A first job ends after any step; a second reads and writes as planned, and resumes the sums of one tile."""
    whole = Tiling(mnk, (2, 1), A, B, 4, 8, 2, counts)
    steps = list(whole.steps())
    assert whole.steps_of_all == whole.count == len(steps) and whole.numbers == tuple(map(len, whole.cuts))
    assert [sum(step.reads[x] for step in steps) for x in range(2)] == [*whole.loads]
    for end in range(min(30, len(steps)) + 1):
        rest = replace(whole, done=end)
        done, read, written = np.zeros(mnk, int), 0, 0
        there: list[Any] = [None, None]  # panels of A and B in memory
        for step in steps[:end]:
            done[slice(*step.rows), slice(*step.cols), slice(*step.inner)] += 1
        for rows, cols in rest.finished:
            assert (done[slice(*rows), slice(*cols)] == 1).all()
        assert sum((r1 - r0) * (c1 - c0) for (r0, r1), (c0, c1) in rest.finished) * 8 == (
            whole.bytes_written - rest.bytes_written
        )
        current, complete = rest.current, end == 0 or steps[end - 1].last
        assert (current is None) == complete
        if current is not None:
            read += 4 * (current.rows[1] - current.rows[0]) * (current.cols[1] - current.cols[0])
        assert [x.inner for x in rest.steps()] == [x.inner for x in steps[end:]] and rest.count == len(steps) - end
        for step in rest.steps():
            where = slice(*step.rows), slice(*step.cols), slice(*step.inner)
            (r0, r1), (c0, c1), (k0, k1) = step.rows, step.cols, step.inner
            assert all(y - x <= most for (x, y), most in zip((step.rows, step.cols, step.inner), rest.largest))
            for x, panel in enumerate(((step.rows, step.inner), (step.inner, step.cols))):
                assert step.reads[x] == (panel != there[x] and mnk[2] > 0)
                there[x] = panel
            assert step.first == complete == (not done[where[:2]].any() and complete)  # one tile at a time
            complete = step.last
            done[where] += 1
            read += step.reads[0] * 8 * (r1 - r0) * (k1 - k0) + step.reads[1] * 4 * (k1 - k0) * (c1 - c0)
            read += step.first * 2 * (r1 - r0) * (c1 - c0)
            written += step.last * 8 * (r1 - r0) * (c1 - c0)
        assert (done == 1).all() and (read, written) == (rest.bytes_read, rest.bytes_written)


@pytest.mark.parametrize("shape", [(5000, 300), (300, 4000), (777, 790)])
def test_plans_of_singular_values_read_each_row_once_and_fit(shape: tuple[int, int]) -> None:
    """Plans read panels of equal numbers of rows; more memory means wider blocks, and finally triangles."""
    tall = max(shape), min(shape)
    for ranks in (1, 3, 16):
        for operand in (Operand(8, 8), Operand(4, 8, (50, 30), False, 6000)):
            grid = (ranks, 1) if shape[0] >= shape[1] else (1, ranks)
            triangles = SvdPlan(tall, (ranks, 1), operand, 9, 19, True, False)
            steps, before = SvdPlan(shape, grid, operand, 9, 19, False, False), (False, 0)
            with pytest.raises(MemoryLimitError, match="bytes\\) are needed") as caught:
                fitting_plan(triangles, steps, None, 1)
            needed = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])  # type: ignore[index]
            for memory in (needed, needed + (needed >> 2), 8 << 20, 1 << 30):
                plan = fitting_plan(triangles, steps, None, memory)
                rows = [step.rows for step in plan.steps()]
                assert [x for x, _ in rows] == [plan.rows * x for x in range(plan.panels)]
                assert rows[-1][1] == plan.shape[0] and all(first < end for first, end in rows)
                assert (
                    plan.most_bytes < plan.all_bytes <= memory
                    and plan.pass_bytes == shape[0] * shape[1] * operand.stored
                )
                assert not plan.triangles or plan.stacked * ranks >= plan.columns
                assert before <= (plan.triangles, plan.width) and plan.width >= 11
                before = plan.triangles, 0 if plan.triangles else plan.width
            assert plan.triangles and (plan.panels > 1 or tall[0] <= ranks * operand.unit[0])
            with pytest.raises(MemoryLimitError):
                fitting_plan(triangles, steps, None, needed - 1)
