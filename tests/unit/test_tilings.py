"""Products in tiles as values: every product once, what is read again, and what fits the memory."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples, pairs

from pdgemm.errors import MemoryLimitError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.io.streamed.svd_plan import SvdPlan, fitting_plan
from pdgemm.io.streamed.tiling import STAGED, Operand, TilePart, Tiling, waiting
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
def test_what_is_chosen_fits(
    mnk: tuple[int, int, int], grid: tuple[int, int], rows: int, cols: int, turned: bool, more: int
) -> None:
    """On each rank, by the layouts that the matrices then have, and chunks are not cut where they fit."""
    chunk = 8 * rows * cols
    a, b = Operand(8, 8, (rows, cols), turned, chunk), Operand(8, 8, (cols, rows), not turned, chunk)
    memory = (1 << 22) + more
    found = fitting(mnk, grid, a, b, 8, 8, 0, memory)
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
    """With much memory each element once; with little, as Hong and Kung have it, for panels take some of it."""
    n = 30_000
    for ranks, memory, most in (((1, 2), 35, 1.0), ((8, 8), 30, 1.0), ((1, 2), 30, 1.5), ((2, 2), 26, 1.9)):
        found = fitting((n, n, n), ranks, Operand(8, 8), Operand(8, 8), 8, 8, 0, 1 << memory)
        assert 1 <= (found.bytes_read + found.bytes_written) / found.bound(1 << memory) <= most, (memory, found)
    # if A and B fit one panel in the inner dimension, those of A stay, and are read once
    thin = fitting((100_000, 100_000, 500), (2, 2), Operand(8, 8), Operand(8, 8), 8, 8, 0, 1 << 27)
    assert thin.counts[2] == 1 and thin.loads[0] == thin.counts[0]


@pytest.mark.parametrize("mnk", [(10**5,) * 3, (10**12,) * 3, (10**9, 7, 10**12)], ids=str)
@pytest.mark.parametrize("memory", [1 << 20, 10 << 30])
def test_few_tilings_are_looked_at(mnk: tuple[int, int, int], memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number does not grow with the product: many thousands are looked at as one."""
    made, plain = [], Tiling.__init__

    def counted(self: Tiling, *fields: Any, **named: Any) -> None:
        made.append(1)
        plain(self, *fields, **named)

    monkeypatch.setattr(Tiling, "__init__", counted)
    monkeypatch.setattr(Tiling, "cuts", property(lambda self: pytest.fail("a tile for each, in a list")))
    found = best_tiling(mnk, (2, 2), Operand(8, 8), Operand(8, 8), 8, 8, 0, memory)
    assert len(made) <= 2 * 50
    if isinstance(found, int):
        assert memory == 1 << 20 and found > memory
        assert isinstance(best_tiling(mnk, (2, 2), Operand(8, 8), Operand(8, 8), 8, 8, 0, found), Tiling)
    else:
        assert found.all_bytes <= memory and found.as_dict(memory)["tiles"] == [*found.numbers]
        assert "times the lower bound" in found.explain(memory)
        assert found.bytes_read + found.bytes_written >= found.bound(memory) * (1 - 1e-12)


@pytest.mark.parametrize("grid", [(1, 1), (2, 3)])
def test_too_little_memory_says_how_much_is_needed(grid: tuple[int, int]) -> None:
    asked = (1000, 2000, 3000), grid, Operand(8, 8), Operand(8, 8), 8, 8, 0
    with pytest.raises(MemoryLimitError, match=r"no tile fits 1\.0 MiB of memory per rank: .* are needed") as raised:
        fitting(*asked, 1 << 20)
    needed = int(str(raised.value).split("(")[1].split()[0])
    fitting(*asked, needed)
    with pytest.raises(MemoryLimitError):
        fitting(*asked, needed - 100)


def test_chunks_that_do_not_fit_are_read_in_parts() -> None:
    chunk = Operand(8, 8, (1000, 1000), chunk=8_000_000)
    found = fitting((5000, 5000, 5000), (1, 1), chunk, chunk, 8, 8, 0, 50_000_000)
    assert found.a.unit == (1, 1)
    assert found.most_bytes <= 50_000_000
    whole = fitting((5000, 5000, 5000), (1, 1), chunk, chunk, 8, 8, 0, 200_000_000)
    assert all(first % 1000 == 0 for cuts in whole.cuts for first, _ in cuts)


@pytest.mark.parametrize(
    ("mnk", "counts", "factors"),
    [
        *pairs([(7, 11, 13), (40, 3, 60)], [(2, 3, 1), (3, 2, 4), (1, 1, 5)], [(1, 1, 1), (2, 1, 1), (2, 2, 3)]),
        *[(mnk, (1, 1, 1), (1, 1, 1)) for mnk in ((0, 5, 3), (4, 5, 0), (1, 1, 1))],
        *[((7, 11, 13), (7, 11, 13), (1, 1, 1)), ((40, 3, 200), (1, 3, 2), (1, 1, 1))],
    ],
)
def test_each_product_is_done_once_by_one_job_or_several(
    mnk: tuple[int, int, int], counts: tuple[int, int, int], factors: tuple[int, int, int]
) -> None:
    """Each ended after any step, and gone on with in smaller tiles; what they read is what they planned."""
    whole = Tiling(mnk, (2, 1), A, B, 4, 8, 2, counts)
    for ends in [(), *product(range(1, min(30, whole.count), 2), (1, 3, 1000))]:
        done = np.zeros(mnk, int)
        tiling, before = whole, counts
        for end in (*ends, 1 << 30):
            finished, parts, read, written, number = {*tiling.finished}, list[TilePart](), 0, 0, 0
            there, loads, complete = [((0, 0),) * 2] * 2, [0, 0], True  # the panels of A and B in memory
            for number, step in enumerate(tiling.steps(), 1):
                where = slice(*step.rows), slice(*step.cols), slice(*step.inner)
                (r0, r1), (c0, c1), (k0, k1) = step.rows, step.cols, step.inner
                assert all(y - x <= most for (x, y), most in zip((step.rows, step.cols, step.inner), tiling.largest))
                for x, panel in enumerate(((step.rows, step.inner), (step.inner, step.cols))):
                    assert step.reads[x] == ((number == 1 or panel != there[x]) and mnk[2] > 0)
                    there[x] = panel
                    loads[x] += step.reads[x]
                if step.part is not None:
                    assert step.first and step.part.holds(step.rows, step.cols)
                    assert (done[where[:2]].sum(axis=2) == step.part.done[1] - step.part.done[0]).all()
                elif step.first:
                    assert not done[where[:2]].any()
                assert step.first == complete  # a tile is complete before another one begins
                complete = step.last
                done[where] += 1
                read += step.reads[0] * 8 * (r1 - r0) * (k1 - k0) + step.reads[1] * 4 * (k1 - k0) * (c1 - c0)
                read += step.first * (4 if step.part else 2) * (r1 - r0) * (c1 - c0)
                assert (done[where[:2]].sum(axis=2) == step.done[1] - step.done[0]).all()
                if step.last:
                    assert (done[where[:2]] == 1).all() and step.done == (0, mnk[2])
                    finished.add(step.tile)
                    written += 8 * (r1 - r0) * (c1 - c0)
                if number == end:
                    now = [] if step.last else [TilePart(step.rows, step.cols, step.done, "")]
                    parts = now + waiting(tiling, finished | {step.tile})
                    break
            else:
                assert (done == 1).all()
                assert (read, written) == (tiling.bytes_read, tiling.bytes_written)
                assert tiling.count == number
                assert ends or (tuple(loads) == tiling.loads and tiling.numbers == tuple(map(len, tiling.cuts)))
                break
            before = tiling.counts
            smaller = tuple(x * y for x, y in zip(before, factors))
            tiling = replace(whole, counts=smaller).resumed(before, frozenset(finished), tuple(parts))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(5000, 300), (300, 4000), (777, 790)])
def test_plans_of_singular_values_read_each_row_once_and_fit(shape: tuple[int, int]) -> None:
    """Panels begin where the layout of the ranks repeats; for more memory wider blocks, at last triangles."""
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
